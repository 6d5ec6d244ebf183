"""replay.py: what each query has seen: the sample buffer S of Algorithm 1 and the past accuracy of every query.

    buffer = ReplayBuffer(per_query=8, window=32, min_history=8, tokens=4_000_000_000)
    buffer.add(uid, responses)                         # line 9: S <- S u fresh responses
    buffer.recall(uid, correct=True, k=2, rng=rng)     # CCR: past successes of this query
    buffer.failure(uid, rng)                           # ISR: o_h, a past failure to reflect on
    buffer.accuracy(uid)                               # ISR: mean past accuracy, None while too little is known
    buffer.length(uid, before=step)                    # mean response length, for ranks that are busy equally long

A query is known by its uid and never sees the responses of another. Log-probs travel with their response, as its
`pi_old`. Left out: sharing between ranks (a uid lives on one rank) and files (runtime/bufferfile.py).
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch

PLAIN, REFLECTION = "plain", "reflection"  # the two kinds of prompt


@dataclass(frozen=True, slots=True)
class Response:
    """A verified Sample. L = len(response_ids), the end-of-sequence token included."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: np.ndarray  # (L,) fp32: log pi of the policy that sampled it, at the sampling temperature
    correct: bool  # the verdict of the verifier
    finished: bool  # ended by itself; a truncated response is never correct
    reward: float  # the outcome reward (a ranking reward has no meaning outside its group)
    step: int  # the step that sampled it
    kind: str = PLAIN


