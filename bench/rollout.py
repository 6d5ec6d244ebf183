"""Useful tokens a second of rollout.Sampler, and of transformers' `generate` and `generate_batch` on the same work.

    python bench/rollout.py                                        # the embedded model: 32 prompts x 8, 64 rows
    python bench/rollout.py --sweep                                # ours alone, 16 to 512 slots
    python bench/rollout.py --grow                                 # ours alone, twice the prompts: twice the seconds?
    python bench/rollout.py --model PATH --data FILE --prompts 6 --slots 16 --max-new-tokens 128
    python bench/rollout.py --device cuda                          # 1.5 B shape, 256 slots, with and without graphs

Useful are the tokens of the responses up to their EOS, drawn at temperature 1 without top_k or top_p. The contenders
take turns, and the median of `--repeats` rounds counts. `generate` gets batches of `--slots` rows by prompt length,
`generate_batch` as many requests at a time and the fastest of a few cache layouts, found before the clock runs.
Ours alone also records log-prob and entropy of each token. Peak memory is the process's, above what it held before.

On CUDA one prompt of 1,024 tokens is sampled 256 times (1,024 tokens, no EOS), so that prefill does not count, and
the roofline is bytes of weights and cache that a step must read over the bandwidth of a device-to-device copy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

sys.path.insert(0, str(Path(__file__).parent.parent))

from rollout import Sampler
from runtime import model as lm
from runtime import problems

Run = Callable[[int], tuple[int, float]]  # seed -> (useful tokens, share of row-steps that were useful, or nan)

BATCH_LAYOUTS = [  # sharing prompt blocks, and fewer tokens a batch, were slower in every pairing with these
    {"page_size": page, "max_batch_tokens": 512, "allow_block_sharing": False}
    for page in (32, 256)
]


# ---- contenders on the CPU


def ours(model, eos: set[int], prompts, args) -> Run:
    sampler = Sampler(model, eos, args.slots, max(map(len, prompts)) + args.max_new_tokens)

    def run(seed: int):
        tokens, rows = sampler.tokens, sampler.slot_steps
        sampler.generate(prompts, n=args.n, max_new_tokens=args.max_new_tokens, seed=seed)
        return sampler.tokens - tokens, (sampler.tokens - tokens) / (sampler.slot_steps - rows)

    return run


def generation_config(eos: set[int], args) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=args.max_new_tokens,
        eos_token_id=sorted(eos),
        pad_token_id=min(eos),
    )


def useful_length(response: list[int], eos: set[int]) -> int:
    ends = [i for i, token in enumerate(response) if token in eos]
    return ends[0] + 1 if ends else len(response)


def generate(model, eos: set[int], prompts, args) -> Run:
    rows = sorted((prompt for prompt in prompts for _ in range(args.n)), key=len)
    batches = [rows[i : i + args.slots] for i in range(0, len(rows), args.slots)]
    config = generation_config(eos, args)

    def run(seed: int):
        torch.manual_seed(seed)
        useful = computed = 0
        for batch in batches:
            width = max(map(len, batch))
            ids = torch.tensor([[min(eos)] * (width - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:]
            useful += sum(useful_length(row, eos) for row in out.tolist())
            computed += out.numel()
        return useful, useful / computed

    return run


def generate_batch(model, eos: set[int], prompts, args, layout: dict) -> Run:
    from transformers import ContinuousBatchingConfig

    rows = [prompt for prompt in prompts for _ in range(args.n)]
    longest = max(map(len, rows)) + args.max_new_tokens
    blocks = args.slots * (longest // layout["page_size"] + 2)
    batching = ContinuousBatchingConfig(num_blocks=blocks, max_requests_per_batch=args.slots, **layout)

    def run(seed: int):
        torch.manual_seed(seed)
        out = model.generate_batch(
            rows, generation_config=generation_config(eos, args), continuous_batching_config=batching, warmup=False
        )
        return sum(useful_length(list(x.generated_tokens), eos) for x in out.values()), float("nan")

    return run


def fastest_generate_batch(model, eos: set[int], prompts, args) -> Run | None:
    """The layout that is fastest on a quarter of the prompts; None if none of them runs."""
    few, rates = prompts[: max(1, len(prompts) // 4)], {}
    for i, layout in enumerate(BATCH_LAYOUTS):
        try:
            rates[i] = timed(generate_batch(model, eos, few, args, layout), 0)["rate"]
            print(f"generate_batch, {layout}: {rates[i]:,.0f} tokens/s", file=sys.stderr, flush=True)
        except (RuntimeError, ValueError, ImportError) as error:
            print(f"generate_batch, {layout}: {' '.join(str(error).split())[:120]}", file=sys.stderr)
    if not rates:
        return None
    best = BATCH_LAYOUTS[max(rates, key=rates.get)]
    return generate_batch(model, eos, prompts, args, best)


# ---- the clock


def peak_memory(reset: bool = False) -> float:
    """MB that the process held at most since the last reset (Linux), else nan."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        status = Path("/proc/self/status").read_text()
    except OSError:
        return float("nan")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def timed(run: Run, seed: int) -> dict:
    before = peak_memory(reset=True)
    start = time.perf_counter()
    tokens, share = run(seed)
    seconds = time.perf_counter() - start
    return {
        "tokens": tokens,
        "seconds": seconds,
        "rate": tokens / seconds,
        "useful": share,
        "memory": peak_memory() - before,
    }


