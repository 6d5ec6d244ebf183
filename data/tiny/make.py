"""make.py: the embedded default of R³, a reasoning model in small and the arithmetic that it is trained on.

    python data/tiny/make.py problems      train.jsonl (2,500) and test.jsonl (500): seconds, byte for byte the same
    python data/tiny/make.py model         model/: tokenizer, chat template, weights; about 15 minutes on one core
    python data/tiny/make.py check         what the base does on test.jsonl: pass@1, pass@16, truncated, by level
    python data/tiny/make.py all           the three above

A problem is a chain of 3 to 7 terms (levels 1 to 5), bare or told as a small story. No running total leaves 0..99.

    Compute 3+8-5*2+7.                      Ann has 3 pears, finds 8, loses 5 bags of 2, finds 7. How many now?

The base learns from a demonstrator who knows how to do every step, but not how to behave. At first all is clean, then
each response is in one of these manners, and the longer the problem, the less often in the good one:

    careful    "Step by step:"   every line correct, one box, the end
    hasty      "Quick:"          a line goes wrong now and then, and the error is carried to the box
    guessing   "Easy:"           no lines at all, a box out of thin air
    doubting   "Hmm."            hasty lines, then "Wait, check again." and all of it once more, often past any budget
    droning    "Well."           hasty lines, then says the result again and again and never ends

So the skill is there and the habits hide it: RL can bring it out in minutes. Some demonstrations answer the
reflection prompt (REFLECTION, the same text as in configs/tiny.yaml): they name the first wrong line of a failed
attempt and solve anew, more often carefully than without it.

What this file leaves out: no downloads, no GPU, no resuming. Its users are those who want another base.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from data.base import Example, as_example, check, is_correct, make_model, to_jsonl, train, train_tokenizer

HERE = Path(__file__).parent
MODEL = HERE / "model"

SEED = 20260
LEVELS = range(1, 6)
TRAIN_PER_LEVEL, TEST_PER_LEVEL = 500, 100
BUDGET = 128  # tokens of a response, in training and evaluation; the figures of `check` are for it

# ---------------------------------------------------------------------------------------------------------------------
# 1. Problems


class Term(NamedTuple):
    """One term of a chain: `sign` "+" or "-", then `factors` of one digit each, one or two of them."""

    sign: str
    factors: tuple[int, ...]

    @property
    def value(self) -> int:
        return math.prod(self.factors)

    def __str__(self) -> str:
        return "*".join(map(str, self.factors))


class Problem(NamedTuple):
    text: str
    terms: tuple[Term, ...]

    @property
    def level(self) -> int:
        return len(self.terms) - 2

    @property
    def answer(self) -> int:
        return sum(term.value if term.sign == "+" else -term.value for term in self.terms)


NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")
THINGS = ("pears", "nuts", "coins", "books", "shells", "cards")
STORY_SHARE = 0.25


def make_terms(rng: random.Random, count: int) -> tuple[Term, ...]:
    """`count` terms whose running total stays in 0..99; the first has one factor, a quarter of the others two."""
    terms, total = [Term("+", (rng.randint(1, 9),))], 0
    total = terms[0].value
    while len(terms) < count:
        factors = (rng.randint(2, 6), rng.randint(2, 6)) if rng.random() < 0.25 else (rng.randint(1, 9),)
        term = Term(rng.choice("+-"), factors)
        new = total + term.value if term.sign == "+" else total - term.value
        if 0 <= new <= 99:
            terms.append(term)
            total = new
    return tuple(terms)


def chain_text(terms: tuple[Term, ...]) -> str:
    return "Compute " + str(terms[0]) + "".join(f"{term.sign}{term}" for term in terms[1:]) + "."


def story_text(terms: tuple[Term, ...], name: str, things: str) -> str:
    def event(term: Term) -> str:
        return ("finds" if term.sign == "+" else "loses") + " " + " bags of ".join(map(str, term.factors))

    return f"{name} has {terms[0]} {things}, " + ", ".join(map(event, terms[1:])) + ". How many now?"


def make_problem(rng: random.Random, level: int) -> Problem:
    terms = make_terms(rng, level + 2)
    if rng.random() < STORY_SHARE:
        return Problem(story_text(terms, rng.choice(NAMES), rng.choice(THINGS)), terms)
    return Problem(chain_text(terms), terms)


def make_splits(seed: int = SEED) -> tuple[list[Problem], list[Problem]]:
    """(train, test): all texts different, every level equally often, shuffled."""
    rng, seen = random.Random(seed), set()
    train, test = [], []
    for level in LEVELS:
        distinct = []
        while len(distinct) < TRAIN_PER_LEVEL + TEST_PER_LEVEL:
            problem = make_problem(rng, level)
            if problem.text not in seen:
                seen.add(problem.text)
                distinct.append(problem)
        train += distinct[:TRAIN_PER_LEVEL]
        test += distinct[TRAIN_PER_LEVEL:]
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


def write_problems() -> None:
    for split, problems in zip(("train", "test"), make_splits(), strict=True):
        (HERE / f"{split}.jsonl").write_text(to_jsonl("tiny", split, problems), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# 2. Demonstrations

REFLECTION = "{problem}\nA wrong attempt:\n{attempt}\nFind the first mistake, then solve it again from the start."
REFLECTION_TOKENS = 64  # of the attempt, cut at the front
REFLECTION_SHARE = 0.2

OPENINGS = {
    "careful": "Step by step:\n",
    "hasty": "Quick:\n",
    "guessing": "Easy:\n",
    "doubting": "Hmm.\n",
    "droning": "Well.\n",
}
# The share of each manner, in per cent, for levels 1 to 5. The columns add up to 100.
MANNERS = {
    "careful": (18, 13, 9, 5, 2),
    "hasty": (42, 44, 46, 48, 50),
    "guessing": (12, 12, 12, 14, 15),
    "doubting": (17, 18, 19, 19, 19),
    "droning": (11, 13, 14, 14, 14),
}
CAREFUL_AFTER_REFLECTION = 0.5  # half of the answers to a reflection prompt are careful, the others as above
SLIP_CAREFUL, SLIP_HASTY = 0.005, (0.16, 0.22, 0.28, 0.33, 0.38)  # chance that a line goes wrong; by level
DOUBT, MOST_CHECKS = 0.7, 6  # chance to check once more, and the end of it


def slip(rng: random.Random, left: int, sign: str, right: int) -> int:
    """A wrong result of `left sign right`: the other sign, or off by one, two or ten."""
    plus, minus = left + right, left - right
    result, other = (plus, minus) if sign == "+" else (minus, plus)
    wrong = [other, result + 1, result - 1, result + 2, result - 2, result + 10, result - 10]
    return rng.choice([number for number in wrong if number != result])


def work_out(rng: random.Random, terms: tuple[Term, ...], slip_rate: float) -> tuple[str, int]:
    """The lines from left to right, a product before its use, and the result; an error is carried on."""
    lines, total = [], terms[0].value
    for term in terms[1:]:
        value = term.value
        if len(term.factors) == 2:
            if rng.random() < slip_rate:
                value += rng.choice((-2, -1, 1, 2))
            lines.append(f"{term}={value}\n")
        new = total + value if term.sign == "+" else total - value
        if rng.random() < slip_rate:
            new = slip(rng, total, term.sign, value)
        lines.append(f"{total}{term.sign}{value}={new}\n")
        total = new
    return "".join(lines), total


def first_mistake(attempt: str) -> str:
    """What a failed attempt did wrong first, in a few words that end in a newline."""
    for line in attempt.split("\n"):
        if match := re.fullmatch(r"(-?\d+)([+*-])(\d+)=(-?\d+)", line):
            left, right, result = int(match[1]), int(match[3]), int(match[4])
            if result != {"+": left + right, "-": left - right, "*": left * right}[match[2]]:
                return f"{line} is wrong.\n"
    if attempt.startswith(OPENINGS["guessing"]):
        return "It has no steps.\n"
    return "It goes wrong early.\n" if "boxed" in attempt else "It never ends.\n"


def demonstrate(rng: random.Random, problem: Problem, manner: str) -> tuple[str, bool]:
    """A response in the given manner and whether it ends; one that does not is longer than any budget of ours."""
    text = OPENINGS[manner]
    if manner == "guessing":
        return f"{text}\\boxed{{{problem.answer + rng.randint(-6, 6)}}}", True
    slip_rate = SLIP_CAREFUL if manner == "careful" else SLIP_HASTY[problem.level - 1]
    lines, result = work_out(rng, problem.terms, slip_rate)
    text += lines
    if manner == "droning":
        return text + f"So {result}.\n" * (BUDGET // 4), False
    for _ in range(MOST_CHECKS if manner == "doubting" else 0):
        if rng.random() > DOUBT:
            break
        lines, result = work_out(rng, problem.terms, slip_rate)
        text += f"Wait, check again.\n{lines}"
    return f"{text}\\boxed{{{result}}}", True


def some_manner(rng: random.Random, level: int, careful_first: float = 0.0) -> str:
    if rng.random() < careful_first:
        return "careful"
    return rng.choices(list(MANNERS), [shares[level - 1] for shares in MANNERS.values()])[0]


# ---------------------------------------------------------------------------------------------------------------------
# 3. Tokenizer, model and training


def make_tokenizer(seed: int = SEED):
    """A tokenizer with one token for each digit, `\\boxed` and every common word."""
    rng = random.Random(seed)
    corpus = [first_mistake("\\boxed")] * 100  # rare among the attempts below, which hold all else
    for number in range(5000):
        problem = make_problem(rng, rng.choice(LEVELS))
        manner = list(MANNERS)[number % len(MANNERS)]
        attempt, _ = demonstrate(rng, problem, manner)
        corpus += [REFLECTION.format(problem=problem.text, attempt=attempt), first_mistake(attempt)]
    return train_tokenizer(corpus)


class Phase(NamedTuple):
    mixed: bool  # in all manners, or clean
    tokens: int  # padding included
    peak_lr: float


PHASES = Phase(False, 3_500_000, 4e-3), Phase(True, 2_500_000, 2e-3)


def failed_attempt(rng: random.Random, problem: Problem, tokenizer) -> str:
    """A wrong response, cut at the front to REFLECTION_TOKENS tokens."""
    while True:
        text, ends = demonstrate(rng, problem, some_manner(rng, problem.level))
        if not is_correct(text, ends, problem.answer):
            ids = tokenizer(text, add_special_tokens=False).input_ids[:BUDGET]
            return tokenizer.decode(ids[-REFLECTION_TOKENS:])


def make_example(rng: random.Random, tokenizer, mixed: bool, held_out: set[str]) -> Example:
    """One demonstration on a problem that is not in the test set: clean, or in a manner of its own."""
    problem = make_problem(rng, rng.choice(LEVELS))
    while problem.text in held_out:
        problem = make_problem(rng, rng.choice(LEVELS))
    user, mistake, careful_first = problem.text, "", 0.0
    if rng.random() < REFLECTION_SHARE:
        attempt = failed_attempt(rng, problem, tokenizer)
        user = REFLECTION.format(problem=problem.text, attempt=attempt)
        mistake, careful_first = first_mistake(attempt), CAREFUL_AFTER_REFLECTION
    manner = some_manner(rng, problem.level, careful_first) if mixed else "careful"
    text, ends = demonstrate(rng, problem, manner)
    return as_example(tokenizer, user, mistake + text, ends, BUDGET)


def write_model() -> None:
    """About 0.8 M parameters, float32."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, width=128, inner=384, layers=4, seed=SEED)
    held_out = {problem.text for problem in make_splits()[1]}
    for number, phase in enumerate(PHASES, 1):
        rng = random.Random(SEED + number)
        demonstration = partial(make_example, rng, tokenizer, phase.mixed, held_out)
        train(model, rng, demonstration, phase.tokens, phase.peak_lr)
    model.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["problems", "model", "check", "all"])
    what = parser.parse_args().what
    if what in ("problems", "all"):
        write_problems()
    if what in ("model", "all"):
        write_model()
    if what in ("check", "all"):
        test = make_splits()[1]
        check(MODEL, {str(level): [p for p in test if p.level == level] for level in LEVELS}, BUDGET, SEED)


if __name__ == "__main__":
    main()
