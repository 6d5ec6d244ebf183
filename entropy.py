"""entropy.py: logits -> log-probability and entropy of each token, and the token itself while sampling.

With z the logits over the temperature, m = max z, w = z - m <= 0:
    s = sum e^w,  a = sum e^w w          in one pass: when m grows by D, a <- e^-D (a - D s), then s <- e^-D s
    L = m + log s,  log p_y = z_y - L    and p = e^w / s
    H = -sum p log p = log s - a / s     two terms >= 0: nothing cancels, whatever the size of the logits

The gradients need L and H alone:  d log p_y / dz_j = [j = y] - p_j,  d H / dz_j = -p_j (log p_j + H).  Tiles k of
the vocabulary join by the chain rule of entropy:  P_k = e^(L_k - L),  H = sum P_k (H_k - log P_k).  So there are
three functions of a tile, `stats`, `grad` and `sample`, each in torch and in Triton, and all else is loops.
Exponentials are taken in base 2, which is the fast one on GPUs and in torch's CPU code alike.

Letters: T tokens, V vocabulary, d width of the hidden state, B rows being sampled, y target, g_ upstream gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:  # an installed Triton that cannot be imported is a fault to be seen
    if error.name != "triton":
        raise
    triton = None

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
FINITE = -1e30  # in place of -inf: the probability is 0 just the same, and 0 * FINITE is not NaN

# ---------------------------------------------------------------- noise: the same code in torch and in Triton


def _row_keys(seed, position):
    """(seed, position), int64 -> two hashes whose low 32 bits are the keys of the row. Arithmetic wraps around."""
    x = seed * 0x1E3779B97F4A7C15 + position * 0x5851F42D4C957F2D
    x = (x ^ (x >> 32 & 0xFFFFFFFF)) * 0x2127599BF4325C37
    x = (x ^ (x >> 29 & 0x7FFFFFFFF)) * 0x369DEA0F31A53F85
    return x ^ (x >> 32 & 0xFFFFFFFF), (x >> 32) | 1


def _bits(index, key, odd):
    """31 random bits, the lowest one set, of the vocabulary `index` in the row with these keys; all int32."""
    x = index * 0x297A2D39
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D
    x = (x ^ key) * odd
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D
    return x & 0x7FFFFFFF | 1


UNIT = 0xFFFFFF * 2.0**-55  # makes them a number in (0, 1): below 1 even where fp32 rounds the 31 bits up

# ---------------------------------------------------------------- reference

CHUNK = 1 << 18  # elements at a time, so that the passes over them find them in the cache


def _spans(n: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def _rows(logits: Tensor) -> list[slice]:
    return _spans(len(logits), max(1, CHUNK // logits.shape[1]))


def _work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _at_target(y: Tensor, v: int) -> tuple[Tensor, Tensor]:
    """Whether y is a column of this tile of v columns [t], and the column [t, 1] (any, where it is not)."""
    return (y >= 0) & (y < v), y.clamp(0, v - 1)[:, None]


def _shifted(z: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """m [t] in nats and w [t, v] in base 2."""
    m = z.amax(1, keepdim=True)
    return m[:, 0] / temperature, (z - m).mul_(LOG2E / temperature).clamp_min_(FINITE)


def _stats_torch(logits: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Tile of logits [t, v], targets y [t] -> [3, t]: L, H, and z_y or 0 where y is outside of [0, v)."""
    out = logits.new_empty(3, len(logits), dtype=_work_dtype(logits))
    for r in _rows(logits):
        m, w = _shifted(logits[r].to(out.dtype), temperature)
        e = w.exp2()
        s = e.sum(1)
        out[0, r] = m + s.log()
        out[1, r] = s.log() - w.mul_(e).sum(1) * LN2 / s
    inside, column = _at_target(y, logits.shape[1])
    out[2] = torch.where(inside, logits.gather(1, column)[:, 0].to(out.dtype) / temperature, 0)
    return out


