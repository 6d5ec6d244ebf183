"""Whole runs in a second or two: what the tests of resuming, signals and faults share.

The model is random; what counts as correct follows from lengths, so that groups are mixed, all wrong or all correct.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer, random_model
from safetensors import safe_open
from tqdm import tqdm

import r3
import verify
from replay import ReplayBuffer
from runtime import bufferfile, run
from runtime.errors import exit_cleanly
from runtime.ranks import Ranks

# no two runs agree in these
TIMING = ("seconds_load", "seconds_rollout", "seconds_waited", "seconds_update", "tokens_per_second", "peak_memory_gb")

SHORT = {
    "device": "cpu",
    "epochs": 9,
    "steps": 6,
    "batch_size": 4,  # of 8 problems: an epoch has two steps
    "group_size": 4,
    "max_new_tokens": 12,
    "prompt_suffix": "",
    "reflection_template": "{problem} {attempt}",
    "reflection_tokens": 8,
    "min_history": 4,
    "tau": 0.9,
    "lr": 1e-3,
    "eval_every": 2,
    "eval_n": 2,
    "save_every": 1,
    "checkpoints_kept": 99,
}


class RuleVerifier:
    """Correct is what has a length divisible by 3; no worker processes."""

    killed = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, response: str, answer, uid: str) -> Future:
        verdict = Future()
        verdict.set_result(len(response) % 3 == 0)
        return verdict


@pytest.fixture(scope="session")
def short_model(tmp_path_factory) -> Path:
    """A random model that ends about a third of its responses: many ids count as the end of a sequence."""
    folder = tmp_path_factory.mktemp("short") / "model"
    tokenizer, model = byte_tokenizer(), random_model()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(40, 52)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start(short_model, tmp_path_factory):
    """start(run_dir, key=value, ...) trains there, by r3 or by `program`, and returns run_dir. The verifier and
    the check of answers are replaced."""
    problems = tmp_path_factory.mktemp("short") / "problems.jsonl"
    lines = (json.dumps({"uid": f"q{i}", "problem": f"{i}+1=", "answer": str(i + 1)}) for i in range(8))
    problems.write_text("\n".join(lines))

    def start(run_dir: Path, program=r3, **changes) -> Path:
        given = {"model": short_model, "data": problems, "eval_data": problems, "run_dir": run_dir}
        with pytest.MonkeyPatch.context() as patch, exit_cleanly():
            patch.setattr(run, "Verifier", RuleVerifier)
            patch.setattr(verify, "check", lambda problems: [])
            program.main([f"--{key}={value}" for key, value in (given | SHORT | changes).items()])
        return run_dir

    return start


@pytest.fixture(scope="session")
def unbroken(start, tmp_path_factory):
    """unbroken(key=value, ...) is the run directory of a run with these values that nothing interrupted."""
    done = {}

    def unbroken(**changes) -> Path:
        key = repr(sorted(changes.items()))
        if key not in done:
            done[key] = start(tmp_path_factory.mktemp("unbroken") / "run", **changes)
        return done[key]

    return unbroken


class Killed(BaseException):
    """What no code of ours catches: the process is gone, as far as the disk is concerned."""


@contextlib.contextmanager
def at(module, name: str, call: int, act):
    """Calls `act` in place of the `call`th call of module.name (counted from 1), and then does what it stands for."""
    original, calls = getattr(module, name), 0

    def patched(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            act()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, patched)
        yield


def kill():
    raise Killed


def crash():
    raise RuntimeError("a fault that a test injected")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    """A log's rows without the keys that measure time and memory."""
    lines = (run_dir / name).read_text(encoding="utf-8").split("\n")[:-1]
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def checkpoints(run_dir: Path) -> dict[str, dict]:
    """name -> sha256 of every file in it; what the buffer holds, for its files depend on when the run was saved; what
    the shards hold, for the header of a safetensors file has no order."""
    found = {}
    for folder in sorted((run_dir / "checkpoints").glob("step_*")):
        sums = json.loads((folder / "training" / "manifest.json").read_text())
        sums = {name: value for name, value in sums.items() if "buffer" not in name and "shards" not in name}
        found[folder.name] = sums | {"buffer": stored(folder)}
        for file in sorted((folder / "training" / "shards").iterdir()):
            with safe_open(file, "pt") as opened:
                tensors = {name: opened.get_tensor(name).tolist() for name in opened.keys()}  # noqa: SIM118
                found[folder.name][file.name] = opened.metadata(), tensors
    return found


def stored(checkpoint: Path) -> list:
    """All that the buffers of a checkpoint hold, rank by rank."""
    held = []
    for rank in range(size := len(list((checkpoint / "training").glob("buffer_*.json")))):
        buffer = ReplayBuffer(per_query=999)
        bufferfile.load(buffer, checkpoint / "training", Ranks(rank, size, torch.device("cpu")))
        part = buffer.part(buffer.stored)
        held += [buffer.summary(), part["index"], part["tokens"].tolist(), part["logprobs"].tolist()]
    return held


def assert_same_run(a: Path, b: Path, last_checkpoint_only: bool = False) -> None:
    """Metrics, samples, evaluations, weights, moments and buffer of two runs are equal to the last bit."""
    assert rows(a) == rows(b)
    assert rows(a, "samples.jsonl") == rows(b, "samples.jsonl")
    evals = [{p.name: p.read_text() for p in (d / "evals").iterdir()} for d in (a, b)]
    assert evals[0] == evals[1]
    kept = [checkpoints(d) for d in (a, b)]
    if last_checkpoint_only:
        kept = [{max(k): k[max(k)]} for k in kept]
    assert kept[0] == kept[1]


needs_fork = pytest.mark.skipif(torch.cuda.is_available(), reason="autograd does not fork once it has seen a card")


def in_child(work, stderr: Path = Path(os.devnull)) -> int:
    """Forks; the child calls `work` and ends. Returns its process id: the parent has to `reap` it."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        tqdm.set_lock(threading.RLock())  # its own one is shared with the parent, and a killed child would keep it
        work()
        code = 0
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before the program has its handlers
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reap(child: int, seconds: float = 60.0) -> int:
    """The child's exit code, or minus the number of the signal that ended it; fails where it does not end in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the child did not end within {seconds} s")
