"""rollout.py: prompts -> Samples. The sampling loop over the slots of a key/value cache, and its naive twin.

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

from runtime.errors import UserError
from runtime.sharding import full
from sampling import gumbel
from sampling.decoder import fastest_forward
from sampling.kvcache import (
    SlotCache,
    attention_shape,
    free_bytes,
    misplaced,
    round_up,
    segment_ends,
    slot_attention,
    slot_bytes,
)

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


def prompt_seeds(seed: int | Sequence[int], prompts: int) -> list[int]:
    """One seed a prompt: given, or derived from one seed and the prompt's index."""
    if isinstance(seed, int):
        return [gumbel.derive_seed(seed, index) for index in range(prompts)]
    if len(seed) != prompts:
        raise UserError(f"seed: found {len(seed)} seeds for {prompts} prompts, allowed: one, or one a prompt")
    return [int(value) for value in seed]


# ---- the rows: who is where, and what was drawn (host only)


class Rows:
    """The requests in the rows and what they have drawn."""

    def __init__(self, slots: int, max_new_tokens: int, is_eos: np.ndarray):
        self.is_eos = is_eos  # (V,) bool
        self.in_use = np.zeros(slots, dtype=bool)
        self.state = np.zeros((5, slots), dtype=np.int64)
        self.token, self.length, self.seed, self.position, self.record = self.state  # length: positions cached
        self.record[:] = np.arange(slots)  # the row's line in the tables below, whose lines do not move
        self.requests: list[Request | None] = [None] * slots
        self.budget = np.zeros(slots, dtype=np.int64)
        self.tokens = np.zeros((slots, max_new_tokens), dtype=np.int64)
        self.logprobs, self.entropies = np.zeros((2, slots, max_new_tokens), dtype=np.float32)

    def admit(self, row: int, request: Request) -> None:
        ids, record = request.prompt.ids, self.record[row]
        self.in_use[row] = True
        self.state[:4, row] = ids[-1], len(ids) - 1, request.seed, 0
        self.requests[record], self.budget[record] = request, request.budget

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """(places, sources): free rows below B change places with the rows in use from B on."""
        B = self.in_use.sum()
        low, high = np.flatnonzero(~self.in_use[:B]), B + np.flatnonzero(self.in_use[B:])
        return np.concatenate((low, high)), np.concatenate((high, low))

    def move(self, places: np.ndarray, sources: np.ndarray) -> None:
        """Rows `places` become what rows `sources`, the same in another order, were."""
        self.state[:, places], self.in_use[places] = self.state[:, sources], self.in_use[sources]

    def draw(self, chunk: np.ndarray) -> np.ndarray:
        """Records `chunk` (steps, 3, B or more): tokens, log-probs, entropies. Returns the rows that ended; what was
        drawn behind an end is cut."""
        going = self.in_use.copy()
        for token, logprob, h in chunk:
            rows = np.flatnonzero(going)
            record, position, token = self.record[rows], self.position[rows], token[rows].astype(np.int64)
            self.tokens[record, position] = token
            self.logprobs[record, position], self.entropies[record, position] = logprob[rows], h[rows]
            self._refuse_non_finite(record, logprob[rows])
            self.token[rows], self.position[rows] = token, position + 1
            self.length[rows] += 1
            going[rows] = ~(self.is_eos[token] | (position + 1 >= self.budget[record]))
        return np.flatnonzero(self.in_use & ~going)

    def _refuse_non_finite(self, record: np.ndarray, logprob: np.ndarray) -> None:
        if not np.isfinite(logprob).all():
            request = self.requests[record[np.argmin(np.isfinite(logprob))]]
            raise RuntimeError(f"prompt {request.prompt.index}, sample {request.sample}: logits that are not finite")

    def release(self, row: int) -> tuple[Request, Sample]:
        """Frees the row and hands out what its request has drawn."""
        record, end = self.record[row], self.position[row]
        request, tokens = self.requests[record], self.tokens[record, :end]
        stats = self.logprobs[record, :end].copy(), self.entropies[record, :end].copy()
        self.in_use[row], self.length[row] = False, 0
        return request, Sample(request.prompt.ids, tuple(tokens.tolist()), *stats, bool(self.is_eos[tokens[-1]]))


# ---- the loop


