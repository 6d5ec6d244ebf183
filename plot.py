"""plot.py: the figures of the paper from the metrics of runs, and pass@K from the answers of evaluations.

    python plot.py runs/r3 runs/grpo runs/dapo --out training.png
    python plot.py runs/r3-s0 runs/r3-s1 runs/r3-s2 runs/grpo --out seeds.png       # -s0 -s1 -s2: mean and range
    python plot.py --answers base.jsonl r3.jsonl --out pass_at_k.png                # files of eval.py --out

One panel each for reward, solve-all and solve-none groups, entropy, response length and held-out pass@1, over steps;
a panel that no run has data for is left out. Left out altogether: anything interactive; metrics.jsonl is plain JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: nothing global, no display
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from runtime.config import expand
from runtime.errors import UserError, exit_cleanly, nearest
from scores import answers as answer_files
from scores.tables import mean_pass_at_k, verdicts

EXTENSIONS = (".png", ".pdf", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito: safe for all
INK, GRID = "#333333", "#E5E5E5"


@dataclass(frozen=True)
class Panel:
    key: str  # of metrics.jsonl
    title: str
    share: bool = False  # drawn in per cent
    sparse: bool = False  # measured at a few steps: points, not smoothed


PANELS = (
    Panel("reward", "Reward"),
    Panel("solve_all", "Solve-all groups", share=True),
    Panel("solve_none", "Solve-none groups", share=True),
    Panel("entropy", "Policy entropy (nats)"),
    Panel("response_tokens", "Response length (tokens)"),
    Panel("eval/pass@1", "Held-out pass@1", share=True, sparse=True),
)


# --- Numbers: rows -> curves ----------------------------------------------------------------------------------------


def read_rows(path: Path, required: dict[str, type]) -> list[dict]:
    """The objects of a JSONL file. A last line without its line end is what an interrupted run leaves: not read."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # bad JSON, or not UTF-8
            raise UserError(f"{path}:{number}: bad JSON: {error}") from error
        for key, kind in required.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kind):
                raise UserError(f"{path}:{number}: no {key!r} of type {kind.__name__}; is this the right file?")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: found no complete line in it; nothing to draw yet")
    return rows


def read_run(folder: str) -> list[dict]:
    """The rows of the run's metrics.jsonl."""
    path = Path(folder)
    if not path.is_dir():
        found = "a file, not a run directory" if path.exists() else "no such run directory"
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"{folder}: {found}{'' if path.exists() else nearest(path.name, siblings)}")
    if not (path / "metrics.jsonl").is_file():
        raise UserError(f"{folder}: not a run directory, metrics.jsonl is missing in it")
    return read_rows(path / "metrics.jsonl", {"step": int})


