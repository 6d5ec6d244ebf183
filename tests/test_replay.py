"""The sample buffer, in memory and in the files of a checkpoint."""

import json
import os
import random
import shutil
import tracemalloc
import zlib
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from conftest import fresh_group

from replay import REFLECTION, ReplayBuffer, Response
from runtime import bufferfile
from runtime.ranks import Ranks


def responses(uid, verdicts, start=0, **changes):
    """Responses whose steps count up from `start`, so that they can be told apart."""
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


def test_newest_first_is_by_step_random_within_one_and_after_the_prompt_kind():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True] * 3, start=4))
    buffer.add("a", [replace(a, step=9, kind=REFLECTION) for a in responses("a", [True] * 3)])
    found = [buffer.recall("a", True, 5, random.Random(i), newest=True) for i in range(20)]
    assert all([a.step for a in some] == [6, 5, 4, 9, 9] for some in found)
    assert len({tuple(a.response_ids) for some in found for a in some[3:4]}) == 3
    found = buffer.recall("a", True, 4, random.Random(0), kind=REFLECTION, newest=True)
    assert [a.step for a in found] == [9, 9, 9, 6]


def test_a_query_is_solved_at_the_step_of_its_newest_success():
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [False], start=3))
    assert buffer.solved("a") == buffer.solved("b") == 0
    buffer.add("a", responses("a", [True, True, False], start=5))
    buffer.add("a", responses("a", [True], start=8, kind=REFLECTION))
    assert buffer.solved("a") == 8


def test_log_probs_travel_with_the_sample():
    buffer, (sample,) = ReplayBuffer(), responses("a", [True])
    buffer.add("a", [sample])
    (found,) = buffer.recall("a", True, 1, random.Random(0))
    assert found.response_ids == sample.response_ids and (found.logprobs == sample.logprobs).all()
    assert found.logprobs.dtype == np.float32 and len(found.logprobs) == len(found.response_ids)


def test_ids_are_handed_out_as_lists_of_python_integers():
    """torch.tensor makes an int32 tensor of numpy's integers, which no gather takes as an index."""
    buffer = ReplayBuffer()
    buffer.add("a", responses("a", [True, False]))
    for found in (*buffer.recall("a", True, 1, random.Random(0)), buffer.failure("a", random.Random(0))):
        assert {type(i) for i in [*found.prompt_ids, *found.response_ids]} == {int}


def test_later_changes_to_what_was_added_do_not_reach_the_buffer():
    buffer, (sample,) = ReplayBuffer(), responses("a", [True])
    before = list(sample.response_ids), sample.logprobs.copy()
    buffer.add("a", [sample])
    sample.response_ids[0], sample.logprobs[0] = 199, 1.0
    (found,) = buffer.recall("a", True, 1, random.Random(0))
    assert found.response_ids == before[0] and (found.logprobs == before[1]).all()


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


# ------------------------------------------------------------------------------------------------------------- memory


def long_responses(uid, verdicts, tokens, step=0, prompt=200):
    """Responses of this length to one prompt, made of lists as the sampler makes them."""
    rng = np.random.default_rng(step + zlib.crc32(uid.encode()))
    prompt_ids = rng.integers(0, 150_000, prompt).tolist()
    for correct in verdicts:
        ids = rng.integers(0, 150_000, tokens).tolist()
        logprobs = rng.normal(-1, 1, tokens).astype(np.float32)
        yield Response(prompt_ids, ids, logprobs, correct, True, float(correct), step)


def test_a_token_takes_at_most_9_bytes_of_memory():
    buffer, queries, tokens = ReplayBuffer(per_query=4), 250, 2000
    tracemalloc.start()
    try:
        for q in range(queries):
            buffer.add(f"q{q}", long_responses(f"q{q}", [True, False] * 4, tokens))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(buffer) == 8 * queries
    assert taken / (len(buffer) * tokens) < 9


