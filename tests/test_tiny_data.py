"""The embedded default: problems are exact and repeatable, the folder is small, demonstrations are what they claim."""

import functools
import importlib.util
import json
import random
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.base import is_correct, prompt_ids, to_jsonl

TINY = Path(__file__).parent.parent / "data" / "tiny"
SPLITS = {"train": 2500, "test": 500}
MEGABYTE = 1_000_000


def load_make():
    spec = importlib.util.spec_from_file_location("tiny_make", TINY / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()


@pytest.fixture(scope="module")
def rows():
    return {
        split: [json.loads(line) for line in (TINY / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in SPLITS
    }


@functools.cache
def load_tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "model")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY / "model").eval()


def chain_of(text: str) -> str:
    """The arithmetic of a problem, read from its text alone: "Ann has 3 nuts, loses 2 bags of 4. ..." -> "3-2*4"."""
    if match := re.fullmatch(r"Compute ([\d+*-]+)\.", text):
        return match[1]
    start, events = re.fullmatch(r"[A-Z][a-z]+ has (\d) [a-z]+, (.*)\. How many now\?", text).groups()
    for words, sign in (("finds ", "+"), ("loses ", "-"), (" bags of ", "*"), (", ", "")):
        events = events.replace(words, sign)
    return start + events


# Problems


@pytest.mark.parametrize("split", SPLITS)
def test_counts_and_uids(rows, split):
    assert [row["uid"] for row in rows[split]] == [f"tiny-{split}-{i:04d}" for i in range(1, SPLITS[split] + 1)]


def test_no_problem_is_there_twice_or_in_both_splits(rows):
    texts = [row["problem"] for split in SPLITS for row in rows[split]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_when_recomputed_from_the_text(rows, split):
    for row in rows[split]:
        assert row["answer"] == str(eval(chain_of(row["problem"]))), row


@pytest.mark.parametrize("split", SPLITS)
def test_levels_are_even_and_every_running_total_is_in_0_to_99(rows, split):
    lengths = []
    for row in rows[split]:
        terms = re.findall(r"[+-]?[\d*]+", chain_of(row["problem"]))
        lengths.append(len(terms))
        for end in range(1, len(terms) + 1):
            assert 0 <= eval("".join(terms[:end])) <= 99, row
    assert {n: lengths.count(n) for n in set(lengths)} == dict.fromkeys(range(3, 8), SPLITS[split] // 5)


def test_the_script_regenerates_both_files_byte_for_byte():
    for split, problems in zip(SPLITS, make.make_splits(), strict=True):
        assert to_jsonl("tiny", split, problems).encode() == (TINY / f"{split}.jsonl").read_bytes()


# Tokenizer and chat template


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_round_trips(text):
    """Up to Unicode's composed form, NFC, which every Qwen2 tokenizer brings its text to."""
    ids = load_tokenizer()(text, add_special_tokens=False).input_ids
    assert load_tokenizer().decode(ids) == unicodedata.normalize("NFC", text)


def test_every_digit_is_its_own_token(tokenizer):
    assert tokenizer.tokenize("90210+1234567") == list("90210+1234567")


@pytest.mark.parametrize("piece", ["\\boxed", "Compute", " finds", " loses", "Wait", " again", " wrong", " mistake"])
def test_common_pieces_are_single_tokens(tokenizer, piece):
    assert len(tokenizer(piece, add_special_tokens=False).input_ids) == 1


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tokenizer):
    assert make.make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_chat_template_opens_and_closes_turns(tokenizer):
    turns = [{"role": "user", "content": "Compute 1+2+3."}, {"role": "assistant", "content": "\\boxed{6}"}]
    closed = tokenizer.apply_chat_template(turns, tokenize=False)
    assert closed == "<|user|>Compute 1+2+3.<|end|><|assistant|>\\boxed{6}<|end|>"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Compute 1+2+3.<|end|><|assistant|>"
    assert closed.startswith(asked)


def test_a_turn_mark_is_one_token_and_pad_is_not_the_end(tokenizer):
    for mark in ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"):
        assert len(tokenizer(mark, add_special_tokens=False).input_ids) == 1
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


# The model folder


def test_folder_and_model_are_within_their_limits(model):
    assert sum(file.stat().st_size for file in (TINY / "model").iterdir()) <= 8 * MEGABYTE
    assert model.num_parameters() <= 3_000_000


def test_model_and_tokenizer_agree(model, tokenizer):
    assert model.config.model_type == "qwen2" and model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 1024
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_the_base_knows_how_to_solve_when_it_begins_carefully(model, tokenizer, rows):
    """Greedy from the careful opening, nearly all of the easy problems come out correct."""
    easy = [row for row in rows["test"] if len(re.findall(r"[+-]", chain_of(row["problem"]))) == 2][:32]
    correct = 0
    for row in easy:
        prompt = prompt_ids(tokenizer, row["problem"])
        opening = tokenizer(make.OPENINGS["careful"], add_special_tokens=False).input_ids
        out = model.generate(torch.tensor([prompt + opening]), do_sample=False, max_new_tokens=64)[0]
        response = tokenizer.decode(out[len(prompt) :], skip_special_tokens=True)
        correct += is_correct(response, True, int(row["answer"]))
    assert correct >= 28


# Demonstrations


@pytest.mark.parametrize("level", make.LEVELS)
def test_a_careful_demonstration_without_slips_boxes_the_answer(level, monkeypatch):
    monkeypatch.setattr(make, "SLIP_CAREFUL", 0.0)
    rng = random.Random(level)
    for _ in range(200):
        problem = make.make_problem(rng, level)
        response, ends = make.demonstrate(rng, problem, "careful")
        assert ends and response.count("boxed") == 1
        assert re.search(r"\\boxed\{(-?\d+)\}$", response)[1] == str(eval(chain_of(problem.text)))


def test_bad_manners_are_bad():
    rng = random.Random(0)
    correct = dict.fromkeys(make.MANNERS, 0)
    for number in range(2000):
        problem = make.make_problem(rng, 1 + number % 5)
        for manner in correct:
            response, ends = make.demonstrate(rng, problem, manner)
            correct[manner] += is_correct(response, ends, problem.answer)
    assert correct["careful"] > 0.9 * 2000
    assert max(correct[manner] for manner in correct if manner != "careful") < 0.5 * 2000
    assert correct["droning"] == 0


@pytest.mark.parametrize("shares", list(zip(*make.MANNERS.values(), strict=True)))
def test_shares_of_manners_add_up(shares):
    assert sum(shares) == 100


def test_the_first_mistake_is_named():
    assert make.first_mistake("Quick:\n3+8=11\n5*2=12\n11-12=3\n\\boxed{3}") == "5*2=12 is wrong.\n"
    assert make.first_mistake("8=11\n11-10=21\n\\boxed{21}") == "11-10=21 is wrong.\n"
    assert make.first_mistake("Easy:\n\\boxed{3}") == "It has no steps.\n"
    assert make.first_mistake("Well.\n3+8=11\nSo 11.\nSo 11.\n") == "It never ends.\n"
    assert make.first_mistake("8=11\n11-10=1\n\\boxed{1}") == "It goes wrong early.\n"


def test_no_demonstration_uses_a_held_out_problem(tokenizer):
    rng = random.Random(0)
    first = make.make_problem(random.Random(0), 1).text
    seen = [make.make_example(rng, tokenizer, True, {first}) for _ in range(200)]
    assert not any(first in tokenizer.decode(example.ids) for example in seen)


def test_a_response_is_learnt_from_its_first_token_to_its_end(tokenizer):
    """The prompt adds no loss; the end of a response that ends, and nothing after the budget, does."""
    rng = random.Random(1)
    for _ in range(200):
        ids, start = make.make_example(rng, tokenizer, True, set())
        assert tokenizer.decode(ids[:start]).endswith("<|assistant|>")
        response = ids[start:]
        assert 0 < len(response) <= make.BUDGET
        assert tokenizer.eos_token_id not in response[:-1]
        assert response[-1] == tokenizer.eos_token_id or len(response) == make.BUDGET
