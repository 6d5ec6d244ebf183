"""Does SERR's ranking know which truncated responses are worth more? Sampled to their end, cut early, ranked, compared.

    python bench/ranking.py --model data/words/model --data data/words/train.jsonl --cut 16 --budget 64
    python bench/ranking.py --model data/tiny/model --data data/tiny/train.jsonl --cut 48 --budget 128 --n 16

A group is the responses to one prompt that are longer than `--cut` tokens: with that budget they would be truncated.
Worth is what becomes of them within `--budget` tokens: "ends" (an end of sequence), "correct" (by our verifier). For
each pair of one group that differs in worth: does the worthier one have the higher ranking reward? 50 % is chance; ties
count half. The interval is of 1,000 bootstrap draws of groups. E_peak and -E_glob alone stand beside the ranking.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import r3
from eval import sample_and_grade
from rollout import Sampler
from runtime import model as lm
from runtime import problems
from sampling.gumbel import derive_seed
from verify import Verifier

Pairs = tuple[float, int]  # (pairs in the right order, a tie counts half; pairs)


def groups(args) -> list[list[dict]]:
    """For each prompt its responses beyond the cut: entropies up to the cut, and whether they end, and are correct."""
    model, tokenizer = lm.load(args.model, "cpu", torch.float32)
    chosen = problems.load(args.data, limit=args.problems)
    prompts = [lm.chat_prompt(tokenizer, p.problem) for p in chosen]
    sampler = Sampler(model, lm.eos_ids(model, tokenizer), 128, max(map(len, prompts)) + args.budget)
    seeds = [derive_seed(args.seed, p.uid) for p in chosen]
    how = {"n": args.n, "max_new_tokens": args.budget, "temperature": 1.0, "seed": seeds}
    decode = functools.partial(lm.decode, tokenizer)
    with Verifier() as verifier, torch.inference_mode():
        graded = sample_and_grade(sampler, verifier, decode, prompts, chosen, **how)
    return [
        [
            {"entropies": s.entropies[: args.cut], "ends": s.finished, "correct": correct}
            for s, correct in group
            if len(s.response_ids) > args.cut
        ]
        for group in graded
    ]


def pairs(scores: list[float], worth: list[bool]) -> Pairs:
    good = [score for score, w in zip(scores, worth, strict=True) if w]
    bad = [score for score, w in zip(scores, worth, strict=True) if not w]
    return sum((a > b) + (a == b) / 2 for a in good for b in bad), len(good) * len(bad)


def share(found: list[Pairs]) -> str:
    """Pairs in the right order in per cent, with a 95 % interval over groups."""
    found = [pair for pair in found if pair[1]]
    if not found:
        return "no pair differs"

    def percent(drawn: list[Pairs]) -> float:
        return 100 * sum(right for right, _ in drawn) / sum(n for _, n in drawn)

    rng = random.Random(0)
    draws = sorted(percent(rng.choices(found, k=len(found))) for _ in range(1000))
    return f"{percent(found):5.1f} % ({draws[24]:.1f} to {draws[974]:.1f}), {sum(n for _, n in found)} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--problems", type=int, default=320)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--cut", type=int, required=True, help="tokens of the budget under which they are truncated")
    parser.add_argument("--budget", type=int, required=True, help="tokens that show what becomes of them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sampled = [group for group in groups(args) if len(group) > 1]
    for worth in ("ends", "correct"):
        found: dict[str, list[Pairs]] = {"ranking reward": [], "E_peak": [], "-E_glob": []}
        for group in sampled:
            peak, glob = zip(*(r3.peak_and_global(a["entropies"], 0.2) for a in group), strict=True)
            scores = (r3.serr(peak, glob, 0.5).tolist(), peak, [-g for g in glob])
            for name, score in zip(found, scores, strict=True):
                found[name].append(pairs(score, [a[worth] for a in group]))
        share_of = sum(a[worth] for g in sampled for a in g) / sum(map(len, sampled))
        print(f"{worth}: {100 * share_of:.1f} % of {sum(map(len, sampled))} responses beyond {args.cut} tokens")
        for name, values in found.items():
            print(f"  {name:15} {share(values)}")


if __name__ == "__main__":
    main()
