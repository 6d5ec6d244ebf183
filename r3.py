"""r3.py: R³, reinforcement learning with Replay, Reflection and Ranking rewards (arXiv 2601.19620), in one file.

    python r3.py --config configs/tiny.yaml                                    # two CPU cores, minutes
    python r3.py --config configs/r3_1.5b.yaml --run_dir=runs/first            # one GPU
    torchrun --nproc-per-node 8 r3.py --config configs/r3_7b.yaml --resume     # eight

Algorithm 1. The numbers stand in the margin of `collect` and `train`.

     1  for epoch = 1..E, batch D_b of queries q:
     2      one plain prompt for each q
     3      if epoch > 1: for each q with mean past accuracy < tau and a stored failure o_h:
                add the prompt q (+) o_h (+) p_r                               ISR, in-context self-reflection
     4      sample a group G of responses to each prompt from pi_theta, verify each
     5      no response right:  truncated ones earn the ranking reward         SERR, structural entropy ranking
     6                          G <- G u k stored successes of q               CCR, cross-context replay
     7      all right:          G <- G u k stored failures of q                CCR
     8      one optimiser step on the objective (Eq. 2) with the advantages of Eq. 1 and Eq. 3
     9      S <- S u the fresh responses

Symbols: q query, uid its name · o_i response, attempt · G group (G_mix with replayed ones) · L tokens of a response ·
R reward · A advantage · H entropy in nats · S buffer · tau, k, p, alpha, lambda, eps, beta: see Config ·
pi_theta policy, pi_old the policy that sampled, pi_ref reference.

Departures from the paper, with reasons, are a table in README.md. The buffer is updated after the step (line 9), so
that a step that is interrupted has changed nothing.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import eval as evaluation
from replay import PLAIN, REFLECTION, ReplayBuffer, Response
from runtime import config as settings
from runtime import model as lm
from runtime import ranks as machine
from runtime.config import bounded, one_of
from runtime.errors import UserError, exit_cleanly
from runtime.problems import Problem
from runtime.ranks import Ranks
from runtime.run import Run, evaluate, evaluation_due, log_step, print_result, save, set_up
from sampling.gumbel import derive_seed

# ------------------------------------------------------------------------------------------------ 1. Configuration


@dataclass(frozen=True)
class Config:
    """Every number of a run. The comment gives symbol, meaning, unit and the paper's value where it gives one."""

    # what is trained, and where
    model: str = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"  # folder or hub name (the paper's small model)
    data: str = "agentica-org/DeepScaleR-Preview-Dataset"  # JSONL, parquet or hub name (the paper's set)
    data_split: str = "train"
    data_limit: int | None = bounded(None, low=1)  # only the first so many problems
    problem_field: str = "problem"
    answer_field: str = "answer"
    uid_field: str = "uid"
    eval_data: str = ""  # JSONL, parquet or hub name; empty: no evaluation
    eval_split: str = "test"
    prompt_suffix: str = " Let's think step by step and output the final answer within \\boxed{}."
    system_prompt: str = ""
    run_dir: str = ""  # default: runs/<name of the config file>
    seed: int = bounded(0, low=0)
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = one_of("auto", "float32", "bfloat16")  # of matrix products; master weights are fp32
    trust_remote_code: bool = False
    check_answers: str = one_of("drop", "refuse", "off")  # reference answers that do not grade themselves as right

    # the loop
    steps: int | None = bounded(None, low=1)  # ends the run early
    epochs: int = bounded(3, low=1)  # E
    batch_size: int = bounded(128, low=1)  # queries a step, |D_b|
    group_size: int = bounded(8, low=2)  # G
    max_prompt_tokens: int = bounded(1024, low=1)  # plain prompts; longer ones are left out and counted
    max_new_tokens: int = bounded(8192, low=1)  # response budget (paper: 8K in training)
    temperature: float = bounded(1.0, above=0)
    top_p: float = 1.0  # anything else is refused in training (SPEC 8.2)
    top_k: int = 0
    slots: int = bounded(96, low=1)  # responses sampled side by side; each takes key/value cache for its longest
    dynamic_sampling: bool = False  # DAPO: drop all-right and all-wrong groups and sample others in their place ...
    dynamic_rounds: int = bounded(3, low=1)  # ... at most so many times a step

    # optimisation
    lr: float = bounded(1e-6, above=0)
    warmup_steps: int = bounded(0, low=0)  # linear
    weight_decay: float = bounded(0.0, low=0)
    grad_clip: float = bounded(1.0, above=0)  # gradient norm
    beta: float = bounded(0.001, low=0)  # KL weight in Eq. 2; 0: no reference model is loaded
    eps_low: float = bounded(0.2, low=0, below=1)  # eps in Eq. 2
    eps_high: float = bounded(0.28, low=0)
    loss_agg: str = one_of("sequence", "token", "constant")  # Eq. 2, DAPO, Dr. GRPO
    minibatches: int = bounded(1, low=1)  # optimiser steps a batch
    token_budget: int = bounded(16384, low=1)  # tokens a forward and backward pass
    gradient_checkpointing: bool = False

    # rewards (SPEC section 2)
    length_reward: float = bounded(1.0, low=0)  # w_len: R = 1 + w_len max(0, 1 - L / L_max) for a right answer
    length_max: int = bounded(32768, low=1)  # L_max (paper: 32,768)
    overlong_tokens: int = bounded(0, low=0)  # DAPO: soft penalty over the last so many tokens of the budget; 0: none

    # CCR, cross-context replay
    replay: bool = True
    replay_k: int = bounded(2, low=1)  # k
    alpha: float = bounded(1.0, above=0)  # Eq. 3
    lam: float = bounded(1e-4, above=0)  # lambda, Eq. 1 and 3
    replay_logp: str = one_of("behaviour", "current")  # pi_old of a replayed response
    replay_prompt: str = one_of("own", "group")  # the prompt that a replayed response is trained under
    buffer_per_query: int = bounded(8, low=1)  # successes, and as many failures

    # ISR, in-context self-reflection
    reflect: bool = True
    tau: float = bounded(0.25, low=0, high=1)  # hard: mean past accuracy below it
    min_history: int = bounded(8, low=1)  # verdicts before a query can count as hard
    reflection_tokens: int = bounded(1024, low=1)  # of the failed attempt, cut at the front
    reflection_template: str = (  # q (+) o_h (+) p_r
        "{problem}\n\nHere is an earlier attempt at this problem. Its answer is wrong.\n\n<attempt>\n{attempt}\n"
        "</attempt>\n\nFind the first mistake in it and say why it is one. Then solve the problem again from the start."
    )

    # SERR, structural entropy ranking rewards
    rank: bool = True
    rank_on: str = one_of("truncated", "failed")
    peak_ratio: float = bounded(0.2, above=0, high=1)  # p
    r_max: float = bounded(0.5, low=0, below=1)  # R_max < 1: no failure beats a success

    # checkpoints, evaluation, logs
    save_every: int = bounded(50, low=1)  # steps
    save_dtype: str = one_of("float32", "bfloat16")  # of the exported weights; a resume is exact with either
    checkpoints_kept: int = bounded(2, low=1)
    resume: bool = False
    override_config: bool = False  # resume although the config differs from the run's
    grace_seconds: float = bounded(60.0, above=0)  # from SIGTERM to the end
    eval_every: int = bounded(50, low=1)  # steps
    eval_n: int = bounded(16, low=1)  # N samples a problem (paper: 16)
    eval_temperature: float = bounded(0.6, low=0)
    eval_top_p: float = bounded(0.95, above=0, high=1)
    eval_at_start: bool = True
    eval_at_end: bool = True
    eval_limit: int | None = bounded(None, low=1)  # problems
    log_samples: int = bounded(8, low=0)  # responses a step in samples.jsonl
    tensorboard: bool = False
    wandb: bool = False

    def __post_init__(self):
        if self.top_p != 1 or self.top_k != 0:
            raise UserError(
                f"top_p = {self.top_p}, top_k = {self.top_k}, allowed in training: 1 and 0, for the ratio would "
                "compare two distributions; eval_top_p is for evaluation"
            )
        if self.minibatches > self.batch_size:
            raise UserError(f"minibatches = {self.minibatches}, allowed: at most batch_size = {self.batch_size}")
        if self.overlong_tokens >= self.max_new_tokens:
            allowed = f"below max_new_tokens = {self.max_new_tokens}"
            raise UserError(f"overlong_tokens = {self.overlong_tokens}, allowed: {allowed}")
        if self.replay_k > self.buffer_per_query:
            raise UserError(f"replay_k = {self.replay_k}, allowed: at most buffer_per_query = {self.buffer_per_query}")
        if self.reflect and self.min_history > self.history:
            raise UserError(f"min_history = {self.min_history}, allowed: at most 4 group_size = {self.history}")
        for place in ("{problem}", "{attempt}"):
            if place not in self.reflection_template:
                raise UserError(f"reflection_template: found no {place}, allowed: text with {{problem}}, {{attempt}}")

    @property
    def history(self) -> int:
        """Verdicts that a query is remembered by: those of its last four groups."""
        return 4 * self.group_size

    @property
    def recompute_old_logp(self) -> bool:
        """pi_old of replayed responses is recomputed: forced where they are trained under another prompt (SPEC 3)."""
        return self.replay_logp == "current" or self.replay_prompt == "group"


