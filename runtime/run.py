"""run.py: one run: its parts, made from a config; its logs, its evaluations, its checkpoints, and how it is stopped.

    runs/NAME/config.yaml                the resolved config
             metrics.jsonl               a line per step; evaluations are lines of their own
             samples.jsonl               a few responses of each step
             evals/step_000040.jsonl     every answer of an evaluation
             checkpoints/step_000040/    see checkpoint.py

Left out: the algorithm, which is r3.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from tqdm import tqdm

import eval as evaluation
import verify
from replay import PLAIN, REFLECTION, ReplayBuffer
from rollout import Sampler
from runtime import checkpoint, files, memory
from runtime import model as lm
from runtime import ranks as machine
from runtime.errors import UserError
from runtime.files import append, fsync, json_line, read_jsonl, write_atomically
from runtime.problems import Problem, load
from runtime.ranks import Ranks
from runtime.sharding import local, recompute_activations, shard
from runtime.signals import Signals
from verify import Verifier


@dataclass
class Run:
    """What a step works with, and how far the run is."""

    config: object  # r3.Config
    ranks: Ranks
    policy: torch.nn.Module
    reference: torch.nn.Module | None
    tokenizer: object
    sampler: Sampler
    optimizer: torch.optim.Optimizer
    buffer: ReplayBuffer
    verifier: Verifier
    signals: Signals
    problems: list[Problem]  # of this rank
    prompts: dict[str, list[int]]  # plain prompt ids of each uid
    eval_problems: list[Problem]
    logs: Logs | None = None
    n_problems: int = 0  # of all ranks
    problems_checksum: int = 0
    step: int = 0  # finished ones
    bar: tqdm | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of the parts of this step
    checkpointable: bool = True  # policy, optimiser, buffer and logs are all those of `step`
    saved: int = 0  # the step of the newest checkpoint
    evaluated: int = -1  # the step of the last evaluation
    bad_steps: int = 0  # in a row, with a loss or gradient that was not finite

    @property
    def steps_per_epoch(self) -> int:
        return self.n_problems // self.ranks.size // (self.config.batch_size // self.ranks.size)

    @property
    def steps(self) -> int:
        return min(self.config.epochs * self.steps_per_epoch, self.config.steps or sys.maxsize)

    def steps_left(self) -> Iterator[tuple[int, int]]:
        """(step, epoch) of each step that is left, both counted from 1; evaluates before and saves after when due."""
        while True:
            if evaluation_due(self):
                evaluate(self)
            if self.step == self.steps:
                return
            yield self.step + 1, self.step // self.steps_per_epoch + 1
            if self.step == self.steps or self.step % self.config.save_every == 0:
                save(self)

    @contextlib.contextmanager
    def finishing(self, step: int) -> Iterator[None]:
        """Around what is left of a step once the weights have moved. A run that is stopped in it saves at its end."""
        self.checkpointable, self.step = False, step
        yield
        self.checkpointable = True


def interruptible(work: Callable | None = None, *, collective: bool = False) -> Callable:
    """work(run, ...) changes nothing that a checkpoint holds: a signal may end it anywhere; the step is repeated.

    Not so with several ranks where the work has collective calls.
    """
    if work is None:
        return functools.partial(interruptible, collective=collective)

    @functools.wraps(work)
    def wrapped(run: Run, *args, **kwargs):
        with run.signals.interruptible(collective):
            return work(run, *args, **kwargs)

    return wrapped


def timed(work: Callable) -> Callable:
    """The seconds of work(run, ...) are in run.seconds, under its name."""

    @functools.wraps(work)
    def wrapped(run: Run, *args, **kwargs):
        begun = time.perf_counter()
        result = work(run, *args, **kwargs)
        run.seconds[work.__name__] = time.perf_counter() - begun
        return result

    return wrapped


@contextlib.contextmanager
def start(config) -> Iterator[Run]:
    """A run from its config, new or resumed; at the end its result is printed. Stopped or crashed, it is saved."""
    try:
        with contextlib.ExitStack() as stack:
            run = set_up(config, stack)
            stack.enter_context(run.signals.saving(lambda: save(run)))
            bar = tqdm(total=run.steps, initial=run.step, unit="step", disable=not run.ranks.main)
            run.bar = stack.enter_context(bar)
            yield run
            run.bar.close()
            if run.ranks.main:
                print_result(run)
    except torch.OutOfMemoryError as error:
        helps = "a smaller token_budget, slots or max_new_tokens, or gradient_checkpointing = true"
        raise UserError(f"{str(error).splitlines()[0]} What helps: {helps}") from error


def set_up(c, stack: contextlib.ExitStack) -> Run:
    """Checks everything that the user gave, and only then writes; what it starts, `stack` closes."""
    if not c.run_dir:
        raise UserError("run_dir is empty; allowed: --run_dir=runs/NAME, or a --config FILE, which names it")
    ranks = Ranks.start(c.device, c.rank_timeout)
    stack.push(lambda crash, *_: None if crash else ranks.stop())  # after a crash the others would be waited for
    signals = Signals(c.grace_seconds, ranks)
    stack.callback(signals.close)
    machine.keep_freed_memory(ranks.device)
    dtype = machine.pick_dtype(c.dtype, ranks.device)
    folder = checkpoint.to_resume(c)
    fields = {"problem_field": c.problem_field, "answer_field": c.answer_field, "uid_field": c.uid_field}
    problems = load(c.data, split=c.data_split, limit=c.data_limit, **fields)
    eval_problems = load(c.eval_data, split=c.eval_split, limit=c.eval_limit) if c.eval_data else []
    policy, reference, sampled_from, tokenizer = load_models(c, str(folder or c.model), ranks, dtype)
    verifier = stack.enter_context(Verifier())
    prompts = {p.uid: plain_prompt(p, tokenizer, c) for p in problems}
    problems, left_out = usable(problems, prompts, c, ranks)
    reflection = c.reflection_tokens + len(tokenizer.encode(c.reflection_template)) + 64 if c.reflect else 0
    longest = c.max_prompt_tokens + reflection + c.max_new_tokens
    check_room(problems, eval_problems, prompts, policy, tokenizer, c)
    sampler = Sampler(sampled_from, lm.eos_ids(policy, tokenizer), c.slots, min(longest, lm.positions(policy)))
    memory.refuse(c, policy, sampler, ranks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=c.lr, weight_decay=c.weight_decay, fused=True)
    buffer = ReplayBuffer(c.buffer_per_query, c.history, c.min_history, c.buffer_tokens // ranks.size)
    parts = policy, reference, tokenizer, sampler, optimizer, buffer, verifier, signals, problems, prompts
    run = Run(c, ranks, *parts, eval_problems, n_problems=len(problems), problems_checksum=fingerprint(problems))
    mine = ranks.share(p.uid for p in problems)
    run.problems = [p for p in problems if p.uid in mine]
    if folder:
        state = checkpoint.load(folder, policy, optimizer, buffer, ranks, mine)
        if state["problems"] != run.problems_checksum and not c.override_config:
            raise UserError(f"{c.data}: not the problems that this run began with; allowed with --override-config")
        run.step, run.bad_steps, run.saved = state["step"], state["bad_steps"], state["step"]
    ranks.barrier()  # all have read what the first one now writes to
    if ranks.main:
        checkpoint.clean(Path(c.run_dir))
    run.logs = Logs(c, run.step, ranks.main)
    (run.evaluated,) = ranks.sum([run.logs.evaluated if ranks.main else 0])
    stack.callback(run.logs.close)
    if run.steps < (c.steps or 0):
        left_out.append(f"steps = {c.steps}: epochs = {c.epochs} of {run.steps_per_epoch} steps end after {run.steps}")
    if ranks.main:
        print(*left_out, sampler.memory(), sep="\n", file=sys.stderr)
    return run


def load_models(c, start: str, ranks: Ranks, dtype: torch.dtype):
    """The policy, the reference (None where beta is 0), the model that the sampler runs, and the tokenizer.

    The policy has fp32 master weights and computes in `dtype`. In fp32 on one rank the sampler runs the policy itself.
    """
    alone = ranks.size == 1 and dtype == torch.float32
    place = (ranks.device, torch.float32) if alone else ("cpu", "auto")  # sharded from the host, block by block
    policy, tokenizer = lm.load(start, *place, c.trust_remote_code)
    sampled_from = policy
    if not alone:
        sampled_from = lm.load(start, ranks.device, dtype, c.trust_remote_code)[0].requires_grad_(False)
    if c.gradient_checkpointing:
        recompute_activations(policy)
    shard(policy, ranks, dtype)
    reference = None
    if c.beta > 0:
        reference = lm.load(c.model, "cpu" if ranks.size > 1 else ranks.device, dtype, c.trust_remote_code)[0]
        shard(reference.requires_grad_(False), ranks, dtype, stored=dtype)
    return policy, reference, sampled_from, tokenizer


def plain_prompt(problem: Problem, tokenizer, c) -> list[int]:
    return lm.chat_prompt(tokenizer, problem.problem + c.prompt_suffix, c.system_prompt)


def usable(problems: list[Problem], prompts: dict[str, list[int]], c, ranks: Ranks) -> tuple[list[Problem], list[str]]:
    """The problems whose reference answer grades itself as right and whose prompt fits; a line about those left out."""
    faults = {} if c.check_answers == "off" else {f.uid: f for f in verify.check(problems) if f.bad}
    fit = [p for p in problems if p.uid not in faults and len(prompts[p.uid]) <= c.max_prompt_tokens]
    long = len(problems) - len(fit) - len(faults)
    left_out = f"left out {long} over max_prompt_tokens = {c.max_prompt_tokens} and {len(faults)} for their answer"
    for fault in list(faults.values())[:1]:
        left_out += f", the first is {fault.where}: {fault.reason}"
        if c.check_answers == "refuse":
            raise UserError(f"{fault.where}: {fault.reason} ({len(faults)} in all); check_answers = drop skips them")
    if c.batch_size % ranks.size:
        raise UserError(f"batch_size = {c.batch_size}, allowed: a multiple of the {ranks.size} ranks")
    if len(fit) < c.batch_size:
        few = f"{len(fit)} usable problems, allowed: at least batch_size = {c.batch_size}"
        raise UserError(f"{c.data}: {few}; {left_out}")
    return fit, [f"{c.data}: {left_out}"] * (len(fit) < len(problems))


def check_room(problems: list[Problem], eval_problems: list[Problem], prompts, policy, tokenizer, c) -> None:
    """Raises UserError for an evaluation prompt over the limit, and where the model has too few positions."""
    for p in eval_problems:
        if (length := len(plain_prompt(p, tokenizer, c))) > c.max_prompt_tokens:
            limit = f"{c.max_prompt_tokens} = max_prompt_tokens"
            raise UserError(f"{p.where}: a prompt of {length} tokens, allowed: {limit}")
    longest, positions = max(len(prompts[p.uid]) for p in problems), lm.positions(policy)
    if longest + c.max_new_tokens > positions:
        room = f"{positions - longest}, for the model has {positions} positions and the longest prompt takes {longest}"
        raise UserError(f"max_new_tokens = {c.max_new_tokens}, allowed: at most {room}")


def fingerprint(problems: list[Problem]) -> int:
    return zlib.crc32(repr([(p.uid, p.problem, p.answer) for p in problems]).encode())


def describe(groups: Sequence, suffix: str = "") -> dict[str, tuple[float, float]]:
    """name -> (sum, weight) over freshly sampled groups; entropy is weighted by tokens."""
    responses = [a for g in groups for a in g.responses]
    n, tokens = len(responses), sum(len(a.response_ids) for a in responses)
    pairs = {
        "reward": (sum(a.reward for a in responses), n),
        "accuracy": (sum(a.correct for a in responses), n),
        "solve_all": (sum(g.all_correct for g in groups), len(groups)),
        "solve_none": (sum(g.all_wrong for g in groups), len(groups)),
        "truncated": (sum(not a.finished for a in responses), n),
        "response_tokens": (tokens, n),
        "entropy": (sum(float(H.sum(dtype=np.float64)) for g in groups for H in g.entropies), tokens),
    }
    return {name + suffix: pair for name, pair in pairs.items()}


def log_step(run: Run, epoch: int, groups, sampled, learning) -> None:
    """One row of metrics.jsonl, a few responses for samples.jsonl, and the bar."""
    seconds = run.seconds["collect"], run.seconds["update"]
    kinds = {kind: [g for g in sampled if g.prompt.kind == kind] for kind in (PLAIN, REFLECTION)}
    once = float(run.ranks.main)  # a count is a sum over ranks: (count, 1) on one rank, (count, 0) on the others
    tokens = sum(len(a.response_ids) for g in sampled for a in g.responses)
    pairs = {
        **describe(kinds[PLAIN]),
        "replayed": (sum(len(g.responses) - g.n_fresh for g in groups), once),
        "reflected": (len(kinds[REFLECTION]), once),
        "ranked": (sum(g.n_ranked for g in groups), once),
        **learning,
        "seconds_load": (run.sampler.load_seconds, 1),
        "seconds_rollout": (seconds[0], 1),
        "seconds_update": (seconds[1], 1),
        "tokens_per_second": (tokens / sum(seconds), once),
        "sampled_tokens": (tokens, once),
        "peak_memory_gb": (machine.peak_memory_gb(run.ranks.device), 1),
        **describe(kinds[REFLECTION], "/reflection"),
        "verifier_killed": (run.verifier.killed, once),
    }
    row = {"step": run.step, "epoch": epoch, **run.ranks.mean(pairs)}
    if run.ranks.main:
        run.logs.sampled_tokens += round(row["sampled_tokens"])
        run.logs.row(row | {"sampled_tokens": run.logs.sampled_tokens})
        n = run.config.log_samples
        run.logs.samples([sample_record(run, g) for g in groups[:: max(1, len(groups) // max(1, n))][:n]])
        shown = {k: row[k] for k in ("reward", "accuracy", "entropy", "replayed", "reflected", "ranked")}
        run.bar.set_postfix({k: f"{v:.3g}" if v is not None else "-" for k, v in shown.items()}, refresh=False)
        run.bar.update()


def sample_record(run: Run, group) -> dict:
    """A group's first response as a reader of samples.jsonl sees it."""
    a = group.responses[0]
    return {
        "step": run.step,
        "uid": group.uid,
        "kind": group.prompt.kind,
        "prompt": run.tokenizer.decode(a.prompt_ids),
        "response": run.tokenizer.decode(a.response_ids),
        "answer": group.prompt.problem.answer,
        "correct": a.correct,
        "finished": a.finished,
        "reward": group.rewards[0],
        "rewards_of_group": list(group.rewards),
        "replayed": len(group.responses) - group.n_fresh,
    }


