"""Time and memory of a pass that scores the steps of a response by attention, against the plain scoring pass.

    python bench/attention.py [--tokens 1024 4096] [--rounds 5] [--json FILE]

The embedded model with random ids, one sequence, steps of 16 tokens; both passes alternate, medians of the rounds. The
plain pass gives log-probs and entropies of all tokens; the other one gives the step averages of all layers and heads,
and leaves out the head. Memory: the largest sum of tensors alive in a pass, apart from the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent.parent))

from runtime import model as lm
from runtime.stepattention import BLOCK, score_steps

STEP = 16  # tokens
MODEL = str(Path(__file__).parent.parent / "data/tiny/model")


class Alive(TorchDispatchMode):
    """The bytes of the tensors that operations have made and that are still alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.seen:
                address, size = storage.data_ptr(), storage.nbytes()
                self.seen.add(address)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.free, address, size)
        return out

    def free(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size


def seconds(work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def memory(work) -> float:
    with Alive() as alive:
        work()
    return alive.most / 2**20


@torch.no_grad()
def measure(model, T: int, rounds: int) -> dict:
    ids = torch.randint(3, model.config.vocab_size, (T,), generator=torch.Generator().manual_seed(0)).tolist()

    def plain():
        lm.token_logprobs(model, [(ids[:1], ids[1:])], 1.0)

    def scored():
        score_steps(model, [ids], [range(0, T, STEP)], lambda *_: None)

    times = [(seconds(plain), seconds(scored)) for _ in range(rounds + 1)][1:]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return {"T": T, "plain_s": a, "scored_s": b, "ratio": b / a, "plain_mb": memory(plain), "scored_mb": memory(scored)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, _ = lm.load(MODEL, "cpu", torch.float32)
    print(f"{torch.get_num_threads()} threads, steps of {STEP} tokens, blocks of {BLOCK} queries")
    rows = [measure(model, T, args.rounds) for T in args.tokens]
    for r in rows:
        plain, scored = (f"{r[f'{kind}_s']:.3f} s, {r[f'{kind}_mb']:.1f} MB" for kind in ("plain", "scored"))
        print(f"T {r['T']:6,}   plain {plain}   with step averages {scored}   ratio {r['ratio']:.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
