"""Does a run fit its cards, and how long does a step take? The plan of a config, phase by phase, without a card.

    python bench/memory.py --config configs/r3_1.5b.yaml                            # one card of 80 GB
    python bench/memory.py --config configs/r3_7b.yaml --gpus 8 --gb 80 [--json FILE] [--key=value ...]

Memory on the card is what bench/rehearse.py counts while the run's own code makes a step under fake tensors. Three
things are not counted and assumed, OUTSIDE: the CUDA context, NCCL's buffers, cuBLAS's workspace. A tenth of the card
must stay free for fragmentation. Memory of the host is counted in a save; in the load it is computed, for each rank
holds the policy in the files' dtype until it is sharded. Hours come from FLOPs and bytes at the rates that are printed;
nothing here was measured on a card. GB are 10^9 bytes. Exit code 2 where the plan does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent))  # last: bench/verify.py is not verify

from rehearse import Phase, arguments, rehearse, shape_of

import r3
from runtime.checkpoint import FILE_BYTES
from runtime.errors import UserError, exit_cleanly
from runtime.memory import HELPS, MOST, OUTSIDE

GB = 1e9
PROCESS = 4 * GB  # host memory of a rank: Python, torch, CUDA libraries, tokenizer, problems; assumed
STORED = 8  # bytes per token in the sample buffer: id and log-prob
PROBLEMS = 40_315  # of DeepScaleR
COLUMNS = ("weights", "moments", "gradients", "sampler", "reference", "cache")


@dataclass(frozen=True)
class Rates:
    """What is assumed of a card and of the responses."""

    card: str
    flops: float  # per second, bf16, dense
    bandwidth: float  # bytes per second
    link: float  # bytes per second between the cards of one machine
    flops_share: float = 0.35  # that the update reaches
    bandwidth_share: float = 0.6  # that the decode step reaches
    slots_share: float = 0.8  # slots in use, over a step
    response: int = 5000  # tokens, mean
    prompt: int = 200  # tokens, mean


CARDS = {"H100": Rates("H100", 989e12, 3.35e12, 300e9), "A100": Rates("A100", 312e12, 2.04e12, 200e9)}


def numbers(shape) -> tuple[int, int]:
    """Parameters of a model of this shape (Qwen2), and those of them that are multiplied for each token."""
    d, V, D = shape.hidden_size, shape.vocab_size, shape.hidden_size // shape.num_attention_heads
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    block = (heads + shape.num_attention_heads) * D * d + heads * D + 3 * d * shape.intermediate_size + 2 * d
    multiplied = shape.num_hidden_layers * block + V * d
    return multiplied + d + (0 if shape.tie_word_embeddings else V * d), multiplied


def hours(c: r3.Config, shape, gpus: int, slots: int, rates: Rates) -> dict[str, float]:
    """Hours of a step: sampling is bound by bytes, the update by FLOPs and, on several cards, by their link."""
    P, multiplied = numbers(shape)
    width = shape.hidden_size // shape.num_attention_heads * shape.num_attention_heads
    responses = c.batch_size * c.group_size / gpus
    in_use = min(slots, responses) * rates.slots_share
    position = 4 * shape.num_hidden_layers * shape.num_key_value_heads * width // shape.num_attention_heads
    attended = rates.prompt + 0.7 * rates.response  # longer responses are seen more often
    steps = responses * rates.response / in_use
    sampling = steps * (2 * multiplied + in_use * attended * position) / (rates.bandwidth * rates.bandwidth_share)
    tokens = responses * (rates.prompt + rates.response)
    forward = 2 * multiplied + 2 * shape.num_hidden_layers * width * rates.response
    passes = 3 + bool(c.gradient_checkpointing) + (c.beta > 0)  # backward is two
    update = tokens * passes * forward / (rates.flops * rates.flops_share)
    if gpus > 1:
        gathers = 2 * P * (2 + (c.beta > 0)) + 4 * P
        update += tokens / c.token_budget * gathers / rates.link
    return {"sampling": sampling / 3600, "update": update / 3600}


def rows(c: r3.Config, phases: dict[str, Phase], gpus: int) -> list[dict]:
    """A row per phase: GB on the card by what holds them, in all, and GB on the host of a machine with `gpus` ranks."""
    P, _ = numbers(shape_of(c.model))
    buffer = STORED * getattr(c, "buffer_tokens", 4_000_000_000)
    host = {"load": gpus * (PROCESS + 2 * P)}
    host |= dict.fromkeys(phases, gpus * PROCESS + buffer)
    host["save"] += phases["save"].host + (gpus > 1) * 2 * FILE_BYTES  # the main rank; the parts of the others
    found = [{"phase": "load", "host": host["load"] / GB}]
    for name, phase in phases.items():
        held = {key: phase.held.get(key, 0) / GB for key in COLUMNS}
        working = round(phase.card / GB - sum(held.values()), 3) + 0.0  # no -0.0
        row = {"phase": name} | held | {"working": working, "outside": OUTSIDE / GB}
        found.append(row | {"total": (phase.card + OUTSIDE) / GB, "host": host[name] / GB})
    return found


def check(table: list[dict], gb: float) -> None:
    """Raises UserError for the first phase that leaves less than a tenth of the card."""
    for row in table[1:]:
        if row["total"] > MOST * gb:
            raise UserError(
                f"{row['phase']} needs {row['total']:.1f} GB, allowed: {MOST * gb:.1f} of a card of {gb:.0f}; "
                f"what helps: less {HELPS.get(row['phase'], HELPS['update'])}, or more cards"
            )


def report(c: r3.Config, table: list[dict], gpus: int, gb: float, slots: int) -> None:
    print(f"{c.model}, {gpus} x {gb:.0f} GB, {slots} slots, token_budget {c.token_budget}; GB on each card and a host")
    columns = (*COLUMNS, "working", "outside", "total", "host")
    print(f"| phase | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for row in table:
        print(f"| {row['phase']} | {' | '.join(f'{row[key]:.1f}' if key in row else '' for key in columns)} |")


def report_hours(c: r3.Config, gpus: int, slots: int) -> dict:
    found, steps = {}, c.epochs * (PROBLEMS // c.batch_size)
    for name, rates in CARDS.items():
        found[name] = parts = hours(c, shape_of(c.model), gpus, slots, rates)
        total = sum(parts.values())
        print(
            f"{name}: {total:.2f} hours per step (sampling {parts['sampling']:.2f}, update {parts['update']:.2f}), "
            f"{total * steps / 24:.1f} days for {steps} steps, without evaluations"
        )
    r = next(iter(CARDS.values()))
    print(
        f"assumed: responses of {r.response} tokens, prompts of {r.prompt}; {r.slots_share:.0%} of the slots in use; "
        f"{r.bandwidth_share:.0%} of the bandwidth in sampling and {r.flops_share:.0%} of the FLOPs in the update, of "
        + ", ".join(f"{x.card} {x.bandwidth / 1e12:.2f} TB/s {x.flops / 1e12:.0f} TFLOP/s" for x in CARDS.values())
    )
    return found


def main() -> None:
    args, c = arguments(__doc__)
    phases, slots = rehearse(c, args.gpus, args.gb)
    table = rows(c, phases, args.gpus)
    report(c, table, args.gpus, args.gb, slots)
    found = {"config": dataclasses.asdict(c), "gpus": args.gpus, "slots": slots, "phases": table}
    found["hours_per_step"] = report_hours(c, args.gpus, slots)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    check(table, args.gb)


if __name__ == "__main__":
    with exit_cleanly():
        main()