def evaluation_due(run: Run) -> bool:
    """Whether the policy as it is has to be evaluated; not where that was done before the run was resumed."""
    c, step = run.config, run.step
    asked = c.eval_at_end if step == run.steps else step % c.eval_every == 0 if step else c.eval_at_start
    return bool(run.eval_problems) and asked and run.evaluated < step


def evaluate(run: Run) -> None:
    """A row of its own in metrics.jsonl: pass@1, pass@N, mean tokens, truncated share on the held-out problems."""
    c = run.config
    mine = run.eval_problems[run.ranks.rank :: run.ranks.size]
    run.sampler.load(run.policy)
    shown = {"disable": not run.ranks.main, "mininterval": 0.5, "leave": False}
    bar = tqdm(total=len(mine) * c.eval_n, unit="answer", desc=f"eval at step {run.step}", **shown)
    with bar, run.signals.interruptible():
        answers = evaluation.evaluate(
            run.sampler,
            run.verifier,
            run.tokenizer,
            [plain_prompt(p, run.tokenizer, c) for p in mine],
            mine,
            n=c.eval_n,
            max_new_tokens=c.max_new_tokens,
            temperature=c.eval_temperature,
            top_p=c.eval_top_p,
            seed=c.seed,
            on_finished=lambda *_: bar.update(),
        )
    answers = run.ranks.gather(answers)
    if run.ranks.main:
        run.logs.answers(run.step, answers)
        run.logs.row({"step": run.step, **evaluation.summary(answers, sorted({1, c.eval_n}))})
    run.evaluated = run.step