def test_evicted_responses_take_no_memory():
    buffer = ReplayBuffer(per_query=2)
    tracemalloc.start()
    try:
        for step in range(100):
            buffer.add("a", long_responses("a", [True, False], 2000, step))
            if step == 10:
                early = tracemalloc.get_traced_memory()[0]
        late = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(buffer) == 4 and len(buffer.prompts) == 2 and abs(late - early) < 2000


def test_the_responses_to_a_prompt_share_it():
    buffer = ReplayBuffer()
    buffer.add("a", [*long_responses("a", [True, False], 5), *long_responses("a", [False], 5, step=1)])
    shared, same, other = (response.prompt_ids for _, response in buffer.stored.values())
    assert shared is same and shared is not other


def steps_of(buffer, uid, correct):
    return [a.step for a in sorted(buffer.recall(uid, correct, 99, random.Random(0)), key=lambda a: a.step)]


def test_the_bound_on_all_tokens_evicts_the_oldest_and_the_only_one_of_a_query_last():
    buffer, made = ReplayBuffer(tokens=50), {"prompt": 4}  # room for five responses
    for step, uid in enumerate(["a", "b", "b", "c", "b"]):
        buffer.add(uid, long_responses(uid, [True], 6, step, **made))
    assert buffer.tokens == 50 and len(buffer) == 5
    buffer.add("d", long_responses("d", [True], 6, 5, **made))
    assert [steps_of(buffer, uid, True) for uid in "abcd"] == [[0], [2, 4], [3], [5]]  # 0 is older, but the only one
    buffer.add("a", long_responses("a", [False], 6, 6, **made))  # success and failure count apart
    assert [steps_of(buffer, uid, True) for uid in "abcd"] == [[0], [4], [3], [5]] and steps_of(buffer, "a", False)
    buffer.add("e", long_responses("e", [True], 6, 7, **made))  # now each is the only one: the oldest goes
    assert [steps_of(buffer, uid, True) for uid in "abcde"] == [[], [4], [3], [5], [7]]
    assert buffer.tokens == 50 and len(buffer) == 5


def test_the_newest_response_is_kept_whatever_its_length():
    buffer = ReplayBuffer(tokens=50)
    buffer.add("a", long_responses("a", [True, False], 6, 0))
    buffer.add("b", long_responses("b", [True], 600, 1))
    assert steps_of(buffer, "b", True) == [1] and len(buffer) == 1
    buffer.add("a", long_responses("a", [True], 6, 2, prompt=4))
    assert steps_of(buffer, "a", True) == [2] and buffer.tokens == 10


# ------------------------------------------------------------------------------------------------------ save and load


def held(buffer):
    """All that a buffer holds, in order, as comparable values."""
    part = buffer.part(buffer.stored)
    return buffer.summary(), part["index"], part["tokens"].tolist(), part["logprobs"].tolist()


def without_numbers(buffer):
    """uid -> its stored responses, oldest first."""
    found = {}
    for uid, r in buffer.stored.values():
        found.setdefault(uid, []).append((r.prompt_ids.tolist(), r.response_ids.tolist(), *astuple(r)[3:]))
    return found


def test_the_buffer_survives_save_and_load():
    buffer = ReplayBuffer(per_query=3, min_history=1)
    buffer.add("a", responses("a", [True, False, True, False]))
    buffer.add("ü", responses("ü", [False], start=5, kind=REFLECTION, finished=False))
    state = buffer.state_dict()
    (part,) = state["parts"]
    part["index"] = json.loads(json.dumps(part["index"]))  # what is not a tensor is JSON
    state = json.loads(json.dumps(buffer.summary())) | {"parts": [part]}
    loaded = ReplayBuffer(per_query=3, min_history=1)
    loaded.add("gone", responses("gone", [True]))
    loaded.load_state_dict(state)
    assert held(loaded) == held(buffer) and loaded.accuracy("a") == buffer.accuracy("a") == 0.5
    assert loaded.lengths == buffer.lengths and set(buffer.lengths) == {"a"}  # a reflection says nothing of a query
    for uid, correct in (("a", True), ("a", False), ("ü", False)):
        old, new = (b.recall(uid, correct, 9, random.Random(1)) for b in (buffer, loaded))
        for x, y in zip(old, new, strict=True):
            assert x.response_ids == y.response_ids and x.prompt_ids == y.prompt_ids
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