# ------------------------------------------------------------------------------------------------------ 2. Rewards


def outcome_reward(correct: bool, finished: bool, length: int, c: Config) -> float:
    """SPEC section 2: R = 1 + w_len max(0, 1 - L/L_max) if right and finished, else 0; less DAPO's overlong penalty.

    length: L in tokens, EOS included. The penalty falls from 0 to -1 over the last `overlong_tokens` of the budget.
    """
    right = correct and finished
    reward = 1.0 + c.length_reward * max(0.0, 1 - length / c.length_max) if right else 0.0
    over = length - (c.max_new_tokens - c.overlong_tokens)
    return reward - (min(1.0, over / c.overlong_tokens) if c.overlong_tokens and over > 0 else 0.0)


def peak_and_global(entropies: np.ndarray, peak_ratio: float) -> tuple[float, float]:
    """E_peak, the mean of the max(1, floor(p L)) largest token entropies, and E_glob, the mean of all L (nats)."""
    H, L = np.sort(np.asarray(entropies, dtype=np.float64))[::-1], len(entropies)
    k = max(1, math.floor(peak_ratio * L))
    return float(H[:k].mean()), float(H.mean())


def serr(peak, glob, r_max: float) -> Tensor:
    """SERR (SPEC section 2): ranking rewards [N] of N failures from E_peak [N] and E_glob [N].

        i > j  iff  E_peak_i > E_peak_j and E_glob_i < E_glob_j        S_i = number of j that i dominates
        R_(k) = R_max (1 - k / (N-1)),  k the rank by S, best first

    Ties share the mean of the ranks they occupy, so an all-tied group gets equal rewards; N = 1 gets 0.
    """
    E_peak, E_glob = torch.as_tensor(peak, dtype=torch.float64), torch.as_tensor(glob, dtype=torch.float64)
    (N,) = E_peak.shape
    if N < 2:
        return torch.zeros(N, dtype=torch.float64)
    dominates = torch.gt(E_peak[:, None], E_peak) & torch.lt(E_glob[:, None], E_glob)  # (N, N)
    S = dominates.sum(1)
    better, tied = torch.gt(S, S[:, None]).sum(1), torch.eq(S, S[:, None]).sum(1)
    k = better + (tied - 1) / 2
    return r_max * (1 - k.double() / (N - 1))


