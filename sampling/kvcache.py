"""kvcache.py: keys and values of every layer by slot, and the attention over them, under any Hugging Face model.

    with slot_attention(model):                        # for as long as it lasts, the model's attention layers
        cache.begin_step(lengths, segments)            # call cache.attend instead of their own kernel
        model(input_ids=tokens[None], position_ids=lengths[None], use_cache=False, slot_cache=cache)

The model sees one packed sequence; which of its tokens belong together is known here alone. A prefill packs whole
prompts, a step packs one token of each of the rows 0..B-1 of the cache (the picture is in rollout.py).

Refused by name: sliding windows shorter than the rows, linear or latent attention, soft-capped scores, sinks.
Letters: B rows, T packed tokens, L attended positions, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.errors import UserError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

SUPPORTED = "a causal model with plain attention in every layer"


# ---- what a model needs


def attention_shape(model, max_len: int) -> tuple[int, int, int]:
    """(layers, key/value heads, head size), seen in a forward of one token. UserError for a model that the cache
    would get wrong: one whose layers do not each call plain attention once, or whose angles change with the batch."""
    config, calls = model.config, []
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {x.get("rope_type") for x in (rope, *rope.values()) if isinstance(x, dict)}
    refused = kinds & {"dynamic", "longrope"}  # their angles depend on the longest row of the batch
    refused |= set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if refused:
        raise UserError(f"model {config.model_type}: found {', '.join(sorted(refused))}, allowed: {SUPPORTED}")

    def attend(layer, q, k, v, scale):
        calls.append((layer, k.shape[1:], v.shape[1:]))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with slot_attention(model), torch.inference_mode():
        probe = SimpleNamespace(attend=attend, max_len=max_len)
        model(input_ids=token, position_ids=token, use_cache=False, slot_cache=probe)
    heads = tuple(calls[0][1]) if calls else ()
    if not calls or calls != [(layer, heads, heads) for layer in range(config.num_hidden_layers)]:
        raise UserError(f"model {config.model_type}: found layers of other kinds, allowed: {SUPPORTED}")
    return len(calls), *heads


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


# ---- how the model calls us


def _attention(module, query, key, value, attention_mask, scaling=None, slot_cache=None, **options):
    """The signature of transformers' attention functions: query (1, H, T, D) -> (1, T, H, D) and no weights."""
    refused = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if (options.get("sliding_window") or slot_cache.max_len) < slot_cache.max_len:
        refused.append(f"a sliding window of {options['sliding_window']} positions under max_len {slot_cache.max_len}")
    if refused:
        raise UserError(f"model {module.config.model_type}: found {', '.join(refused)}, allowed: {SUPPORTED}")
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # a rotation may have made it fp32
    return slot_cache.attend(module.layer_idx, q, k, v, scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register("slot_cache", _attention)


@contextlib.contextmanager
def slot_attention(model) -> Iterator[None]:
    """Our attention in the model and dropout off; both as before afterwards, for the module may be in training."""
    attention, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = "slot_cache"
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        model.train(training)


# ---- which rows attend together


def round_up(number: int, smallest: int, largest: int) -> int:
    """The first of smallest, 2 smallest, 4 smallest, ... that is not below `number`, and `largest` at most."""
    size = smallest
    while size < number:
        size *= 2
    return min(size, largest)


def segment_ends(B: int) -> list[int]:
    """Where the segments of B rows end: the longest eighth, the rest of the longest quarter, of the half, of all."""
    return [B // 8, B // 4, B // 2, B] if B >= 16 else [B]


def misplaced(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places, sources): the fewest moves after which no row is longer than one of a segment before it."""
    segment = np.searchsorted(segment_ends(len(lengths)), np.arange(len(lengths)), side="right")
    wanted = np.empty_like(segment)
    wanted[np.argsort(-lengths, kind="stable")] = segment
    places = np.flatnonzero(wanted != segment)
    return places, places[np.argsort(wanted[places], kind="stable")]


# ---- the cache


class SlotCache:
    """`kv` (2, layers, slots, K, max_len, D): keys and values, on the memory order that the device's kernel reads.

    `begin_prefill` or `begin_step` says what the next forward is; each attention layer then calls `attend` once:
    q (T, H, D), k and v (T, K, D) -> (T, H, D).
    """

    def __init__(self, shape: tuple[int, int, int], slots: int, max_len: int, dtype, device: torch.device):
        (layers, heads, size), self.max_len = shape, max_len
        if device.type == "cuda":
            self.kv = torch.zeros(2, layers, slots, max_len, heads, size, dtype=dtype, device=device).transpose(3, 4)
        else:
            self.kv = torch.zeros(2, layers, slots, heads, max_len, size, dtype=dtype, device=device)
        self.over_rows = SlotCache._sdpa  # not bound to this cache, which frees its memory with its last reference
        if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
            if varlen_attn and "seqused_k" in inspect.signature(varlen_attn).parameters:
                self.over_rows = SlotCache._varlen
            elif flash_attn_with_kvcache:
                self.over_rows = SlotCache._flash

    def move(self, places: np.ndarray, sources: np.ndarray, span: int) -> None:
        """Rows `places` become what rows `sources` were, as far as position `span`."""
        at, of = (torch.from_numpy(x).to(self.kv.device) for x in (places, sources))
        for layer in self.kv.flatten(0, 1):  # one at a time: a copy of all would not fit beside the cache
            layer[at, :, :span] = layer[of, :, :span]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return (self._attend_prompts if self.prefilling else self._attend_rows)(layer, q, k, v, scale)

    # -- prefill: prompts of mixed lengths, packed

    def begin_prefill(self, lengths: list[int]) -> None:
        """Prompts of these lengths follow each other; `prefilled` (2, layers, K, T, D) takes their keys and values."""
        _, layers, _, heads, _, size = self.kv.shape
        self.prefilled = self.kv.new_empty(2, layers, heads, sum(lengths), size)
        row = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
        column = torch.tensor([i for length in lengths for i in range(length)], dtype=torch.long)
        self.places = row.to(self.kv.device), column.to(self.kv.device)  # of each token in rows padded on the right
        self.padded = len(lengths), max(lengths)
        self.prefilling = True

    def _attend_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.prefilled[0, layer], self.prefilled[1, layer] = k.transpose(0, 1), v.transpose(0, 1)
        padded = [self._pad(x) for x in (q, k, v)]  # on the right, where causal tokens do not look
        out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)[self.places]

    def _pad(self, x: Tensor) -> Tensor:
        return x.new_zeros(*self.padded, *x.shape[1:]).index_put(self.places, x).transpose(1, 2)

    # -- step: one token of each row

    def begin_step(self, lengths: Tensor, segments: tuple[tuple[int, int, int], ...]) -> None:
        """Row i's token is at position `lengths[i]`, (B,). A segment is (first row, end, span): the rows that attend
        together, and how far; span > their lengths."""
        self.rows, self.lengths, self.segments = torch.arange(len(lengths), device=lengths.device), lengths, segments
        if self.over_rows is SlotCache._sdpa:
            self.masks = [self._mask(lengths[start:end], span) for start, end, span in segments]
        self.prefilling = False

    def _mask(self, lengths: Tensor, span: int) -> Tensor:
        behind = torch.arange(span, device=lengths.device) > lengths[:, None]
        mask = torch.zeros(behind.shape, dtype=self.kv.dtype, device=lengths.device)
        return mask.masked_fill_(behind, -torch.inf)[:, None, None]  # (rows, 1, 1, L)

    def _attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[self.rows, :, self.lengths], values[self.rows, :, self.lengths] = k, v
        return self.over_rows(self, q, keys, values, scale)

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
