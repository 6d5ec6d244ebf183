"""tables.py: answers -> the numbers of the paper's tables, and their text. No torch, no files.

A row is one response, as an answer file has it: uid, sample, correct, tokens (None: unknown), finished. Shares are
between 0 and 1 here, in per cent in the text.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from runtime.errors import UserError


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of P(one of k samples is correct) from c correct ones of n: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, equation 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, found n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def verdicts(rows: Sequence[dict]) -> dict[str, list[bool]]:
    """uid -> whether each of its responses is correct."""
    by_uid: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        by_uid[row["uid"]].append(row["correct"])
    return by_uid


def mean_pass_at_k(rows: Sequence[dict], k: int) -> float:
    """Mean over problems of pass@k. UserError where a problem has fewer than k responses."""
    counts = Counter((len(v), sum(v)) for v in verdicts(rows).values())  # (n, c) -> problems
    if (fewest := min(counts)[0]) < k:
        raise UserError(f"pass@{k} needs at least as many responses to each problem, found {fewest}")
    return sum(m * pass_at_k(n, c, k) for (n, c), m in counts.items()) / counts.total()


def summary(rows: Sequence[dict], ks: Sequence[int]) -> dict[str, float]:
    """`eval/pass@K` for each k, `eval/tokens` (mean over responses) and `eval/truncated` (share): a row of metrics."""
    scores = score(rows, ks)
    return {f"eval/{key}": scores[key] for key in [*(f"pass@{k}" for k in ks), "tokens", "truncated"]}


def score(rows: Sequence[dict], ks: Sequence[int]) -> dict[str, float | None]:
    """The line of a set: problems, samples, pass@1, pass@K for each k, the standard error of pass@1, tokens, truncated.

    The standard error is over problems: std (ddof 1) of their pass@1 over the root of their number; None for one.
    """
    accuracy = [np.mean(v) for v in verdicts(rows).values()]
    tokens = [row["tokens"] for row in rows]
    return {
        "problems": len(accuracy),
        "samples": len(rows) / len(accuracy),
        **{f"pass@{k}": mean_pass_at_k(rows, k) for k in sorted({1, *ks})},
        "pass@1_se": float(np.std(accuracy, ddof=1)) / math.sqrt(len(accuracy)) if len(accuracy) > 1 else None,
        "tokens": None if None in tokens else sum(tokens) / len(tokens),
        "truncated": sum(not row["finished"] for row in rows) / len(rows),
    }


def mean_of_sets(scores: Sequence[dict]) -> dict[str, float | None]:
    """The mean of each figure over sets, whatever their sizes; the standard error is that of this mean."""
    keys = [key for key in scores[0] if key not in ("problems", "samples")]
    mean = {key: None if None in (of := [s[key] for s in scores]) else sum(of) / len(of) for key in keys}
    errors = [s["pass@1_se"] for s in scores]
    return mean | {"pass@1_se": None if None in errors else math.hypot(*errors) / len(errors)}


def cut(rows: Sequence[dict], limit: int) -> list[dict]:
    """The rows as sampling with at most `limit` tokens would have given them: correct only what ended by then.

    UserError where a response was truncated before: nobody knows how it would have gone on.
    """
    for row in rows:
        if row["tokens"] is None or not row["finished"] and row["tokens"] < limit:
            found = "of unknown length" if row["tokens"] is None else f"truncated at {row['tokens']:,} tokens"
            raise UserError(f"--lengths {limit}: found a response to {row['uid']!r} {found}, allowed: up to that")
    ended = [row["finished"] and row["tokens"] <= limit for row in rows]
    return [
        row | {"correct": row["correct"] and end, "finished": end, "tokens": min(row["tokens"], limit)}
        for row, end in zip(rows, ended, strict=True)
    ]


def hard(answers: Sequence[dict], most: int) -> set[str]:
    """The uids that at most `most` of these answers solve."""
    return {uid for uid, v in verdicts(answers).items() if sum(v) <= most}


def compare(a: Sequence[dict], b: Sequence[dict], rng: np.random.Generator, resamples: int = 10_000) -> dict:
    """B against A on the problems that both have: pass@1 of each, difference, 95 % interval, who changed sides.

    The interval is a paired bootstrap: problems are drawn with replacement, each with both of its accuracies.
    `gained`: uid -> (accuracy by A, by B) where at most half of A's responses are correct and more than half of B's;
    `lost`: the other way round. `draws` are the bootstrap's differences, for the mean of several sets.
    """
    a, b = ({uid: float(np.mean(v)) for uid, v in verdicts(rows).items()} for rows in (a, b))
    both = [uid for uid in a if uid in b]
    if not both:
        raise UserError("--compare: the two have no problem in common")
    difference = np.array([b[uid] - a[uid] for uid in both])  # (P,)
    draws = difference[rng.integers(0, len(both), (resamples, len(both)))].mean(1)
    return {
        "problems": len(both),
        "only_in_one": len(a) + len(b) - 2 * len(both),
        "a": float(np.mean([a[uid] for uid in both])),
        "b": float(np.mean([b[uid] for uid in both])),
        "difference": float(difference.mean()),
        "interval": np.quantile(draws, [0.025, 0.975]).tolist(),
        "gained": {uid: (a[uid], b[uid]) for uid in both if a[uid] <= 0.5 < b[uid]},
        "lost": {uid: (a[uid], b[uid]) for uid in both if b[uid] <= 0.5 < a[uid]},
        "draws": draws,
    }


def mean_comparison(sets: Sequence[dict]) -> dict:
    """The mean of `compare` over sets, whatever their sizes, and the interval of this mean."""
    draws = np.mean([of["draws"] for of in sets], axis=0)
    means = {key: float(np.mean([of[key] for of in sets])) for key in ("a", "b", "difference")}
    return means | {"interval": np.quantile(draws, [0.025, 0.975]).tolist()}


# ---------------------------------------------------------------- text


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table: its first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first = [line[0].ljust(widths[0]) for line in lines]
    others = [[x.rjust(width) for x, width in zip(line[1:], widths[1:], strict=True)] for line in lines]
    return "\n".join("  ".join([name, *cells]) for name, cells in zip(first, others, strict=True))


def percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f}"


def score_table(scores: dict[str, dict], ks: Sequence[int]) -> str:
    """The paper's table: a line per set, and their mean."""
    lines = [["set", "problems", "samples", "pass@1", "+-", *(f"pass@{k}" for k in ks if k > 1), "tokens", "truncated"]]
    for name, s in scores.items():
        shares = [percent(s["pass@1"]), percent(s["pass@1_se"]), *(percent(s[f"pass@{k}"]) for k in ks if k > 1)]
        tokens = "-" if s["tokens"] is None else f"{s['tokens']:,.0f}"
        counts = [f"{s[key]:,g}" if key in s else "" for key in ("problems", "samples")]
        lines.append([name, *counts, *shares, tokens, percent(s["truncated"])])
    return aligned(lines)


