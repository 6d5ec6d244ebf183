"""entropy.py: logits -> log-probability and entropy of each token, and the token itself while sampling.

With z the logits over the temperature, m = max z, w = z - m <= 0:
    s = sum e^w,  a = sum e^w w          one pass: when m grows by D, a <- e^-D (a - D s), then s <- e^-D s
    log p_y = z_y - (m + log s)          p = e^w / s
    H = -sum p log p = log s - a / s     both terms are >= 0, so that nothing cancels

The two gradients need nothing but the log-sum-exp L = m + log s and H:
    d log p_y / dz_j = [j = y] - p_j          d H / dz_j = -p_j (log p_j + H)
Vocabulary tiles (L_k, H_k) join by the chain rule of entropy: L = logsumexp L_k, P_k = e^(L_k - L),
H = sum P_k (H_k - log P_k). So one pair of functions, statistics and gradient of a tile, serves every path.

Order below: torch reference, Triton kernels, dispatch on `is_cuda`, the two autograd functions, sampling.
Letters: T tokens, V vocabulary, d width of the hidden state, B rows that are being sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

FINITE = -1e30  # stands for a logit of -inf: its probability is 0 all the same, and 0 * FINITE is no NaN


def token_stats(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logits [T, V], targets [T] int64 -> (log-probability of the target [T], entropy [T]) in fp32, nats, of
    softmax(logits / temperature). Differentiable in the logits; float64 stays float64; -inf logits are fine."""
    return _TokenStats.apply(logits, targets, temperature)


def linear_token_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`token_stats(hidden @ weight.T, targets, temperature)` for hidden [T, d] and weight [V, d], one tile
    of logits at a time; backward recomputes the tile. Differentiable in both; gradients are accumulated in fp32."""
    return _LinearTokenStats.apply(hidden, weight, targets, temperature)


# ---------------------------------------------------------------- reference


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tile_stats(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [t, v], finite -> (log-sum-exp [t], entropy [t])."""
    m = z.amax(1, keepdim=True)
    w = z - m
    p = w.exp()
    s = p.sum(1)
    log_s = s.log()
    return m[:, 0] + log_s, log_s - p.mul_(w).sum(1) / s


def _tile_grad(z: Tensor, y: Tensor, lse: Tensor, H: Tensor, g_logp: Tensor, g_H: Tensor) -> Tensor:
    """Gradient [t, v] of sum(g_logp * log p_y + g_H * H), written over z. y outside of [0, v): no target here."""
    p = z.sub_(lse[:, None]).exp()
    z.mul_(g_H[:, None]).add_((g_logp + g_H * H)[:, None]).mul_(p).neg_()
    return z.scatter_add_(1, y.clamp(0, z.shape[1] - 1)[:, None], (g_logp * _inside(y, z))[:, None])


def _inside(y: Tensor, z: Tensor) -> Tensor:
    return (y >= 0) & (y < z.shape[1])


# ---------------------------------------------------------------- autograd


TILE = 512, 2048


