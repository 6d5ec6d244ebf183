"""eval.py: pass@1, pass@k, mean tokens and truncated share on a benchmark, with the trainer's sampler and verifier.

    python eval.py --model DIR --data FILE.jsonl --n 16 --k 1 16 --max-new-tokens 32768 --out answers.jsonl

Writes one JSON line an answer to --out (uid, sample, correct, tokens, finished, response) and prints the figures. Until
then answers are kept in FILE.partial as they end, and the same command goes on from there. A truncated answer is wrong.
Left out: majority voting, code execution, several GPUs (start one process a benchmark).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from rollout import Sample, Sampler
from runtime import model as lm
from runtime.errors import UserError, exit_cleanly
from runtime.files import append, json_line, read_jsonl, write_atomically
from runtime.problems import Problem, load
from runtime.ranks import pick_device, pick_dtype
from sampling.gumbel import derive_seed
from verify import Verifier


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of P(one of k samples is right) from c right ones of n: 1 - C(n-c, k) / C(n, k).

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
    **generate,
) -> list[list[tuple[Sample, bool]]]:
    """n responses to each prompt and the verdict on each, graded while the others are still being sampled.

    problems[i] has the reference answer of prompts[i]; `on_finished`, `known` and `generate` are Sampler.generate's. A
    response without an end of sequence is never correct, whatever it boxed on the way (SPEC section 2).
    """
    verdicts = {}

    def grade(i: int, j: int, sample: Sample) -> None:
        if sample.finished:
            verdicts[i, j] = verifier.submit(decode(sample.response_ids), problems[i].answer, problems[i].uid)

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
    prompts: Sequence[list[int]],
    problems: Sequence[Problem],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    on_finished: Callable[[int, int, Sample], None] = lambda *_: None,
    known: Mapping[tuple[int, int], Sample] | None = None,
) -> list[dict]:
    """One record an answer: uid, sample, correct, tokens, finished, response. Seeds depend on the uid alone."""
    graded = sample_and_grade(
        sampler,
        verifier,
        lambda ids: lm.decode(tokenizer, ids),
        prompts,
        problems,
        on_finished,
        known,
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=[derive_seed(seed, "eval", p.uid) for p in problems],
    )
    return [
        {
            "uid": problem.uid,
            "sample": j,
            "correct": correct,
            "tokens": len(sample.response_ids),
            "finished": sample.finished,
            "response": lm.decode(tokenizer, sample.response_ids),
        }
        for problem, group in zip(problems, graded, strict=True)
        for j, (sample, correct) in enumerate(group)
    ]


def summary(answers: Sequence[dict], ks: Sequence[int]) -> dict[str, float]:
    """`eval/pass@K` for each k, `eval/tokens` (mean) and `eval/truncated` (share) of the records of `evaluate`."""
    by_uid = defaultdict(list)
    for answer in answers:
        by_uid[answer["uid"]].append(answer["correct"])
    scores = {
        f"eval/pass@{k}": sum(pass_at_k(len(v), sum(v), k) for v in by_uid.values()) / len(by_uid) for k in ks
    }
    return {
        **scores,
        "eval/tokens": sum(a["tokens"] for a in answers) / len(answers),
        "eval/truncated": sum(not a["finished"] for a in answers) / len(answers),
    }


# ---------------------------------------------------------------- the command line


class Partial:
    """FILE.partial: the settings of an evaluation in its first line, then each answer as it ends.

    `known` has the answers that an interrupted evaluation left there; UserError where it had other settings, or where
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
        write_atomically(self.path, "".join(map(json_line, [settings, *rows])))  # without a line cut short
        for row in rows:
            ids, nothing = (tuple(prompts[row["prompt"]]), tuple(row["ids"])), np.zeros(0, np.float32)
            self.known[row["prompt"], row["sample"]] = Sample(*ids, nothing, nothing, row["finished"])

    def add(self, i: int, j: int, sample: Sample) -> None:
        row = {"prompt": i, "sample": j, "finished": sample.finished, "ids": list(map(int, sample.response_ids))}
        append(self.path, [row])


