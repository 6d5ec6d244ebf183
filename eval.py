"""eval.py: pass@1, pass@k, mean tokens and truncated share on benchmarks, with the trainer's sampler and verifier.

    python eval.py --model DIR --data aime24 math500 --n 16 --k 1 16 --max-new-tokens 32768 --out answers/r3
    torchrun --nproc-per-node 8 -- eval.py --model DIR ...              # the ranks share the problems
    python eval.py --responses vllm.jsonl --data aime24                 # sampled by another engine, verified here
    python eval.py --answers answers/r3 --k 1 4 16 --lengths 4096 8192  # tables of answers that are there already
    python eval.py --compare answers/base answers/r3

--out keeps the answers, one file per set (scores/answers.py). An interrupted command, given again, continues; one with
a larger --n samples what is missing. A checkpoint of r3.py gets the prompt that it was trained with (its prompt.json),
unless --prompt-suffix or --system-prompt is given. Left out: majority voting, code execution.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers.utils import cached_file

from rollout import Sample, Sampler
from runtime import model as lm
from runtime.config import bounded, one_of, parse, path
from runtime.errors import UserError, exit_cleanly, nearest
from runtime.problems import Problem, check_uids, load
from runtime.ranks import Ranks, pick_dtype
from sampling.gumbel import derive_seed
from scores import tables
from scores.answers import AnswerFile, read_responses, read_sets, write
from scores.tables import pass_at_k, summary  # noqa: F401  both are used as eval's
from verify import Verifier

PROMPT = ("prompt_suffix", "system_prompt")  # the keys of prompt.json
NO_STATS = np.zeros(0, np.float32)
NOTHING = Sample((), (), NO_STATS, NO_STATS, False)  # in the place of a response that is verified already
MADE = Path(__file__).parent / "data"  # where data/prepare.py writes


def sample_and_grade(
    sampler: Sampler,
    verifier: Verifier,
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[list[int]],
    problems: Sequence[Problem],
    on_finished: Callable[[int, int, Sample], None] = lambda *_: None,
    known: Mapping[tuple[int, int], Sample] | None = None,
    begun: Sequence[Sequence[int]] | None = None,
    **generate,
) -> list[list[tuple[Sample, bool]]]:
    """n responses to each prompt and the verdict on each. Responses are verified while others are being sampled.

    problems[i] has the reference answer of prompts[i]; `on_finished`, `known` and `generate` are Sampler.generate's. A
    response without an end of sequence is never correct, whatever it boxed on the way. Where prompts[i] ends with the
    beginning of a response, begun[i] has these ids; the verdict is on the whole response.
    """
    verdicts = {}

    def grade(i: int, j: int, sample: Sample) -> None:
        if sample.finished:
            response = decode([*begun[i], *sample.response_ids] if begun else sample.response_ids)
            verdicts[i, j] = verifier.submit(response, problems[i].answer, problems[i].uid)

    def finished(i: int, j: int, sample: Sample) -> None:
        on_finished(i, j, sample)
        grade(i, j, sample)

    for (i, j), sample in (known or {}).items():
        grade(i, j, sample)
    try:
        groups = sampler.generate(list(prompts), on_finished=finished, known=known, **generate)
    except torch.OutOfMemoryError as error:
        raise UserError("out of memory while sampling; allowed: fewer slots, or a smaller max_new_tokens") from error
    except RuntimeError as error:
        broken = re.match(r"prompt (\d+), .*not finite", str(error))
        if not broken:
            raise
        uid = problems[int(broken[1])].uid
        raise UserError(f"query {uid!r}: the logits are not finite while sampling; the weights are broken") from error
    return [
        [(sample, (i, j) in verdicts and bool(verdicts[i, j].result())) for j, sample in enumerate(group)]
        for i, group in enumerate(groups)
    ]


def evaluate(
    sampler: Sampler,
    verifier: Verifier,
    tokenizer,
    prompts,
    problems: Sequence[Problem],
    *,
    seed: int,
    done: Mapping[tuple[str, int], dict] | None = None,
    known: Mapping[tuple[int, int], Sample] | None = None,
    **generate,
) -> list[dict]:
    """One row per response: uid, sample, correct, tokens, finished, response.

    generate: n, max_new_tokens, temperature, top_p and on_finished of Sampler.generate. The draws of a response depend
    on the seed, the uid and the number of the sample, not on n or the other problems. done: (uid, sample) -> row that
    is there already; known: samples that are, not verified.
    """
    done, known, index = done or {}, dict(known or {}), {p.uid: i for i, p in enumerate(problems)}
    known |= {(index[uid], j): NOTHING for uid, j in done if uid in index}
    seeds = [derive_seed(seed, "eval", p.uid) for p in problems]
    decode = functools.partial(lm.decode, tokenizer)
    graded = sample_and_grade(sampler, verifier, decode, prompts, problems, seed=seeds, known=known, **generate)

    def row(uid: str, j: int, sample: Sample, correct: bool) -> dict:
        ids = sample.response_ids
        ended = {"tokens": len(ids), "finished": sample.finished, "response": decode(ids)}
        return {"uid": uid, "sample": j, "correct": correct, **ended}

    return [
        done.get((problem.uid, j)) or row(problem.uid, j, sample, correct)
        for problem, group in zip(problems, graded, strict=True)
        for j, (sample, correct) in enumerate(group)
    ]


# ---------------------------------------------------------------- the command line


def checksum(model: torch.nn.Module) -> int:
    """A number that depends on all weights."""
    total = 0
    for p in model.parameters():
        total = zlib.crc32(p.detach().cpu().contiguous().view(torch.uint8).numpy(), total)
    return total


def trained_prompt(model: str) -> dict[str, str]:
    """prompt_suffix and system_prompt that a checkpoint of r3.py was trained with; empty ones for any other model."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    file, found = cached_file(model, "prompt.json", **quiet), {}
    with contextlib.suppress(ValueError):
        found = json.loads(Path(file).read_bytes()) if file else {"prompt_suffix": "", "system_prompt": ""}
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in PROMPT):
        raise UserError(f"{file}: not what a checkpoint holds, allowed: an object with the texts {', '.join(PROMPT)}")
    return {key: found[key] for key in PROMPT}


