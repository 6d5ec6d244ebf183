"""r3.py: R³, reinforcement learning with Replay, Reflection and Ranking rewards (arXiv 2601.19620), in one file.

    python r3.py --config configs/tiny.yaml                                    # two CPU cores, minutes
    python r3.py --config configs/r3_1.5b.yaml --run_dir=runs/first            # one GPU
    torchrun --nproc-per-node 8 r3.py --config configs/r3_7b.yaml --resume     # eight

Algorithm 1. These line numbers stand in the margin of the code, in README.md and in ALGORITHM.md.

     1  for epoch = 1..E, batch D_b of queries q:
     2      one plain prompt for each q
     3      if epoch > 1: for each q with mean past accuracy < tau and a stored failure o_h:
                add the prompt q (+) o_h (+) p_r                               ISR, in-context self-reflection
     4      sample a group G of responses to each prompt from pi_theta, verify each
     5      all wrong:    truncated responses earn the ranking reward          SERR, structural entropy ranking
     6                    G <- G u k stored successes of q                     CCR, cross-context replay
     7      all correct:  G <- G u k stored failures of q                      CCR
     8      one optimiser step on the objective (Eq. 2) with the advantages of Eq. 1 and Eq. 3
     9      S <- S u the fresh responses

Symbols: q query, uid its name · o_i response · G group (G_mix with replayed responses) · L tokens of a response ·
R reward · A advantage · H entropy in nats · S buffer · tau, k, p, alpha, lambda, eps, beta: see Config ·
pi_theta policy, pi_old the policy before the step, or the one that sampled · pi_ref reference.

ALGORITHM.md has the reasons and the life of a response, README.md the departures from the paper. Line 9 follows line 8,
so that an interrupted step changes nothing.
"""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eval import sample_and_grade
from replay import PLAIN, REFLECTION, ReplayBuffer, Response
from rollout import Sample
from runtime import config as settings
from runtime import model as lm
from runtime.config import bounded, one_of, path
from runtime.errors import UserError, exit_cleanly
from runtime.optimizer import equal_batches, optimizer_step
from runtime.problems import Problem
from runtime.ranks import Ranks
from runtime.run import Run, interruptible, log_step, start, timed
from sampling.gumbel import derive_seed

# --------------------------------------------------------------------------------------------------- Configuration


