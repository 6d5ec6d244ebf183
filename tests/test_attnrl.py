"""AttnRL: steps, scores, branch points, trees and advantages by hand; the step attention against transformers' eager
one; a run that equals GRPO with all parts off, that loses no batch, and that resumes exactly."""
# ruff: noqa: F401, F811  the fixtures short_model, start, unbroken and no_group_is_left are imported

import contextlib
import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
from conftest import random_model, train_run
from test_ranks import ALONE, no_group_is_left, on_ranks
from test_resume import ENDS, random_kills, sweep
from tiny_run import (
    SHORT,
    Killed,
    RuleVerifier,
    assert_same_run,
    at,
    checkpoints,
    kill,
    needs_fork,
    rows,
    short_model,
    start,
    unbroken,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import attnrl
import r3
import verify
from attnrl import branch_points, branching, candidates_only, influence, next_batch, step_starts, tree_advantages
from rollout import Sampler
from runtime import carried
from runtime import run as run_module
from runtime.errors import UserError
from runtime.problems import Problem
from runtime.ranks import Ranks
from runtime.sharding import full
from runtime.stepattention import score_steps
from sampling.kvcache import SlotCache

# ------------------------------------------------------------------------------------------------------------- steps


def test_a_step_ends_at_a_blank_line_else_at_a_line_else_at_every_token():
    assert step_starts(["a", ".\n\n", "b", "\n", "c\n\nd", "e"]) == [0, 2, 5]
    assert step_starts(["a", "\n", "b", "c\n", "e"]) == [0, 2, 4]
    assert step_starts(["a", "b", "c"]) == [0, 1, 2]


def test_a_separator_at_the_end_of_the_response_begins_no_step():
    assert step_starts(["a", "\n", "b", "\n"]) == [0, 2]
    assert step_starts(["a", "b\n\n"]) == [0] == step_starts(["a"])


def test_the_first_step_and_the_steps_from_the_end_of_thinking_on_score_zero():
    texts = ["a", "\n", "b", "\n", "</th", "ink>", "\n", "c"]  # a tag of two tokens; steps at 0, 2, 4, 7
    assert candidates_only([5, 6, 7, 8], [0, 2, 4, 7], texts).tolist() == [0, 6, 0, 0]
    assert candidates_only([5, 6, 7], [0, 2, 4], ["a", "\n", "b", "\n", "c"]).tolist() == [0, 6, 7]
    assert candidates_only([5], [0], ["a"]).tolist() == [0]


def test_influence_is_the_largest_head_of_the_sum_over_later_steps():
    """Two heads, four steps; the nearest two, itself included, do not count."""
    M = torch.tensor([[[1.0, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [7, 8, 9, 10]], [[0.0] * 4] * 3 + [[1, 20, 0, 0]]])
    assert influence(M, 2).tolist() == [4 + 7, 20, 0, 0]
    assert influence(M, 0).tolist() == [1 + 2 + 4 + 7, 20, 6 + 9, 10]
    assert influence(M, 4).tolist() == [0, 0, 0, 0]


# ----------------------------------------------------------------------------------------- who branches, and where


@pytest.mark.parametrize(("right", "k"), [(0, 6), (1, 6), (2, 5), (3, 4), (4, 4), (5, 3), (6, 3)])
def test_the_harder_the_query_the_more_responses_branch_and_the_smaller_class_first(right, k):
    correct = [True] * right + [False] * (6 - right)
    draws = [branching(correct, random.Random(seed)) for seed in range(40)]
    assert {len(found) for found in draws} == {k} and all(found == sorted(set(found)) for found in draws)
    rare = [i for i in range(6) if correct[i] == (right < 3)] if 0 < right < 6 else []
    assert all(set(rare) <= set(found) for found in draws)
    often = set(range(6)) - set(rare)
    assert set().union(*draws) == set(range(6)) and (k == 6 or any(not often <= set(found) for found in draws))


def points(scores, starts, prompt=0, n=2, distance=10, quantile=0.8):
    return branch_points(np.array(scores, float), starts, prompt, n, distance, quantile)


def test_branch_points_are_the_best_fifth_in_position_order():
    """Eleven steps; the 0.8-quantile of 0, 1, ..., 10 is 8: of 8, 9 and 10, the first two by position."""
    scores = [0, 9, 1, 2, 8, 3, 10, 4, 5, 6, 7]
    assert points(scores, [20 * i for i in range(11)]) == [20, 80]


def test_branch_points_keep_their_distance_from_the_start_of_the_prompt_and_from_each_other():
    scores, starts = [0, 1, 1, 1, 1], [0, 8, 12, 17, 40]
    assert points(scores, starts, prompt=0) == [12, 40]  # 8 is too near to the start, 17 to 12
    assert points(scores, starts, prompt=2) == [8, 40]  # with the prompt, 8 is the tenth token
    assert points(scores, starts, distance=0) == [8, 12]


def test_a_threshold_of_zero_is_replaced_by_the_smallest_positive_score():
    scores = [0] * 9 + [0.5, 0.2]  # the quantile is 0; 0.2 and 0.5 are candidates
    assert points([0] * 8 + [0.5, 0.2, 0], [20 * i for i in range(11)]) == [160, 180]
    assert points(scores, [20 * i for i in range(11)]) == [180, 200]


def test_missing_branch_points_are_the_earliest_other_steps():
    starts = [0, 3, 6, 30]
    assert points([0, 0, 0, 9], starts) == [3, 30]  # one candidate
    assert points([0, 0, 0, 0], starts) == [3, 6]  # none
    assert points([0, 0, 0, 9], starts, n=5) == [3, 3, 6, 6, 30]


def test_a_very_short_response_repeats_a_branch_point():
    assert points([0, 4], [0, 30]) == [30, 30] == points([0, 0], [0, 30])
    assert points([0], [0]) == [0, 0]  # a single step: continuations of the prompt itself


def test_an_all_correct_query_stays_if_it_is_above_the_mean_of_all_so_far():
    assert attnrl.above_mean([1.0, 2.0, 3.0], total=6.0, count=3) == [False, False, True]
    assert attnrl.above_mean([2.5], total=10.0, count=5) == [True]
    assert attnrl.above_mean([0.7], total=0.7, count=1) == [False]  # the first one is the mean


# -------------------------------------------------------------------------------------------------------- advantages


def tree_paths(n: int, branched: dict[int, list[int]], length: int = 30, width: int = 2):
    """Paths of n responses of `length` tokens, those in `branched` with continuations at these points."""
    trunks = [attnrl.segments(i, length, branched.get(i, [])) for i in range(n)]
    paths = [[node for node, _ in trunk] for trunk in trunks]
    for i, at_points in branched.items():
        for number, cut in enumerate(at_points):
            for j in range(width):
                paths.append([node for node, _ in trunks[i] if node[1] < cut] + [(i, cut, number * width + j)])
    return paths


def test_advantages_of_a_tree_of_7_leaves():
    """Three responses; the first branches at 10 and 20. Leaves: its end, the two others, two at 10, two at 20."""
    paths = tree_paths(3, {0: [10, 20]})
    assert len(paths) == 7
    found = tree_advantages(paths, [1, 0, 1, 0, 0, 1, 0])
    root, first, second = 3 / 7, 2 / 5, 2 / 3  # V; below (0, 0): 1 0 0 1 0, below (0, 10): 1 1 0
    assert found == pytest.approx({
        (0, 0): 2 * (first - root) / 5**0.5,
        (0, 10): (second - root + second - first) / 3**0.5,
        (0, 20): 1 - root + 1 - second,
        (1, 0): 2 * (0 - root),
        (2, 0): 2 * (1 - root),
        (0, 10, 0): 0 - root + 0 - first,
        (0, 10, 1): 0 - root + 0 - first,
        (0, 20, 2): 1 - root + 1 - second,
        (0, 20, 3): 0 - root + 0 - second,
    })  # fmt: skip


def test_advantages_of_a_tree_of_31_leaves():
    """Seven responses, six of which branch; only the last response of all is correct, and one continuation at 20."""
    paths = tree_paths(7, {i: [10, 20] for i in range(6)})
    assert len(paths) == 31
    found = tree_advantages(paths, [0] * 6 + [1] + [0] * 23 + [1])
    root = 2 / 31
    for i in range(5):
        assert found[i, 0] == pytest.approx(-2 * root / 5**0.5) and found[i, 10] == pytest.approx(-root / 3**0.5)
        assert found[i, 20] == found[i, 10, 0] == found[i, 20, 2] == pytest.approx(-root)
    assert found[6, 0] == pytest.approx(2 * (1 - root))
    assert found[5, 0] == pytest.approx(2 * (1 / 5 - root) / 5**0.5)
    assert found[5, 10] == pytest.approx((1 / 3 - root + 1 / 3 - 1 / 5) / 3**0.5)
    assert found[5, 20, 3] == pytest.approx(1 - root + 1 - 1 / 3)
    assert found[5, 20] == pytest.approx(0 - root + 0 - 1 / 3)


def test_equal_rewards_give_exactly_zero():
    paths = tree_paths(3, {0: [10, 20], 2: [10]})
    assert set(tree_advantages(paths, [0.1 * 3] * len(paths)).values()) == {0.0}


def test_two_branches_at_the_same_point_are_one_node_with_five_children():
    paths = tree_paths(1, {0: [10, 10]})
    assert attnrl.segments(0, 30, [10, 10]) == [((0, 0), 10), ((0, 10), 20)]
    found = tree_advantages(paths, [1, 0, 0, 0, 0])
    assert found == pytest.approx({(0, 0): 0, (0, 10): 2 * (1 - 1 / 5)} | {(0, 10, j): -2 / 5 for j in range(4)})


def test_a_response_of_one_step_is_a_leaf_and_its_continuations_are_leaves_beside_it():
    assert attnrl.segments(0, 30, [0, 0]) == [((0, 0), 30)]
    found = tree_advantages(tree_paths(1, {0: [0, 0]}), [1, 0, 0, 1, 0])
    own = {(0, 0, j): -4 / 5 for j in (0, 1, 3)}
    assert found == pytest.approx({(0, 0): 6 / 5, (0, 0, 2): 6 / 5} | own)


def test_the_batch_follows_its_yield_up_to_its_bound():
    c = attnrl.Config()
    assert c.target == 64 * 6 * 5
    assert next_batch(64, 1920, c) == 64
    assert next_batch(64, 960, c) == math.ceil(0.1 * 128 + 0.9 * 64) == 71
    assert next_batch(128, 3840, c) == math.ceil(0.1 * 64 + 0.9 * 128) == 122
    assert next_batch(64, 0, c) == math.ceil(0.1 * 256 + 0.9 * 64)  # nothing kept: as if the bound were wanted
    assert next_batch(256, 10, c) == 256
    for B in range(1, 257):  # a batch that reaches its target stays, whatever 0.1 B + 0.9 B is rounded to
        assert next_batch(B, 30 * B, attnrl.Config(batch_size=B, minibatches=1)) == B


# ------------------------------------------------------------------------------------------------ attention by steps

ARCHITECTURES = [
    (Qwen2ForCausalLM, Qwen2Config),
    (Qwen3ForCausalLM, Qwen3Config),
    (LlamaForCausalLM, LlamaConfig),
    (MistralForCausalLM, MistralConfig),
]


@pytest.mark.parametrize(("kind", "config"), ARCHITECTURES, ids=lambda x: x.__name__)
def test_step_averages_equal_those_of_eager_attention_for_any_block(kind, config):
    """Two packed sequences: one of 5 uneven steps, one of which every token is a step; all layers and heads."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model = kind(config(**shape, **heads, initializer_range=0.5, max_position_embeddings=128)).eval()
    sequences = [torch.randint(3, 64, (n,)).tolist() for n in (61, 9)]
    starts = [[0, 7, 8, 30, 55], list(range(9))]
    model.config._attn_implementation = "eager"
    expected = {}
    for i, (ids, begins) in enumerate(zip(sequences, starts, strict=True)):
        W = torch.zeros(len(begins), len(ids), dtype=torch.float64)
        for s, (a, b) in enumerate(zip(begins, [*begins[1:], len(ids)], strict=True)):
            W[s, a:b] = 1 / (b - a)
        for layer, A in enumerate(model(torch.tensor([ids]), output_attentions=True).attentions):
            expected[i, layer] = W @ A[0].double() @ W.T
    assert all(M.std() > 0.01 for M in expected.values())
    for block in (1, 7, 16, 64, 1000):
        found = {}
        score_steps(model, sequences, starts, lambda i, layer, M: found.update({(i, layer): M}), block)  # noqa: B023
        assert found.keys() == expected.keys()
        for key, M in found.items():
            assert M.shape == expected[key].shape and (M - expected[key]).abs().max() < 1e-5


def test_scoring_steps_makes_no_tensor_of_T_times_T():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    T, largest = 1024, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x)]
            largest = max([largest, *sizes])
            return out

    with Watch():
        score_steps(model, [[5] * T], [list(range(0, T, 32))], lambda *_: None, block=64)
    assert 2 * 64 * T * 4 <= largest < T * T * 4 / 2


# ------------------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize("key", ["replay", "reflect", "rank", "dynamic_sampling"])
def test_parts_of_r3_are_refused_by_name(key):
    others = {"replay": False, "rank": False} if key == "dynamic_sampling" else {}
    with pytest.raises(UserError, match=f"{key} = true, allowed in attnrl.py: false"):
        attnrl.Config(**others | {key: True})


def test_the_bound_of_the_batch_is_not_below_its_first_size():
    with pytest.raises(UserError, match="batch_max = 32, allowed: at least batch_size = 64"):
        attnrl.Config(batch_max=32)


# ------------------------------------------------------------------------------------------------- groups and leaves


def response(prompt, length, step, seed=0, correct=False, kind="plain"):
    random = np.random.default_rng(seed)
    ids, logp = random.integers(3, 200, length).tolist(), random.normal(-2, 0.5, length).astype(np.float32)
    return attnrl.Response(prompt, ids, logp, correct, True, float(correct), step, kind)


def small_tree(step: int, sampled: int, **changes):
    """Two responses of 6 and 4 tokens, sampled in step `sampled`; the first branches at 2 and 4, two continuations
    each of 3 tokens, sampled in `step`. Correct: the second response, and the first continuation at 4."""
    c = attnrl.Config(**changes)
    query, prompt = Problem("a", "problem a", "1", "here"), [3, 4, 5]
    own = (response(prompt, 6, sampled, 1), response(prompt, 4, sampled, 2, correct=True))
    H = tuple(np.full(len(r.response_ids), 0.5, np.float32) for r in own)
    steps = ([0, 2, 4], [0, 2]), (np.array([0.0, 1, 2]), np.array([0.0, 1]))
    group = attnrl.Rollouts(attnrl.Prompt(query, "plain", prompt), own, (0.0, 1.0), H, 2, 0, *steps)
    continued = []
    for cut in (2, 4):
        branch = attnrl.Branch(query, "branch", prompt + own[0].response_ids[:cut], own[0], 0, cut, 2)
        sampled_here = tuple(response(branch.ids, 3, step, 10 * cut + j, cut == 4 and j == 0, "branch") for j in (0, 1))
        H = tuple(np.full(3, 0.25, np.float32) for _ in sampled_here)
        continued.append(attnrl.Group(branch, sampled_here, tuple(r.reward for r in sampled_here), H, 2))
    return group, continued, attnrl.grow(group, continued, step, c), c


def test_a_leaf_is_the_prefix_as_it_was_sampled_and_its_continuation():
    group, continued, tree, _ = small_tree(step=5, sampled=4)
    assert tree.responses[:2] == group.responses and len(tree.responses) == tree.n_fresh == 6
    parent = group.responses[0]
    own_parts = [r for g in continued for r in g.responses]
    for leaf, cut, own in zip(tree.responses[2:], (2, 2, 4, 4), own_parts, strict=True):
        assert list(leaf.response_ids) == parent.response_ids[:cut] + own.response_ids
        assert leaf.logprobs.tolist() == [*parent.logprobs[:cut], *own.logprobs]
        assert leaf.prompt_ids == [3, 4, 5] and leaf.correct == own.correct and leaf.reward == float(own.correct)
    assert [H.tolist() for H in tree.entropies[2:4]] == [[0.5] * 2 + [0.25] * 3] * 2
    assert tree.rewards == (0, 1, 0, 0, 1, 0) and tree.n_correct == 2


def test_a_token_has_the_advantage_of_its_node():
    _, _, tree, c = small_tree(step=5, sampled=4)
    root, first, second = 1 / 3, 1 / 5, 1 / 3  # V; below tokens 0 and 1, below 2 and 3
    a, b, end = 2 * (first - root) / 5**0.5, (second - root + second - first) / 3**0.5, -root - second
    found = tree.advantages(c)
    assert found[0] == pytest.approx([a, a, b, b, end, end]) and found[1] == pytest.approx([2 * (1 - root)] * 4)
    assert found[2] == pytest.approx([a, a] + [-root - first] * 3) and (found[3] == found[2]).all()
    assert found[4] == pytest.approx([a, a, b, b] + [1 - root + 1 - second] * 3)
    assert [A.dtype for A in found] == [np.float32] * 6


def test_the_old_log_probs_of_stale_tokens_are_the_recorded_ones():
    _, _, tree, c = small_tree(step=5, sampled=4)
    for i, stale in enumerate((6, 4, 2, 2, 4, 4)):
        found = tree.old_logp(i, c)
        assert (found[:stale] == tree.responses[i].logprobs[:stale]).all() and np.isnan(found[stale:]).all()
    _, _, fresh, c = small_tree(step=5, sampled=5)
    assert [fresh.old_logp(i, c) for i in range(6)] == [None] * 6


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_of_a_tree_is_that_of_eq_2_written_as_a_loop(minibatches):
    """Per token: A of its node; pi_old as recorded for stale tokens, else the policy; the mean over all tokens."""
    _, _, tree, c = small_tree(step=5, sampled=4, minibatches=minibatches, eps_low=0.9, eps_high=9.0)
    policy = random_model()
    found, expected = copy.deepcopy(policy), copy.deepcopy(policy)
    run = train_run(found)
    run.config, run.optimizer.step = c, lambda: None
    examples = r3.training_examples([tree], run.ranks, c)
    if minibatches > 1:
        examples = r3.with_old_logprobs(run, examples)
        assert not any(np.isnan(e.old_logp).any() for e in examples)
    r3.add_gradient(run, examples)
    loss, tokens, A = 0.0, sum(len(r.response_ids) for r in tree.responses), tree.advantages(c)
    for i, r in enumerate(tree.responses):
        logits = expected(torch.tensor([[*r.prompt_ids, *r.response_ids]])).logits[0, len(r.prompt_ids) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(r.response_ids)[:, None])[:, 0]
        for t, stale in enumerate(np.arange(len(r.response_ids)) < tree.stale[i]):
            old = torch.tensor(r.logprobs[t]) if stale else logp[t].detach()
            ratio, tis = torch.exp(logp[t] - old), torch.exp(old - r.logprobs[t]).clamp(max=c.tis_cap).item()
            a = tis * float(A[i][t])
            J = torch.minimum(ratio * a, ratio.clamp(0.1, 10.0) * a)
            loss = loss - (J.clamp(min=c.dual_clip * a) if a < 0 else J) / tokens
    loss.backward()
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-6)
    assert max(p.grad.abs().max() for p in found.parameters()) > 1e-3


# -------------------------------------------------------------------------------------------------------- the sampler


def test_n_and_budget_may_differ_by_prompt_and_a_prefix_is_computed_once_for_its_continuations(monkeypatch):
    model, prefills, original = random_model(), [], SlotCache.begin_prefill
    sampler = Sampler(model, set(range(40, 52)), slots=8, max_len=40)
    prompts, n, budgets, seeds = [[5, 6, 7], [5, 6, 7, 8, 9]], [3, 2], [12, 10], [11, 12]
    alone = [sampler.generate([p], k, b, seed=[s])[0] for p, k, b, s in zip(prompts, n, budgets, seeds, strict=True)]

    def spy(cache, lengths):
        prefills.append(lengths)
        return original(cache, lengths)

    monkeypatch.setattr(SlotCache, "begin_prefill", spy)
    together = sampler.generate(prompts, n, budgets, seed=seeds)
    assert [len(group) for group in together] == n and prefills == [[2, 4]]
    for a, b in zip(alone, together, strict=True):
        assert [s.response_ids for s in a] == [s.response_ids for s in b]
    assert max(len(s.response_ids) for s in together[1]) <= 10


# -------------------------------------------------------------------------------------------------------- whole runs

SMALL = {
    **{key: value for key, value in SHORT.items() if key not in ("reflection_template", "tau")},
    "batch_size": 3, "branch_distance": 2, "ignored_steps": 1, "batch_max": 5, "minibatches": 1,
    "eval_every": 6, "eval_n": 1,
}  # fmt: skip
OFF = {"branch": False, "adaptive_sampling": False, "adaptive_batch": False, "off_policy_steps": 0}
ATTN = {"program": attnrl, **SMALL}


class Spy:
    """What a run did. Of each step: its number, trees, groups as sampled, state, next state, tokens that the sampler
    returned. Of each call of the sampler: step, batch, prompts, branches."""

    def __init__(self, monkeypatch):
        self.steps, self.calls, self.runs = [], [], []
        collect, rollout = attnrl.collect, attnrl.rollout

        def spied_collect(run, state, step):
            before = run.sampler.tokens
            found = collect(run, state, step)
            self.runs.append(run)
            self.steps.append((step, found[0], found[1], state, found[2], run.sampler.tokens - before))
            return found

        def spied_rollout(run, prompts, branches, batch, step):
            self.calls.append((step, batch, prompts, branches))
            return rollout(run, prompts, branches, batch, step)

        monkeypatch.setattr(attnrl, "collect", spied_collect)
        monkeypatch.setattr(attnrl, "rollout", spied_rollout)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_all_parts_off_is_r3s_grpo_to_the_last_bit(start, tmp_path, minibatches):
    same = {"replay": False, "reflect": False, "rank": False, "length_reward": 0, "loss_agg": "token"}
    same |= {"batch_size": 4, "minibatches": minibatches, "eval_every": 6, "eval_n": 1}
    start(tmp_path / "r3", **same)
    start(tmp_path / "attnrl", **ATTN | OFF | same)
    shared = [{k: v for k, v in row.items() if k in other} for row, other in
              zip(rows(tmp_path / "attnrl"), rows(tmp_path / "r3"), strict=True)]  # fmt: skip
    assert shared == rows(tmp_path / "r3") and any(row.get("grad_norm") for row in shared)
    kept = [checkpoints(tmp_path / name) for name in ("attnrl", "r3")]
    for a, b in zip(*(folders.values() for folders in kept), strict=True):
        names = {name for name in (*a, *b) if "carried" not in name and name != "buffer"}  # weights and moments, e.g.
        assert len(names) > 5 and all(a[name] == b[name] for name in names)


def test_each_part_off_changes_a_run(start, tmp_path):
    """Otherwise a switch would be dead. Of adaptive_batch a test below shows what it does."""
    weights, changes = {}, {"seed": 0} | OFF | {"branch_on": "random"}
    del changes["adaptive_batch"]
    for key, value in changes.items():
        run_dir = start(tmp_path / key, **ATTN | {key: value, "steps": 3})
        weights[checkpoints(run_dir)["step_000003"]["model.safetensors"]] = key
    assert list(weights.values()) == list(changes)  # five runs, five models


def test_every_batch_that_is_sampled_is_trained_and_the_last_call_draws_none(start, tmp_path, monkeypatch):
    spy = Spy(monkeypatch)
    start(tmp_path / "run", **ATTN)
    asked = [p.problem.uid for _, _, prompts, _ in spy.calls for p in prompts]
    trained = [g.uid for _, _, sampled, *_ in spy.steps for g in sampled if g.prompt.kind == "plain"]
    assert asked == trained and len(spy.steps) == 6
    assert [(step, batch) for step, batch, prompts, _ in spy.calls if prompts] == [
        (1, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)
    ]  # fmt: skip
    assert spy.calls[-1][0] == 6 and not spy.calls[-1][2] and spy.steps[-1][4].ahead is None
    per_step = [sum(step == s for step, *_ in spy.calls) for s in range(1, 7)]
    assert per_step == [2, 1, 1, 1, 1, 1]  # one call a step, but for the first


def test_without_off_policy_steps_every_ratio_is_one(start, tmp_path, monkeypatch):
    spy = Spy(monkeypatch)
    start(tmp_path / "run", **ATTN | {"off_policy_steps": 0})
    trees = [tree for _, trees, *_ in spy.steps for tree in trees]
    assert trees and all(set(tree.stale) == {0} for tree in trees)
    assert all(row["clip_fraction"] == 0 for row in rows(tmp_path / "run") if row.get("clip_fraction") is not None)


def test_the_leaves_of_a_run(start, tmp_path, monkeypatch):
    """On the real path: branches go on from prompt and prefix, within the budget; verdicts are on whole responses; the
    tokens of a prefix are stale from the second step on and count as sampled once."""
    spy = Spy(monkeypatch)
    run_dir = start(tmp_path / "run", **ATTN)
    continued = 0
    steps, tokens = [row for row in rows(run_dir) if "queries" in row], 0
    for (step, trees, sampled, *_), row in zip(spy.steps, steps, strict=True):
        initial = {g.uid: g for g in sampled if g.prompt.kind == "plain"}
        for g in sampled:
            if g.prompt.kind == "branch":
                b = g.prompt
                assert b.ids == [*initial[g.uid].prompt.ids, *b.parent.response_ids[: b.at]]
                assert b.parent == initial[g.uid].responses[b.index] and len(g.responses) == b.n
        for tree in trees:
            for leaf, stale, path in zip(tree.responses, tree.stale, tree.paths, strict=True):
                text = attnrl.lm.decode(spy.runs[0].tokenizer, leaf.response_ids)
                assert leaf.correct == (leaf.finished and len(text) % 3 == 0)
                assert len(leaf.response_ids) <= 12 and leaf.finished == (leaf.response_ids[-1] in spy_eos(spy))
                assert sum(tokens for _, tokens in path) == len(leaf.response_ids)
                assert (stale > 0) == (step > 1 and (leaf.step < step or len(path) > 1))
            continued += len(tree.responses) - 4
        tokens += sum(len(r.response_ids) for g in sampled for r in g.responses)
        assert row["leaves"] == sum(len(tree.responses) for tree in trees) and row["queries"] == len(initial)
    assert continued > 50
    assert tokens == sum(drawn for *_, drawn in spy.steps)  # those that the log counts, and what the sampler returned


def spy_eos(spy) -> set[int]:
    return set(np.flatnonzero(spy.runs[0].sampler.is_eos).tolist())


def test_the_batch_of_a_run_follows_its_yield(start, tmp_path, monkeypatch):
    spy = Spy(monkeypatch)
    start(tmp_path / "run", **ATTN)
    config = spy.runs[0].config
    for _, trees, _, state, after, _ in spy.steps:
        assert after.valid == sum(len(tree.responses) for tree in trees)
        assert after.batch == next_batch(state.batch, int(after.valid), config)
    assert len({state.batch for *_, state, _, _ in spy.steps}) > 1
    queries = [sum(p.kind == "plain" for p in prompts) for _, _, prompts, _ in spy.calls if prompts]
    assert queries == [3, 3, *(state.batch for *_, state, _, _ in spy.steps[1:-1])]


@pytest.mark.parametrize("anchor", ["entropy", "random"])
def test_the_other_anchors_score_no_attention(start, tmp_path, monkeypatch, anchor):
    spy = Spy(monkeypatch)
    with at(attnrl, "score_steps", 1, kill):  # a call would end the run
        start(tmp_path / "run", **ATTN | {"branch_on": anchor, "steps": 3})
    groups = [g for *_, state, _, _ in spy.steps for g in state.ahead or ()]
    assert groups and any(branches for *_, branches in spy.calls)
    for g in groups:
        for H, starts, scores in zip(g.entropies, g.starts, g.scores, strict=True):
            assert scores[0] == 0 and len(scores) == len(starts)
            if anchor == "entropy":
                assert (scores[1:] == H[starts][1:]).all()


# ----------------------------------------------------------------------------------------------------- exact resume


@pytest.mark.parametrize("finished", [1, 4])
def test_resumed_run_equals_the_unbroken_one(unbroken, start, tmp_path, finished):
    with at(attnrl, "collect", finished + 1, kill), pytest.raises(Killed):
        start(tmp_path / "run", **ATTN)
    assert_same_run(unbroken(**ATTN), start(tmp_path / "run", resume=True, **ATTN))


VARIANTS = [
    {"off_policy_steps": 0, "branch_on": "random"},
    {"branch": False},
    {"minibatches": 2, "beta": 0, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_resumed_run_equals_the_unbroken_one_with_other_configs(unbroken, start, tmp_path, changes):
    changes = ATTN | changes
    with at(attnrl, "collect", 4, kill), pytest.raises(Killed):
        start(tmp_path / "run", **changes)
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes))


@pytest.mark.parametrize(("place", "end"), [("rollout", "terminate"), ("score_steps", "kill"), ("update", "crash")])
def test_abandoned_step_is_done_again_from_its_beginning(unbroken, start, tmp_path, place, end):
    changes = ATTN | {"save_every": 3}
    act, raised = ENDS[end]
    with at(attnrl, place, {"rollout": 6, "score_steps": 6, "update": 5}[place], act), pytest.raises(raised):
        start(tmp_path / "run", **changes)
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes), last_checkpoint_only=True)


def again_and_whole(unbroken, start):
    """start and unbroken of tests/test_resume.py, for four steps of this program."""
    changes = ATTN | {"steps": 4}
    return lambda steps: unbroken(**changes), lambda run_dir, resume, steps: start(run_dir, resume=resume, **changes)


@needs_fork
def test_run_killed_at_random_moments_resumes(unbroken, start, tmp_path):
    assert random_kills(*again_and_whole(unbroken, start), tmp_path, wanted=4, seed=0) >= 4


@needs_fork
@pytest.mark.slow
def test_run_killed_200_times_at_random_moments_resumes(unbroken, start, tmp_path):
    assert random_kills(*again_and_whole(unbroken, start), tmp_path, wanted=200, seed=1) >= 200


@needs_fork
def test_run_killed_between_operations_on_files_resumes(unbroken, start, tmp_path):
    changes = {key: value for key, value in ATTN.items() if key not in ("steps", "checkpoints_kept")}
    works = (functools.partial(work, **changes) for work in (unbroken, start))
    assert sweep(*works, tmp_path, [40]) == 1


def test_what_is_handed_on_survives_the_disk(tmp_path):
    value = {"b": 3, "rows": [("u", [np.int32([1, 2]), np.float32([0.1])]), ("v", [np.int32([]), np.float32([3e-9])])]}
    carried.save(value, tmp_path, 0)
    carried.save({"b": 4, "rows": []}, tmp_path, 1)
    first, second = carried.load(tmp_path)
    assert first["b"] == 3 and second == {"b": 4, "rows": []} and [uid for uid, _ in first["rows"]] == ["u", "v"]
    for found, expected in zip(first["rows"], value["rows"], strict=True):
        for a, b in zip(found[1], expected[1], strict=True):
            assert a.dtype == b.dtype and a.tolist() == b.tolist()


# ------------------------------------------------------------------------------------------------------------- ranks


def flight(state) -> dict:
    """uid -> ids, log-probs and step scores of the responses in flight."""
    of = {g.uid: zip(g.responses, g.scores, strict=True) for g in state.ahead or ()}
    return {
        uid: [(list(r.response_ids), r.logprobs.tolist(), x.tolist()) for r, x in pairs] for uid, pairs in of.items()
    }


def until(ranks, given: dict, last: int) -> list[dict]:
    """Trains on these ranks until after step `last` of six, and returns what each step did."""
    seen, collect, log = [], attnrl.collect, attnrl.log

    def spied_collect(run, state, step):
        if step > last:
            raise Killed
        found = collect(run, state, step)
        shared = {key: value for key, value in vars(found[2]).items() if key != "ahead"}
        uids = {g.uid for g in found[1] if g.prompt.kind == "plain"}
        seen.append({"shared": shared, "uids": uids, "before": flight(state), "after": flight(found[2])})
        return found

    def spied_log(run, *rest):
        seen[-1]["weights"] = torch.cat([full(p).flatten() for p in run.policy.parameters()])
        log(run, *rest)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(run_module, "Verifier", RuleVerifier)
        patch.setattr(verify, "check", lambda problems: [])
        patch.setattr(Ranks, "stop", lambda self: None)  # the process group is the test's
        patch.setattr(Ranks, "start", classmethod(lambda cls, *_: ranks))
        patch.setattr(run_module, "print_result", lambda run: None)
        patch.setattr(attnrl, "collect", spied_collect)
        patch.setattr(attnrl, "log", spied_log)
        attnrl.main([f"--{key}={value}" for key, value in given.items()])
    return seen


def test_ranks_keep_in_step_and_another_number_of_them_goes_on_with_what_is_in_flight(short_model, tmp_path):
    """Two steps on two ranks, two on one, two on two."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"uid": "q{i}", "problem": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(12)))
    given = SMALL | {"model": short_model, "data": problems, "run_dir": tmp_path / "run", "batch_size": 4, "steps": 6}
    given |= {"eval_at_start": False, "eval_at_end": False, "eval_every": 99, "resume": True}
    parts = []
    for size in (2, 1, 2):
        work = functools.partial(until, given=given, last=2 * len(parts) + 2)
        parts.append(on_ranks(size, work, tmp_path) if size > 1 else [work(ALONE)])
    for a, b in parts[::2]:
        assert len(a) == len(b) == 2
        for one, other in zip(a, b, strict=True):
            assert one["shared"] == other["shared"] and torch.equal(one["weights"], other["weights"])
            assert one["uids"] and other["uids"] and not one["uids"] & other["uids"]
    for earlier, later in zip(parts, parts[1:], strict=False):
        handed = {uid: row for steps in earlier for uid, row in steps[-1]["after"].items()}
        taken = {uid: row for steps in later for uid, row in steps[0]["before"].items()}
        assert handed and handed == taken
    assert not parts[-1][0][-1]["after"]


def test_the_place_in_the_data_goes_on_over_epochs_of_whole_batches():
    """Seven queries and batches of 2, 3 and 3: the third does not fit into the first epoch, which loses two queries."""
    problems = [Problem(f"q{i}", "", "1", "here") for i in range(7)]
    run = train_run(random_model())
    run.problems, run.n_problems, run.prompts = problems, 7, {p.uid: [3] for p in problems}
    orders = [r3.rng(run.config, "epoch", epoch).sample(problems, 7) for epoch in (0, 1)]
    state = attnrl.State(batch=2)
    for size, (epoch, begin) in zip((2, 3, 3, 99), ((0, 0), (0, 2), (1, 0), (2, 0)), strict=True):
        state, prompts = attnrl.draw(run, attnrl.replace(state, batch=size))
        assert (state.epoch, state.place) == (epoch, begin + min(size, 7))
        if epoch < 2:
            assert [p.problem for p in prompts] == orders[epoch][begin:][:size]
    assert len({p.problem.uid for p in prompts}) == 7  # a batch larger than the data is the data
