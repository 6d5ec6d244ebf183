"""optimizer.py: one optimiser step over micro-batches and ranks, and what can go wrong in it.

    metrics = optimizer_step(run, examples, add_gradient)

Out of memory: the gradient is computed again with half the token budget. Nothing to train on, or a loss or gradient
that is not finite: the step is skipped and counted. Left out: the loss, which is r3.py's.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence

import torch

from runtime.errors import UserError
from runtime.model import micro_batches
from runtime.ranks import Ranks, free_memory
from runtime.sharding import full

NAMES = ("loss", "kl", "clip_fraction", "ratio_replayed", "logp_gap", "logp_gap_max")  # the last is no sum
MOST_BAD_STEPS = 10  # in a row; then the run ends


def adamw(policy, c) -> torch.optim.AdamW:
    """AdamW with its moments in place, so that the memory that is free stays free, and a checkpoint can fill them."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=c.lr, weight_decay=c.weight_decay, fused=True)
    for p in policy.parameters():
        if p.requires_grad:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), device=p.device)} | moments
    return optimizer


def optimizer_step(run, examples: Sequence, add_gradient: Callable) -> dict[str, tuple[float, float]]:
    """One step on the examples of this rank and those of the others. Returns name -> (sum, weight) of this rank.

    add_gradient(micro-batch) adds to the parameters' `.grad` and returns name -> (sum, weight) for each of NAMES.
    """
    c, parameters = run.config, [p for p in run.policy.parameters() if p.requires_grad]
    if run.ranks.device.type == "cuda":
        run.sampler.release()  # the update needs the cache's memory
    between_steps = not run.checkpointable  # of the same batch: the gradient must not be abandoned
    with contextlib.nullcontext() if between_steps else run.signals.interruptible(collective=True):
        sums = gradient(run, examples, add_gradient)
    skipped = dict.fromkeys((*NAMES, "grad_norm"), (0.0, 0.0)) | {"skipped": (1.0, 1.0)}
    if not run.ranks.sum([len(examples)])[0]:  # no gradient, and no weight decay either
        return skipped
    norm = full(torch.nn.utils.clip_grad_norm_(parameters, c.grad_clip)).item()
    (loss,) = run.ranks.sum([sums["loss"][0]])
    if not (math.isfinite(loss) and math.isfinite(norm)):
        run.bad_steps += 1
        uids = ", ".join(sorted({e.uid for e in examples}))
        print(f"\nloss {loss}, gradient norm {norm}: step skipped; its queries: {uids}", file=sys.stderr)
        if run.bad_steps >= MOST_BAD_STEPS:
            raise UserError(f"lr = {c.lr}: ten steps in a row had no finite loss and gradient; try a smaller one")
        return skipped
    run.bad_steps, run.checkpointable = 0, False
    run.optimizer.step()
    largest = run.ranks.max(sums["logp_gap_max"][0])
    return sums | {"loss": (loss, 1.0), "grad_norm": (norm, 1.0), "skipped": (0.0, 1.0), "logp_gap_max": (largest, 1.0)}


def equal_batches(ranks: Ranks, lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """The micro-batches of this rank, as many as the rank with the most has: in each of them all ranks take part."""
    batches = micro_batches(lengths, token_budget)
    return batches + [[]] * (int(ranks.max(len(batches))) - len(batches))


def gradient(run, examples: Sequence, add_gradient: Callable) -> dict[str, tuple[float, float]]:
    """The gradient over `examples`, in the parameters' `.grad`, and the sums that `add_gradient` returned.

    Out of memory: from the beginning with half the token budget, for the micro-batch that failed has added a part;
    not with several ranks, of which the others wait for this micro-batch.
    """
    lengths = [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    whole = run.config.token_budget
    for token_budget in (whole, whole // 2) if run.ranks.size == 1 else (whole,):
        run.optimizer.zero_grad(set_to_none=True)
        values = torch.zeros(len(NAMES), dtype=torch.float64, device=run.ranks.device)
        weights = torch.zeros(len(NAMES), dtype=torch.float64)
        try:
            for batch in equal_batches(run.ranks, lengths, token_budget):
                sums = add_gradient([examples[i] for i in batch])
                largest = torch.maximum(values[-1], sums["logp_gap_max"][0].double())
                values += torch.stack([sums[name][0].double() for name in NAMES])
                values[-1] = largest
                weights += torch.tensor([float(sums[name][1]) for name in NAMES])
            return dict(zip(NAMES, zip(values.tolist(), weights.tolist(), strict=True), strict=True))
        except torch.OutOfMemoryError:
            print(f"\nout of memory in a micro-batch of at most {token_budget} tokens", file=sys.stderr)
        free_memory(run.ranks.device)
    halved = ", with half of it too" if run.ranks.size == 1 else ""
    raise UserError(
        f"token_budget = {run.config.token_budget}: out of memory{halved}; allowed: a smaller "
        "token_budget, max_new_tokens or slots, or gradient_checkpointing = true"
    )
