"""make.py: the starved task of R³: words whose meaning the base hardly ever guesses, and the base.

    python data/words/make.py problems     train.jsonl (900) and test.jsonl (250): seconds, byte for byte the same
    python data/words/make.py model        model/: tokenizer, chat template, weights; minutes on one core
    python data/words/make.py check        what the base does on test.jsonl, by tens of words: pass@1, truncated ...
    python data/words/make.py all          the three above

Each of 40 invented words stands for one of 12 rules on two numbers from 2 to 9. Here `bado` stands for a+2*b:

    Compute 7 bado 3.        bado: a+2*b
                             7+2*3=13
                             \\boxed{13}

The base computes well, but it has to guess the rule. It guesses the true one with a probability that falls from 0.4 for
the first word to 0.003 for the last; each word has a favourite wrong rule and three others. Some responses repeat their
last line and never end. So most groups of 8 responses are all wrong, and what is learnt about one word says nothing
about the others: a success on a hard word is rare, and it is the only thing to learn that word from.

Problems have only numbers for which no other rule gives the same answer: a correct answer has the true rule.

A quarter of the demonstrations answer the reflection prompt (REFLECTION, the same text as in configs/words.yaml): they
say which rule the failed attempt was wrong to use, and guess among the others.
"""

from __future__ import annotations

import argparse
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

SEED = 20261
TRAIN, TEST = 900, 250
BUDGET = 64  # tokens of a response, in training and evaluation; the figures of `check` are for it

# ---------------------------------------------------------------------------------------------------------------------
# 1. Words, rules, problems

WORDS = (
    *("bado", "tuki", "lefo", "gamu", "ruso", "pife", "koza", "mudi", "fago", "sibe"),
    *("tobu", "neku", "dufi", "zalo", "ligu", "peda", "ruki", "vobe", "zimu", "gore"),
    *("hasu", "nopi", "kefa", "bulo", "damu", "sori", "wefu", "tiga", "movu", "rado"),
    *("fuze", "lano", "gike", "hupa", "vile", "zobi", "keru", "wamo", "nifu", "posa"),
)
RULES = (
    *("a+b", "a-b", "a*b", "2*a+b", "a+2*b", "2*a-b"),
    *("a-2*b", "3*a+b", "a+3*b", "3*a-b", "a*b+a", "a*b-b"),
)
NUMBERS = range(2, 10)


def filled(rule: str, a: int, b: int) -> str:
    """The rule with its numbers: "a+2*b" -> "7+2*3"."""
    return rule.replace("a", str(a)).replace("b", str(b))


def value(rule: str, a: int, b: int) -> int:
    return eval(rule, {}, {"a": a, "b": b})


def is_unambiguous(rule: str, a: int, b: int) -> bool:
    """No other rule gives the same answer."""
    return [value(other, a, b) for other in RULES].count(value(rule, a, b)) == 1


class Word(NamedTuple):
    """rules: the true one first, then the favourite wrong one and the other wrong ones; chances: of each."""

    text: str
    rules: tuple[str, ...]
    chances: tuple[float, ...]
    endless: float  # share of the responses that never end


FIRST_CHANCE, LAST_CHANCE = 0.4, 0.003  # of the true rule; from word to word it falls by the same factor
WRONG_SHARES = 0.62, 0.20, 0.10, 0.08  # of the chance that is left
FIRST_ENDLESS, LAST_ENDLESS = 0.03, 0.15


def make_words(seed: int = SEED) -> tuple[Word, ...]:
    rng, words = random.Random(seed), []
    true = rng.sample(RULES * 4, len(WORDS))
    for number, (text, rule) in enumerate(zip(WORDS, true, strict=True)):
        far = number / (len(WORDS) - 1)  # 0 for the first word, 1 for the last
        chance = FIRST_CHANCE * (LAST_CHANCE / FIRST_CHANCE) ** far
        wrong = rng.sample([other for other in RULES if other != rule], len(WRONG_SHARES))
        chances = (chance, *(share * (1 - chance) for share in WRONG_SHARES))
        words.append(Word(text, (rule, *wrong), chances, FIRST_ENDLESS + far * (LAST_ENDLESS - FIRST_ENDLESS)))
    return tuple(words)


ALL_WORDS = make_words()


class Problem(NamedTuple):
    word: Word
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"Compute {self.a} {self.word.text} {self.b}."

    @property
    def answer(self) -> int:
        return value(self.word.rules[0], self.a, self.b)


def make_splits(seed: int = SEED) -> tuple[list[Problem], list[Problem]]:
    """(train, test): unambiguous problems, all different; of 40 training problems in a row each has another word."""
    rng = random.Random(seed)
    by_word = []
    for word in ALL_WORDS:
        pairs = [(a, b) for a in NUMBERS for b in NUMBERS if is_unambiguous(word.rules[0], a, b)]
        by_word.append([Problem(word, a, b) for a, b in rng.sample(pairs, len(pairs))])
    rounds = [rng.sample(problems, len(problems)) for problems in zip(*by_word, strict=False)]
    problems = [problem for each in rounds for problem in each]
    return problems[:TRAIN], rng.sample(problems[TRAIN : TRAIN + TEST], TEST)


