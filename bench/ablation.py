"""Methods x seeds on one config: every cell is a run of r3.py on one thread; a table and a figure of all of them.

    python bench/ablation.py --config configs/words.yaml --out runs/words_ablation              # 7 methods x 5 seeds
    python bench/ablation.py --config ... --out ... --lrs 1e-4 3e-4 1e-3 --lr-seeds 100 101     # each with its best lr
    python bench/ablation.py --config ... --out ... --methods grpo r3 --seeds 0 --eval_every=10 # keys for all cells
    python bench/ablation.py --out runs/words_ablation --table                                  # table.md, figure.png

A cell is a run directory OUT/METHOD-lrLR-sSEED and, once it has finished, a line of OUT/cells.jsonl. The same command
again keeps the finished cells and resumes those that were cut. With --lrs each method first runs with every learning
rate on --lr-seeds, and then on --seeds with the one whose mean held-out pass@1 was best.

The table: mean +- standard deviation over seeds. hard: pass@1 on the problems that the base solves at most once in 16,
over its evaluations with all seeds. Tokens are those sampled in training, hours those of sampling and updates. The
difference to GRPO is taken seed by seed; its 95 % interval is Student's. Left out: other machines, and several GPUs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib.figure import Figure

import plot
import r3
from eval import pass_at_k
from runtime import checkpoint
from runtime import config as settings
from runtime.errors import UserError, exit_cleanly, nearest
from runtime.files import append, json_line, read_jsonl, write_atomically

ROOT = Path(__file__).resolve().parent.parent
GRPO = {"replay": False, "reflect": False, "rank": False, "length_reward": 0}
METHODS = {  # name in folders and on the command line -> what it changes in the config
    "grpo": GRPO,
    "grpo_length": GRPO | {"length_reward": 1},
    "dapo": GRPO | {"dynamic_sampling": True, "loss_agg": "token", "beta": 0, "overlong_tokens": 8},
    "r3": {},
    "no_replay": {"replay": False},
    "no_reflect": {"reflect": False},
    "no_rank": {"rank": False},
}
LABELS = {
    "grpo": "GRPO (0/1 reward)",
    "grpo_length": "GRPO + length reward",
    "dapo": "DAPO",
    "r3": "R³",
    "no_replay": "R³ without replay (CCR)",
    "no_reflect": "R³ without reflection (ISR)",
    "no_rank": "R³ without ranking (SERR)",
}
EVALUATION = {"eval_n": 16, "eval_at_start": True, "eval_at_end": True}  # of all cells
HARD = 1 / 16  # a problem is hard if the base's pass@1 on it is at most this


@dataclass(frozen=True)
class Cell:
    method: str
    lr: float
    seed: int
    search: bool = False  # one of those that choose the learning rate

    @property
    def name(self) -> str:
        return f"{self.method}-lr{self.lr:g}-s{self.seed}"


# --- Running --------------------------------------------------------------------------------------------------------


def arguments_of(cell: Cell, args: argparse.Namespace) -> list[str]:
    """What r3.py is called with. Keys given for all cells do not override what makes the method."""
    keys = METHODS[cell.method] | {"lr": cell.lr, "seed": cell.seed, "run_dir": args.out / cell.name, "resume": True}
    evaluation = [f"--{key}={value}" for key, value in EVALUATION.items()]
    return ["--config", args.config, *evaluation, *args.keys, *(f"--{key}={value}" for key, value in keys.items())]


def launch(cell: Cell, args: argparse.Namespace) -> subprocess.Popen:
    """A cell's run, which goes on where it was cut; what it prints is in OUT/NAME.log."""
    command = [sys.executable, str(ROOT / "r3.py"), *arguments_of(cell, args)]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with open(args.out / f"{cell.name}.log", "w") as log:
        return subprocess.Popen(command, env=os.environ | one_thread, stdout=log, stderr=subprocess.STDOUT)


