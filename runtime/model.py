"""model.py: what R³ needs of a Hugging Face causal LM: load it, write its prompts, read and score its responses.

    model, tokenizer = load("data/tiny/model", device="cpu", dtype=torch.float32)
    prompt_ids = chat_prompt(tokenizer, "Compute 3+4.")
    logprob, entropy = token_logprobs(model, [(prompt_ids, response_ids)], temperature=1.0)

Sequences are packed: all tokens of a micro-batch lie one after another in one row of T tokens, positions restart at
each sequence, and attention stays within it (attention.py). So matrix products see no padding.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from entropy import linear_token_stats
from runtime.attention import Packing, attention, attention_shape
from runtime.errors import UserError

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()  # what its warnings are about, `load` checks

Pair = tuple[Sequence[int], Sequence[int]]  # (prompt ids, response ids)
THINKING_TAGS = "<think>", "</think>"


# ----------------------------------------------------------------------------------------------------- loading


def load(name: str, device: str | torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """A causal LM in eval mode and its tokenizer, from a folder or a hub name.

    Raises UserError where the folder or the hub name is missing or damaged, the model is no causal LM, tokenizer and
    embedding do not fit, no token ends a sequence, or the model cannot be scored by `token_logprobs`.
    """
    folder = Path(name)
    if not folder.exists() and (name.count("/") != 1 or name.startswith((".", "/", "~")) or folder.parent.is_dir()):
        siblings = [str(p) for p in folder.parent.glob("*")] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(name, siblings, n=1)
        raise UserError(f"model {name!r}: no such folder" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"model {name!r}: the folder has no config.json, so it is no Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        if "eos_token_id" not in config.get_config_dict(name)[0]:
            config.eos_token_id = None  # the default of a Llama, say, is the id of another token here
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
        )
    except Exception as error:  # transformers and safetensors raise many kinds; each of them is about this folder
        what = str(error).strip().split("\n")[0][:300]
        if "trust_remote_code" in str(error):
            what = "it brings code of its own, which runs only with trust_remote_code = true"
        raise UserError(f"model {name!r}: it cannot be loaded: {type(error).__name__}: {what}") from error
    wrong = sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"])
    if wrong:
        raise UserError(f"model {name!r}: {len(wrong)} tensors missing or of another shape, {wrong[0]} among them")
    if not tokenizer.encode("1+1=2", add_special_tokens=False):
        raise UserError(f"model {name!r}: its tokenizer knows no text; is tokenizer.json missing?")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(f"model {name!r}: the tokenizer has {len(tokenizer)} tokens, the embedding only {rows}")
    if not (eos := sorted(eos_ids(model, tokenizer))):
        raise UserError(f"model {name!r}: found no EOS token in generation_config.json, config.json or the tokenizer")
    if eos[0] < 0 or eos[-1] >= rows:
        raise UserError(f"model {name!r}: found the EOS ids {eos}, allowed: 0 to {rows - 1}")
    model = model.to(device).eval()
    if model.device.type == "cpu":
        for p in model.parameters():
            p.data = p.data.clone()  # out of the mapped file: aligned alike for any file, so a resume has the same bits
    attention_shape(model, max_len=1)
    check_head(model, name)
    return model, tokenizer


def positions(model: PreTrainedModel) -> int:
    """How many tokens the model sees at once, prompt and response together; a sliding window ends them, too."""
    config, limits = model.config, ["max_position_embeddings"]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append("sliding_window")
    return min(getattr(config, name, None) or sys.maxsize for name in limits)


def eos_ids(model: PreTrainedModel, tokenizer) -> set[int]:
    """Every id that ends a response: those of generation_config (a list at times), config and tokenizer."""
    found = [getattr(of, "eos_token_id", None) for of in (model.generation_config, model.config, tokenizer)]
    flat = [i for ids in found for i in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return {int(i) for i in flat if i is not None}


@torch.no_grad()
def check_head(model: PreTrainedModel, name: str) -> None:
    """Refuses a model whose logits are not hidden @ head.T: a bias, scaled or soft-capped logits.

    The product and what the model does with it are computed in fp32, whatever the dtype of the weights.
    """
    head, seen = model.get_output_embeddings(), {}
    settings = "logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping"
    values = {key: getattr(model.config, key, None) for key in settings}
    place, changes = "after", [f"{key} = {value}" for key, value in values.items() if value not in (None, 1)]
    if type(head) is not nn.Linear:
        changes.append(f"a head of the class {type(head).__name__}")
    elif head.bias is not None:
        changes.append("a bias of the head")
    if not changes:

        def product(module, args, output):
            seen["input"], seen["logits"] = args[0], F.linear(args[0].float(), module.weight.float())
            return seen["logits"]

        ids = torch.arange(3, 7, device=model.device)[None]
        hidden, hook = model.base_model(input_ids=ids, use_cache=False)[0], head.register_forward_hook(product)
        try:
            logits = model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        if not logits.isfinite().all():
            raise UserError(f"model {name!r}: its logits are not finite, so its weights are damaged")
        for where, ours, theirs in (("before", hidden, seen["input"]), ("after", seen["logits"], logits)):
            if ours.shape != theirs.shape or (ours - theirs).abs().max() > 1e-4 * ours.abs().max():
                place, changes = where, ["in its code"]
    if changes:
        found = f"{type(model).__name__} changes its logits {place} the head: {', '.join(changes)}"
        allowed = "models whose logits are hidden @ head.T, such as Qwen2, Qwen3, Llama, Mistral"
        raise UserError(f"model {name!r}: {found}; allowed: {allowed}")


# ----------------------------------------------------------------------------------------- prompts and responses


def chat_prompt(tokenizer, user: str, system: str = "") -> list[int]:
    """The ids of one user turn in the model's own chat template, up to where the assistant begins.

    A special token in `user` or `system` is encoded as the text that it is. UserError without a chat template.
    """
    if not tokenizer.chat_template:
        raise UserError(f"model {tokenizer.name_or_path!r}: its tokenizer has no chat template; add one to the folder")
    turns = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": user}]
    options = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
    try:
        return list(tokenizer.apply_chat_template(turns, **options))
    except TemplateError as error:  # bad syntax, or a turn that the template refuses, such as a system prompt
        raise UserError(f"model {tokenizer.name_or_path!r}: its chat template fails: {error}") from error


def decode(tokenizer, ids: Sequence[int]) -> str:
    """The text of a response: without special tokens, EOS among them, but with the tags around its thinking."""
    added = tokenizer.added_tokens_decoder.items()
    left_out = {i for i, token in added if token.special and token.content not in THINKING_TAGS}
    return tokenizer.decode([i for i in ids if i not in left_out])


# --------------------------------------------------------------------------------- scoring given responses


def pack(pairs: Sequence[Pair], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Packing]:
    """Packs (prompt, response) pairs: ids [1, T], positions [1, T], index [N], targets [N], packing.

    The last response token predicts nothing and is left out of the input. `index` are the positions whose hidden states
    predict the N response tokens `targets`, EOS included: the mask is made here alone, from lengths.
    """
    ids, index, targets, lengths = [], [], [], []
    for prompt, response in pairs:
        assert len(prompt) and len(response), f"empty prompt or response: {len(prompt)}, {len(response)} tokens"
        length = len(prompt) + len(response) - 1
        index.extend(range(len(ids) + len(prompt) - 1, len(ids) + length))
        ids.extend(prompt)
        ids.extend(response[:-1])
        lengths.append(len(prompt) + len(response) - 1)
        targets.extend(response)
    ids, index, targets = (torch.tensor(x).to(device, non_blocking=True) for x in (ids, index, targets))
    packing = Packing(lengths, device)
    return ids[None], packing.positions[None], index, targets, packing


def token_logprobs(model: PreTrainedModel, pairs: Sequence[Pair], temperature: float) -> tuple[Tensor, Tensor]:
    """log pi(token) and entropy in nats of each response token, at the sampling temperature, with dropout off.

    pairs: (prompt ids, response ids); returns two fp32 tensors [N], response after response. Differentiable.
    Without pairs N is 0, and the pass takes place all the same: ranks of a sharded model must not part.
    """
    device = model.get_input_embeddings().weight.device
    packed = pack(pairs or [((0,), (0,))], device)
    with attention(model):
        stats = getattr(model, "score", functools.partial(score, model))(*packed, temperature)
    return stats if pairs else tuple(x[:0] for x in stats)


def score(model: PreTrainedModel, ids, positions, index, targets, packing, temperature) -> tuple[Tensor, Tensor]:
    """The forward pass of `token_logprobs` on packed sequences; a sharded model gathers its weights around it."""
    options = {"use_cache": False, "packed": packing}
    hidden = model.base_model(input_ids=ids, position_ids=positions, **options).last_hidden_state
    hidden = hidden[0].index_select(0, index)  # (N, d)
    return linear_token_stats(hidden, model.get_output_embeddings().weight, targets, temperature)


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of sequences, alike in length, in batches of at most `token_budget` tokens (a longer one goes alone).

    The budget counts padded tokens, so it also bounds the attention's own padding.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