@dataclass(frozen=True)
class Config:
    """Every number of a run. The comment gives symbol, meaning, unit and the paper's value where it gives one."""

    # what is trained, and where
    model: str = path("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")  # folder or hub name (the paper's small model)
    data: str = path("agentica-org/DeepScaleR-Preview-Dataset")  # JSONL, parquet or hub name (the paper's set)
    data_split: str = "train"  # split of a hub data set
    data_limit: int | None = bounded(None, low=1)  # only the first so many problems
    problem_field: str = "problem"  # field of the problem; a dotted path reaches into nested fields
    answer_field: str = "answer"  # field of the reference answer
    uid_field: str = "uid"  # field of the query's name
    eval_data: str = path("")  # JSONL, parquet or hub name; empty: no evaluation
    eval_split: str = "test"  # split of a hub data set
    prompt_suffix: str = (  # text after each problem
        " Let's think step by step and output the final answer within \\boxed{}."
    )
    system_prompt: str = ""  # system turn; empty: none
    run_dir: str = path("")  # default: runs/NAME of the config file NAME.yaml
    seed: int = bounded(0, low=0)  # of the order of the data and of every random draw
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = one_of("auto", "float32", "bfloat16")  # of each forward pass; master weights are fp32
    trust_remote_code: bool = False  # run code that the model's folder brings
    check_answers: str = one_of("drop", "refuse", "off")  # reference answers that do not grade themselves as correct

    # the loop
    steps: int | None = bounded(None, low=1)  # optimiser batches; ends the run before `epochs` do
    epochs: int = bounded(3, low=1)  # E, passes over the data
    batch_size: int = bounded(128, low=1)  # |D_b|, queries per step
    group_size: int = bounded(8, low=2)  # G, responses per prompt
    max_prompt_tokens: int = bounded(1024, low=1)  # plain prompts; longer ones are left out and counted
    max_new_tokens: int = bounded(8192, low=1)  # response budget (paper: 8K in training)
    temperature: float = bounded(1.0, low=1e-6, high=10**6)  # of sampling, and of every log-prob and entropy
    top_p: float = 1.0  # 1: anything else is refused in training, for the ratio would compare two distributions
    top_k: int = 0  # 0: anything else is refused in training
    slots: int | None = bounded(None, low=1)  # responses sampled at once (max_num_seqs); null: as many as memory holds
    dynamic_sampling: bool = False  # DAPO: drop collapsed groups and sample other problems in their place ...
    dynamic_rounds: int = bounded(3, low=1)  # ... at most so many times per step

    # advantages and the optimiser
    lr: float = bounded(1e-6, above=0)  # learning rate of AdamW
    warmup_steps: int = bounded(0, low=0)  # linear warm-up of lr
    weight_decay: float = bounded(0.0, low=0)  # of AdamW
    grad_clip: float = bounded(1.0, above=0)  # largest gradient norm
    beta: float = bounded(0.001, low=0)  # KL weight in Eq. 2; 0: no reference model is loaded
    tis_cap: float = bounded(2.0, above=1)  # largest weight pi_old / pi_sampler of a token (Yao et al. 2025)
    eps_low: float = bounded(0.2, low=0, below=1)  # eps in Eq. 2, below 1
    eps_high: float = bounded(0.28, low=0)  # eps in Eq. 2, above 1 (clip-higher)
    dual_clip: float = bounded(3.0, above=1)  # largest ratio of a token with A < 0 (Ye et al. 2020)
    advantage_std: bool = True  # divide advantages by the std of the group; false: Dr. GRPO
    loss_agg: str = one_of("sequence", "token", "constant")  # mean over tokens by Eq. 2, DAPO, Dr. GRPO
    minibatches: int = bounded(1, low=1)  # optimiser steps per batch
    token_budget: int = bounded(16384, low=1)  # tokens per forward and backward pass
    gradient_checkpointing: bool = False  # recompute activations in the backward pass

    # rewards
    length_reward: float = bounded(1.0, low=0)  # w_len in R = 1 + w_len max(0, 1 - L / L_max) of a correct response
    length_max: int = bounded(32768, low=1)  # L_max (paper: 32,768)
    overlong_tokens: int = bounded(0, low=0)  # DAPO: soft penalty over the last so many tokens of the budget; 0: none

    # CCR, cross-context replay
    replay: bool = True  # CCR is on
    replay_k: int = bounded(2, low=1)  # k, replayed responses per collapsed group
    alpha: float = bounded(1.0, above=0)  # alpha in Eq. 3, factor of the std where responses were replayed
    lam: float = bounded(1e-4, above=0)  # lambda in Eq. 1 and 3
    replay_logp: str = one_of("behaviour", "current")  # pi_old of replayed responses: as recorded, or recomputed
    replay_prompt: str = one_of("own", "group")  # the prompt that a replayed response is trained under
    replay_order: str = one_of("random", "newest")  # which stored responses come first, after those of the same kind
    buffer_per_query: int = bounded(8, low=1)  # stored successes per query, and as many failures
    buffer_tokens: int = bounded(4_000_000_000, low=1)  # stored on all ranks, prompts included; 8 bytes each

    # ISR, in-context self-reflection
    reflect: bool = True  # ISR is on
    tau: float = bounded(0.25, low=0, high=1)  # a query is hard if its mean past accuracy is below it
    min_history: int = bounded(8, low=1)  # verdicts before a query can count as hard
    reflect_share: float = bounded(1.0, above=0, high=1)  # at most so many reflection prompts, of a rank's batch
    reflection_tokens: int = bounded(1024, low=1)  # of the failed response that the prompt shows, cut at the front
    reflection_template: str = (  # q (+) o_h (+) p_r
        "{problem}\n\nHere is an earlier attempt at this problem. Its answer is wrong.\n\n<attempt>\n{attempt}\n"
        "</attempt>\n\nFind the first mistake in it and say why it is one. Then solve the problem again from the start."
    )

    # SERR, structural entropy ranking rewards
    rank: bool = True  # SERR is on
    rank_on: str = one_of("truncated", "failed")  # responses of an all-wrong group that are ranked
    rank_rewards: str = one_of("centred", "published", "all_truncated")  # less their mean; added; only if none finished
    peak_ratio: float = bounded(0.2, above=0, high=1)  # p, share of the tokens in E_peak
    r_max: float = bounded(0.5, low=0, below=1)  # R_max, reward of the best rank; no failure beats a success

    # checkpoints, evaluation, logs
    save_every: int = bounded(50, low=1)  # steps between checkpoints
    save_dtype: str = one_of("float32", "bfloat16")  # of the exported weights; a resume is exact with either
    checkpoints_kept: int = bounded(2, low=1)  # newest ones
    keep_best: bool = False  # and the one with the best held-out pass@1 of all evaluations: checkpoints/best
    resume: bool = False  # go on from the newest checkpoint in run_dir
    override_config: bool = False  # resume although the config differs from the run's
    grace_seconds: float = bounded(60.0, above=0)  # from SIGTERM to the end of the process
    rank_timeout: float = bounded(60.0, above=0)  # seconds without a sign of life until a rank counts as dead
    eval_every: int = bounded(50, low=1)  # steps between evaluations
    eval_n: int = bounded(16, low=1)  # N, samples per problem (paper: 16)
    eval_temperature: float = bounded(0.6, low=1e-6, high=10**6, also=0)  # 0: greedy
    eval_top_p: float = bounded(0.95, low=1e-6, high=1)  # nucleus
    eval_at_start: bool = True  # evaluate the base model
    eval_at_end: bool = True  # evaluate after the last step
    eval_limit: int | None = bounded(None, low=1)  # only the first so many problems
    log_samples: int = bounded(8, low=0)  # groups per step in samples.jsonl
    tensorboard: bool = False  # write TensorBoard files too
    wandb: bool = False  # log to Weights & Biases too

    def __post_init__(self):
        if self.top_p != 1 or self.top_k != 0:
            raise UserError(
                f"top_p = {self.top_p}, top_k = {self.top_k}, allowed in training: 1 and 0, for the ratio would "
                "compare two distributions; eval_top_p is for evaluation"
            )
        at_most = {"minibatches": "batch_size", "replay_k": "buffer_per_query", "min_history": "history"}
        for key, limit in at_most.items():
            if getattr(self, key) > getattr(self, limit):
                name = limit.replace("history", "4 group_size")
                raise UserError(f"{key} = {getattr(self, key)}, allowed: at most {name} = {getattr(self, limit)}")
        if self.overlong_tokens >= self.max_new_tokens:
            allowed = f"below max_new_tokens = {self.max_new_tokens}"
            raise UserError(f"overlong_tokens = {self.overlong_tokens}, allowed: {allowed}")
        if self.dynamic_sampling and (self.replay or self.rank):
            found = " and ".join(f"{key} = true" for key in ("replay", "rank") if getattr(self, key))
            raise UserError(
                f"dynamic_sampling = true with {found}, allowed: replay = false and rank = false, for it drops the "
                "groups that replay and ranking work on"
            )
        for place in ("{problem}", "{attempt}"):
            if place not in self.reflection_template:
                raise UserError(f"reflection_template: found no {place}, allowed: text with {{problem}}, {{attempt}}")

    @property
    def history(self) -> int:
        """Verdicts that a query is remembered by: those of its last four groups."""
        return 4 * self.group_size

    @property
    def recompute_old_logp(self) -> bool:
        """pi_old of a replayed response is recomputed: always so where it is trained under another prompt."""
        return self.replay_logp == "current" or self.replay_prompt == "group"