def save(run: Run) -> None:
    """A checkpoint of the last finished step, unless there is one; nothing where a step has begun to change the run."""
    c = run.config
    if not run.checkpointable or run.step == run.saved:
        return
    bad = sum(not local(p).isfinite().all().item() for p in run.policy.parameters())
    if run.ranks.sum([bad])[0]:
        raise UserError(f"lr = {c.lr}: weights are not finite after step {run.step}, not saved; try a smaller one")
    if run.ranks.main:
        run.logs.sync()  # the rows of a step are on the disk before its checkpoint is
    state = {"step": run.step, "bad_steps": run.bad_steps, "problems": run.problems_checksum}
    parts = (run.policy, run.tokenizer, run.optimizer, run.buffer, state, run.ranks)
    prompt = {"prompt_suffix": c.prompt_suffix, "system_prompt": c.system_prompt}
    checkpoint.save(Path(c.run_dir), *parts, keep=c.checkpoints_kept, dtype=c.save_dtype, prompt=prompt)
    run.saved = run.step


def print_result(run: Run) -> None:
    """base -> trained, and where everything lies."""
    folder = Path(run.config.run_dir)
    evals = [row for row in read_jsonl(folder / "metrics.jsonl") if "eval/pass@1" in row]
    if len(evals) > 1:
        print(f"{'':14}{'base':>10}{'trained':>10}   (steps {evals[0]['step']} and {evals[-1]['step']})")
        for name, scale, unit in (("pass@1", 100, "%"), ("tokens", 1, ""), ("truncated", 100, "%")):
            first, final = (scale * row[f"eval/{name}"] for row in (evals[0], evals[-1]))
            print(f"{name:14}{first:9.1f}{unit:1}{final:9.1f}{unit:1}")
    for name in ("metrics.jsonl", "samples.jsonl", f"checkpoints/step_{run.step:06d}"):
        print(folder / name)


