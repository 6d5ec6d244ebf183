"""kvcache.py: keys and values of every layer by slot, and the attention over them, under any Hugging Face model.

    with attention(model):                             # runtime/attention.py: each layer calls cache.attend
        cache.begin_step(lengths, segments)
        model(input_ids=tokens[None], position_ids=lengths[None], use_cache=False, packed=cache)

A prefill packs whole prompts. A step packs one token of each of the slots 0..B-1 (the picture is in rollout.py).
Letters: B slots, T packed tokens, L attended positions, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention import Packing, varlen_attn

try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

# ---- what a cache takes


def slot_bytes(shape: tuple[int, int, int], max_len: int, dtype: torch.dtype) -> int:
    """Bytes of one slot: the keys and values of `max_len` positions in all layers."""
    layers, heads, size = shape
    return 2 * layers * heads * size * max_len * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor may take."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ---- which slots attend together


def round_up(number: int, smallest: int, largest: int) -> int:
    """The first of smallest, 2 smallest, 4 smallest, ... that is not below `number`, and `largest` at most."""
    size = smallest
    while size < number:
        size *= 2
    return min(size, largest)


def segment_ends(B: int) -> list[int]:
    """Where the segments of B slots end: the longest eighth, the rest of the longest quarter, of the half, of all."""
    return [B // 8, B // 4, B // 2, B] if B >= 16 else [B]


def misplaced(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places, sources): the fewest moves after which no slot is longer than one of a segment before it."""
    segment = np.searchsorted(segment_ends(len(lengths)), np.arange(len(lengths)), side="right")
    wanted = np.empty_like(segment)
    wanted[np.argsort(-lengths, kind="stable")] = segment
    places = np.flatnonzero(wanted != segment)
    return places, places[np.argsort(wanted[places], kind="stable")]


# ---- the cache


class SlotCache:
    """`kv` (2, layers, slots, K, max_len, D): keys and values, in the memory order that the device's kernel reads.

    `begin_prefill` or `begin_step` says what the next forward is; each attention layer then calls `attend` once:
    q (T, H, D), k and v (T, K, D) -> (T, H, D).
    """

    def __init__(self, shape: tuple[int, int, int], slots: int, max_len: int, dtype, device: torch.device):
        (layers, heads, size), self.max_len = shape, max_len
        if device.type == "cuda":
            self.kv = torch.zeros(2, layers, slots, max_len, heads, size, dtype=dtype, device=device).transpose(3, 4)
        else:
            self.kv = torch.zeros(2, layers, slots, heads, max_len, size, dtype=dtype, device=device)
        self.over_slots = SlotCache._sdpa  # not bound to this cache: its memory is free with its last reference
        if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
            if varlen_attn and "seqused_k" in inspect.signature(varlen_attn).parameters:
                self.over_slots = SlotCache._varlen
            elif flash_attn_with_kvcache:
                self.over_slots = SlotCache._flash

    def move(self, places: np.ndarray, sources: np.ndarray, span: int) -> None:
        """Slots `places` become what slots `sources` were, as far as position `span`."""
        at, of = (torch.from_numpy(x).to(self.kv.device) for x in (places, sources))
        for layer in self.kv.flatten(0, 1):  # one at a time: a copy of all would not fit beside the cache
            layer[at, :, :span] = layer[of, :, :span]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return (self._attend_prompts if self.prefilling else self._attend_slots)(layer, q, k, v, scale)

    # -- prefill: prompts of mixed lengths, packed

    def begin_prefill(self, lengths: list[int]) -> Tensor:
        """Prompts of these lengths follow each other -> their positions (T,). `prefilled` (2, layers, K, T, D) takes
        their keys and values."""
        _, layers, _, heads, _, size = self.kv.shape
        self.prefilled = self.kv.new_empty(2, layers, heads, sum(lengths), size)
        self.packing = Packing([n for n in lengths if n] or [0], self.kv.device)
        self.prefilling = True
        return self.packing.positions

    def _attend_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.prefilled[0, layer], self.prefilled[1, layer] = k.transpose(0, 1), v.transpose(0, 1)
        return self.packing.attend(layer, q, k, v, scale)

    # -- step: one token of each slot

    def begin_step(self, lengths: Tensor, segments: tuple[tuple[int, int, int], ...]) -> None:
        """Slot i's token is at position `lengths[i]`, (B,). A segment is (first slot, end, span): the slots that attend
        together, and how far; span > their lengths."""
        self.index, self.lengths, self.segments = torch.arange(len(lengths), device=lengths.device), lengths, segments
        if self.over_slots is SlotCache._sdpa:
            self.masks = [self._mask(lengths[start:end], span) for start, end, span in segments]
        self.prefilling = False

    def _mask(self, lengths: Tensor, span: int) -> Tensor:
        behind = torch.arange(span, device=lengths.device) > lengths[:, None]
        mask = torch.zeros(behind.shape, dtype=self.kv.dtype, device=lengths.device)
        return mask.masked_fill_(behind, -torch.inf)[:, None, None]  # (slots, 1, 1, L)

    def _attend_slots(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[self.index, :, self.lengths], values[self.index, :, self.lengths] = k, v
        return self.over_slots(self, q, keys, values, scale)

    def _sdpa(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        B, H, D = q.shape
        q = q.reshape(B, keys.shape[1], -1, D)  # the heads that share a key are its queries
        parts = [
            F.scaled_dot_product_attention(
                q[start:end], keys[start:end, :, :span], values[start:end, :, :span], mask, scale=scale
            )
            for (start, end, span), mask in zip(self.segments, self.masks, strict=True)
        ]
        return torch.cat(parts).view(B, H, D)

    def _varlen(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        B, span = len(q), self.segments[0][2]
        keys, values = (x[:B].transpose(1, 2).flatten(0, 1) for x in (keys, values))  # (B * max_len, K, D), views
        one_each = torch.arange(B + 1, device=q.device, dtype=torch.int32)
        return varlen_attn(
            q, keys, values, one_each, one_each * self.max_len, 1, span,
            scale=scale, enable_gqa=True, seqused_k=(self.lengths + 1).int(),
        )  # fmt: skip

    def _flash(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        keys, values = (x[: len(q)].transpose(1, 2) for x in (keys, values))
        used = (self.lengths + 1).int()
        return flash_attn_with_kvcache(q[:, None], keys, values, cache_seqlens=used, softmax_scale=scale)[:, 0]
