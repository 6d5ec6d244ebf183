"""rollout.py: prompts -> Samples. The sampling loop over a key/value cache kept by slot, and its naive twin.

    sampler = Sampler(model, eos_ids={2}, slots=64, max_len=1024)
    groups = sampler.generate(prompts, n=8, max_new_tokens=512, seed=1)      # groups[i][j] is sample j of prompt i

A request is one sample of one prompt. It lives in a slot, one row of the cache, from its admission to its last token:

    slot   position 0            P-1           length        max_len
           |                      |              |              |
      0    p p p p p p p p p p p p r r r r r r r t . . . . . . .      p  keys/values of the prompt, computed once a
      1    p p p p p p p r r r r t . . . . . . . . . . . . . . .         group and copied into each of its slots
      2    p p p p p p p r r r r r r r r r r t . . . . . . . . .      r  of the response so far
      3    - - - - - - - - - - - - - - - - - - - - - - - - - - -      t  the step's token: written, attends to all
           '-------- attended: up to the longest row --------'           before it and itself, yields the next one
                                                                      -  free: rows 0..B-1 are active, always packed
One step feeds one token of each active row to the model as one packed sequence of B tokens. A row that ends (EOS or
budget) hands its slot to the next request at once; with none waiting, the last active row moves into the gap, so the
step shrinks with the work. A prompt's last token is not prefilled: it is the first token that the row steps with, so
all response tokens come out of the same step.

Left out: sliding windows, linear attention, logit soft-capping inside attention (refused by name), beams, prefix trees.

Letters: B active rows, T packed tokens, L attended positions, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import entropy
from errors import UserError


@dataclass(frozen=True)
class Sample:
    """One response. `logprobs` and `entropies` (nats, fp32) have one entry a response token, at the sampling temperature."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # the EOS included
    logprobs: np.ndarray
    entropies: np.ndarray
    finished: bool  # ended with an EOS; otherwise truncated by the budget


# ---- randomness: a stream of its own for each request ----------------------------------------------------------------


def stream(*key: int) -> int:
    """A 63-bit seed from a key of integers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """One seed a prompt: given, or derived from one seed and the prompt's index."""
    if isinstance(seed, int):
        return [stream(seed, index) for index in range(prompts)]
    if len(seed) != prompts:
        raise UserError(f"seed: found {len(seed)} seeds for {prompts} prompts, allowed: one integer or one a prompt")
    return [int(value) for value in seed]


def draw(logits, temperature: float, top_p: float, seeds, positions):
    """(token, log-prob, entropy), each (B,), of logits (B, V). With top_p < 1 all three are of the cut distribution."""
    if top_p < 1.0:
        ordered, order = logits.float().sort(dim=-1, descending=True)
        mass = (ordered / (temperature or 1.0)).softmax(-1)
        cut = mass.cumsum(-1) - mass >= top_p  # the mass before a token reaches top_p already
        logits = logits.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
    return entropy.sample(logits, temperature, seeds, positions)


# ---- the cache and the attention over it -----------------------------------------------------------------------------


class SlotCache:
    """Keys and values of all layers, `kv` (2, layers, slots, max_len, K, D), and what the forward under way does with them.

    `begin_prefill` or `begin_step` says what the next forward is; each attention layer then calls `attend` once.
    """

    def __init__(self, layers: int, slots: int, max_len: int, heads: int, size: int, dtype, device):
        self.kv = torch.zeros(2, layers, slots, max_len, heads, size, dtype=dtype, device=device)
        self.prefilled = None

    def begin_prefill(self, lengths: list[int]) -> None:
        """The forward packs prompts of these lengths; their keys and values go to `prefilled` (2, layers, T, K, D)."""
        _, layers, _, _, heads, size = self.kv.shape
        self.prefilled = self.kv.new_empty(2, layers, sum(lengths), heads, size)
        ids = torch.arange(max(lengths), device=self.kv.device)
        self.is_token = ids < torch.tensor(lengths, device=self.kv.device)[:, None]  # (prompts, longest)

    def begin_step(self, lengths: torch.Tensor, span: int) -> None:
        """The forward has one token for each of the rows 0..B-1, at position `lengths` (B,); it attends to `span` at most."""
        self.prefilled = None
        self.rows, self.lengths, self.span = torch.arange(len(lengths), device=lengths.device), lengths, span
        hidden = torch.arange(span, device=lengths.device) > lengths[:, None]
        self.mask = torch.zeros(hidden.shape, dtype=self.kv.dtype, device=lengths.device)
        self.mask = self.mask.masked_fill_(hidden, -torch.inf)[:, None, None]  # (B, 1, 1, L)

    def attend(self, layer: int, q, k, v, scale: float):
        """q (T, H, D), k and v (T, K, D) -> (T, H, D)."""
        return (self._attend_prompts if self.prefilled is not None else self._attend_slots)(layer, q, k, v, scale)

    def _attend_prompts(self, layer, q, k, v, scale):
        self.prefilled[0, layer], self.prefilled[1, layer] = k, v
        padded = [self._pad(x) for x in (q, k, v)]  # causal: a token never sees the padding behind it
        out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)[self.is_token]

    def _pad(self, x):
        padded = x.new_zeros(*self.is_token.shape, *x.shape[1:])
        padded[self.is_token] = x
        return padded.transpose(1, 2)

    def _attend_slots(self, layer, q, k, v, scale):
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[self.rows, self.lengths], values[self.rows, self.lengths] = k, v
        B, H, D = q.shape
        keys, values = (x[:B, : self.span].transpose(1, 2) for x in (keys, values))  # (B, K, L, D), views
        q = q.view(B, keys.shape[1], -1, D)  # the heads that share a key are its queries
        return F.scaled_dot_product_attention(q, keys, values, self.mask, scale=scale).reshape(B, H, D)


