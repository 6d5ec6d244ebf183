"""SIGTERM and Ctrl-C: the last finished step is saved, the exit code is 143 or 130, and no process is left behind."""
# ruff: noqa: F401, F811  the fixtures short_model, start and unbroken are imported

import contextlib
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_run import (
    assert_same_run,
    at,
    checkpoints,
    crash,
    in_child,
    needs_fork,
    reap,
    rows,
    short_model,
    start,
    terminate,
    unbroken,
)

import r3
import verify
from runtime import checkpoint, run
from runtime.ranks import Ranks
from runtime.signals import Signals, Stopped

ALONE = Ranks(0, 1, torch.device("cpu"))


def wait_for(path: Path, seconds: float = 120.0) -> None:
    """Returns when there is something in the file."""
    end = time.monotonic() + seconds
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


@contextlib.contextmanager
def signals(grace_seconds: float = 60.0):
    made = Signals(grace_seconds, ALONE)
    try:
        yield made
    finally:
        made.close()


# ------------------------------------------------------------------------------------------------------ in this process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_interruptible_work_where_it_is_then_saves_and_exits(number, code):
    saved = []
    with signals() as s, pytest.raises(SystemExit) as end, s.saving(lambda: saved.append(True)):
        with s.interruptible():
            os.kill(os.getpid(), number)
            time.sleep(30)
        raise AssertionError("the work was not abandoned")
    assert end.value.code == code and saved == [True]


def test_signal_elsewhere_waits_for_the_next_interruptible_work():
    begun = []
    with signals() as s, pytest.raises(SystemExit) as end, s.saving(lambda: begun.append("saved")):
        os.kill(os.getpid(), signal.SIGTERM)
        begun.append("step finished")
        with s.interruptible():
            begun.append("interruptible")
    assert end.value.code == 143 and begun == ["step finished", "saved"]


def test_signal_after_the_last_interruptible_work_still_gives_the_exit_code():
    with signals() as s, pytest.raises(SystemExit) as end, s.saving(lambda: None):
        os.kill(os.getpid(), signal.SIGINT)
    assert end.value.code == 130


def test_signal_before_there_is_anything_to_save_ends_the_run_where_it_is():
    with signals(), pytest.raises(SystemExit) as end:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert end.value.code == 143


def test_stop_is_not_caught_by_handlers_of_exceptions():
    assert not issubclass(Stopped, Exception)


def test_run_puts_back_handlers_threads_and_files(start, tmp_path):
    def state():
        gc.collect()
        handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
        return handlers, threading.active_count(), len(os.listdir("/proc/self/fd"))

    start(tmp_path / "first", steps=1)
    before = state()
    start(tmp_path / "second", steps=1)
    time.sleep(0.1)  # the thread that waits for signals sees the end of its pipe
    assert state() == before


PLACES = [(run, "evaluate"), (r3, "rollout"), (r3, "update"), (r3, "log_step"), (run.Logs, "row")]


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_signal_in_any_part_of_a_run_saves_the_last_finished_step(unbroken, start, tmp_path, module, name):
    with at(module, name, 2, terminate), pytest.raises(SystemExit) as end:
        start(tmp_path / "run", save_every=99)
    assert end.value.code == 143
    finished = max(row["step"] for row in rows(tmp_path / "run") if "loss" in row)
    assert list(checkpoints(tmp_path / "run")) == [f"step_{finished:06d}"]
    start(tmp_path / "run", save_every=99, resume=True)
    assert_same_run(unbroken(save_every=99), tmp_path / "run", last_checkpoint_only=True)


# --------------------------------------------------------------------------------------------------- in a child process


def slow_save(*_, **__):
    time.sleep(30)


def kernel_instead_of_save(*_, **__):
    """Python's handlers do not run while the main thread is in here."""
    torch.ones(7000, 7000) @ torch.ones(7000, 7000)


@needs_fork
@pytest.mark.parametrize("busy", [slow_save, kernel_instead_of_save])
def test_second_signal_ends_the_run_at_once(start, tmp_path, busy, monkeypatch):
    """Whatever the main thread is at; the exit code is that of the first."""
    monkeypatch.setattr(checkpoint, "save", busy)
    child = in_child(partial(start, tmp_path / "run", eval_data=""))
    wait_for(tmp_path / "run" / "samples.jsonl")
    os.kill(child, signal.SIGTERM)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(child, signal.SIGINT)
    assert reap(child) == 143 and time.monotonic() - begin < 3


