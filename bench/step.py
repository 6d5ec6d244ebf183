"""One real step of a config with random weights on one card: tokens per second, and peak memory against the plan.

    python bench/step.py --config configs/r3_1.5b.yaml [--json FILE]           # on a card
    python bench/step.py --config configs/r3_1.5b.yaml --device cpu --small     # that the script runs, anywhere

Sampling: all slots in use, `--new` tokens each, a first call before the clock runs. Update: two micro-batches of the
full token budget and the optimiser step, after one that is not timed. `generate` of transformers and vLLM, where it is
installed, sample on the same weights' shape. Left out: verifying, data, saving. It has not run on a card yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.append(str(Path(__file__).parent))  # last: bench/verify.py is not verify

from rehearse import Memory, OneOf, Rehearsal, shape_of

import r3
from rollout import Sampler
from runtime import config as settings
from runtime import ranks as machine
from runtime.memory import OUTSIDE, most_slots, needed
from runtime.sharding import local

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def clock(device: torch.device, work) -> float:
    """Seconds of work(), the device's part included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def step(c: r3.Config, shape, device: torch.device, new: int) -> list[dict]:
    """A row for sampling, one for the update: tokens, seconds, peak GB, GB of the plan."""
    run = Rehearsal(c, shape, OneOf(0, 1, device), torch.bfloat16, Memory())
    for model in (run.run.policy, run.sampled_from, *filter(None, [run.run.reference])):
        for parameter in model.parameters():
            local(parameter.data).normal_(std=0.02)
    parameters = sum(p.numel() for p in run.run.policy.parameters())
    rows = []

    def measure(name: str, tokens: int, work, planned: int) -> None:
        work()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = clock(device, work)
        row = {"what": name, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        if device.type == "cuda":  # the plan is one for cards
            row |= {"peak_gb": machine.peak_memory_gb(device), "plan_gb": (planned - OUTSIDE) / 1e9}
        rows.append(row)

    most = most_slots(c, run.run.policy, run.run.ranks, run.longest)
    sampler = Sampler(run.sampled_from, set(), c.slots, run.longest, most=most)
    plan = needed(c, shape, parameters, 1, sampler.slots, run.longest)
    sampler.load(run.run.policy)
    n = c.group_size
    prompts = [[7] * 200] * (sampler.slots // n)
    measure("sampling", len(prompts) * n * new, lambda: sampler.generate(prompts, n, new), plan["sampling"])
    sampler.release()
    machine.free_memory(device)
    tokens = 2 * sum(len(e.prompt_ids) + len(e.response_ids) for e in run.micro_batch())
    measure("update", tokens, run.update, plan["update"])
    return rows


def by_generate(shape, device: torch.device, rows: int, new: int) -> dict:
    """transformers' own sampling loop, its cache as long as the responses."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    ids = torch.full((rows, 200), 7, device=device)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    seconds = clock(device, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))
    return {"what": "generate", "tokens": rows * new, "seconds": seconds, "tokens_per_second": rows * new / seconds}


def by_vllm(shape, rows: int, new: int) -> dict:
    """vLLM with random weights of this shape, if it is installed."""
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        return {"what": "vllm", "note": f"not installed ({error.name})"}
    folder = tempfile.mkdtemp()
    shape.architectures = ["Qwen2ForCausalLM"]
    shape.save_pretrained(folder)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 200 + new}
    engine = LLM(model=folder, gpu_memory_utilization=0.5, **options)
    sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7] * 200}] * rows
    engine.generate(prompts, sampling)
    begun = time.perf_counter()
    engine.generate(prompts, sampling)
    seconds = time.perf_counter() - begun
    return {"what": "vllm", "tokens": rows * new, "seconds": seconds, "tokens_per_second": rows * new / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that the script runs")
    parser.add_argument("--new", type=int, default=512, help="tokens per response")
    parser.add_argument("--json", type=Path)
    args, rest = parser.parse_known_args()
    c = settings.parse(r3.Config, ["--config", args.config, *rest])
    shape, device = shape_of(c.model), machine.pick_device(args.device)
    if args.small:
        shape = type(shape)(**shape.to_dict() | SMALL | {"layer_types": None})
        sizes = ["--slots=8", "--token_budget=512", "--max_new_tokens=128", "--max_prompt_tokens=256"]
        c = settings.parse(r3.Config, ["--config", args.config, *rest, *sizes])
        args.new = 8
    rows = []
    for work in (
        lambda: step(c, shape, device, args.new),
        lambda: [by_generate(shape, device, 8 if args.small else 64, args.new)],
        lambda: [by_vllm(shape, rows[0]["tokens"] // args.new, args.new)],  # as many responses as ours
    ):
        try:
            rows.extend(work())
        except Exception as error:  # a part that fails is a row that says so; the others go on
            rows.append({"what": "failed", "note": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
        gc.collect()
        machine.free_memory(device)
    for row in rows:
        numbers = "".join(f"  {key} {value:,.2f}" for key, value in row.items() if isinstance(value, (int, float)))
        print(f"{row['what']:10}{numbers}{row.get('note', '')}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if any(row["what"] == "failed" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
