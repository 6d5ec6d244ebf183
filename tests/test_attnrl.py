"""AttnRL: steps, scores, branch points, trees and advantages by hand; the step attention against transformers' eager
one; a run that equals GRPO with all parts off, that loses no batch, and that resumes exactly."""

import math
import random

import numpy as np
import pytest
import torch
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
from attnrl import branch_points, branching, candidates_only, influence, next_batch, step_starts, tree_advantages
from runtime.errors import UserError
from runtime.stepattention import score_steps

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
        for number, at in enumerate(at_points):
            for j in range(width):
                paths.append([node for node, _ in trunks[i] if node[1] < at] + [(i, at, number * width + j)])
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
