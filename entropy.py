"""entropy.py: logits -> log-probability and entropy of each token, and the token itself while sampling.

With z the logits over the temperature, m = max z, w = z - m <= 0:
    s = sum e^w,  a = sum e^w w          in one pass: when m grows by D, a <- e^-D (a - D s), then s <- e^-D s
    log p_y = w_y - log s                p = e^w / s
    H = -sum p log p = log s - a / s     two terms >= 0: nothing cancels, whatever the size of the logits

The gradients need m, s and H alone:  d log p_y / dz_j = [j = y] - p_j,  d H / dz_j = -p_j (log p_j + H).
Tiles k of the vocabulary join by the chain rule of entropy:  P_k = s_k e^(m_k - m) / s,  H = sum P_k (H_k - log P_k).
So there are three functions of a tile, `stats`, `grad` and `sample`, each in torch and in Triton, and the rest is
loops. Exponentials are taken in base 2, which is the fast one on GPUs and in torch's CPU code alike.

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
UNIT = 0xFFFFFF * 2.0**-55  # makes 31 random bits a number in (0, 1): below 1 even where fp32 rounds them up
BLOCK = 4096  # logits that a kernel takes at a time

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


# ---------------------------------------------------------------- reference: a tile in torch


def _work_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _reduce(logits, temperature):
    """logits [t, v] -> e^w [t, v]; the largest logit, log s and H [t]."""
    z = logits.to(_work_dtype(logits))
    top = z.amax(1)
    w = (z - top[:, None]).mul_(LOG2E / temperature).clamp_min_(FINITE)
    e = w.exp2()
    s = e.sum(1)
    log_s = s.log()
    return e, top, log_s, log_s - w.mul_(e).sum(1) * LN2 / s


def _at_target(y, v):
    """Whether y [t] is one of the v columns of the tile, and a column [t, 1]: y, or the nearest if it is not."""
    return (y >= 0) & (y < v), y.clamp(0, v - 1)[:, None]


def _stats_torch(logits, y, temperature):
    """logits [t, v], y [t] -> [4, t]: the largest logit, log s, H, and w_y or -inf where y is outside of [0, v)."""
    _, top, log_s, H = _reduce(logits, temperature)
    inside, column = _at_target(y, logits.shape[1])
    w_y = (logits.gather(1, column)[:, 0].to(top.dtype) - top) / temperature
    return torch.stack((top, log_s, H, torch.where(inside, w_y, -math.inf)))


def _grad_torch(logits, y, saved, g_logp, g_H, temperature, out):
    """Gradient of sum(g_logp log p_y + g_H H) -> out [t, v] of any dtype; out may be the logits themselves.
    saved [3, t]: the largest logit, log s and H of the whole rows."""
    top, log_s, H = saved[:, :, None]
    log_p = (logits.to(H.dtype) - top).mul_(LOG2E / temperature).sub_(log_s * LOG2E).clamp_min_(FINITE)
    p = log_p.exp2()
    g_y, g = g_logp[:, None] / temperature, g_H[:, None] / temperature
    inside, column = _at_target(y, logits.shape[1])
    out.copy_(log_p.mul_(g * -LN2).sub_(g_y + g * H).mul_(p).scatter_add_(1, column, g_y * inside[:, None]))


def _sample_torch(logits, temperature, seeds, positions):
    """-> token, log-probability, H [B]. Gumbel-max is a race: the first of the exponential clocks E_j / p_j wins."""
    e, _, log_s, H = _reduce(logits, temperature or 1.0)
    if temperature > 0:
        key, odd = (k.to(torch.int32)[:, None] for k in _row_keys(seeds, positions))
        index = torch.arange(e.shape[1], dtype=torch.int32, device=e.device)
        minus_E = _bits(index, key, odd).to(e.dtype).mul_(-UNIT).log1p_()  # exact for the small E that win
        token = torch.div(e, minus_E, out=minus_E).argmin(1)
    else:
        token = logits.argmax(1)
    return token, e.gather(1, token[:, None])[:, 0].log() - log_s, H


# ---------------------------------------------------------------- kernels: a row is read once, in blocks

if triton is not None:
    _LOG2E, _LN2, _FINITE, _UNIT = (tl.constexpr(x) for x in (LOG2E, LN2, FINITE, UNIT))
    _row_keys_kernel, _bits_kernel = triton.jit(_row_keys), triton.jit(_bits)

    @triton.jit
    def _load(row, columns, stride, V):
        z = tl.load(row + columns.to(tl.int64) * stride, mask=columns < V, other=-float("inf")).to(tl.float32)
        return tl.where(z == -float("inf"), _FINITE, z)  # keeps NaN, unlike a maximum

    @triton.jit
    def _fold(z, top, s, a, scale):
        """A block of logits into the three numbers that a row carries along: the first line of the derivation."""
        grown = tl.maximum(top, tl.max(z, 0))
        w, D = (z - grown) * scale, (grown - top) * scale
        e = tl.exp2(w)
        a = tl.exp2(-D) * (a - D * s) + tl.sum(e * w, 0)
        s = tl.exp2(-D) * s + tl.sum(e, 0)
        return grown, s, a

    @triton.jit
    def _stats_kernel(logits, y, out, T, V, scale, stride, column_stride, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)  # axis 0 takes 2^31 - 1 programs, the others 65,535
        logits += row * stride
        top, s, a = tl.full((), _FINITE, tl.float32), tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
        for start in range(0, V, BLOCK):
            top, s, a = _fold(_load(logits, start + tl.arange(0, BLOCK), column_stride, V), top, s, a, scale)
        target = tl.load(y + row)
        inside = (target >= 0) & (target < V)
        z_y = tl.load(logits + target * column_stride, mask=inside, other=-float("inf")).to(tl.float32)
        tl.store(out + row, top)
        tl.store(out + T + row, tl.log2(s) * _LN2)
        tl.store(out + 2 * T + row, (tl.log2(s) - a / s) * _LN2)
        tl.store(out + 3 * T + row, (z_y - top) * scale * _LN2)

    @triton.jit
    def _grad_kernel(
        logits, y, top, log_s, H, g_logp, g_H, out, out_stride, V, blocks, scale, stride, column_stride,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64) // blocks
        columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        w = (_load(logits + row * stride, columns, column_stride, V) - tl.load(top + row)) * scale
        log_p = w - tl.load(log_s + row) * _LOG2E
        g_y, g = tl.load(g_logp + row), tl.load(g_H + row)
        grad = tl.where(columns == tl.load(y + row), g_y, 0.0)
        grad -= tl.exp2(log_p) * (g_y + g * (log_p * _LN2 + tl.load(H + row)))
        tl.store(out + row * out_stride + columns, grad * (scale * _LN2), mask=columns < V)

    @triton.jit
    def _sample_kernel(
        logits, seeds, positions, token, logp, H, V, scale, stride, column_stride,
        GREEDY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        key, odd = _row_keys_kernel(tl.load(seeds + row), tl.load(positions + row))
        top, s, a = tl.full((), _FINITE, tl.float32), tl.full((), 0, tl.float32), tl.full((), 0, tl.float32)
        best, winner = tl.full((BLOCK,), -float("inf"), tl.float32), tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            z = _load(logits, columns, column_stride, V)
            top, s, a = _fold(z, top, s, a, scale)
            if not GREEDY:
                u = _bits_kernel(columns, key.to(tl.int32), odd.to(tl.int32)).to(tl.float32) * _UNIT
                series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))  # where 1 - u would lose its digits
                z = z * scale - tl.log2(tl.where(u < 1 / 64, series, -tl.log(1 - u)))
            winner = tl.where(z > best, columns, winner)
            best = tl.maximum(best, z)
        first = tl.min(tl.where(best == tl.max(best, 0), winner, V - 1), 0).to(tl.int64)
        z_token = tl.load(logits + first * column_stride).to(tl.float32)
        tl.store(token + row, first)
        tl.store(logp + row, ((z_token - top) * scale - tl.log2(s)) * _LN2)
        tl.store(H + row, (tl.log2(s) - a / s) * _LN2)


def _launch(kernel, programs, logits, *args, **constants):
    with torch.cuda.device_of(logits):
        kernel[(programs,)](logits, *args, *logits.stride(), **constants, BLOCK=BLOCK, num_warps=8)


def _stats_triton(logits, y, temperature):
    (T, V), out = logits.shape, logits.new_empty(4, len(logits), dtype=torch.float32)
    _launch(_stats_kernel, T, logits, y, out, T, V, LOG2E / temperature)
    return out


def _grad_triton(logits, y, saved, g_logp, g_H, temperature, out):
    (T, V), blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    args = y, *saved, g_logp, g_H, out, out.stride(0), V, blocks, LOG2E / temperature
    _launch(_grad_kernel, T * blocks, logits, *args)


def _sample_triton(logits, temperature, seeds, positions):
    (B, V), token = logits.shape, torch.empty_like(seeds)
    logp, H = logits.new_empty(2, B, dtype=torch.float32)
    args = seeds, positions, token, logp, H, V, LOG2E / (temperature or 1.0)
    _launch(_sample_kernel, B, logits, *args, GREEDY=temperature == 0)
    return token, logp, H


# ---------------------------------------------------------------- dispatch on the tensor, and the loops over tiles


def _tile_functions(x):
    if x.is_cuda and triton is not None and x.dtype != torch.float64:
        return _stats_triton, _grad_triton, _sample_triton
    return _stats_torch, _grad_torch, _sample_torch


def _rows(logits):
    """All rows at once on a GPU; on a CPU as many as the cache holds, for the passes that the reference makes."""
    return _spans(len(logits), len(logits) if logits.is_cuda else 2**18 // logits.shape[1])


def _spans(n, step):
    step = max(step, 1)
    return [slice(i, min(i + step, n)) for i in range(0, max(n, 1), step)]


def sample(logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from softmax(logits / temperature) in each row, by Gumbel-max.

    logits [B, V] (-inf where a token is excluded), seeds and positions [B] int64 -> (token [B] int64, its
    log-probability [B] fp32, entropy [B] fp32, both in nats). The noise is a hash of (seed, position, vocabulary
    index): the same whatever else is in the batch, on CPU and on CUDA. Temperature 0 takes the largest logit and
    reports the distribution at 1. Not differentiable; nothing waits for the device, so CUDA graphs can hold it."""
    logits, seeds, positions = logits.detach(), seeds.contiguous(), positions.contiguous()
    draw = _tile_functions(logits)[2]
    parts = [draw(logits[r], temperature, seeds[r], positions[r]) for r in _rows(logits)]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))


