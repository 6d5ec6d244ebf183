"""plot.py: the figures of the paper from the metrics of runs and the answers of evaluations; the groups of a step.

    python plot.py runs/r3 runs/grpo runs/dapo --out training.png                   # Figure 4
    python plot.py runs/r3-s0 runs/r3-s1 runs/grpo --x tokens --out seeds.png       # -s0 -s1: mean and range
    python plot.py runs/r3 --mechanisms --out mechanisms.png                        # replay, reflection, ranking
    python plot.py --answers base.jsonl r3.jsonl --out pass_at_k.png                # Figure 3; files of eval.py --out
    python plot.py runs/r3 --groups --step 20                                       # in the terminal

Figure 4: reward, solve-all and solve-none groups, entropy, response length and held-out pass@1, over steps or sampled
tokens. Figure 3: pass@K for K = 1, 2, 4 ..., and pass@16 for shorter maximum lengths. A panel that no run has data
for is left out. Left out altogether: anything interactive; metrics.jsonl is plain JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure  # no pyplot: nothing global, no display
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

from runtime.config import expand
from runtime.errors import UserError, exit_cleanly, nearest
from scores import answers as answer_files
from scores.tables import cut, mean_pass_at_k, verdicts

EXTENSIONS = (".png", ".pdf", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito: safe for all
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))  # tell entries apart in grey, too
MARKERS = "osD^v"
INK, GRID = "#333333", "#E5E5E5"
X_LABELS = {"steps": "step", "tokens": "sampled tokens"}


@dataclass(frozen=True)
class Panel:
    key: str  # of metrics.jsonl
    title: str
    share: bool = False  # drawn in per cent
    sparse: bool = False  # measured at a few steps: points, not smoothed


TRAINING = (
    Panel("reward", "Reward"),
    Panel("solve_all", "Solve-all groups", share=True),
    Panel("solve_none", "Solve-none groups", share=True),
    Panel("entropy", "Policy entropy (nats)"),
    Panel("response_tokens", "Response length (tokens)"),
    Panel("eval/pass@1", "Held-out pass@1", share=True, sparse=True),
)
MECHANISMS = (
    Panel("replayed", "Replayed responses per step"),
    Panel("reflected", "Reflection groups per step"),
    Panel("ranked", "Ranked responses per step"),
    Panel("response_tokens", "Length, plain (tokens)"),
    Panel("response_tokens/reflection", "Length, reflection (tokens)"),
    Panel("accuracy/reflection", "Correct, reflection", share=True),
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


def tokens_by_step(rows: Sequence[dict]) -> dict[int, float]:
    """step -> response tokens that training had sampled by its end; 0 before the first.

    That is `sampled_tokens`; where a run has no such key, the sum of its rates times their seconds.
    """
    known, total = curve(rows, "sampled_tokens"), 0.0
    if not known:
        parts = [curve(rows, key) for key in ("tokens_per_second", "seconds_rollout", "seconds_update")]
        for step in sorted(set.intersection(*map(set, parts))):
            rate, *seconds = (part[step] for part in parts)
            total += rate * sum(seconds)
            known[step] = total
    if not known:
        raise UserError("--x tokens: a run has neither sampled_tokens nor tokens_per_second, allowed: --x steps")
    return {0: 0.0} | known


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


def pass_at_k_curve(rows: Sequence[dict]) -> dict[int, float]:
    """K -> mean over problems of the unbiased pass@K, K = 1, 2, 4 ... and N, the fewest answers that a problem has."""
    fewest = min(map(len, verdicts(rows).values()))
    ks = sorted({fewest, *(2**i for i in range(fewest.bit_length()))})
    return {k: mean_pass_at_k(rows, k) for k in ks}


def length_curve(settings: dict, rows: Sequence[dict], k: int) -> dict[int, float]:
    """Maximum length -> pass@k: that of the evaluation, halved up to five times. Empty where lengths are unknown."""
    longest = settings.get("max_new_tokens") or max(row["tokens"] or 0 for row in rows)
    if any(row["tokens"] is None for row in rows):
        return {}
    limits = sorted({longest // 2**i for i in range(6)} - {0})
    return {limit: mean_pass_at_k(cut(rows, limit), k) for limit in limits}


# --- Picture --------------------------------------------------------------------------------------------------------


def draw_panel(axes, panel: Panel, entries: dict[str, list[list[dict]]], window: int, x: str) -> None:
    """One metric over steps or tokens. entries: legend label -> rows of each of its runs."""
    scale = 100 if panel.share else 1
    for i, group in enumerate(entries.values()):
        drawn = [rows for rows in group if curve(rows, panel.key)]
        curves = [curve(rows, panel.key) for rows in drawn]
        tokens = [tokens_by_step(rows) for rows in drawn] if x == "tokens" else []
        steps = sorted(set.intersection(*map(set, [*curves, *tokens]))) if curves else []
        if not steps:
            continue
        values = scale * np.array([[c[step] for step in steps] for c in curves])  # (runs, steps)
        places = np.mean([[t[step] for step in steps] for t in tokens], 0) if tokens else steps
        width = 1 if panel.sparse else window or max(1, len(steps) // 20)
        mean = smooth(values.mean(0), width)
        if len(curves) > 1:
            low, high = smooth(values.min(0), width), smooth(values.max(0), width)
            axes.fill_between(places, low, high, color=line_style(i)["color"], alpha=0.15, linewidth=0)
        elif width > 1:
            axes.plot(places, values[0], **line_style(i) | {"alpha": 0.25, "linewidth": 0.8})
        marker = MARKERS[i % len(MARKERS)] if panel.sparse or len(steps) == 1 else None
        axes.plot(places, mean, **line_style(i), marker=marker)
    finish(axes, panel.title, X_LABELS[x], panel.share)
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if x == "tokens" else StrMethodFormatter("{x:g}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=x == "steps"))


def draw_curves(axes, curves: dict[str, dict[int, float]], title: str, xlabel: str, first_style: int) -> None:
    """Shares over powers of two, each label in a style that no run has."""
    for i, (label, points) in enumerate(curves.items(), first_style):
        marker = MARKERS[i % len(MARKERS)]
        axes.plot(list(points), 100 * np.array(list(points.values())), **line_style(i), marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False, fontsize=11, labelcolor=INK)
    finish(axes, title, xlabel, share=True)


def finish(axes, title: str, xlabel: str, share: bool) -> None:
    axes.set_title(title, loc="left", fontsize=13, color=INK)
    axes.set_xlabel(xlabel, fontsize=12, color=INK)
    axes.tick_params(colors=INK, labelsize=11, length=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}%" if share else "{x:,g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))


def line_style(i: int) -> dict:
    """Colour and dashes of the i-th entry of the figure: they differ in grey, too."""
    style = {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
    return style | {"linewidth": 2.2, "markersize": 6}


def draw(
    entries: dict[str, list[list[dict]]],
    answers: dict[str, tuple[dict, list[dict]]],
    window: int,
    panels: Sequence[Panel] = TRAINING,
    x: str = "steps",
) -> Figure:
    """The whole figure: a panel for each metric that some run has, and two of Figure 3 where there are answers.

    answers: label -> settings and rows of an answer file.
    """
    runs = [rows for group in entries.values() for rows in group]
    drawn = [panel for panel in panels if any(curve(rows, panel.key) for rows in runs)]
    curves = []  # (curves by label, title, label of the axis)
    if answers:
        fewest = min(len(v) for _, rows in answers.values() for v in verdicts(rows).values())
        curves.append(({label: pass_at_k_curve(rows) for label, (_, rows) in answers.items()}, "pass@K", "K"))
        k = min(16, fewest)  # as in the paper
        lengths = {label: c for label, found in answers.items() if (c := length_curve(*found, k))}
        curves += [(lengths, f"pass@{k} by maximum length", "tokens")] * bool(lengths)
    count = len(drawn) + len(curves)
    if not count:
        raise UserError(f"found none of {', '.join(p.key for p in panels)} in the metrics; nothing to draw")
    columns = count if count <= 3 else math.ceil(count / 2)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(3.4 * columns, 2.7 * lines + 0.4), layout="constrained", facecolor="white")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, drawn, strict=False):
        draw_panel(axes, panel, entries, window, x)
    if drawn:
        right = max(axes.get_xlim()[1] for axes in grid[: len(drawn)])
        for axes in grid[: len(drawn)]:
            axes.set_xlim(-0.02 * right, right)
    for axes, (of, title, xlabel) in zip(grid[len(drawn) :], curves, strict=False):
        draw_curves(axes, of, title, xlabel, first_style=len(entries))
    for axes in grid[count:]:
        axes.set_axis_off()
    if drawn:
        handles = [Line2D([], [], **line_style(i)) for i in range(len(entries))]
        place = {"loc": "outside upper center", "ncols": min(len(entries), 2 * columns), "handlelength": 3}
        figure.legend(handles, entries, **place, frameon=False, fontsize=12, labelcolor=INK)
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


# --- Groups of a step -----------------------------------------------------------------------------------------------


def groups_text(rows: Sequence[dict], step: int | None, width: int) -> str:
    """The groups that samples.jsonl has of a step (none given: the last one), two lines per response, `width` wide."""
    steps = sorted({row["step"] for row in rows})
    step = steps[-1] if step is None else step
    if step not in steps:
        raise UserError(f"--step {step}: samples.jsonl has no such step, allowed: {steps[0]} to {steps[-1]}")
    return "\n\n".join(group_text(row, width) for row in rows if row["step"] == step)


def group_text(row: dict, width: int) -> str:
    """One group: the fresh responses, then the replayed ones."""
    responses = row["responses"]
    verdicts = [r["correct"] for r in responses if not r["replayed"]]
    n, n_replayed = len(verdicts), len(responses) - len(verdicts)
    what = "all correct" if all(verdicts) else "mixed" if any(verdicts) else "all wrong"
    counts = f"{sum(verdicts)} of {n} correct ({what}), {row['ranked']} ranked, {n_replayed} replayed"
    lines = [f"step {row['step']}  {row['uid']}  {row['kind']} prompt  {counts}"]
    lines.append(clip(f"  {row['problem']}  [answer: {row['answer']}]", width))
    lines.append("     verdict      tokens   reward  rank reward  advantage")
    for i, r in enumerate(responses, 1):
        verdict = "correct" if r["correct"] else "wrong" if r["finished"] else "truncated"
        ranking = f"{r['reward'] - r['outcome']:+11.3f}" if r["reward"] != r["outcome"] else 11 * " "
        source = f"  replayed: {r['kind']} prompt of step {r['step']}" if r["replayed"] else ""
        numbers = f"{r['tokens']:8,} {r['reward']:8.3f}  {ranking} {r['advantage']:+10.3f}"
        lines.append(f"{i:3}  {verdict:10} {numbers}{source}")
        shown = r["first"] if r["first"] == r["last"] else f"{clip(r['first'], width // 2 - 6)} ... {r['last']}"
        lines.append(clip(f"     {shown}", width))
    return "\n".join(lines)


def clip(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    text = text.replace("\n", " ")
    return text if len(text) <= width else text[: width - 3] + "..."


# --- Command line ---------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"command line: {message}")

    parser = Parser(prog="plot.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories")
    parser.add_argument("--answers", nargs="+", default=[], metavar="FILE", help="answers of eval.py, for Figure 3")
    parser.add_argument("--out", metavar="FILE", help=f"picture: {', '.join(EXTENSIONS)}")
    parser.add_argument("--x", choices=X_LABELS, default="steps", help="what the panels of runs are drawn over")
    parser.add_argument("--mechanisms", action="store_true", help="counts of each, lengths by kind of group")
    parser.add_argument("--groups", action="store_true", help="print the groups of a step that samples.jsonl has")
    parser.add_argument("--step", type=int, metavar="STEP", help="of --groups (default: the last one)")
    parser.add_argument("--smooth", type=int, default=0, metavar="STEPS", help="window (default: a 20th; 1: none)")
    args = parser.parse_args(argv)
    args.runs = [expand(run, "command line: run") for run in args.runs]
    args.answers = [expand(file, "command line: --answers") for file in args.answers]
    if args.groups:
        if len(args.runs) != 1 or args.answers or args.out:
            raise UserError("command line: --groups prints one run, allowed: RUN --groups [--step STEP]")
        return args
    if args.out is None:
        raise UserError("command line: --out is missing, allowed: --out FILE, or RUN --groups")
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
    if args.groups:
        rows = read_rows(Path(args.runs[0]) / "samples.jsonl", {"step": int, "responses": list})
        print(groups_text(rows, args.step, shutil.get_terminal_size().columns))
        return
    labels = labels_of([Path(folder).resolve() for folder in args.runs])
    entries = {label: [runs[i] for i in indices] for label, indices in by_seed(labels).items()}
    files = [Path(file).absolute() for file in args.answers]
    names = labels_of([file.with_suffix("") for file in files])
    answers = {label: answer_files.read(file) for label, file in zip(names, files, strict=True)}
    save(draw(entries, answers, args.smooth, MECHANISMS if args.mechanisms else TRAINING, args.x), args.out)
    print(args.out)


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
