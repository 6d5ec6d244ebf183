"""prepare.py: public data sets -> data/NAME.jsonl, one {"uid", "problem", "answer"} per line.

    python data/prepare.py --list                               the names it knows
    python data/prepare.py deepscaler aime24 math500            from the hub (needs `pip install datasets`)
    python data/prepare.py deepscaler --drop-overlap            without what overlaps with the benchmarks made before
    python data/prepare.py dapo --from dapo-math-17k.parquet    the same rules on a copy on this disk
    python data/prepare.py --from mine.parquet --out sets       any file that problems.load reads

Rows without a problem or an answer are left out. In training sets, a problem that occurs again with the same answer
is kept once, and one that occurs with different answers is left out. Benchmarks keep every row, since published
figures are means over all of them. The program prints how many rows were left out, the sha256 of the file, and how many
problems of a training set share 13 words in a row with a problem of the benchmarks in the folder.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.config import expand
from runtime.errors import UserError, exit_cleanly, nearest
from runtime.files import checksum, json_line, write_atomically
from runtime.problems import EmptyField, Problem, check_uids, conflicts, hub_rows, listed, load, read, to_problem

WORDS = 13  # of an overlap, as in Brown et al. 2020, appendix C
PHRASE = 10  # words in a row that stand in more problems of a training set are a phrase ("where m and n are ...")


@dataclass(frozen=True)
class Source:
    """Where a set lives on the hub and how to read it."""

    hub: str
    revision: str  # commit of the data set: what the hub had when the pins were taken
    split: str
    problem_field: str = "problem"
    answer_field: str = "answer"
    all_parts: bool = False  # a list of answers is one answer in parts, not a choice
    training: bool = False  # drop repeated and contradictory problems
    size: int | None = None  # problems in the published benchmark; another number is worth a note


SETS = {
    "deepscaler": Source(
        "agentica-org/DeepScaleR-Preview-Dataset", "b6ae8c60f5c1f2b594e2140b91c49c9ad0949e29", "train", training=True
    ),
    "dapo": Source(  # each problem many times
        "BytedTsinghua-SIA/DAPO-Math-17k", "65877096c24ffa7abc4e4fa5edb95cf3413a5674", "train", training=True
    ),
    "aime24": Source("HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "train", size=30),
    "aime25": Source("math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test", size=30),
    "amc23": Source("math-ai/amc23", "80815d37005feb82cd7f8fbc6901d5d3eff43057", "test", "question", size=40),
    "math500": Source("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test", size=500),
    "minerva": Source("math-ai/minervamath", "ee46ddc498933b1977577953250ca5c66be64f96", "test", "question", size=272),
    "olympiadbench": Source(
        "math-ai/olympiadbench",
        "4faaf1e6ec17d11a4218a9bf4c049ecaf954dd84",
        "test",
        "question",
        "final_answer",
        all_parts=True,
        size=674,
    ),
}
LOCAL = Source(hub="", revision="", split="train")


def prepare(name: str, source: Source, file: str | None, out: Path, drop_overlap: bool = False) -> str:
    """Writes `out/name.jsonl` from `file`, else from the hub. Returns the line to print about it."""
    target = out / f"{name}.jsonl"
    if file and target.exists() and Path(file).exists() and target.samefile(file):
        raise UserError(f"{file}: the result would overwrite it, allowed: another folder by --out")
    problems, left_out = collect(name, source, file)
    notes = [f"{count:,} {kind} left out" for kind, count in left_out.items() if count]
    if source.training or drop_overlap and source is LOCAL:
        there = [n for n, s in SETS.items() if s.size and (out / f"{n}.jsonl").exists()]
        found = overlap(problems, {n: load(out / f"{n}.jsonl") for n in there})
        notes += overlap_notes(found, there, drop_overlap)
        problems = [p for p in problems if not (drop_overlap and p.uid in found)]
    if not problems:
        raise UserError(f"{name}: found no usable problem in {file or source.hub}, allowed: at least one")
    rows = ({"uid": p.uid, "problem": p.problem, "answer": p.answer} for p in problems)
    write_atomically(target, "".join(map(json_line, rows)))
    if source.size not in (None, len(problems)):
        notes.append(f"the published set has {source.size:,}: check the source")
    return "; ".join([f"{name}: {len(problems):,} problems -> {target}, sha256 {checksum(target)}", *notes])


def grams(text: str) -> set[tuple[str, ...]]:
    """All runs of 13 words, without case and punctuation; of a shorter text, all of it."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))}


def overlap(problems: list[Problem], benchmarks: dict[str, list[Problem]]) -> dict[str, tuple[str, str]]:
    """uid of a training problem -> (benchmark, uid) of one that it shares 13 words in a row with.

    A run of words that more than 10 training problems have is a phrase and does not count.
    """
    owner = {g: (name, p.uid) for name, of in benchmarks.items() for p in of for g in grams(p.problem)}
    shared = {p.uid: grams(p.problem) & owner.keys() for p in problems}
    times = Counter(g for of in shared.values() for g in of)
    found = {uid: [owner[g] for g in of if times[g] <= PHRASE] for uid, of in shared.items()}
    return {uid: min(of) for uid, of in found.items() if of}


def overlap_notes(found: dict[str, tuple[str, str]], benchmarks: list[str], dropped: bool) -> list[str]:
    """What to say of the overlap."""
    if not benchmarks:
        return ["overlap not checked: no benchmark in the folder, make them first"]
    counts = Counter(name for name, _ in found.values())
    by_set = ", ".join(f"{name} {counts[name]:,}" for name in benchmarks)
    done = "left out" if dropped else "kept (--drop-overlap leaves them out)"
    first = "".join(f": {done}, the first is {uid} with {of[1]}" for uid, of in list(found.items())[:1])
    return [f"{len(found):,} share {WORDS} words in a row with a benchmark ({by_set}){first}"]


def collect(name: str, source: Source, file: str | None) -> tuple[list[Problem], dict[str, int]]:
    """The problems of one set, and how many rows were left out for which reason."""
    if file is not None:
        origin, rows = read(file)
    else:
        origin, rows = source.hub, hub_rows(source.hub, source.split, revision=source.revision)
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
    parser.add_argument("--drop-overlap", action="store_true", help="leave out what overlaps with the benchmarks")
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
    if args.drop_overlap and args.names and not any(SETS[name].training for name in args.names):
        training = ", ".join(name for name, source in SETS.items() if source.training)
        raise UserError(f"command line: --drop-overlap with no training set, allowed: {training}, --from FILE")
    if not (args.names or args.list) and args.file is None:
        raise UserError(f"command line: no data set named, allowed: --list, --from FILE, {', '.join(SETS)}")
    if not args.out.is_dir():
        raise UserError(f"command line: --out {args.out}: no such folder; make it first")
    return args


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    if args.list:
        for name, source in SETS.items():
            print(f"{name:14} {source.hub}, split {source.split}, revision {source.revision}")
    elif args.names:
        for name in sorted(args.names, key=lambda name: SETS[name].training):  # overlap needs the benchmarks
            print(prepare(name, SETS[name], args.file, args.out, args.drop_overlap))
    else:
        print(prepare(Path(args.file).stem, LOCAL, args.file, args.out, args.drop_overlap))


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
