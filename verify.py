"""verify.py: is this the answer? The reward of training and the verifier of eval.py, so that both agree.

    verify.grade(response, answer) -> bool               answer: a string, or a list of which any may match
    with verify.Verifier(workers=2) as verifier:               the same for many answers, beside other work
        verdict = verifier.submit(response, answer, uid)    returns at once
        verdict.result() -> bool; verifier.killed           answers that ran into a limit so far: each is wrong
    verify.check(problems) -> list[Fault]                the reference answers that are unfit, and why
    python verify.py --check FILE                        the same, printed with file and line

Three stages. `extract` finds the answer in the response. `equality.compare` settles nearly every one of them in
the calling process, by string work and bounded arithmetic. What it leaves open (sums, integrals, limits) goes to
math-verify in a worker process, whose time and memory the parent limits by killing it. No text of a model is ever
evaluated as Python: math-verify is entered through its LaTeX grammar alone, and only inside the worker.

What `extract` takes, in this order, from what follows the last `</think>` (or from everything, without one):

    1. the last complete \\boxed{...} or \\fbox{...}, nested braces included; an unclosed or empty box is no answer
    only if nothing there opens a box:
    2. the last <answer>...</answer>
    3. what follows the last line-opening ####
    4. what follows the last "answer is" or "Answer:", to the end of its line
    A bare number somewhere in the text is never an answer.

What counts as equal, by kind of answer, is the docstring of equality.py.

Workers are plain child processes that import neither torch nor the caller's script; so they start in a second and
work from threads, torchrun ranks, a REPL, and under spawn or fork. They start with the first answer that needs
one, ignore Ctrl-C (their parent ends them), and end with their parent however it ends.
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
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from grader.equality import compare
from runtime import problems as data
from runtime.errors import exit_cleanly

log = logging.getLogger("verify")

MAX_RESPONSE = 1_000_000  # characters; of a longer response only the end is read
START_LIMIT = 120.0  # seconds for a worker to import sympy on a busy machine


# 1. Where the answer is in the response

BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,20}\{|\\(?:\\(?!boxed|fbox)|[{}])|[{}]")
TAGGED = re.compile(r"<answer>((?:(?!<answer>).){0,500}?)</answer>", re.DOTALL)
MARKED = re.compile(r"^####[ \t]*(\S[^\n]{0,500})$", re.MULTILINE)
WORDED = re.compile(r"\banswer(?:\*\*)?(?:[ \t]+is\b[ \t]*:?|[ \t]*:)(?:\*\*)?[ \t]*([^\n]{1,500})", re.IGNORECASE)


def extract(response: str) -> str | None:
    """The answer that a response commits to (the module's docstring has the order of places), or None."""
    visible = response[-MAX_RESPONSE:].rpartition("</think>")[2]
    opened, box = last_box(visible)
    if opened:
        return box
    for pattern in (TAGGED, MARKED, WORDED):
        found = pattern.findall(visible[-4000:])
        if found:
            return found[-1].lstrip("* ").rstrip("*. ") or None
    return None


def last_box(text: str) -> tuple[bool, str | None]:
    """Whether the text opens a box at all, and the content of the box that closes last (None: none closes, or it
    is blank). One pass over the braces; `\\{` and `\\}` are not braces."""
    opened, box = False, None
    open_braces: list[int | None] = []  # for each open group: where its content starts if it is a box
    for brace in BRACES.finditer(text):
        token = brace.group()
        if token == "{":
            open_braces.append(None)
        elif token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                box = text[start : brace.start()]
        elif "box" in token:
            opened = True
            open_braces.append(brace.end())
    return opened, box if box and box.strip() else None


# 2. The verifier


class Verifier:
    """Grades answers, those that need algebra in worker processes.

    workers: how many at most (each about 100 MB); none starts before an answer needs it.
    time_limit: seconds that the algebra of one answer may take; with the start of a worker it stays below 5 s.
    memory_mb: what an answer may take beyond the size of a fresh worker.
    `killed` counts the answers that ran into a limit; each is wrong, and logged with its uid.
    """

    def __init__(self, workers: int = 1, time_limit: float = 3.0, memory_mb: int = 1024):
        self.workers, self.time_limit, self.memory_mb = workers, time_limit, memory_mb
        self.killed = 0
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: set[Worker] = set()
        self._closed = False

    def submit(self, response: str, answer: str | Sequence[str], uid: str = "") -> Future[bool]:
        """Whether the response's answer equals the reference (any of several), as a future that is often done."""
        verdict: Future[bool] = Future()
        given = extract(response)
        references = [answer] if isinstance(answer, str) else answer
        undecided = []
        for reference in references if given is not None else []:
            equal = compare(given, reference)
            if equal:
                verdict.set_result(True)
                return verdict
            if equal is None:
                undecided.append(reference)
        if undecided:
            self._enqueue((verdict, given, undecided, uid))
        else:
            verdict.set_result(False)
        return verdict

    def _enqueue(self, task: tuple) -> None:
        if self._pid != os.getpid():
            self._reset()  # a forked child has its parent's threads and workers in name only
        with self._lock:
            if self._closed:
                raise RuntimeError("this Verifier is closed")
            self._tasks.put(task)
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="verify", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        """The life of a thread: answer after answer through one worker process, which a kill replaces."""
        worker = self._start()
        while (task := self._tasks.get()) is not None:
            verdict, given, references, uid = task
            if not verdict.set_running_or_notify_cancel():
                continue
            try:
                equal = worker.ask(given, references)
            except RuntimeError as error:  # no worker can be had: the caller must know
                equal = None
                if not self._closed:
                    verdict.set_exception(error)
            if equal is None:
                self._replace(worker)
                if not self._closed:
                    worker = self._start()
                    if not verdict.done():
                        self._count(uid, given)
            if not verdict.done():
                verdict.set_result(bool(equal))

    def _start(self) -> Worker:
        worker = Worker(self.time_limit, self.memory_mb)
        with self._lock:
            self._running.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _replace(self, worker: Worker) -> None:
        with self._lock:
            worker.kill()
            self._running.discard(worker)

    def _count(self, uid: str, given: str) -> None:
        with self._lock:
            self.killed += 1
        limits = f"{self.time_limit:g} s or {self.memory_mb} MB"
        log.warning("uid %s: wrong, for grading it ran into %s: %.80r", uid or "unknown", limits, given)

    def close(self) -> None:
        """End the workers now. Answers that wait are cancelled; one that a worker was at is wrong."""
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

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_shared = Verifier()


def grade(response: str, answer: str | Sequence[str]) -> bool:
    """Whether the response's answer equals the reference (any of several). Safe on any text: what needs algebra is
    settled in one worker process that all callers share, within its limits, or counts as wrong."""
    return _shared.submit(response, answer).result()


# 3. The worker process


class Worker:
    """The parent's end of one worker process; for one thread at a time."""

    def __init__(self, time_limit: float, memory_mb: int):
        self.time_limit = time_limit
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(time_limit), str(memory_mb)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._ready = False

    def ask(self, given: str, references: list[str]) -> bool | None:
        """Whether any reference equals what was given; None if the worker died over it or ran out of time."""
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
    """The worker's life: a JSON line [given, references] in, one byte out, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    questions, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+") as nowhere:  # whatever a library reads or prints, it cannot touch the pipes
        os.dup2(nowhere.fileno(), 0)
        os.dup2(nowhere.fileno(), 1)
    import math_verify  # noqa: F401  its size is the worker's, not an answer's

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarm is off
    limit_memory(memory_mb)
    replies.write(b"r")
    for line in questions:
        given, references = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * time_limit)  # ends this process even if no parent is left to
        equal = any(compare(given, reference, algebra) for reference in references)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(b"1" if equal else b"0")


def end_with_parent() -> None:
    """Where the system can (Linux), have it kill this process with its parent, in the middle of an answer too."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(memory_mb: int) -> None:
    """Let this process grow by memory_mb from its present size (where the system tells it: Linux)."""
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_mb * 2**20,) * 2)


