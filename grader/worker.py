"""worker.py: a child process for answers that need algebra (sums, integrals, limits).

    worker = Worker(time_limit, memory_mb)
    worker.ask(given, references) -> bool | None         None: the worker died, or ran out of time; kill it then

The worker asks math-verify, which is slow on some answers and endless on others. So the parent limits time and memory
and kills the worker beyond them. No text of a model is evaluated as Python: math-verify gets it through its LaTeX
grammar alone.

A worker imports neither torch nor the caller's script. It starts in a second from any directory, and from threads,
torchrun ranks, a REPL, spawn and fork. It ignores Ctrl-C, because its parent ends it, and it ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path

from grader.equality import compare

START_LIMIT = 120.0  # seconds for a worker to import sympy on a busy machine


class Worker:
    """The parent's end of one worker process; for one thread at a time."""

    def __init__(self, time_limit: float, memory_mb: int):
        self.time_limit = time_limit
        command = [sys.executable, "-m", "grader.worker", str(time_limit), str(memory_mb)]
        root, pipe = Path(__file__).parent.parent, subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, bufsize=0)
        self._ready = False

    def ask(self, given: str, references: list[str]) -> bool | None:
        """Whether any reference equals the given answer; None if the worker died or ran out of time."""
        if not self._ready:
            if self._reply(START_LIMIT) != b"r":
                raise RuntimeError(f"a grading worker did not start (exit code {self._process.poll()})")
            self._ready = True
        try:
            self._process.stdin.write(json.dumps([given, references]).encode() + b"\n")
        except BrokenPipeError:
            return None
        return {b"1": True, b"0": False}.get(self._reply(self.time_limit))

    def _reply(self, limit: float) -> bytes:
        """The next byte; empty if the worker is gone or `limit` seconds are over."""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return self._process.stdout.read(1) if poll.poll(limit * 1000) else b""

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


def work(time_limit: float, memory_mb: int) -> None:
    """The worker: reads JSON lines [given, references], writes one byte for each, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    questions, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+") as nowhere:  # a library that reads or prints cannot touch the pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    import math_verify  # noqa: F401  its size is the worker's, not an answer's

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarm is off
    limit_memory(memory_mb)
    replies.write(b"r")
    for line in questions:
        given, references = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)  # ends this process even if the parent cannot
        equal = any(compare(given, reference, algebra) for reference in references)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(b"1" if equal else b"0")


def end_with_parent() -> None:
    """Have the system (Linux) kill this process when its parent ends, also in the middle of an answer."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(memory_mb: int) -> None:
    """Let this process grow by memory_mb from its present size (Linux only)."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_mb * 2**20,) * 2)


def algebra(given: str, reference: str) -> bool:
    """math-verify's verdict on two LaTeX formulas. Its own alarm is off, because the parent's kill is safer."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    plain = LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True),
    )
    formulas = [
        parse(f"\\boxed{{{text}}}", [plain], fallback_mode="no_fallback", parsing_timeout=None)
        for text in (reference, given)
    ]
    return all(formulas) and verify(*formulas, timeout_seconds=None)


if __name__ == "__main__":
    work(float(sys.argv[1]), int(sys.argv[2]))