def curve(rows: Sequence[dict], key: str) -> dict[int, float]:
    """step -> finite value of `key`, by rising step; a step that was logged twice counts with its last value."""
    pairs = [(row["step"], row.get(key)) for row in rows]
    return dict(sorted({s: v for s, v in pairs if isinstance(v, (int, float)) and math.isfinite(v)}.items()))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` points (odd; one more if even), fewer of them near the ends. [n] -> [n]"""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def by_seed(labels: Sequence[str]) -> dict[str, list[int]]:
    """Legend entry -> indices of its runs. Labels that differ in a seed ending (-s0, _s1, -seed2) are one entry."""
    alike: dict[str, list[int]] = defaultdict(list)
    for i, label in enumerate(labels):
        alike[re.sub(r"[-_]s(eed)?\d+$", "", label)].append(i)
    return {(f"{k} ({len(v)} seeds)" if len(v) > 1 else labels[v[0]]): v for k, v in alike.items()}


def labels_of(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as tell them apart."""
    for depth in range(1, 1 + max((len(path.parts) for path in paths), default=0)):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    if paths:
        raise UserError(f"command line: {max(paths, key=paths.count)} is named twice; name it once")
    return []


def pass_at_k_curve(rows: Sequence[dict]) -> np.ndarray:
    """Mean over problems of the unbiased pass@k for k = 1..N, N the fewest answers that a problem has. [N]"""
    fewest = min(map(len, verdicts(rows).values()))
    return np.array([mean_pass_at_k(rows, k) for k in range(1, fewest + 1)])


# --- Picture --------------------------------------------------------------------------------------------------------


def draw_panel(axes, panel: Panel, entries: dict[str, list[list[dict]]], window: int) -> None:
    """One metric over steps. entries: legend label -> rows of each of its runs."""
    scale = 100 if panel.share else 1
    for i, group in enumerate(entries.values()):
        curves = [c for rows in group if (c := curve(rows, panel.key))]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        values = scale * np.array([[c[step] for step in steps] for c in curves])  # (runs, steps)
        width = 1 if panel.sparse else window or max(1, len(steps) // 20)
        mean = smooth(values.mean(0), width)
        if len(curves) > 1:
            low, high = smooth(values.min(0), width), smooth(values.max(0), width)
            axes.fill_between(steps, low, high, color=line_style(i)["color"], alpha=0.15, linewidth=0)
        elif width > 1:
            axes.plot(steps, values[0], **line_style(i) | {"alpha": 0.25, "linewidth": 0.8})
        marker = "o" if panel.sparse or len(steps) == 1 else None
        axes.plot(steps, mean, **line_style(i), marker=marker, markersize=4)
    finish(axes, panel.title, "step", panel.share)


def draw_pass_at_k(axes, curves: dict[str, np.ndarray], first_style: int) -> None:
    """pass@K over K, each label in a colour that no run has."""
    for i, (label, values) in enumerate(curves.items(), first_style):
        marker = "o" if len(values) < 9 else None
        axes.plot(range(1, len(values) + 1), 100 * values, **line_style(i), marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    finish(axes, "pass@K", "K", share=True)


def finish(axes, title: str, xlabel: str, share: bool) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.yaxis.set_major_formatter(PercentFormatter() if share else StrMethodFormatter("{x:,g}"))


def line_style(i: int) -> dict:
    """Colour and dashes of the i-th entry of the figure."""
    dashes = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": dashes, "linewidth": 1.8}


def draw(entries: dict[str, list[list[dict]]], answers: dict[str, np.ndarray], window: int) -> Figure:
    """The whole figure: a panel for each metric that some run has, and one for pass@K where there are answers."""
    runs = [rows for group in entries.values() for rows in group]
    panels = [panel for panel in PANELS if any(curve(rows, panel.key) for rows in runs)]
    count = len(panels) + bool(answers)
    if not count:
        raise UserError(f"found none of {', '.join(p.key for p in PANELS)} in the metrics; nothing to draw")
    columns = count if count <= 3 else math.ceil(count / 2)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(4 * columns, 3 * lines + 0.4), layout="constrained", facecolor="white")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        draw_panel(axes, panel, entries, window)
    if answers:
        draw_pass_at_k(grid[len(panels)], answers, first_style=len(entries))
    for axes in grid[count:]:
        axes.set_axis_off()
    if panels:
        handles = [Line2D([], [], **line_style(i)) for i in range(len(entries))]
        place = {"loc": "outside upper center", "ncols": min(len(entries), 2 * columns)}
        figure.legend(handles, entries, **place, frameon=False, fontsize=10, labelcolor=INK)
    figure.get_layout_engine().set(wspace=0.04, hspace=0.04)
    return figure


def save(figure: Figure, path: Path) -> None:
    """The whole picture or none: drawn aside, then renamed."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(aside, format=path.suffix[1:], dpi=150)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


# --- Command line ---------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"command line: {message}")

    parser = Parser(prog="plot.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories")
    parser.add_argument("--answers", nargs="+", default=[], metavar="FILE", help="answers of eval.py, for pass@K")
    parser.add_argument("--out", required=True, metavar="FILE", help=f"picture: {', '.join(EXTENSIONS)}")
    parser.add_argument("--smooth", type=int, default=0, metavar="STEPS", help="window (default: a 20th; 1: none)")
    args = parser.parse_args(argv)
    args.runs = [expand(run, "command line: run") for run in args.runs]
    args.answers = [expand(file, "command line: --answers") for file in args.answers]
    args.out = Path(expand(args.out, "command line: --out"))
    if not (args.runs or args.answers):
        raise UserError("command line: no run named, allowed: run directories, --answers FILE")
    if args.smooth < 0:
        raise UserError(f"command line: --smooth {args.smooth}, allowed: 1 (not at all) or more")
    if args.out.suffix not in EXTENSIONS:
        raise UserError(f"command line: --out {args.out}: {args.out.suffix!r}, allowed: {', '.join(EXTENSIONS)}")
    if not args.out.absolute().parent.is_dir():
        raise UserError(f"command line: --out {args.out}: the folder does not exist; make it first")
    return args


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    runs = [read_run(folder) for folder in args.runs]
    labels = labels_of([Path(folder).resolve() for folder in args.runs])
    entries = {label: [runs[i] for i in indices] for label, indices in by_seed(labels).items()}
    files = [Path(file).absolute() for file in args.answers]
    answers = {
        label: pass_at_k_curve(answer_files.read(file)[1])
        for label, file in zip(labels_of([file.with_suffix("") for file in files]), files, strict=True)
    }
    save(draw(entries, answers, args.smooth), args.out)
    print(args.out)


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
