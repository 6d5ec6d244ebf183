"""The sample buffer (SPEC section 4)."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from conftest import fresh_group

from replay import REFLECTION, ReplayBuffer


def responses(uid, verdicts, start=0, **changes):
    """Attempts whose steps count up from `start`, so that they can be told apart."""
    made = fresh_group(uid, verdicts, seed=start).responses
    return [replace(a, step=start + i, **changes) for i, a in enumerate(made)]


def test_a_query_recalls_its_own_samples_only():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True, True]))
    assert buffer.recall("b", True, 2, random.Random(0)) == []
    assert buffer.failure("b", random.Random(0)) is None and buffer.accuracy("b") is None


def test_recall_returns_the_asked_verdict_without_repeats():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True, False, True, False, True]))
    found = buffer.recall("a", True, 5, random.Random(0))
    assert sorted(a.step for a in found) == [0, 2, 4] and all(a.correct for a in found)


@pytest.mark.parametrize("rng", [random.Random(3), np.random.default_rng(3)])
def test_recall_is_random_among_equals_and_takes_any_generator(rng):
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True] * 8))
    picks = {tuple(a.step for a in buffer.recall("a", True, 2, rng)) for _ in range(40)}
    assert len(picks) > 10


def test_the_oldest_is_evicted_first_on_each_side():
    buffer = ReplayBuffer(per_query=2)
    buffer.add("a", responses("a", [True, True, True, False]))
    assert sorted(a.step for a in buffer.recall("a", True, 9, random.Random(0))) == [1, 2]
    assert [a.step for a in buffer.recall("a", False, 9, random.Random(0))] == [3]
    assert len(buffer) == 3


def test_recall_prefers_the_same_prompt_kind_then_takes_the_other():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True] * 2))
    buffer.add("a", responses("a", [True] * 2, start=10, kind=REFLECTION))
    for _ in range(5):
        kinds = [a.kind for a in buffer.recall("a", True, 3, random.Random(_), kind=REFLECTION)]
        assert kinds == [REFLECTION, REFLECTION, "plain"]


def test_log_probs_travel_with_the_sample():
    buffer, (sample,) = ReplayBuffer(), responses("a", [True])
    buffer.add("a", [sample])
    (found,) = buffer.recall("a", True, 1, random.Random(0))
    assert found is sample and len(found.logprobs) == len(found.response_ids)


def test_reflection_prefers_failures_that_finished():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [False] * 3, finished=False))
    assert buffer.failure("a", random.Random(0)).finished is False
    buffer.add("a", responses("a", [False], start=7))
    assert all(buffer.failure("a", random.Random(i)).step == 7 for i in range(10))


def test_accuracy_is_the_mean_of_a_window_over_plain_prompts():
    buffer = ReplayBuffer(window=4, min_history=3)
    buffer.add("a", responses("a", [True, True]))
    assert buffer.accuracy("a") is None  # too little is known
    buffer.add("a", responses("a", [False, False, False]))
    assert buffer.accuracy("a") == 0.25  # the last four
    buffer.add("a", responses("a", [True] * 4, kind=REFLECTION))
    assert buffer.accuracy("a") == 0.25  # reflection says nothing about the plain prompt


def test_the_buffer_survives_save_and_load():
    buffer = ReplayBuffer(per_query=3, min_history=1)
    buffer.add("a", responses("a", [True, False, True, False]))
    buffer.add("ü", responses("ü", [False], start=5, kind=REFLECTION, finished=False))
    state = buffer.state_dict()
    state |= json.loads(json.dumps({k: state[k] for k in ("index", "verdicts")}))  # what is not a tensor is JSON
    loaded = ReplayBuffer(per_query=3, min_history=1)
    loaded.add("gone", responses("gone", [True]))
    loaded.load_state_dict(state)
    assert len(loaded) == len(buffer) and loaded.accuracy("a") == buffer.accuracy("a") == 0.5
    for uid, correct in (("a", True), ("a", False), ("ü", False)):
        old, new = (b.recall(uid, correct, 9, random.Random(1)) for b in (buffer, loaded))
        for x, y in zip(old, new, strict=True):
            assert list(x.response_ids) == y.response_ids and list(x.prompt_ids) == y.prompt_ids
            assert (x.logprobs == y.logprobs).all() and y.logprobs.dtype == np.float32
            assert (x.step, x.kind, x.finished, x.reward) == (y.step, y.kind, y.finished, y.reward)
            assert x.correct is y.correct is correct


def test_a_resume_with_other_ranks_keeps_each_uid_once():
    whole = ReplayBuffer()
    for uid in "abcd":
        whole.add(uid, responses(uid, [True, False]))
    parts = [ReplayBuffer(), ReplayBuffer()]
    for i, part in enumerate(parts):
        part.load_state_dict(whole.state_dict(), keep=lambda uid, i=i: ord(uid) % 2 == i)
    merged = ReplayBuffer()
    merged.load_state_dict(*(part.state_dict() for part in parts))
    assert [len(p) for p in parts] == [4, 4] and len(merged) == len(whole) and merged.verdicts == whole.verdicts


def test_an_empty_buffer_saves_and_loads():
    loaded = ReplayBuffer()
    loaded.load_state_dict(ReplayBuffer().state_dict())
    assert len(loaded) == 0