@dataclass(frozen=True)
class Options:
    """The command line."""

    # what is evaluated
    model: str = path("")  # a Hugging Face folder or hub name
    data: list[str] | None = path(None)  # sets: names that data/prepare.py has made, JSONL, JSON, parquet, hub names
    split: str = "test"  # of a hub data set
    limit: int | None = bounded(None, low=1)  # only the first so many problems of each set
    problem_field: str = "problem"  # name of the field, or a dotted path into the row
    answer_field: str = "answer"  # the same, of the reference answer
    uid_field: str = "uid"  # the same, of the name of the problem
    hard_from: list[str] | None = path(None)  # answers of another model: only the problems that it hardly solves ...
    hard_max: int = bounded(1, low=0)  # ... at most so many times
    prompt_suffix: str | None = None  # text behind each problem; none: what the checkpoint was trained with, or nothing
    system_prompt: str | None = None  # none: what the checkpoint was trained with, or nothing

    # instead of sampling
    responses: str | None = path(None)  # JSONL of another engine: uid, response or list of them, finished, tokens
    answers: list[str] | None = path(None)  # what --out wrote, files or folders: print their tables
    compare: list[str] | None = path(None)  # two of these: difference by set, and the problems that changed sides

    # sampling
    n: int = bounded(16, low=1)  # samples per problem
    max_new_tokens: int | None = bounded(None, low=1)  # none: 32768, or what the model has room for
    temperature: float = bounded(0.6, low=1e-6, high=10**6, also=0)  # 0: greedy; what fp32 logits can be divided by
    top_p: float = bounded(0.95, low=1e-6, high=1)  # nucleus
    seed: int = bounded(0, low=0)  # of all draws
    slots: int = bounded(64, low=1)  # responses sampled at the same time
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = one_of("auto", "float32", "bfloat16")  # of the weights
    trust_remote_code: bool = False  # run code that the model brings
    out: str | None = path(None)  # answers: FILE.jsonl for one set, or a folder, which gets one per set

    # tables
    k: list[int] | None = bounded(None, low=1)  # which pass@k to report; none: 1 and n
    lengths: list[int] | None = bounded(None, low=1)  # pass@k also for these maximum lengths, from the same answers
    json: bool = False  # print one JSON object

    def __post_init__(self):
        modes = [key for key in ("responses", "answers", "compare") if getattr(self, key)]
        if len(modes) > 1:
            raise UserError(f"command line: --{modes[0]} with --{modes[1]}, allowed: one of them")
        needed = {"responses": ["data"], "answers": [], "compare": []}[modes[0]] if modes else ["model", "data"]
        for key in needed:
            if not getattr(self, key):
                raise UserError(f"command line: --{key} is missing or empty, allowed: --{key}=NAME")
        if self.compare and len(self.compare) != 2:
            raise UserError(f"command line: --compare needs two files or folders, found {len(self.compare)}")
        if not modes and max(self.k or [1]) > self.n:
            raise UserError(f"command line: --k {max(self.k)} needs at least as many samples, found --n {self.n}")
        if self.out is not None:
            out = Path(self.out).absolute()
            there = next(p for p in (out, *out.parents) if p.exists())  # a folder for several sets is made
            if self.out.endswith(".jsonl") and not out.parent.is_dir():
                raise UserError(f"command line: --out {self.out}: the folder does not exist")
            if not self.out or out.exists() and out.is_dir() == self.out.endswith(".jsonl"):
                allowed = "a file, FILE.jsonl, or a folder"
                raise UserError(f"command line: --out {self.out}: it cannot be written, allowed: {allowed}")
            if not os.access(there, os.W_OK):
                raise UserError(f"command line: --out {self.out}: it cannot be written")

    def file_of(self, name: str) -> Path | None:
        """Where the answers of a set go."""
        if self.out is None:
            return None
        return Path(self.out) if self.out.endswith(".jsonl") else Path(self.out) / f"{name}.jsonl"