def _spans(n: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        rows = max(1, TILE[0] * TILE[1] // logits.shape[1])
        parts = [_tile_stats(_scaled(logits[r], temperature)) for r in _spans(len(logits), rows)]
        lse, H = (torch.cat(x) for x in zip(*parts, strict=True))
        z_y = logits.gather(1, targets[:, None])[:, 0].to(lse.dtype) / temperature
        ctx.save_for_backward(logits, targets, lse, H)
        ctx.temperature, ctx.rows = temperature, rows
        return z_y - lse, H

    @staticmethod
    def backward(ctx, g_logp, g_H):
        logits, targets, lse, H = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for r in _spans(len(logits), ctx.rows):
            z = _scaled(logits[r], ctx.temperature)
            grad[r] = _tile_grad(z, targets[r], lse[r], H[r], g_logp[r], g_H[r]).div_(ctx.temperature)
        return grad, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return (logits.to(_work_dtype(logits)) / temperature).clamp_min_(FINITE)


class _LinearTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature):
        T, V, dtype = len(hidden), len(weight), _work_dtype(hidden)
        columns = _spans(V, TILE[1])
        lse_k, H_k = hidden.new_empty(2, len(columns), T, dtype=dtype)
        z_y = hidden.new_zeros(T, dtype=dtype)
        for k, c in enumerate(columns):
            W = weight[c].to(dtype)
            for r in _spans(T, TILE[0]):
                z = (hidden[r].to(dtype) @ W.t()).div_(temperature)
                y = targets[r] - c.start
                picked = z.gather(1, y.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
                z_y[r] = torch.where(_inside(y, z), picked, z_y[r])
                lse_k[k, r], H_k[k, r] = _tile_stats(z)
        lse = lse_k.logsumexp(0)
        log_P = lse_k - lse
        H = (log_P.exp() * (H_k - log_P)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, lse, H)
        ctx.temperature = temperature
        return z_y - lse, H

    @staticmethod
    def backward(ctx, g_logp, g_H):
        hidden, weight, targets, lse, H = ctx.saved_tensors
        T, V, dtype = len(hidden), len(weight), _work_dtype(hidden)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        for c in _spans(V, TILE[1]):
            W = weight[c].to(dtype)
            d_W = torch.zeros_like(W) if needs_weight else None
            for r in _spans(T, TILE[0]):
                h = hidden[r].to(dtype)
                z = (h @ W.t()).div_(ctx.temperature)
                dz = _tile_grad(z, targets[r] - c.start, lse[r], H[r], g_logp[r], g_H[r])
                dz.div_(ctx.temperature)
                if needs_hidden:
                    d_hidden[r].addmm_(dz, W)
                if needs_weight:
                    d_W.addmm_(dz.t(), h)
            if needs_weight:
                d_weight[c] = d_W
        return d_hidden.to(hidden.dtype) if needs_hidden else None, d_weight, None, None


# ---------------------------------------------------------------- sampling


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys (int32) of each (seed, position), by a 64-bit multiply-xorshift hash."""
    x = seeds * 0x1E3779B97F4A7C15 + positions * 0x5851F42D4C957F2D
    x = (x ^ (x >> 32 & 0xFFFFFFFF)) * 0x2127599BF4325C37
    x = (x ^ (x >> 29 & 0x7FFFFFFFF)) * 0x369DEA0F31A53F85
    return (x & 0xFFFFFFFF), (x >> 32 & 0xFFFFFFFF)


def _hash32(x: Tensor, multiplier: int | Tensor) -> Tensor:
    """A multiply-xorshift round on int32 with wraparound; the shift is logical."""
    x = x * multiplier
    return (x ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D


def sample(
    logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from softmax(logits / temperature) in each row, by Gumbel-max.

    logits [B, V] (-inf allowed), seeds and positions [B] int64 -> (token [B] int64, its log-probability
    and the entropy [B] fp32, in nats). The noise is a hash of (seed, position, vocabulary index), so that a
    row's token depends on nothing else in the batch. Temperature 0: the largest logit, the statistics at 1.
    Not differentiable; nothing is synchronised with the host."""
    z = _scaled(logits.detach(), temperature or 1.0)
    lse, H = _tile_stats(z)
    score = z
    if temperature > 0:
        k0, k1 = (k.to(torch.int32)[:, None] for k in _row_keys(seeds, positions))
        index = torch.arange(z.shape[1], dtype=torch.int32, device=z.device)
        x = _hash32((_hash32(index, 0x297A2D39) ^ k0), k1 | 1)
        u = (x & 0x7FFFFFFF | 1).to(z.dtype) * (0xFFFFFF * 2.0**-55)  # in (0, 1); below 1 even after rounding
        score = (z - lse[:, None]).exp_().div_(torch.log1p(-u).neg_())  # argmax p / E, E ~ Exp(1): Gumbel-max
    token = score.argmax(1)
    return token, z.gather(1, token[:, None])[:, 0] - lse, H