# ------------------------------------------------------------------------------------------ 3. Informative groups


@dataclass(frozen=True)
class Prompt:
    """A prompt of this step: the problem in plain form, or with a past failure to reflect on."""

    problem: Problem
    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Group:
    """The responses to one prompt and their rewards: fresh ones first, then replayed ones (G_mix)."""

    prompt: Prompt
    responses: tuple[Response, ...]
    rewards: tuple[float, ...]
    entropies: tuple[np.ndarray, ...]  # of the fresh responses, (L,) each
    n_fresh: int
    n_ranked: int = 0  # responses with a ranking reward

    @property
    def uid(self) -> str:
        return self.prompt.problem.uid

    @property
    def collapsed(self) -> str:
        """`none` right, `all` right, or empty: by the verifier's word on the fresh ones, before any shaping."""
        right = sum(a.correct for a in self.responses[: self.n_fresh])
        return "none" if right == 0 else "all" if right == self.n_fresh else ""


def rank_failures(group: Group, c: Config) -> Group:
    """SERR, line 5: truncated (or all failed) responses of an all-wrong group are rewarded by their entropy's shape.

    Fewer than two of them have no rank, and the group stays as it is.
    """
    chosen = [i for i, a in enumerate(group.responses[: group.n_fresh]) if c.rank_on == "failed" or not a.finished]
    if group.collapsed != "none" or len(chosen) < 2:
        return group
    peak, glob = zip(*(peak_and_global(group.entropies[i], c.peak_ratio) for i in chosen), strict=True)
    rewards = list(group.rewards)
    for i, reward in zip(chosen, serr(peak, glob, c.r_max).tolist(), strict=True):
        rewards[i] += reward
    return replace(group, rewards=tuple(rewards), n_ranked=len(chosen))


