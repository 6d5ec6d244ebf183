"""rollout.py: prompts -> Samples. The sampling loop over the slots of a key/value cache, and its reference.

    sampler = Sampler(model, eos_ids={2}, slots=64, max_len=1024)
    groups = sampler.generate(prompts, n=8, max_new_tokens=512, seed=1)    # groups[i][j]: sample j of prompt i

A request is one sample of one prompt. From admission to its last token it holds one slot, a row of the cache (other
engines call their number max_num_seqs):

    slot   position 0            P-1           length        max_len
           |                      |              |              |
      0    p p p p p p p p p p p p r r r r r r r t . . . . . .     p  of the prompt: computed once per group,
      1    p p p p p p p p r r r r r r t . . . . . . . . . . .        copied into each of its slots
      2    p p p p p p p r r r r t . . . . . . . . . . . . . .     r  of the response so far
      3    p p p p r t . . . . . . . . . . . . . . . . . . . .     t  the token of this step: it attends to itself and
      4    - - - - - - - - - - - - - - - - - - - - - - - - - -        all before it and yields the next token
           '- attended: up to the longest of the segment -'        -  free: the slots in use are always 0..B-1

Each step feeds one token of each slot in use through the model, packed as one sequence of B tokens. When a response
ends (EOS or budget), its slot takes the next request at once. If none waits, the last slot in use moves into the gap.
A prompt's last token is not prefilled but is the first step, so every response token comes out of a step. On the CPU
the slots are roughly sorted, longest first, and attention runs over a few segments of them, each as long as its
longest slot. On CUDA all shapes are fixed (B and span are rounded up to a few sizes, with one CUDA graph for each),
and the host looks for EOS every few steps; tokens drawn after an EOS are cut.

Left out: beams, prefixes shared between prompts, a cache larger than the memory of one device.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.attention import attention, attention_shape
from runtime.errors import UserError
from runtime.sharding import full
from sampling import gumbel
from sampling.decoder import fastest_forward
from sampling.kvcache import SlotCache, free_bytes, misplaced, round_up, segment_ends, slot_bytes

SORT_EVERY = 16  # steps between two sorts of the slots by length
PREFILL_TOKENS = 16384  # in one prefill, unless one prompt is longer


@dataclass(frozen=True)
class Sample:
    """One response; `logprobs` and `entropies` (nats, fp32, at the sampling temperature) have one entry per token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # the EOS included
    logprobs: np.ndarray
    entropies: np.ndarray
    finished: bool  # ended with an EOS; otherwise truncated by the budget


@dataclass(eq=False)
class CachedPrompt:
    index: int  # in the call
    ids: tuple[int, ...]
    kv: Tensor | None = None  # keys and values of ids[:-1], (2, layers, K, P-1, D), while samples of it wait


@dataclass(eq=False)
class Request:
    prompt: CachedPrompt
    sample: int
    seed: int
    budget: int  # response tokens


def prompt_seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """One seed per prompt: given, or derived from one seed and the prompt's index."""
    if isinstance(seed, int):
        return [gumbel.derive_seed(seed, index) for index in range(prompts)]
    if len(seed) != prompts:
        raise UserError(f"seed: found {len(seed)} seeds for {prompts} prompts, allowed: one, or one per prompt")
    return [int(value) for value in seed]


def eos_table(eos_ids: Collection[int], vocabulary: int) -> np.ndarray:
    """(V,) bool: which ids end a response. UserError for an id outside of the vocabulary."""
    if outside := [i for i in eos_ids if not 0 <= i < vocabulary]:
        raise UserError(f"EOS ids: found {outside[0]}, allowed: 0 to {vocabulary - 1}, the model's vocabulary")
    table = np.zeros(vocabulary, dtype=bool)
    table[list(eos_ids)] = True
    return table


# ---- the slots: which request each one holds, and what was drawn (host only)


