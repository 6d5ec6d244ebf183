"""attention.py: our attention in every layer of a Hugging Face model, which sees one packed sequence of tokens.

    with attention(model):
        model(input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=Packing([3, 9], device))

`packed` alone knows which tokens belong together: a Packing while sequences are scored or prefilled, the slots of
sampling/kvcache.py while responses are sampled. It has

    attend(layer, q [T, H, D], k [T, K, D], v [T, K, D], scale) -> [T, H, D]
    max_len     the longest sequence

Refused by name: sliding windows shorter than that, linear or latent attention, soft-capped scores, sinks, and models
whose layers do not call transformers' attention interface or do not pass `packed` on to it.
Letters: T packed tokens, B sequences, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from runtime.errors import UserError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None

SUPPORTED = "a causal model with plain attention in every layer, such as Qwen2, Qwen3, Llama, Mistral"


def _attention(module, query, key, value, attention_mask=None, scaling=None, *, packed, **options):
    """The signature of transformers' attention functions: query [1, H, T, D] -> [1, T, H, D] and no weights."""
    refused = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if (options.get("sliding_window") or packed.max_len) < packed.max_len:
        refused.append(f"a sliding window of {options['sliding_window']} positions under {packed.max_len} tokens")
    if refused:
        raise UserError(f"model {module.config.model_type}: found {', '.join(refused)}, allowed: {SUPPORTED}")
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))  # a rotation may have made it fp32
    return packed.attend(module.layer_idx, q, k, v, scaling)[None], None


AttentionInterface.register("packed", _attention)


@contextlib.contextmanager
def attention(model, name: str = "packed") -> Iterator[None]:
    """Within the block the model attends by the function `name` and its dropout is off; both as before afterwards."""
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = name
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = before
        model.train(training)


@torch.inference_mode()
def attention_shape(model, max_len: int) -> tuple[int, int, int]:
    """(layers, K, D), seen in a forward of one token.

    UserError where not each layer calls plain attention once, or where packed sequences get other logits than each of
    them alone (the model ignores positions, masks in a way of its own, is not causal).
    """
    config, calls = model.config, []
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {x.get("rope_type") for x in (rope, *rope.values()) if isinstance(x, dict)}
    found = kinds & {"dynamic", "longrope"}  # their angles depend on the longest sequence of the batch
    found |= set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}

    def attend(layer, q, k, v, scale):
        calls.append((layer, k.shape[1:], v.shape[1:]))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    token = torch.zeros(1, dtype=torch.long, device=model.device)
    try:
        if not found:
            _logits(model, token, token, packed=SimpleNamespace(attend=attend, max_len=max_len))
            heads = tuple(calls[0][1]) if calls else ()
            if not calls or calls != [(layer, heads, heads) for layer in range(config.num_hidden_layers)]:
                found = ["layers without plain attention"]
            elif not _packs(model):
                found = ["other logits for packed sequences than for each of them alone"]
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # such a model fails in a way of its own
        found = [f"layers that do not take another attention ({type(error).__name__})"]
    if found:
        raise UserError(f"model {config.model_type}: found {', '.join(sorted(found))}, allowed: {SUPPORTED}")
    return len(calls), *heads


def _logits(model, ids: Tensor, positions: Tensor, attention_by: str = "packed", **packed) -> Tensor:
    with attention(model, attention_by):
        return model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **packed).logits[0]


def _packs(model) -> bool:
    """Whether two sequences get the logits in one packing that the model's own attention gives each of them."""
    ids, packing = torch.tensor([3, 4, 5, 6, 5, 3, 4], device=model.device), Packing([4, 3], model.device)
    together = _logits(model, ids, packing.positions, packed=packing)
    parts, own = (x.split([4, 3]) for x in (ids, packing.positions)), model.config._attn_implementation
    alone = torch.cat([_logits(model, *part, own) for part in zip(*parts, strict=True)])
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    return not (together - alone).abs().max() > tolerance * alone.abs().max()  # NaN is the concern of other checks


class Packing:
    """Sequences of these lengths, one after another. `positions` [T] restart at each of them."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        sizes = torch.tensor(lengths)
        self.B, self.max_len = len(lengths), max(lengths)
        sequence = torch.repeat_interleave(torch.arange(self.B), sizes, output_size=sum(lengths))
        parts = F.pad(sizes.cumsum(0), (1, 0)).int(), sequence, torch.cat([torch.arange(length) for length in lengths])
        self.ends, self.sequence, self.positions = (x.to(device, non_blocking=True) for x in parts)  # nobody waits

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention within each sequence.

        Flash attention on CUDA in half precision. Elsewhere the sequences become padded rows, where the causal mask
        alone keeps tokens away from the padding behind them.
        """
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and (flash := _flash_attention()):
            return flash(q, k, v, self.ends, self.ends, self.max_len, self.max_len, scale)
        at = self.sequence, self.positions
        q, k, v = (x.new_zeros(self.B, self.max_len, *x.shape[1:]).index_put(at, x).transpose(1, 2) for x in (q, k, v))
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa).transpose(1, 2)[at]


@functools.cache
def _flash_attention():
    """Causal attention(q, k, v, ends, ends, longest, longest, scale) by torch or flash-attn; None without either."""
    if varlen_attn and {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters):
        return lambda *args: varlen_attn(*args[:7], scale=args[7], window_size=(-1, 0), enable_gqa=True)
    if flash_attn_varlen_func:
        return lambda *args: flash_attn_varlen_func(*args[:7], softmax_scale=args[7], causal=True)
    return None