def inject_replay(group: Group, buffer: ReplayBuffer, c: Config, rng: random.Random) -> Group:
    """CCR, lines 6 and 7: a collapsed group gets k stored responses of its query with the opposite verdict.

    A group that is mixed already, or whose query has none stored, stays as it is.
    """
    if not group.collapsed:
        return group
    found = buffer.recall(group.uid, group.collapsed == "none", c.replay_k, rng, group.prompt.kind)
    if c.replay_prompt == "group":
        found = [replace(a, prompt_ids=group.prompt.ids) for a in found]
    rewards = group.rewards + tuple(a.reward for a in found)
    return replace(group, responses=group.responses + tuple(found), rewards=rewards)


def reflection_prompt(problem: str, attempt: str, template: str) -> str:
    """ISR, line 3 (SPEC section 5): q (+) o_h (+) p_r as one user turn. Braces in problem and attempt mean nothing."""
    parts = {"{problem}": problem, "{attempt}": attempt}
    return re.sub(r"\{problem\}|\{attempt\}", lambda m: parts[m.group()], template)


def failure_excerpt(response_ids: Sequence[int], tokenizer, max_tokens: int) -> str:
    """What a reflection shows of a failure: its part after `</think>`, or all, of which the last `max_tokens`."""
    text = lm.decode(tokenizer, response_ids).rpartition("</think>")[2].strip()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= max_tokens else tokenizer.decode(ids[-max_tokens:]).strip()


# ---------------------------------------------------------------------------------------- 4. Advantage and loss


def group_advantages(rewards, alpha: float, lam: float) -> Tensor:
    """Advantages [n] of a group's rewards [n], statistics over all of them, injected ones included.

        A_i = (R_i - mean R) / (alpha std R + lambda)        (Eq. 3; alpha = 1 is Eq. 1)

    Population std (ddof 0). Equal rewards give exactly 0, not NaN: a std below 1e-6 counts as 0.
    """
    R = torch.as_tensor(rewards, dtype=torch.float64)
    std = R.std(correction=0)
    if std < 1e-6:
        return torch.zeros_like(R)
    return (R - R.mean()) / (alpha * std + lam)