# ----------------------------------------------------------------------------------------------------------- its files


class Checkpoints:
    """Saves and loads the buffers of one or several ranks, as runtime/checkpoint.py does."""

    def __init__(self, root):
        self.root, self.n = root, 0

    def save(self, *buffers) -> set[str]:
        """Writes a checkpoint; returns the names of the files that it does not share with an older one."""
        self.n += 1
        self.training = self.root / f"step_{self.n}"
        self.training.mkdir()
        for rank, buffer in enumerate(buffers):
            files = bufferfile.save(buffer, self.training, rank)
            buffer.files = {self.training / "buffer" / name: numbers for name, numbers in files.items()}
        return {p.name for p in (self.training / "buffer").iterdir() if p.stat().st_nlink == 1}

    def load(self, size=1, owners=(lambda uid: True,), **options) -> list[ReplayBuffer]:
        buffers = [ReplayBuffer(**options) for _ in range(size)]
        for rank, (buffer, owns) in enumerate(zip(buffers, owners, strict=True)):
            bufferfile.load(buffer, self.training, Ranks(rank, size, torch.device("cpu")), owns)
        return buffers

    def names(self) -> set[str]:
        return {p.name for p in (self.training / "buffer").iterdir()}


@pytest.fixture
def disk(tmp_path):
    return Checkpoints(tmp_path)


def add_step(buffer, step, queries, tokens=50, owns=lambda uid: True):
    for q in filter(owns, (f"q{q}" for q in queries)):
        buffer.add(q, long_responses(q, [True, False], tokens, step, prompt=5))


def test_a_save_writes_only_what_is_new(disk):
    buffer = ReplayBuffer()
    add_step(buffer, 1, range(100), tokens=1000)
    first = disk.save(buffer)
    assert len(first) == 1
    add_step(buffer, 2, range(3), tokens=1000)
    new = disk.save(buffer)
    sizes = {name: (disk.training / "buffer" / name).stat().st_size for name in disk.names()}
    assert disk.names() == first | new and len(new) == 1 and not first & new
    assert sum(sizes[name] for name in new) < 6 * 1005 * 8 * 1.1  # 6 responses
    assert sum(sizes[name] for name in first) > 200 * 1000 * 8
    assert disk.save(buffer) == set()  # nothing new, nothing written


def test_a_file_ends_with_the_response_that_fills_it(disk, monkeypatch):
    monkeypatch.setattr(bufferfile, "FILE_TOKENS", 1000)
    buffer = ReplayBuffer()
    add_step(buffer, 1, range(50))
    add_step(buffer, 1, ["long"], tokens=3000)
    assert len(disk.save(buffer)) == 7
    for numbers in buffer.files.values():
        *before_last, _ = map(buffer.size, numbers)
        assert sum(before_last) < 1000
    (loaded,) = disk.load()
    assert held(loaded) == held(buffer)


def test_a_file_is_written_anew_once_more_than_half_of_it_is_evicted(disk):
    buffer = ReplayBuffer(per_query=1)
    add_step(buffer, 1, range(10))
    (first,) = disk.save(buffer)
    add_step(buffer, 2, range(5))  # evicts half of the first file
    disk.save(buffer)
    assert first in disk.names() and len(disk.names()) == 2
    add_step(buffer, 3, [5])
    new = disk.save(buffer)
    assert first not in disk.names() and len(disk.names()) == 2 and len(new) == 1
    (loaded,) = disk.load(per_query=1)
    assert held(loaded) == held(buffer)