def token_stats(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logits [T, V], targets [T] int64 -> (log-probability of the target [T], entropy [T]) of
    softmax(logits / temperature), fp32, in nats; float64 logits give float64. Differentiable in the logits, of which
    any but all in a row may be -inf. A target outside of [0, V) has log-probability -inf."""
    return _TokenStats.apply(logits, targets.contiguous(), temperature)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        stats = _tile_functions(logits)[0]
        parts = [stats(logits[r], targets[r], temperature) for r in _rows(logits)]
        top, log_s, H, w_y = saved = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        ctx.save_for_backward(logits, targets, saved[:3])
        ctx.temperature = temperature
        return w_y - log_s, H.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logp, g_H):
        logits, targets, saved = ctx.saved_tensors
        g_logp, g_H, grad = g_logp.contiguous(), g_H.contiguous(), _tile_functions(logits)[1]
        d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for r in _rows(logits):
            grad(logits[r], targets[r], saved[:, r], g_logp[r], g_H[r], ctx.temperature, d_logits[r])
        return d_logits, None, None


def linear_token_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, tile_mb: float | None = None
) -> tuple[Tensor, Tensor]:
    """`token_stats(hidden @ weight.T, targets, temperature)` for hidden [T, d] and weight [V, d] of one dtype.

    Of the logits only a tile of `tile_mb` (by default 2 on a CPU, 512 on a GPU) exists at a time; backward computes
    it again. Differentiable in hidden and weight; products are accumulated in fp32 and rounded once."""
    return _LinearTokenStats.apply(hidden, weight, targets, temperature, tile_mb)


class _LinearTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, tile_mb):
        stats = _tile_functions(hidden)[0]
        rows, columns, tile = _tiles(hidden, weight, tile_mb)
        tiles = hidden.new_empty(len(columns), 4, len(hidden), dtype=tile.dtype)
        for k, c in enumerate(columns):
            for r in rows:
                tiles[k, :, r] = stats(_logits(tile, hidden[r], weight[c]), targets[r] - c.start, temperature)
        top_k, log_s_k, H_k, w_y = tiles.unbind(1)
        top = top_k.amax(0)
        shift = (top_k - top) / temperature
        log_s = (log_s_k + shift).logsumexp(0)
        log_P = log_s_k + shift - log_s
        H = (log_P.exp() * (H_k - log_P)).sum(0)
        ctx.save_for_backward(hidden, weight, targets, torch.stack((top, log_s, H)))
        ctx.temperature, ctx.tile_mb = temperature, tile_mb
        return (w_y + shift).amax(0) - log_s, H

    @staticmethod
    @once_differentiable
    def backward(ctx, g_logp, g_H):
        hidden, weight, targets, saved = ctx.saved_tensors
        g_logp, g_H, grad = g_logp.contiguous(), g_H.contiguous(), _tile_functions(hidden)[1]
        d_hidden = torch.zeros(hidden.shape, dtype=saved.dtype, device=hidden.device)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        rows, columns, tile = _tiles(hidden, weight, ctx.tile_mb)
        for c in columns:
            W, d_W = weight[c], None if d_weight is None else d_weight[c].to(saved.dtype)  # no copy where it is fp32
            for r in rows:
                z = _logits(tile, hidden[r], W)
                dz = torch.empty_like(z, dtype=W.dtype) if z.is_cuda and z.dtype != W.dtype else z
                grad(z, targets[r] - c.start, saved[:, r], g_logp[r], g_H[r], ctx.temperature, dz)
                if ctx.needs_input_grad[0]:
                    _addmm(d_hidden[r], dz, W)
                if d_W is not None:
                    _addmm(d_W, dz.t(), hidden[r], beta=int(r.start > 0))
            if d_W is not None and d_W.dtype != W.dtype:
                d_weight[c] = d_W
        return d_hidden.to(hidden.dtype), d_weight, None, None, None


def _tiles(hidden, weight, tile_mb):
    """Rows and columns of the tiles, tall enough to keep the matrix products busy; and the memory of one of them."""
    tall, mb = (8192, 512) if hidden.is_cuda else (512, 2)
    tall = max(1, min(tall, len(hidden)))
    wide = int((tile_mb or mb) * 2**18 / tall)
    wide = max(1, min(wide // 64 * 64 or wide, len(weight)))
    if not hidden.is_cuda:  # glibc returns a block to the system unless it is smaller than one freed before, such as
        hidden.new_empty(4 * tall * wide, dtype=_work_dtype(hidden))  # this: a quarter of the time was page faults
    tile = hidden.new_empty(tall * wide, dtype=_work_dtype(hidden))
    return _spans(len(hidden), tall), _spans(len(weight), wide), tile


def _logits(tile, h, W):
    return _addmm(tile[: len(h) * len(W)].view(len(h), len(W)), h, W.t(), beta=0)


def _addmm(out, a, b, beta=1):
    """out <- beta out + a b, never rounded below the dtype of out: cuBLAS takes half precision in and gives fp32."""
    if a.is_cuda and a.dtype != out.dtype:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    return torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)
