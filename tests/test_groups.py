"""Rewards and informative groups (ALGORITHM.md, 2, 3 and 5): outcome, ranking, recall, reflection prompts."""

import random
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, fresh_group

import r3
from replay import REFLECTION, ReplayBuffer

C = r3.Config()
MODES = ["published", "centred", "all_truncated"]


def truncated(group: r3.Group) -> r3.Group:
    """The same group, none of whose responses finished."""
    return replace(group, responses=tuple(replace(a, finished=False, correct=False) for a in group.responses))


# ---- outcome reward --------------------------------------------------------------------------------------------------


def test_a_right_answer_earns_more_the_shorter_it_is():
    rewards = [r3.outcome_reward(True, True, length, C) for length in (1, 16384, 32768, 40000)]
    assert rewards == pytest.approx([2 - 1 / 32768, 1.5, 1.0, 1.0])


def test_a_truncated_response_is_never_right():
    assert r3.outcome_reward(True, False, 100, C) == 0.0
    assert r3.outcome_reward(False, True, 100, C) == 0.0


def test_without_the_length_reward_the_outcome_is_binary():
    assert r3.outcome_reward(True, True, 100, replace(C, length_reward=0.0)) == 1.0


def test_the_overlong_penalty_falls_from_0_to_minus_1_at_the_budget():
    c = replace(C, length_reward=0.0, max_new_tokens=100, overlong_tokens=20)
    assert [r3.outcome_reward(False, True, n, c) for n in (80, 90, 100)] == pytest.approx([0.0, -0.5, -1.0])


# ---- ranking ---------------------------------------------------------------------------------------------------------