def test_the_disk_holds_at_most_twice_what_is_stored(disk):
    buffer, rng = ReplayBuffer(per_query=2), random.Random(0)
    for step in range(60):
        add_step(buffer, step, [rng.randrange(30) for _ in range(5)])
        disk.save(buffer)
        in_files = sum(map(len, buffer.files.values()))
        assert len(buffer) <= in_files <= 2 * len(buffer)


def test_many_small_files_become_one(disk, monkeypatch):
    monkeypatch.setattr(bufferfile, "SMALL_FILES", 8)
    buffer, most = ReplayBuffer(), 0
    for step in range(30):
        add_step(buffer, step, [step])
        disk.save(buffer)
        most = max(most, len(disk.names()))
    assert 4 < most <= 8
    assert held(disk.load()[0]) == held(buffer)


def test_a_buffer_loaded_and_saved_at_any_moments_is_the_one_that_never_was(disk):
    """And goes on the same way: the same evictions, numbers and draws, by both bounds."""
    options, rng = {"per_query": 3, "tokens": 2000}, random.Random(0)
    always, reloaded = ReplayBuffer(**options), ReplayBuffer(**options)
    for step in range(80):
        queries = [rng.randrange(12) for _ in range(3)]
        tokens = rng.randrange(20, 80)
        for buffer in (always, reloaded):
            add_step(buffer, step, queries, tokens)
        if rng.random() < 0.7:
            disk.save(reloaded)
        if rng.random() < 0.3 and disk.n:
            disk.save(reloaded)
            (reloaded,) = disk.load(**options)
        assert held(always) == held(reloaded)
    assert len(always) < 60 and always.tokens > 1500  # the bound was reached


def test_checkpoints_share_files_and_each_is_complete_without_the_others(disk):
    buffer = ReplayBuffer()
    for step in range(3):
        add_step(buffer, step, range(4))
        disk.save(buffer)
    shutil.rmtree(disk.root / "step_1")
    shutil.rmtree(disk.root / "step_2")
    (loaded,) = disk.load()
    assert held(loaded) == held(buffer)
    assert all(p.stat().st_nlink == 1 for p in (disk.training / "buffer").iterdir())  # nothing is left of the others


@pytest.mark.parametrize("what", ["deleted", "no hard links"])
def test_what_cannot_be_shared_is_written_anew(disk, monkeypatch, what):
    buffer = ReplayBuffer()
    add_step(buffer, 1, range(4))
    disk.save(buffer)
    if what == "deleted":
        shutil.rmtree(disk.training)
    else:

        def refuse(*_):
            raise PermissionError("Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    add_step(buffer, 2, range(4))
    disk.save(buffer)
    (loaded,) = disk.load()
    assert held(loaded) == held(buffer)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (2, 2)])
def test_a_resume_with_another_number_of_ranks_redistributes_and_then_writes_only_what_is_new(disk, before, after):
    def owners(size):
        uids = [f"q{q}" for q in range(20)]
        return [Ranks(rank, size, torch.device("cpu")).share(uids).__contains__ for rank in range(size)]

    whole, old = ReplayBuffer(), [ReplayBuffer() for _ in range(before)]
    for step in range(3):
        add_step(whole, step, range(20))
        for buffer, owns in zip(old, owners(before), strict=True):
            add_step(buffer, step, range(20), owns=owns)
    old_files = disk.save(*old)
    new = disk.load(after, owners(after))
    expected = without_numbers(whole)
    for buffer, owns in zip(new, owners(after), strict=True):
        assert without_numbers(buffer) == {uid: found for uid, found in expected.items() if owns(uid)}
        assert set(buffer.verdicts) == set(without_numbers(buffer))
    written = disk.save(*new)
    assert (written == set()) if before == after else (len(written) == after and not written & old_files)
    for buffer, owns in zip(new, owners(after), strict=True):
        add_step(buffer, 9, range(20), owns=owns)
    assert len(disk.save(*new)) == after and len(disk.names()) == 2 * after
    for buffer, loaded in zip(new, disk.load(after, owners(after)), strict=True):
        assert held(loaded) == held(buffer)
