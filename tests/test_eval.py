"""pass@k, and the command line of eval.py on a small folder."""
# ruff: noqa: F401, F811  the fixtures short_model and start are imported

import functools
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_ranks import on_ranks
from tiny_run import Killed, RuleVerifier, at, kill, short_model, start

import eval as evaluation
from r3 import Config
from runtime import checkpoint, problems
from runtime import run as run_module
from runtime.errors import UserError
from runtime.ranks import Ranks
from scores import tables
from scores.answers import read


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    for n, c, k in [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 3)]:
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert evaluation.pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_one_sample_each_is_the_mean_accuracy():
    assert evaluation.pass_at_k(16, 4, 1) == pytest.approx(0.25)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError):
        evaluation.pass_at_k(n, c, k)


def test_a_summary_weighs_problems_equally():
    answers = [{"uid": u, "correct": c, "tokens": t, "finished": f} for u, c, t, f in [
        ("a", True, 4, True), ("a", False, 6, True), ("b", False, 10, False), ("b", False, 20, False)]]
    assert evaluation.summary(answers, [1, 2]) == {
        "eval/pass@1": 0.25, "eval/pass@2": 0.5, "eval/tokens": 10.0, "eval/truncated": 0.5}


def test_the_command_line_writes_every_answer(model_folder, problem_file, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    args = ["--model", model_folder, "--data", problem_file, "--n", 2, "--k", 1, 2, "--max-new-tokens", 12]
    evaluation.main([str(a) for a in [*args, "--out", out]])
    settings, rows = read(out)
    assert settings["seed"] == 0 and settings["temperature"] == 0.6 and settings["data"] == "problems"
    assert len(rows) == 16 and {r["uid"] for r in rows} == {f"q{i}" for i in range(8)}
    assert set(rows[0]) == {"uid", "sample", "correct", "tokens", "finished", "response"}
    assert "pass@1" in (printed := capsys.readouterr().out) and "pass@2" in printed


def test_the_same_seed_gives_the_same_answers_whatever_the_other_problems(model_folder, problem_file, tmp_path):
    def answers(*more):
        out = tmp_path / f"out{len(more)}.jsonl"
        args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 8, "--out", out, *more]
        evaluation.main([str(a) for a in args])
        return [row["response"] for row in read(out)[1]]

    assert answers()[:3] == answers("--limit", 3)


def test_more_k_than_samples_is_refused(model_folder, problem_file):
    with pytest.raises(UserError, match="--k 4 needs at least as many samples"):
        evaluation.main(["--model", str(model_folder), "--data", str(problem_file), "--n", "2", "--k", "4"])


class Interrupted(Exception):
    pass


def test_an_interrupted_evaluation_goes_on_where_it_was(model_folder, problem_file, tmp_path, monkeypatch, capsys):
    """Stopped after seven answers, the last line cut short as by a crash: ten are sampled again, none differs."""
    out, partial = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.partial"
    args = ["--model", model_folder, "--data", problem_file, "--n", 2, "--max-new-tokens", 12, "--slots", 3]
    args = [str(a) for a in [*args, "--out", out]]
    evaluation.main(args)
    whole, add, count = out.read_text(), evaluation.AnswerFile.add, 0
    assert not partial.exists()
    out.unlink()

    def add_some(self, *answer):
        nonlocal count
        count += 1
        if count == 8:
            raise Interrupted
        add(self, *answer)

    monkeypatch.setattr(evaluation.AnswerFile, "add", add_some)
    with pytest.raises(Interrupted):
        evaluation.main(args)
    assert not out.exists() and len(partial.read_text().splitlines()) == 8
    partial.write_text(partial.read_text()[:-9])
    count = -1000
    capsys.readouterr()
    evaluation.main(args)
    assert count == -990 and "6 of 16 responses are there already" in capsys.readouterr().err
    assert out.read_text() == whole and not partial.exists()


