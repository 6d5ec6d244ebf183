"""pass@k, and the command line of eval.py on a small folder."""
# ruff: noqa: F401, F811  the fixtures short_model and start are imported

import itertools
import json
import shutil

import pytest
from tiny_run import short_model, start

import eval as evaluation
from r3 import Config
from runtime import problems
from runtime.errors import UserError


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
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 16 and {r["uid"] for r in rows} == {f"q{i}" for i in range(8)}
    assert set(rows[0]) == {"uid", "sample", "correct", "tokens", "finished", "response"}
    assert "pass@1" in (printed := capsys.readouterr().out) and "pass@2" in printed


def test_the_same_seed_gives_the_same_answers_whatever_the_other_problems(model_folder, problem_file, tmp_path):
    def answers(*more):
        out = tmp_path / "out.jsonl"
        args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 8, "--out", out, *more]
        evaluation.main([str(a) for a in args])
        return [json.loads(line)["response"] for line in out.read_text().splitlines()]

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
    whole, add, count = out.read_text(), evaluation.Partial.add, 0
    assert not partial.exists()
    out.unlink()

    def add_some(self, *answer):
        nonlocal count
        count += 1
        if count == 8:
            raise Interrupted
        add(self, *answer)

    monkeypatch.setattr(evaluation.Partial, "add", add_some)
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
    monkeypatch.setattr(evaluation.Partial, "add", lambda *_: (_ for _ in ()).throw(Interrupted))
    with pytest.raises(Interrupted):
        evaluation.main([*map(str, args), "--n", "2"])
    before = (tmp_path / "a.jsonl.partial").read_text()
    with pytest.raises(UserError, match=r"a.jsonl.partial: .* n 2 and not 3, seed 0 and not 1; allowed"):
        evaluation.main([*map(str, args), "--n", "3", "--seed", "1"])
    assert (tmp_path / "a.jsonl.partial").read_text() == before


STRANGE = {"text": "hello\n", "list": "[1, 2]\n", "rows": '{"n": 2}\n{"uid": "q0"}\n', "folder": None}


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
        [{**json.loads(line), "correct": None} for line in file.read_text().splitlines()]  # start replaces the verifier
        for file in (run_dir / "evals" / "step_000001.jsonl", out)
    )
    assert by_command == in_training and len(in_training) == 16


def test_fields_and_split_have_other_names(model_folder, tmp_path, capsys):
    data = tmp_path / "other.jsonl"
    data.write_text(json.dumps({"q": "7+1=", "meta": {"gold": 8, "id": "seven"}}))
    fields = ["--problem-field", "q", "--answer-field=meta.gold", "--uid-field", "meta.id"]
    out = tmp_path / "out.jsonl"
    assert first_prompt(model_folder, data, capsys, *fields, "--out", str(out)) == repr("<|user|>7+1=<|assistant|>")
    assert json.loads(out.read_text())["uid"] == "seven"


def test_the_split_is_that_of_the_evaluations_in_training_unless_another_is_given(model_folder, monkeypatch):
    def hub(repo, split, subset):
        raise UserError(split)

    monkeypatch.setattr(problems, "hub_rows", hub)
    for more, split in ([], Config.eval_split), (["--split=dev"], "dev"):
        with pytest.raises(UserError, match=f"^{split}$"):
            evaluation.main(["--model", str(model_folder), "--data", "owner/set", *more])


def test_the_smallest_temperature_draws_what_greedy_does(model_folder, problem_file, tmp_path):
    def responses(temperature: str) -> list[str]:
        out = tmp_path / "out.jsonl"
        args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 8, "--out", out]
        evaluation.main([*map(str, args), f"--temperature={temperature}"])
        return [json.loads(line)["response"] for line in out.read_text().splitlines()]

    assert responses("1e-6") == responses("0")


@pytest.mark.parametrize("temperature", ["0", "1e-6", "1e6"])
@pytest.mark.parametrize("top_p", ["1e-6", "1"])
def test_temperature_and_top_p_work_at_their_bounds(model_folder, problem_file, temperature, top_p):
    args = ["--model", model_folder, "--data", problem_file, "--n", 1, "--max-new-tokens", 4, "--limit", 2]
    evaluation.main([*map(str, args), f"--temperature={temperature}", f"--top-p={top_p}"])
