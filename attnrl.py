"""attnrl.py: AttnRL, "Attention as a Compass": rollouts branch at steps that later steps attend to, in one file.

    python attnrl.py --config configs/attnrl_tiny.yaml                              # two CPU cores, minutes
    torchrun --nproc-per-node 8 attnrl.py --config configs/attnrl_1.5b.yaml         # eight GPUs; --resume goes on

It is r3.py with another `collect`: groups, rewards, loss, update and checkpoints are the same functions. The numbers of
this listing stand in the margin of the code and in ALGORITHM.md.

     1  for step t, batch D_t of B_t queries q, with n responses o_1..o_n to each, sampled in step t-1:
     2      an all-correct q is dropped unless its score > mean over all all-correct q so far      adaptive sampling
     3      ceil(n exp(-acc)) of its responses branch, those of the smaller class first
     4      N branch points in each: steps in the top fifth by score, in position order, far apart
     5      one call of the sampler: T continuations of the prefix at each branch point of D_t,
                and n responses to each q of D_{t+1}; verify each                              one step off-policy
     6      score the steps of the responses of D_{t+1}: s_i = max over layers and heads of the sum
                over q >= i + 4 of M[q, i], the attention of step q to step i                  FCI
     7      the leaves of q make a tree: A(node) = (V(node) - V(root) + V(node) - V(parent)) / sqrt(leaves below)
            a q whose leaves are all correct or all wrong is dropped                           adaptive sampling
     8      one optimiser step on the objective (Eq. 2), with A per token
     9      B_{t+1} = ceil(0.1 floor(B_t target / leaves kept) + 0.9 B_t)                      adaptive batch

The life of a token, by where it lies in the leaf (a complete response) that trains it:

                              before the branch point         behind it               of a response as first sampled
    sampled in                step t-1 (with D_t)             step t                  step t-1
    pi_old                    as recorded                     the policy before t     as recorded
    A                         of its node, in every leaf      of its leaf             of its nodes
    counts as sampled         once, as first sampled          yes                     yes

In the first step, and with `off_policy_steps: 0`, D_t itself is sampled in step t: pi_old is the policy before t then.
After the last step nothing is in flight: its call of the sampler draws no D_{t+1}.

Symbols: q query · n responses per query · acc their accuracy · leaf a complete response · V mean reward of the leaves
below a node · root the query · S steps of a response · step 0 the prompt · M see runtime/stepattention.py.
A step ends at a token with "\\n\\n", else "\\n", else every token is one. Departures from the paper: ALGORITHM.md.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

import r3
from eval import sample_and_grade
from r3 import Group, Prompt, outcome_reward, rng, update
from replay import PLAIN, Response
from runtime import config as settings
from runtime import model as lm
from runtime.config import bounded, one_of
from runtime.errors import UserError, exit_cleanly
from runtime.optimizer import equal_batches
from runtime.run import Run, interruptible, log_step, start, timed
from runtime.stepattention import score_steps
from sampling.gumbel import derive_seed

BRANCH = "branch"  # the kind of a prompt that ends with the beginning of a response

# --------------------------------------------------------------------------------------------------- Configuration


@dataclass(frozen=True)
class Config(r3.Config):
    """R³'s keys, the first ones here with the defaults of AttnRL, and its own. The comment gives symbol and meaning."""

    batch_size: int = bounded(64, low=1)  # B_1, queries of the first step
    group_size: int = bounded(6, low=2)  # n, responses per query before branching
    minibatches: int = bounded(2, low=1)  # optimiser steps per batch
    length_reward: float = bounded(0.0, low=0)  # 0: R in {0, 1}
    loss_agg: str = one_of("token", "sequence", "constant")  # mean over tokens by DAPO, Eq. 2, Dr. GRPO
    replay: bool = False  # R³'s; refused here
    reflect: bool = False  # R³'s; refused here
    rank: bool = False  # R³'s; refused here

    # branching
    branch: bool = True  # false: responses as first sampled, with GRPO's advantages
    branch_on: str = one_of("attention", "entropy", "random")  # a step's score: FCI, entropy of its first token, chance
    branch_points: int = bounded(2, low=1)  # N, branch points per response that branches
    branch_width: int = bounded(2, low=1)  # T, continuations per branch point
    branch_distance: int = bounded(512, low=0)  # tokens between branch points, and before the first one
    branch_quantile: float = bounded(0.8, low=0, high=1)  # of the step scores, from which a step is a candidate
    ignored_steps: int = bounded(4, low=0)  # the nearest steps, itself included, whose attention does not count in FCI

    # what is sampled
    adaptive_sampling: bool = True  # lines 2, 3 and 7: who branches by difficulty; uninformative queries are dropped
    adaptive_batch: bool = True  # line 9: the number of queries follows the last batch's yield
    batch_rate: float = bounded(0.1, low=0, high=1)  # weight of the size that would have reached the target
    batch_max: int = bounded(256, low=1)  # largest B_t (the paper: none)
    off_policy_steps: int = bounded(1, low=0, high=1)  # 1: D_{t+1} is sampled in step t; 0: in its own step

    def __post_init__(self):
        super().__post_init__()
        for key in ("replay", "reflect", "rank", "dynamic_sampling"):
            if getattr(self, key):
                raise UserError(f"{key} = true, allowed in attnrl.py: false; it is a part of r3.py's algorithms")
        if self.batch_max < self.batch_size:
            raise UserError(f"batch_max = {self.batch_max}, allowed: at least batch_size = {self.batch_size}")

    @property
    def target(self) -> int:
        """Leaves of a batch of B_1 queries of which every response branches."""
        return self.batch_size * self.group_size * (1 + self.branch * self.branch_points * self.branch_width)