# --------------------------------------------------------------------------------------------------------- Rewards


def outcome_reward(correct: bool, finished: bool, length: int, c: Config) -> float:
    """R = 1 + w_len max(0, 1 - L/L_max) if correct and finished, else 0; less DAPO's overlong penalty.

    length: L in tokens, EOS included. The penalty falls from 0 to -1 over the last `overlong_tokens` of the budget.
    """
    reward = 1.0 + c.length_reward * max(0.0, 1 - length / c.length_max) if correct and finished else 0.0
    over = length - (c.max_new_tokens - c.overlong_tokens)
    return reward - (min(1.0, over / c.overlong_tokens) if c.overlong_tokens and over > 0 else 0.0)


def peak_and_global(entropies: np.ndarray, peak_ratio: float) -> tuple[float, float]:
    """E_peak, the mean of the max(1, floor(p L)) largest token entropies, and E_glob, the mean of all L (nats)."""
    H, L = np.sort(np.asarray(entropies, dtype=np.float64))[::-1], len(entropies)
    k = max(1, math.floor(peak_ratio * L))
    return float(H[:k].mean()), float(H.mean())


def serr(peak, glob, r_max: float) -> Tensor:
    """SERR (line 5): ranking rewards [N] of N failures from E_peak [N] and E_glob [N].

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


# ---------------------------------------------------------------------------------------------- Informative groups


@dataclass(frozen=True)
class Prompt:
    """One prompt of this step: a query's problem in plain form, or with a past failure to reflect on."""

    problem: Problem
    kind: str  # PLAIN or REFLECTION
    ids: list[int]


