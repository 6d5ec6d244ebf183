"""verify.py: is this the answer? The reward of training and the judge of eval.py, so that both agree.

    verify.grade(response, answer) -> bool                answer: a string, or a list of which any may match
    with verify.Judge(workers=2) as judge:                the same for many answers, beside other work
        verdict = judge.submit(response, answer, uid)     returns at once
        ... verdict.result() -> bool; judge.killed        answers that ran into a limit so far: they count as wrong
    python verify.py --check FILE                         which reference answers of a data set are unfit, and why

Three stages. `extract` finds the answer in the response. `equality.compare` settles nearly every one of them in the calling
process, by string work and bounded exact arithmetic. What it leaves open (integrals, sums, formulas that need algebra) goes to
math-verify in a worker process, whose time and memory the parent limits by killing it. No text of a model is ever evaluated
as Python: math-verify is entered through its LaTeX grammar alone, and only inside the worker.

What `extract` takes, in this order, from what follows the last `</think>` (or from everything, where there is none):

    1. the last complete \\boxed{...} or \\fbox{...}, nested braces included; an unclosed or empty box holds no answer
    only if nothing there opens a box:
    2. the last <answer>...</answer>
    3. what follows the last line-opening ####
    4. what follows the last "answer is" or "Answer:", to the end of its line
    A bare number somewhere in the text is never an answer.

What counts as equal is the docstring of equality.py.

Workers are plain child processes that import neither torch nor the caller's script, so they start in a second or two and work
from threads, torchrun ranks, a REPL and under spawn or fork. They start with the first answer that needs one, ignore Ctrl-C
(their parent ends them), and end with their parent however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from equality import compare

log = logging.getLogger("verify")

MAX_RESPONSE = 1_000_000  # characters; of a longer response only the end is read
START_LIMIT = 120.0  # seconds for a worker to import sympy on a busy machine


# 1. Where the answer is in the response

BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,20}\{|\\(?:\\(?!boxed|fbox)|[{}])|[{}]")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).){0,500}?)</answer>", re.DOTALL)
ANSWER_MARK = re.compile(r"^####[ \t]*(\S[^\n]{0,500})$", re.MULTILINE)
ANSWER_WORDS = re.compile(r"\banswer(?:\*\*)?(?:[ \t]+is\b[ \t]*:?|[ \t]*:)(?:\*\*)?[ \t]*([^\n]{1,500})", re.IGNORECASE)


def extract(response: str) -> str | None:
    """The answer that a response commits to (the order of places is in the module's docstring), or None."""
    visible = response[-MAX_RESPONSE:].rpartition("</think>")[2]
    opened, box = last_box(visible)
    if opened:
        return box
    tail = visible[-4000:]
    for pattern in (ANSWER_TAG, ANSWER_MARK, ANSWER_WORDS):
        found = pattern.findall(tail)
        if found:
            return found[-1].strip().strip("*").removesuffix(".") or None
    return None


def last_box(text: str) -> tuple[bool, str | None]:
    """Whether the text opens a box at all, and the content of the box that closes last (None: none closes, or it is
    blank). One pass over the braces; `\\{` and `\\}` are not braces."""
    opened, box = False, None
    open_braces: list[int | None] = []  # where the content of each open group starts, if the group is a box
    for brace in BRACES.finditer(text):
        token = brace.group()
        if token == "{":
            open_braces.append(None)
        elif token[-1] == "{" and len(token) > 2:
            opened = True
            open_braces.append(brace.end())
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None:
                box = text[start : brace.start()]
    return opened, box if box and box.strip() else None


# 2. The judge

class Judge:
    """Grades answers, those that need algebra in worker processes.

    workers: processes at most (each about 100 MB); none starts before an answer needs it.
    time_limit: seconds an answer; memory_mb: what an answer may take beyond the worker's own start.
    `killed` counts the answers that ran into a limit; each is wrong, and logged with its uid.
    """

    def __init__(self, workers: int = 1, time_limit: float = 5.0, memory_mb: int = 1024):
        self.workers, self.time_limit, self.memory_mb = workers, time_limit, memory_mb
        self.killed = 0
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: set[Worker] = set()
        self._closed = False

    def submit(self, response: str, answer: str | Sequence[str], uid: str = "") -> Future[bool]:
        """A future of whether the response's answer equals the reference (any of them, where there are several)."""
        verdict: Future[bool] = Future()
        given = extract(response)
        references = [answer] if isinstance(answer, str) else list(answer)
        open_references = []
        for reference in references if given is not None else []:
            equal = compare(given, reference)
            if equal:
                verdict.set_result(True)
                return verdict
            if equal is None:
                open_references.append(reference)
        if open_references:
            self._enqueue((verdict, given, open_references, uid))
        else:
            verdict.set_result(False)
        return verdict

    def _enqueue(self, task: tuple) -> None:
        if self._pid != os.getpid():  # a forked child has its parent's workers in name only
            self._open()
        with self._lock:
            if self._closed:
                raise RuntimeError("this Judge is closed")
            self._tasks.put(task)
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="verify", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        """A thread's life: one worker process, restarted after each kill, answer after answer."""
        worker = None
        while (task := self._tasks.get()) is not None:
            verdict, given, references, uid = task
            if not verdict.set_running_or_notify_cancel():
                continue
            if worker is None:
                worker = Worker(self.time_limit, self.memory_mb)
                with self._lock:
                    self._running.add(worker)
                    if self._closed:
                        worker.kill()
            equal = worker.ask(given, references)
            if equal is None:
                worker.kill()
                with self._lock:
                    self._running.discard(worker)
                    self.killed += not self._closed
                worker = None
                if not self._closed:
                    log.warning("uid %s: grading ran into the limit of %g s or %d MB and counts as wrong: %.80r",
                                uid or "unknown", self.time_limit, self.memory_mb, given)
            verdict.set_result(bool(equal))

    def close(self) -> None:
        """End the workers now; answers still open are cancelled, or wrong if one was at work on them."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._tasks.get_nowait()[0].cancel()
            for worker in self._running:
                worker.kill()
            for _ in self._threads:
                self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_default: Judge | None = None
_default_lock = threading.Lock()


def grade(response: str, answer: str | Sequence[str]) -> bool:
    """Whether the response's answer equals the reference (any of them, where there are several). Safe on any text: what
    needs algebra is settled in one shared worker process, within 5 s and 1 GB, or counts as wrong."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Judge()
    return _default.submit(response, answer).result()


# 3. The worker process

class Worker:
    """The parent's end of one worker process. Not for two threads at once."""

    def __init__(self, time_limit: float, memory_mb: int):
        self.time_limit = time_limit
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(time_limit), str(memory_mb)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._ready = False

    def ask(self, given: str, references: list[str]) -> bool | None:
        """Whether any reference equals what was given; None if the worker died over it or ran out of time."""
        if not self._ready and self._reply(START_LIMIT) != b"r":
            raise RuntimeError(f"the grading worker did not start (exit code {self._process.poll()})")
        self._ready = True
        question = json.dumps([given, references]).encode() + b"\n"
        try:
            self._process.stdin.write(question)
        except BrokenPipeError:
            return None
        return {b"1": True, b"0": False}.get(self._reply(self.time_limit))

    def _reply(self, limit: float) -> bytes | None:
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return self._process.stdout.read(1) if poll.poll(limit * 1000) else None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def work(time_limit: float, memory_mb: int) -> None:
    """The worker process: a JSON line [given, references] in, one byte out, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    questions, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+") as nowhere:  # whatever a library reads or prints, it cannot touch the pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    import math_verify  # noqa: F401  before the limit: its size is not the answer's

    limit_memory(memory_mb)
    sys.setrecursionlimit(3000)
    replies.write(b"r")
    for line in questions:
        given, references = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)  # ends this process even if no parent is left to do it
        equal = any(compare(given, reference, algebra) for reference in references)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(b"1" if equal else b"0")


def end_with_parent() -> None:
    """Where the system can (Linux), have it kill this process when the parent is gone, also in the middle of an answer."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(memory_mb: int) -> None:
    """Let this process grow by memory_mb from here on."""
    import resource

    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def algebra(given: str, reference: str) -> bool:
    """math-verify's verdict on two LaTeX formulas."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=NormalizationConfig(basic_latex=True, malformed_operators=True))]
    left, right = (
        parse(f"\\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=None) for text in (reference, given)
    )
    try:
        return verify(left, right, timeout_seconds=None)
    except MemoryError:
        os._exit(1)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(float(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description="Report the reference answers of a data set that cannot be used.")
    parser.add_argument("--check", metavar="FILE", required=True)
    parser.parse_args()


if __name__ == "__main__":
    main()