def test_an_evaluation_with_other_settings_is_not_mixed_in(model_folder, problem_file, tmp_path, monkeypatch):
    args = ["--model", model_folder, "--data", problem_file, "--max-new-tokens", 12, "--out", tmp_path / "a.jsonl"]
    begin = evaluation.AnswerFile.add
    monkeypatch.setattr(evaluation.AnswerFile, "add", lambda *a: (begin(*a), (_ for _ in ()).throw(Interrupted)))
    with pytest.raises(Interrupted):
        evaluation.main([*map(str, args), "--n", "2"])
    before = (tmp_path / "a.jsonl.partial").read_text()
    with pytest.raises(UserError, match=r"a.jsonl.partial: .* with seed 0 and not 1, top_p 0.95 and not 0.5; allowed"):
        evaluation.main([*map(str, args), "--n", "3", "--seed", "1", "--top-p", "0.5"])
    assert (tmp_path / "a.jsonl.partial").read_text() == before


STRANGE = {"text": "hello\n", "list": "[1, 2]\n", "rows": '{"settings": {}}\n{"uid": "q0"}\n', "folder": None}


@pytest.mark.parametrize("found", STRANGE.values(), ids=STRANGE)
def test_what_is_no_interrupted_evaluation_is_left_alone(found, model_folder, problem_file, tmp_path):
    partial = tmp_path / "a.jsonl.partial"
    partial.mkdir() if found is None else partial.write_text(found)
    args = ["--model", model_folder, "--data", problem_file, "--n", 2, "--out", tmp_path / "a.jsonl"]
    with pytest.raises(UserError, match="a.jsonl.partial: not what an interrupted evaluation leaves"):
        evaluation.main([str(a) for a in args])
    assert partial.is_dir() if found is None else partial.read_text() == found


# --- the prompt -----------------------------------------------------------------------------------------------------

TRAINED = {"prompt_suffix": " Box it.", "system_prompt": "Be brief."}


def first_prompt(model, data, capsys, *more: str) -> str:
    """What eval.py says that the first prompt is."""
    evaluation.main(["--model", str(model), "--data", str(data), "--n", "1", "--max-new-tokens", "2", *more])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "first prompt: " in line]
    return line.rpartition("first prompt: ")[2]


@pytest.fixture
def trained(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "trained")
    (tmp_path / "trained" / "prompt.json").write_text(json.dumps(TRAINED))
    return tmp_path / "trained"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "<|system|>Be brief.<|user|>0+1= Box it.<|assistant|>"),
        (["--prompt-suffix", ""], "<|system|>Be brief.<|user|>0+1=<|assistant|>"),
        (["--prompt-suffix=", "--system-prompt="], "<|user|>0+1=<|assistant|>"),
        (["--system-prompt", "Be long."], "<|system|>Be long.<|user|>0+1= Box it.<|assistant|>"),
        (["--prompt-suffix=none"], "<|system|>Be brief.<|user|>0+1= Box it.<|assistant|>"),
    ],
)
def test_a_checkpoint_gets_the_prompt_it_was_trained_with_unless_another_is_given(
    trained, problem_file, capsys, more, expected
):
    assert first_prompt(trained, problem_file, capsys, *more) == repr(expected)


def test_a_model_that_was_not_trained_here_gets_the_bare_problem(model_folder, problem_file, capsys):
    assert first_prompt(model_folder, problem_file, capsys) == repr("<|user|>0+1=<|assistant|>")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"prompt_suffix": null, "system_prompt": ""}', "\xff"])