def slot_attention(module, query, key, value, attention_mask, scaling=None, slot_cache=None, **options):
    """What the model's attention layers call while a Sampler runs: (1, H, T, D) -> (1, T, H, D), nothing."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise UserError(f"model: its attention uses {name}, allowed: plain causal attention")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return slot_cache.attend(module.layer_idx, q, k, v, scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register("slot", slot_attention)


def attention_shape(config) -> tuple[int, int, int]:
    """(layers, key/value heads, head size) of a model with plain attention in all layers; UserError for any other."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds or getattr(config, "kv_lora_rank", None):
        found = ", ".join(sorted(kinds)) or "latent attention"
        raise UserError(f"model {config.model_type}: found {found}, allowed: plain causal attention in all layers")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):  # their angles depend on the longest row of the batch
        raise UserError(f"model {config.model_type}: found rope_type {rope}, allowed: one that is fixed, like default or yarn")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, size


def slot_bytes(config, max_len: int, dtype: torch.dtype) -> int:
    """Bytes of one slot: keys and values of `max_len` positions in all layers."""
    layers, heads, size = attention_shape(config)
    return 2 * layers * heads * size * dtype.itemsize * max_len


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: int  # index in the call
    sample: int
    seed: int
    ids: tuple[int, ...]
    cached: torch.Tensor | None = None  # (2, layers, P-1, K, D), shared by the group


