"""entropy.py: logits -> log-probability and entropy of each token, from full rows or from the hidden state.

With z the logits over the temperature, m = max z, w = z - m <= 0:
    s = sum e^w,  a = sum e^w w          in one pass: when m grows by D, a <- e^-D (a - D s), then s <- e^-D s
    log p_y = w_y - log s                p = e^w / s
    H = -sum p log p = log s - a / s     two terms >= 0: nothing cancels, whatever the size of the logits

The gradients need only m, s and H:  d log p_y / dz_j = [j = y] - p_j,  d H / dz_j = -p_j (log p_j + H).
Tiles k of the vocabulary join by the chain rule of entropy:  P_k = s_k e^(m_k - m) / s,  H = sum P_k (H_k - log P_k).
So there are two functions of a tile, `stats` and `grad`, each in torch and in Triton; the rest is loops over tiles.
Exponentials have base 2, the fast one on GPUs and in torch's CPU code. sampling/gumbel.py draws a token in the same
pass over a row.

Letters: T tokens, V vocabulary, d width of the hidden state, y target, g_ upstream gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:  # an installed Triton that cannot be imported is an error
    if error.name != "triton":
        raise
    triton = None

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
FINITE = -1e30  # in place of -inf: the probability is 0 just the same, and 0 * FINITE is not NaN
ONEDNN = torch.backends.mkldnn.is_available()
BLOCK = 4096  # logits that a kernel takes at a time

# ---------------------------------------------------------------- reference: a tile in torch


def reduce_rows(logits, temperature):
    """logits [t, v] -> e^w [t, v]; the largest logit, log s and H [t]."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = z.amax(1)
    w = (z - top[:, None]).mul_(LOG2E / temperature).clamp_min_(FINITE)
    e = w.exp2()
    s = e.sum(1)
    log_s = s.log()
    return e, top, log_s, log_s - w.mul_(e).sum(1) * LN2 / s


def _inside(y, logits):
    """The rows whose target is one of the columns of the tile."""
    return torch.where((y >= 0) & (y < logits.shape[1]))[0]


def _stats_torch(logits, y, temperature):
    """logits [t, v], y [t] -> [4, t]: the largest logit, log s, H, and w_y or -inf where y is outside of [0, v)."""
    _, top, log_s, H = reduce_rows(logits, temperature)
    w_y, i = torch.full_like(top, -math.inf), _inside(y, logits)
    w_y[i] = (logits[i, y[i]].to(top.dtype) - top[i]) / temperature
    return torch.stack((top, log_s, H, w_y))


def _grad_torch(logits, y, saved, g_logp, g_H, temperature, out):
    """Gradient of sum(g_logp log p_y + g_H H) -> out [t, v] of any dtype; out may be the logits themselves.
    saved [3, t]: the largest logit, log s and H of the whole rows."""
    top, log_s, H = saved[:, :, None]
    log_p = (logits.to(H.dtype) - top).mul_(LOG2E / temperature).sub_(log_s * LOG2E).clamp_min_(FINITE)
    p = log_p.exp2()
    g_y, g = g_logp[:, None] / temperature, g_H[:, None] / temperature
    grad, i = log_p.mul_(g * -LN2).sub_(g_y + g * H).mul_(p), _inside(y, logits)
    grad[i, y[i]] += g_y[i, 0]
    out.copy_(grad)


# ---------------------------------------------------------------- kernels: a row is read once, in blocks

if triton is not None:
    _LOG2E, _LN2, _FINITE = (tl.constexpr(x) for x in (LOG2E, LN2, FINITE))

    @triton.jit
    def load_block(row, columns, stride, V):
        z = tl.load(row + columns.to(tl.int64) * stride, mask=columns < V, other=-float("inf")).to(tl.float32)
        return tl.where(z == -float("inf"), _FINITE, z)  # keeps NaN, unlike a maximum

    @triton.jit
    def fold(z, top, s, a, scale):
        """Adds a block of logits to the three running numbers of a row (the recurrence at the top of this file)."""
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
            top, s, a = fold(load_block(logits, start + tl.arange(0, BLOCK), column_stride, V), top, s, a, scale)
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
        w = (load_block(logits + row * stride, columns, column_stride, V) - tl.load(top + row)) * scale
        log_p = w - tl.load(log_s + row) * _LOG2E
        g_y, g = tl.load(g_logp + row), tl.load(g_H + row)
        grad = tl.where(columns == tl.load(y + row), g_y, 0.0)
        grad -= tl.exp2(log_p) * (g_y + g * (log_p * _LN2 + tl.load(H + row)))
        tl.store(out + row * out_stride + columns, grad * (scale * _LN2), mask=columns < V)


def launch(kernel, programs, logits, *args, **constants):
    with torch.cuda.device_of(logits):
        kernel[(programs,)](logits, *args, *logits.stride(), **constants, BLOCK=BLOCK, num_warps=8)


