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
def attention(model) -> Iterator[None]:
    """Within the block the model attends by `packed` and its dropout is off; afterwards both are as before."""
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = "packed"
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = before
        model.train(training)


def attention_shape(model, max_len: int) -> tuple[int, int, int]:
    """(layers, K, D), seen in a forward of one token. UserError where not every layer calls plain attention once."""
    config, calls = model.config, []
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {x.get("rope_type") for x in (rope, *rope.values()) if isinstance(x, dict)}
    refused = kinds & {"dynamic", "longrope"}  # their angles depend on the longest sequence of the batch
    refused |= set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if refused:
        raise UserError(f"model {config.model_type}: found {', '.join(sorted(refused))}, allowed: {SUPPORTED}")

    def attend(layer, q, k, v, scale):
        calls.append((layer, k.shape[1:], v.shape[1:]))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    packed = SimpleNamespace(attend=attend, max_len=max_len)
    found = "layers of other kinds"
    try:
        with attention(model), torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, packed=packed)
    except UserError:
        raise
    except Exception as error:  # a model that does not take our attention fails in a way of its own
        found = f"layers that do not take another attention ({type(error).__name__})"
    heads = tuple(calls[0][1]) if calls else ()
    if not calls or calls != [(layer, heads, heads) for layer in range(config.num_hidden_layers)]:
        raise UserError(f"model {config.model_type}: found {found}, allowed: {SUPPORTED}")
    return len(calls), *heads


class Packing:
    """Sequences of these lengths, one after another. `positions` [T] restart at each of them."""

    def __init__(self, lengths: Sequence[int], device: torch.device):
        sizes = torch.tensor(lengths)
        self.B, self.max_len = len(lengths), max(lengths)
        self.ends = F.pad(sizes.cumsum(0), (1, 0)).to(device, torch.int32)
        self.sequence = torch.repeat_interleave(torch.arange(self.B), sizes).to(device)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)

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