def checksum(model: torch.nn.Module) -> int:
    """Of all weights: another model gives another number."""
    total = 0
    for p in model.parameters():
        total = zlib.crc32(p.detach().cpu().contiguous().view(torch.uint8).numpy(), total)
    return total


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            raise UserError(f"command line: {message}")

    def positive(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"found {text!r}, allowed: an integer of at least 1")
        return int(text)

    parser = Parser(prog="eval.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a Hugging Face folder or hub name")
    parser.add_argument("--data", required=True, help="problems: JSONL, parquet or a hub data set")
    parser.add_argument("--n", type=positive, default=16, help="samples a problem")
    parser.add_argument("--k", type=positive, nargs="+", help="which pass@k to report (default: 1 and n)")
    parser.add_argument("--max-new-tokens", type=positive, help="default: 32768, or what the model has room for")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--prompt-suffix", default="", help="text added to each problem")
    parser.add_argument("--limit", type=positive, help="only the first so many problems")
    parser.add_argument("--slots", type=positive, default=64, help="responses sampled side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--out", help="a JSONL of every answer; an interrupted command, given again, goes on")
    args = parser.parse_args(argv)
    args.k = args.k or sorted({1, args.n})
    if max(args.k) > args.n:
        raise UserError(f"command line: --k {max(args.k)} needs at least as many samples, found --n {args.n}")
    if not 0 <= args.temperature < math.inf:
        raise UserError(f"command line: --temperature {args.temperature}, allowed: 0 (greedy) or above")
    if not 0 < args.top_p <= 1:
        raise UserError(f"command line: --top-p {args.top_p}, allowed: above 0 and at most 1")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise UserError(f"command line: --out {args.out}: the folder does not exist")
    if args.out and (Path(args.out).is_dir() or not os.access(Path(args.out).absolute().parent, os.W_OK)):
        raise UserError(f"command line: --out {args.out}: it cannot be written, allowed: a file")
    return args


def main(argv: Sequence[str]) -> None:
    args = arguments(argv)
    device = pick_device(args.device)
    problems = load(args.data, limit=args.limit)
    model, tokenizer = lm.load(args.model, device, pick_dtype(args.dtype, device))
    prompts = [lm.chat_prompt(tokenizer, p.problem + args.prompt_suffix) for p in problems]
    longest = max(map(len, prompts))
    room = lm.positions(model) - longest
    if (args.max_new_tokens or 1) > room:
        raise UserError(f"command line: --max-new-tokens {args.max_new_tokens}, allowed: up to {room}, its room")
    max_new_tokens = args.max_new_tokens or min(32768, room)
    sampler = Sampler(model, lm.eos_ids(model, tokenizer), args.slots, longest + max_new_tokens)
    print(sampler.memory(), file=sys.stderr)
    partial = None
    if args.out:
        names = "model", "data", "limit", "prompt_suffix", "n", "temperature", "top_p", "seed", "dtype"
        settings = {name: getattr(args, name) for name in names} | {"max_new_tokens": max_new_tokens}
        settings |= {"weights": checksum(model), "prompts": zlib.crc32(repr(prompts).encode())}
        partial = Partial(args.out, settings, prompts)
    known, total = partial.known if partial else {}, len(problems) * args.n
    if known:
        print(f"{partial.path}: {len(known)} of {total} answers are there already", file=sys.stderr)
    start = time.perf_counter()
    with (
        Verifier() as verifier,
        torch.inference_mode(),
        tqdm(total=total, initial=len(known), unit="answer", desc=Path(args.data).stem, mininterval=0.5) as bar,
    ):

        def finished(i: int, j: int, sample: Sample) -> None:
            bar.update()
            if partial:
                partial.add(i, j, sample)

        answers = evaluate(
            sampler,
            verifier,
            tokenizer,
            prompts,
            problems,
            n=args.n,
            max_new_tokens=max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            on_finished=finished,
            known=known,
        )
    if partial:
        write_atomically(Path(args.out), "".join(map(json_line, answers)))
        partial.path.unlink()
    seconds = time.perf_counter() - start
    tokens = sum(a["tokens"] for a in answers) - sum(len(s.response_ids) for s in known.values())
    print(f"{args.model} on {args.data}: {len(problems)} problems x {args.n}, {tokens / seconds:,.0f} tokens/s")
    for name, value in summary(answers, args.k).items():
        print(f"  {name[5:]:10} {value:8.1f}" if name == "eval/tokens" else f"  {name[5:]:10} {100 * value:8.2f} %")


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