def test_peak_and_global_are_means_of_the_largest_and_of_all():
    H = np.array([0.1, 2.0, 0.3, 1.0, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert r3.peak_and_global(H, 0.2) == pytest.approx((1.5, H.mean()))
    assert r3.peak_and_global(H[:3], 0.2) == pytest.approx((2.0, 0.8))  # at least one position


def test_high_peaks_and_a_low_mean_win():
    rewards = r3.serr(peak=[3.0, 2.0, 1.0], glob=[0.1, 0.2, 0.3], r_max=0.5)
    assert rewards.tolist() == pytest.approx([0.5, 0.25, 0.0])


def test_dominance_needs_both_the_higher_peak_and_the_lower_mean():
    assert r3.serr([3.0, 2.0], [0.3, 0.2], 0.5).tolist() == [0.25, 0.25]
    assert r3.serr([3.0, 2.0], [0.2, 0.2], 0.5).tolist() == [0.25, 0.25]


def test_ties_share_the_mean_of_their_ranks():
    rewards = r3.serr([3.0, 1.0, 1.0, 0.5], [0.1, 0.3, 0.3, 0.4], 0.6)  # S = 3, 1, 1, 0
    assert rewards.tolist() == pytest.approx([0.6, 0.3, 0.3, 0.0])


def test_an_all_tied_group_gets_equal_rewards_and_no_signal():
    rewards = r3.serr([1.0] * 5, [1.0] * 5, 0.5)
    assert (r3.group_advantages(rewards, 1.0, 1e-4) == 0).all()


def test_ranking_is_permutation_equivariant():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        peak, glob = torch.rand(7, generator=generator).round(decimals=1), torch.rand(7, generator=generator)
        order = torch.randperm(7, generator=generator)
        torch.testing.assert_close(r3.serr(peak, glob, 0.5)[order], r3.serr(peak[order], glob[order], 0.5))


def test_one_sample_has_no_rank_and_none_is_no_error():
    assert r3.serr([2.0], [1.0], 0.5).tolist() == [0.0]
    assert r3.serr([], [], 0.5).tolist() == []


def test_ranking_never_lifts_a_failure_to_a_success():
    generator = torch.Generator().manual_seed(1)
    rewards = r3.serr(torch.rand(9, generator=generator), torch.rand(9, generator=generator), C.r_max)
    assert rewards.min() >= 0 and rewards.max() <= C.r_max < r3.outcome_reward(True, True, 10**9, C)


def test_only_truncated_responses_of_an_all_wrong_group_are_ranked():
    wrong = truncated(fresh_group("a", [False] * 4, seed=1))
    finished = replace(wrong, responses=(replace(wrong.responses[0], finished=True), *wrong.responses[1:]))
    ranked = r3.rank_failures(finished, replace(C, rank_rewards="published"))
    assert ranked.n_ranked == 3 and ranked.rewards[0] == 0.0 and sum(ranked.rewards) == pytest.approx(3 * 0.25)
    assert r3.rank_failures(finished, replace(C, rank_on="failed")).n_ranked == 4
    mixed = fresh_group("a", [True, False, False])
    assert r3.rank_failures(mixed, C) is mixed
    single = truncated(fresh_group("a", [False, False]))
    single = replace(single, responses=(single.responses[0], replace(single.responses[1], finished=True)))
    assert r3.rank_failures(single, C) is single


def test_ranking_makes_a_new_group_and_leaves_the_stored_reward_alone():
    wrong = truncated(fresh_group("a", [False] * 3, seed=2))
    ranked = r3.rank_failures(wrong, C)
    assert wrong.rewards == (0.0, 0.0, 0.0) and ranked.responses == wrong.responses


def shaped_group(finished: str, reward_of_truncated: float = 0.0) -> r3.Group:
    """All wrong; a letter f is a finished response, t a truncated one. Each truncated one dominates those behind it."""
    peaks = iter([[3.0, 0, 0, 0, 0], [2.5, 1, 0, 0, 0], [2, 2, 0, 0, 0]])
    group = fresh_group("a", [False] * len(finished))
    entropies = tuple(np.array(next(peaks) if f == "t" else [1.0] * 5) for f in finished)
    rewards = tuple(reward_of_truncated if f == "t" else 0.0 for f in finished)
    responses = zip(group.responses, finished, rewards, strict=True)
    responses = tuple(replace(a, finished=f == "f", reward=reward) for a, f, reward in responses)
    return replace(group, responses=responses, rewards=rewards, entropies=entropies)


@pytest.mark.parametrize(
    ("mode", "finished", "rewards"),
    [
        ("published", "ftftt", [0, 0.5, 0, 0.25, 0]),
        ("centred", "ftftt", [0, 0.25, 0, 0, -0.25]),
        ("all_truncated", "ftftt", [0, 0, 0, 0, 0]),
        ("published", "ttt", [0.5, 0.25, 0]),
        ("centred", "ttt", [0.25, 0, -0.25]),
        ("all_truncated", "ttt", [0.5, 0.25, 0]),
    ],
)
def test_how_ranking_rewards_are_applied(mode, finished, rewards):
    ranked = r3.rank_failures(shaped_group(finished), replace(C, rank_rewards=mode))
    assert ranked.rewards == pytest.approx(rewards) and ranked.n_ranked == (3 if any(rewards) else 0)


@pytest.mark.parametrize("mode", MODES)
def test_only_published_ranking_pays_for_truncation(mode):
    """The advantages of the truncated responses beside finished failures add up to 0 unless the reward lifts them."""
    group = r3.rank_failures(shaped_group("fftt"), replace(C, rank_rewards=mode))
    A = r3.group_advantages(group.rewards, 1.0, 1e-4)
    if mode == "published":  # rewards 0, 0, 0.5, 0: mean 1/8, std sqrt(3) / 8
        assert A.tolist() == pytest.approx([-(3**-0.5), -(3**-0.5), 3**0.5, -(3**-0.5)], rel=1e-3)
        assert A[2:].sum() > 1
    elif mode == "centred":  # rewards 0, 0, 1/4, -1/4: mean 0, std sqrt(2) / 8
        assert A.tolist() == pytest.approx([0, 0, 2**0.5, -(2**0.5)], rel=1e-3)
    else:
        assert A.tolist() == [0, 0, 0, 0]


def test_truncated_responses_that_tie_gain_nothing_from_centred_rewards():
    group = shaped_group("ftt")
    group = replace(group, entropies=(group.entropies[0], group.entropies[1], group.entropies[1]))
    assert r3.rank_failures(group, replace(C, rank_rewards="centred")).rewards == (0, 0, 0)
    assert r3.rank_failures(group, replace(C, rank_rewards="published")).rewards == (0, 0.25, 0.25)


@pytest.mark.parametrize("mode", MODES)
def test_the_overlong_penalty_outweighs_every_ranking_reward(mode):
    """A truncated response has the full penalty of 1, and R_max is below 1: a short finished failure keeps the lead."""
    c = replace(C, rank_rewards=mode, max_new_tokens=100, overlong_tokens=20)
    truncated = r3.outcome_reward(False, False, 100, c)
    rewards = r3.rank_failures(shaped_group("fttt", truncated), c).rewards
    assert truncated == -1 and max(rewards[1:]) < rewards[0] == 0
    best = {"published": -0.5, "centred": -0.75, "all_truncated": -1}[mode]
    assert rewards[1:] == pytest.approx([best, (best + rewards[3]) / 2, {"centred": -1.25}.get(mode, -1)])


@pytest.mark.parametrize("overlong", [0, 20])
@pytest.mark.parametrize("mode", MODES)
def test_no_failure_beats_a_replayed_success(mode, overlong):
    """Nor does the worst success, as long as the budget, without a length reward, under the largest R_max."""
    changes = {"rank_rewards": mode, "r_max": 0.999, "length_reward": 0.0}
    c = replace(C, max_new_tokens=100, overlong_tokens=overlong, **changes)
    failed, solved = (r3.outcome_reward(correct, correct, 100, c) for correct in (False, True))
    buffer = ReplayBuffer()
    buffer.add("a", [replace(fresh_group("a", [True]).responses[0], reward=solved)])
    for finished in ("ttt", "ftt"):
        group = r3.rank_failures(shaped_group(finished, failed), c)
        group = r3.inject_replay(group, buffer, c, random.Random(0))
        *failures, success = group.rewards
        A = r3.group_advantages(group.rewards, c.alpha, c.lam).tolist()
        assert max(failures) <= success == solved  # equal: a short failure, and a success with the full penalty
        truncated = [i for i, f in enumerate(finished) if f == "t"]
        assert all(failures[i] < success and A[i] < A[-1] for i in truncated)
        assert overlong or max(A[:-1]) < A[-1]


# ---- replay into groups ----------------------------------------------------------------------------------------------


def test_collapse_is_decided_on_the_verdict_not_on_shaped_rewards():
    good = replace(fresh_group("a", [True, True]), rewards=(1.9, 1.1))
    assert good.all_correct and not good.all_wrong and not fresh_group("a", [True, False]).collapsed
    wrong = replace(fresh_group("a", [False, False]), rewards=(0.5, 0.0))
    assert wrong.all_wrong and wrong.collapsed


@pytest.mark.parametrize("verdict", [True, False])
def test_a_collapsed_group_gets_k_stored_responses_of_the_opposite_verdict(verdict):
    buffer = ReplayBuffer()
    buffer.add("a", fresh_group("a", [not verdict] * 5 + [verdict] * 5).responses)
    mixed = r3.inject_replay(fresh_group("a", [verdict] * 4), buffer, C, random.Random(0))
    injected = mixed.responses[mixed.n_fresh :]
    assert mixed.n_fresh == 4 and len(injected) == C.replay_k and all(a.correct is not verdict for a in injected)
    assert mixed.rewards[4:] == tuple(a.reward for a in injected)
    assert r3.group_advantages(mixed.rewards, 1.0, 1e-4).abs().min() > 0


def test_a_mixed_group_and_one_without_memories_stay_as_they_are():
    buffer = ReplayBuffer()
    buffer.add("b", fresh_group("b", [True, False]).responses)
    for group in (fresh_group("b", [True, False]), fresh_group("a", [False, False])):
        after = r3.inject_replay(group, buffer, C, random.Random(0))
        assert after.responses == group.responses and after.rewards == group.rewards


def test_group_prompt_reconditions_replayed_responses():
    buffer = ReplayBuffer()
    stored = replace(fresh_group("a", [True]).responses[0], prompt_ids=[9, 9])
    buffer.add("a", [stored])
    group = fresh_group("a", [False, False])
    own = r3.inject_replay(group, buffer, C, random.Random(0)).responses[-1]
    current = r3.inject_replay(group, buffer, replace(C, replay_prompt="group"), random.Random(0)).responses[-1]
    assert own.prompt_ids == [9, 9] and current.prompt_ids == group.prompt.ids


def test_newest_replays_the_latest_successes():
    buffer = ReplayBuffer()
    for step in range(1, 9):
        buffer.add("a", [replace(fresh_group("a", [True]).responses[0], step=step)])
    group, c = fresh_group("a", [False, False]), replace(C, replay_order="newest")
    replayed = [[a.step for a in r3.inject_replay(group, buffer, config, random.Random(i)).responses[2:]]
                for config in (c, C) for i in range(10)]  # fmt: skip
    assert replayed[:10] == [[8, 7]] * 10 and len(set(map(tuple, replayed[10:]))) > 5


# ---- reflection prompts ----------------------------------------------------------------------------------------------


def test_a_reflection_prompt_is_problem_then_attempt_then_guidance():
    text = r3.reflection_prompt("What is {attempt} \\frac{1}{2}?", "It is {problem}.", C.reflection_template)
    assert text.index("What is {attempt} \\frac{1}{2}?") < text.index("It is {problem}.") < text.index("first mistake")


def test_an_attempt_is_shown_from_behind_its_thinking_and_cut_at_the_front():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("<think>long thoughts</think>\nThe answer is 7.<|end|>")
    assert r3.failure_excerpt(ids, tokenizer, 100) == "The answer is 7."
    assert r3.failure_excerpt(tokenizer.encode("one two three"), tokenizer, 5) == "three"


def test_the_reference_answer_is_not_part_of_a_reflection_prompt():
    assert "4711" not in r3.reflection_prompt("a problem", "a failed attempt", C.reflection_template)


def reflected(share: float, order: str = "abcdefg") -> str:
    """The uids that get a reflection prompt under this `reflect_share`, in a batch of this order."""
    buffer, verdicts = ReplayBuffer(window=4, min_history=4), {}
    verdicts["a"] = [[1, 1, 1, 0]]  # not hard
    verdicts["b"] = [[0, 0, 1, 0]]  # accuracy 1/4
    verdicts["c"] = [[0, 1], [0, 0, 0, 0]]  # 0, solved at step 1
    verdicts["d"] = [[0, 0], [0, 1], [0, 0, 0, 0]]  # 0, solved at step 2
    verdicts["e"] = [[0, 0, 0, 0]]  # 0, never solved
    verdicts["f"] = [[0, 0, 0]]  # too little is known
    verdicts["g"] = [[0, 0, 0, 0]]  # as e
    for uid, groups in verdicts.items():
        for step, correct in enumerate(groups, 1):
            buffer.add(uid, [replace(a, step=step) for a in fresh_group(uid, list(map(bool, correct))).responses])
    run = types.SimpleNamespace(config=replace(C, reflect_share=share, tau=0.5), buffer=buffer)
    run.tokenizer, run.sampler = byte_tokenizer(), types.SimpleNamespace(max_len=10**6)
    found = r3.reflections(run, [fresh_group(uid, [False]).prompt.problem for uid in order], step=9)
    assert all(prompt.kind == REFLECTION for prompt in found)
    return "".join(prompt.problem.uid for prompt in found)


def test_without_a_cap_every_hard_query_reflects():
    assert reflected(1.0) == "bcdeg" and reflected(1.0, "gfedcba") == "gedcb"


@pytest.mark.parametrize(
    ("share", "uids"), [(5 / 7, "bcdeg"), (4 / 7, "cdeg"), (3 / 7, "ceg"), (2 / 7, "eg"), (1 / 7, "e"), (0.01, "e")]
)
def test_the_cap_keeps_the_lowest_accuracy_then_the_longest_unsolved(share, uids):
    assert reflected(share + 1e-9) == uids


def test_queries_that_tie_for_the_last_place_reflect_by_the_order_of_the_batch():
    assert reflected(0.2, "abcdefg") == "e" and reflected(0.2, "gfedcba") == "g"