def grpo_loss(logp, old_logp, ref_logp, A, weight, eps_low: float, eps_high: float, beta: float):
    """-J of Eq. 2 over N response tokens; all arguments [N], `ref_logp` None where beta is 0. Returns (loss, sums).

        r = pi_theta / pi_old
        J = sum_t weight_t (min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) - beta KL_k3(pi_theta || pi_ref))
        KL_k3 = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1

    `weight` holds the whole aggregation, one denominator for the optimiser step (`token_weight`).
    """
    r = torch.exp(logp - old_logp)
    clipped = torch.clamp(r, 1 - eps_low, 1 + eps_high)
    J = torch.minimum(r * A, clipped * A)
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
        J = J - beta * kl
    loss = -(weight * J).sum()
    sums = {"kl": kl.detach().sum(), "clip_fraction": (r * A > clipped * A).sum(), "ratio": r.detach()}
    return loss, sums


def token_weight(loss_agg: str, length: int, group: int, totals: tuple[float, float, float], max_new: int) -> float:
    """The weight of each token of a response of `length` tokens in a group of `group` responses.

    totals: (groups, responses, tokens) of the optimiser step over all ranks, zero-advantage groups included.
    """
    groups, responses, tokens = totals
    return {
        "sequence": 1 / (groups * group * length),  # Eq. 2
        "token": 1 / tokens,  # DAPO
        "constant": 1 / (responses * max_new),  # Dr. GRPO
    }[loss_agg]


@dataclass(frozen=True)
class Example:
    """One response as the loss sees it."""

    uid: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    A: float
    weight: float  # of each token
    old_logp: np.ndarray | None  # (L,); None: log-probs of the current policy, ratio 1
    replayed: bool


def training_examples(groups: Sequence[Group], ranks: Ranks, c: Config) -> list[Example]:
    """The responses that an optimiser step trains on: those of groups whose advantages are not all 0."""
    responses = [a for g in groups for a in g.responses]
    totals = ranks.sum([len(groups), len(responses), sum(len(a.response_ids) for a in responses)])
    rows = []
    for g in groups:
        replayed = len(g.responses) > g.n_fresh
        A = group_advantages(g.rewards, c.alpha if replayed else 1.0, c.lam)  # Eq. 3, Eq. 1
        if not A.any():
            continue
        for i, (a, A_i) in enumerate(zip(g.responses, A.tolist(), strict=True)):
            weight = token_weight(c.loss_agg, len(a.response_ids), len(g.responses), totals, c.max_new_tokens)
            old = a.logprobs if i >= g.n_fresh and not c.recompute_old_logp else None
            rows.append(Example(g.uid, a.prompt_ids, a.response_ids, A_i, weight, old, i >= g.n_fresh))
    return rows


# ------------------------------------------------------------------------------------------------ 5. Algorithm 1


def collect(run: Run, batch: list[Problem], epoch: int, step: int) -> tuple[list[Group], list[Group]]:
    """Lines 2 to 7: the groups to learn from, made informative; and all groups as they were sampled."""
    c = run.config
    queries = [Prompt(p, PLAIN, run.prompts[p.uid]) for p in batch]  # 2
    if c.reflect and epoch > 1:
        queries += reflections(run, batch, step)  # 3
    groups = sampled = rollout(run, queries, step)  # 4
    if c.dynamic_sampling:
        groups, sampled = resample(run, groups, step)
    if c.rank:
        groups = [rank_failures(g, c) for g in groups]  # 5
    if c.replay:
        groups = [inject_replay(g, run.buffer, c, rng(c, step, g.uid, g.prompt.kind)) for g in groups]  # 6, 7
    return groups, sampled


def rng(c: Config, *key) -> random.Random:
    """A random stream of its own for each place that needs one, so that a resumed run draws the same."""
    return random.Random(derive_seed(c.seed, *key))