class Sampler:
    """Samples responses from `model`, a Hugging Face causal LM with plain attention, whose module may be the policy's own.

    At most `slots` responses run at a time, each of at most `max_len` positions, prompt included.
    """

    def __init__(self, model, eos_ids: Collection[int], slots: int = 64, max_len: int = 1024):
        if slots < 1:
            raise UserError(f"slots: found {slots}, allowed: 1 or more")
        self.model, self.slots, self.max_len = model, slots, max_len
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self.cache: SlotCache | None = None
        self.row_steps = 0  # rows computed in all steps so far, against which the tokens returned are the useful part
        attention_shape(model.config)

    @torch.no_grad()
    def load(self, policy) -> float:
        """Copies the policy's weights into the sampler's own, in its dtype, one by one; returns the seconds it took."""
        start = time.perf_counter()
        if policy is not self.model:
            source = policy.state_dict()
            for name, own in self.model.state_dict().items():
                own.copy_(source[name])
        return time.perf_counter() - start

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        on_finished: Callable[[int, int, Sample], None] | None = None,
    ) -> list[list[Sample]]:
        """n samples of each prompt, `[prompt][sample]`.

        `seed`: one integer, or one a prompt; then a prompt's samples do not depend on the other prompts of the call.
        `on_finished(prompt index, sample index, sample)` is called as each response ends.
        Raises UserError for a prompt that leaves no room within `max_len`, RuntimeError for logits that are not finite.
        """
        self._check(prompts, max_new_tokens)
        seeds = prompt_seeds(seed, len(prompts))
        waiting = deque(
            Request(i, j, stream(seeds[i], j), tuple(prompt)) for i, prompt in enumerate(prompts) for j in range(n)
        )
        results: list[list[Sample]] = [[None] * n for _ in prompts]
        if self.cache is None:
            layers, heads, size = attention_shape(self.model.config)
            self.cache = SlotCache(
                layers, self.slots, self.max_len, heads, size, self.model.dtype, self.model.device
            )
        active: list[Request] = []
        state = np.zeros((4, self.slots), dtype=np.int64)  # token, length (cached positions), seed, position
        token, length, seed_of, position = state
        budget = np.zeros(self.slots, dtype=np.int64)
        tokens = np.zeros((self.slots, max_new_tokens), dtype=np.int64)
        logprobs, entropies = (np.zeros((self.slots, max_new_tokens), dtype=np.float32) for _ in range(2))

        with self._sampling():
            while waiting or active:
                while waiting and len(active) < self.slots:  # admit
                    if waiting[0].cached is None:
                        self._prefill(waiting, n)
                    request, row = waiting.popleft(), len(active)
                    active.append(request)
                    prefix = len(request.ids) - 1
                    self.cache.kv[:, :, row, :prefix] = request.cached
                    state[:, row] = request.ids[-1], prefix, request.seed, 0
                    budget[row] = min(max_new_tokens, self.max_len - len(request.ids))
                B = len(active)
                on_device = torch.from_numpy(state[:, :B]).to(self.model.device)
                drawn = self._step(*on_device, span=int(length[:B].max()) + 1, temperature=temperature, top_p=top_p)
                new, lp, h = (x.cpu().numpy() for x in drawn)
                rows, at = np.arange(B), position[:B]
                tokens[rows, at], logprobs[rows, at], entropies[rows, at] = new, lp, h
                if not np.isfinite(lp).all():
                    bad = active[int(np.argmin(np.isfinite(lp)))]
                    raise RuntimeError(f"prompt {bad.prompt}, sample {bad.sample}: the model's logits are not finite")
                token[:B] = new
                length[:B] += 1
                position[:B] += 1
                self.row_steps += B
                is_eos = np.isin(new, self.eos_ids)
                ended = is_eos | (position[:B] >= budget[:B])
                for row in np.flatnonzero(ended)[::-1]:
                    r, t = active[row], position[row]
                    sample = Sample(
                        r.ids,
                        tuple(tokens[row, :t].tolist()),
                        logprobs[row, :t].copy(),
                        entropies[row, :t].copy(),
                        bool(is_eos[row]),
                    )
                    results[r.prompt][r.sample] = sample
                    if on_finished:
                        on_finished(r.prompt, r.sample, sample)
                    last = len(active) - 1
                    if row != last:
                        self.cache.kv[:, :, row, : length[last]] = self.cache.kv[:, :, last, : length[last]]
                        for table in (tokens, logprobs, entropies, budget):
                            table[row] = table[last]
                        state[:, row] = state[:, last]
                        active[row] = active[last]
                    active.pop()
        return results

    def _check(self, prompts, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens}, allowed: 1 or more")
        for index, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < self.max_len:
                raise UserError(f"prompt {index}: found {len(prompt)} tokens, allowed: 1 to {self.max_len - 1} (max_len - 1)")

    def _prefill(self, waiting, n: int) -> None:
        """Computes the next prompts, as many as fill the slots once, and leaves their keys and values in their requests."""
        heads = []
        for request in waiting:
            if request.cached is None and (not heads or request.prompt != heads[-1].prompt):
                if len(heads) * n >= self.slots:
                    break
                heads.append(request)
        ids = [request.ids[:-1] for request in heads]
        kv = self._prefill_forward([x for x in ids if x])
        start, cached = 0, {}
        for request, x in zip(heads, ids, strict=True):
            cached[request.prompt] = kv[:, :, start : start + len(x)]
            start += len(x)
        for request in waiting:
            request.cached = cached.get(request.prompt, request.cached)

    def _prefill_forward(self, ids):
        if not ids:
            return self.cache.kv[:, :, 0, :0]
        self.cache.begin_prefill([len(x) for x in ids])
        device = self.model.device
        flat = torch.tensor([t for x in ids for t in x], device=device)
        positions = torch.cat([torch.arange(len(x), device=device) for x in ids])
        self._forward(flat, positions, logits_to_keep=1)
        return self.cache.prefilled

    def _step(self, token, length, seed, position, *, span, temperature, top_p):
        self.cache.begin_step(length, span)
        logits = self._forward(token, length, logits_to_keep=0)
        return draw(logits, temperature, top_p, seed, position)

    def _forward(self, tokens, positions, logits_to_keep: int):
        return self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
            slot_cache=self.cache,
        ).logits[0]

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Our attention in the model and dropout off, for as long as it lasts: the module may be the policy's."""
        config, training = self.model.config, self.model.training
        attention = config._attn_implementation
        config._attn_implementation = "slot"
        self.model.eval()
        try:
            yield
        finally:
            config._attn_implementation = attention
            self.model.train(training)


# ---- the naive twin --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def naive_generate(
    model, prompts, eos_ids, n=1, max_new_tokens=512, temperature=1.0, top_p=1.0, seed=0
) -> list[list[Sample]]:
    """What Sampler.generate returns, by a full forward of one sequence for each token."""

    def respond(prompt, seed) -> Sample:
        ids, rows = list(prompt), []
        while len(rows) < max_new_tokens and (not rows or rows[-1][0] not in eos_ids):
            logits = model(torch.tensor([ids], device=model.device)).logits[:, -1]
            place = torch.tensor([[seed], [len(rows)]], device=model.device)
            rows.append([x.item() for x in draw(logits, temperature, top_p, *place)])
            ids.append(rows[-1][0])
        response, logprobs, entropies = zip(*rows, strict=True)
        as_f32 = [np.array(x, dtype=np.float32) for x in (logprobs, entropies)]
        return Sample(tuple(prompt), response, *as_f32, response[-1] in eos_ids)

    seeds = prompt_seeds(seed, len(prompts))
    return [[respond(p, stream(s, j)) for j in range(n)] for p, s in zip(prompts, seeds, strict=True)]