def test_a_damaged_prompt_file_is_named(trained, problem_file, content):
    (trained / "prompt.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="prompt.json: not what a checkpoint holds, allowed: an object with the texts"):
        evaluation.main(["--model", str(trained), "--data", str(problem_file)])


def test_a_checkpoint_gives_the_responses_of_the_evaluation_in_training(start, problem_file, tmp_path):
    """The prompt, the seeds and the weights are those of the run, so the command line needs no prompt."""
    run_dir = start(tmp_path / "run", **TRAINED, steps=1, eval_data=problem_file, eval_temperature=0.7, eval_top_p=0.9)
    out = tmp_path / "responses.jsonl"
    given = {"model": run_dir / "checkpoints" / "step_000001", "data": problem_file, "out": out, "device": "cpu"}
    given |= {"n": 2, "max-new-tokens": 12, "temperature": 0.7, "top-p": 0.9}
    evaluation.main([f"--{key}={value}" for key, value in given.items()])
    in_training, by_command = (
        [{**row, "correct": None} for row in read(file)[1]]  # start replaces the verifier
        for file in (run_dir / "evals" / "step_000001.jsonl", out)
    )
    assert by_command == in_training and len(in_training) == 16


def test_fields_and_split_have_other_names(model_folder, tmp_path, capsys):
    data = tmp_path / "other.jsonl"
    data.write_text(json.dumps({"q": "7+1=", "meta": {"gold": 8, "id": "seven"}}))
    fields = ["--problem-field", "q", "--answer-field=meta.gold", "--uid-field", "meta.id"]
    out = tmp_path / "out.jsonl"
    assert first_prompt(model_folder, data, capsys, *fields, "--out", str(out)) == repr("<|user|>7+1=<|assistant|>")
    assert [row["uid"] for row in read(out)[1]] == ["seven"]


def test_the_split_is_that_of_the_evaluations_in_training_unless_another_is_given(model_folder, monkeypatch):
    def hub(repo, split, subset):
        raise UserError(split)

    monkeypatch.setattr(problems, "hub_rows", hub)
    for more, split in ([], Config.eval_split), (["--split=dev"], "dev"):
        with pytest.raises(UserError, match=f"^{split}$"):
            evaluation.main(["--model", str(model_folder), "--data", "owner/set", *more])


def test_the_smallest_temperature_draws_what_greedy_does(model_folder, problem_file, tmp_path):
    def responses(temperature: str) -> list[str]:
        out = tmp_path / f"{temperature}.jsonl"
        args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 8, "--out", out]
        evaluation.main([*map(str, args), f"--temperature={temperature}"])
        return [row["response"] for row in read(out)[1]]

    assert responses("1e-6") == responses("0")


@pytest.mark.parametrize("temperature", ["0", "1e-6", "1e6"])
@pytest.mark.parametrize("top_p", ["1e-6", "1"])
def test_temperature_and_top_p_work_at_their_bounds(model_folder, problem_file, temperature, top_p):
    args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 4, "--limit", 2]
    evaluation.main([*map(str, args), f"--temperature={temperature}", f"--top-p={top_p}"])


# --- an answer file goes on ------------------------------------------------------------------------------------------


def run_eval(*args, **changes) -> None:
    """eval.py on the command line, n 2 and 12 tokens unless `changes` say otherwise."""
    given = {"n": 2, "max-new-tokens": 12} | changes
    evaluation.main([*map(str, args), *(f"--{key}={value}" for key, value in given.items())])


@pytest.fixture
def by_rule(monkeypatch):
    """Correct is what has a length divisible by 3, so that a random model has some correct responses."""
    monkeypatch.setattr(evaluation, "Verifier", RuleVerifier)


