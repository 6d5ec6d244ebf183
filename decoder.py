"""decoder.py: the forward of a Llama-like model in few operations, on the model's own weights.

A step of a model of 1 M parameters spends most of its time between the operations: modules in modules, decorators,
norms of six operations. Here a layer is about twenty operations. A step of a model of 100 M spends it on products of
few rows with large weights; on a CPU those are packed for oneDNN, which takes half the time. It serves sampling in
fp32, with the models whose logits it is seen to repeat (Llama, Mistral, Qwen2, Qwen3); every other model samples
through its own forward.

Letters: T packed tokens, d width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcache import SlotCache

PACKED_FROM = 2**18  # weights of a matrix; below, oneDNN's call costs more than its product saves


class Forward:
    """The model's own forward, for packed tokens and positions, both (T,): logits (T, V), or of the last `keep`."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: int = 0) -> Tensor:
        packed = {"input_ids": tokens[None], "position_ids": positions[None]}
        return self.model(**packed, use_cache=False, logits_to_keep=keep, slot_cache=cache).logits[0]

    def pack(self, rows: int) -> None:
        """Makes ready for many calls with about so many rows and with the weights as they are now."""

    def unpack(self) -> None:
        """Gives back what `pack` took."""


@torch.inference_mode()
def fastest_forward(model, max_len: int, cache: SlotCache) -> Forward:
    """The lean forward if it gives the logits of the model's own on a few tokens, else the model's own.

    Runs inside `kvcache.slot_attention(model)`, as the forward does that it returns."""
    own = Forward(model)
    if not _looks_like_llama(model):
        return own
    lean = LeanForward(model, max_len)
    lean.pack(len(cache.kv[0, 0]))
    tokens = torch.arange(min(6, max_len), device=model.device)
    cache.begin_prefill([len(tokens)])
    want, got = (forward(tokens, tokens, cache, 0) for forward in (own, lean))
    return lean if (got - want).abs().max() <= 1e-4 * want.abs().max() else own


def _looks_like_llama(model) -> bool:
    base = model.base_model._modules
    return (
        model.dtype == torch.float32
        and {"embed_tokens", "layers", "norm", "rotary_emb"} == set(base)
        and isinstance(model.get_output_embeddings(), nn.Linear)
        and all(
            set(layer._modules) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
            and set(layer.self_attn._modules) - {"q_norm", "k_norm"} == {"q_proj", "k_proj", "v_proj", "o_proj"}
            and set(layer.mlp._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}
            for layer in base["layers"]
        )
    )


class LeanForward(Forward):
    """Holds the angles of all positions, and from `pack` to `unpack` a copy of the large matrices."""

    def __init__(self, model, max_len: int):
        self.base, self.head, self.packed = model.base_model, model.get_output_embeddings(), {}
        self.large = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.numel() >= PACKED_FROM]
        places = torch.arange(max_len, device=model.device)[None]
        cos, sin = self.base.rotary_emb(self.base.embed_tokens.weight, places)  # (1, max_len, D)
        first, second = sin[0].chunk(2, dim=-1)
        self.angles = torch.stack((cos[0], torch.cat((-first, second), dim=-1)))  # for x * cos + roll(x, D/2) * sin

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: int = 0) -> Tensor:
        angles = self.angles[:, positions, None]  # (2, T, 1, D)
        x = F.embedding(tokens, self.base.embed_tokens.weight)  # (T, d)
        for layer in self.base.layers:
            x = x + self._attention(layer.self_attn, _normed(x, layer.input_layernorm), angles, cache)
            x = x + self._mlp(layer.mlp, _normed(x, layer.post_attention_layernorm))
        return self._linear(self.head, _normed(x[-keep:], self.base.norm))

    def pack(self, rows: int) -> None:
        """Copies the large weights in oneDNN's order."""
        if self.base.device.type == "cpu" and torch.backends.mkldnn.is_available():
            self.packed = {m: torch.ops.mkldnn._reorder_linear_weight(m.weight, rows) for m in self.large}

    def unpack(self) -> None:
        self.packed = {}

    def _linear(self, m: nn.Module, x: Tensor) -> Tensor:
        if (weight := self.packed.get(m)) is None:
            return m(x)
        return torch.ops.mkldnn._linear_pointwise(x, weight, m.bias, "none", [], "")

    def _attention(self, a: nn.Module, x: Tensor, angles: Tensor, cache: SlotCache) -> Tensor:
        T, D = len(x), a.head_dim
        q, k, v = (self._linear(project, x).view(T, -1, D) for project in (a.q_proj, a.k_proj, a.v_proj))
        if hasattr(a, "q_norm"):
            q, k = _normed(q, a.q_norm), _normed(k, a.k_norm)
        both = torch.cat((q, k), dim=1)
        both = torch.addcmul(both * angles[0], both.roll(D // 2, -1), angles[1])  # rotated
        q, k = both.split((q.shape[1], k.shape[1]), dim=1)
        return self._linear(a.o_proj, cache.attend(a.layer_idx, q, k, v, a.scaling).reshape(T, -1))

    def _mlp(self, m: nn.Module, x: Tensor) -> Tensor:
        return self._linear(m.down_proj, m.act_fn(self._linear(m.gate_proj, x)) * self._linear(m.up_proj, x))


def _normed(x: Tensor, norm: nn.Module) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