# ------------------------------------------------------------------------------------------------- Steps and scores


def step_starts(texts: Sequence[str]) -> list[int]:
    """Where the steps of a response begin, 0 first, from the text of each of its tokens.

    A step ends at a token whose text has a blank line; where none has, at a line's end; where none has, at every token.
    """
    for separator in ("\n\n", "\n", ""):
        ends = [i + 1 for i, text in enumerate(texts) if separator in text]
        if ends:
            return [0, *(i for i in ends if i < len(texts))]
    return [0]


def candidates_only(scores: np.ndarray, starts: Sequence[int], texts: Sequence[str]) -> np.ndarray:
    """The scores (S,) with 0 for the first step, and from the step on in which `</think>` ends."""
    scores, end = np.array(scores, np.float64), "".join(texts).find("</think>")
    if end >= 0:
        token = np.searchsorted(np.cumsum([len(text) for text in texts]), end + len("</think>") - 1, side="right")
        scores[np.searchsorted(starts, token, side="right") - 1 :] = 0
    scores[:1] = 0
    return scores


def influence(M: Tensor, ignored: int) -> Tensor:
    """FCI (line 6): M [H, S, S], attention of step q (row) to step i (column) -> [S].

    s_i = max over heads of the sum over q >= i + ignored of M[q, i]
    """
    return M.tril(-ignored).sum(1).amax(0)


# ---------------------------------------------------------------------------------------- Which responses, and where


def branching(correct: Sequence[bool], rng: random.Random) -> list[int]:
    """Line 3: the indices of the ceil(n exp(-acc)) responses that branch: the smaller class first, others at random.

    Where both classes are equal, the wrong ones come first.
    """
    n, acc = len(correct), sum(correct) / len(correct)
    rare = acc < 0.5  # the verdict of the smaller class
    order = sorted(range(n), key=lambda i: (bool(correct[i]) != rare, rng.random()))
    return sorted(order[: math.ceil(n * math.exp(-acc))])


def branch_points(scores, starts: Sequence[int], prompt: int, n: int, distance: int, quantile: float) -> list[int]:
    """Line 4: where a response branches: n starts of its steps, ascending. A short response has one several times.

    scores (S,) and starts (S,) of its steps; prompt: tokens before the response. A candidate's score is at least the
    quantile of all scores, or above 0 where that is 0; it is not the first step. It is taken, in position order, if it
    begins at least `distance` tokens after the start of the prompt and after each one taken before. Too few: the
    earliest other steps, the first one only where there is no other.
    """
    scores, threshold = np.asarray(scores), np.quantile(scores, quantile)
    least = threshold if threshold > 0 else min(scores[scores > 0], default=np.inf)
    taken: list[int] = []
    for at in (starts[i] for i in range(1, len(starts)) if scores[i] >= least):
        if len(taken) < n and at - (taken[-1] if taken else -prompt) >= distance:
            taken.append(at)
    rest = [at for at in starts[1:] if at not in taken] or taken or [starts[0]]
    missing = n - len(taken)
    return sorted(taken + (rest * missing)[:missing])


