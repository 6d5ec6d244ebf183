"""gumbel.py: logits -> a token of each row, its log-probability and the entropy of the row: sampling in one pass.

Gumbel-max: the token is argmax_j (z_j + g_j) with g_j = -log E_j and E_j = -log(1 - u_j), exponentially distributed,
which is argmin_j E_j / p_j. The u_j are a hash of (seed, position, j). So there is no state, CPU and CUDA agree, and
the draw of a row does not depend on other rows. The statistics are those of entropy.py, computed in the same pass.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

import entropy
from entropy import LOG2E, launch, reduce_rows, row_spans, triton

if triton is not None:
    from entropy import _FINITE, _LN2, fold, load_block, tl

UNIT = 0xFFFFFF * 2.0**-55  # makes 31 random bits a number in (0, 1): below 1 even where fp32 rounds them up

# ---------------------------------------------------------------- noise: the same code in torch and in Triton


def _row_keys(seed, position):
    """(seed, position), int64 -> two hashes whose low 32 bits are the keys of the row. Arithmetic wraps around."""
    x = seed * 0x1E3779B97F4A7C15 + position * 0x5851F42D4C957F2D
    x = (x ^ (x >> 32 & 0xFFFFFFFF)) * 0x2127599BF4325C37
    x = (x ^ (x >> 29 & 0x7FFFFFFFF)) * 0x369DEA0F31A53F85
    return x ^ (x >> 32 & 0xFFFFFFFF), (x >> 32) | 1


def _bits(index, key, odd):
    """31 random bits, the lowest one set, for the vocabulary `index` in the row with these keys; all int32."""
    x = index * 0x297A2D39
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D
    x = (x ^ key) * odd
    x = (x ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D
    return x & 0x7FFFFFFF | 1


# ---------------------------------------------------------------- reference


def _sample_torch(logits, temperature, seeds, positions):
    """-> token, log-probability, H [B]."""
    e, _, log_s, H = reduce_rows(logits, temperature or 1.0)
    if temperature > 0:
        key, odd = (k.to(torch.int32)[:, None] for k in _row_keys(seeds, positions))
        index = torch.arange(e.shape[1], dtype=torch.int32, device=e.device)
        minus_E = _bits(index, key, odd).to(e.dtype).mul_(-UNIT).log1p_()  # exact for the small E that win
        token = torch.div(e, minus_E, out=minus_E).argmin(1)
    else:
        token = logits.argmax(1)
    return token, e.gather(1, token[:, None])[:, 0].log() - log_s, H


# ---------------------------------------------------------------- kernel: a row is read once, in blocks

if triton is not None:
    _UNIT, _row_keys_kernel, _bits_kernel = tl.constexpr(UNIT), triton.jit(_row_keys), triton.jit(_bits)

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
            z = load_block(logits, columns, column_stride, V)
            top, s, a = fold(z, top, s, a, scale)
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


def _sample_triton(logits, temperature, seeds, positions):
    (B, V), token = logits.shape, torch.empty_like(seeds)
    logp, H = logits.new_empty(2, B, dtype=torch.float32)
    args = seeds, positions, token, logp, H, V, LOG2E / (temperature or 1.0)
    launch(_sample_kernel, B, logits, *args, GREEDY=temperature == 0)
    return token, logp, H


# ---------------------------------------------------------------- dispatch on the tensor


def sample(
    logits: Tensor, temperature: float, seeds: Tensor, positions: Tensor, top_p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token from softmax(logits / temperature) in each row.

    logits [B, V] (-inf where a token is excluded), seeds and positions [B] int64 -> (token [B] int64, its
    log-probability [B] fp32, entropy [B] fp32, both in nats). The noise is a hash of (seed, position, vocabulary
    index): the same whatever else is in the batch, on CPU and on CUDA. Temperature 0 takes the largest logit and
    reports the distribution at 1. With top_p < 1 all three are of the distribution that is left after the cut.
    Not differentiable. Nothing waits for the device, so it can be part of a CUDA graph."""
    logits, seeds, positions = logits.detach(), seeds.contiguous(), positions.contiguous()
    if top_p < 1.0:
        logits = _nucleus(logits, temperature, top_p)
    draw = _sample_triton if entropy.use_kernels(logits) else _sample_torch
    parts = [draw(logits[r], temperature, seeds[r], positions[r]) for r in row_spans(logits)]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _nucleus(logits, temperature, top_p):
    """-inf for all but the most likely tokens: the fewest that have top_p of the probability together."""
    ordered, order = (logits.float() / (temperature or 1.0)).sort(dim=-1, descending=True)
    mass = ordered.softmax(-1)
    cut = mass.cumsum(-1) - mass >= top_p  # the more likely tokens have top_p without this one
    return logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from a key of integers or strings, the same on every machine: a random stream for each request."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