def find(name: str) -> str:
    """A name that data/prepare.py has made -> its file; whatever else stays as it is."""
    if Path(name).exists() or Path(name).name != name or Path(name).suffix:
        return name
    made = sorted(file.stem for file in MADE.glob("*.jsonl"))
    if name not in made:
        allowed = f"a file, owner/name, or what data/prepare.py has made: {', '.join(made) or 'nothing yet'}"
        raise UserError(f"data: no file or set {name!r}{nearest(name, made)}; allowed: {allowed}")
    return str(MADE / f"{name}.jsonl")


def load_sets(c: Options) -> dict[str, list[Problem]]:
    """Set name -> its problems; with --hard-from, only the hard ones."""
    fields = {key: getattr(c, key) for key in ("split", "limit", "problem_field", "answer_field", "uid_field")}
    sets: dict[str, list[Problem]] = {}
    for source in map(find, c.data):
        name = Path(source).stem
        if name in sets:
            raise UserError(f"command line: --data has two sets of the name {name}, allowed: one; rename the file")
        sets[name] = load(source, **fields)
    check_uids(problem for problems in sets.values() for problem in problems)
    if len(sets) > 1 and (c.out or "").endswith(".jsonl"):
        raise UserError(f"command line: --out {c.out} is one file for {len(sets)} sets, allowed: a folder")
    return hard_subset(c, sets, lambda problem: problem.uid)


def hard_subset(c: Options, sets: dict[str, list], uid_of: Callable) -> dict[str, list]:
    """The problems, or rows, of each set that the answers of --hard-from solve at most --hard-max times."""
    if not c.hard_from:
        return sets
    answers = [row for source in c.hard_from for rows in read_sets(source).values() for row in rows]
    seen, hard = {row["uid"] for row in answers}, tables.hard(answers, c.hard_max)
    for name, items in sets.items():
        if unknown := [uid for uid in dict.fromkeys(map(uid_of, items)) if uid not in seen]:
            raise UserError(f"--hard-from: no answers to {len(unknown)} problems of {name}, {unknown[0]!r} among them")
        if not any(uid_of(x) in hard for x in items):
            raise UserError(f"--hard-from: all problems of {name} are solved more often, allowed: a larger --hard-max")
    return {name: [x for x in items if uid_of(x) in hard] for name, items in sets.items()}


