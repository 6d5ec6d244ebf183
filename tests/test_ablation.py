"""bench/ablation.py: the table by hand, the choice of a learning rate, cells that are kept, resumed or named."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import SHORT, Killed, at, kill, rows, short_model  # noqa: F401

import r3
from runtime.errors import UserError

ROOT = Path(__file__).parent.parent


def load_ablation():
    spec = importlib.util.spec_from_file_location("ablation", ROOT / "bench" / "ablation.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["ablation"] = module  # its dataclass looks for itself there
    spec.loader.exec_module(module)
    return module


ablation = load_ablation()
Cell = ablation.Cell


def row(method="grpo", lr=1e-3, seed=0, search=False, final=(8, 0), base=(4, 0), **changes) -> dict:
    """A line of cells.jsonl: two problems, 16 responses each; final and base are the correct ones among them."""
    curve = [[0, 0, sum(base) / 32, 0.5], [10, 1000, sum(final) / 32, 0.25]]
    found = {name: dict(zip("ab", counts, strict=True)) for name, counts in (("base", base), ("final", final))}
    return {
        "method": method, "lr": lr, "seed": seed, "search": search, "commit": "abc", "n": 16, "curve": curve,
        "tokens": 1_500_000, "hours": 0.05, **found, **changes,
    }  # fmt: skip


def cells_of(*lines: dict) -> dict:
    return {Cell(r["method"], r["lr"], r["seed"], r["search"]): r for r in lines}


# --- Numbers


def test_hard_problems_are_those_that_the_base_solves_at_most_once_in_16_over_all_seeds():
    once, twice = row(seed=0, base=(2, 1)), row(seed=1, base=(0, 2))
    assert ablation.hard_problems([once]) == {"b"}
    assert ablation.hard_problems([once, twice]) == {"a"}  # a: 2 of 32, b: 3 of 32
    again = row("r3", seed=0, base=(2, 1))
    assert ablation.hard_problems([once, again, twice]) == {"a"}  # the same evaluation of the base counts once


def test_scores_of_a_cell_by_hand():
    found = ablation.scores({"a": 8, "b": 1}, 16, {"b"})
    assert found == pytest.approx({"pass@1": (8 / 16 + 1 / 16) / 2, "pass@16": 1.0, "hard": 1 / 16})
    assert ablation.scores({"a": 8, "b": 0}, 16, {"b"})["pass@16"] == 0.5
    assert math.isnan(ablation.scores({"a": 8}, 16, set())["hard"])


def test_paired_differences_and_their_interval_by_hand():
    mean, half = ablation.paired({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {0: 0.4, 1: 0.4, 2: 0.4, 9: 1.0})
    assert mean == pytest.approx(0.3)  # 0.1, 0.3, 0.5: standard deviation 0.2
    assert half == pytest.approx(4.303 * 0.2 / math.sqrt(3))
    one, unknown = ablation.paired({0: 0.5}, {0: 0.4})
    assert one == pytest.approx(0.1) and math.isnan(unknown)
    assert all(map(math.isnan, ablation.paired({0: 0.5}, {1: 0.4})))


def test_the_table_by_hand():
    lines = [row(seed=0, final=(8, 0)), row(seed=1, final=(16, 0))]  # pass@1 25 and 50 %, nothing on the hard one
    lines += [row("r3", seed=0, final=(12, 4)), row("r3", seed=1, final=(16, 4))]  # 50 and 62.5 %; hard: 25 %
    lines += [row("r3", seed=5, search=True, final=(16, 16))]  # not in the table
    table = ablation.table(cells_of(*lines)).splitlines()
    cells = [[text.strip() for text in line.strip("|").split("|")] for line in table[:5]]
    heads = dict(zip(cells[0], zip(*cells[2:], strict=True), strict=True))
    assert heads["method"] == ("base", "GRPO (0/1 reward)", "R³")
    assert heads["pass@1"] == ("12.5 ± 0.0", "37.5 ± 17.7", "56.2 ± 8.8")
    assert heads["pass@16"] == ("50.0 ± 0.0", "50.0 ± 0.0", "100.0 ± 0.0")
    assert heads["hard"] == ("0.0 ± 0.0", "0.0 ± 0.0", "25.0 ± 0.0")
    assert heads["truncated"] == ("50.0 ± 0.0", "25.0 ± 0.0", "25.0 ± 0.0")
    assert heads["tokens, M"][1:] == ("1.50 ± 0.00", "1.50 ± 0.00")
    assert heads["pass@1 − GRPO [95 %]"] == ("", "", "+18.8 [-60.7, +98.2]")  # 25 and 12.5 points, 12.706 * 6.25
    assert heads["hard − GRPO [95 %]"] == ("", "", "+25.0 [+25.0, +25.0]")
    assert heads["seeds"] == ("", "0 1", "0 1")
    assert "1 of 2 problems" in table[-1]


def test_the_learning_rate_is_the_best_mean_over_all_its_seeds():
    words = ["--methods", "grpo", "r3", "dapo", "--lrs", "1e-4", "1e-3", "--lr-seeds", "8", "9"]
    args = ablation.read_arguments(["--config", "x", "--out", "y", *words])
    lines = [row(lr=1e-4, seed=8, final=(4, 4)), row(lr=1e-4, seed=9, final=(6, 6))]  # mean 10
    lines += [row(lr=1e-3, seed=8, final=(16, 0)), row(lr=1e-3, seed=9, final=(0, 0))]  # mean 8
    lines += [row("r3", lr=1e-4, seed=8), row("r3", lr=1e-4, seed=9), row("r3", lr=1e-3, seed=8, final=(16, 16))]
    found = ablation.best_lrs(args, cells_of(*[line | {"search": True} for line in lines]))
    assert found == {"grpo": 1e-4, "r3": 1e-4}  # r3 lacks a seed of 1e-3, dapo all


def test_a_method_is_overrides_of_config_keys_alone():
    known = r3.Config.__dataclass_fields__
    assert set(ablation.LABELS) == set(ablation.METHODS)
    assert all(key in known for overrides in ablation.METHODS.values() for key in overrides)


# --- Cells


@pytest.fixture
def problems(tmp_path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = (json.dumps({"uid": f"q{i}", "problem": f"{i}+1=", "answer": str(i + 1)}) for i in range(8))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def command(short_model, problems, tmp_path) -> list[str]:  # noqa: F811
    config = tmp_path / "short.yaml"
    keys = SHORT | {"model": str(short_model), "data": str(problems), "eval_data": str(problems), "save_every": 1}
    config.write_text(json.dumps(keys))
    return f"--config {config} --out {tmp_path / 'cells'} --seeds 3 --processes 2 --steps=3".split()


def test_a_cut_cell_is_resumed_and_a_finished_one_is_kept(command, tmp_path, monkeypatch, capsys):
    args = ablation.read_arguments([*command, "--methods", "grpo"])
    cell = Cell("grpo", SHORT["lr"], 3)
    folder = args.out / cell.name
    with at(r3, "collect", 3, kill), pytest.raises(Killed):
        r3.main(ablation.arguments_of(cell, args))
    cut = (folder / "metrics.jsonl").read_text().splitlines()
    ablation.main([*command, "--methods", "grpo"])
    assert (folder / "metrics.jsonl").read_text().splitlines()[: len(cut)] == cut  # seconds too: not done again
    steps = [row for row in rows(folder) if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]

    (grpo,) = [json.loads(line) for line in (args.out / "cells.jsonl").read_text().splitlines()]
    assert (grpo["method"], grpo["seed"], grpo["n"]) == ("grpo", 3, 16)
    evals = [row for row in rows(folder) if "eval/pass@1" in row]
    assert grpo["tokens"] == steps[-1]["sampled_tokens"] == grpo["curve"][-1][1]
    assert sum(grpo["final"].values()) / (16 * 8) == pytest.approx(evals[-1]["eval/pass@1"])
    assert grpo["curve"][0] == [0, 0, evals[0]["eval/pass@1"], evals[0]["eval/truncated"]]
    assert all((args.out / name).stat().st_size > 0 for name in ("table.md", "figure.png"))
    assert "| GRPO (0/1 reward) |" in capsys.readouterr().out

    monkeypatch.setattr(ablation, "launch", lambda *_: pytest.fail("a finished cell was run again"))
    ablation.main([*command, "--methods", "grpo"])
    with pytest.raises(UserError, match="config differs: steps"):
        ablation.main([*command[:-1], "--steps=2", "--methods", "grpo"])


def test_a_failed_cell_is_named_and_the_others_are_run(command, tmp_path, monkeypatch):
    ran = []

    def launch(cell, args):
        ran.append(cell.method)
        (args.out / f"{cell.name}.log").write_text("step 1\nerror: no such thing\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])

    monkeypatch.setattr(ablation, "launch", launch)
    with pytest.raises(
        UserError, match="2 cells failed: .*grpo-lr0.001-s3 ended with exit code 2: error: no such thing"
    ):
        ablation.main([*command, "--methods", "grpo", "dapo"])
    assert sorted(ran) == ["dapo", "grpo"] and not (tmp_path / "cells" / "cells.jsonl").read_text()


def test_no_more_than_so_many_cells_run_at_a_time_and_all_are_stopped_at_the_end():
    running = []

    def launch(cell):
        assert sum(child.poll() is None for child in running) < 2
        running.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({cell})"]))
        return running[-1]

    ended = ablation.finished([0, 0.01, 60, 61], 2, launch)
    assert {next(ended), next(ended)} == {(0, 0), (0.01, 0)}
    ended.close()
    assert [child.returncode for child in running] == [0, 0] + [-15] * (len(running) - 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--methods no_replai", "did you mean 'no_replay'"),
        ("--lrs 1e-3", "both or none"),
        ("--lrs 1e-3 --lr-seeds 3", "among --seeds"),
        ("--processes 0", "at least 1"),
        ("--lrr=1e-3", "unknown key 'lrr'"),
    ],
)
def test_mistakes_are_named_before_anything_runs(command, tmp_path, monkeypatch, words, said):
    monkeypatch.setattr(ablation, "launch", lambda *_: pytest.fail("a cell was run"))
    with pytest.raises(UserError, match=said):
        ablation.main([*command, *words.split()])
    assert not (tmp_path / "cells").exists()