class ReplayBuffer:
    """Newest `per_query` successes and as many failures of each uid; its last `window` verdicts on plain prompts.

    At most `tokens` tokens in all, each response counted with its prompt; None: no bound. A token takes 8 bytes (id
    and log-prob). Over the bound the oldest response is evicted. A query's newest success and its newest failure are
    evicted only when nothing else is left, and the newest response of all is always kept.
    """

    def __init__(self, per_query: int = 8, window: int = 32, min_history: int = 1, tokens: int | None = None):
        self.per_query, self.window, self.min_history, self.bound = per_query, window, min_history, tokens
        self.tokens = 0  # stored ones
        self.stored: OrderedDict[int, tuple[str, Response]] = OrderedDict()  # under ascending numbers
        self.numbers: dict[tuple[str, bool], list[int]] = {}  # of a uid's responses with this verdict
        self.superseded: OrderedDict[int, None] = OrderedDict()  # all but the last of each of these lists
        self.prompts: WeakValueDictionary[bytes, np.ndarray] = WeakValueDictionary()  # by sha256, each stored once
        self.verdicts: dict[str, deque[bool]] = {}
        self.lengths: dict[str, deque[tuple[int, float]]] = {}  # (step, mean tokens) of the last plain groups
        self.files: dict[Path, list[int]] = {}  # of the newest checkpoint; numbers of all responses in each

    def __len__(self) -> int:
        return len(self.stored)

    def add(self, uid: str, samples: Iterable[Response]) -> None:
        """Stores fresh responses of `uid` and evicts the oldest beyond the bounds. Never give it replayed ones."""
        samples = list(samples)
        for response in samples:
            self._store(uid, self._compact(response))
            if response.kind == PLAIN:
                self.verdicts.setdefault(uid, deque(maxlen=self.window)).append(bool(response.correct))
        if plain := [len(response.response_ids) for response in samples if response.kind == PLAIN]:
            seen = samples[0].step, sum(plain) / len(plain)
            self.lengths.setdefault(uid, deque(maxlen=self.window)).append(seen)

    def _compact(self, r: Response) -> Response:
        """The response in arrays of its own; equal prompts share one."""
        prompt = np.array(r.prompt_ids, np.int32)
        prompt = self.prompts.setdefault(hashlib.sha256(prompt).digest(), prompt)
        ids, logprobs = np.array(r.response_ids, np.int32), np.array(r.logprobs, np.float32)
        return replace(r, prompt_ids=prompt, response_ids=ids, logprobs=logprobs)

    def _store(self, uid: str, response: Response, number: int | None = None) -> None:
        if number is None:
            number = next(reversed(self.stored), -1) + 1
        same = self.numbers.setdefault((uid, bool(response.correct)), [])
        if same:
            self.superseded[same[-1]] = None
        same.append(number)
        self.stored[number] = uid, response
        self.tokens += self.size(number)
        if len(same) > self.per_query:
            self._evict(same[0])
        while self.bound is not None and self.tokens > self.bound and len(self) > 1:
            self._evict(next(iter(self.superseded or self.stored)))

    def _evict(self, number: int) -> None:
        self.tokens -= self.size(number)
        uid, response = self.stored.pop(number)
        self.superseded.pop(number, None)
        self.numbers[uid, bool(response.correct)].remove(number)

    def size(self, number: int) -> int:
        """Tokens of a stored response and its prompt."""
        response = self.stored[number][1]
        return len(response.prompt_ids) + len(response.response_ids)

    def recall(self, uid, correct: bool, k: int, rng, kind: str = PLAIN, newest: bool = False) -> list[Response]:
        """At most `k` different stored responses of `uid` with this verdict, those of the same prompt kind first.

        rng: anything with `.random()` (random.Random, numpy Generator); it orders the candidates of each kind, or with
        `newest`, those of each step.
        """
        found = self._of(uid, correct)
        found.sort(key=lambda response: (response.kind != kind, newest * -response.step, rng.random()))
        return [with_lists(response) for response in found[:k]]

    def failure(self, uid: str, rng) -> Response | None:
        """A stored failure to reflect on, or None: finished ones first, then those of plain prompts."""
        found = sorted(self._of(uid, False), key=lambda r: (not r.finished, r.kind != PLAIN, rng.random()))
        return with_lists(found[0]) if found else None

    def _of(self, uid: str, correct: bool) -> list[Response]:
        return [self.stored[number][1] for number in self.numbers.get((uid, correct), ())]

    def accuracy(self, uid: str) -> float | None:
        """Mean of the verdict window over plain prompts; None with fewer than `min_history` verdicts."""
        seen = self.verdicts.get(uid, ())
        return sum(seen) / len(seen) if len(seen) >= max(1, self.min_history) else None

    def length(self, uid: str, before: int) -> float | None:
        """Mean tokens of the newest group on the plain prompt from before this step; None where there was none."""
        return next((mean for step, mean in reversed(self.lengths.get(uid, ())) if step < before), None)

    def solved(self, uid: str) -> int:
        """The step of its newest stored success, on either kind of prompt; 0 without one."""
        return max((response.step for response in self._of(uid, True)), default=0)

    # -------------------------------------------------------------------------------------- save and load

    def state_dict(self) -> dict:
        """`summary`, and "parts", a list with one `part` that holds all responses: nothing that needs pickle."""
        return self.summary() | {"parts": [self.part(self.stored)]}

    def summary(self) -> dict:
        """JSON-able: "stored", numbers of the stored responses; "verdicts", uid -> list of 0 / 1; "lengths"."""
        verdicts = {uid: [int(v) for v in seen] for uid, seen in self.verdicts.items()}
        lengths = {uid: [list(pair) for pair in seen] for uid, seen in self.lengths.items()}
        return {"stored": list(self.stored), "verdicts": verdicts, "lengths": lengths}

    def part(self, numbers: Iterable[int]) -> dict:
        """The stored responses of these numbers as two flat tensors and a JSON-able index.

        Returns {"tokens": int32 [sum of prompt and response lengths], "logprobs": fp32 [sum of response lengths],
        "index": list of records}.
        """
        tokens, logprobs, index = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], []
        for number in numbers:
            uid, r = self.stored[number]
            tokens += [r.prompt_ids, r.response_ids]
            logprobs.append(r.logprobs)
            small = {f.name: getattr(r, f.name) for f in fields(Response)[3:]}
            lengths = [len(r.prompt_ids), len(r.response_ids)]
            index.append({"number": number, "uid": uid, "lengths": lengths, **small})
        flat = {"tokens": np.concatenate(tokens), "logprobs": np.concatenate(logprobs)}
        return {name: torch.from_numpy(array) for name, array in flat.items()} | {"index": index}

    def load_state_dict(self, *states: dict, keep=lambda uid: True) -> None:
        """Becomes what `state_dict` of one buffer, or of one buffer per rank, had returned.

        `keep(uid)` chooses the uids of this rank, so that a resume with another number of ranks redistributes them;
        several buffers are merged by step. "parts" may be an iterator, and may hold responses that are not in "stored".
        """
        self.__init__(self.per_query, self.window, self.min_history, self.bound)
        sources = []
        for state in states:
            stored, found = set(state["stored"]), []
            for part in state["parts"]:
                chosen = (entry for entry in unpack(part) if entry[0] in stored and keep(entry[1]))
                found += [(number, uid, self._compact(response)) for number, uid, response in chosen]
            sources.append(sorted(found, key=lambda entry: entry[0]))
            for uid, seen in state["verdicts"].items():
                if keep(uid):
                    self.verdicts[uid] = deque(map(bool, seen), maxlen=self.window)
                    self.lengths[uid] = deque(map(tuple, state["lengths"][uid]), maxlen=self.window)
        for number, uid, response in heapq.merge(*sources, key=lambda entry: entry[2].step):
            self._store(uid, response, number if len(states) == 1 else None)


def unpack(part: dict) -> Iterator[tuple[int, str, Response]]:
    """(number, uid, response) of each response in a `part`; its arrays are views of the part's."""
    tokens, logprobs = part["tokens"].numpy(), part["logprobs"].numpy()
    for record in part["index"]:
        small = dict(record)
        number, uid, (P, L) = (small.pop(key) for key in ("number", "uid", "lengths"))
        yield number, uid, Response(tokens[:P], tokens[P : P + L], logprobs[:L], **small)
        tokens, logprobs = tokens[P + L :], logprobs[L:]


def with_lists(r: Response) -> Response:
    """A stored response with lists of ids, as those of a fresh one are."""
    return replace(r, prompt_ids=r.prompt_ids.tolist(), response_ids=r.response_ids.tolist())