def sampled(c: Options) -> dict[str, list[dict]]:
    """The rows of each set, on every rank, sampled by the model or found in --out."""
    sets, ranks = load_sets(c), Ranks.start(c.device)
    dtype = pick_dtype(c.dtype, ranks.device)
    model, tokenizer = lm.load(c.model, ranks.device, dtype, c.trust_remote_code)
    given = {key: getattr(c, key) for key in PROMPT if getattr(c, key) is not None}
    prompt = trained_prompt(c.model) | given
    suffix, system = (prompt[key] for key in PROMPT)
    prompts = {name: [lm.chat_prompt(tokenizer, p.problem + suffix, system) for p in sets[name]] for name in sets}
    budgets = {name: token_budget(c, model, prompts[name]) for name in sets}
    max_len = max(max(map(len, prompts[name])) + budgets[name] for name in sets)
    sampler = Sampler(model, lm.eos_ids(model, tokenizer), c.slots, max_len)
    settings = {"model": c.model, "limit": c.limit, "weights": checksum(model), "dtype": str(dtype), **prompt}
    settings |= {key: getattr(c, key) for key in ("temperature", "top_p", "seed")}
    files = {}
    for name, problems in sets.items():
        content = repr([(p.uid, p.answer, ids) for p, ids in zip(problems, prompts[name], strict=True)])
        own = {"data": name, "problems": zlib.crc32(content.encode()), "max_new_tokens": budgets[name]}
        files[name] = AnswerFile(c.file_of(name), settings | own, ranks.rank)
    if c.out and not c.out.endswith(".jsonl"):
        Path(c.out).mkdir(parents=True, exist_ok=True)
    ranks.barrier()  # all have read what any of them writes to from now on
    if ranks.main:
        first = next(iter(prompts.values()))[0]
        said = f"prompt_suffix = {suffix!r}, system_prompt = {system!r}, first prompt: {tokenizer.decode(first)!r}"
        print(sampler.memory(), said, sep="\n", file=sys.stderr)
    how = {"n": c.n, "temperature": c.temperature, "top_p": c.top_p, "seed": c.seed}
    found, start = {}, time.perf_counter()
    with Verifier() as verifier, torch.inference_mode():
        for name, problems in sets.items():
            parts = (sampler, verifier, tokenizer, prompts[name], problems, files[name], name, ranks)
            found[name] = sampled_set(*parts, max_new_tokens=budgets[name], **how)
    if ranks.main:
        print(f"{sampler.tokens / (time.perf_counter() - start):,.0f} tokens/s", file=sys.stderr)
    ranks.stop()
    return found if ranks.main else {}


def token_budget(c: Options, model, prompts: Sequence[list[int]]) -> int:
    """max_new_tokens of a set. UserError where the model has no room for it behind the longest prompt."""
    positions, longest = lm.positions(model), max(map(len, prompts))
    room = positions - longest
    budget = c.max_new_tokens or min(32768, max(1, room))
    if budget > room:
        taken = f"the model has {positions} positions and the longest prompt takes {longest}"
        raise UserError(f"max_new_tokens = {budget}, allowed: up to {room}, for {taken}")
    return budget


def sampled_set(sampler, verifier, tokenizer, prompts, problems, file: AnswerFile, name, ranks, **how) -> list[dict]:
    """The rows of one set, of all ranks, in the order of the problems; the first rank has a bar and writes the file."""
    mine, n, place = slice(ranks.rank, None, ranks.size), how["n"], {p.uid: i for i, p in enumerate(problems)}
    my_prompts, my_problems = prompts[mine], problems[mine]
    index, known = {p.uid: i for i, p in enumerate(my_problems)}, {}
    done = {(uid, j): row for (uid, j), row in file.done.items() if uid in index and j < n}
    for (uid, j), row in file.begun.items():
        if uid in index and j < n and (uid, j) not in done:
            ids = tuple(my_prompts[index[uid]]), tuple(row["ids"])
            known[index[uid], j] = Sample(*ids, NO_STATS, NO_STATS, row["finished"])
    there, total = len(done) + len(known), n * len(my_problems)
    if there and ranks.main:
        print(f"{file.path}: {there} of {total} responses are there already", file=sys.stderr)
    shown = {"disable": not ranks.main, "unit": "response", "desc": name, "mininterval": 0.5}
    with tqdm(total=total, initial=there, **shown) as bar:

        def finished(i: int, j: int, sample: Sample) -> None:
            bar.update()
            file.add(my_problems[i].uid, j, sample.response_ids, sample.finished)

        how |= {"done": done, "known": known, "on_finished": finished}
        rows = ranks.gather(evaluate(sampler, verifier, tokenizer, my_prompts, my_problems, **how))
    rows.sort(key=lambda row: (place[row["uid"]], row["sample"]))
    if ranks.main:
        file.complete(rows)
    return rows