def above_mean(scores: Sequence[float], total: float, count: float) -> list[bool]:
    """Line 2: which all-correct queries stay. total, count: of the scores of all of them so far, these included."""
    return [score > total / count for score in scores]


# --------------------------------------------------------------------------------------------- Values and advantages


def tree_advantages(paths: Sequence[Sequence[Hashable]], rewards: Sequence[float]) -> dict[Hashable, float]:
    """Line 7: A of each node. paths[l]: the nodes from below the root down to leaf l, which has rewards[l].

    V(node) = mean reward of the leaves below it
    A(node) = (V(node) - V(root) + V(node) - V(parent)) / sqrt(leaves below it)
    """
    below = defaultdict(list)
    if max(rewards) - min(rewards) < 1e-6:
        rewards = [0.0] * len(rewards)  # so that rounding makes no advantage
    for path, reward in zip(paths, rewards, strict=True):
        for node in (None, *path):  # None: the root
            below[node].append(reward)
    V = {node: sum(values) / len(values) for node, values in below.items()}
    edges = {(parent, node) for path in paths for parent, node in zip((None, *path), path, strict=False)}
    return {node: (2 * V[node] - V[None] - V[parent]) / math.sqrt(len(below[node])) for parent, node in edges}


def next_batch(B: int, valid: int, c: Config) -> int:
    """Line 9: B_{t+1} from B_t and the leaves that it kept; at most `batch_max`, also where it kept none."""
    wanted = min(c.batch_max, B * c.target // max(valid, 1))
    moved = round(c.batch_rate * wanted + (1 - c.batch_rate) * B, 9)  # 13.000000000000002 is 13
    return min(c.batch_max, math.ceil(moved))


# --------------------------------------------------------------------------------------------------- Trees of leaves


@dataclass(frozen=True)
class Rollouts(Group):
    """The n responses to a query as first sampled, and the scores (S,) of the steps of each; none without branching."""

    starts: tuple[Sequence[int], ...] = ()
    scores: tuple[np.ndarray, ...] = ()

    @property
    def score(self) -> float:
        """Of the query: the mean over its responses of the mean over their steps."""
        return float(np.mean([scores.mean() for scores in self.scores]))


@dataclass(frozen=True)
class Branch(Prompt):
    """The beginning of a response, behind its prompt, of which `n` continuations are sampled."""

    parent: Response
    index: int  # of the response in its group
    at: int  # tokens of the response in `ids`
    n: int


@dataclass(frozen=True)
class Tree(Group):
    """All leaves of a query: its n responses, then the continuations, each with the prefix it began with."""

    paths: tuple[tuple[tuple[Hashable, int], ...], ...] = ()  # of each leaf: (node, tokens) in order; none: no tree
    stale: tuple[int, ...] = ()  # tokens of each leaf, from its beginning, that an earlier policy sampled

    def advantages(self, c: Config) -> list[np.ndarray]:
        """A of each token, (L,) for each leaf: that of its node; GRPO's without a tree."""
        if not self.paths:
            return super().advantages(c)
        A = tree_advantages([[node for node, _ in path] for path in self.paths], self.rewards)
        return [np.repeat(np.float32([A[v] for v, _ in path]), [tokens for _, tokens in path]) for path in self.paths]

    def old_logp(self, i: int, c: Config) -> np.ndarray | None:
        """pi_old of leaf i: as recorded for its stale tokens, NaN (the policy before the step) for the others."""
        if not self.stale[i]:
            return None
        logp = np.array(self.responses[i].logprobs, np.float32)
        logp[self.stale[i] :] = np.nan
        return logp


def segments(index: int, length: int, points: Sequence[int]) -> list[tuple[Hashable, int]]:
    """The nodes of response `index`, cut at its branch points: [(node, tokens), ...]. Equal points are one cut."""
    cuts = [0, *sorted({at for at in points if at > 0}), length]
    return [((index, begin), end - begin) for begin, end in zip(cuts, cuts[1:], strict=False)]


def grow(group: Rollouts, continued: Sequence[Group], step: int, c: Config) -> Tree:
    """The tree of a query from its responses and the continuations of its branches."""
    responses, entropies = list(group.responses), list(group.entropies)
    stale = [len(r.response_ids) * (r.step < step) for r in responses]
    points = {i: [g.prompt.at for g in continued if g.prompt.index == i] for i in range(group.n_fresh)}
    trunks = [segments(i, len(r.response_ids), points[i]) for i, r in enumerate(responses)]
    paths = list(trunks)
    for g in continued:
        b = g.prompt
        before = [(node, tokens) for node, tokens in trunks[b.index] if node[1] < b.at]
        for j, r in enumerate(g.responses):
            responses.append(joined(b, r, c))
            entropies.append(np.concatenate([group.entropies[b.index][: b.at], g.entropies[j]]))
            paths.append([*before, ((b.index, b.at, j), len(r.response_ids))])
            stale.append(b.at * (b.parent.step < step))
    rewards = tuple(r.reward for r in responses)
    tree = tuple(map(tuple, paths)) if group.scores else ()  # without scores nothing branches
    return Tree(group.prompt, tuple(responses), rewards, tuple(entropies), len(responses), 0, tree, tuple(stale))


def joined(b: Branch, r: Response, c: Config) -> Response:
    """A leaf: the prefix with the log-probs that it was sampled with, and its continuation."""
    ids = (*b.parent.response_ids[: b.at], *r.response_ids)
    logprobs = np.concatenate([b.parent.logprobs[: b.at], r.logprobs])
    reward = outcome_reward(r.correct, r.finished, len(ids), c)
    return Response(b.parent.prompt_ids, ids, logprobs, r.correct, r.finished, reward, r.step)


# ----------------------------------------------------------------------------------------------------- The algorithm


@dataclass(frozen=True)
class State:
    """What a step hands to the next; a checkpoint has it. All of it but `ahead` is the same on all ranks."""

    batch: int  # B_t
    epoch: int = 0  # of the newest batch, from 0
    place: int = 0  # in that epoch's order on each rank, behind the newest batch
    total: float = 0.0  # sum of the scores of all all-correct queries so far
    count: float = 0.0  # and their number
    valid: float = 0.0  # leaves that the last batch kept
    ahead: tuple[Rollouts, ...] | None = None  # the next batch, sampled and scored; None: not sampled yet

    def value(self) -> dict:
        """For a checkpoint: numbers and arrays."""
        if self.ahead is None:
            return dict(vars(self))
        groups = [(g.uid, [recorded(g, i) for i in range(g.n_fresh)], bool(g.scores)) for g in self.ahead]
        return vars(self) | {"ahead": groups}

    @classmethod
    def of(cls, run: Run) -> State:
        """That of the checkpoint which the run goes on from, or the first one. Its groups follow their uids."""
        if not run.found:
            return cls(run.config.batch_size)
        size, problems = run.ranks.size, {p.uid: p for p in run.problems}
        values = run.found if len(run.found) != size else [run.found[run.ranks.rank]]
        groups = [entry for value in values for entry in value["ahead"] or () if entry[0] in problems]
        ahead = tuple(restored(Prompt(problems[uid], PLAIN, run.prompts[uid]), *entry) for uid, *entry in groups)
        one = values[0]
        place = one["place"] * len(run.found) // size
        return cls(**one | {"place": place, "ahead": None if one["ahead"] is None else ahead})


def recorded(g: Rollouts, i: int) -> list:
    r, (starts, scores) = g.responses[i], (g.starts[i], g.scores[i]) if g.scores else ((), ())
    arrays = np.array(r.response_ids, np.int32), np.float32(r.logprobs), np.float32(g.entropies[i])
    return [*arrays, r.correct, r.finished, r.reward, r.step, np.array(starts, np.int32), np.array(scores, np.float64)]


def restored(prompt: Prompt, records: list, scored: bool) -> Rollouts:
    ids, logprobs, entropies, *verified, starts, scores = zip(*records, strict=True)
    rows = zip(ids, logprobs, *verified, strict=True)
    responses = tuple(Response(prompt.ids, x.tolist(), *row) for x, *row in rows)
    steps = (tuple(x.tolist() for x in starts), scores) if scored else ((), ())
    return Rollouts(prompt, responses, tuple(r.reward for r in responses), entropies, len(responses), 0, *steps)


@timed
def collect(run: Run, state: State, step: int) -> tuple[list[Tree], list[Group], State, dict]:
    """Lines 1 to 7 and 9: the trees to learn from, the groups as they were sampled, the next state, counts to log."""
    c = run.config
    run.sampler.load(run.policy)
    if state.ahead is None:  # the first step, or off_policy_steps = 0
        state, prompts = draw(run, state)
        groups, _ = rollout(run, prompts, [], step, step)
        state = replace(state, ahead=scored(run, groups, step))
    batch, epoch, state = state.ahead, state.epoch + 1, replace(state, ahead=None)  # 1
    kept, choose = batch, lambda correct, rng: range(len(correct))
    if c.adaptive_sampling:
        state, kept = without_easy(run, state, batch)  # 2
        choose = branching
    branches = [b for g in kept for b in branches_of(g, choose, step, c)]  # 3, 4
    prompts = []
    if c.off_policy_steps and step < run.steps:
        state, prompts = draw(run, state)
    groups, continued = rollout(run, prompts, branches, step + 1, step)  # 5
    if prompts:
        state = replace(state, ahead=scored(run, groups, step))  # 6
    trees = [grow(g, [x for x in continued if x.uid == g.uid], step, c) for g in kept]  # 7
    informative = [tree for tree in trees if not tree.collapsed]
    leaves = sum(len(tree.responses) for tree in informative)
    (valid,) = run.ranks.sum([leaves])
    B = next_batch(state.batch, int(valid), c) if c.adaptive_batch else state.batch  # 9
    counts = {"queries": len(batch), "informative": len(informative), "leaves": leaves}
    counts["branched"] = len({(b.problem.uid, b.index) for b in branches})
    learned = informative if c.adaptive_sampling else trees
    return learned, [*batch, *continued], replace(state, batch=B, valid=valid), counts | {"epoch": epoch}


def draw(run: Run, state: State) -> tuple[State, list[Prompt]]:
    """The next B_t queries, this rank's part: each epoch is a new permutation without its incomplete last batch."""
    usable, place = run.n_problems // run.ranks.size, state.place
    size = min(-(-state.batch // run.ranks.size), usable)
    epoch, place = (state.epoch, place) if place + size <= usable else (state.epoch + 1, 0)
    order = rng(run.config, "epoch", epoch).sample(run.problems, len(run.problems))
    prompts = [Prompt(p, PLAIN, run.prompts[p.uid]) for p in order[place:][:size]]
    return replace(state, epoch=epoch, place=place + size), prompts


def without_easy(run: Run, state: State, batch: Sequence[Rollouts]) -> tuple[State, list[Rollouts]]:
    """Line 2: the batch without the all-correct queries whose score is not above the mean of all so far."""
    easy = [g for g in batch if g.all_correct and g.scores]
    total, count = run.ranks.sum([sum(g.score for g in easy), len(easy)])
    state = replace(state, total=state.total + total, count=state.count + count)
    stays = dict(zip((g.uid for g in easy), above_mean([g.score for g in easy], state.total, state.count), strict=True))
    return state, [g for g in batch if stays.get(g.uid, True)]


def branches_of(g: Rollouts, choose: Callable, step: int, c: Config) -> list[Branch]:
    """Lines 3 and 4: the beginnings of responses that are continued. Equal branch points are one Branch."""
    found, P = [], len(g.prompt.ids)
    chosen = choose([r.correct for r in g.responses], rng(c, step, g.uid, BRANCH)) if g.scores else ()
    for i in chosen:
        response, how = g.responses[i], (c.branch_points, c.branch_distance, c.branch_quantile)
        for at, times in sorted(Counter(branch_points(g.scores[i], g.starts[i], P, *how)).items()):
            ids = [*g.prompt.ids, *response.response_ids[:at]]
            found.append(Branch(g.prompt.problem, BRANCH, ids, response, i, at, times * c.branch_width))
    return found


@interruptible
def rollout(run: Run, prompts: list[Prompt], branches: list[Branch], batch: int, step: int):
    """Line 5, one call of the sampler: a group of n responses to each prompt of batch number `batch`, and a group of
    continuations of each branch. A prefix is computed once for its continuations."""
    c, both = run.config, [*prompts, *branches]
    seeds = [derive_seed(c.seed, batch, p.problem.uid, p.kind) for p in prompts]
    begun = [()] * len(prompts) + [b.parent.response_ids[: b.at] for b in branches]
    graded = sample_and_grade(
        run.sampler,
        run.verifier,
        partial(lm.decode, run.tokenizer),
        [p.ids for p in both],
        [p.problem for p in both],
        begun=begun,
        n=[c.group_size] * len(prompts) + [b.n for b in branches],
        max_new_tokens=[c.max_new_tokens - len(ids) for ids in begun],
        temperature=c.temperature,
        seed=seeds + [derive_seed(c.seed, step, b.problem.uid, BRANCH, b.index, b.at) for b in branches],
    )
    groups = [r3.group_of(p, answers, step, c) for p, answers in zip(both, graded, strict=True)]
    return groups[: len(prompts)], groups[len(prompts) :]


def scored(run: Run, groups: list[Group], step: int) -> tuple[Rollouts, ...]:
    """Line 6: the groups with the steps of their responses and their scores; without them where nothing branches."""
    c, text = run.config, functools.cache(lambda i: run.tokenizer.decode([i]))
    if not c.branch:
        return tuple(Rollouts(**vars(g)) for g in groups)
    responses = [r for g in groups for r in g.responses]
    texts = [[text(i) for i in r.response_ids] for r in responses]
    starts = [step_starts(words) for words in texts]
    if c.branch_on == "attention":
        scores = attention_scores(run, responses, starts)
    elif c.branch_on == "entropy":
        scores = [H[at] for H, at in zip((H for g in groups for H in g.entropies), starts, strict=True)]
    else:
        draws = [rng(c, step, g.uid, "scores", i) for g in groups for i in range(g.n_fresh)]
        scores = [[draw.random() for _ in at] for draw, at in zip(draws, starts, strict=True)]
    scores = [candidates_only(*row) for row in zip(scores, starts, texts, strict=True)]
    ends = np.cumsum([g.n_fresh for g in groups])
    parts = [(slice(end - g.n_fresh, end), g) for end, g in zip(ends, groups, strict=True)]
    return tuple(Rollouts(**vars(g), starts=tuple(starts[own]), scores=tuple(scores[own])) for own, g in parts)


@interruptible(collective=True)
def attention_scores(run: Run, responses: list[Response], starts: list[list[int]]) -> list[np.ndarray]:
    """FCI of the steps of each response, (S,), under the present policy: the largest of all layers and heads."""
    c, sequences = run.config, [[*r.prompt_ids, *r.response_ids] for r in responses]
    ranges = [[0, *(len(r.prompt_ids) + s for s in at)] for r, at in zip(responses, starts, strict=True)]
    best = [torch.zeros(len(at), device=run.ranks.device) for at in ranges]
    run.sampler.release()  # the pass needs the cache's memory, as the update does
    for batch in equal_batches(run.ranks, list(map(len, sequences)), c.token_budget):

        def see(i: int, layer: int, M: Tensor, batch=batch) -> None:
            best[batch[i]] = torch.maximum(best[batch[i]], influence(M, c.ignored_steps))

        score_steps(run.policy, [sequences[i] for i in batch], [ranges[i] for i in batch], see)
    return [s[1:].cpu().numpy() for s in best]  # without the prompt


def train(config: Config) -> None:
    """The algorithm from the base model to the last evaluation; resumes where the newest checkpoint ends."""
    with start(config) as run:
        state = State.of(run)
        for step, _ in run.steps_left():
            groups, sampled, after, counts = collect(run, state, step)  # 1-7, 9
            learning = update(run, groups, step)  # 8
            with run.finishing(step):
                state, run.hand_on = after, after.value
                log(run, groups, sampled, learning, counts)


def log(run: Run, groups: list[Tree], sampled: list[Group], learning: dict, counts: dict) -> None:
    """R³'s row, with counts of this step. Accuracy, reward and lengths are those of the responses as first sampled."""
    epoch, once = counts.pop("epoch"), float(run.ranks.main)  # a count is a sum over ranks
    log_step(run, epoch, groups, sampled, learning | {name: (count, once) for name, count in counts.items()})


def main(argv: Sequence[str]) -> None:
    train(settings.parse(Config, argv))


if __name__ == "__main__":
    with exit_cleanly():
        main(sys.argv[1:])