class Slots:
    """The requests in the slots and the tokens drawn for them."""

    def __init__(self, count: int, max_new_tokens: int, is_eos: np.ndarray):
        self.is_eos = is_eos  # (V,) bool
        self.in_use = np.zeros(count, dtype=bool)
        self.state = np.zeros((5, count), dtype=np.int64)
        self.token, self.length, self.seed, self.position, self.record = self.state  # length: positions cached
        self.record[:] = np.arange(count)  # where the request stands in the tables below: it moves with the slot
        self.requests: list[Request | None] = [None] * count
        self.budget = np.zeros(count, dtype=np.int64)
        self.tokens = np.zeros((count, max_new_tokens), dtype=np.int64)
        self.logprobs, self.entropies = np.zeros((2, count, max_new_tokens), dtype=np.float32)

    def admit(self, slot: int, request: Request) -> None:
        ids, record = request.prompt.ids, self.record[slot]
        self.in_use[slot] = True
        self.state[:4, slot] = ids[-1], len(ids) - 1, request.seed, 0
        self.requests[record], self.budget[record] = request, request.budget

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, sources): free slots below B change places with the slots in use from B on."""
        B = self.in_use.sum()
        low, high = np.flatnonzero(~self.in_use[:B]), B + np.flatnonzero(self.in_use[B:])
        return np.concatenate((low, high)), np.concatenate((high, low))

    def move(self, places: np.ndarray, sources: np.ndarray) -> None:
        """Slots `places` become what slots `sources`, the same in another order, were."""
        self.state[:, places], self.in_use[places] = self.state[:, sources], self.in_use[sources]

    def draw(self, chunk: np.ndarray) -> np.ndarray:
        """Records `chunk` (steps, 3, B or more): tokens, log-probs, entropies, up to the end of each response.
        Returns the slots whose response has ended."""
        going = self.in_use.copy()
        for token, logprob, h in chunk:
            slots = np.flatnonzero(going)
            record, position, token = self.record[slots], self.position[slots], token[slots].astype(np.int64)
            if not np.isfinite(logprob[slots]).all():
                request = self.requests[record[np.argmin(np.isfinite(logprob[slots]))]]
                raise RuntimeError(f"prompt {request.prompt.index}, sample {request.sample}: logits are not finite")
            self.tokens[record, position] = token
            self.logprobs[record, position], self.entropies[record, position] = logprob[slots], h[slots]
            self.token[slots], self.position[slots] = token, position + 1
            self.length[slots] += 1
            going[slots] = ~(self.is_eos[token] | (position + 1 >= self.budget[record]))
        return np.flatnonzero(self.in_use & ~going)

    def release(self, slot: int) -> tuple[Request, Sample]:
        """Frees the slot; returns its request and the sample."""
        record, end = self.record[slot], self.position[slot]
        request, tokens = self.requests[record], self.tokens[record, :end]
        stats = self.logprobs[record, :end].copy(), self.entropies[record, :end].copy()
        self.in_use[slot], self.length[slot] = False, 0
        return request, Sample(request.prompt.ids, tuple(tokens.tolist()), *stats, bool(self.is_eos[tokens[-1]]))


# ---- the loop


class Sampler:
    """Samples responses from `model`, a Hugging Face causal LM with plain attention; it may be the policy itself.

    At most `slots` responses run at a time (None: as many as memory holds, up to `most`), each of at most `max_len`
    positions, prompt included. `fixed_shapes`, `eos_every`, `graphs`: on, 8 and on with CUDA; off, 1 and off without.
    """

    def __init__(
        self,
        model,
        eos_ids: Collection[int],
        slots: int | None = 64,
        max_len: int = 1024,
        fixed_shapes: bool | None = None,
        eos_every: int | None = None,
        graphs: bool | None = None,
        most: int = 512,
    ):
        self.model, self.device, self.max_len = model, model.device, max_len
        cuda = self.device.type == "cuda"
        self.fixed_shapes = cuda if fixed_shapes is None else fixed_shapes
        self.eos_every = eos_every or (8 if cuda else 1)
        self.advance = self._step_by_graph if (cuda if graphs is None else graphs) else self._step
        self.shape = attention_shape(model, max_len)
        self.is_eos = eos_table(eos_ids, len(model.get_output_embeddings().weight))
        self.slots = self._fit(slots, most)
        self.cache, self.graphs, self.load_seconds = None, {}, 0.0
        self.tokens = self.slot_steps = 0  # tokens returned, and slots computed for them, in all calls so far

    def _fit(self, slots: int | None, at_most: int) -> int:
        each, free = slot_bytes(self.shape, self.max_len, self.model.dtype), free_bytes(self.device)
        most = int(0.9 * free) // each
        wanted = min(most, at_most) if slots is None else slots
        if not 1 <= wanted <= most:
            raise UserError(
                f"slots: found {slots} of {each / 2**20:,.2f} MiB each at max_len {self.max_len}, allowed: 1 to {most} "
                f"in {free / 2**30:,.1f} GiB of free memory (one slot: max_len up to {most * self.max_len:,})"
            )
        return wanted

    def memory(self) -> str:
        """The estimate to print before a long run."""
        size = self.slots * slot_bytes(self.shape, self.max_len, self.model.dtype) / 2**30
        return f"{self.slots} slots x {self.max_len:,} positions: {size:,.2f} GiB of keys and values"

    @torch.no_grad()
    def load(self, policy) -> float:
        """Copies the policy's weights into the sampler's model, in its dtype; returns the seconds."""
        start = time.perf_counter()
        if policy is not self.model:
            source = policy.state_dict()
            for name, own in self.model.state_dict().items():
                own.copy_(full(source[name], own.dtype))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.load_seconds = time.perf_counter() - start
        return self.load_seconds

    def release(self) -> None:
        """Gives the cache's memory back until the next call."""
        self.cache, self.graphs = None, {}

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int | Sequence[int] = 1,
        max_new_tokens: int | Sequence[int] = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        on_finished: Callable[[int, int, Sample], None] | None = None,
        known: Mapping[tuple[int, int], Sample] | None = None,
    ) -> list[list[Sample]]:
        """n samples of each prompt, `[prompt][sample]`.

        `n`, `max_new_tokens`, `seed`: one integer, or one per prompt. With a seed per prompt, its samples do not depend
        on the other prompts of the call.
        `on_finished(prompt index, sample index, sample)` is called when a response ends. `known` has samples of an
        interrupted call by these indices: they are returned as they are, and only the others are sampled.
        Raises UserError for a prompt that leaves no room within `max_len`, RuntimeError for logits not finite.
        """
        counts, budgets = ([x] * len(prompts) if isinstance(x, int) else x for x in (n, max_new_tokens))
        waiting, known = self._requests(prompts, counts, budgets, seed), known or {}
        waiting = deque(r for r in waiting if (r.prompt.index, r.sample) not in known)
        results = [[known.get((i, j)) for j in range(count)] for i, count in enumerate(counts)]
        slots = Slots(self.slots, max(budgets, default=1), self.is_eos)
        with attention(self.model), self._ready():
            for step in itertools.count():
                self._admit(waiting, slots)
                self._move(slots, *slots.gaps())
                B = int(slots.in_use.sum())
                if B == 0:
                    return results
                if not self.fixed_shapes and step % SORT_EVERY == 0:
                    self._move(slots, *misplaced(slots.length[:B]))
                for slot in slots.draw(self._decode_chunk(slots.state, B, temperature, top_p)):
                    request, sample = slots.release(slot)
                    results[request.prompt.index][request.sample] = sample
                    self.tokens += len(sample.response_ids)
                    if on_finished:
                        on_finished(request.prompt.index, request.sample, sample)

    def _requests(self, prompts, counts: Sequence[int], budgets: Sequence[int], seed) -> list[Request]:
        if min(budgets, default=1) < 1:
            raise UserError(f"max_new_tokens: found {min(budgets)}, allowed: 1 or more")
        requests, most, seeds = [], self.max_len - 1, prompt_seeds(seed, len(prompts))
        for index, (ids, n, budget, own_seed) in enumerate(zip(prompts, counts, budgets, seeds, strict=True)):
            if not 1 <= len(ids) <= most:
                raise UserError(f"prompt {index}: found {len(ids)} tokens, allowed: 1 to {most} (max_len - 1)")
            prompt, budget = CachedPrompt(index, tuple(ids)), min(budget, self.max_len - len(ids))
            requests += [Request(prompt, j, gumbel.derive_seed(own_seed, j), budget) for j in range(n)]
        return requests

    @contextlib.contextmanager
    def _ready(self) -> Iterator[None]:
        if self.cache is None:
            self.cache = SlotCache(self.shape, self.slots, self.max_len, self.model.dtype, self.device)
            self.state = torch.zeros(4, self.slots, dtype=torch.long, device=self.device)
            self.forward = fastest_forward(self.model, self.max_len, self.cache)
        try:
            self.forward.pack(self.slots)
            yield
        finally:
            self.forward.unpack()

    def _admit(self, waiting: deque[Request], slots: Slots) -> None:
        for slot in np.flatnonzero(~slots.in_use)[: len(waiting)]:
            prompt = waiting[0].prompt
            if prompt.kv is None:
                self._prefill(waiting)
            self.cache.kv[:, :, slot, :, : len(prompt.ids) - 1] = prompt.kv
            slots.admit(slot, waiting.popleft())
            if not waiting or waiting[0].prompt is not prompt:
                prompt.kv = None

    def _prefill(self, waiting: deque[Request]) -> None:
        """Computes the prompts of the next requests, as many as there are slots, within PREFILL_TOKENS."""
        prompts, total = [], 0
        for request in itertools.islice(waiting, self.slots):
            if not prompts or request.prompt is not prompts[-1]:
                total += len(request.prompt.ids)
                if prompts and total > PREFILL_TOKENS:
                    break
                prompts.append(request.prompt)
        lengths = [len(prompt.ids) - 1 for prompt in prompts]
        tokens = torch.tensor([x for prompt in prompts for x in prompt.ids[:-1]], dtype=torch.long, device=self.device)
        positions = self.cache.begin_prefill(lengths)
        if len(tokens):
            self.forward(tokens, positions, self.cache, 1)
        for prompt, kv in zip(prompts, self.cache.prefilled.split(lengths, dim=3), strict=True):
            prompt.kv = kv

    def _move(self, slots: Slots, places: np.ndarray, sources: np.ndarray) -> None:
        if len(places):
            self.cache.move(places, sources, int(slots.length[sources].max()))
            slots.move(places, sources)

    def _decode_chunk(self, state: np.ndarray, B: int, temperature: float, top_p: float) -> np.ndarray:
        """`eos_every` steps of slots 0..B-1 (or more) -> (steps, 3, slots): tokens, log-probs, entropies."""
        self.state.copy_(torch.from_numpy(state[:4]))
        reach = np.minimum(state[1, :B] + self.eos_every, self.max_len)  # positions cached after the chunk
        if self.fixed_shapes:
            B = round_up(B, 1, self.slots)
            segments = ((0, B, round_up(int(reach.max()), 256, self.max_len)),)
        else:
            starts, ends = [0, *segment_ends(B)[:-1]], segment_ends(B)
            segments = tuple(zip(starts, ends, np.maximum.reduceat(reach, starts).tolist(), strict=True))
        self.slot_steps += B * self.eos_every
        drawn = [self.advance(B, segments, temperature, top_p) for _ in range(self.eos_every)]
        return torch.stack(drawn).cpu().numpy()

    def _step(self, B: int, segments, temperature: float, top_p: float) -> Tensor:
        """One token for each of slots 0..B-1, from the state on the device and back into it -> (3, B) fp64."""
        token, length, seed, position = self.state[:, :B]
        self.cache.begin_step(length, segments)
        drawn = gumbel.sample(self.forward(token, length, self.cache, 0), temperature, seed, position, top_p)
        token.copy_(drawn[0])
        length.add_(1).clamp_(max=self.max_len - 1)  # a slot past its end stays inside the cache
        position.add_(1)
        return torch.stack([x.double() for x in drawn])  # exact: ids are below 2 ** 53

    def _step_by_graph(self, *step) -> Tensor:
        """`_step` as a CUDA graph, captured when its shapes and options first come up."""
        if step not in self.graphs:
            before = self.state.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # once without capture, for what must not initialise within it
                self._step(*step)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                out = self._step(*step)
            self.graphs[step] = graph, out
            self.state.copy_(before)
        graph, out = self.graphs[step]
        graph.replay()
        return out.clone()


# ---- the reference


@torch.inference_mode()
def reference_generate(
    model, prompts, eos_ids, n=1, max_new_tokens=512, temperature=1.0, top_p=1.0, seed=0
) -> list[list[Sample]]:
    """What Sampler.generate returns, by a full forward of one sequence for each token."""

    def one(prompt, seed) -> Sample:
        ids, drawn = list(prompt), []
        while len(drawn) < max_new_tokens and (not drawn or drawn[-1][0] not in eos_ids):
            logits = model(torch.tensor([ids], device=model.device)).logits[:, -1]
            place = torch.tensor([[seed], [len(drawn)]], device=model.device)
            drawn.append([x.item() for x in gumbel.sample(logits, temperature, *place, top_p)])
            ids.append(drawn[-1][0])
        response, *stats = zip(*drawn, strict=True)
        return Sample(tuple(prompt), response, *np.array(stats, dtype=np.float32), response[-1] in eos_ids)

    seeds = prompt_seeds(seed, len(prompts))
    return [[one(p, gumbel.derive_seed(s, j)) for j in range(n)] for p, s in zip(prompts, seeds, strict=True)]
