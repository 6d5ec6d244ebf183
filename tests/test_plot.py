"""plot.py: the curves it computes, the panels it draws, the groups it prints, and the line it says about a mistake."""
# ruff: noqa: F401, F811  the fixtures short_model and start are imported

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from conftest import byte_tokenizer, fresh_group
from tiny_run import short_model, start

import plot
from r3 import Config, group_advantages
from runtime.errors import UserError
from runtime.files import read_jsonl
from runtime.run import logged, sample_record

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(folder: Path, steps: int = 6, offset: float = 0.0, end: str = "", **columns) -> str:
    """A run directory with `steps` training rows and an evaluation before the first and after the last."""
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/pass@1": 0.2 + offset, "eval/pass@16": 0.7, "eval/tokens": 90, "eval/truncated": 0.1}]
    for step in range(1, steps + 1):
        values = {"reward": 0.1 * step + offset, "solve_all": 0.1, "solve_none": 0.4, "entropy": 0.5}
        rows.append({"step": step, **values, "response_tokens": 80.0, "loss": None, **columns})
    rows.append(rows[0] | {"step": steps, "eval/pass@1": 0.5 + offset})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return str(folder)


def make_small_run(folder: Path) -> str:
    """One panel, which is quicker to draw."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    return str(folder)


def lines_of(axes) -> list[list[float]]:
    return [list(line.get_ydata()) for line in axes.lines]


def draw(*folders: str, window: int = 1):
    labels = plot.labels_of([Path(f) for f in folders])
    runs = [plot.read_run(f) for f in folders]
    return plot.draw({k: [runs[i] for i in v] for k, v in plot.by_seed(labels).items()}, {}, window)


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.axison]


# --- Numbers -------------------------------------------------------------------------------------


def test_a_half_written_last_line_is_not_read(tmp_path):
    whole = plot.read_run(make_run(tmp_path / "whole"))
    assert plot.read_run(make_run(tmp_path / "cut", end='{"step": 7, "rew')) == whole
    assert plot.read_run(make_run(tmp_path / "cut2", end='{"step": 7}')) == whole


def test_null_nan_and_absent_values_are_gaps():
    rows = [{"step": 3, "x": 3}, {"step": 1, "x": None}, {"step": 2, "x": 2.5}, {"step": 4, "x": float("nan")}]
    assert plot.curve([*rows, {"step": 5}, {"step": 2, "x": 9}], "x") == {2: 9, 3: 3}


def test_smoothing_keeps_length_constants_and_the_mean_of_the_window():
    assert np.allclose(plot.smooth(np.full(7, 3.0), 5), 3.0)
    assert np.allclose(plot.smooth(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3.0, 3.0, 3.0])
    assert np.allclose(plot.smooth(np.array([1.0, 5.0]), 100), 3.0)
    values = np.array([4.0, 1.0, 7.0])
    assert np.array_equal(plot.smooth(values, 1), values)


def test_runs_that_differ_by_seed_share_an_entry():
    labels = ["r3-s0", "grpo", "r3-s1", "dapo_seed3", "news"]
    assert plot.by_seed(labels) == {"r3 (2 seeds)": [0, 2], "grpo": [1], "dapo_seed3": [3], "news": [4]}


def test_labels_are_as_short_as_tells_them_apart():
    assert plot.labels_of([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert plot.labels_of([Path("/x/a/evals/s1"), Path("/x/b/evals/s1")]) == ["a/evals/s1", "b/evals/s1"]


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(tmp_path):
    verdicts = {"a": [True, False, False, False], "b": 4 * [False], "c": [True, True, False, True]}
    rows = [{"uid": uid, "correct": v} for uid, all_v in verdicts.items() for v in all_v]
    expected = [np.mean([any(s) for v in verdicts.values() for s in combinations(v, k)]) for k in (1, 2, 3, 4)]
    found = plot.pass_at_k_curve(rows)
    assert list(found) == [1, 2, 4] and np.allclose(list(found.values()), [expected[k - 1] for k in found])
    assert list(plot.pass_at_k_curve(rows[:-1])) == [1, 2, 3]  # as far as every problem has answers


# --- Picture -------------------------------------------------------------------------------------


def test_one_panel_for_each_figure_of_the_paper(tmp_path):
    figure = draw(make_run(tmp_path / "r3"), make_run(tmp_path / "grpo", offset=0.1))
    assert titles(figure) == [panel.title for panel in plot.TRAINING]
    reward, solve_all, *_, held_out = figure.axes
    assert np.allclose(lines_of(reward), [np.arange(1, 7) / 10, np.arange(1, 7) / 10 + 0.1])
    assert np.allclose(lines_of(solve_all), 10.0)  # per cent
    assert np.allclose(lines_of(held_out), [[20, 50], [30, 60]])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["r3", "grpo"]


def test_a_panel_without_data_is_left_out(tmp_path):
    figure = draw(make_run(tmp_path / "r3", entropy=None, solve_all=None))
    assert titles(figure) == ["Reward", "Solve-none groups", "Response length (tokens)", "Held-out pass@1"]


def test_the_raw_curve_stays_faintly_behind_the_smooth_one(tmp_path):
    raw, smoothed = draw(make_run(tmp_path / "r3"), window=3).axes[0].lines
    assert raw.get_alpha() < 0.5 and np.allclose(raw.get_ydata(), np.arange(1, 7) / 10)
    assert np.allclose(smoothed.get_ydata(), plot.smooth(np.arange(1, 7) / 10, 3))


def test_seeds_are_averaged_over_the_steps_that_all_of_them_have(tmp_path):
    folders = [make_run(tmp_path / f"r3-s{i}", steps=6 - i, offset=0.2 * i) for i in range(3)]
    axes = draw(*folders).axes[0]
    assert np.allclose(lines_of(axes), [np.arange(1, 5) / 10 + 0.2])
    band = axes.collections[0].get_paths()[0].vertices
    assert np.isclose(band[:, 1].min(), 0.1) and np.isclose(band[:, 1].max(), 0.8)


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_picture_is_written_in_the_format_of_its_name(tmp_path, name, capsys):
    run, out = make_small_run(tmp_path / "r3"), tmp_path / name
    plot.main([run, "--out", str(out)])
    starts = {".png": PNG, ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert out.read_bytes().startswith(starts[out.suffix]) and capsys.readouterr().out == f"{out}\n"
    assert sorted(os.listdir(tmp_path)) == [name, "r3"]


def test_runs_and_answers_share_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"uid": u, "correct": i == 0, "tokens": 5, "finished": True} for u in "ab" for i in range(2)]
    Path("base.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = []
    monkeypatch.setattr(plot, "save", lambda figure, path: drawn.append(figure))
    plot.main([make_run(tmp_path / "r3"), "--answers", "base.jsonl", "--out", "a.png"])
    assert titles(drawn[0])[-2:] == ["pass@K", "pass@2 by maximum length"]
    assert np.allclose(lines_of(drawn[0].axes[6]), [[50, 100]])


def test_a_write_that_fails_leaves_the_old_picture_and_no_other_file(tmp_path, monkeypatch):
    run, out = make_small_run(tmp_path / "r3"), tmp_path / "a.png"
    out.write_bytes(b"old")

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="a.png: cannot be written: No space left on device"):
        plot.main([run, "--out", str(out)])
    assert out.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["a.png", "r3"]


def test_tokens_are_those_logged_or_the_rate_times_the_seconds():
    logged = [{"step": i, "sampled_tokens": 100 * i, "tokens_per_second": 7} for i in (1, 2)]
    assert plot.tokens_by_step([{"step": 0, "eval/pass@1": 0.5}, *logged]) == {0: 0, 1: 100, 2: 200}
    timed = [{"step": i, "tokens_per_second": 50, "seconds_rollout": i, "seconds_update": 1} for i in (1, 2)]
    assert plot.tokens_by_step(timed) == {0: 0, 1: 100, 2: 250}
    with pytest.raises(UserError, match="neither sampled_tokens nor tokens_per_second"):
        plot.tokens_by_step([{"step": 1}])


def test_over_tokens_every_point_stands_where_its_step_ended(tmp_path):
    runs = [plot.read_run(make_run(tmp_path / f"r3-s{i}", sampled_tokens=None)) for i in range(2)]
    for rows, per_step in zip(runs, (100, 300), strict=True):
        for row in rows:
            row["sampled_tokens"] = per_step * row["step"] or None
    figure = plot.draw({"r3": runs}, {}, 1, x="tokens")
    reward, *_, held_out = figure.axes
    assert list(reward.lines[-1].get_xdata()) == [200.0 * step for step in range(1, 7)]
    assert list(held_out.lines[-1].get_xdata()) == [0, 1200] and reward.get_xlabel() == "sampled tokens"


def test_mechanisms_are_counts_and_lengths_by_group_kind(tmp_path):
    kinds = {"response_tokens/reflection": 70.0, "accuracy/reflection": 0.25}
    run = plot.read_run(make_run(tmp_path / "r3", replayed=4, reflected=2, ranked=3, **kinds))
    figure = plot.draw({"r3": [run]}, {}, 1, plot.MECHANISMS)
    assert titles(figure) == [panel.title for panel in plot.MECHANISMS]
    assert [lines_of(axes)[0][0] for axes in figure.axes] == [4, 2, 3, 80, 70, 25]


def test_entries_differ_without_colour():
    styles = [plot.line_style(i) for i in range(4)]
    assert len({repr(style["linestyle"]) for style in styles}) == 4


def test_length_curve_is_pass_at_k_of_the_answers_cut_there():
    lengths = {"a": [3, 30], "b": [9, 90], "c": [100, 100]}  # c is truncated, the others are correct
    pairs = [(uid, tokens) for uid, of in lengths.items() for tokens in of]
    rows = [{"uid": uid, "correct": uid != "c", "tokens": tokens, "finished": uid != "c"} for uid, tokens in pairs]
    curve = plot.length_curve({"max_new_tokens": 100}, rows, 2)
    expected = {3: 1, 6: 1, 12: 2, 25: 2, 50: 2, 100: 2}  # problems with a response that has ended by then
    assert curve == {limit: pytest.approx(solved / 3) for limit, solved in expected.items()}
    assert plot.length_curve({}, [row | {"tokens": None} for row in rows], 2) == {}


# --- Groups --------------------------------------------------------------------------------------


def test_groups_of_a_run_are_logged_and_printed_with_what_the_mechanisms_did(start, tmp_path, capsys):
    """In every group the advantages are those of its rewards, and rewards differ from outcomes by ranking alone."""
    run = start(tmp_path / "run", steps=4, eval_data="", log_samples=99, max_new_tokens=6, buffer_per_query=4)
    groups = read_jsonl(run / "samples.jsonl")
    metrics = {row["step"]: row for row in read_jsonl(run / "metrics.jsonl")}
    for step, row in metrics.items():
        of = [g for g in groups if g["step"] == step]
        responses = [r for g in of for r in g["responses"]]
        assert sum(r["replayed"] for r in responses) == row["replayed"]
        assert sum(g["ranked"] for g in of) == row["ranked"]
        assert sum(g["kind"] == "reflection" for g in of) == row["reflected"]
        assert {r["step"] for r in responses if not r["replayed"]} == {step}
        assert all(r["step"] < step for r in responses if r["replayed"])
    for g in groups:
        rewards = [r["reward"] for r in g["responses"]]
        expected = group_advantages(rewards, 1.0, 1e-4).tolist()
        assert [r["advantage"] for r in g["responses"]] == pytest.approx(expected, abs=1e-3)
        ranked = [r for r in g["responses"] if r["reward"] != r["outcome"]]
        assert len(ranked) <= g["ranked"] and not any(r["finished"] or r["replayed"] for r in ranked)
    assert all(sum(row[key] for row in metrics.values()) for key in ("replayed", "reflected", "ranked"))
    capsys.readouterr()
    plot.main([str(run), "--groups", "--step", "4"])
    printed = capsys.readouterr().out
    assert printed.count("step 4  q") == len([g for g in groups if g["step"] == 4])
    replayed = [r for g in groups if g["step"] == 4 for r in g["responses"] if r["replayed"]]
    assert printed.count("  replayed: ") == len(replayed)
    assert max(map(len, printed.splitlines())) <= 120
    plot.main([str(run), "--groups"])
    assert capsys.readouterr().out == printed, "the last step is the default"


def test_log_samples_bounds_the_groups(start, tmp_path):
    run = start(tmp_path / "run", steps=1, eval_data="", log_samples=2)
    assert len(read_jsonl(run / "samples.jsonl")) == 2


def test_half_of_the_logged_groups_are_such_that_a_mechanism_changed():
    plain = [fresh_group(f"q{i}", [True, False], seed=i) for i in range(40)]
    ranked = [replace(plain[i], n_ranked=2) if i in (5, 6, 7) else g for i, g in enumerate(plain)]
    more = [replace(g, responses=3 * g.responses[:1]) for g in plain]
    replayed = plain[:21] + more[21:]
    assert logged(plain, 8) == [0, 5, 10, 15, 20, 25, 30, 35]
    assert {5, 6, 7} <= set(logged(ranked, 8)) and len(logged(ranked, 8)) == 8
    assert sum(i > 20 for i in logged(replayed, 8)) >= 4 and len(set(logged(replayed, 8))) == 8
    assert logged(ranked, 0) == [] and logged(ranked, 999) == list(range(40))


def test_a_long_response_is_logged_by_its_ends():
    tokenizer, text = byte_tokenizer(), "a" * 900 + "\nmiddle\n" + "z" * 900 + "\n"
    group = fresh_group("q", [True, False])
    responses = tuple(replace(r, response_ids=tokenizer.encode(text)) for r in group.responses)
    state = SimpleNamespace(config=Config(), tokenizer=tokenizer, step=3)
    record = sample_record(state, replace(group, responses=responses))
    assert record["response"] == text
    assert [(r["first"], r["last"]) for r in record["responses"]] == 2 * [("a" * 160, "z" * 160)]


GROUP = {
    "step": 7, "uid": "q1", "kind": "plain", "problem": "1+1?", "answer": "2", "ranked": 2,
    "responses": [
        {"correct": False, "finished": False, "tokens": 128, "outcome": 0.0, "reward": 0.5, "advantage": 0.4,
         "replayed": False, "step": 7, "kind": "plain", "first": "Let us see.", "last": "and so on and"},
        {"correct": True, "finished": True, "tokens": 40, "outcome": 1.9, "reward": 1.9, "advantage": 1.2,
         "replayed": True, "step": 3, "kind": "reflection", "first": "Two.", "last": "Two."},
    ],
}  # fmt: skip


def test_a_group_in_the_terminal_shows_verdicts_rewards_advantages_and_the_ends_of_each_response():
    assert plot.groups_text([GROUP | {"step": 6}, GROUP], 7, 80).splitlines() == [
        "step 7  q1  plain prompt  0 of 1 correct (all wrong), 2 ranked, 1 replayed",
        "  1+1?  [answer: 2]",
        "     verdict      tokens   reward  rank reward  advantage",
        "  1  truncated       128    0.500       +0.500     +0.400",
        "     Let us see. ... and so on and",
        "  2  correct          40    1.900                  +1.200  replayed: reflection prompt of step 3",
        "     Two.",
    ]


# --- Mistakes ------------------------------------------------------------------------------------

MISTAKES = [  # (arguments, what the message says)
    ([], "--out is missing, allowed: --out FILE, or RUN --groups"),
    (["--out", "a.png"], "no run named, allowed: run directories, --answers FILE"),
    (["r33", "--out", "a.png"], "r33: no such run directory (did you mean 'r3'?)"),
    (["r3/metrics.jsonl", "--out", "a.png"], "r3/metrics.jsonl: a file, not a run directory"),
    (["bare", "--out", "a.png"], "bare: not a run directory, metrics.jsonl is missing in it"),
    (["empty", "--out", "a.png"], "empty/metrics.jsonl: found no complete line in it"),
    (["started", "--out", "a.png"], "started/metrics.jsonl: found no complete line in it"),
    (["broken", "--out", "a.png"], "broken/metrics.jsonl:2: bad JSON"),
    (["latin", "--out", "a.png"], "latin/metrics.jsonl:1: bad JSON"),
    (["stepless", "--out", "a.png"], "stepless/metrics.jsonl:2: no 'step' of type int"),
    (["other", "--out", "a.png"], "found none of reward, solve_all"),
    (["r3", "r3", "--out", "a.png"], "r3 is named twice"),
    (["r3", "--out", "a.jpg"], "--out a.jpg: '.jpg', allowed: .png, .pdf, .svg"),
    (["r3", "--out", "a"], "--out a: '', allowed: .png"),
    (["r3", "--out", "nowhere/a.png"], "--out nowhere/a.png: the folder does not exist"),
    (["r3", "--out", "a.png", "--smooth", "-1"], "--smooth -1, allowed: 1 (not at all) or more"),
    (["r3", "--out", "a.png", "--smooth", "x"], "argument --smooth: invalid int value: 'x'"),
    (["r3", "--out", "a.png", "--x", "time"], "argument --x: invalid choice: 'time' (choose from"),
    (["r3", "--out", "a.png", "--x", "tokens"], "--x tokens: a run has neither sampled_tokens nor tokens_per_second"),
    (["r3", "--groups", "--out", "a.png"], "--groups prints one run, allowed: RUN --groups"),
    (["r3", "--groups"], "samples.jsonl: cannot be read: No such file"),
    (["grouped", "--groups", "--step", "9"], "--step 9: samples.jsonl has no such step, allowed: 7 to 7"),
    (["old", "--groups"], "old/samples.jsonl:1: no 'responses' of type list; is this the right file?"),
    (["r3", "--out", "a.png", "--smoth", "3"], "unrecognized arguments: --smoth"),
    (["--answers", "gone.jsonl", "--out", "a.png"], "gone.jsonl: cannot be read: No such file"),
    (["--answers", "r3/metrics.jsonl", "--out", "a.png"], "metrics.jsonl:1: no 'uid' of type str; is this an answer"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_mistake_is_named_and_nothing_is_written(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "r3")
    metrics = {
        "empty": b"",
        "started": b'{"step": 1, "re',
        "broken": b'{"step": 1}\n{"step": 2,\n{"step": 3}\n',
        "latin": b'{"step": 1, "name": "\xe9"}\n',
        "stepless": b'{"step": 1}\n{"reward": 1}\n',
        "other": b'{"step": 1, "rewards": 1}\n',
    }
    (tmp_path / "bare").mkdir()
    for name, data in metrics.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(data)
    for name, row in {"grouped": GROUP, "old": {"step": 1, "response": "x"}}.items():
        make_small_run(tmp_path / name)
        (tmp_path / name / "samples.jsonl").write_text(json.dumps(row) + "\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        plot.main(arguments)
    assert expected in str(error.value) and "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_command_line_answers_with_one_line_and_code_2(tmp_path):
    script = Path(__file__).parent.parent / "plot.py"
    command = [sys.executable, script, tmp_path / "r3", "--out", tmp_path / "a.png"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/r3: no such run directory\n"
