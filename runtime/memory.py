"""memory.py: whether a run fits its cards, before it begins. Left out: how that was measured (bench/memory.py).

    needed(config, shape, parameters, ranks=8, slots=64, longest=10432)     # {"sampling": bytes, "update": bytes}
    most_slots(config, policy, ranks, longest=10432)                        # for slots: null
    refuse(config, policy, sampler, ranks)                                  # UserError where the card is too small

A formula with two fitted numbers; tests/test_rehearse.py holds it to 5 % of what the run's own code takes under fake
tensors. T tokens per pass, P parameters, d width, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

import torch

from runtime.errors import UserError
from runtime.ranks import Ranks

OUTSIDE = 1_500_000_000  # CUDA context, NCCL's buffers, cuBLAS's workspace: assumed
MOST = 0.9  # share of a card that a plan may take; the rest is for fragmentation
PREFILL_TOKENS = 16384  # rollout.py's
HELPS = {
    "sampling": "slots, max_new_tokens or reflection_tokens",
    "update": "token_budget, max_new_tokens or minibatches, or gradient_checkpointing = true, beta = 0",
}


def needed(c, shape, parameters: int, ranks: int, slots: int, longest: int) -> dict[str, int]:
    """Bytes on a card at most, by phase, in bf16. shape: the model's Hugging Face config; longest: tokens of the
    longest prompt and response together."""
    P, d, I, V = parameters, shape.hidden_size, shape.intermediate_size, shape.vocab_size  # noqa: E741
    layers, T = shape.num_hidden_layers, max(c.token_budget, longest)
    size = getattr(shape, "head_dim", None) or d // shape.num_attention_heads
    position = 4 * layers * shape.num_key_value_heads * size  # keys and values of a token
    lasting = OUTSIDE + 12 * P // ranks + 2 * P + (2 * P // ranks if c.beta else 0)  # weights, moments, sampler
    block = T * (10 * I + 52 * d)  # activations of a block, fitted
    kept = layers * 2 * T * d + block if c.gradient_checkpointing else layers * block
    gathered = 6 * V * d + 12 * (P - 2 * V * d) // layers  # embedding, head and its gradient; a block and the next
    cache = slots * longest * position + PREFILL_TOKENS * (position + 6 * I + 4 * d)
    return {"sampling": lasting + cache, "update": lasting + 4 * P // ranks + kept + gathered}


def most_slots(c, policy, ranks: Ranks, longest: int) -> int:
    """The most slots that help: a step's responses on this rank; on a card, no more than the plan has room for."""
    responses = c.batch_size * c.group_size // ranks.size * (2 if c.reflect else 1)
    if ranks.device.type == "cpu":
        return responses
    empty, one = (
        needed(c, policy.config, sum(p.numel() for p in policy.parameters()), ranks.size, slots, longest)["sampling"]
        for slots in (0, 1)
    )
    return max(1, min(responses, int(MOST * card_bytes(ranks.device) - empty) // (one - empty)))


def card_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1]


def refuse(c, policy, sampler, ranks: Ranks) -> None:
    """Raises UserError where a phase would take more than nine tenths of the card; nothing without CUDA."""
    if ranks.device.type != "cuda":
        return
    card, parameters = card_bytes(ranks.device), sum(p.numel() for p in policy.parameters())
    for phase, size in needed(c, policy.config, parameters, ranks.size, sampler.slots, sampler.max_len).items():
        if size > MOST * card:
            raise UserError(
                f"{phase} needs {size / 1e9:.1f} GB, allowed: {MOST * card / 1e9:.1f} of a card of {card / 1e9:.1f}; "
                f"what helps: less {HELPS[phase]}, or more ranks"
            )