class Sampler:
    """Samples responses from `model`, a Hugging Face causal LM with plain attention; it may be the policy itself.

    At most `slots` responses run at a time (None: as many as memory holds, up to 512), each of at most `max_len`
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
    ):
        self.model, self.device, self.max_len = model, model.device, max_len
        cuda = self.device.type == "cuda"
        self.fixed_shapes = cuda if fixed_shapes is None else fixed_shapes
        self.eos_every = eos_every or (8 if cuda else 1)
        self.advance = self._replay if (cuda if graphs is None else graphs) else self._step
        self.is_eos = np.zeros(model.config.vocab_size, dtype=bool)
        self.is_eos[sorted(eos_ids)] = True
        self.shape = attention_shape(model, max_len)
        self.slots = self._fit(slots)
        self.cache, self.graphs, self.load_seconds = None, {}, 0.0
        self.tokens = self.row_steps = 0  # handed out, and rows computed for them, in all calls so far

    def _fit(self, slots: int | None) -> int:
        each, free = slot_bytes(self.shape, self.max_len, self.model.dtype), free_bytes(self.device)
        most = int(0.9 * free) // each
        wanted = min(most, 512) if slots is None else slots
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
        """Copies the policy's weights into the sampler's own, one by one and in its dtype; returns the seconds."""
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
        n: int = 1,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        on_finished: Callable[[int, int, Sample], None] | None = None,
        known: Mapping[tuple[int, int], Sample] | None = None,
    ) -> list[list[Sample]]:
        """n samples of each prompt, `[prompt][sample]`.

        `seed`: one integer, or one a prompt; then a prompt's samples do not depend on the other prompts of the call.
        `on_finished(prompt index, sample index, sample)` is called as each response ends. `known` has the samples of an
        interrupted call by these indices: they are returned, not sampled again, and the others are what they were.
        Raises UserError for a prompt that leaves no room within `max_len`, RuntimeError for logits not finite.
        """
        waiting, known = self._requests(prompts, n, max_new_tokens, seed), known or {}
        waiting = deque(r for r in waiting if (r.prompt.index, r.sample) not in known)
        results = [[known.get((i, j)) for j in range(n)] for i in range(len(prompts))]
        rows = Rows(self.slots, max_new_tokens, self.is_eos)
        with slot_attention(self.model), self._ready():
            for step in itertools.count():
                self._admit(waiting, rows)
                self._move(rows, *rows.gaps())
                B = int(rows.in_use.sum())
                if B == 0:
                    return results
                if not self.fixed_shapes and step % SORT_EVERY == 0:
                    self._move(rows, *misplaced(rows.length[:B]))
                for row in rows.draw(self._decode_chunk(rows.state, B, temperature, top_p)):
                    request, sample = rows.release(row)
                    results[request.prompt.index][request.sample] = sample
                    self.tokens += len(sample.response_ids)
                    if on_finished:
                        on_finished(request.prompt.index, request.sample, sample)

    def _requests(self, prompts, n: int, max_new_tokens: int, seed) -> deque[Request]:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: found {max_new_tokens}, allowed: 1 or more")
        waiting, most = deque(), self.max_len - 1
        for index, (ids, own_seed) in enumerate(zip(prompts, prompt_seeds(seed, len(prompts)), strict=True)):
            if not 1 <= len(ids) <= most:
                raise UserError(f"prompt {index}: found {len(ids)} tokens, allowed: 1 to {most} (max_len - 1)")
            prompt, budget = Prompt(index, tuple(ids)), min(max_new_tokens, self.max_len - len(ids))
            waiting += [Request(prompt, j, gumbel.derive_seed(own_seed, j), budget) for j in range(n)]
        return waiting

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

    def _admit(self, waiting: deque[Request], rows: Rows) -> None:
        for row in np.flatnonzero(~rows.in_use)[: len(waiting)]:
            prompt = waiting[0].prompt
            if prompt.cached is None:
                self._prefill(waiting)
            self.cache.kv[:, :, row, :, : len(prompt.ids) - 1] = prompt.cached
            rows.admit(row, waiting.popleft())
            if not waiting or waiting[0].prompt is not prompt:
                prompt.cached = None

    def _prefill(self, waiting: deque[Request]) -> None:
        """Computes the prompts of the next requests, as many as there are slots, within PREFILL_TOKENS."""
        prompts = [waiting[0].prompt]
        for request in itertools.islice(waiting, self.slots):
            if request.prompt is not prompts[-1]:
                if sum(len(prompt.ids) for prompt in (*prompts, request.prompt)) > PREFILL_TOKENS:
                    break
                prompts.append(request.prompt)
        lengths = [len(prompt.ids) - 1 for prompt in prompts]
        tokens = torch.tensor([x for prompt in prompts for x in prompt.ids[:-1]], dtype=torch.long, device=self.device)
        positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
        self.cache.begin_prefill(lengths)
        if len(tokens):
            self.forward(tokens, positions, self.cache, 1)
        for prompt, cached in zip(prompts, self.cache.prefilled.split(lengths, dim=3), strict=True):
            prompt.cached = cached

    def _move(self, rows: Rows, places: np.ndarray, sources: np.ndarray) -> None:
        if len(places):
            self.cache.move(places, sources, int(rows.length[sources].max()))
            rows.move(places, sources)

    def _decode_chunk(self, state: np.ndarray, B: int, temperature: float, top_p: float) -> np.ndarray:
        """`eos_every` steps of rows 0..B-1 (or more) -> (steps, 3, rows): tokens, log-probs, entropies."""
        self.state.copy_(torch.from_numpy(state[:4]))
        reach = np.minimum(state[1, :B] + self.eos_every, self.max_len)  # positions cached after the chunk
        if self.fixed_shapes:
            B = round_up(B, 1, self.slots)
            segments = ((0, B, round_up(int(reach.max()), 256, self.max_len)),)
        else:
            starts, ends = [0, *segment_ends(B)[:-1]], segment_ends(B)
            segments = tuple(zip(starts, ends, np.maximum.reduceat(reach, starts).tolist(), strict=True))
        self.row_steps += B * self.eos_every
        drawn = [self.advance(B, segments, temperature, top_p) for _ in range(self.eos_every)]
        return torch.stack(drawn).cpu().numpy()

    def _step(self, B: int, segments, temperature: float, top_p: float) -> Tensor:
        """One token for each of rows 0..B-1, from the state on the device and back into it -> (3, B) fp64."""
        token, length, seed, position = self.state[:, :B]
        self.cache.begin_step(length, segments)
        drawn = gumbel.sample(self.forward(token, length, self.cache, 0), temperature, seed, position, top_p)
        token.copy_(drawn[0])
        length.add_(1).clamp_(max=self.max_len - 1)  # a row past its end stays inside the cache
        position.add_(1)
        return torch.stack([x.double() for x in drawn])  # exact: ids are below 2 ** 53

    def _replay(self, *step) -> Tensor:
        """`_step` as a CUDA graph, captured when its shapes and options first come up."""
        if step not in self.graphs:
            before = self.state.clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # once without capture: what initialises lazily may not do so in it
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


# ---- the naive twin


@torch.inference_mode()
def naive_generate(
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