def reflections(run: Run, batch: list[Problem], step: int) -> list[Prompt]:
    """Line 3: a reflection prompt for each hard query of the batch that has a stored failure."""
    c, found = run.config, []
    for p in batch:
        accuracy = run.buffer.accuracy(p.uid)
        failure = run.buffer.failure(p.uid, rng(c, step, p.uid, "failure"))
        if accuracy is not None and accuracy < c.tau and failure is not None:
            shown = failure_excerpt(failure.response_ids, run.tokenizer, c.reflection_tokens)
            text = reflection_prompt(p.problem, shown, c.reflection_template)
            prompt = lm.chat_prompt(run.tokenizer, text + c.prompt_suffix, c.system_prompt)
            if len(prompt) + c.max_new_tokens <= run.sampler.max_len:  # text encoded anew may be longer than it was
                found.append(Prompt(p, REFLECTION, prompt))
    return found


def rollout(run: Run, queries: list[Prompt], step: int) -> list[Group]:
    """Line 4: G fresh responses to each prompt, each verified while others are still being sampled."""
    c = run.config
    with run.signals.interruptible():
        graded = evaluation.sample_and_grade(
            run.sampler,
            run.verifier,
            lambda ids: lm.decode(run.tokenizer, ids),
            [q.ids for q in queries],
            [q.problem for q in queries],
            n=c.group_size,
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            seed=[derive_seed(c.seed, step, q.problem.uid, q.kind) for q in queries],
        )
    groups = []
    for query, answers in zip(queries, graded, strict=True):
        responses, entropies = [], []
        for s, correct in answers:
            reward = outcome_reward(correct, s.finished, len(s.response_ids), c)
            ids = query.ids, s.response_ids
            responses.append(Response(*ids, s.logprobs, correct, s.finished, reward, step, query.kind))
            entropies.append(s.entropies)
        rewards = tuple(a.reward for a in responses)
        groups.append(Group(query, tuple(responses), rewards, tuple(entropies), len(responses)))
    return groups


def resample(run: Run, groups: list[Group], step: int) -> tuple[list[Group], list[Group]]:
    """DAPO's dynamic sampling: mixed groups only, and as many other problems as are missing, for a few rounds.

    Returns the mixed groups and all that were sampled.
    """
    c, ranks = run.config, run.ranks
    (wanted,) = ranks.sum([len(groups)])
    pool = rng(c, step, "dynamic").sample(run.problems, len(run.problems))
    sampled, seen = list(groups), {p.uid for p in batch_of(run, step, all_ranks=True)}
    pool = [p for p in pool if p.uid not in seen]
    for _ in range(c.dynamic_rounds):
        (mixed,) = ranks.sum([sum(not g.collapsed for g in sampled)])
        more, pool = pool[: int(wanted - mixed)], pool[int(wanted - mixed) :]
        mine = [p for p in more if ranks.owns(p.uid)]
        sampled += rollout(run, [Prompt(p, PLAIN, run.prompts[p.uid]) for p in mine], step)
    return [g for g in sampled if not g.collapsed], sampled


def update(run: Run, groups: list[Group], step: int) -> dict[str, tuple[float, float]]:
    """Line 8: one optimiser step on Eq. 2 over all groups, or one for each of `minibatches` parts of them.

    Returns name -> (sum, weight) of this rank's metrics.
    """
    c = run.config
    for options in run.optimizer.param_groups:
        options["lr"] = c.lr * min(1.0, step / max(1, c.warmup_steps))
    parts = [training_examples(groups[m :: c.minibatches], run.ranks, c) for m in range(c.minibatches)]
    if c.minibatches > 1:  # the policy moves between the parts: pi_old is taken once, before the first step
        with run.signals.interruptible():
            parts = [with_old_logprobs(run, rows) for rows in parts]
    totals: dict[str, tuple[float, float]] = {}
    for rows in parts:
        for name, (value, weight) in optimise(run, rows).items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + weight)
    return totals | {"lr": (run.optimizer.param_groups[0]["lr"], 1.0)}