def test_more_samples_keep_those_that_are_there(model_folder, problem_file, tmp_path, by_rule, monkeypatch):
    """--n 5 on a file of 2 samples 3 more, and gives the file that --n 5 gives at once."""
    args, drawn = ["--model", model_folder, "--data", problem_file], []
    add = evaluation.AnswerFile.add
    monkeypatch.setattr(evaluation.AnswerFile, "add", lambda self, *row: (drawn.append(row[:2]), add(self, *row)))
    run_eval(*args, out=tmp_path / "a.jsonl", n=2)
    run_eval(*args, out=tmp_path / "b.jsonl", n=5)
    before = read(tmp_path / "a.jsonl")[1]
    drawn.clear()
    run_eval(*args, out=tmp_path / "a.jsonl", n=5)
    assert sorted(drawn) == [(f"q{i}", j) for i in range(8) for j in (2, 3, 4)]
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    assert [row for row in read(tmp_path / "a.jsonl")[1] if row["sample"] < 2] == before
    drawn.clear()
    run_eval(*args, out=tmp_path / "a.jsonl", n=3)
    assert not drawn and (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text(), "fewer: all are kept"


CHANGED = {"seed": 1, "temperature": 0.7, "top-p": 0.9, "max-new-tokens": 13, "prompt-suffix": "!", "limit": 3}


@pytest.mark.parametrize("key", CHANGED)
def test_answers_of_other_settings_are_refused_by_the_name_of_the_key(model_folder, problem_file, tmp_path, key):
    args, out = ["--model", model_folder, "--data", problem_file], tmp_path / "a.jsonl"
    run_eval(*args, out=out)
    before = out.read_text()
    name = key.replace("-", "_")
    with pytest.raises(UserError, match=rf"a.jsonl: left by a command with .*\b{name} \S+ and not '?{CHANGED[key]}"):
        run_eval(*args, out=out, **{key: CHANGED[key]})
    assert out.read_text() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "problems.jsonl"]


def test_another_reference_answer_is_another_set(model_folder, problem_file, tmp_path):
    args, out = ["--model", model_folder, "--data", problem_file], tmp_path / "a.jsonl"
    run_eval(*args, out=out)
    problem_file.write_text(problem_file.read_text().replace('"answer": "4"', '"answer": "5"'))
    with pytest.raises(UserError, match=r"with problems \d+ and not \d+; allowed"):
        run_eval(*args, out=out)


def test_the_same_weights_and_problems_under_other_names_go_on(model_folder, problem_file, tmp_path, capsys):
    run_eval("--model", model_folder, "--data", problem_file, out=tmp_path / "a.jsonl")
    moved = tmp_path / "moved.jsonl"
    problem_file.rename(moved)
    (tmp_path / "link").symlink_to(model_folder)
    capsys.readouterr()
    run_eval("--model", tmp_path / "link", "--data", moved, out=tmp_path / "a.jsonl")
    assert "16 of 16 responses are there already" in capsys.readouterr().err


# --- several sets, several ranks ---------------------------------------------------------------------------------


def write_set(path: Path, uids: str) -> Path:
    rows = ({"uid": f"{path.stem}-{x}", "problem": f"{x} is?", "answer": x} for x in uids)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """Two sets that prepare.py has made: `one` of five problems, `two` of three."""
    made = tmp_path / "made"
    made.mkdir()
    write_set(made / "one.jsonl", "abcde")
    write_set(made / "two.jsonl", "xyz")
    monkeypatch.setattr(evaluation, "MADE", made)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_several_sets_by_name_are_what_each_is_alone(model_folder, sets, by_rule, capsys):
    run_eval("--model", model_folder, "--data", "one", "two", out="both")
    printed = capsys.readouterr().out
    run_eval("--model", model_folder, "--data", "two", out="two.jsonl")
    assert sorted(p.name for p in (sets / "both").iterdir()) == ["one.jsonl", "two.jsonl"]
    assert (sets / "both" / "two.jsonl").read_text() == (sets / "two.jsonl").read_text()
    (head, one, two, mean) = (line.split() for line in printed.splitlines())
    assert head[:5] == ["set", "problems", "samples", "pass@1", "+-"] and one[:3] == ["one", "5", "2"]
    assert (two[0], mean[0]) == ("two", "mean")
    assert float(mean[1]) == pytest.approx((float(one[3]) + float(two[3])) / 2, abs=0.01)


def test_json_has_the_numbers_of_the_table(model_folder, sets, by_rule, capsys):
    run_eval("--model", model_folder, "--data", "one", "two", "--json", out="both")
    found = json.loads(capsys.readouterr().out)["sets"]
    rows = read(sets / "both" / "one.jsonl")[1]
    assert found["one"] == tables.score(rows, [1, 2]) and 0 < found["one"]["pass@2"] < 1
    assert found["mean"]["pass@1"] == pytest.approx((found["one"]["pass@1"] + found["two"]["pass@1"]) / 2)