def length_table(lengths: dict[str, dict[int, dict]], k: int) -> str:
    """pass@k of each set at each maximum length."""
    limits = list(next(iter(lengths.values())))
    lines = [[f"pass@{k} by maximum length", *(f"{limit:,}" for limit in limits)]]
    return aligned([*lines, *([name, *(percent(s[f"pass@{k}"]) for s in of.values())] for name, of in lengths.items())])


def comparison_table(sets: dict[str, dict]) -> str:
    """A line per set and their mean; below it the problems that changed sides."""
    lines, below = [["set", "problems", "A", "B", "B - A", "95 % interval"]], []
    for name, of in sets.items():
        low, high = (percent(x, "+") for x in of["interval"])
        shares = [percent(of["a"]), percent(of["b"]), percent(of["difference"], "+"), f"{low} to {high}"]
        lines.append([name, str(of.get("problems", "")), *shares])
        for what, sign in (("gained", "now correct by most responses"), ("lost", "no longer")):
            changed = [f"{uid} ({100 * x:.0f} -> {100 * y:.0f} %)" for uid, (x, y) in of.get(what, {}).items()]
            below += [f"{name}: {sign}: {', '.join(changed)}"] * bool(changed)
        if of.get("only_in_one"):
            below.append(f"{name}: {of['only_in_one']} problems are only in one of them and left out")
    return "\n".join([aligned(lines), *below])
