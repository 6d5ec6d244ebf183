"""rollout.py: prompts -> Samples. The sampling loop over a key/value cache kept by slot, and its naive twin.

    sampler = Sampler(model, eos_ids={2}, slots=64, max_len=1024)
    groups = sampler.generate(prompts, n=8, max_new_tokens=512, seed=1)    # groups[i][j]: sample j of prompt i

A request is one sample of one prompt. From admission to its last token it holds one row of the cache:

    row    position 0            P-1           length        max_len
           |                      |              |              |
      0    p p p p p p p p p p p p r r r r r r r t . . . . . .     p  of the prompt: computed once a group,
      1    p p p p p p p p r r r r r r t . . . . . . . . . . .        copied into each of its rows
      2    p p p p p p p r r r r t . . . . . . . . . . . . . .     r  of the response so far
      3    p p p p r t . . . . . . . . . . . . . . . . . . . .     t  this step's token: written, attends to all
      4    - - - - - - - - - - - - - - - - - - - - - - - - - -        before it and itself, yields the next one
           '--- attended: up to the longest of the segment --'     -  free: the rows in use are always 0..B-1

A step feeds one token of each row in use through the model, packed as one sequence of B tokens. A row that ends
(EOS or budget) goes to the next request at once; with none waiting, a row from the end moves into the gap, so that a
step shrinks with the work. A prompt's last token is not prefilled but stepped with, so that every response token
comes out of the same step. On the CPU the rows are kept roughly sorted, longest first, and attention runs over a
few segments of rows, each as long as its longest row. On CUDA all shapes are fixed (rows and span rounded up to a
few sizes, one CUDA graph for each) and the host looks for EOS every few steps; what was drawn behind it is cut.

Left out, and refused by name: sliding windows, linear or latent attention, soft-capped attention scores.

Letters: B rows, T packed tokens, L attended positions, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import entropy
from errors import UserError

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
try:
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

SORT_EVERY = 16  # steps between two sorts of the rows by length
PREFILL_TOKENS = 16384  # in one prefill, unless one prompt is longer

@dataclass(frozen=True)
class Sample:
    """One response; `logprobs` and `entropies` (nats, fp32, at the sampling temperature) have one entry a token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # the EOS included
    logprobs: np.ndarray
    entropies: np.ndarray
    finished: bool  # ended with an EOS; otherwise truncated by the budget


@dataclass(eq=False)
class Prompt:
    index: int  # in the call
    ids: tuple[int, ...]
    cached: Tensor | None = None  # keys and values of ids[:-1], (2, layers, K, P-1, D), while samples of it wait


@dataclass(eq=False)
class Request:
    prompt: Prompt
    sample: int
    seed: int
    budget: int  # response tokens


# ---- randomness: a stream of its own for each request


def stream(*key: int) -> int:
    """A 63-bit seed from a key of integers, the same on every machine."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """One seed a prompt: given, or derived from one seed and the prompt's index."""
    if isinstance(seed, int):
        return [stream(seed, index) for index in range(prompts)]
    if len(seed) != prompts:
        raise UserError(f"seed: found {len(seed)} seeds for {prompts} prompts, allowed: one, or one a prompt")
    return [int(value) for value in seed]


def draw(logits: Tensor, temperature: float, top_p: float, seeds: Tensor, positions: Tensor):
    """(token, log-prob, entropy), each (B,), of logits (B, V). With top_p < 1 all are of the cut distribution."""
    if top_p < 1.0:
        ordered, order = (logits.float() / (temperature or 1.0)).sort(dim=-1, descending=True)
        mass = ordered.softmax(-1)
        cut = mass.cumsum(-1) - mass >= top_p  # what stands before the token has reached top_p already
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return entropy.sample(logits, temperature, seeds, positions)


# ---- the cache and the attention over it