def finished(cells: Sequence[Cell], processes: int, launch: Callable) -> Iterator[tuple[Cell, int]]:
    """(cell, exit code) as the cells end, `processes` at a time. Those that run when this is left are stopped."""
    waiting, running = list(cells), {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                cell = waiting.pop(0)
                running[cell] = launch(cell)
            time.sleep(0.1)
            ended = {cell: child.returncode for cell, child in running.items() if child.poll() is not None}
            running = {cell: child for cell, child in running.items() if cell not in ended}
            yield from ended.items()
    finally:
        for child in running.values():
            child.terminate()  # r3.py saves at SIGTERM
        for child in running.values():
            child.wait()


def record(cell: Cell, folder: Path, commit: str) -> dict:
    """The line of a finished run: base and final count of correct answers per problem, the curve, the cost."""
    rows = read_jsonl(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    evals = [row for row in rows if "eval/pass@1" in row]
    tokens = {0: 0} | {row["step"]: row["sampled_tokens"] for row in steps}

    def correct(step: int) -> dict[str, int]:
        counts = Counter()
        for answer in read_jsonl(folder / "evals" / f"step_{step:06d}.jsonl"):
            counts[answer["uid"]] += answer["correct"]
        return dict(counts)

    return {
        **vars(cell),
        "commit": commit,
        "n": settings.parse(r3.Config, ["--config", str(folder / "config.yaml")]).eval_n,
        "base": correct(evals[0]["step"]),
        "final": correct(evals[-1]["step"]),
        "curve": [[r["step"], tokens[r["step"]], r["eval/pass@1"], r["eval/truncated"]] for r in evals],
        "tokens": tokens[evals[-1]["step"]],
        "hours": sum(row["seconds_rollout"] + row["seconds_update"] for row in steps) / 3600,
    }


def read_cells(out: Path) -> dict[Cell, dict]:
    """The finished cells of OUT/cells.jsonl."""
    path = out / "cells.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    return {Cell(row["method"], row["lr"], row["seed"], row["search"]): row for row in rows}


def run_cells(cells: Sequence[Cell], args: argparse.Namespace) -> list[str]:
    """Runs those that have not finished; returns a line about each that failed."""
    for cell in cells:  # every mistake in a key, and every cell of another config, before the first run
        checkpoint.to_resume(settings.parse(r3.Config, arguments_of(cell, args)))
    done, failed = read_cells(args.out), []
    args.out.mkdir(parents=True, exist_ok=True)
    path, commit = args.out / "cells.jsonl", git_commit()
    write_atomically(path, "".join(map(json_line, done.values())))  # without a line that was cut short
    left = [cell for cell in cells if cell not in done]
    print(f"{len(cells)} cells, {len(cells) - len(left)} finished before", flush=True)
    for i, (cell, code) in enumerate(finished(left, args.processes, lambda cell: launch(cell, args)), 1):
        if code:
            log = args.out / f"{cell.name}.log"
            last = (re.split(r"[\r\n]+", log.read_text(errors="replace").strip()) or [""])[-1]
            failed.append(f"{cell.name} ended with exit code {code}: {last} ({log})")
        else:
            row = record(cell, args.out / cell.name, commit)
            append(path, [row])
        result = f"failed, exit code {code}" if code else f"pass@1 {row['curve'][-1][2]:.1%}, {row['hours']:.3f} hours"
        print(f"{i}/{len(left)} {cell.name}: {result}", flush=True)
    return failed


def best_lrs(args: argparse.Namespace, cells: dict[Cell, dict]) -> dict[str, float]:
    """method -> the learning rate with the best mean pass@1 over all --lr-seeds; none where no rate has finished."""
    best = {}
    for method in args.methods:
        means = {}
        for lr in args.lrs:
            rows = [cells.get(Cell(method, lr, seed, search=True)) for seed in args.lr_seeds]
            if all(rows):
                means[lr] = statistics.fmean(row["curve"][-1][2] for row in rows)
        if means:
            best[method] = max(means, key=means.get)
    return best


def git_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")


# --- Numbers --------------------------------------------------------------------------------------------------------


def hard_problems(rows: Sequence[dict]) -> set[str]:
    """uids that the base solves in at most one of 16 responses; a seed's evaluation of the base counts once."""
    by_seed = {row["seed"]: row for row in rows}
    correct, n = Counter(), sum(row["n"] for row in by_seed.values())
    for row in by_seed.values():
        correct.update(row["base"])
    return {uid for uid, count in correct.items() if count / n <= HARD}


def scores(counts: dict[str, int], n: int, hard: set[str]) -> dict[str, float]:
    """Correct answers per problem, out of n -> pass@1, pass@16 (or pass@n, if n is smaller), pass@1 on `hard`."""

    def mean(uids, k: int) -> float:
        return statistics.fmean(pass_at_k(n, counts[uid], k) for uid in uids) if uids else math.nan

    return {"pass@1": mean(counts, 1), "pass@16": mean(counts, min(16, n)), "hard": mean(hard, 1)}


def measured(row: dict, hard: set[str]) -> dict[str, float]:
    """The table's numbers of one cell."""
    costs = {"truncated": row["curve"][-1][3], "tokens": row["tokens"], "hours": row["hours"]}
    return scores(row["final"], row["n"], hard) | costs


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 97.5 % quantiles, 1 to 10 degrees


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float]:
    """seed -> value of two methods -> mean of a - b over the seeds of both, and half the width of its 95 % interval.

    NaN: no common seed; for half the width, fewer than two. From 11 degrees of freedom on the quantile is that of 10.
    """
    differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    n = len(differences)
    if n < 2:
        return (differences or [math.nan])[0], math.nan
    quantile = STUDENT[min(n - 1, len(STUDENT)) - 1]
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(n)


def by_method(cells: dict[Cell, dict]) -> dict[tuple[str, float], list[dict]]:
    """(method, learning rate) -> its rows by seed, in the order of METHODS; the search's cells are left out."""
    rows = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: (list(METHODS).index(cell.method), cell.lr, cell.seed)):
        if not cell.search:
            rows[cell.method, cell.lr].append(cells[cell])
    return rows


