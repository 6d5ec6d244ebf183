"""replay.py: what each query has seen: the sample buffer S of Algorithm 1 and the past accuracy of every query.

    buffer = ReplayBuffer(per_query=8, window=32, min_history=8)
    buffer.add(uid, responses)                         # line 9: S <- S u fresh responses
    buffer.recall(uid, correct=True, k=2, rng=rng)     # CCR: past successes of this query
    buffer.failure(uid, rng)                           # ISR: o_h, a past failure to reflect on
    buffer.accuracy(uid)                               # ISR: mean past accuracy, None while too little is known

A query is known by its uid and never sees the responses of another. Log-probs travel with their response, as its
`pi_old`. Left out: sharing between ranks (a uid lives on one rank) and any file format (runtime/checkpoint.py).
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
    """Newest `per_query` successes and as many failures of each uid; its last `window` verdicts on plain prompts."""

    def __init__(self, per_query: int = 8, window: int = 32, min_history: int = 1):
        self.per_query, self.window, self.min_history = per_query, window, min_history
        self.responses: dict[tuple[str, bool], deque[Response]] = {}
        self.verdicts: dict[str, deque[bool]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.responses.values()))

    def add(self, uid: str, samples: Iterable[Response]) -> None:
        """Stores fresh responses of `uid` and forgets the oldest beyond the bound. Never give it replayed ones."""
        for response in samples:
            self._store(uid, response)
            if response.kind == PLAIN:
                self.verdicts.setdefault(uid, deque(maxlen=self.window)).append(bool(response.correct))

    def _store(self, uid: str, response: Response) -> None:
        self.responses.setdefault((uid, bool(response.correct)), deque(maxlen=self.per_query)).append(response)

    def recall(self, uid: str, correct: bool, k: int, rng, kind: str = PLAIN) -> list[Response]:
        """At most `k` different stored responses of `uid` with this verdict, those of the same prompt kind first.

        rng: anything with `.random()` (random.Random, numpy Generator); it orders the candidates of each kind.
        """
        stored = self.responses.get((uid, correct), ())
        return sorted(stored, key=lambda response: (response.kind != kind, rng.random()))[:k]

    def failure(self, uid: str, rng) -> Response | None:
        """A stored failure to reflect on, or None: finished ones first, then those of plain prompts."""
        stored = self.responses.get((uid, False), ())
        return min(stored, key=lambda r: (not r.finished, r.kind != PLAIN, rng.random()), default=None)

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
        tokens, logprobs, index = [np.zeros(0, np.int32)], [np.zeros(0, np.float32)], []
        for (uid, _), stored in self.responses.items():
            for r in stored:
                tokens += [np.asarray(r.prompt_ids, np.int32), np.asarray(r.response_ids, np.int32)]
                logprobs.append(np.asarray(r.logprobs, np.float32))
                small = {f.name: getattr(r, f.name) for f in fields(Response)[3:]}
                index.append({"uid": uid, "lengths": [len(r.prompt_ids), len(r.response_ids)], **small})
        return {
            "tokens": torch.from_numpy(np.concatenate(tokens)),
            "logprobs": torch.from_numpy(np.concatenate(logprobs)),
            "index": index,
            "verdicts": {uid: [int(v) for v in seen] for uid, seen in self.verdicts.items()},
        }

    def load_state_dict(self, *states: dict, keep=lambda uid: True) -> None:
        """Becomes what `state_dict` of one buffer, or of one buffer per rank, had returned.

        `keep(uid)` chooses the uids of this rank, so that a resume with another number of ranks redistributes them.
        """
        self.responses.clear()
        self.verdicts.clear()
        for state in states:
            tokens, logprobs = state["tokens"].numpy(), state["logprobs"].numpy()
            for record in state["index"]:
                uid, (P, L) = record["uid"], record["lengths"]
                prompt, ids, logp = tokens[:P].tolist(), tokens[P : P + L].tolist(), logprobs[:L].copy()
                tokens, logprobs = tokens[P + L :], logprobs[L:]
                if keep(uid):
                    small = {k: v for k, v in record.items() if k not in ("uid", "lengths")}
                    self._store(uid, Response(prompt, ids, logp, **small))
            for uid, seen in state["verdicts"].items():
                if keep(uid):
                    self.verdicts[uid] = deque(map(bool, seen), maxlen=self.window)