def algebra(given: str, reference: str) -> bool:
    """math-verify's verdict on two LaTeX formulas. Its own alarm is off: the parent's kill cannot be caught."""
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


# 4. Reference answers that are unfit


@dataclass(frozen=True)
class Fault:
    """What is wrong with a problem's reference answer. `bad`: no response can be graded fairly against it."""

    where: str  # file and line
    uid: str
    reason: str
    bad: bool


def check(problems: Iterable[data.Problem]) -> list[Fault]:
    """The faults of the reference answers, in the order of the problems.

    Bad: an answer that, put into a box, does not grade itself as right; the same problem with unequal answers.
    Doubtful: an integer that has been through a float, and -1, which often stands for no answer.
    """
    problems = list(problems)
    rivals = {rival.uid: other for group in data.conflicts(problems) for rival, other in unequal(group)}
    faults = []
    for problem in problems:
        answers = data.listed(problem.answer)
        unfit = [answer for answer in answers if not compare(extract(f"\\boxed{{{answer}}}") or "", answer)]
        reasons = [
            (f"the answer {answer!r:.80} does not grade itself as right", len(unfit) == len(answers))
            for answer in unfit
        ]
        reasons += [(f"{answer!r:.80} {doubt}", False) for answer in answers if (doubt := doubtful(answer))]
        if problem.uid in rivals:
            other = rivals[problem.uid]
            reasons.append((f"the answer is {problem.answer!r:.80}, but {other.answer!r:.80} in {other.where}", True))
        faults += [Fault(problem.where, problem.uid, reason, bad) for reason, bad in reasons]
    return faults


def unequal(group: list[data.Problem]) -> list[tuple[data.Problem, data.Problem]]:
    """Each problem of a group with one whose answer differs from its own in value, not in spelling alone."""
    found = []
    for problem in group:
        for other in group:
            pairs = [(a, b) for a in data.listed(problem.answer) for b in data.listed(other.answer)]
            if not any(compare(a, b) for a, b in pairs):
                found.append((problem, other))
                break
    return found


def doubtful(answer: str) -> str | None:
    """Why an answer that can be graded is probably not the right one."""
    text = answer.strip().strip("$")
    if text == "-1":
        return "often stands for a problem without an answer"
    digits = repr(float(text)).partition("e")[0] if re.fullmatch(r"-?\d{17,300}", text) else ""
    if len(digits) > 16 and int(float(text)) == int(text):
        return "looks like an integer that has been through a float"
    return None


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(float(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description="Report the reference answers of a data set that are unfit.")
    parser.add_argument("--check", metavar="FILE", required=True, help="JSON Lines, JSON or parquet")
    problems = data.load(parser.parse_args().check)
    faults = check(problems)
    for fault in faults:
        print(f"{fault.where}: {'bad' if fault.bad else 'doubtful'}: {fault.reason}")
    bad = len({fault.uid for fault in faults if fault.bad})
    print(f"{len(problems)} problems: {bad} bad, {len(faults) - sum(fault.bad for fault in faults)} doubtful")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    with exit_cleanly():
        main()
