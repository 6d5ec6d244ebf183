"""Samples per second of r3.py in its GRPO form and of TRL's GRPOTrainer: the same model, data, batch and budget.

    pip install "trl==1.16.*"
    python bench/trl.py [--steps 20] [--repeat 3] [--json FILE]      # the numbers of configs/tiny.yaml, a 0/1 reward
    python bench/trl.py --cpu_time                                   # processor seconds: others use the machine too
    python bench/trl.py --only ours trl trl_batched --micro_batch 64

Both train in fp32 with AdamW, Eq. 1 and Eq. 2 without KL, and one optimiser step per batch, on the rewards of our
verifier. TRL samples a batch with `generate`, or as `trl_batched` with `generate_batch`, which is continuous batching.
Each run has a process of its own, and the contenders take turns. The first step warms up and is not counted. "sampling"
is sampling and verifying (TRL: advantages too), "update" is the rest of a step. Peak memory is the process's, "grown"
what was added to it after the model was loaded. pass@1 is eval.py's on the held-out problems, at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.pop(0)  # bench/, where this file would be `trl`
sys.path.insert(0, str(Path(__file__).parent.parent))

import r3
from runtime import config as settings
from runtime import model as lm
from runtime import problems
from verify import Verifier

ROOT = Path(__file__).parent.parent
GRPO = ["--replay=false", "--reflect=false", "--rank=false", "--length_reward=0", "--beta=0", "--minibatches=1"]
ALONE = ["--eval_data=", "--save_every=1000000", "--log_samples=0", "--device=cpu", "--dtype=float32"]


class Clock:
    """Seconds of each step and of its sampling, tokens that were sampled, and the memory before the first step."""

    def __init__(self, now: Callable[[], float]):
        self.now, self.steps, self.memory = now, [], None

    def begin(self) -> None:
        self.memory = self.memory or peak_mb()
        self.begun = self.now()

    def sampled(self, responses: int, tokens: int) -> None:
        self.step = {"sampling": self.now() - self.begun, "responses": responses, "tokens": tokens}

    def end(self) -> None:
        self.steps.append({"seconds": self.now() - self.begun, **self.step})


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(c: r3.Config, clock: Clock, args) -> Path:
    """Trains, and returns the folder of the trained model."""
    collect, log_step = r3.collect, r3.log_step

    def timed_collect(*given):
        clock.begin()
        groups, sampled = collect(*given)
        lengths = [len(response.response_ids) for g in sampled for response in g.responses]
        clock.sampled(len(lengths), sum(lengths))
        return groups, sampled

    def timed_log_step(*given):
        log_step(*given)
        clock.end()

    r3.collect, r3.log_step = timed_collect, timed_log_step
    r3.train(c)
    return max((Path(c.run_dir) / "checkpoints").iterdir())


def trl(c: r3.Config, clock: Clock, args) -> Path:
    """The same in TRL's trainer, with the values of our config."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = lm.load(c.model, "cpu", torch.float32)
    chosen, eos = problems.load(c.data, limit=c.data_limit), lm.eos_ids(model, tokenizer)
    rows = [
        {"prompt": [{"role": "user", "content": p.problem + c.prompt_suffix}], "answer": p.answer, "uid": p.uid}
        for p in chosen
    ]
    lengths, samples = [], c.batch_size * c.group_size

    def reward(completion_ids, answer, uid, **_) -> list[float]:
        lengths[:] = map(len, completion_ids)
        texts = [lm.decode(tokenizer, ids) if ids[-1] in eos else "" for ids in completion_ids]
        verdicts = [verifier.submit(*given) for given in zip(texts, answer, uid, strict=True)]
        return [float(verdict.result()) for verdict in verdicts]

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            clock.sampled(len(lengths), sum(lengths))
            return out

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.begin()

        def on_step_end(self, *_, **__):
            clock.end()

    micro = args.micro_batch
    options = {
        "max_steps": c.steps, "per_device_train_batch_size": micro, "gradient_accumulation_steps": samples // micro,
        "num_generations": c.group_size, "max_completion_length": c.max_new_tokens, "temperature": c.temperature,
        "learning_rate": c.lr, "lr_scheduler_type": "constant", "weight_decay": c.weight_decay,
        "max_grad_norm": c.grad_clip, "epsilon": c.eps_low, "epsilon_high": c.eps_high, "beta": 0.0,
        "loss_type": "grpo", "scale_rewards": "group", "seed": c.seed, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": c.gradient_checkpointing, "use_transformers_continuous_batching": args.batched,
        "report_to": "none", "save_strategy": "no", "logging_steps": 10**6, "disable_tqdm": True,
    }  # fmt: skip
    if args.batched:
        blocks = {"page_size": 32, "max_batch_tokens": 512, "allow_block_sharing": False}  # fastest in bench/rollout.py
        blocks |= {"num_blocks": c.slots * (256 // 32 + 2), "max_requests_per_batch": c.slots}
        options["transformers_continuous_batching_config"] = blocks
    with Verifier() as verifier:
        how = {"args": GRPOConfig(c.run_dir, **options), "train_dataset": Dataset.from_list(rows)}
        trainer = Timed(model, reward, processing_class=tokenizer, callbacks=[Steps()], **how)
        trainer.train()
    trainer.save_model(c.run_dir)
    return Path(c.run_dir)


def run(name: str, args, folder: str) -> dict:
    """One contender, in this process: what the clock says, peak memory, and where the trained model is."""
    args.batched = name == "trl_batched"
    changes = [f"--steps={args.steps}", "--epochs=1000", f"--seed={args.seed}", f"--run_dir={folder}"]
    c = settings.parse(r3.Config, ["--config", str(args.config), *changes, *GRPO, *ALONE])
    clock = Clock(time.process_time if args.cpu_time else time.perf_counter)
    model = {"ours": ours}.get(name, trl)(c, clock, args)
    return {"steps": clock.steps, "peak_mb": peak_mb(), "grown_mb": peak_mb() - clock.memory, "model": str(model)}


def pass_at_1(model: str, c: r3.Config, folder: str) -> float:
    out = Path(folder) / "answers.jsonl"
    options = {"model": model, "data": c.eval_data, "n": c.eval_n, "out": out, "max_new_tokens": c.max_new_tokens}
    options |= {"temperature": 1, "top_p": 1, "prompt_suffix": c.prompt_suffix}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    subprocess.run([sys.executable, ROOT / "eval.py", *arguments], check=True, capture_output=True)
    verdicts = [json.loads(line)["correct"] for line in out.read_text().splitlines()]
    return 100 * sum(verdicts) / len(verdicts)


def measured(name: str, args, seed: int) -> dict:
    """One contender in a process of its own, and the evaluation of its model in another."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], f"--only={name}", f"--seed={seed}", f"--child={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        c = settings.parse(r3.Config, ["--config", str(args.config)])
        score = pass_at_1(found["model"], c, folder)
    counted = found["steps"][1:]
    total = {key: sum(step[key] for step in counted) for key in counted[0]}
    return {
        "name": name,
        "sampling": total["sampling"] / len(counted),
        "update": (total["seconds"] - total["sampling"]) / len(counted),
        "samples_per_second": total["responses"] / total["seconds"],
        "tokens_per_second": total["tokens"] / total["seconds"],
        "tokens": total["tokens"] / total["responses"],
        "peak_mb": found["peak_mb"],
        "grown_mb": found["grown_mb"],
        "pass@1": score,
    }


def report(rounds: list[dict[str, dict]]) -> None:
    keys = {"sampling": "s/step", "update": "s/step", "samples_per_second": "", "tokens_per_second": "", "tokens": ""}
    keys |= {"peak_mb": "", "grown_mb": "", "pass@1": "%"}
    print(f"{'median of ' + str(len(rounds)):20}" + "".join(f"{name:>20}" for name in rounds[0]))
    for key, unit in keys.items():
        medians = [statistics.median(found[name][key] for found in rounds) for name in rounds[0]]
        print(f"{key + ' ' + unit:20}" + "".join(f"{median:20.2f}" for median in medians))
    for name in [name for name in rounds[0] if name != "ours" and "ours" in rounds[0]]:
        pairs = [(found["ours"], found[name]) for found in rounds]
        faster = [a["samples_per_second"] / b["samples_per_second"] for a, b in pairs]
        parts = {key: statistics.median(b[key] / a[key] for a, b in pairs) for key in ("sampling", "update")}
        print(
            f"ours is {statistics.median(faster):.1f} times {name}'s samples per second ({min(faster):.1f} to "
            f"{max(faster):.1f}): {parts['sampling']:.1f} times in sampling, {parts['update']:.1f} in the update"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "tiny.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--micro_batch", type=int, default=16, help="responses per backward pass of TRL")
    parser.add_argument("--only", choices=["ours", "trl", "trl_batched"], nargs="+", default=["ours", "trl"])
    parser.add_argument("--cpu_time", action="store_true", help="processor seconds in place of the clock's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args.only[0], args, args.child)))
        return
    rounds = []
    for seed in range(args.repeat):
        rounds.append({name: measured(name, args, seed) for name in args.only})
        for row in rounds[-1].values():
            shown = {key: round(value, 2) for key, value in row.items() if key != "name"}
            print(f"round {seed}: {row['name']} {shown}", file=sys.stderr, flush=True)
    report(rounds)
    if args.json:
        args.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
