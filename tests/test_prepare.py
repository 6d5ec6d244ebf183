"""data/prepare.py: what it keeps of a set, what it says, and that a file is whole or absent."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from runtime.problems import load

SCRIPT = Path(__file__).parent.parent / "data" / "prepare.py"
spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
prepare = sys.modules["prepare"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def hub(monkeypatch):
    """Rows of the hub by repository, filled by a test; none at another revision than the pinned one."""
    sets: dict[str, list[dict]] = {}
    pins = {source.hub: source.revision for source in prepare.SETS.values()}

    def hub_rows(repo, split, revision):
        return enumerate(sets[f"{repo} {split}"] if revision == pins[repo] else [], 1)

    monkeypatch.setattr(prepare, "hub_rows", hub_rows)
    return sets


def test_benchmark_keeps_every_row_and_numbers_them(hub, tmp_path, capsys):
    hub["math-ai/amc23 test"] = 40 * [{"id": 5, "question": "1+1?", "answer": 2.0, "url": "x"}]
    prepare.main(["amc23", "--out", str(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "amc23.jsonl").read_text().splitlines()]
    assert lines == [{"uid": f"amc23-{i}", "problem": "1+1?", "answer": "2"} for i in range(40)]
    sum_of_file = hashlib.sha256((tmp_path / "amc23.jsonl").read_bytes()).hexdigest()
    assert capsys.readouterr().out == f"amc23: 40 problems -> {tmp_path}/amc23.jsonl, sha256 {sum_of_file}\n"


def test_benchmark_of_another_size_is_pointed_out(hub, tmp_path, capsys):
    hub["HuggingFaceH4/aime_2024 train"] = [{"problem": "1+1?", "answer": "2"}]
    prepare.main(["aime24", "--out", str(tmp_path)])
    assert capsys.readouterr().out.endswith("; the published set has 30: check the source\n")


def test_training_set_drops_repeated_contradictory_and_empty_rows(hub, tmp_path, capsys):
    hub["BytedTsinghua-SIA/DAPO-Math-17k train"] = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"{text} Please reason step by step, and put your final answer"
                        " within \\boxed{}."}],
            "reward_model": {"ground_truth": answer},
            "extra_info": {"index": f"id-{text}-{answer}"},
        }
        for text, answer in [
            ("a?", "1"), ("b?", "2"), ("a?", "1"), ("c?", "3"), ("c?", "4"), ("d?", ""), ("d?", None), ("a?", "1")
        ]
    ]  # fmt: skip
    prepare.main(["dapo", "--out", str(tmp_path)])
    problems = load(tmp_path / "dapo.jsonl")
    assert [(p.uid, p.problem) for p in problems] == [("math_dapo-id-a?-1", "a?"), ("math_dapo-id-b?-2", "b?")]
    said = capsys.readouterr().out
    assert "dapo: 2 problems" in said
    assert "; 2 empty left out; 2 repeated left out; 2 contradictory left out; overlap not checked: no" in said


TEXT = list("abcdefghijklmn")  # 14 words
SHORT = "How many primes are below ten?"


def test_problems_that_share_13_words_in_a_row_with_a_benchmark_are_reported_and_left_out_on_request(
    hub, tmp_path, capsys
):
    hub["HuggingFaceH4/MATH-500 test"] = [{"problem": x, "answer": "1"} for x in (" ".join(TEXT), SHORT, "Add two.")]
    thirteen = f"New words. {' '.join(TEXT[1:]).upper()}!"  # 13 of the 14, whatever the case
    twelve = f"New words. {' '.join(TEXT[2:])}!"
    longer = f"{SHORT} And how many of these are odd numbers?"  # holds a short problem, which counts only as a whole
    texts = [thirteen, twelve, "how many primes are below ten", longer]
    hub["agentica-org/DeepScaleR-Preview-Dataset train"] = [{"problem": x, "answer": "2"} for x in texts]
    prepare.main(["deepscaler", "math500", "--out", str(tmp_path)])  # benchmarks are made first
    said = capsys.readouterr().out
    expected = "2 share 13 words in a row with a benchmark (math500 2): {}, the first is deepscaler-0 with math500-0"
    assert expected.format("kept (--drop-overlap leaves them out)") in said
    assert len(load(tmp_path / "deepscaler.jsonl")) == 4
    prepare.main(["deepscaler", "--drop-overlap", "--out", str(tmp_path)])
    assert expected.format("left out") in capsys.readouterr().out
    assert [p.problem for p in load(tmp_path / "deepscaler.jsonl")] == [twelve, longer]
    source = write(tmp_path / "mine.jsonl", [{"problem": x, "answer": "2"} for x in texts])
    (tmp_path / "out").mkdir()
    shutil.copy(tmp_path / "math500.jsonl", tmp_path / "out")
    prepare.main(["--from", source, "--drop-overlap", "--out", str(tmp_path / "out")])
    assert len(load(tmp_path / "out" / "mine.jsonl")) == 2


@pytest.mark.parametrize(("problems", "overlap"), [(10, 10), (11, 0)])
def test_words_that_many_training_problems_have_are_a_phrase(hub, tmp_path, capsys, problems, overlap):
    hub["math-ai/aime25 test"] = [{"problem": f"Find it {' '.join(TEXT)}", "answer": "1"}]
    rows = [{"problem": f"Problem {i}: {' '.join(TEXT)}", "answer": "2"} for i in range(problems)]
    hub["agentica-org/DeepScaleR-Preview-Dataset train"] = rows
    prepare.main(["aime25", "deepscaler", "--out", str(tmp_path)])
    assert f"; {overlap} share 13 words in a row with a benchmark (aime25 {overlap})" in capsys.readouterr().out


def test_every_revision_is_a_commit():
    assert all(re.fullmatch("[0-9a-f]{40}", source.revision) for source in prepare.SETS.values())


def test_answer_in_parts_is_one_answer_not_a_choice(hub, tmp_path):
    rows = [{"question": "roots?", "final_answer": ["1", "2"]}, {"question": "1+1?", "final_answer": ["2"]}]
    hub["math-ai/olympiadbench test"] = rows
    prepare.main(["olympiadbench", "--out", str(tmp_path)])
    assert [p.answer for p in load(tmp_path / "olympiadbench.jsonl")] == ["1, 2", "2"]


def test_every_set_of_the_table_reads_a_row_with_its_fields(hub, tmp_path):
    for name, source in prepare.SETS.items():
        hub[f"{source.hub} {source.split}"] = [{source.problem_field: "1+1?", source.answer_field: "2"}]
        prepare.main([name, "--out", str(tmp_path)])
        assert len(load(tmp_path / f"{name}.jsonl")) == 1


def test_local_verl_parquet_becomes_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {
        "data_source": "s",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 4},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "mine.parquet")
    prepare.main(["--from", str(tmp_path / "mine.parquet"), "--out", str(tmp_path)])
    assert json.loads((tmp_path / "mine.jsonl").read_text()) == {"uid": "s-4", "problem": "1+1?", "answer": "2"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    source = write(tmp_path / "new.jsonl", [{"problem": "1+1?", "answer": "2"}])
    out = tmp_path / "out"
    out.mkdir()
    (out / "new.jsonl").write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="new.jsonl: cannot be written: No space left on device"):
        prepare.main(["--from", source, "--out", str(out)])
    assert (out / "new.jsonl").read_text() == "old" and os.listdir(out) == ["new.jsonl"]


MISTAKES = [  # (arguments, what the message says)
    (["aime42"], "no data set 'aime42' (did you mean 'aime2"),
    ([], "no data set named, allowed: --list, --from FILE, deepscaler"),
    (["--bogus"], "unrecognized arguments: --bogus"),
    (["aime24", "math500", "--from", "ok.jsonl"], "--from is one set, found 2 names"),
    (["aime24", "--drop-overlap"], "--drop-overlap with no training set, allowed: deepscaler, dapo, --from FILE"),
    (["--from", ""], "data: found an empty name, allowed: a file"),
    (["--from", "$NOWHERE/ok.jsonl"], "--from = '$NOWHERE/ok.jsonl': the variable NOWHERE is not set"),
    (["--from", "ok.jsonl", "--out", "~nobody-of-this-name"], "--out = '~nobody-of-this-name': there is no such home"),
    (["--from", "okay.jsonl"], "okay.jsonl: no such file (did you mean 'ok.jsonl'?)"),
    (["--from", "ok.jsonl", "--out", "nowhere"], "--out nowhere: no such folder"),
    (["--from", "ok.jsonl", "--out", "."], "ok.jsonl: the result would overwrite it"),
    (["--from", "twice.jsonl", "--out", "out"], "twice.jsonl:2: duplicate uid 'a', first at twice.jsonl:1"),
    (["--from", "empty.jsonl", "--out", "out"], "empty: found no usable problem in empty.jsonl"),
    (["amc23", "--from", "ok.jsonl", "--out", "out"], "ok.jsonl:1: no field 'question'; this row has"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_mistake_is_named_and_nothing_is_written(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    row = {"uid": "a", "problem": "1+1?", "answer": "2"}
    for name, rows in {"ok": [row], "twice": [row, row], "empty": [row | {"answer": ""}]}.items():
        write(tmp_path / f"{name}.jsonl", rows)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        prepare.main(arguments)
    assert expected in str(error.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_command_line_answers_with_one_line_and_code_2():
    done = subprocess.run([sys.executable, SCRIPT, "amc32"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no data set 'amc32' (did you mean 'amc23'?)") and done.stderr.count("\n") == 1
    listed = subprocess.run([sys.executable, SCRIPT, "--list"], capture_output=True, text=True)
    assert listed.returncode == 0
    assert "math500        HuggingFaceH4/MATH-500, split test, revision 6e4ed1a" in listed.stdout