def medians(contenders: dict[str, Run], repeats: int) -> list[dict]:
    rows = {name: [] for name in contenders}
    for seed in range(1, repeats + 1):
        for name, run in contenders.items():
            rows[name].append(timed(run, seed))
            print(f"round {seed}: {name} {rows[name][-1]['rate']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return [
        {"name": name} | {key: statistics.median(row[key] for row in found) for key in found[0]}
        for name, found in rows.items()
    ]


def report(rows: list[dict]) -> None:
    print(f"{'':16}{'tokens/s':>10}{'ours is':>10}{'tokens':>9}{'seconds':>9}{'useful':>9}{'MB':>8}")
    for row in rows:
        ratio = rows[0]["rate"] / row["rate"]
        print(
            f"{row['name']:16}{row['rate']:10,.0f}{ratio:9.1f}x{row['tokens']:9,.0f}{row['seconds']:9.2f}"
            f"{row['useful']:9.1%}{row['memory']:8,.0f}"
        )


def on_cpu(args) -> list[dict]:
    model, tokenizer = lm.load(args.model, "cpu", torch.float32)
    eos = lm.eos_ids(model, tokenizer)
    chosen = problems.load(args.data)[: args.prompts * (2 if args.grow else 1)]
    prompts = [lm.chat_prompt(tokenizer, problem.problem) for problem in chosen]

    def slots(count: int) -> Run:
        return ours(model, eos, prompts, argparse.Namespace(**{**vars(args), "slots": count}))

    if args.sweep:
        return medians({f"{count} slots": slots(count) for count in (16, 32, 64, 128, 256, 512)}, args.repeats)
    if args.grow:
        parts = {f"{count} prompts": prompts[:count] for count in (len(prompts) // 4, len(prompts) // 2, len(prompts))}
        return medians({name: ours(model, eos, part, args) for name, part in parts.items()}, args.repeats)
    contenders = {"ours": ours(model, eos, prompts, args), "generate": generate(model, eos, prompts, args)}
    if batch := fastest_generate_batch(model, eos, prompts, args):
        contenders["generate_batch"] = batch
    return medians(contenders, args.repeats)


# ---- CUDA


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copying a gigabyte on the device."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def on_cuda(args) -> list[dict]:
    slots, prompt, new = args.slots or 256, 1024, 1024
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    bandwidth = copy_bandwidth()
    embedding = model.get_input_embeddings().weight
    weights = sum(x.nbytes for x in model.parameters()) - (0 if config.tie_word_embeddings else embedding.nbytes)
    a_position = 2 * config.num_hidden_layers * config.num_key_value_heads * 128 * 2  # bytes: keys, values, bf16
    rows = []
    for graphs in (True, False):
        sampler = Sampler(model, set(), slots, prompt + new, graphs=graphs)
        options = {"n": slots, "max_new_tokens": new}
        if graphs:
            sampler.generate([[7] * prompt], **options)  # captures every graph
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        sampler.generate([[7] * prompt], **options)
        seconds = time.perf_counter() - start
        least = new * (weights + slots * a_position * (prompt + new / 2)) / bandwidth
        rows.append(
            {
                "name": "CUDA graphs" if graphs else "eager",
                "tokens": slots * new,
                "seconds": seconds,
                "rate": slots * new / seconds,
                "useful": least / seconds,
                "memory": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
        sampler.release()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; the column 'useful' is the share of the roofline")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="data/tiny/model")
    parser.add_argument("--data", default="data/tiny/test.jsonl")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--grow", action="store_true")
    parser.add_argument("--json", help="where to write the table as JSON")
    args = parser.parse_args()
    if args.device == "cpu":
        args.slots = args.slots or 64
    rows = on_cpu(args) if args.device == "cpu" else on_cuda(args)
    report(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