def eval_on(ranks: Ranks, args: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "stop", lambda self: None)  # the process group is the test's
        patch.setattr(Ranks, "start", classmethod(lambda cls, *_: ranks))
        patch.setattr(evaluation, "Verifier", RuleVerifier)
        evaluation.main(args)
    return ""


def test_two_ranks_share_the_problems_and_write_what_one_writes(model_folder, sets, by_rule):
    args = ["--model", str(model_folder), "--data", "one", "two", "--n", "2", "--max-new-tokens", "12"]
    evaluation.main([*args, "--out", "alone"])
    (sets / "ranks").mkdir()
    interrupted = (sets / "alone" / "one.jsonl").read_text().splitlines()[0] + "\n"  # rank 1 of 2 had begun a response
    row = {"uid": "one-a", "sample": 1, "finished": False, "ids": [80] * 12}
    (sets / "ranks" / "one.jsonl.partial1").write_text(interrupted + json.dumps(row) + "\n")
    on_ranks(2, functools.partial(eval_on, args=[*args, "--out", "ranks"]), sets)
    assert sorted(p.name for p in (sets / "ranks").iterdir()) == ["one.jsonl", "two.jsonl"]
    assert (sets / "ranks" / "two.jsonl").read_text() == (sets / "alone" / "two.jsonl").read_text()
    alone, shared = (read(sets / name / "one.jsonl")[1] for name in ("alone", "ranks"))
    differing = [(r["uid"], r["sample"]) for r, s in zip(alone, shared, strict=True) if r != s]
    assert differing == [("one-a", 1)], "what the interrupted command had sampled is kept, by whatever rank"


# --- during training -----------------------------------------------------------------------------------------------