class Logs:
    """metrics.jsonl, samples.jsonl and config.yaml of a run directory; TensorBoard or Weights & Biases where asked for.

    Rows of later steps than `step` are cut off, so that a resumed run has each step once. Only the main rank writes.
    `evaluated` is the step of the last evaluation in it, -1 for none; `sampled_tokens` are those of all its steps.
    """

    def __init__(self, config, step: int, main: bool = True):
        self.dir, self.board, self.wandb = Path(config.run_dir), None, None
        if not main:
            return
        with optional("tensorboard", config.tensorboard), optional("wandb", config.wandb):
            if config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
            if config.wandb:
                import wandb
        with files.writing(self.dir):
            self.dir.mkdir(parents=True, exist_ok=True)
        write_atomically(self.dir / "config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
        self.files = self.dir / "samples.jsonl", self.dir / "metrics.jsonl"
        for path in self.files:
            kept = [row for row in read_jsonl(path) if row["step"] <= step] if path.exists() else []
            write_atomically(path, "".join(map(json_line, kept)))
        self.evaluated = max((row["step"] for row in kept if "eval/pass@1" in row), default=-1)
        self.sampled_tokens = max((row.get("sampled_tokens", 0) for row in kept), default=0)
        if config.tensorboard:
            self.board = SummaryWriter(self.dir / "tensorboard", purge_step=step + 1)
        if config.wandb:
            settings = {"dir": self.dir, "config": dataclasses.asdict(config), "resume": "allow"}
            self.wandb = wandb.init(project="r3", name=self.dir.name, id=self.dir.name, **settings)

    def row(self, row: dict) -> None:
        append(self.dir / "metrics.jsonl", [row])
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}
        if self.board:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, row["step"])
        if self.wandb:
            self.wandb.log(numbers, step=row["step"])

    def samples(self, rows: list[dict]) -> None:
        append(self.dir / "samples.jsonl", rows)

    def answers(self, step: int, rows: list[dict]) -> None:
        (self.dir / "evals").mkdir(exist_ok=True)
        write_atomically(self.dir / "evals" / f"step_{step:06d}.jsonl", "".join(map(json_line, rows)))

    def sync(self) -> None:
        for path in self.files:
            fsync(path)

    def close(self) -> None:
        if self.board:
            self.board.close()
        if self.wandb:
            self.wandb.finish()


@contextlib.contextmanager
def optional(package: str, asked: bool):
    try:
        yield
    except ImportError as error:
        if not asked:
            raise
        raise UserError(f"{package} = true needs the package {package}: pip install {package}") from error