def _grad_torch(
    logits: Tensor, y: Tensor, L: Tensor, H: Tensor, g_logp: Tensor, g_H: Tensor, temperature: float, out: Tensor
) -> Tensor:
    """Gradient of sum(g_logp log p_y + g_H H) -> out [t, v], in out's dtype; out may be the tile of logits itself."""
    inside, column = _at_target(y, logits.shape[1])
    g_y = (g_logp * inside / temperature)[:, None]
    slope, offset = -LN2 / temperature * g_H[:, None], (g_logp + g_H * H)[:, None] / temperature
    for r in _rows(logits):
        log_p = (logits[r].to(L.dtype) * (LOG2E / temperature)).sub_(L[r, None] * LOG2E).clamp_min_(FINITE)
        p = log_p.exp2()
        out[r] = log_p.mul_(slope[r]).sub_(offset[r]).mul_(p).scatter_add_(1, column[r], g_y[r])
    return out


def _sample_torch(logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Gumbel-max, as the race that it is: the first of the exponential clocks E_j / p_j. -> token [B], [2, B]."""
    token, out = torch.empty_like(seeds), logits.new_empty(2, len(logits), dtype=_work_dtype(logits))
    keys = torch.stack(_row_keys(seeds, positions)).to(torch.int32)[:, :, None]
    index = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    for r in _rows(logits):
        _, w = _shifted(logits[r].to(out.dtype), temperature or 1.0)
        e = w.exp2()
        s = e.sum(1)
        if temperature > 0:
            clock = _bits(index, keys[0, r], keys[1, r]).to(w.dtype).mul_(-UNIT).log1p_()  # -E, exact near 0
            token[r] = torch.div(e, clock, out=clock).argmin(1)
        else:
            token[r] = w.argmax(1)
        out[0, r] = w.gather(1, token[r, None])[:, 0] * LN2 - s.log()
        out[1, r] = s.log() - w.mul_(e).sum(1) * LN2 / s
    return token, out


# ---------------------------------------------------------------- kernels: a row is read once, in blocks

if triton is not None:
    _LOG2E, _LN2, _FINITE, _UNIT = (tl.constexpr(x) for x in (LOG2E, LN2, FINITE, UNIT))
    _row_keys_kernel, _bits_kernel = triton.jit(_row_keys), triton.jit(_bits)

    @triton.jit
    def _load(row, columns, stride, V, scale):
        z = tl.load(row + columns.to(tl.int64) * stride, mask=columns < V, other=-float("inf")).to(tl.float32)
        return tl.where(z == -float("inf"), _FINITE, z * scale)  # keeps NaN, unlike a maximum

    @triton.jit
    def _fold(z, m, s, a):
        """A block of z into m, s and a, all in base 2: the first line of the derivation."""
        grown = tl.maximum(m, tl.max(z, 0))
        w = z - grown
        e = tl.exp2(w)
        D = grown - m
        a = tl.exp2(-D) * (a - D * s) + tl.sum(e * w, 0)
        s = tl.exp2(-D) * s + tl.sum(e, 0)
        return grown, s, a

    @triton.jit
    def _stats_kernel(logits, y, out, stride, column_stride, T, V, scale, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)  # axis 0 takes 2^31 - 1 programs, the others 65,535
        logits += row * stride
        m, s, a = tl.full((), _FINITE, tl.float32), tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
        for start in range(0, V, BLOCK):
            m, s, a = _fold(_load(logits, start + tl.arange(0, BLOCK), column_stride, V, scale), m, s, a)
        target = tl.load(y + row)
        inside = (target >= 0) & (target < V)
        z_y = tl.load(logits + target * column_stride, mask=inside, other=0).to(tl.float32)
        tl.store(out + row, (m + tl.log2(s)) * _LN2)
        tl.store(out + T + row, (tl.log2(s) - a / s) * _LN2)
        tl.store(out + 2 * T + row, z_y * scale * _LN2)

    @triton.jit
    def _grad_kernel(
        logits, y, L, H, g_logp, g_H, out, stride, column_stride, out_stride, V, n_blocks, scale,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) // n_blocks
        columns = tl.program_id(0) % n_blocks * BLOCK + tl.arange(0, BLOCK)
        log_p = _load(logits + row * stride, columns, column_stride, V, scale) - tl.load(L + row) * _LOG2E
        g_y, g = tl.load(g_logp + row), tl.load(g_H + row)
        grad = tl.where(columns == tl.load(y + row), g_y, 0.0)
        grad -= tl.exp2(log_p) * (g_y + g * (log_p * _LN2 + tl.load(H + row)))
        tl.store(out + row * out_stride + columns, grad * (scale * _LN2), mask=columns < V)

    @triton.jit
    def _sample_kernel(
        logits, seeds, positions, token, out, stride, column_stride, B, V, scale,
        GREEDY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        key, odd = _row_keys_kernel(tl.load(seeds + row), tl.load(positions + row))
        m, s, a = tl.full((), _FINITE, tl.float32), tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
        best, winner = tl.full((BLOCK,), -float("inf"), tl.float32), tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z = _load(logits, columns, column_stride, V, scale)
            m, s, a = _fold(z, m, s, a)
            if not GREEDY:
                u = _bits_kernel(columns, key.to(tl.int32), odd.to(tl.int32)).to(tl.float32) * _UNIT
                series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))  # where 1 - u would lose its digits
                z -= tl.log2(tl.where(u < 1 / 64, series, -tl.log(1 - u)))
            winner = tl.where(z > best, columns, winner)
            best = tl.maximum(best, z)
        first = tl.min(tl.where(best == tl.max(best, 0), winner, V), 0)
        z_token = tl.load(logits + first.to(tl.int64) * column_stride, mask=first < V, other=0).to(tl.float32)
        tl.store(token + row, first.to(tl.int64))
        tl.store(out + row, (z_token * scale - m - tl.log2(s)) * _LN2)
        tl.store(out + B + row, (tl.log2(s) - a / s) * _LN2)


def _launch(kernel, programs: int, V: int, *args, **constants) -> None:
    with torch.cuda.device_of(args[0]):
        kernel[(programs,)](*args, BLOCK=_block(V), num_warps=8, **constants)


def _block(V: int) -> int:
    return min(4096, triton.next_power_of_2(V))


def _stats_triton(logits: Tensor, y: Tensor, temperature: float) -> Tensor:
    (T, V), out = logits.shape, logits.new_empty(3, len(logits), dtype=torch.float32)
    _launch(_stats_kernel, T, V, logits, y, out, *logits.stride(), T, V, LOG2E / temperature)
    return out


def _grad_triton(logits, y, L, H, g_logp, g_H, temperature, out):
    (T, V), blocks = logits.shape, triton.cdiv(logits.shape[1], _block(logits.shape[1]))
    args = logits, y, L, H, g_logp, g_H, out, *logits.stride(), out.stride(0), V, blocks, LOG2E / temperature
    _launch(_grad_kernel, T * blocks, V, *args)
    return out


def _sample_triton(logits, temperature, seeds, positions):
    (B, V), token = logits.shape, torch.empty_like(seeds)
    out = logits.new_empty(2, B, dtype=torch.float32)
    args = logits, seeds, positions, token, out, *logits.stride(), B, V, LOG2E / (temperature or 1.0)
    _launch(_sample_kernel, B, V, *args, GREEDY=temperature == 0)
    return token, out


# ---------------------------------------------------------------- dispatch


def _fused(x: Tensor) -> bool:
    return x.is_cuda and triton is not None and x.dtype != torch.float64


def _stats(logits: Tensor, *args) -> Tensor:
    return (_stats_triton if _fused(logits) else _stats_torch)(logits, *args)


def _grad(logits: Tensor, *args) -> Tensor:
    return (_grad_triton if _fused(logits) else _grad_torch)(logits, *args)


def sample(
    logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from softmax(logits / temperature) in each row, by Gumbel-max.

    logits [B, V] (-inf where a token is excluded), seeds and positions [B] int64 -> (token [B] int64, its
    log-probability [B] fp32, entropy [B] fp32, both in nats). The noise is a hash of (seed, position, vocabulary
    index): the same whatever else is in the batch, on CPU and on CUDA. Temperature 0 takes the largest logit and
    reports the distribution at 1. Not differentiable; nothing waits for the device, so CUDA graphs can hold it."""
    run = _sample_triton if _fused(logits) else _sample_torch
    token, (logp, H) = run(logits.detach(), temperature, seeds.contiguous(), positions.contiguous())
    return token, logp, H


def token_stats(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logits [T, V], targets [T] int64 -> (log-probability of the target [T], entropy [T]) of
    softmax(logits / temperature), fp32, in nats; float64 logits give float64. Differentiable in the logits, of which
    any but all in a row may be -inf. A target outside of [0, V) gives NaN."""
    return _TokenStats.apply(logits, targets.contiguous(), temperature)


def linear_token_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, tile_mb: float | None = None
) -> tuple[Tensor, Tensor]:
    """`token_stats(hidden @ weight.T, targets, temperature)` for hidden [T, d] and weight [V, d] of one dtype.

    Of the logits only a tile of `tile_mb` (by default 2 on a CPU, 512 on a GPU) exists at a time; backward computes
    it again. Differentiable in hidden and weight; products are accumulated in fp32 and rounded once."""
    return _LinearTokenStats.apply(hidden, weight, targets, temperature, tile_mb)


def _joined(tiles: Tensor, targets: Tensor, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of K tiles [K, 3, T] -> log p_y, L, H of the whole vocabulary, by the chain rule of entropy."""
    L_k, H_k, z_y = tiles.unbind(1)
    L = L_k.logsumexp(0)
    log_P = L_k - L
    logp = torch.where((targets >= 0) & (targets < V), z_y.sum(0) - L, math.nan)
    return logp, L, (log_P.exp() * (H_k - log_P)).sum(0)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        logp, L, H = _joined(_stats(logits, targets, temperature)[None], targets, logits.shape[1])
        ctx.save_for_backward(logits, targets, L, H)
        ctx.temperature = temperature
        return logp, H

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logp, g_H):
        logits, targets, L, H = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        return _grad(logits, targets, L, H, g_logp.contiguous(), g_H.contiguous(), ctx.temperature, out), None, None


class _LinearTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, tile_mb):
        rows, columns = _tiles(hidden, weight, tile_mb)
        tiles = hidden.new_empty(len(columns), 3, len(hidden), dtype=_work_dtype(hidden))
        for k, c in enumerate(columns):
            for r in rows:
                z = _tile(hidden[r], weight[c], tiles.dtype)
                tiles[k, :, r] = _stats(z, targets[r] - c.start, temperature)
        logp, L, H = _joined(tiles, targets, len(weight))
        ctx.save_for_backward(hidden, weight, targets, L, H)
        ctx.temperature, ctx.tile_mb = temperature, tile_mb
        return logp, H

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logp, g_H):
        hidden, weight, targets, L, H = ctx.saved_tensors
        g_logp, g_H = g_logp.contiguous(), g_H.contiguous()
        rows, columns = _tiles(hidden, weight, ctx.tile_mb)
        d_hidden = torch.zeros_like(hidden, dtype=L.dtype) if ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for c in columns:
            d_tile = None if d_weight is None else d_weight[c].to(L.dtype)  # the slice itself where it is fp32
            for r in rows:
                z = _tile(hidden[r], weight[c], L.dtype)
                dz = z if weight.dtype == z.dtype else torch.empty_like(z, dtype=weight.dtype)
                _grad(z, targets[r] - c.start, L[r], H[r], g_logp[r], g_H[r], ctx.temperature, dz)
                if d_hidden is not None:
                    _addmm(d_hidden[r], dz, weight[c])
                if d_weight is not None:
                    _addmm(d_tile, dz.t(), hidden[r], beta=int(r.start > 0))
            if d_weight is not None and d_weight.dtype != L.dtype:
                d_weight[c] = d_tile
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, None, None, None


def _tiles(hidden: Tensor, weight: Tensor, tile_mb: float | None) -> tuple[list[slice], list[slice]]:
    """Rows of hidden and columns of the logits: a tile is tall enough to keep the matrix products busy."""
    tall, mb = (8192, 512) if hidden.is_cuda else (512, 2)
    rows = max(1, min(tall, len(hidden)))
    elements = (tile_mb or mb) * 2**20 / _work_dtype(hidden).itemsize
    return _spans(len(hidden), rows), _spans(len(weight), max(1, int(elements / rows)))


def _tile(h: Tensor, W: Tensor, dtype: torch.dtype) -> Tensor:
    return _addmm(h.new_empty(len(h), len(W), dtype=dtype), h, W.t(), beta=0)


def _addmm(out: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
    """out <- beta out + a b, never rounded below the dtype of out: cuBLAS takes half precision in and gives fp32."""
    if a.is_cuda and a.dtype != out.dtype:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    return torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)