@dataclass(frozen=True)
class Group:
    """The responses to one prompt and their rewards: the fresh ones first, then the replayed ones (G_mix)."""

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
    def n_correct(self) -> int:
        """Correct fresh responses: the verifier's verdict, before any shaping of rewards."""
        return sum(response.correct for response in self.responses[: self.n_fresh])

    @property
    def all_wrong(self) -> bool:
        return self.n_correct == 0

    @property
    def all_correct(self) -> bool:
        return self.n_correct == self.n_fresh

    @property
    def collapsed(self) -> bool:
        return self.all_wrong or self.all_correct

    def advantages(self, c: Config) -> list[np.ndarray]:
        """A of each token, (L,) for each response: Eq. 3 over G_mix where responses were replayed, else Eq. 1."""
        alpha = c.alpha if len(self.responses) > self.n_fresh else 1.0
        A = group_advantages(self.rewards, alpha, c.lam, c.advantage_std).tolist()
        return [np.full(len(r.response_ids), A_i, np.float32) for r, A_i in zip(self.responses, A, strict=True)]

    def old_logp(self, i: int, c: Config) -> np.ndarray | None:
        """pi_old of response i, (L,): as recorded if it was replayed; None or NaN: the policy before the step."""
        return self.responses[i].logprobs if i >= self.n_fresh and not c.recompute_old_logp else None


def rank_failures(group: Group, c: Config) -> Group:
    """SERR, line 5: truncated (or all failed) responses of an all-wrong group are rewarded by their entropy's shape.

    `rank_rewards`: `published` adds the ranking reward, `centred` adds it less its mean R_max / 2, `all_truncated` adds
    it where no response finished. A group with fewer than two of them stays as it is: one response has no rank.
    """
    finished = [r.finished for r in group.responses[: group.n_fresh]]
    ranked = [i for i, ended in enumerate(finished) if c.rank_on == "failed" or not ended]
    if not group.all_wrong or len(ranked) < 2 or (c.rank_rewards == "all_truncated" and any(finished)):
        return group
    peak, glob = zip(*(peak_and_global(group.entropies[i], c.peak_ratio) for i in ranked), strict=True)
    rewards, mean = list(group.rewards), c.r_max / 2 if c.rank_rewards == "centred" else 0.0
    for i, reward in zip(ranked, serr(peak, glob, c.r_max).tolist(), strict=True):
        rewards[i] += reward - mean
    return replace(group, rewards=tuple(rewards), n_ranked=len(ranked))


