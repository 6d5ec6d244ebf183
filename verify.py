"""verify.py: whether a response has the correct answer. Training and eval.py both grade with it.

    verify.grade(response, answer) -> bool               answer: a string, or a list of which any may match
    with verify.Verifier(workers=2) as verifier:         the same for many answers at once
        future = verifier.submit(response, answer, uid)  returns at once
        future.result() -> bool; verifier.killed         answers that ran into a limit so far: each is wrong
    verify.check(problems) -> list[Fault]                the reference answers that are unfit, and why
    python verify.py --check FILE                        the same, printed with file and line

A verdict takes up to three steps, in a thread of its own, so that sampling goes on. `extract` finds the answer in the
response. grader/equality.py compares it with the reference answer by string work and bounded arithmetic, which settles
nearly all. What it leaves open (sums, integrals, limits) goes to a worker process (grader/worker.py), which is killed
beyond its limits.

What `extract` takes, in this order, from what follows the last `</think>`, up to a `<think>` that nothing closes:

    1. the last complete \\boxed{...} or \\fbox{...}, nested braces included; an unclosed or empty box is no answer
    only if nothing there opens a box:
    2. the last <answer>...</answer>
    3. what follows the last line-opening ####
    4. what follows the last "answer is" or "Answer:", to the end of its line
    A bare number somewhere in the text is never an answer.

What counts as equal, by kind of answer, is the docstring of grader/equality.py.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from grader.equality import compare
from grader.worker import Worker
from runtime import problems as data
from runtime.errors import UserError, exit_cleanly

log = logging.getLogger("verify")

MAX_RESPONSE = 1_000_000  # characters; of a longer response only the end is read


# 1. Where the answer is in the response

THINK = re.compile(
    r"[<◁\[](?:(?i:\s?\|?\s?(/?)\s?(?:seed:)?(?:thinking|think|thought|reasoning)\s?\|?\s?[>▷])|(/?)THINK\]"
    r"|\|(?:begin|(end))_of_thought\|>)"
)
BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,20}\{|\\(?:\\(?!boxed|fbox)|[{}])|[{}]")
TAGGED = re.compile(r"<answer>((?:(?!<answer>).){0,500}?)</answer>", re.DOTALL | re.IGNORECASE)
MARKED = re.compile(r"^####[ \t]*(\S[^\n]{0,500})$", re.MULTILINE)
WORDED = re.compile(r"\banswer(?:\*\*)?(?:[ \t]+is\b[ \t]*:?|[ \t]*:)(?:\*\*)?[ \t]*([^\n]{1,500})", re.IGNORECASE)


def extract(response: str) -> str | None:
    """The answer that a response commits to (the module's docstring has the order of places), or None."""
    visible = without_thinking(response)[-MAX_RESPONSE:]
    opened, box = last_box(visible)
    if opened:
        return box
    for pattern in (TAGGED, MARKED, WORDED):
        found = pattern.findall(visible[-4000:])
        if found:
            return found[-1].lstrip("* ").rstrip("*. ") or None
    return None


def without_thinking(response: str) -> str:
    """What follows the last closing tag, up to an opening tag after it. Without tags, the whole response: many chat
    templates write <think> into the prompt."""
    start, end = 0, len(response)
    for tag in THINK.finditer(response):
        if any(tag.groups()):
            start, end = tag.end(), len(response)
        else:
            end = min(end, tag.start())
    return response[start:end]


def last_box(text: str) -> tuple[bool, str | None]:
    """(whether the text opens a box, the content of the box that closes last; None if none closes, or it is blank).
    One pass over the braces; `\\{` and `\\}` are not braces."""
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


def grade_by_text(response: str, answer: str | Sequence[str]) -> tuple[bool, str | None, list[str]]:
    """(equal, the response's answer, the reference answers that only algebra can compare it with; then `equal` is
    open)."""
    given, undecided = extract(response), []
    for reference in map(reference_part, data.listed(answer)) if given is not None else []:
        equal = compare(given, reference)
        if equal:
            return True, given, []
        if equal is None:
            undecided.append(reference)
    return False, given, undecided


# 2. The verifier


class Verifier:
    """Grades answers in threads. Those that need algebra go to worker processes.

    workers: how many threads at most, each with a process (about 100 MB) that starts when an answer needs it.
    time_limit: seconds that the algebra of one answer may take; with the start of a worker it stays below 5 s.
    memory_mb: how much an answer may take beyond the size of a new worker.
    `killed` counts the answers that ran into a limit. Each counts as wrong and is logged with its uid.
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
        """Whether the response's answer equals the reference answer (any of several); a thread grades it."""
        verdict: Future[bool] = Future()
        self._enqueue((verdict, response, answer, uid))
        return verdict

    def _enqueue(self, task: tuple) -> None:
        if self._pid != os.getpid():
            self._reset()  # a forked child has none of its parent's threads and workers
        with self._lock:
            if self._closed:
                raise RuntimeError("this Verifier is closed")
            self._tasks.put(task)
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._serve, name="verify", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        """One thread: grades by text, and the rest in its worker process, which the first such answer starts."""
        worker = None
        while (task := self._tasks.get()) is not None:
            verdict, response, answer, uid = task
            if not verdict.set_running_or_notify_cancel():
                continue
            try:
                equal, given, undecided = grade_by_text(response, answer)
                if undecided:
                    worker = worker or self._start()
                    equal = worker.ask(given, undecided)
                    if equal is None:
                        worker = self._replace(worker)
                        self._count(uid, given)
                verdict.set_result(bool(equal))
            except Exception as error:  # no worker starts, or a fault of ours: the caller must know
                worker = self._replace(worker)
                verdict.set_result(False) if self._closed else verdict.set_exception(error)

    def _start(self) -> Worker:
        worker = Worker(self.time_limit, self.memory_mb)
        with self._lock:
            self._running.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _replace(self, worker: Worker | None) -> None:
        with self._lock:
            if worker:
                worker.kill()
            self._running.discard(worker)

    def _count(self, uid: str, given: str) -> None:
        if self._closed:
            return
        with self._lock:
            self.killed += 1
        limits = f"{self.time_limit:g} s or {self.memory_mb} MB"
        log.warning("uid %s: counts as wrong, grading took more than %s: %.80r", uid or "unknown", limits, given)

    def close(self) -> None:
        """End the workers now. Waiting answers are cancelled; one that a worker was grading counts as wrong."""
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
    """Whether the response's answer equals the reference answer (any of several). Safe on any text: all callers share
    one worker process for algebra, and an answer beyond its limits counts as wrong."""
    return _shared.submit(response, answer).result()


# 3. Reference answers

PLACEHOLDER = re.compile(
    r"[^\w∅∞{}\\]*|_+|.*\bproof( omitted)?|(see|refer to|cf)\b.*|n ?/ ?a|nan|null|unknown|tbd|todo|omitted"
    r"|.*\bvary|not (available|applicable|given|provided)|no answer( (given|provided|available))?",
    re.IGNORECASE,
)
WORD = r"(?<!\\)\b[^\W\d_]{3,}"
OPTION = re.compile(
    r"(?:\\text\w*\{)?([Oo]ption |[Cc]hoice )?(?:\(?[A-Z]\)|[a-z]\)|[A-Z][.:](?=\s))[:.]?[}\s]*[^}\s^+*/=<>!'_,.-].*"
)


def reference_part(answer: str) -> str:
    """The part of a reference answer that has a place of its own: in <answer> tags, after ####, in a box. Otherwise all
    of it, also where a place occurs twice."""
    tagged = TAGGED.findall(answer)
    if len(tagged) == 1:
        answer = tagged[0]
    before, mark, after = answer.partition("####")
    if mark and after.strip() and "####" not in after:
        answer = after.strip()
    if len(re.findall(r"\\(?:boxed|fbox)\b", answer)) == 1:
        answer = last_box(answer)[1] or answer
    return answer.strip()


def unfit(answer: str) -> str | None:
    """Why no response can be graded fairly against a reference answer; None if one can."""
    part = reference_part(answer)
    text = re.sub(r"\\text\w*|[${}.]", "", part).strip() or part
    reasons = {
        "has several lines": "\n" in part and "\\begin" not in part,
        "is no answer": PLACEHOLDER.fullmatch(text),
        "has a mark that is not that of one answer": re.search(r"(?<!\\)#|^\*\*|<answer>|</\w+>", part),
        "names an option and its text; allowed: one of them": OPTION.fullmatch(part),
        "is a list written as text": re.match(r"""\[\s*['"]""", part),
        "is a text of more than 12 words, which no response repeats": len(re.findall(WORD, part)) > 12,
        "does not grade itself as correct": not compare(extract(f"\\boxed{{{part}}}") or "", part),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a problem's reference answer. `bad`: no response can be graded fairly against it."""

    where: str  # file and line
    uid: str
    reason: str
    bad: bool


def check(problems: Iterable[data.Problem]) -> list[Fault]:
    """The faults of the reference answers, in the order of the problems.

    Bad: an answer that no response can meet (`unfit`); the same problem with unequal answers.
    Doubtful: an integer that has been through a float, and -1, which often stands for no answer.
    """
    problems = list(problems)
    rivals = {rival.uid: other for group in data.conflicts(problems) for rival, other in unequal(group)}
    faults = []
    for problem in problems:
        answers = data.listed(problem.answer)
        found = [(answer, reason) for answer in answers if (reason := unfit(answer))]
        reasons = [(f"the answer {answer!r:.80} {reason}", len(found) == len(answers)) for answer, reason in found]
        reasons += [(f"{answer!r:.80} {doubt}", False) for answer in answers if (doubt := doubtful(answer))]
        if problem.uid in rivals:
            other = rivals[problem.uid]
            reasons.append((f"the answer is {problem.answer!r:.80}, but {other.answer!r:.80} in {other.where}", True))
        faults += [Fault(problem.where, problem.uid, reason, bad) for reason, bad in reasons]
    return faults


def unequal(group: list[data.Problem]) -> list[tuple[data.Problem, data.Problem]]:
    """(problem, other) for each problem of a group with another whose answer differs in value, not only in spelling."""
    found = []
    for problem in group:
        for other in group:
            pairs = [(a, b) for a in data.listed(problem.answer) for b in data.listed(other.answer)]
            if not any(compare(reference_part(a), reference_part(b)) for a, b in pairs):
                found.append((problem, other))
                break
    return found


def doubtful(answer: str) -> str | None:
    """Why an answer that can be graded is probably not the correct one."""
    text = reference_part(answer).strip("$")
    if text == "-1":
        return "often stands for a problem without an answer"
    digits = repr(float(text)).partition("e")[0] if re.fullmatch(r"-?\d{17,300}", text) else ""
    if len(digits) > 16 and int(float(text)) == int(text):
        return "looks like an integer that has been through a float"
    return None


def main() -> None:
    def refuse(message: str) -> None:
        raise UserError(f"command line: {message}")

    line = "Report the reference answers of a data set that are unfit."
    parser = argparse.ArgumentParser(description=line, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--check", metavar="DATA", required=True, help="JSON Lines, JSON, parquet or a hub data set")
    parser.add_argument("--split", default="train", help="of a hub data set")
    for field in ("problem", "answer", "uid"):
        parser.add_argument(f"--{field}-field", default=field, help=f"where a row has the {field} (default: {field})")
    options = vars(parser.parse_args())
    problems = data.load(options.pop("check"), **options)
    faults = check(problems)
    for fault in faults:
        print(f"{fault.where}: {'bad' if fault.bad else 'doubtful'}: {fault.reason}")
    bad = len({fault.uid for fault in faults if fault.bad})
    print(f"{len(problems)} problems: {bad} bad, {len(faults) - sum(fault.bad for fault in faults)} doubtful")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    with exit_cleanly():
        main()
