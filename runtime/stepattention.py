"""stepattention.py: how much the steps of a response attend to each other, in every layer and head, while it is scored.

    score_steps(model, [ids], [starts], see)       # calls see(sequence, layer, M) with M [H, S, S] after each layer

A step is a run of tokens; `starts` has the first token of each, 0 first. With A [T, T] the softmaxed causal attention
of a head and W [S, T] the matrix that averages over the tokens of each step, M = W A W^T. A is computed for a block of
queries at a time, so that [H, block, T] of it is in memory, and the attention's output comes from the same block.
Left out: what M is for, which is attnrl.py's.
Letters: T tokens, S steps, H query heads, K key/value heads, D head size, b queries of a block, t keys before its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention import Packing, attention
from runtime.model import score

BLOCK = 64  # queries; the result does not depend on it
See = Callable[[int, int, Tensor], None]


def step_attention(q, k, v, scale: float, starts: Sequence[int], block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k and v [T, K, D] -> the causal attention's output [T, H, D], and M [H, S, S] in fp32.

    M[h, i, j]: the attention of a token of step i to a token of step j, mean over the tokens of both; 0 for j > i.
    """
    T, H, S, dtype = *q.shape[:2], len(starts), v.dtype
    q, k, v = (x.float().repeat_interleave(H // x.shape[1], 1).transpose(0, 1).contiguous() for x in (q * scale, k, v))
    bounds = torch.tensor([*starts, T], device=q.device)
    sizes = bounds.diff()  # (S,)
    step = torch.repeat_interleave(torch.arange(S, device=q.device), sizes, output_size=T)  # (T,)
    steps, future = step.tolist(), torch.full((block, block), -torch.inf, device=q.device).triu_(1)
    M, out = q.new_zeros(H, S, S), []
    for begin in range(0, T, block):
        t = min(begin + block, T)
        A = q[:, begin:t] @ k[:, :t].transpose(1, 2)  # (H, b, t)
        A[:, :, begin:] += future[: t - begin, : t - begin]
        A = A.softmax(-1)
        out.append(A @ v[:, :t])
        first, last = steps[begin], steps[t - 1] + 1  # the steps of these queries
        mine = step[begin:t] == torch.arange(first, last, device=q.device)[:, None]  # (steps, b)
        rows = (mine / sizes[first:last, None]) @ A  # what these queries add to W A
        sums = F.pad(rows.cumsum(-1), (1, 0))[:, :, bounds[: last + 1].clamp(max=t)].diff()
        M[:, first:last, :last] += sums / sizes[:last]
    return torch.cat(out, 1).transpose(0, 1).to(dtype), M


class StepPacking(Packing):
    """A Packing whose attention shows `see(sequence, layer, M)` the averages between the steps of each sequence."""

    def __init__(self, lengths, device, starts: Sequence[Sequence[int]], see: See, block: int = BLOCK):
        super().__init__(lengths, device)
        self.lengths, self.starts, self.see, self.block = list(lengths), starts, see, block

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        parts, outputs = (x.split(self.lengths) for x in (q, k, v)), []
        for i, (q_i, k_i, v_i) in enumerate(zip(*parts, strict=True)):
            output, M = step_attention(q_i, k_i, v_i, scale, self.starts[i], self.block)
            self.see(i, layer, M)
            outputs.append(output)
        return torch.cat(outputs)


@torch.no_grad()
def score_steps(model, sequences: Sequence[Sequence[int]], starts, see: See, block: int = BLOCK) -> None:
    """One forward pass over the packed sequences, without the head, for what `see` is shown.

    Without sequences the pass takes place all the same: ranks of a sharded model must not part.
    """
    if not sequences:
        sequences, starts, see = [(0,)], [(0,)], lambda *_: None
    device = model.get_input_embeddings().weight.device
    packing = StepPacking([len(ids) for ids in sequences], device, starts, see, block)
    ids = torch.tensor([i for s in sequences for i in s], device=device)
    none = ids[:0]  # no position goes through the head
    with attention(model):
        forward = getattr(model, "score", functools.partial(score, model))
        forward(ids[None], packing.positions[None], none, none, packing, 1.0)