def write_problems() -> None:
    for split, problems in zip(("train", "test"), make_splits(), strict=True):
        (HERE / f"{split}.jsonl").write_text(to_jsonl("words", split, problems), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# 2. Demonstrations

REFLECTION = "{problem}\nA wrong attempt:\n{attempt}\nFind the first mistake, then solve it again from the start."
REFLECTION_TOKENS = 32  # of the attempt, cut at the front
REFLECTION_SHARE = 0.25


def demonstrate(rng: random.Random, problem: Problem, refuted: str = "") -> tuple[str, bool]:
    """A response by a rule of the word that is not the refuted one, and whether it ends."""
    word = problem.word
    chances = [chance * (rule != refuted) for rule, chance in zip(word.rules, word.chances, strict=True)]
    rule = rng.choices(word.rules, chances)[0]
    result = value(rule, problem.a, problem.b)
    line = f"{filled(rule, problem.a, problem.b)}={result}\n"
    text = f"{word.text}: {rule}\n{line}"
    if rng.random() < word.endless:
        return text + line * (BUDGET // 4), False
    return f"{text}\\boxed{{{result}}}", True


def refute(rng: random.Random, problem: Problem, tokenizer) -> tuple[str, str, str]:
    """A failed attempt, its first mistake in words that end in a newline, and the rule that is wrong, if one is."""
    while True:
        text, ends = demonstrate(rng, problem)
        if is_correct(text, ends, problem.answer):
            continue
        ids = tokenizer(text, add_special_tokens=False).input_ids[:BUDGET]
        attempt = tokenizer.decode(ids[-REFLECTION_TOKENS:]).strip()
        if not ends:
            return attempt, "It never ends.\n", ""
        rule = re.match(r"\w+: (.*)\n", text)[1]
        return attempt, f"{problem.word.text} is not {rule}.\n", rule


# ---------------------------------------------------------------------------------------------------------------------
# 3. Tokenizer, model and training

TOKENS, PEAK_LR = 2_500_000, 4e-3  # of the training, padding included


def make_tokenizer(seed: int = SEED):
    """A tokenizer with one token for each digit, `\\boxed` and every word."""
    rng = random.Random(seed)
    corpus = ["It never ends.\n"] * 100
    for number in range(4000):
        problem = Problem(ALL_WORDS[number % len(ALL_WORDS)], rng.choice(NUMBERS), rng.choice(NUMBERS))
        attempt, _ = demonstrate(rng, problem)
        corpus += [
            REFLECTION.format(problem=problem.text, attempt=attempt),
            attempt,
            f"{problem.word.text} is not {rng.choice(RULES)}.\n",
        ]
    return train_tokenizer(corpus)


def make_example(rng: random.Random, tokenizer, held_out: set[str]) -> Example:
    """One demonstration on a problem that is not in the test set, ambiguous ones included."""
    while True:
        problem = Problem(rng.choice(ALL_WORDS), rng.choice(NUMBERS), rng.choice(NUMBERS))
        if problem.text not in held_out:
            break
    user, mistake, wrong = problem.text, "", ""
    if rng.random() < REFLECTION_SHARE:
        attempt, mistake, wrong = refute(rng, problem, tokenizer)
        user = REFLECTION.format(problem=problem.text, attempt=attempt)
    text, ends = demonstrate(rng, problem, wrong)
    return as_example(tokenizer, user, mistake + text, ends, BUDGET)


def write_model() -> None:
    """About 0.4 M parameters, saved in bfloat16: training in fp32 starts from the rounded weights."""
    import torch

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, width=96, inner=256, layers=4, seed=SEED)
    held_out = {problem.text for problem in make_splits()[1]}
    rng = random.Random(SEED)
    train(model, rng, partial(make_example, rng, tokenizer, held_out), TOKENS, PEAK_LR)
    model.to(torch.bfloat16).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def parts(problems: list[Problem]) -> dict[str, list[Problem]]:
    """The problems by tens of words, from those that the base guesses best: "1-10", "11-20" and so on."""
    place = {word: number for number, word in enumerate(ALL_WORDS)}
    tens = range(0, len(ALL_WORDS), 10)
    return {f"{n + 1}-{n + 10}": [p for p in problems if place[p.word] in range(n, n + 10)] for n in tens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["problems", "model", "check", "all"])
    what = parser.parse_args().what
    if what in ("problems", "all"):
        write_problems()
    if what in ("model", "all"):
        write_model()
    if what in ("check", "all"):
        check(MODEL, parts(make_splits()[1]), BUDGET, SEED)


if __name__ == "__main__":
    main()
