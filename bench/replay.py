"""Memory of the sample buffer per token; seconds, bytes and memory of its saves; seconds of a resume.

    python bench/replay.py [--responses 100000] [--tokens 4000] [--prompt 200] [--new 1000] [--folder DIR]

Random responses, eight per prompt and query. A save writes what a checkpoint holds of the buffer and waits for the
disk: first all of it, then what `--new` further responses add. Memory is the resident set of the process without mapped
files (Linux), above what it was before; its peak is read every 5 ms. A resume also takes the checksum of each file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay import ReplayBuffer, Response
from runtime import bufferfile
from runtime import ranks as machine
from runtime.files import checksum, fsync

GROUP = 8
ONE = machine.Ranks(0, 1, torch.device("cpu"))
MB = 2**20


def responses(rng: np.random.Generator, prompt: int, tokens: int) -> list[Response]:
    """A group of responses, in lists as the sampler returns them."""
    prompt_ids = rng.integers(0, 150_000, prompt).tolist()
    made = []
    for i in range(GROUP):
        logprobs = rng.normal(-1, 1, tokens).astype(np.float32)
        ids = rng.integers(0, 150_000, tokens).tolist()
        made.append(Response(prompt_ids, ids, logprobs, bool(i % 2), True, float(i % 2), 1))
    return made


def resident() -> int:
    """Bytes of anonymous memory in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def measured(what: str, seen: dict):
    """Prints seconds and peak memory of the block, and the bytes it wrote where it puts them into `seen`."""
    before, peak, done = resident(), resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    written = f", {seen.pop('bytes') / MB:,.0f} MB written" if "bytes" in seen else ""
    print(f"{what:24}{seconds:8.2f} s, {(peak - before) / MB:8,.0f} MB more memory at its peak{written}", flush=True)


def save(buffer: ReplayBuffer, training: Path) -> int:
    """What checkpoint.save does with a buffer; returns the bytes that it wrote."""
    training.mkdir()
    files = bufferfile.save(buffer, training, 0)
    for path in [*training.rglob("*"), training]:
        fsync(path)
    buffer.files = {training / "buffer" / name: numbers for name, numbers in files.items()}
    return sum(path.stat().st_size for path in training.rglob("*") if path.is_file() and path.stat().st_nlink == 1)


def load(training: Path) -> None:
    """What a resume does with a buffer, in a process of its own."""
    machine.keep_freed_memory(ONE.device)
    buffer, before = ReplayBuffer(), resident()
    with measured("checksums of a resume", {}):
        assert all(checksum(path) == path.stem for path in (training / "buffer").iterdir())
    with measured("load of a resume", {}):
        bufferfile.load(buffer, training, ONE)
    print(f"{len(buffer):,} responses take {(resident() - before) / MB:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("responses", 100_000), ("tokens", 4000), ("prompt", 200), ("new", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="where to write, default: the system's temporary folder")
    a = parser.parse_args()
    rng, seen = np.random.default_rng(0), {}
    machine.keep_freed_memory(ONE.device)
    buffer = ReplayBuffer()
    buffer.add("warm-up", responses(rng, a.prompt, a.tokens))
    before = resident()
    for q in range(a.responses // GROUP):
        buffer.add(f"query {q}", responses(rng, a.prompt, a.tokens))
    gc.collect()
    taken, tokens = resident() - before, len(buffer) * a.tokens
    print(f"{len(buffer):,} responses, {tokens:,} tokens: {taken / MB:,.0f} MB, {taken / tokens:.2f} bytes per token")
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        with measured("save of everything", seen):
            seen["bytes"] = save(buffer, Path(folder) / "1")
        for q in range(a.new // GROUP):
            buffer.add(f"new query {q}", responses(rng, a.prompt, a.tokens))
        with measured(f"save of {a.new:,} new ones", seen):
            seen["bytes"] = save(buffer, Path(folder) / "2")
        del buffer
        resume = multiprocessing.get_context("spawn").Process(target=load, args=(Path(folder) / "2",))
        resume.start()
        resume.join()


if __name__ == "__main__":
    main()