@needs_fork
def test_run_ends_within_grace_seconds_even_if_it_cannot_save(start, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", slow_save)
    child = in_child(partial(start, tmp_path / "run", eval_data="", grace_seconds=1))
    wait_for(tmp_path / "run" / "samples.jsonl")
    begin = time.monotonic()
    os.kill(child, signal.SIGTERM)
    assert reap(child) == 143 and time.monotonic() - begin < 10


@needs_fork
def test_run_that_is_told_to_stop_at_random_moments_loses_nothing(unbroken, start, tmp_path):
    """Nothing but what was told to stop before its first step: each finished step is in a checkpoint."""
    rng, stops, code = random.Random(0), 0, None
    changes = {"save_every": 99, "steps": 10}
    while code != 0:
        child = in_child(partial(start, tmp_path / "run", resume=True, **changes), tmp_path / "stderr")
        time.sleep(rng.uniform(0, 0.4 + 0.02 * stops))
        number = rng.choice([signal.SIGTERM, signal.SIGINT])
        os.kill(child, number)
        code = reap(child)
        assert code in (0, 128 + number, -number), (tmp_path / "stderr").read_text()  # -number: no handlers as yet
        stops += code != 0
        if code == 128 + number and (tmp_path / "run" / "metrics.jsonl").exists():
            finished = max((row["step"] for row in rows(tmp_path / "run") if "loss" in row), default=0)
            assert finished == 0 or f"step_{finished:06d}" in checkpoints(tmp_path / "run")
    assert stops >= 3
    assert_same_run(unbroken(**changes), tmp_path / "run", last_checkpoint_only=True)


class AlgebraVerifier(verify.Verifier):
    """Grades what only a worker process can grade."""

    def submit(self, response, answer, uid=""):
        return super().submit("\\boxed{\\int_0^1 x^2 dx}", "\\frac{1}{3}", uid)


def descendants(process: int) -> set[int]:
    children = Path(f"/proc/{process}/task").glob("*/children")
    return {int(pid) for path in children for pid in path.read_text().split()}


@needs_fork
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_process_outlives_the_run(start, tmp_path, number, monkeypatch):
    monkeypatch.setattr("tiny_run.RuleVerifier", AlgebraVerifier)
    child = in_child(partial(start, tmp_path / "run"), tmp_path / "stderr")
    end = time.monotonic() + 60
    while not (workers := descendants(child)):
        assert time.monotonic() < end, (tmp_path / "stderr").read_text()
        time.sleep(0.01)
    os.kill(child, number)
    assert reap(child) == (143 if number == signal.SIGTERM else -number)
    end = time.monotonic() + 5
    while alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"workers {alive} outlive the run"
        time.sleep(0.01)


# -------------------------------------------------------------------------------------------------------- several ranks


def ranks_of_a_run(start, run_dir: Path, **changes) -> list[int]:
    """Two processes of one run, as torchrun would start them; returns their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        start(run_dir, **changes)

    return [in_child(partial(work, rank), run_dir.with_name(f"stderr{rank}")) for rank in (0, 1)]


@needs_fork
def test_signal_to_one_rank_stops_all_of_them_and_the_resumed_run_is_exact(start, tmp_path):
    unbroken, parts = tmp_path / "unbroken", tmp_path / "parts"
    assert [reap(child) for child in ranks_of_a_run(start, unbroken, save_every=2)] == [0, 0]
    children = ranks_of_a_run(start, parts, save_every=2)
    while not (parts / "checkpoints" / "step_000002").exists():
        time.sleep(0.01)
    os.kill(children[1], signal.SIGTERM)
    assert [reap(child) for child in children] == [143, 143], (tmp_path / "stderr0").read_text()
    assert [reap(child) for child in ranks_of_a_run(start, parts, save_every=2, resume=True)] == [0, 0]
    assert_same_run(unbroken, parts, last_checkpoint_only=True)
    start(parts, steps=7, resume=True, override_config=True)  # one rank takes over what two had stored
    assert [row["step"] for row in rows(parts) if "loss" in row] == list(range(1, 8))


@needs_fork
def test_ranks_with_other_numbers_of_micro_batches_recompute_pi_old_together(start, tmp_path):
    changes = {"minibatches": 2, "token_budget": 40, "steps": 3, "eval_data": "", "rank_timeout": 5}
    assert [reap(child) for child in ranks_of_a_run(start, tmp_path / "run", **changes)] == [0, 0]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


@needs_fork
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_others_with_its_number(start, tmp_path, dead):
    run_dir = tmp_path / "run"
    children = ranks_of_a_run(start, run_dir, save_every=2, epochs=999, steps=999, rank_timeout=2)
    wait_for(run_dir / "checkpoints" / "step_000002")
    os.kill(children[dead], signal.SIGKILL)
    assert reap(children[dead]) == -signal.SIGKILL and reap(children[1 - dead], seconds=15) == 1
    said = (tmp_path / f"stderr{1 - dead}").read_text()
    assert f"rank {dead} of 2 is gone" in said and f"rank {1 - dead} ends" in said


# -------------------------------------------------------------------------------------------------- by the command line


def test_ctrl_c_at_the_command_line(short_model, problem_file, tmp_path):
    """Ctrl-C goes to the unbroken process group, workers included; one line is said, no traceback."""
    places = [f"--model={short_model}", f"--data={problem_file}", f"--run_dir={tmp_path / 'run'}"]
    options = ["--batch_size=4", "--epochs=999", "--max_new_tokens=8", "--device=cpu", "--check_answers=off"]
    child = subprocess.Popen(
        [sys.executable, "r3.py", *places, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(r3.__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    wait_for(tmp_path / "run" / "samples.jsonl")
    os.killpg(child.pid, signal.SIGINT)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 130 and "Traceback" not in said
    assert "signal 2: stopping; the last finished step will be saved" in said