def verified(c: Options) -> dict[str, list[dict]]:
    """The rows of each set, from the responses of another engine."""
    sets = load_sets(c)
    problems = {p.uid: p for of in sets.values() for p in of}
    rows = read_responses(c.responses, problems)
    settings = {name: {"responses": c.responses, "data": name} for name in sets}
    for name in sets:
        AnswerFile(c.file_of(name), settings[name])  # refuses a file of other answers
    with Verifier() as verifier:
        futures = [verifier.submit(r["response"], problems[r["uid"]].answer, r["uid"]) for r in rows]
        rows = [r | {"correct": r["finished"] and f.result()} for r, f in zip(rows, futures, strict=True)]
    found = {name: [r for r in rows if r["uid"] in {p.uid for p in of}] for name, of in sets.items()}
    for name in sets:
        if file := c.file_of(name):
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, settings[name], found[name])
    return found


def from_files(c: Options) -> dict[str, list[dict]]:
    """The rows of each set that --answers names."""
    sets: dict[str, list[dict]] = {}
    for source in c.answers:
        for name, rows in read_sets(source).items():
            if name in sets:
                raise UserError(f"command line: --answers has the set {name} twice, allowed: once, or --compare")
            sets[name] = rows
    return hard_subset(c, sets, lambda row: row["uid"])


def report(c: Options, sets: dict[str, list[dict]]) -> None:
    """Prints the paper's table, and for --lengths pass@k at each of them."""
    fewest = min(len(v) for rows in sets.values() for v in tables.verdicts(rows).values())
    ks = c.k or sorted({1, fewest})
    scores = {name: tables.score(rows, ks) for name, rows in sets.items()}
    lengths = {
        name: {limit: tables.score(tables.cut(rows, limit), ks) for limit in c.lengths or ()}
        for name, rows in sets.items()
    }
    if len(sets) > 1:
        scores["mean"] = tables.mean_of_sets(list(scores.values()))
        lengths["mean"] = {i: tables.mean_of_sets([of[i] for of in lengths.values()]) for i in c.lengths or ()}
    if c.json:
        print(json.dumps({"sets": scores, "lengths": lengths} if c.lengths else {"sets": scores}, indent=1))
        return
    print(tables.score_table(scores, ks))
    for k in ks if c.lengths else ():
        print("", tables.length_table(lengths, k), sep="\n")


def report_comparison(c: Options) -> None:
    """Prints how the second of --compare differs from the first, by set."""
    a, b = map(read_sets, c.compare)
    if len(a) == len(b) == 1:  # two files are compared whatever their names
        b = dict(zip(a, b.values(), strict=True))
    if not (names := [name for name in a if name in b]):
        raise UserError(f"--compare: no set in common, found {', '.join(a)} and {', '.join(b)}")
    rng = np.random.default_rng(c.seed)  # one for all sets: their draws are independent
    sets = {name: tables.compare(a[name], b[name], rng) for name in names}
    if len(sets) > 1:
        sets["mean"] = tables.mean_comparison(list(sets.values()))
    if c.json:
        print(json.dumps({name: {k: v for k, v in of.items() if k != "draws"} for name, of in sets.items()}, indent=1))
    else:
        print(tables.comparison_table(sets))


def main(argv: Sequence[str]) -> None:
    c = parse(Options, argv)
    if c.compare:
        report_comparison(c)
        return
    sets = from_files(c) if c.answers else verified(c) if c.responses else sampled(c)
    if sets:  # all ranks sample, the first one reports
        report(c, sets)


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