BEST = {"eval_every": 2, "save_every": 3, "steps": 8, "checkpoints_kept": 1, "keep_best": True}
SCORES = {0: 0.9, 2: 0.5, 4: 0.7, 6: 0.6, 8: 0.7}  # the base model is no checkpoint, and a tie goes to the earlier one


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations of a run get SCORES by step."""
    evaluate, summary, now = run_module.evaluate, evaluation.summary, []
    monkeypatch.setattr(run_module, "evaluate", lambda run: (now.append(run.step), evaluate(run)))
    monkeypatch.setattr(evaluation, "summary", lambda *a: summary(*a) | {"eval/pass@1": SCORES[now[-1]]})


def kept(run_dir: Path) -> tuple[list[str], str]:
    folder = run_dir / "checkpoints"
    return sorted(p.name for p in folder.iterdir() if not p.is_symlink()), os.readlink(folder / "best")


def test_the_best_checkpoint_is_kept_besides_the_newest(start, tmp_path, scripted, capsys):
    """Step 4 is no multiple of save_every: it is saved because it is the best."""
    run_dir = start(tmp_path / "run", **BEST)
    assert kept(run_dir) == (["step_000004", "step_000008"], "step_000004")
    out, err = capsys.readouterr()
    assert "checkpoints/best   (step 4: pass@1 70.0 %)" in out and "pass@1=0.7" in err
    assert json.loads((run_dir / "checkpoints" / "best" / "training" / "state.json").read_text())["step"] == 4


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [(run_module, "save", 3), (run_module.Logs, "row", 9), (checkpoint, "point_to_best", 2), (checkpoint, "clean", 9)],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_the_best_checkpoint_survives_a_kill_and_a_resume(start, tmp_path, scripted, module, name, call):
    with at(module, name, call, kill), pytest.raises(Killed):
        start(tmp_path / "run", **BEST)
    start(tmp_path / "run", **BEST, resume=True)
    assert kept(tmp_path / "run") == (["step_000004", "step_000008"], "step_000004")


def test_a_best_checkpoint_that_is_gone_is_not_waited_for(start, tmp_path, scripted):
    run_dir = start(tmp_path / "run", **BEST | {"steps": 6})
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    start(run_dir, **BEST, resume=True, override_config=True)
    assert kept(run_dir) == (["step_000008"], "step_000008")


def test_evaluations_of_a_run_are_on_the_same_subset(start, tmp_path):
    run_dir = start(tmp_path / "run", eval_limit=3, steps=2)
    for step in (0, 2):
        rows = read(run_dir / "evals" / f"step_{step:06d}.jsonl")[1]
        assert [row["uid"] for row in rows] == ["q0", "q0", "q1", "q1", "q2", "q2"]


# --- tables from files --------------------------------------------------------------------------------------------


def answer(uid: str, sample: int = 0, correct: bool = False, tokens: int | None = 5, finished: bool = True) -> dict:
    return {"uid": uid, "sample": sample, "correct": correct, "tokens": tokens, "finished": finished}


def answers_of(path: Path, correct: dict[str, str], **given) -> Path:
    """An answer file: uid -> one digit per response, 1 for a correct one."""
    rows = [answer(uid, j, x == "1", **given) for uid, digits in correct.items() for j, x in enumerate(digits)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_standard_error_is_over_problems():
    rows = [answer(uid, j, x == "1") for uid, digits in {"a": "11", "b": "10", "c": "00", "d": "00"}.items()
            for j, x in enumerate(digits)]  # fmt: skip
    found = tables.score(rows, [2])
    mean, spread = 0.375, [1, 0.5, 0, 0]
    expected = (sum((x - mean) ** 2 for x in spread) / 3) ** 0.5 / 4**0.5
    assert found["pass@1"] == mean and found["pass@2"] == 0.5
    assert found["pass@1_se"] == pytest.approx(expected)


def test_lengths_are_what_sampling_with_that_limit_gives(model_folder, problem_file, tmp_path, by_rule, capsys):
    args = ["--model", model_folder, "--data", problem_file]
    run_eval(*args, n=4, out=tmp_path / "long.jsonl")
    keys = ("uid", "sample", "correct", "tokens", "finished")
    seen = set()
    for limit in (3, 6, 12):
        run_eval(*args, **{"n": 4, "max-new-tokens": limit}, out=tmp_path / f"{limit}.jsonl")
        sampled = [{key: row[key] for key in keys} for row in read(tmp_path / f"{limit}.jsonl")[1]]
        by_cut = [{key: row[key] for key in keys} for row in tables.cut(read(tmp_path / "long.jsonl")[1], limit)]
        assert by_cut == sampled
        seen.add(sum(row["correct"] for row in sampled))
    assert len(seen) == 3, "the limits differ in what is correct"
    capsys.readouterr()
    evaluation.main(["--answers", str(tmp_path / "long.jsonl"), "--k", "2", "--lengths", "3", "12", "--json"])
    of = json.loads(capsys.readouterr().out)["lengths"]["problems"]
    assert of["3"] == tables.score(read(tmp_path / "3.jsonl")[1], [2])
    assert of["12"] == tables.score(read(tmp_path / "12.jsonl")[1], [2]) != of["3"]


def test_the_hard_subset_is_what_another_model_hardly_solves(model_folder, sets, by_rule, capsys):
    solved = {"one-a": "110", "one-b": "100", "one-c": "000", "one-d": "111", "one-e": "11"}
    hard = answers_of(sets / "base.jsonl", solved)
    run_eval("--model", model_folder, "--data", "one", "--hard-from", hard, out="hard.jsonl")
    assert {row["uid"] for row in read(sets / "hard.jsonl")[1]} == {"one-b", "one-c"}
    whole = answers_of(sets / "one.jsonl", {f"one-{x}": "01" for x in "abcde"})
    capsys.readouterr()
    evaluation.main(["--answers", str(whole), "--hard-from", str(hard), "--hard-max", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["sets"]["one"]["problems"] == 1


def test_comparison_pairs_the_problems_and_names_those_that_changed_sides(sets, capsys):
    """Half of the problems gain 1/2 and half nothing: paired, the interval is that of a mean of 20 such numbers."""
    digits_a = {f"q{i}": "10" if i % 2 else "00" for i in range(20)}
    digits_b = {uid: "11" if digits == "10" else "00" for uid, digits in digits_a.items()}
    a = answers_of(sets / "a.jsonl", digits_a | {"up": "000", "down": "111", "only": "1"})
    b = answers_of(sets / "b.jsonl", digits_b | {"up": "110", "down": "100"})
    evaluation.main(["--compare", str(a), str(b), "--json"])
    (found,) = json.loads(capsys.readouterr().out).values()
    assert found["problems"] == 22 and found["only_in_one"] == 1
    assert found["difference"] == pytest.approx((10 * 0.5 + 2 / 3 - 2 / 3) / 22)
    low, high = found["interval"]
    spread = ((10 * 0.5**2 + 2 * (2 / 3) ** 2) / 22 - found["difference"] ** 2) ** 0.5 / 22**0.5
    assert (high - low) / 2 == pytest.approx(1.96 * spread, rel=0.1)
    assert set(found["gained"]) == {"up", *(f"q{i}" for i in range(1, 20, 2))} and set(found["lost"]) == {"down"}
    evaluation.main(["--compare", str(a), str(b)])
    printed = capsys.readouterr().out
    assert "no longer: down (100 -> 33 %)" in printed and "up (0 -> 67 %)" in printed
    assert "1 problems are only in one of them" in printed


def test_a_comparison_of_two_folders_goes_by_set(sets, capsys):
    for side, digits in (("a", 10 * "01"), ("b", 20 * "1")):
        (sets / side).mkdir()
        for name in ("one", "two"):
            answers_of(sets / side / f"{name}.jsonl", {f"{name}-{i}": x for i, x in enumerate(digits)})
    evaluation.main(["--compare", "a", "b", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["one", "two", "mean"] and found["mean"]["difference"] == 0.5
    width = {name: of["interval"][1] - of["interval"][0] for name, of in found.items()}
    assert width["mean"] == pytest.approx(width["one"] / 2**0.5, rel=0.1), "the sets are independent"


def test_an_interval_around_no_difference_has_no_width():
    rows = [answer(f"q{i}", 0, i % 2 == 0) for i in range(6)]
    assert tables.compare(rows, rows, np.random.default_rng(0))["interval"] == [0.0, 0.0]


# --- other people's responses --------------------------------------------------------------------------------------


def test_responses_of_another_engine_are_verified_into_the_same_tables(sets, capsys):
    lines = [
        {"uid": "one-a", "response": ["so \\boxed{a}", "\\boxed{b}"], "tokens": [7, 9]},
        {"uid": "one-b", "response": "\\boxed{b}", "finished": False, "tokens": 12},  # truncated: never correct
        {"uid": "one-b", "response": "\\boxed{b}", "tokens": 4},
        {"uid": "one-c", "response": ["\\boxed{c}"] * 2, "finished": [True, True], "tokens": 3},
        {"uid": "one-d", "response": ["\\boxed{d}"] * 2, "tokens": [3, 3]},
        {"uid": "one-e", "response": ["no box", ""], "tokens": 1},
    ]
    Path("vllm.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluation.main(["--responses=vllm.jsonl", "--data=one", "--out=graded.jsonl", "--json"])
    settings, rows = read(Path("graded.jsonl"))
    correct = {uid: tables.verdicts(rows)[uid] for uid in (f"one-{x}" for x in "abcde")}
    assert list(correct.values()) == [[True, False], [False, True], [True, True], [True, True], [False, False]]
    found = json.loads(capsys.readouterr().out)["sets"]["one"]
    assert found == tables.score(rows, [1, 2]) and found["pass@1"] == 0.6 and found["pass@2"] == 0.8
    assert found["tokens"] == 4.6 and found["truncated"] == 0.1


def test_without_counts_of_tokens_the_table_has_none(sets, capsys):
    Path("r.jsonl").write_text("".join(json.dumps({"uid": f"two-{x}", "response": x}) + "\n" for x in "xyz"))
    evaluation.main(["--responses=r.jsonl", "--data=two"])
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["-", "0.00"]


MISTAKES = [  # (arguments, what the message says)
    ("--model m --data ome", "no file or set 'ome' (did you mean 'one'?); allowed: a file, owner/name, or what"),
    ("--data one --k 4 --answers a.jsonl --compare a.jsonl b.jsonl", "--answers with --compare, allowed: one of them"),
    ("--compare a.jsonl", "--compare needs two files or folders, found 1"),
    ("--compare a.jsonl gone.jsonl", "gone.jsonl: cannot be read: No such file"),
    ("--compare a.jsonl a.json", "a.json: cannot be read: No such file or directory (did you mean 'a.jsonl'?)"),
    ("--compare a.jsonl other.jsonl", "the two have no problem in common"),
    ("--compare a.jsonl made", "made/one.jsonl:1: no 'correct' of type bool; is this an answer file of eval.py?"),
    ("--answers a.jsonl --k 4", "pass@4 needs at least as many responses to each problem, found 2"),
    ("--answers a.jsonl --lengths 6", "--lengths 6: found a response to 'one-b' truncated at 5 tokens, allowed: up to"),
    ("--answers a.jsonl --hard-from other.jsonl", "no answers to 2 problems of a, 'one-a' among them"),
    ("--answers a.jsonl --hard-from a.jsonl --hard-max 0", "all problems of a are solved more often"),
    ("--answers broken.jsonl", "broken.jsonl:2: bad JSON"),
    ("--answers empty.jsonl", "empty.jsonl: found no answer in it"),
    ("--answers folder", "folder: found no answer file NAME.jsonl in the folder"),
    ("--responses a.jsonl", "--data is missing"),
    ("--responses a.jsonl --data one", "a.jsonl:1: response: found None, allowed: str"),
    ("--responses uid.jsonl --data one", "uid.jsonl:1: uid 'one-f' is in none of the sets (did you mean 'one-"),
    ("--responses flags.jsonl --data one", "flags.jsonl:1: finished: found 1 values for 2 responses, allowed: bool"),
    ("--responses few.jsonl --data one", "few.jsonl: no response to 4 problems, 'one-b' among them"),
    ("--model m --data one two --out a.jsonl", "--out a.jsonl is one file for 2 sets, allowed: a folder"),
    ("--model m --data one made/one.jsonl", "--data has two sets of the name one"),
    ("--model m --data one copy.jsonl", "copy.jsonl:1: duplicate uid 'one-a', first at one.jsonl:1"),
    ("--answers a.jsonl a.jsonl", "--answers has the set a twice, allowed: once, or --compare"),
    ("--model m --data one --out plain", "--out plain: it cannot be written, allowed: a file, FILE.jsonl, or a folder"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistake_is_named_and_nothing_is_written(sets, arguments, expected):
    rows = [answer("one-a", 0, True), answer("one-a", 1), answer("one-b", 0, True), answer("one-b", 1, finished=False)]
    files = {"a": rows, "other": [answer("x")], "empty": [], "uid": [{"uid": "one-f", "response": "x"}]}
    files |= {"flags": [{"uid": "one-a", "response": ["x", "y"], "finished": [True]}]}
    files |= {"few": [{"uid": "one-a", "response": "x"}]}
    for name, content in files.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    Path("broken.jsonl").write_text(json.dumps(answer("x")) + '\n{"uid": \n')
    shutil.copy("made/one.jsonl", "copy.jsonl")
    Path("folder").mkdir()
    Path("plain").write_text("")
    before = sorted(sets.rglob("*"))
    with pytest.raises(UserError, match=re.escape(expected)):
        evaluation.main(arguments.split())
    assert sorted(sets.rglob("*")) == before
