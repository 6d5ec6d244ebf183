"""Answers graded per second: verify.Verifier against math-verify called directly, on the same answers in one run.

    python bench/verify.py [--data DIR] [--answers 2000] [--workers 2]

The answers are the reference answers of the benchmarks in DIR (*.jsonl), or made-up ones without it. Each is in a
notation that a model might use (unchanged, \\dfrac, spaces, `x =`, thousands, a reversed list ...), one in five is
altered to be wrong, and each ends a derivation of 1,700 characters. Ours reads the whole response. math-verify gets
only the answer, between dollar signs, on the main thread and without its alarms, which is its fastest (and unsafe) use;
its extraction is not timed. Both are warmed up, and both parse each reference answer again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from verify import Verifier, extract

DERIVATION = "Let us set up the condition and solve it step by step, as $a_{k}$ is even for $k = 3$. " * 20


def references(folder: Path, wanted: int, rng: random.Random) -> list[str]:
    """`wanted` reference answers of the benchmarks in a folder, repeated if too few; made-up ones if it has none."""
    files = sorted(folder.glob("*.jsonl"))
    found = [json.loads(line)["answer"] for file in files for line in file.open()]
    found = [answer if isinstance(answer, str) else answer[0] for answer in found]
    if not found:
        print(f"no benchmarks in {folder}: made-up answers instead")
        forms = ["{}", r"\frac{{{}}}{{7}}", r"{}\sqrt{{3}}", "({}, 5)", "x^2+{}", "{}, 12"]
        found = [rng.choice(forms).format(rng.randint(2, 9999)) for _ in range(wanted)]
    rng.shuffle(found)
    return (found * (wanted // len(found) + 1))[:wanted]


def rewritten(answer: str, rng: random.Random) -> str:
    """The same answer in another notation, if one applies."""
    answer = answer.strip()
    whole = answer.isdigit()
    choices = [answer, answer.strip("$"), answer + ".", answer.replace(r"\frac", r"\dfrac"), answer.replace("+", " + ")]
    if whole:
        grouped = f"{int(answer):,}"
        choices += [grouped, grouped.replace(",", "{,}"), answer + ".0", f"x = {answer}", f"\\text{{{answer}}}"]
    if re.fullmatch(r"\\d?frac\{\d+\}\{\d+\}", answer):
        choices += [re.sub(r"\\d?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer)]
    if re.fullmatch(r"[\d, -]+", answer) and not whole:
        choices += [", ".join(reversed(answer.split(",")))]
    return rng.choice(choices)


def altered(answer: str, rng: random.Random) -> str:
    """The answer with one digit changed, or its sign."""
    digits = [match.start() for match in re.finditer(r"\d", answer)]
    if not digits:
        return "-" + answer
    place = rng.choice(digits)
    return answer[:place] + str((int(answer[place]) + rng.randint(1, 9)) % 10) + answer[place + 1 :]


def ours(pairs: list[tuple[str, str]], workers: int) -> tuple[list[bool], float, int]:
    """(verdicts, seconds, number of answers that the calling process settled)"""
    with Verifier(workers=workers) as verifier:
        verifier.submit(r"\boxed{1}", r"\int_0^1 x\,dx").result()
        start = time.perf_counter()
        verdicts = [verifier.submit(response, reference) for response, reference in pairs]
        settled = sum(verdict.done() for verdict in verdicts)
        results = [verdict.result() for verdict in verdicts]
        return results, time.perf_counter() - start, settled


def peer(pairs: list[tuple[str, str]]) -> tuple[list[bool], float]:
    """(verdicts, seconds) of math-verify on the bare answers."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def equal(answer: str, reference: str) -> bool:
        gold, prediction = (parse(text, parsing_timeout=None) for text in (reference, answer))
        return verify(gold, prediction, timeout_seconds=None)

    bare = [(extract(response), reference.strip()) for response, reference in pairs]
    dollars = [tuple(text if "$" in text else f"${text}$" for text in pair) for pair in bare]
    equal(r"$\frac12$", "$0.5$")
    start = time.perf_counter()
    results = [equal(*pair) for pair in dollars]
    return results, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "benchmarks")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()

    rng = random.Random(0)
    pairs, expected = [], []
    for reference in references(options.data, options.answers, rng):
        correct = rng.random() < 0.8
        answer = rewritten(reference, rng) if correct else altered(rewritten(reference, rng), rng)
        pairs.append((f"{DERIVATION}Therefore \\boxed{{{answer}}}.", reference))
        expected.append(correct)

    verdicts, seconds, settled = ours(pairs, options.workers)
    other_verdicts, other_seconds = peer(pairs)
    for name, results, took in (("ours", verdicts, seconds), ("math-verify", other_verdicts, other_seconds)):
        agreed = sum(a == b for a, b in zip(results, expected, strict=True)) / len(pairs)
        print(f"{name:12} {len(pairs) / took:8.0f} answers/s  {took:6.2f} s  as expected {agreed:.1%}")
    print(f"ratio        {other_seconds / seconds:8.1f}")
    print(f"settled in the calling process: {settled / len(pairs):.1%} of {len(pairs)}; workers {options.workers}")


if __name__ == "__main__":
    main()