def optimise(run: Run, rows: list[Example]) -> dict[str, tuple[float, float]]:
    """One optimiser step on `rows` of this rank and those of the others; skipped if nothing is there or not finite."""
    c, parameters = run.config, [p for p in run.policy.parameters() if p.requires_grad]
    between = not run.checkpointable  # two optimiser steps of a batch: not to be interrupted
    with contextlib.nullcontext() if between else run.signals.interruptible():
        sums = gradients(run, rows)
    run.ranks.sum_gradients(parameters)
    (n_rows,) = run.ranks.sum([len(rows)])
    nothing = dict.fromkeys(("loss", "kl", "clip_fraction", "ratio_replayed", "grad_norm"), (0.0, 0.0))
    if not n_rows:  # nothing to learn from: no gradient, and no weight decay either
        return nothing | {"skipped": (1.0, 1.0)}
    norm = torch.nn.utils.clip_grad_norm_(parameters, c.grad_clip)
    (loss,) = run.ranks.sum([sums[0].item()])
    finite = math.isfinite(loss) and math.isfinite(norm.item())
    run.bad_steps = 0 if finite else run.bad_steps + 1
    if not finite:
        uids = ", ".join(sorted({r.uid for r in rows}))
        print(f"\nloss {loss}, gradient norm {norm.item()}: step skipped; its queries: {uids}", file=sys.stderr)
        if run.bad_steps >= 10:
            raise UserError(f"lr = {c.lr}: ten steps in a row had no finite loss and gradient; try a smaller one")
        return nothing | {"skipped": (1.0, 1.0)}
    run.checkpointable = False
    run.optimizer.step()
    _, kl, clipped, ratio, replayed = sums.tolist()
    tokens = sum(len(r.response_ids) for r in rows)
    return {
        "loss": (loss, 1.0),
        "kl": (kl, tokens),
        "clip_fraction": (clipped, tokens),
        "ratio_replayed": (ratio, replayed),
        "grad_norm": (norm.item(), 1.0),
        "skipped": (0.0, 1.0),
    }


