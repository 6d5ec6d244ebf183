"""replay.py: what each query has seen: the sample buffer S of Algorithm 1 and the past accuracy of every query.

    buffer = ReplayBuffer(per_query=8, window=32, min_history=8)
    buffer.add(uid, responses)                          # line 8: S <- S u fresh samples
    buffer.recall(uid, correct=True, k=2, rng=rng)     # CCR: past successes of this query
    buffer.failure(uid, rng)                           # ISR: o_h, a past failure to reflect on
    buffer.accuracy(uid)                               # ISR: mean past accuracy, None while too little is known

A query is known by its uid and never sees another's samples. Log-probs travel with their sample, as its `pi_old`.
Left out: sharing between ranks (a uid lives on one rank) and any file format (see runtime/checkpoint.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

PLAIN, REFLECTION = "plain", "reflection"  # the two kinds of prompt


@dataclass(frozen=True)
class Response:
    """One verified response. L = len(response_ids), the end-of-sequence token included."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: np.ndarray  # (L,) fp32: log pi of the policy that sampled it, at the sampling temperature
    correct: bool  # the verifier's word
    finished: bool  # ended by itself; a truncated response is never correct
    reward: float  # the outcome reward of SPEC section 2 (a ranking reward has no meaning outside its group)
    step: int  # the step that sampled it
    kind: str = PLAIN


class ReplayBuffer:
    """Newest `per_query` successes and as many failures of each uid; its last `window` verdicts on plain prompts."""

    def __init__(self, per_query: int = 8, window: int = 32, min_history: int = 1):
        self.per_query, self.window, self.min_history = per_query, window, min_history
        self.responses: dict[tuple[str, bool], deque[Response]] = {}
        self.verdicts: dict[str, deque[bool]] = {}

    def __len__(self) -> int:
        return sum(len(kept) for kept in self.responses.values())

    def add(self, uid: str, samples: Iterable[Response]) -> None:
        """Remembers fresh samples of `uid`; the oldest beyond the bound are forgotten. Never give it replayed ones."""
        for attempt in samples:
            kept = self.responses.setdefault((uid, bool(attempt.correct)), deque(maxlen=self.per_query))
            kept.append(attempt)
            if attempt.kind == PLAIN:
                self.verdicts.setdefault(uid, deque(maxlen=self.window)).append(bool(attempt.correct))

    def recall(self, uid: str, correct: bool, k: int, rng, kind: str = PLAIN) -> list[Response]:
        """At most `k` different stored samples of `uid` with this verdict, those of the same prompt kind first.

        rng: anything with `.random()` (random.Random, numpy Generator); it orders the candidates of each kind.
        """
        stored = self.responses.get((uid, correct), ())
        shuffled = sorted(stored, key=lambda attempt: (attempt.kind != kind, rng.random()))
        return shuffled[:k]

    def failure(self, uid: str, rng) -> Response | None:
        """A stored failure to reflect on, or None: finished ones first, then those of plain prompts (SPEC 4)."""
        stored = self.responses.get((uid, False), ())
        return min(stored, key=lambda a: (not a.finished, a.kind != PLAIN, rng.random()), default=None)

    def accuracy(self, uid: str) -> float | None:
        """Mean of the verdict window over plain prompts; None with fewer than `min_history` verdicts."""
        seen = self.verdicts.get(uid, ())
        return sum(seen) / len(seen) if len(seen) >= max(1, self.min_history) else None

    # -------------------------------------------------------------------------------------- save and load

    def state_dict(self) -> dict:
        """Two flat tensors (all token ids, all log-probs) and a JSON-able index: nothing that needs pickle.

        Returns {"tokens": int32 [sum of prompt and response lengths], "logprobs": fp32 [sum of response lengths],
        "index": list of records, "verdicts": uid -> list of 0 / 1}.
        """
        tokens, logprobs, index = [], [], []
        for (uid, _), kept in self.responses.items():
            for a in kept:
                tokens += [np.asarray(a.prompt_ids, np.int32), np.asarray(a.response_ids, np.int32)]
                logprobs.append(np.asarray(a.logprobs, np.float32))
                small = {f.name: getattr(a, f.name) for f in fields(Response)[3:]}
                index.append({"uid": uid, "lengths": [len(a.prompt_ids), len(a.response_ids)], **small})
        return {
            "tokens": torch.from_numpy(np.concatenate(tokens) if tokens else np.zeros(0, np.int32)),
            "logprobs": torch.from_numpy(np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32)),
            "index": index,
            "verdicts": {uid: [int(v) for v in seen] for uid, seen in self.verdicts.items()},
        }

    def load_state_dict(self, *states: dict, keep=lambda uid: True) -> None:
        """Becomes what `state_dict` of one buffer, or of one buffer a rank, had returned.

        `keep(uid)` chooses the uids of this rank, so that a resume with another number of ranks re-shards.
        """
        self.responses.clear()
        self.verdicts.clear()
        for state in states:
            self._merge(state, keep)

    def _merge(self, state: dict, keep) -> None:
        tokens, logprobs = state["tokens"].numpy(), state["logprobs"].numpy()
        t = at = 0
        for record in state["index"]:
            uid, (P, L) = record["uid"], record["lengths"]
            prompt, response, logp = tokens[t : t + P], tokens[t + P : t + P + L], logprobs[at : at + L]
            t, at = t + P + L, at + L
            if keep(uid):
                small = {k: v for k, v in record.items() if k not in ("uid", "lengths")}
                attempt = Response(prompt.tolist(), response.tolist(), logp.copy(), **small)
                self.responses.setdefault((uid, attempt.correct), deque(maxlen=self.per_query)).append(attempt)
        for uid, seen in state["verdicts"].items():
            if keep(uid):
                self.verdicts[uid] = deque(map(bool, seen), maxlen=self.window)
