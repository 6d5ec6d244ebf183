"""Advantages and the objective (ALGORITHM.md, 6 and 7): grpo_loss, token_weight, training_examples, their step."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import fresh_group, random_model, step_on, train_run

import r3
from replay import Response
from runtime.ranks import Ranks

ONE_RANK = Ranks(0, 1, torch.device("cpu"))


# ---- advantages ------------------------------------------------------------------------------------------------------


def test_equal_rewards_give_exactly_zero():
    assert (r3.group_advantages([0.7] * 8, 1.0, 1e-4) == 0).all()
    assert (r3.group_advantages([0.1 + 0.2, 0.3], 1.0, 1e-4) == 0).all()  # equal but for the last digit of a float


def test_advantages_are_eq_1_with_population_std():
    A = r3.group_advantages([1.0, 0.0, 0.0, 0.0], 1.0, 1e-4)
    R = np.array([1.0, 0, 0, 0])
    np.testing.assert_allclose(A, (R - R.mean()) / (R.std() + 1e-4), rtol=1e-12)


def test_alpha_scales_the_std_as_in_eq_3():
    R = np.array([2.0, 0, 0, 1.5])
    A = r3.group_advantages(torch.tensor(R), 0.5, 0.1)
    np.testing.assert_allclose(A, (R - R.mean()) / (0.5 * R.std() + 0.1), rtol=1e-12)


def test_without_std_advantages_are_the_centred_rewards():
    """Dr. GRPO: alpha and lambda have no part in it either."""
    A = r3.group_advantages([2.0, 0.0, 0.0, 1.5], 0.5, 0.1, std=False)
    assert A.tolist() == [1.125, -0.875, -0.875, 0.625]
    assert (r3.group_advantages([0.1 + 0.2, 0.3], 1.0, 1e-4, std=False) == 0).all()


def test_advantage_std_reaches_the_examples():
    group = fresh_group("a", [True, False, False, False])
    for std, expected in ((True, [3**0.5, -(3**-0.5)]), (False, [0.75, -0.25])):
        examples = r3.training_examples([group], ONE_RANK, r3.Config(advantage_std=std))
        assert [float(e.A[0]) for e in examples[:2]] == pytest.approx(expected, rel=1e-3)


def test_advantages_do_not_write_into_the_rewards():
    rewards = torch.tensor([1.0, 0.0])
    r3.group_advantages(rewards, 1.0, 1e-4)
    assert rewards.tolist() == [1.0, 0.0]


# ---- the loss --------------------------------------------------------------------------------------------------------


def reference_loss(logp, old, ref, A, lengths, group_sizes, eps_low, eps_high, beta):
    """Eq. 2 as it is written: a loop over groups, responses and tokens."""
    J, i, t = 0.0, 0, 0
    for size in group_sizes:
        inner = 0.0
        for _ in range(size):
            tokens = 0.0
            for _ in range(lengths[i]):
                r = torch.exp(logp[t] - old[t])
                surrogate = min(r * A[i], torch.clamp(r, 1 - eps_low, 1 + eps_high) * A[i], key=lambda x: x.item())
                kl = torch.exp(ref[t] - logp[t]) - (ref[t] - logp[t]) - 1
                tokens = tokens + surrogate - beta * kl
                t += 1
            inner = inner + tokens / lengths[i]
            i += 1
        J = J + inner / size
    return -J / len(group_sizes)


def random_case(seed=0, lengths=(3, 1, 5, 2, 4), group_sizes=(2, 3)):
    generator = torch.Generator().manual_seed(seed)
    N = sum(lengths)
    logp, old, ref = (torch.randn(N, generator=generator, dtype=torch.float64) * 0.4 - 1 for _ in range(3))
    A = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    totals = (len(group_sizes), len(lengths), N)
    sizes = [s for s in group_sizes for _ in range(s)]
    weight = [r3.token_weight("sequence", n, s, totals, 8) for n, s in zip(lengths, sizes, strict=True)]
    per_token = torch.tensor(lengths)
    weight = torch.tensor(weight, dtype=torch.float64).repeat_interleave(per_token)
    return logp.requires_grad_(), old, ref, A, A.repeat_interleave(per_token), weight, lengths, group_sizes


def test_gradient_matches_eq_2_written_as_a_loop():
    for seed in range(5):
        logp, old, ref, A, A_token, weight, lengths, groups = random_case(seed)
        loss, _ = r3.grpo_loss(logp, old, ref, A_token, weight, 0.2, 0.28, 0.05)
        expected = reference_loss(logp, old, ref, A, lengths, groups, 0.2, 0.28, 0.05)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x, logp)[0] for x in (loss, expected)))


def test_on_policy_the_gradient_is_that_of_reinforce():
    logp, _, _, _, A, weight, *_ = random_case()
    loss, sums = r3.grpo_loss(logp, logp.detach(), None, A, weight, 0.2, 0.28, 0.0)
    assert (sums["ratio"] == 1).all() and sums["clip_fraction"] == 0
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], -weight * A)


@pytest.mark.parametrize("A, moved", [(1.0, 0.3), (-1.0, -0.3)])
def test_the_clip_stops_the_gradient_outside(A, moved):
    logp = torch.tensor([-1.0 + moved, -1.0 + moved / 10], requires_grad=True)
    loss, _ = r3.grpo_loss(logp, torch.full((2,), -1.0), None, torch.full((2,), A), torch.ones(2), 0.2, 0.28, 0.0)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient[0] == 0 and gradient[1] != 0


def test_the_clip_does_not_stop_a_wrong_move_from_being_undone():
    logp = torch.tensor([-0.5], requires_grad=True)  # more likely than before, and it was bad
    loss, _ = r3.grpo_loss(logp, torch.tensor([-1.0]), None, torch.tensor([-1.0]), torch.ones(1), 0.2, 0.28, 0.0)
    assert torch.autograd.grad(loss, logp)[0] > 0


def test_kl_is_zero_and_flat_at_the_reference():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, sums = r3.grpo_loss(logp, logp.detach(), logp.detach(), torch.zeros(2), torch.ones(2), 0.2, 0.28, 1.0)
    assert sums["kl"] == 0 and (torch.autograd.grad(loss, logp)[0] == 0).all()


def test_the_loss_does_not_write_into_its_inputs():
    logp, old, ref, _, A, weight, *_ = random_case()
    before = [x.detach().clone() for x in (logp, old, ref, A, weight)]
    r3.grpo_loss(logp, old, ref, A, weight, 0.2, 0.28, 0.1)
    assert all(torch.equal(x, y) for x, y in zip(before, (logp, old, ref, A, weight), strict=True))


def test_token_weights_add_up_as_each_aggregation_says():
    lengths, totals = (3, 5), (1, 2, 8)
    per_response = {
        agg: [n * r3.token_weight(agg, n, 2, totals, 10) for n in lengths] for agg in ("sequence", "token", "constant")
    }
    assert per_response["sequence"] == pytest.approx([0.5, 0.5])  # every response counts the same
    assert per_response["token"] == pytest.approx([3 / 8, 5 / 8])  # every token counts the same
    assert per_response["constant"] == pytest.approx([3 / 20, 5 / 20])  # and no length changes what a token counts


# ---- which tokens are trained, and how a step is put together -----------------------------------------------------


def test_a_group_without_advantage_trains_nothing_but_counts_in_the_denominator():
    config = r3.Config()
    mixed = fresh_group("a", [True, False])
    rows = r3.training_examples([mixed, fresh_group("b", [False, False])], ONE_RANK, config)
    assert {row.uid for row in rows} == {"a"}
    assert rows[0].weight == pytest.approx(1 / (2 * 2 * len(mixed.responses[0].response_ids)))


def test_statistics_are_taken_after_injection():
    config = r3.Config(alpha=2.0, lam=0.1, length_reward=0.0)
    group = fresh_group("a", [False, False])
    (success,) = fresh_group("a", [True]).responses
    mixed = replace(group, responses=(*group.responses, success), rewards=(0.0, 0.0, 1.0))
    rows = r3.training_examples([mixed], ONE_RANK, config)
    expected = r3.group_advantages([0.0, 0.0, 1.0], 2.0, 0.1)
    assert [float(row.A[0]) for row in rows] == pytest.approx(expected.tolist())
    assert [row.old_logp is None for row in rows] == [True, True, False]
    assert [row.replayed for row in rows] == [False, False, True]


def step_gradient(groups, run, **changes):
    """The policy's gradient after `optimise` on these groups, the optimiser's own step left out."""
    run.config = replace(run.config, grad_clip=1e9, **changes)
    run.optimizer.step = lambda: None
    step_on(run, groups)
    return torch.cat([p.grad.flatten() for p in run.policy.parameters()])


@pytest.mark.parametrize("loss_agg", ["sequence", "token", "constant"])
def test_the_gradient_is_the_same_for_any_micro_batch_size(loss_agg):
    groups = [fresh_group("a", [True, False, False], seed=1), fresh_group("b", [True, True, False], seed=2)]
    runs = [train_run(random_model()) for _ in range(3)]
    gradients = [
        step_gradient(groups, run, token_budget=budget, loss_agg=loss_agg)
        for run, budget in zip(runs, (1, 40, 10_000), strict=True)
    ]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-4, atol=1e-7)
    assert gradients[0].abs().max() > 0


def test_eos_is_trained_truncation_is_not():
    """The last token of a finished response is its EOS and gets a gradient; of a truncated one nothing follows."""
    from runtime import model as lm

    run = train_run(random_model())
    ids, _, index, targets, _ = lm.pack([([5, 6], [7, 8, 1]), ([5], [9, 9])], torch.device("cpu"))
    assert targets.tolist() == [7, 8, 1, 9, 9]  # the EOS (1) is a target; nothing comes after the truncated one
    assert ids.tolist() == [[5, 6, 7, 8, 5, 9]] and index.tolist() == [1, 2, 3, 4, 5]
    logp, _ = lm.token_logprobs(run.policy, [([5, 6], [7, 8, 1])], 1.0)
    assert logp.shape == (3,)


def test_the_prompt_gets_no_gradient_of_its_own():
    """Changing the targets inside the prompt changes nothing: only response tokens are scored."""
    group = fresh_group("a", [True, False], seed=3)
    rows = r3.training_examples([group], ONE_RANK, r3.Config())
    run = train_run(random_model())
    sums = r3.add_gradient(run, rows)
    tokens = sum(len(a.response_ids) for a in group.responses)
    scored = r3.logprobs(run, run.policy, rows)
    assert scored.shape == (tokens,) and sums["kl"][1] == tokens


def test_an_injected_sample_changes_the_gradient_and_its_ratio_is_not_one():
    group = fresh_group("a", [False, False], seed=4)
    old = fresh_group("a", [True], seed=5).responses[0]
    stale = replace(old, logprobs=np.full(len(old.response_ids), -3.0, np.float32))
    mixed = replace(group, responses=(*group.responses, stale), rewards=(*group.rewards, 1.0))
    run = train_run(random_model())
    with_replay = step_on(run, [mixed])
    assert with_replay["ratio_replayed"][0] / with_replay["ratio_replayed"][1] != pytest.approx(1.0, abs=1e-3)
    assert r3.training_examples([group], run.ranks, run.config) == []  # without it there is nothing to learn from


def gradient_with(extra: list, policy_seed: int = 0, **changes) -> tuple[torch.Tensor, dict]:
    """The gradient over a mixed group, with one of its responses repeated as replayed, off by `extra` nats a token."""
    group = fresh_group("a", [True, False, True, False], seed=6)
    run = train_run(random_model(seed=policy_seed), grad_clip=1e9, lr=1e-12, **changes)
    examples = r3.training_examples([group], run.ranks, run.config)
    now = [r3.logprobs(run, run.policy, [example]).detach().numpy() for example in examples]
    responses = [replace(r, logprobs=logp) for r, logp in zip(group.responses, now, strict=True)]
    rewards = list(group.rewards)
    for verdict, nats in extra:
        response = next(r for r in responses if r.correct is verdict)
        responses.append(replace(response, logprobs=response.logprobs - np.float32(nats)))
        rewards.append(response.reward)
    metrics = step_on(run, [replace(group, responses=tuple(responses), rewards=tuple(rewards))])
    gradient = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in run.policy.parameters()]
    return torch.cat(gradient), metrics


@pytest.mark.parametrize("nats", [88.0, -88.0, 300.0, -300.0])
@pytest.mark.parametrize("verdict", [True, False])
def test_one_replayed_response_far_off_the_policy_does_not_take_the_step_away(verdict, nats):
    """Its tokens have no gradient (a ratio of e^-20 is none), and the gradient of the other responses stays."""
    without, _ = gradient_with([(verdict, 0.0)])
    with_far_one, metrics = gradient_with([(verdict, nats)])
    assert metrics["skipped"] == (0.0, 1.0) and np.isfinite(metrics["loss"][0])
    cosine = torch.nn.functional.cosine_similarity(without, with_far_one, dim=0)
    assert cosine > 0.7 and 0.3 < with_far_one.norm() / without.norm() < 3


def test_dual_clip_bounds_the_ratio_of_negative_advantages_alone():
    """Ye et al. 2020: J is at least c A where A < 0; a token beyond it has no gradient."""
    logp = torch.tensor([0.0, 2.0, 2.0, 0.5], requires_grad=True)
    A, one = torch.tensor([-1.0, -1.0, 1.0, -1.0]), torch.ones(4)
    loss, _ = r3.grpo_loss(logp, torch.zeros(4), None, A, one, 0.2, 0.28, 0.0, dual_clip=3.0)
    loss.backward()
    e = torch.exp(torch.tensor(0.5)).item()
    assert loss.item() == pytest.approx(1 + 3 - 1.28 + e)
    assert logp.grad.tolist() == pytest.approx([1.0, 0.0, 0.0, e])
    without, _ = r3.grpo_loss(logp, torch.zeros(4), None, A, one, 0.2, 0.28, 0.0)
    assert without.item() == pytest.approx(1 + torch.exp(torch.tensor(2.0)).item() - 1.28 + e)


def test_a_reference_far_off_the_policy_leaves_the_loss_finite():
    logp = torch.tensor([-100.0, -1.0], requires_grad=True)
    one = torch.ones(2)
    loss, sums = r3.grpo_loss(logp, logp.detach(), torch.tensor([-1.0, -100.0]), one, one, 0.2, 0.28, 0.001)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(sums["kl"]) and torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("choice", [{"replay_logp": "current"}, {"replay_prompt": "group"}])
def test_current_log_probs_make_the_replayed_ratio_one(choice):
    group = fresh_group("a", [False, False], seed=4)
    stale = replace(fresh_group("a", [True], seed=5).responses[0], logprobs=np.full(6, -3.0, np.float32))
    mixed = replace(group, responses=(*group.responses, stale), rewards=(*group.rewards, 1.0))
    run = train_run(random_model())
    run.config = replace(run.config, **choice)
    total, tokens = step_on(run, [mixed])["ratio_replayed"]
    assert total / tokens == pytest.approx(1.0)


def test_nothing_to_train_on_skips_the_step_without_nan():
    run = train_run(random_model())
    before = copy.deepcopy(run.policy.state_dict())
    metrics = r3.update(run, [fresh_group("a", [False, False])], step=1)
    assert metrics["skipped"] == (1.0, 1.0)
    assert all(torch.equal(before[k], v) for k, v in run.policy.state_dict().items())


def test_minibatches_take_pi_old_once_before_the_first_step():
    groups = [fresh_group(uid, [True, False, False], seed=i) for i, uid in enumerate("ab")]
    run = train_run(random_model())
    run.config = replace(run.config, minibatches=2, lr=1e-2)
    seen, loss = [], r3.grpo_loss

    def spy(logp, old_logp, *rest):
        seen.append((logp.detach().clone(), old_logp.clone()))
        return loss(logp, old_logp, *rest)

    r3.grpo_loss = spy
    try:
        r3.update(run, groups, step=1)
    finally:
        r3.grpo_loss = loss
    (first, first_old), (second, second_old) = seen
    torch.testing.assert_close(first, first_old)
    assert (second - second_old).abs().max() > 1e-3  # the policy moved, pi_old did not


def test_attempts_of_a_group_are_not_modified_by_an_update():
    group = fresh_group("a", [True, False])
    before = [(list(a.response_ids), a.logprobs.copy(), a.reward) for a in group.responses]
    r3.update(train_run(random_model()), [group], step=1)
    assert all(
        list(a.response_ids) == ids and (a.logprobs == logp).all() and a.reward == reward
        for a, (ids, logp, reward) in zip(group.responses, before, strict=True)
    )
    assert isinstance(group.responses[0], Response)
