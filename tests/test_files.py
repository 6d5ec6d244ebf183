"""JSONL that holds any text, and files that are whole or absent."""
# ruff: noqa: F401, F811  the fixtures short_model and start are imported

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import short_model, start

from runtime import model as lm
from runtime.errors import UserError
from runtime.files import append, json_line, read_jsonl, write_atomically

ESCAPES = ["\\\ud800", "\ud800\\", '\udc80\n"', "\ud800u", "\\ud800"]
HALVES = st.text(st.characters(categories=["Cs"])) | st.text() | st.sampled_from(ESCAPES)


def meaning(text: str) -> str:
    """Two halves side by side are the character that they make: JSON knows no other reading."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


@given(HALVES, HALVES)
def test_any_text_is_one_line_of_utf_8_and_read_back(tmp_path_factory, key, value):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    write_atomically(path, json_line({key: value}))
    append(path, [{key: [value]}])
    assert read_jsonl(path) == [{meaning(key): meaning(value)}, {meaning(key): [meaning(value)]}]
    assert path.read_bytes().decode("utf-8").count("\n") == 2


def test_text_without_halves_of_characters_is_written_as_it_is():
    assert json_line({"a": "½\u2028😀"}) == '{"a": "½\u2028😀"}\n'


def test_a_response_with_half_a_character_does_not_end_a_run(start, problem_file, tmp_path, monkeypatch):
    """A slow tokenizer decodes some ids to half a surrogate pair; samples.jsonl and evals/ hold the response."""
    load = lm.load

    def load_slow(*args):
        model, tokenizer = load(*args)
        monkeypatch.setattr(tokenizer, "decode", lambda ids, **_: "\ud83d half" if len(ids) % 2 else "whole")
        return model, tokenizer

    monkeypatch.setattr(lm, "load", load_slow)
    run = start(tmp_path / "run", eval_data=problem_file, steps=2, reflect=False)
    rows = read_jsonl(run / "samples.jsonl") + read_jsonl(run / "evals" / "step_000002.jsonl")
    assert {row["response"] for row in rows} == {"\ud83d half", "whole"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="a.txt: cannot be written: No space left on device"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]
