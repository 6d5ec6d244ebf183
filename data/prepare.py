"""prepare.py: public data sets -> data/NAME.jsonl, one {"uid", "problem", "answer"} per line.

    python data/prepare.py --list                               the names it knows
    python data/prepare.py deepscaler aime24 math500            from the hub (needs `pip install datasets`)
    python data/prepare.py dapo --from dapo-math-17k.parquet    the same rules on a copy on this disk
    python data/prepare.py --from mine.parquet --out sets       any file that problems.load reads

Rows without a problem or an answer are left out. In training sets, a problem that occurs again with the same answer
is kept once, and one that occurs with different answers is left out. Benchmarks keep every row, since published
figures are means over all of them. The program prints how many rows were left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.config import expand
from runtime.errors import UserError, exit_cleanly, nearest
from runtime.files import json_line, write_atomically
from runtime.problems import EmptyField, Problem, check_uids, conflicts, hub_rows, listed, read, to_problem


@dataclass(frozen=True)
class Source:
    """Where a set lives on the hub and how to read it."""

    hub: str
    split: str
    problem_field: str = "problem"
    answer_field: str = "answer"
    all_parts: bool = False  # a list of answers is one answer in parts, not a choice
    training: bool = False  # drop repeated and contradictory problems
    size: int | None = None  # problems in the published benchmark; another number is worth a note


SETS = {
    "deepscaler": Source("agentica-org/DeepScaleR-Preview-Dataset", "train", training=True),
    "dapo": Source("BytedTsinghua-SIA/DAPO-Math-17k", "train", training=True),  # each problem many times
    "aime24": Source("HuggingFaceH4/aime_2024", "train", size=30),
    "aime25": Source("math-ai/aime25", "test", size=30),
    "amc23": Source("math-ai/amc23", "test", "question", size=40),
    "math500": Source("HuggingFaceH4/MATH-500", "test", size=500),
    "minerva": Source("math-ai/minervamath", "test", "question", size=272),
    "olympiadbench": Source("math-ai/olympiadbench", "test", "question", "final_answer", True, size=674),
}
LOCAL = Source(hub="", split="train")


def prepare(name: str, source: Source, file: str | None, out: Path) -> str:
    """Writes `out/name.jsonl` from `file`, else from the hub. Returns the line to print about it."""
    target = out / f"{name}.jsonl"
    if file and target.exists() and Path(file).exists() and target.samefile(file):
        raise UserError(f"{file}: the result would overwrite it, allowed: another folder by --out")
    problems, left_out = collect(name, source, file)
    if not problems:
        raise UserError(f"{name}: found no usable problem in {file or source.hub}, allowed: at least one")
    rows = ({"uid": p.uid, "problem": p.problem, "answer": p.answer} for p in problems)
    write_atomically(target, "".join(map(json_line, rows)))
    notes = [f"{count:,} {kind} left out" for kind, count in left_out.items() if count]
    if source.size not in (None, len(problems)):
        notes.append(f"the published set has {source.size:,}: check the source")
    return "; ".join([f"{name}: {len(problems):,} problems -> {target}", *notes])


def collect(name: str, source: Source, file: str | None) -> tuple[list[Problem], dict[str, int]]:
    """The problems of one set, and how many rows were left out for which reason."""
    origin, rows = read(file) if file is not None else (source.hub, hub_rows(source.hub, source.split))
    kept: dict[tuple, Problem] = {}  # what makes a problem the same one -> its first row
    left_out = {"empty": 0, "repeated": 0, "contradictory": 0}
    for number, (line, row) in enumerate(rows):
        uid = f"{name}-{number}"
        try:
            problem = to_problem(row, f"{origin}:{line}", uid, source.problem_field, source.answer_field)
        except EmptyField:
            left_out["empty"] += 1
            continue
        if source.all_parts and isinstance(problem.answer, list):
            problem = replace(problem, answer=", ".join(problem.answer))
        key = (problem.problem, *listed(problem.answer)) if source.training else (number,)
        left_out["repeated"] += key in kept
        kept.setdefault(key, problem)
    problems = list(kept.values())
    if source.training:
        contradictory = {problem.uid for group in conflicts(problems) for problem in group}
        left_out["contradictory"] = len(contradictory)
        problems = [problem for problem in problems if problem.uid not in contradictory]
    check_uids(problems)
    return problems, left_out


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"command line: {message}")

    parser = Parser(prog="prepare.py", description="Public data sets -> JSONL.", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a set of --list")
    parser.add_argument("--list", action="store_true", help="print the names and where the sets come from")
    parser.add_argument("--from", dest="file", metavar="FILE", help="read this file instead of the hub")
    here = Path(__file__).parent
    parser.add_argument("--out", default=str(here), metavar="DIR", help="folder for the result (data/)")
    args = parser.parse_args(argv)
    args.file = args.file and expand(args.file, "command line: --from")
    args.out = Path(expand(args.out, "command line: --out"))
    for name in args.names:
        if name not in SETS:
            raise UserError(f"no data set {name!r}{nearest(name, SETS)}; allowed: {', '.join(SETS)}")
    if args.file and len(args.names) > 1:
        raise UserError(f"command line: --from is one set, found {len(args.names)} names; give at most one")
    if not (args.names or args.list) and args.file is None:
        raise UserError(f"command line: no data set named, allowed: --list, --from FILE, {', '.join(SETS)}")
    if not args.out.is_dir():
        raise UserError(f"command line: --out {args.out}: no such folder; make it first")
    return args


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    if args.list:
        for name, source in SETS.items():
            print(f"{name:14} {source.hub}, split {source.split}")
    elif args.names:
        for name in args.names:
            print(prepare(name, SETS[name], args.file, args.out))
    else:
        print(prepare(Path(args.file).stem, LOCAL, args.file, args.out))


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
