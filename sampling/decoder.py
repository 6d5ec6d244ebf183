"""decoder.py: the forward of a Llama-like model in few operations, on the model's own weights.

A step of a model of 1 M parameters spends most of its time between the operations: modules in modules, decorators,
norms of six operations. Here a layer is about fifteen operations. A step of a model of 100 M spends it on products of
few rows with large weights; those are packed for oneDNN, which takes half the time. It serves sampling in fp32 on a
CPU, with Llama, Mistral, Qwen2 and Qwen3 where it is seen to repeat their logits; every other model samples through
its own forward.

Letters: T packed tokens, d width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entropy import linear_logits
from sampling.kvcache import SlotCache

LEAN = "llama", "mistral", "qwen2", "qwen3"  # model types
PACKED_FROM = 2**18  # weights of a matrix; below, oneDNN's call costs more than its product saves


class Forward:
    """The model's own forward, for packed tokens and positions, both (T,): logits (T, V), or of the last `keep`."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: int = 0) -> Tensor:
        packed = {"input_ids": tokens[None], "position_ids": positions[None], "packed": cache}
        hidden = self.model.base_model(**packed, use_cache=False).last_hidden_state
        return linear_logits(hidden[0, -keep:], self.model.get_output_embeddings().weight)

    def pack(self, rows: int) -> None:
        """Makes ready for many calls with about so many rows and with the weights as they are now."""

    def unpack(self) -> None:
        """Gives back what `pack` took."""


@torch.inference_mode()
def fastest_forward(model, max_len: int, cache: SlotCache) -> Forward:
    """The lean forward, packed, if it gives the logits of the model's own on a few tokens, else the model's own.

    Runs inside `attention(model)`, as the forward does that it returns."""
    own = Forward(model)
    if model.config.model_type not in LEAN or model.dtype != torch.float32 or model.device.type != "cpu":
        return own
    tokens = torch.arange(min(6, max_len))
    try:
        lean = LeanForward(model, max_len)
        lean.pack(len(cache.kv[0, 0]))
        cache.begin_prefill([len(tokens)])
        want, got = (forward(tokens, tokens, cache, 0) for forward in (own, lean))
    except (AttributeError, TypeError, RuntimeError):  # a model of that type with other parts in it
        return own
    return lean if (got - want).abs().max() <= 1e-4 * want.abs().max() else own


class LeanForward(Forward):
    """Holds the angles of all positions, and from `pack` to `unpack`, where alone it can be called, copied weights."""

    def __init__(self, model, max_len: int):
        self.base, self.head, self.layers = model.base_model, model.get_output_embeddings(), []
        places = torch.arange(max_len, device=model.device)[None]
        cos, sin = self.base.rotary_emb(self.base.embed_tokens.weight, places)  # (1, max_len, D)
        first, second = sin[0].chunk(2, dim=-1)
        self.angles = torch.stack((cos[0], torch.cat((-first, second), dim=-1)))  # for x * cos + roll(x, D/2) * sin

    def pack(self, rows: int) -> None:
        if self.layers:  # `fastest_forward` has tried it, and left it packed for the call that asked
            return
        for layer in self.base.layers:
            a, m = layer.self_attn, layer.mlp
            side_by_side = [(a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,)]
            self.layers.append((layer, *(_product(rows, *linears) for linears in side_by_side)))
        self.to_logits = _product(rows, self.head)

    def unpack(self) -> None:
        self.layers, self.to_logits = [], None

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: int = 0) -> Tensor:
        angles = self.angles[:, positions, None]  # (2, T, 1, D)
        x = F.embedding(tokens, self.base.embed_tokens.weight)  # (T, d)
        for layer, qkv, out, gate_up, down in self.layers:
            x = x + out(_attention(layer.self_attn, qkv(_normed(x, layer.input_layernorm)), angles, cache))
            gate, up = gate_up(_normed(x, layer.post_attention_layernorm)).chunk(2, dim=-1)
            x = x + down(layer.mlp.act_fn(gate) * up)
        return self.to_logits(_normed(x[-keep:], self.base.norm))


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _attention(a: nn.Module, qkv: Tensor, angles: Tensor, cache: SlotCache) -> Tensor:
    """qkv (T, (H + 2K) D) -> (T, H D)."""
    T, D, K = len(qkv), a.head_dim, a.k_proj.out_features // a.head_dim
    both, v = qkv.view(T, -1, D).tensor_split((-K,), dim=1)  # queries and keys are rotated together
    if hasattr(a, "q_norm"):
        both = torch.cat((_normed(both[:, :-K], a.q_norm), _normed(both[:, -K:], a.k_norm)), dim=1)
    both = torch.addcmul(both * angles[0], both.roll(D // 2, -1), angles[1])
    return cache.attend(a.layer_idx, both[:, :-K], both[:, -K:], v, a.scaling).reshape(T, -1)


def _product(rows: int, *linears: nn.Linear) -> Callable[[Tensor], Tensor]:
    """x -> the outputs of these layers side by side, as one product."""
    weight, bias = linears[0].weight, linears[0].bias
    if len(linears) > 1:
        weight = torch.cat([m.weight for m in linears])
        biases = [weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in linears]
        bias = torch.cat(biases) if any(m.bias is not None for m in linears) else None
    if weight.numel() < PACKED_FROM or not torch.backends.mkldnn.is_available():
        return partial(F.linear, weight=weight, bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