def attention_shape(config) -> tuple[int, int, int]:
    """(layers, key/value heads, head size). UserError where the config alone shows that the cache would be wrong."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {x.get("rope_type") for x in (rope, *rope.values()) if isinstance(x, dict)}
    refused = kinds & {"dynamic", "longrope"}  # angles that depend on the longest row of the batch
    refused |= set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if refused:
        names = ", ".join(sorted(refused))
        raise UserError(f"model {config.model_type}: found {names}, allowed: plain causal attention in all layers")
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, size


def slot_bytes(config, max_len: int, dtype: torch.dtype) -> int:
    """Bytes of one slot: the keys and values of `max_len` positions in all layers."""
    layers, heads, size = attention_shape(config)
    return 2 * layers * heads * size * max_len * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that a new tensor may take: unused on the card, or available to programs on the host."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class SlotCache:
    """`kv` (2, layers, slots, K, max_len, D), and what the attention layers do with it in the forward under way.

    `begin_prefill` or `begin_step` says what comes next; each attention layer then calls `attend` once.
    """

    def __init__(self, shape: tuple[int, int, int], slots: int, max_len: int, dtype, device: torch.device):
        layers, heads, size = shape
        if device.type == "cuda":  # the memory order of the flash kernels: heads side by side at a position
            self.kv = torch.zeros(2, layers, slots, max_len, heads, size, dtype=dtype, device=device).transpose(3, 4)
        else:
            self.kv = torch.zeros(2, layers, slots, heads, max_len, size, dtype=dtype, device=device)
        self.decode = self._pick_kernel()

    def _pick_kernel(self):
        if self.kv.is_cuda and self.kv.dtype in (torch.float16, torch.bfloat16):
            if varlen_attn and "seqused_k" in inspect.signature(varlen_attn).parameters:
                return self._varlen
            if flash_attn_with_kvcache:
                return self._flash
        return self._sdpa

    def begin_prefill(self, lengths: list[int]) -> None:
        """Prompts of these lengths come packed; `prefilled` (2, layers, K, T, D) takes their keys and values."""
        _, layers, _, heads, _, size = self.kv.shape
        self.prefilled = self.kv.new_empty(2, layers, heads, sum(lengths), size)
        place = torch.arange(max(lengths), device=self.kv.device)
        self.is_token = place < torch.tensor(lengths, device=self.kv.device)[:, None]  # (prompts, longest)
        self.attend = self._attend_prompts

    def begin_step(self, lengths: Tensor, segments: list[tuple[int, int, int]]) -> None:
        """One token comes for each row, at position `lengths` (B,). Segments: (first row, end, span), span > lengths."""
        self.rows, self.lengths = torch.arange(len(lengths), device=lengths.device), lengths
        self.segments = segments
        if self.decode == self._sdpa:
            self.masks = []
            for start, end, span in segments:
                behind = torch.arange(span, device=lengths.device) > lengths[start:end, None]
                mask = torch.zeros(behind.shape, dtype=self.kv.dtype, device=lengths.device)
                self.masks.append(mask.masked_fill_(behind, -torch.inf)[:, None, None])  # (rows, 1, 1, L)
        else:
            self.used = (lengths + 1).int()
            self.starts = torch.arange(len(lengths) + 1, device=lengths.device, dtype=torch.int32)
        self.attend = self._attend_rows

    def move(self, places: np.ndarray, sources: np.ndarray, span: int) -> None:
        """Rows `places` become what rows `sources` were, as far as position `span`."""
        at, of = (torch.from_numpy(x).to(self.kv.device) for x in (places, sources))
        self.kv[:, :, at, :, :span] = self.kv[:, :, of, :, :span]

    def _attend_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (T, H, D), k and v (T, K, D) -> (T, H, D). Padded on the right, where causal tokens do not look."""
        self.prefilled[0, layer], self.prefilled[1, layer] = k.transpose(0, 1), v.transpose(0, 1)
        padded = [self._pad(x) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*padded, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)[self.is_token]

    def _pad(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(*self.is_token.shape, *x.shape[1:])
        padded[self.is_token] = x
        return padded.transpose(1, 2)

    def _attend_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (B, H, D), k and v (B, K, D) -> (B, H, D)."""
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[self.rows, :, self.lengths], values[self.rows, :, self.lengths] = k, v
        return self.decode(q, keys, values, scale)

    def _sdpa(self, q, keys, values, scale):
        B, H, D = q.shape
        q = q.reshape(B, keys.shape[1], -1, D)  # the heads that share a key are its queries
        parts = [
            F.scaled_dot_product_attention(
                q[start:end], keys[start:end, :, :span], values[start:end, :, :span], mask, scale=scale
            )
            for (start, end, span), mask in zip(self.segments, self.masks, strict=True)
        ]
        return torch.cat(parts).view(B, H, D)

    def _varlen(self, q, keys, values, scale):
        B, span, room = len(q), self.segments[0][2], keys.shape[2]
        keys, values = (x[:B].transpose(1, 2).flatten(0, 1) for x in (keys, values))  # (B * max_len, K, D), views
        starts = self.starts, self.starts * room
        return varlen_attn(
            q, keys, values, *starts, 1, span, scale=scale, enable_gqa=True, seqused_k=self.used
        )

    def _flash(self, q, keys, values, scale):
        keys, values = (x[: len(q)].transpose(1, 2) for x in (keys, values))
        return flash_attn_with_kvcache(q[:, None], keys, values, cache_seqlens=self.used, softmax_scale=scale)[:, 0]


def slot_attention(module, query, key, value, attention_mask, scaling=None, slot_cache=None, **options):
    """What the model's attention layers call while a Sampler runs: query (1, H, T, D) -> (1, T, H, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return slot_cache.attend(module.layer_idx, q, k, v, scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register("slot", slot_attention)


# ---- the rows: who is where, and what was drawn; host only


def round_up(number: int, smallest: int, largest: int) -> int:
    """The first of smallest, 2 smallest, 4 smallest, ..., largest that is not below `number`."""
    size = smallest
    while size < number:
        size *= 2
    return min(size, largest)


def segment_ends(B: int) -> list[int]:
    """Where the segments of B rows end: the longest eighth, the rest of the longest quarter, half, all."""
    return [B // 8, B // 4, B // 2, B] if B >= 16 else [B]


def misplaced(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places, sources): the fewest moves after which no row is longer than one of a segment before it."""
    ends = segment_ends(len(lengths))
    segment = np.searchsorted(ends, np.arange(len(lengths)), side="right")
    wanted = np.empty_like(segment)
    wanted[np.argsort(-lengths, kind="stable")] = segment
    places = np.flatnonzero(wanted != segment)
    return places, places[np.argsort(wanted[places], kind="stable")]


class Rows:
    """The requests in the rows and what they have drawn. Rows in use are 0..B-1 after `compact`."""

    def __init__(self, slots: int, max_new_tokens: int, is_eos: np.ndarray):
        self.is_eos = is_eos  # (V,) bool
        self.in_use = np.zeros(slots, dtype=bool)
        self.state = np.zeros((5, slots), dtype=np.int64)
        self.token, self.length, self.seed, self.position, self.record = self.state  # length: positions cached
        self.record[:] = np.arange(slots)  # where the row's request is in the tables below, which do not move
        self.requests: list[Request | None] = [None] * slots
        self.budget = np.zeros(slots, dtype=np.int64)
        self.tokens = np.zeros((slots, max_new_tokens), dtype=np.int64)
        self.logprobs, self.entropies = np.zeros((2, slots, max_new_tokens), dtype=np.float32)

    def admit(self, row: int, request: Request) -> None:
        ids, record = request.prompt.ids, self.record[row]
        self.in_use[row] = True
        self.state[:4, row] = ids[-1], len(ids) - 1, request.seed, 0
        self.requests[record], self.budget[record] = request, request.budget

    def move(self, places: np.ndarray, sources: np.ndarray) -> None:
        """Rows `places` become what rows `sources`, the same in another order, were."""
        self.state[:, places], self.in_use[places] = self.state[:, sources], self.in_use[sources]

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, sources): free rows below B change places with the rows in use from B on."""
        B = self.in_use.sum()
        low, high = np.flatnonzero(~self.in_use[:B]), B + np.flatnonzero(self.in_use[B:])
        return np.concatenate((low, high)), np.concatenate((high, low))

    def draw(self, burst: np.ndarray, B: int) -> np.ndarray:
        """Records `burst` (steps, 3, B): tokens, log-probs, entropies. Returns the rows that ended; overshoot is cut."""
        going = self.in_use[:B].copy()
        for token, logprob, h in burst:
            rows = np.flatnonzero(going)
            record, position, token = self.record[rows], self.position[rows], token[rows].astype(np.int64)
            self.tokens[record, position] = token
            self.logprobs[record, position], self.entropies[record, position] = logprob[rows], h[rows]
            self._refuse_non_finite(record, logprob[rows])
            self.token[rows], self.position[rows] = token, position + 1
            self.length[rows] += 1
            going[rows] = ~(self.is_eos[token] | (position + 1 >= self.budget[record]))
        return np.flatnonzero(self.in_use[:B] & ~going)

    def _refuse_non_finite(self, record: np.ndarray, logprob: np.ndarray) -> None:
        if not np.isfinite(logprob).all():
            request = self.requests[record[np.argmin(np.isfinite(logprob))]]
            raise RuntimeError(
                f"prompt {request.prompt.index}, sample {request.sample}: the model's logits are not finite"
            )

    def release(self, row: int) -> tuple[Request, Sample]:
        """Frees the row and hands out what its request has drawn."""
        record, end = self.record[row], self.position[row]
        request, tokens = self.requests[record], self.tokens[record, :end]
        tables = self.logprobs[record, :end].copy(), self.entropies[record, :end].copy()
        self.in_use[row], self.length[row] = False, 0
        return request, Sample(request.prompt.ids, tuple(tokens.tolist()), *tables, bool(self.is_eos[tokens[-1]]))


# ---- the loop


class Sampler:
    """Samples responses from `model`, a Hugging Face causal LM with plain attention; it may be the policy itself.

    At most `slots` responses run at a time (None: as many as memory holds, up to 512), each of at most `max_len`
    positions, prompt included. `fixed_shapes` and `eos_every` are on and 8 on CUDA, off and 1 on the CPU.
    """

    def __init__(
        self,
        model,
        eos_ids: Collection[int],
        slots: int | None = 64,
        max_len: int = 1024,
        fixed_shapes: bool | None = None,
        eos_every: int | None = None,
    ):
        self.model, self.device, self.max_len = model, model.device, max_len
        cuda = self.device.type == "cuda"
        self.fixed_shapes = cuda if fixed_shapes is None else fixed_shapes
        self.eos_every = eos_every or (8 if cuda else 1)
        self.is_eos = np.zeros(model.config.vocab_size, dtype=bool)
        self.is_eos[sorted(eos_ids)] = True
        self.shape = attention_shape(model.config)
        self.slots = self._fit(slots)
        self.cache, self.graphs = None, {}
        self.tokens = self.row_steps = 0  # handed out, and rows computed for them, in all calls so far
        self._probe()

    def _fit(self, slots: int | None) -> int:
        each, free = slot_bytes(self.model.config, self.max_len, self.model.dtype), free_bytes(self.device)
        most = int(0.9 * free) // each
        if slots is not None and slots < 1 or most < 1:
            raise UserError(f"slots: found {slots}, allowed: 1 or more; at max_len {self.max_len} memory holds {most}")
        if slots is not None and slots > most:
            raise UserError(
                f"slots: found {slots} of {each / 2**20:,.0f} MiB each (max_len {self.max_len}), allowed: at most "
                f"{most} in the {free / 2**30:,.1f} GiB that are free; or max_len {self.max_len * most // slots}"
            )
        return slots or min(most, 512)

    @torch.inference_mode()
    def _probe(self) -> None:
        """A forward of one token; refuses a model that does not call plain attention once in each layer."""
        calls = []
        probe = SimpleNamespace(attend=lambda layer, q, k, v, *_: calls.append((layer, k.shape[1:], v.shape[1:])) or q)
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with self._sampling():
            self._forward(token, token, probe)
        layers, *heads = self.shape
        if calls != [(layer, tuple(heads), tuple(heads)) for layer in range(layers)]:
            raise UserError(f"model {self.model.config.model_type}: not every layer is plain attention, allowed: ...")

    def memory(self) -> str:
        """The estimate to print before a long run."""
        size = self.slots * slot_bytes(self.model.config, self.max_len, self.model.dtype) / 2**30
        return f"{self.slots} slots x {self.max_len:,} positions: {size:,.2f} GiB of keys and values"

    @torch.no_grad()
    def load(self, policy) -> float:
        """Copies the policy's weights into the sampler's own, one by one and in its dtype; returns the seconds."""
        start = time.perf_counter()
        if policy is not self.model:
            source = policy.state_dict()
            for name, own in self.model.state_dict().items():
                own.copy_(source[name])
        return time.perf_counter() - start

    def release(self) -> None:
        """Gives the cache's memory back until the next call."""
        self.cache, self.graphs = None, {}

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
        Raises UserError for a prompt that leaves no room within `max_len`, RuntimeError for logits not finite.
        """
        waiting = self._requests(prompts, n, max_new_tokens, seed)
        results: list[list[Sample]] = [[None] * n for _ in prompts]
        rows = Rows(self.slots, max_new_tokens, self.is_eos)
        self._allocate()
        with self._sampling():
            for step in itertools.count():
                self._admit(waiting, rows)
                self._move(rows, *rows.gaps())
                B = int(rows.in_use.sum())
                if B == 0:
                    return results
                if not self.fixed_shapes and step % SORT_EVERY == 0:
                    self._move(rows, *misplaced(rows.length[:B]))
                for row in rows.draw(self._burst(rows.state, B, temperature, top_p), B):
                    request, sample = rows.release(row)
                    results[request.prompt.index][request.sample] = sample
                    self.tokens += len(sample.response_ids)
                    if on_finished:
                        on_finished(request.prompt.index, request.sample, sample)

    def _requests(self, prompts, n: int, max_new_tokens: int, seed) -> deque[Request]:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens}, allowed: 1 or more")
        waiting = deque()
        for index, (ids, own_seed) in enumerate(zip(prompts, prompt_seeds(seed, len(prompts)), strict=True)):
            room = self.max_len - len(ids)
            if len(ids) < 1 or room < 1:
                raise UserError(
                    f"prompt {index}: found {len(ids)} tokens, allowed: 1 to {self.max_len - 1} (max_len less one)"
                )
            prompt = Prompt(index, tuple(ids))
            waiting += [Request(prompt, j, stream(own_seed, j), min(max_new_tokens, room)) for j in range(n)]
        return waiting

    def _allocate(self) -> None:
        if self.cache is None:
            self.cache = SlotCache(self.shape, self.slots, self.max_len, self.model.dtype, self.device)
            self.state = torch.zeros(4, self.slots, dtype=torch.long, device=self.device)

    def _admit(self, waiting: deque[Request], rows: Rows) -> None:
        for row in np.flatnonzero(~rows.in_use)[: len(waiting)]:
            if waiting[0].prompt.cached is None:
                self._prefill(waiting)
            request = waiting.popleft()
            prompt = request.prompt
            self.cache.kv[:, :, row, :, : len(prompt.ids) - 1] = prompt.cached
            rows.admit(row, request)
            if not waiting or waiting[0].prompt is not prompt:
                prompt.cached = None

    def _prefill(self, waiting: deque[Request]) -> None:
        """Computes the prompts of the requests that come next: as many as there are slots, but not too many tokens."""
        prompts = []
        for request in itertools.islice(waiting, self.slots):
            if prompts[-1:] != [request.prompt]:
                if sum(len(prompt.ids) for prompt in prompts) + len(request.prompt.ids) > PREFILL_TOKENS and prompts:
                    break
                prompts.append(request.prompt)
        lengths = [len(prompt.ids) - 1 for prompt in prompts]
        if any(lengths):
            tokens = torch.tensor([x for prompt in prompts for x in prompt.ids[:-1]], device=self.device)
            positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
            self.cache.begin_prefill(lengths)
            self._forward(tokens, positions, self.cache, logits_to_keep=1)
            parts = self.cache.prefilled.split(lengths, dim=3)
        else:
            parts = [self.cache.kv[:, :, 0, :, :0]] * len(prompts)
        for prompt, part in zip(prompts, parts, strict=True):
            prompt.cached = part

    def _move(self, rows: Rows, places: np.ndarray, sources: np.ndarray) -> None:
        if len(places):
            self.cache.move(places, sources, int(rows.length[sources].max()))
            rows.move(places, sources)

    def _burst(self, state: np.ndarray, B: int, temperature: float, top_p: float) -> np.ndarray:
        """`eos_every` steps of rows 0..B-1 (or more) -> (steps, 3, rows): tokens, log-probs, entropies."""
        self.state.copy_(torch.from_numpy(state[:4]))
        reach = np.minimum(state[1, :B] + self.eos_every, self.max_len)  # positions after the burst
        if self.fixed_shapes:
            B, span = round_up(B, 1, self.slots), round_up(reach.max(), 256, self.max_len)
            segments = ((0, B, span),)
        else:
            starts = [0, *segment_ends(B)]
            spans = np.maximum.reduceat(reach, starts[:-1]).tolist()
            segments = tuple(zip(starts, starts[1:], spans, strict=False))
        self.row_steps += B * self.eos_every
        step = self._graph if self.device.type == "cuda" else self._step
        drawn = [step(B, segments, temperature, top_p) for _ in range(self.eos_every)]
        return torch.stack(drawn).cpu().numpy()

    def _step(self, B: int, segments, temperature: float, top_p: float) -> Tensor:
        """One token for each of rows 0..B-1, from the state on the device and back into it -> (3, B) fp64."""
        token, length, seed, position = self.state[:, :B]
        self.cache.begin_step(length, segments)
        logits = self._forward(token, length, self.cache)
        drawn = draw(logits, temperature, top_p, seed, position)
        token.copy_(drawn[0])
        length.add_(1).clamp_(max=self.max_len - 1)  # rows past their end stay inside the cache
        position.add_(1)
        return torch.stack([x.double() for x in drawn])  # exact: ids are below 2 ** 53

    def _graph(self, *shape_and_options) -> Tensor:
        """`_step` as a CUDA graph, captured when its shape and options first come up."""
        if shape_and_options not in self.graphs:
            before = self.state.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # warm-up: what initialises lazily may not do so in a capture
                self._step(*shape_and_options)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                out = self._step(*shape_and_options)
            self.graphs[shape_and_options] = graph, out
            self.state.copy_(before)
        graph, out = self.graphs[shape_and_options]
        graph.replay()
        return out.clone()

    def _forward(self, tokens: Tensor, positions: Tensor, cache, logits_to_keep: int = 0) -> Tensor:
        """Packed tokens (T,) -> logits (T or logits_to_keep, V), in the model's dtype."""
        return self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
            slot_cache=cache,
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


# ---- the naive twin


@torch.inference_mode()
def naive_generate(
    model, prompts, eos_ids, n=1, max_new_tokens=512, temperature=1.0, top_p=1.0, seed=0
) -> list[list[Sample]]:
    """What Sampler.generate returns, by a full forward of one sequence for each token."""

    def respond(prompt, seed) -> Sample:
        ids, drawn = list(prompt), []
        while len(drawn) < max_new_tokens and (not drawn or drawn[-1][0] not in eos_ids):
            logits = model(torch.tensor([ids], device=model.device)).logits[:, -1]
            place = torch.tensor([[seed], [len(drawn)]], device=model.device)
            drawn.append([x.item() for x in draw(logits, temperature, top_p, *place)])
            ids.append(drawn[-1][0])
        response, *stats = zip(*drawn, strict=True)
        return Sample(tuple(prompt), response, *np.array(stats, dtype=np.float32), response[-1] in eos_ids)

    seeds = prompt_seeds(seed, len(prompts))
    return [[respond(p, stream(s, j)) for j in range(n)] for p, s in zip(prompts, seeds, strict=True)]