# --- Table and figure -----------------------------------------------------------------------------------------------

COLUMNS = {  # name -> heading, factor, digits
    "pass@1": ("pass@1", 100, 1),
    "pass@16": ("pass@16", 100, 1),
    "hard": ("hard", 100, 1),
    "truncated": ("truncated", 100, 1),
    "tokens": ("tokens, M", 1e-6, 2),
    "hours": ("hours", 1, 3),
}


def spread(values: Sequence[float], factor: float, digits: int) -> str:
    """ "mean ± std" (ddof 1), or the value alone."""
    text = f"{factor * statistics.fmean(values):.{digits}f}"
    return text + (f" ± {factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def interval(difference: tuple[float, float]) -> str:
    """Points, with a sign, and the 95 % interval."""
    mean, half = (100 * x for x in difference)
    if math.isnan(mean):
        return ""
    return f"{mean:+.1f}" + ("" if math.isnan(half) else f" [{mean - half:+.1f}, {mean + half:+.1f}]")


def table(cells: dict[Cell, dict]) -> str:
    """The Markdown table: the base, then each method with its differences to GRPO. Shares in per cent."""
    methods = by_method(cells)
    every = [row for rows in methods.values() for row in rows]
    hard = hard_problems(every)
    numbers = {key: {row["seed"]: measured(row, hard) for row in rows} for key, rows in methods.items()}
    grpo = next((value for (method, _), value in numbers.items() if method == "grpo"), {})
    headings = ["method", "lr", *(heading for heading, *_ in COLUMNS.values())]
    headings += ["pass@1 − GRPO [95 %]", "hard − GRPO [95 %]", "seeds", "commit"]
    lines = [" | ".join(headings), " | ".join(["---", *["---:"] * (len(headings) - 1)])]
    bases = {row["seed"]: scores(row["base"], row["n"], hard) | {"truncated": row["curve"][0][3]} for row in every}
    base = [spread([b[name] for b in bases.values()], *COLUMNS[name][1:]) for name in list(COLUMNS)[:4]]
    lines.append(" | ".join(["base", "", *base, *[""] * (len(headings) - 6)]))
    for (method, lr), by_seed in numbers.items():
        means = [spread([s[name] for s in by_seed.values()], *how[1:]) for name, how in COLUMNS.items()]
        differences = [""] * 2
        if method != "grpo":
            pairs = [[{seed: s[name] for seed, s in m.items()} for m in (by_seed, grpo)] for name in ("pass@1", "hard")]
            differences = [interval(paired(*pair)) for pair in pairs]
        seeds = " ".join(map(str, by_seed))
        commits = " ".join(sorted({row["commit"] for row in methods[method, lr]}))
        lines.append(" | ".join([LABELS[method], f"{lr:g}", *means, *differences, seeds, commits]))
    n = len(every[0]["base"])
    note = f"\nhard: {len(hard)} of {n} problems, those that the base solves in at most one of 16 responses.\n"
    return "".join(f"| {line} |\n" for line in lines) + note


def search_table(cells: dict[Cell, dict]) -> str:
    """pass@1 of the search for a learning rate: mean ± std over its seeds."""
    found = defaultdict(list)
    for cell, row in cells.items():
        if cell.search:
            found[cell.method, cell.lr].append(row["curve"][-1][2])
    if not found:
        return ""
    lrs = sorted({lr for _, lr in found})
    lines = [["learning rate", *(f"{lr:g}" for lr in lrs)], ["---", *["---:"] * len(lrs)]]
    for method in METHODS:
        means = [spread(found[method, lr], 100, 1) if (method, lr) in found else "" for lr in lrs]
        lines += [[LABELS[method], *means]] if any(means) else []
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


MARKERS = "os^Dv*X"


def draw(cells: dict[Cell, dict]) -> Figure:
    """Held-out pass@1 over sampled tokens and over steps: mean over seeds, at the end a bar of ± their std."""
    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=True)
    for i, ((method, lr), rows) in enumerate(by_method(cells).items()):
        curves = [{step: (tokens, 100 * score) for step, tokens, score, _ in row["curve"]} for row in rows]
        steps = sorted(set.intersection(*map(set, curves)))
        tokens = [statistics.fmean(c[step][0] for c in curves) / 1e6 for step in steps]
        means = [statistics.fmean(c[step][1] for c in curves) for step in steps]
        style = plot.line_style(i) | {"linestyle": ("-", "--", ":", "-.")[i % 4], "marker": MARKERS[i % 7]}
        for axes, x in zip(panels, (tokens, steps), strict=True):
            axes.plot(x, means, **style, label=f"{LABELS[method]}, lr {lr:g}")
            if len(rows) > 1:
                std = statistics.stdev(c[steps[-1]][1] for c in curves)
                axes.errorbar(x[-1], means[-1], std, color=style["color"], capsize=3, linewidth=1)
    for axes, name in zip(panels, ("sampled tokens, millions", "step"), strict=True):
        plot.finish(axes, "Held-out pass@1", name, share=True)
    handles, labels = panels[0].get_legend_handles_labels()
    place = {"loc": "outside upper center", "ncols": 4, "handlelength": 4}
    figure.legend(handles, labels, **place, frameon=False, fontsize=9, labelcolor=plot.INK)
    return figure