def inject_replay(group: Group, buffer: ReplayBuffer, c: Config, rng: random.Random) -> Group:
    """CCR, lines 6 and 7: an all-wrong group gets k stored successes of its query, an all-correct one k failures.

    A mixed group stays as it is, and so does one whose query has nothing stored with the opposite verdict.
    """
    if not group.collapsed:
        return group
    newest = c.replay_order == "newest"
    found = buffer.recall(group.uid, group.all_wrong, c.replay_k, rng, group.prompt.kind, newest)
    if c.replay_prompt == "group":
        found = [replace(response, prompt_ids=group.prompt.ids) for response in found]
    rewards = group.rewards + tuple(response.reward for response in found)
    return replace(group, responses=group.responses + tuple(found), rewards=rewards)


def reflection_prompt(problem: str, attempt: str, template: str) -> str:
    """ISR, line 3: q (+) o_h (+) p_r as one user turn. Braces in the problem and in the failed response are text."""
    parts = {"{problem}": problem, "{attempt}": attempt}
    return re.sub(r"\{problem\}|\{attempt\}", lambda m: parts[m.group()], template)


def failure_excerpt(response_ids: Sequence[int], tokenizer, max_tokens: int) -> str:
    """What a reflection prompt shows of a failure: its text after `</think>`, or all; the last `max_tokens` of it."""
    text = lm.decode(tokenizer, response_ids).rpartition("</think>")[2].strip()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= max_tokens else tokenizer.decode(ids[-max_tokens:]).strip()


# --------------------------------------------------------------------------------------------- Advantage and loss


def group_advantages(rewards, alpha: float, lam: float, std: bool = True) -> Tensor:
    """Advantages [n] of a group's rewards [n], statistics over all of them, replayed ones included.

        A_i = (R_i - mean R) / (alpha std R + lambda)        (Eq. 3; alpha = 1 is Eq. 1)
        A_i = R_i - mean R                                   (std = False: Dr. GRPO)

    Population std (ddof 0). Equal rewards give exactly 0, not NaN: a std below 1e-6 counts as 0.
    """
    R = torch.as_tensor(rewards, dtype=torch.float64)
    sigma = R.std(correction=0)
    if sigma < 1e-6:
        return torch.zeros_like(R)
    return (R - R.mean()) / (alpha * sigma + lam) if std else R - R.mean()


MAX_LOG_RATIO = 20.0  # nats: e^20 is finite in fp32, and so is the loss of a token that the policy has left behind


