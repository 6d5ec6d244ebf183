"""eval.py: pass@1, pass@k, mean tokens and truncated share on a benchmark, with the trainer's sampler and verifier.

    python eval.py --model DIR --data FILE.jsonl --n 16 --k 1 16 --max-new-tokens 32768 --out answers.jsonl

Prints the figures, and writes one JSON line per response to --out (uid, sample, correct, tokens, finished, response).
Until all are there, FILE.partial keeps them, and the same command continues. A checkpoint of r3.py gets the prompt that
it was trained with (its prompt.json), unless --prompt-suffix or --system-prompt is given.
Left out: majority voting, code execution, several GPUs (start one process per benchmark).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
import zlib
from collections import defaultdict
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
from runtime.errors import UserError, exit_cleanly
from runtime.files import append, json_line, read_jsonl, write_atomically
from runtime.problems import Problem, load
from runtime.ranks import pick_device, pick_dtype
from sampling.gumbel import derive_seed
from verify import Verifier

PROMPT = ("prompt_suffix", "system_prompt")  # the keys of prompt.json


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of P(one of k samples is correct) from c correct ones of n: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, equation 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, found n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


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
    sampler: Sampler, verifier: Verifier, tokenizer, prompts, problems: Sequence[Problem], *, seed: int, **generate
) -> list[dict]:
    """One record per response: uid, sample, correct, tokens, finished, response.

    generate: n, max_new_tokens, temperature, top_p, on_finished and known of Sampler.generate. The draws of a problem
    depend on the seed and its uid, not on the other problems.
    """
    seeds = [derive_seed(seed, "eval", p.uid) for p in problems]
    decode = functools.partial(lm.decode, tokenizer)
    graded = sample_and_grade(sampler, verifier, decode, prompts, problems, seed=seeds, **generate)
    return [
        {
            "uid": problem.uid,
            "sample": j,
            "correct": correct,
            "tokens": len(sample.response_ids),
            "finished": sample.finished,
            "response": decode(sample.response_ids),
        }
        for problem, group in zip(problems, graded, strict=True)
        for j, (sample, correct) in enumerate(group)
    ]


def summary(responses: Sequence[dict], ks: Sequence[int]) -> dict[str, float]:
    """Records of `evaluate` -> `eval/pass@K` for each k, `eval/tokens` (mean) and `eval/truncated` (share)."""
    by_uid = defaultdict(list)
    for response in responses:
        by_uid[response["uid"]].append(response["correct"])
    scores = {
        f"eval/pass@{k}": sum(pass_at_k(len(v), sum(v), k) for v in by_uid.values()) / len(by_uid) for k in ks
    }
    return {
        **scores,
        "eval/tokens": sum(r["tokens"] for r in responses) / len(responses),
        "eval/truncated": sum(not r["finished"] for r in responses) / len(responses),
    }


# ---------------------------------------------------------------- the command line


class Partial:
    """FILE.partial: the settings of an evaluation in its first line, then each response as it ends.

    `known` has the responses that an interrupted evaluation left there. UserError where it had other settings, or where
    the file is something else.
    """

    def __init__(self, out: str, settings: dict, prompts: Sequence[list[int]]):
        self.path, self.known = Path(f"{out}.partial"), {}
        lines = read_jsonl(self.path) if self.path.is_file() else []
        ours = lines and all(isinstance(line, dict) for line in lines) and all("ids" in line for line in lines[1:])
        if self.path.exists() and not ours:
            raise UserError(f"{self.path}: not what an interrupted evaluation leaves; allowed: another --out")
        before, *rows = lines or [settings]
        if other := sorted(k for k in before | settings if before.get(k) != settings.get(k)):
            found = ", ".join(f"{k} {before.get(k)!r} and not {settings.get(k)!r}" for k in other)
            raise UserError(f"{self.path}: left by a command with {found}; allowed: that one, another --out, no file")
        write_atomically(self.path, "".join(map(json_line, [settings, *rows])))  # less a last line that was cut short
        for row in rows:
            ids, nothing = (tuple(prompts[row["prompt"]]), tuple(row["ids"])), np.zeros(0, np.float32)
            self.known[row["prompt"], row["sample"]] = Sample(*ids, nothing, nothing, row["finished"])

    def add(self, i: int, j: int, sample: Sample) -> None:
        row = {"prompt": i, "sample": j, "finished": sample.finished, "ids": list(map(int, sample.response_ids))}
        append(self.path, [row])


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
    data: str = path("")  # JSONL, JSON, parquet or hub name
    split: str = "test"  # of a hub data set
    limit: int | None = bounded(None, low=1)  # only the first so many problems
    problem_field: str = "problem"  # name of the field, or a dotted path into the row
    answer_field: str = "answer"  # the same, of the reference answer
    uid_field: str = "uid"  # the same, of the name of the problem
    prompt_suffix: str | None = None  # text behind each problem; none: what the checkpoint was trained with, or nothing
    system_prompt: str | None = None  # none: what the checkpoint was trained with, or nothing

    # how
    n: int = bounded(16, low=1)  # samples per problem
    k: list[int] | None = bounded(None, low=1)  # which pass@k to report; none: 1 and n
    max_new_tokens: int | None = bounded(None, low=1)  # none: 32768, or what the model has room for
    temperature: float = bounded(0.6, low=1e-6, high=10**6, also=0)  # 0: greedy; what fp32 logits can be divided by
    top_p: float = bounded(0.95, low=1e-6, high=1)  # nucleus
    seed: int = bounded(0, low=0)  # of all draws
    slots: int = bounded(64, low=1)  # responses sampled at the same time
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = one_of("auto", "float32", "bfloat16")  # of the weights
    trust_remote_code: bool = False  # run code that the model brings
    out: str | None = path(None)  # JSONL of every response; an interrupted command, given again, continues

    def __post_init__(self):
        for key in ("model", "data"):
            if not getattr(self, key):
                raise UserError(f"command line: --{key} is missing or empty, allowed: --{key}=NAME")
        if max(self.ks) > self.n:
            raise UserError(f"command line: --k {max(self.ks)} needs at least as many samples, found --n {self.n}")
        out = Path(self.out or "").absolute()
        if not out.parent.is_dir():
            raise UserError(f"command line: --out {self.out}: the folder does not exist")
        if self.out is not None and (out.is_dir() or not os.access(out.parent, os.W_OK)):
            raise UserError(f"command line: --out {self.out}: it cannot be written, allowed: a file")

    @property
    def ks(self) -> list[int]:
        return self.k or sorted({1, self.n})


def main(argv: Sequence[str]) -> None:
    c = parse(Options, argv)
    device = pick_device(c.device)
    fields = {key: getattr(c, key) for key in ("split", "limit", "problem_field", "answer_field", "uid_field")}
    problems = load(c.data, **fields)
    model, tokenizer = lm.load(c.model, device, pick_dtype(c.dtype, device), c.trust_remote_code)
    given = {key: getattr(c, key) for key in PROMPT if getattr(c, key) is not None}
    suffix, system = (trained_prompt(c.model) | given).values()
    prompts = [lm.chat_prompt(tokenizer, p.problem + suffix, system) for p in problems]
    longest = max(map(len, prompts))
    room = lm.positions(model) - longest
    max_new_tokens = c.max_new_tokens or min(32768, max(1, room))
    if max_new_tokens > room:
        taken = f"the model has {room + longest} positions and the longest prompt takes {longest}"
        raise UserError(f"max_new_tokens = {max_new_tokens}, allowed: up to {room}, for {taken}")
    sampler = Sampler(model, lm.eos_ids(model, tokenizer), c.slots, longest + max_new_tokens)
    prompt = f"prompt_suffix = {suffix!r}, system_prompt = {system!r}, first prompt: {tokenizer.decode(prompts[0])!r}"
    print(sampler.memory(), prompt, sep="\n", file=sys.stderr)
    partial = None
    if c.out:
        free = ("k", "slots", "device", "trust_remote_code", "out")  # what the responses do not depend on
        settings = {key: value for key, value in dataclasses.asdict(c).items() if key not in free}
        settings |= {"prompt_suffix": suffix, "system_prompt": system, "max_new_tokens": max_new_tokens}
        settings |= {"weights": checksum(model), "prompts": zlib.crc32(repr(prompts).encode())}
        partial = Partial(c.out, settings, prompts)
    known, total = partial.known if partial else {}, len(problems) * c.n
    if known:
        print(f"{partial.path}: {len(known)} of {total} responses are there already", file=sys.stderr)
    start = time.perf_counter()
    with (
        Verifier() as verifier,
        torch.inference_mode(),
        tqdm(total=total, initial=len(known), unit="response", desc=Path(c.data).stem, mininterval=0.5) as bar,
    ):

        def finished(i: int, j: int, sample: Sample) -> None:
            bar.update()
            if partial:
                partial.add(i, j, sample)

        how = {"n": c.n, "temperature": c.temperature, "top_p": c.top_p, "seed": c.seed}
        how |= {"max_new_tokens": max_new_tokens, "on_finished": finished, "known": known}
        responses = evaluate(sampler, verifier, tokenizer, prompts, problems, **how)
    if partial:
        write_atomically(Path(c.out), "".join(map(json_line, responses)))
        partial.path.unlink()
    seconds = time.perf_counter() - start
    tokens = sum(r["tokens"] for r in responses) - sum(len(s.response_ids) for s in known.values())
    print(f"{c.model} on {c.data}: {len(problems)} problems x {c.n}, {tokens / seconds:,.0f} tokens/s")
    for name, value in summary(responses, c.ks).items():
        print(f"  {name[5:]:10} {value:8.1f}" if name == "eval/tokens" else f"  {name[5:]:10} {100 * value:8.2f} %")


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