def write_results(out: Path) -> None:
    """table.md and figure.png in OUT; the table is printed too."""
    cells = read_cells(out)
    if not any(not cell.search for cell in cells):
        raise UserError(f"{out / 'cells.jsonl'}: found no finished cell, allowed: a folder of this program with some")
    text = table(cells) + search_table(cells)
    write_atomically(out / "table.md", text)
    plot.save(draw(cells), out / "figure.png")
    print(text + f"\n{out / 'table.md'}\n{out / 'figure.png'}")


# --- Command line ---------------------------------------------------------------------------------------------------


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"command line: {message}")

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="of r3.py; needed to run cells")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the cells")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME", help=", ".join(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lrs", nargs="+", type=float, default=[], help="learning rates to choose from")
    parser.add_argument("--lr-seeds", nargs="+", type=int, default=[], help="seeds that the choice is made on")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="runs at a time (default: a run per core)"
    )
    parser.add_argument("--table", action="store_true", help="only print the table and draw the figure")
    args, args.keys = parser.parse_known_args(argv)
    for name in args.methods:
        if name not in METHODS:
            allowed = ", ".join(METHODS)
            raise UserError(f"command line: --methods {name}{nearest(name, METHODS)}, allowed: {allowed}")
    if not args.table and not args.config:
        raise UserError("command line: --config is missing; it is needed unless --table is given")
    if bool(args.lrs) != bool(args.lr_seeds):
        raise UserError("command line: --lrs and --lr-seeds, allowed: both or none")
    if both := sorted(set(args.seeds) & set(args.lr_seeds)):
        raise UserError(f"command line: --lr-seeds {both[0]} is among --seeds, allowed: other seeds")
    if args.processes < 1:
        raise UserError(f"command line: --processes {args.processes}, allowed: at least 1")
    return args


def main(argv: Sequence[str]) -> None:
    args = read_arguments(argv)
    failed = []
    if not args.table:
        search = [Cell(m, lr, seed, True) for seed in args.lr_seeds for lr in args.lrs for m in args.methods]
        failed += run_cells(search, args) if search else []
        own = settings.parse(r3.Config, ["--config", args.config, *args.keys]).lr
        lrs = best_lrs(args, read_cells(args.out)) if search else dict.fromkeys(args.methods, own)
        failed += run_cells([Cell(m, lrs[m], seed) for seed in args.seeds for m in args.methods if m in lrs], args)
    if args.table or any(not cell.search for cell in read_cells(args.out)):
        write_results(args.out)
    if failed:
        raise UserError(f"{len(failed)} cells failed: {'; '.join(failed)}")


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