def grpo_loss(logp, old_logp, ref_logp, A, weight, eps_low: float, eps_high: float, beta: float, dual_clip=math.inf):
    """-J of Eq. 2 over N response tokens; all arguments [N], `ref_logp` None where beta is 0. Returns (loss, sums).

        r = pi_theta / pi_old
        J = sum_t weight_t (min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) - beta KL_k3(pi_theta || pi_ref))
        KL_k3 = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1

    Where A < 0, r counts as `dual_clip` at most (Ye et al. 2020, Eq. 5). Log-ratios stay within +-MAX_LOG_RATIO; a
    token beyond either bound has no gradient. `weight` holds the aggregation: one denominator per optimiser step.
    """
    r = torch.exp(torch.clamp(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = torch.clamp(r, 1 - eps_low, 1 + eps_high)
    J = torch.minimum(r * A, clipped * A)
    J = torch.where(A < 0, torch.maximum(J, dual_clip * A), J) if dual_clip < math.inf else J
    kl = torch.zeros_like(logp)
    if ref_logp is not None:
        log_ratio = torch.clamp(ref_logp - logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = torch.exp(log_ratio) - log_ratio - 1
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
    A: np.ndarray  # (L,)
    weight: float  # of each token
    sampled_logp: np.ndarray  # (L,), as the sampler recorded it
    old_logp: np.ndarray | None  # pi_old, (L,); None or NaN: the policy itself before the step, ratio 1
    replayed: bool


def training_examples(groups: Sequence[Group], ranks: Ranks, c: Config) -> list[Example]:
    """The responses of an optimiser step: all responses of the groups whose advantages are not all 0.

    pi_old of a fresh response is the policy before the step, of a replayed one what was recorded when it was sampled.
    """
    lengths = [len(response.response_ids) for g in groups for response in g.responses]
    totals = ranks.sum([len(groups), len(lengths), sum(lengths)])
    examples = []
    for g in groups:
        A = g.advantages(c)
        if not any(A_i.any() for A_i in A):
            continue
        for i, (response, A_i) in enumerate(zip(g.responses, A, strict=True)):
            ids = response.response_ids
            weight = token_weight(c.loss_agg, len(ids), len(g.responses), totals, c.max_new_tokens)
            scored = (A_i, weight, response.logprobs, g.old_logp(i, c), i >= g.n_fresh)
            examples.append(Example(g.uid, response.prompt_ids, ids, *scored))
    return examples


# ----------------------------------------------------------------------------------------------------- Algorithm 1


@timed
def collect(run: Run, batch: list[Problem], epoch: int, step: int) -> tuple[list[Group], list[Group]]:
    """Lines 2 to 7: the groups to learn from, made informative; and all groups as they were sampled."""
    c = run.config
    run.sampler.load(run.policy)
    prompts = [Prompt(problem, PLAIN, run.prompts[problem.uid]) for problem in batch]  # 2
    if c.reflect and epoch > 1:
        prompts += reflections(run, batch, step)  # 3
    groups = sampled = rollout(run, prompts, step)  # 4
    if c.dynamic_sampling:
        groups, sampled = resample(run, groups, step)
    if c.rank:
        groups = [rank_failures(g, c) for g in groups]  # 5
    if c.replay:
        groups = [inject_replay(g, run.buffer, c, rng(c, step, g.uid, g.prompt.kind)) for g in groups]  # 6, 7
    return groups, sampled


def rng(c: Config, *key) -> random.Random:
    """A random generator of its own for each place that needs one, so that a resumed run draws the same numbers."""
    return random.Random(derive_seed(c.seed, *key))


def reflections(run: Run, batch: list[Problem], step: int) -> list[Prompt]:
    """Line 3: a reflection prompt for each hard query of the batch that has a stored failure.

    At most `reflect_share` of the batch, and at least one: lowest accuracy first, then longest without a success.
    """
    c, found = run.config, []
    for problem in batch:
        accuracy = run.buffer.accuracy(problem.uid)
        failure = run.buffer.failure(problem.uid, rng(c, step, problem.uid, "failure"))
        if accuracy is not None and accuracy < c.tau and failure is not None:
            shown = failure_excerpt(failure.response_ids, run.tokenizer, c.reflection_tokens)
            text = reflection_prompt(problem.problem, shown, c.reflection_template)
            ids = lm.chat_prompt(run.tokenizer, text + c.prompt_suffix, c.system_prompt)
            if len(ids) + c.max_new_tokens <= run.sampler.max_len:  # an excerpt that is encoded anew may be longer
                found.append(Prompt(problem, REFLECTION, ids))
    uids = sorted((p.problem.uid for p in found), key=lambda uid: (run.buffer.accuracy(uid), run.buffer.solved(uid)))
    hardest = uids[: max(1, int(c.reflect_share * len(batch)))]
    return [prompt for prompt in found if prompt.problem.uid in hardest]


@interruptible
def rollout(run: Run, prompts: list[Prompt], step: int) -> list[Group]:
    """Line 4: G fresh responses to each prompt, each verified while others are still being sampled."""
    c = run.config
    graded = sample_and_grade(
        run.sampler,
        run.verifier,
        partial(lm.decode, run.tokenizer),
        [prompt.ids for prompt in prompts],
        [prompt.problem for prompt in prompts],
        n=c.group_size,
        max_new_tokens=c.max_new_tokens,
        temperature=c.temperature,
        seed=[derive_seed(c.seed, step, prompt.problem.uid, prompt.kind) for prompt in prompts],
    )
    return [group_of(prompt, answers, step, c) for prompt, answers in zip(prompts, graded, strict=True)]


def group_of(prompt: Prompt, answers: Sequence[tuple[Sample, bool]], step: int, c: Config) -> Group:
    """The samples of one prompt and the verdict on each, with their outcome rewards."""
    responses = []
    for s, correct in answers:
        reward = outcome_reward(correct, s.finished, len(s.response_ids), c)
        verified = (correct, s.finished, reward, step, prompt.kind)
        responses.append(Response(prompt.ids, s.response_ids, s.logprobs, *verified))
    rewards, entropies = tuple(r.reward for r in responses), tuple(s.entropies for s, _ in answers)
    return Group(prompt, tuple(responses), rewards, entropies, n_fresh=len(responses))


def resample(run: Run, groups: list[Group], step: int) -> tuple[list[Group], list[Group]]:
    """DAPO's dynamic sampling: mixed groups only, and as many other problems as are missing, for a few rounds.

    Returns the mixed groups and all that were sampled.
    """
    sampled, seen = list(groups), {g.uid for g in groups}
    pool = rng(run.config, step, "dynamic").sample(run.problems, len(run.problems))
    pool = [problem for problem in pool if problem.uid not in seen]
    for _ in range(run.config.dynamic_rounds):
        missing = len(groups) - sum(not g.collapsed for g in sampled)
        more, pool = pool[:missing], pool[missing:]
        sampled += rollout(run, [Prompt(problem, PLAIN, run.prompts[problem.uid]) for problem in more], step)
    return [g for g in sampled if not g.collapsed], sampled


@timed
def update(run: Run, groups: list[Group], step: int) -> dict[str, tuple[float, float]]:
    """Line 8: one optimiser step on Eq. 2 over all groups, or one for each of `minibatches` parts of them.

    Returns name -> (sum, weight) of this rank's metrics.
    """
    c = run.config
    for options in run.optimizer.param_groups:
        options["lr"] = c.lr * min(1.0, step / max(1, c.warmup_steps))
    parts = [training_examples(groups[m :: c.minibatches], run.ranks, c) for m in range(c.minibatches)]
    if c.minibatches > 1:  # the policy moves between the parts: pi_old is taken once, before the first step
        parts = [with_old_logprobs(run, examples) for examples in parts]
    steps = [optimizer_step(run, examples, partial(add_gradient, run)) for examples in parts]
    run.optimizer.zero_grad(set_to_none=True)  # their memory is the sampler's until the next step
    totals = {name: tuple(map(sum, zip(*(s[name] for s in steps), strict=True))) for name in steps[0]}
    return totals | {"lr": (run.optimizer.param_groups[0]["lr"], 1.0)}


def add_gradient(run: Run, examples: list[Example]) -> dict[str, tuple[Tensor, float]]:
    """Adds the gradient of one micro-batch to the parameters' `.grad`. Returns name -> (sum, weight) of its metrics."""
    c, device, lengths = run.config, run.ranks.device, [len(e.response_ids) for e in examples]

    def per_token(values, dtype=np.float32) -> Tensor:  # one value per example -> [N]
        return torch.from_numpy(np.repeat(np.array(values, dtype), lengths)).to(device, non_blocking=True)

    def joined(values: list[np.ndarray]) -> Tensor:  # (L,) of each example -> [N]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *values])).to(device, non_blocking=True)

    unknown = [np.full(L, np.nan, np.float32) for L in lengths]
    given = joined([u if e.old_logp is None else e.old_logp for e, u in zip(examples, unknown, strict=True)])
    logp = logprobs(run, run.policy, examples)  # (N,)
    old_logp = torch.where(given.isnan(), logp.detach(), given)
    ref_logp = None
    if run.reference is not None:
        with torch.no_grad():
            ref_logp = logprobs(run, run.reference, examples)
    A, sampled_logp = (joined([getattr(e, x) for e in examples]) for x in ("A", "sampled_logp"))
    weight, replayed = (per_token([getattr(e, x) for e in examples]) for x in ("weight", "replayed"))
    gap = torch.where(replayed > 0, 0.0, old_logp - sampled_logp)
    tis = torch.exp(gap).clamp(max=c.tis_cap)  # pi_old / pi_sampler: what their numerics differ by
    loss, sums = grpo_loss(logp, old_logp, ref_logp, tis * A, weight, c.eps_low, c.eps_high, c.beta, c.dual_clip)
    loss.backward()
    N, n_replayed = len(logp), sum(L for e, L in zip(examples, lengths, strict=True) if e.replayed)
    return {
        "loss": (loss.detach(), 1),
        "kl": (sums["kl"], N),
        "clip_fraction": (sums["clip_fraction"], N),
        "ratio_replayed": (torch.where(replayed > 0, sums["ratio"], 0.0).sum(), n_replayed),
        "logp_gap": (gap.abs().sum(), N - n_replayed),
        "logp_gap_max": (torch.nn.functional.pad(gap.abs(), (0, 1)).amax(), 1),
    }


def logprobs(run: Run, model, examples: list[Example]) -> Tensor:
    """log pi of all response tokens of `examples`, [N] fp32, at the sampling temperature."""
    return lm.token_logprobs(model, [(e.prompt_ids, e.response_ids) for e in examples], run.config.temperature)[0]


@interruptible(collective=True)
@torch.no_grad()
def with_old_logprobs(run: Run, examples: list[Example]) -> list[Example]:
    """The examples with pi_old of the current policy where none was recorded."""
    out, lengths = list(examples), [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    for batch in equal_batches(run.ranks, lengths, run.config.token_budget):
        logp = logprobs(run, run.policy, [examples[i] for i in batch]).cpu().numpy()
        ends = np.cumsum([len(examples[i].response_ids) for i in batch], dtype=int)
        for i, old_logp in zip(batch, np.split(logp, ends[:-1]), strict=False):  # nothing for an empty micro-batch
            given = np.nan if out[i].old_logp is None else out[i].old_logp
            out[i] = replace(out[i], old_logp=np.where(np.isnan(given), old_logp, given))
    return out


def train(config: Config) -> None:
    """Algorithm 1 from the base model to the last evaluation; resumes where the newest checkpoint ends."""
    with start(config) as run:
        for step, epoch in run.steps_left():  # 1; evaluates and saves when it is due
            groups, sampled = collect(run, batch_of(run, step), epoch, step)  # 2-7
            learning = update(run, groups, step)  # 8
            with run.finishing(step):
                for g in sampled:
                    run.buffer.add(g.uid, g.responses)  # 9
                log_step(run, epoch, groups, sampled, learning)


def batch_of(run: Run, step: int) -> list[Problem]:
    """D_b of this step, this rank's part: each epoch is a new permutation without its incomplete last batch.

    With several ranks each batch has one query of each length class of the rank, so that none waits for another long.
    """
    c, steps, size = run.config, run.steps_per_epoch, run.config.batch_size // run.ranks.size
    epoch, i = divmod(step - 1, steps)
    order = rng(c, "epoch", epoch).sample(run.problems, len(run.problems))
    if run.ranks.size == 1:
        return order[i * size :][:size]
    order = sorted(order[: steps * size], key=lambda p: run.buffer.length(p.uid, before=epoch * steps + 1) or 0)
    return [rng(c, "class", epoch, k).sample(order[k * steps :][:steps], steps)[i] for k in range(size)]


def main(argv: Sequence[str]) -> None:
    train(settings.parse(Config, argv))


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
