"""The starved task: problems are exact, repeatable and unambiguous, and the base gets most groups all wrong."""

import functools
import importlib.util
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.base import is_correct, prompt_ids, respond, to_jsonl

ROOT = Path(__file__).parent.parent
WORDS = ROOT / "data" / "words"
SPLITS = {"train": 900, "test": 250}


def load_make():
    spec = importlib.util.spec_from_file_location("words_make", WORDS / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()
RULES = {  # written out a second time: neither words nor answers are taken from the script
    "a+b": lambda a, b: a + b,
    "a-b": lambda a, b: a - b,
    "a*b": lambda a, b: a * b,
    "2*a+b": lambda a, b: 2 * a + b,
    "a+2*b": lambda a, b: a + 2 * b,
    "2*a-b": lambda a, b: 2 * a - b,
    "a-2*b": lambda a, b: a - 2 * b,
    "3*a+b": lambda a, b: 3 * a + b,
    "a+3*b": lambda a, b: a + 3 * b,
    "3*a-b": lambda a, b: 3 * a - b,
    "a*b+a": lambda a, b: a * (b + 1),
    "a*b-b": lambda a, b: (a - 1) * b,
}


@pytest.fixture(scope="module")
def rows():
    return {
        split: [json.loads(line) for line in (WORDS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in SPLITS
    }


@functools.cache
def load_tokenizer():
    return AutoTokenizer.from_pretrained(WORDS / "model")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(WORDS / "model", dtype=torch.float32).eval()


def parts_of(text: str) -> tuple[str, int, int]:
    """Word and numbers, read from a problem's text alone."""
    a, word, b = re.fullmatch(r"Compute ([2-9]) ([a-z]{4}) ([2-9])\.", text).groups()
    return word, int(a), int(b)


# Problems


def test_the_script_regenerates_both_files_byte_for_byte():
    for split, problems in zip(SPLITS, make.make_splits(), strict=True):
        assert to_jsonl("words", split, problems).encode() == (WORDS / f"{split}.jsonl").read_bytes()


@pytest.mark.parametrize("split", SPLITS)
def test_counts_and_uids(rows, split):
    assert [row["uid"] for row in rows[split]] == [f"words-{split}-{i:04d}" for i in range(1, SPLITS[split] + 1)]


def test_no_problem_is_there_twice_or_in_both_splits(rows):
    texts = [row["problem"] for split in SPLITS for row in rows[split]]
    assert len(set(texts)) == len(texts)


def test_one_rule_and_no_other_gives_the_answer_and_it_is_the_same_for_all_problems_of_a_word(rows):
    found = {}
    for row in rows["train"] + rows["test"]:
        word, a, b = parts_of(row["problem"])
        fits = [rule for rule, compute in RULES.items() if compute(a, b) == int(row["answer"])]
        assert len(fits) == 1, row
        found.setdefault(word, set()).update(fits)
    assert len(found) == 40 and all(len(rules) == 1 for rules in found.values())
    assert {rule for rules in found.values() for rule in rules} == set(RULES) == set(make.RULES)


def test_the_run_sees_every_word_equally_often_and_the_test_set_has_all_of_them(rows):
    limit = yaml.safe_load((ROOT / "configs" / "words.yaml").read_text(encoding="utf-8"))["data_limit"]
    counts = Counter(parts_of(row["problem"])[0] for row in rows["train"][:limit])
    assert set(counts.values()) == {limit // 40} and len(counts) == 40
    held_out = Counter(parts_of(row["problem"])[0] for row in rows["test"])
    assert len(held_out) == 40 and min(held_out.values()) >= 5


# Demonstrations


def test_chances_of_a_words_rules_add_up_and_the_true_one_falls_from_word_to_word():
    true = [word.chances[0] for word in make.ALL_WORDS]
    assert true[0] == pytest.approx(0.4) and true[-1] == pytest.approx(0.003)
    assert true == sorted(true, reverse=True)
    for word in make.ALL_WORDS:
        assert sum(word.chances) == pytest.approx(1) and len(set(word.rules)) == 5


def test_demonstrations_use_the_rules_as_often_as_they_should_and_compute_them_exactly():
    rng, word = random.Random(0), make.ALL_WORDS[9]
    seen, endless = Counter(), 0
    for _ in range(4000):
        problem = make.Problem(word, rng.choice(make.NUMBERS), rng.choice(make.NUMBERS))
        text, ends = make.demonstrate(rng, problem)
        name, rule, line = re.match(r"(\w+): (.*)\n(.*)\n", text).groups()
        assert name == word.text
        assert line == f"{make.filled(rule, problem.a, problem.b)}={RULES[rule](problem.a, problem.b)}"
        assert is_correct(text, ends, RULES[rule](problem.a, problem.b)) == ends
        seen[rule] += 1
        endless += not ends
    for rule, chance in zip(word.rules, word.chances, strict=True):
        assert seen[rule] / 4000 == pytest.approx(chance, abs=0.03)
    assert endless / 4000 == pytest.approx(word.endless, abs=0.015)


def test_a_reflection_names_the_wrong_rule_of_the_attempt_and_uses_another(tokenizer):
    rng, named = random.Random(0), 0
    for number in range(400):
        problem = make.Problem(make.ALL_WORDS[number % 40], 7, 3)
        attempt, mistake, wrong = make.refute(rng, problem, tokenizer)
        text, _ = make.demonstrate(rng, problem, wrong)
        if wrong:
            named += 1
            assert attempt.startswith(f"{problem.word.text}: {wrong}\n")
            assert mistake == f"{problem.word.text} is not {wrong}.\n"
            assert not text.startswith(f"{problem.word.text}: {wrong}\n")
        else:
            assert mistake == "It never ends.\n" and "boxed" not in attempt
    assert named > 200


def test_the_reflection_prompt_of_the_demonstrations_is_that_of_the_config():
    config = yaml.safe_load((ROOT / "configs" / "words.yaml").read_text(encoding="utf-8"))
    assert config["reflection_template"] == make.REFLECTION
    assert config["reflection_tokens"] == make.REFLECTION_TOKENS
    assert config["max_new_tokens"] == make.BUDGET


def test_no_demonstration_uses_a_held_out_problem(tokenizer):
    rng, word = random.Random(0), make.ALL_WORDS[0].text
    held_out = {f"Compute {a} {word} {b}." for a in range(2, 10) for b in range(2, 10) if a != 2}
    seen = [tokenizer.decode(make.make_example(rng, tokenizer, held_out).ids) for _ in range(2000)]
    assert not any(text in chat for text in held_out for chat in seen)
    assert any(f"Compute 2 {word}" in chat for chat in seen)


# Tokenizer and model


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tokenizer):
    assert make.make_tokenizer().get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("before", ["", " "])
def test_every_word_is_one_token(tokenizer, before):
    assert all(len(tokenizer.tokenize(before + word)) == 1 for word in make.WORDS)


def test_the_weights_stay_below_one_megabyte_and_are_finite(model):
    assert (WORDS / "model" / "model.safetensors").stat().st_size < 1_000_000
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_the_base_computes_well_once_it_has_the_rule(model, tokenizer, rows):
    """Greedy after the word's true rule, nearly all answers are correct."""
    problems = make.make_splits()[1][:32]
    correct = 0
    for problem in problems:
        opening = f"{problem.word.text}: {problem.word.rules[0]}\n"
        prompt = prompt_ids(tokenizer, problem.text)
        ids = torch.tensor([prompt + tokenizer(opening, add_special_tokens=False).input_ids])
        out = model.generate(ids, do_sample=False, max_new_tokens=32)[0]
        response = tokenizer.decode(out[len(prompt) :], skip_special_tokens=True)
        correct += is_correct(response, True, problem.answer)
    assert correct >= 28


def test_the_base_is_starved(model, tokenizer):
    """Of 8 responses to a held-out problem none is correct for more than half of the problems."""
    torch.manual_seed(0)
    problems = make.make_splits()[1][:96]
    groups = respond(model, tokenizer, [problem.text for problem in problems], 8, make.BUDGET)
    correct = [
        sum(is_correct(r.text, r.finished, problem.answer) for r in group)
        for problem, group in zip(problems, groups, strict=True)
    ]
    assert 0.55 <= sum(n == 0 for n in correct) / len(correct) <= 0.8
    assert 0.05 <= sum(correct) / (8 * len(correct)) <= 0.13