def _stats_triton(logits, y, temperature):
    (T, V), out = logits.shape, logits.new_empty(4, len(logits), dtype=torch.float32)
    launch(_stats_kernel, T, logits, y, out, T, V, LOG2E / temperature)
    return out


def _grad_triton(logits, y, saved, g_logp, g_H, temperature, out):
    (T, V), blocks = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    args = y, *saved, g_logp, g_H, out, out.stride(0), V, blocks, LOG2E / temperature
    launch(_grad_kernel, T * blocks, logits, *args)


# ---------------------------------------------------------------- dispatch on the tensor, and the loops over tiles


def use_kernels(x: Tensor) -> bool:
    return x.is_cuda and triton is not None and x.dtype != torch.float64


def _tile_functions(x):
    return (_stats_triton, _grad_triton) if use_kernels(x) else (_stats_torch, _grad_torch)


def row_spans(logits):
    """All rows at once on a GPU; on a CPU as many as its cache holds, since the reference makes several passes."""
    return _spans(len(logits), len(logits) if logits.is_cuda else 2**18 // logits.shape[1])


def _spans(n, step):
    step = max(step, 1)
    return [slice(i, min(i + step, n)) for i in range(0, max(n, 1), step)]


def token_stats(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logits [T, V], targets [T] int64 -> (log-probability of the target [T], entropy [T]) of
    softmax(logits / temperature), fp32, in nats; float64 logits give float64. Differentiable in the logits. Some
    logits of a row may be -inf, not all. A target outside of [0, V) has log-probability -inf."""
    return _TokenStats.apply(logits, targets.contiguous(), temperature)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        stats = _tile_functions(logits)[0]
        parts = [stats(logits[r], targets[r], temperature) for r in row_spans(logits)]
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
        for r in row_spans(logits):
            grad(logits[r], targets[r], saved[:, r], g_logp[r], g_H[r], ctx.temperature, d_logits[r])
        return d_logits, None, None


def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [T, d] @ weight.T [d, V] in fp32 or above, never rounded below it: the logits of linear_token_stats."""
    out = hidden.new_empty(len(hidden), len(weight), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return _addmm(out, hidden, weight.t(), beta=0)


def linear_token_stats(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, tile_mb: float | None = None
) -> tuple[Tensor, Tensor]:
    """`token_stats(hidden @ weight.T, targets, temperature)` for hidden [T, d] and weight [V, d] of one dtype.

    Only one tile of the logits, of `tile_mb` (by default at most 512 on a GPU, 8 on a CPU), exists at a time; backward
    computes it again. Differentiable in hidden and weight. Products are accumulated in fp32 and rounded once."""
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
                z = _logits(tile, hidden[r], W, rough=True)
                dz = torch.empty_like(z, dtype=W.dtype) if z.is_cuda and z.dtype != W.dtype else z
                grad(z, targets[r] - c.start, saved[:, r], g_logp[r], g_H[r], ctx.temperature, dz)
                if ctx.needs_input_grad[0]:
                    _addmm(d_hidden[r], dz, W, rough=True)
                if d_W is not None:
                    _addmm(d_W, dz.t(), hidden[r], beta=int(r.start > 0))
            if d_W is not None and d_W.dtype != W.dtype:
                d_weight[c] = d_W
        return d_hidden.to(hidden.dtype), d_weight, None, None, None


def _tiles(hidden, weight, tile_mb):
    """Rows and columns of the tiles, and the memory of one tile. Tall tiles make the matrix products fast."""
    tall, wide = (8192, 16384) if hidden.is_cuda else (2048, 1024)
    tall = max(1, min(tall, len(hidden)))
    wide = int(tile_mb * 2**18 / tall) if tile_mb else wide
    wide = max(1, min(wide // 64 * 64 or wide, len(weight)))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if not hidden.is_cuda:  # glibc keeps a freed block only if a larger one was freed before it, such as this one;
        hidden.new_empty(2 * tall * wide, dtype=dtype)  # else page faults take a quarter of the time
    tile = hidden.new_empty(tall * wide, dtype=dtype)
    return _spans(len(hidden), tall), _spans(len(weight), wide), tile


def _logits(tile, h, W, rough=False):
    return _addmm(tile[: len(h) * len(W)].view(len(h), len(W)), h, W.t(), beta=0, rough=rough)


def _addmm(out, a, b, beta=1, rough=False):
    """out <- beta out + a b, in the precision of out: cuBLAS takes half precision and returns fp32.
    `rough`: on a CPU oneDNN is a tenth faster than the BLAS, with three times the error, which gradients can bear."""
    if a.is_cuda and a.dtype != out.dtype:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    a, b = a.to(out.dtype), b.to(out.dtype)
    if rough and ONEDNN and out.is_cpu and out.dtype == torch.float32:
        product = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return out.add_(product) if beta else out.copy_(product)
    return torch.addmm(out, a, b, beta=beta, out=out)