def gradients(run: Run, rows: list[Example]) -> Tensor:
    """The gradient of the loss over `rows`, in the parameters' `.grad`; returns its sums [5] as `backward` does.

    Out of memory: all anew with half the token budget, for the pass that failed has added a part of its gradient.
    """
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rows]
    for token_budget in (run.config.token_budget, run.config.token_budget // 2):
        run.optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(5, dtype=torch.float64, device=run.ranks.device)
        try:
            for batch in lm.micro_batches(lengths, token_budget):
                sums += backward(run, [rows[i] for i in batch])
            return sums
        except torch.OutOfMemoryError:
            print(f"\nout of memory in a micro-batch of at most {token_budget} tokens", file=sys.stderr)
        machine.free_memory(run.ranks.device)
    raise UserError(
        f"token_budget = {run.config.token_budget}: out of memory, with half of it too; allowed: a smaller "
        "token_budget, max_new_tokens or slots, or gradient_checkpointing = true"
    )


def backward(run: Run, rows: list[Example]) -> Tensor:
    """Adds a micro-batch's gradient; returns sums [5]: loss, KL, clipped tokens, ratio and tokens of replayed ones."""
    c, device = run.config, run.ranks.device
    lengths = torch.tensor([len(r.response_ids) for r in rows], device=device)

    def per_token(values: list[float]) -> Tensor:  # [rows] -> [N]
        return torch.tensor(values, device=device).repeat_interleave(lengths)

    none = np.float32(np.nan)
    given = [np.full(len(r.response_ids), none) if r.old_logp is None else r.old_logp for r in rows]
    given = torch.from_numpy(np.concatenate(given)).to(device)
    logp = logprobs(run, run.policy, rows)  # (N,)
    old_logp = torch.where(given.isnan(), logp.detach(), given)
    ref_logp = None
    if run.reference is not None:
        with torch.no_grad():
            ref_logp = logprobs(run, run.reference, rows)
    A, weight = per_token([r.A for r in rows]), per_token([r.weight for r in rows])
    loss, sums = grpo_loss(logp, old_logp, ref_logp, A, weight, c.eps_low, c.eps_high, c.beta)
    loss.backward()
    replayed = per_token([float(r.replayed) for r in rows])
    ratio = torch.where(replayed > 0, sums["ratio"], 0.0).sum()
    return torch.stack([loss.detach(), sums["kl"], sums["clip_fraction"], ratio, replayed.sum()]).double()


def logprobs(run: Run, model, rows: list[Example]) -> Tensor:
    """log pi of all response tokens of `rows`, [N] fp32, at the sampling temperature."""
    with machine.autocast(run.ranks.device, run.config.dtype):
        return lm.token_logprobs(model, [(r.prompt_ids, r.response_ids) for r in rows], run.config.temperature)[0]


@torch.no_grad()
def with_old_logprobs(run: Run, rows: list[Example]) -> list[Example]:
    """The rows with pi_old of the current policy where none was recorded."""
    out = list(rows)
    for batch in lm.micro_batches([len(r.prompt_ids) + len(r.response_ids) for r in rows], run.config.token_budget):
        logp = logprobs(run, run.policy, [rows[i] for i in batch]).cpu().numpy()
        pieces = np.split(logp, np.cumsum([len(rows[i].response_ids) for i in batch])[:-1])
        for i, old in zip(batch, pieces, strict=True):
            out[i] = replace(rows[i], old_logp=old) if rows[i].old_logp is None else rows[i]
    return out


def train(config: Config) -> None:
    """Algorithm 1 from the base model to the last evaluation; resumes where the newest checkpoint ends."""
    with contextlib.ExitStack() as stack:
        run = set_up(config, stack)
        stack.enter_context(run.signals.saving(lambda: save(run)))
        bar = stack.enter_context(tqdm(total=run.steps, initial=run.step, unit="step", disable=not run.ranks.main))
        while True:
            if evaluation_due(run):
                evaluate(run)
            if run.step == run.steps:
                break
            step, epoch = run.step + 1, run.step // run.steps_an_epoch + 1  # 1
            start = time.perf_counter()
            run.sampler.load(run.policy)
            groups, sampled = collect(run, batch_of(run, step), epoch, step)  # 2-7
            middle = time.perf_counter()
            learning = update(run, groups, step)  # 8
            run.checkpointable = False
            for g in sampled:
                run.buffer.add(g.uid, g.responses)  # 9
            run.step = step
            log_step(run, bar, epoch, groups, sampled, learning, (middle - start, time.perf_counter() - middle))
            run.checkpointable = True
            if step == run.steps or step % config.save_every == 0:
                save(run)
        bar.close()
        if run.ranks.main:
            print_result(run)


def batch_of(run: Run, step: int, all_ranks: bool = False) -> list[Problem]:
    """D_b of this step, this rank's part: each epoch is a new permutation without its incomplete last batch."""
    epoch, i = divmod(step - 1, run.steps_an_epoch)
    order = rng(run.config, "epoch", epoch).sample(run.problems, len(run.problems))
    batch = order[i * run.config.batch_size :][: run.config.batch_size]
    return [p for p in batch if all_ranks or run.ranks.owns(p.uid)]


def main(argv: Sequence[str]) -> None:
    try:
        train(settings.parse(Config, argv))
    except torch.OutOfMemoryError as error:
        helps = "a smaller token_budget, slots or max_new_tokens, or gradient_checkpointing = true"
        raise UserError(f"{str(error).splitlines()[0]} What helps: {helps}") from error


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
