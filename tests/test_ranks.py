"""Several ranks, sharded weights and mixed precision: the same gradient as one rank in the same numerics, with gloo."""
# ruff: noqa: F401, F811  the fixture short_model is imported

import functools
import multiprocessing
import os
import socket
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fresh_group, random_model, step_on, train_run
from tiny_run import SHORT, RuleVerifier, short_model

import r3
import verify
from replay import ReplayBuffer, Response
from runtime import model as lm
from runtime import run as run_module
from runtime.problems import Problem
from runtime.ranks import Ranks
from runtime.sharding import blocks, full, recompute_activations, shard

ALONE = Ranks(0, 1, torch.device("cpu"))
ROWS = [([5, 6, 7], [8, 9, 1]), ([4], [3, 3, 7, 7, 1]), ([9, 9, 9, 9, 2], [1])]
GROUPS = [fresh_group(uid, [True, False, False], seed=i) for i, uid in enumerate("abcdefgh")]


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    ALONE.stop()


def on_rank(rank: int, size: int, port: int, work, out: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = Ranks.start("cpu")
    torch.save(work(ranks), out / f"{rank}.pt")
    ranks.stop()


def on_ranks(size: int, work, tmp_path) -> list:
    """What work(ranks) returns on each of `size` gloo ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    forks = multiprocessing.get_context("fork")
    children = [forks.Process(target=on_rank, args=(r, size, port, work, tmp_path)) for r in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join(90)
        assert child.exitcode == 0
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]


def gradient(ranks: Ranks, groups, dtype=torch.float32, **changes) -> torch.Tensor:
    """The gradient of one optimiser step, each rank with its share of the groups."""
    policy = random_model()
    shard(policy, ranks, dtype)
    run = train_run(policy, grad_clip=1e9, **changes)
    run.ranks = ranks
    run.optimizer.step = lambda: None
    mine = ranks.share(g.uid for g in groups)
    step_on(run, [g for g in groups if g.uid in mine])
    return torch.cat([full(p.grad).flatten() for p in policy.parameters()])


@pytest.mark.parametrize("size", [2, 4])
def test_the_gradient_is_the_same_for_one_rank_and_several(size, tmp_path):
    alone = gradient(ALONE, GROUPS)
    for found in on_ranks(size, functools.partial(gradient, groups=GROUPS), tmp_path):
        assert (found - alone).norm() < 1e-6 * alone.norm()


def test_a_rank_without_rows_and_ranks_with_other_numbers_of_micro_batches_take_part(tmp_path):
    """Two groups for four ranks, and a token budget that makes a micro-batch of each response."""
    alone = gradient(ALONE, GROUPS[:2])
    for found in on_ranks(4, functools.partial(gradient, groups=GROUPS[:2], token_budget=1), tmp_path):
        assert (found - alone).norm() < 1e-6 * alone.norm()


def test_every_rank_has_the_same_number_of_queries():
    uids = [f"q{i}" for i in range(41)]
    for size in (1, 2, 4, 8):
        shares = [Ranks(rank, size, torch.device("cpu")).share(reversed(uids)) for rank in range(size)]
        assert sorted(uid for share in shares for uid in share) == sorted(uids)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def sampled(ranks: Ranks, epochs: int, lengths: dict[str, int], steps: int = 8) -> list[list[str]]:
    """The uids of each step of a rank whose responses have these lengths, 4 queries per step and rank."""
    mine = ranks.share(lengths)
    problems = [Problem(uid, uid, "1", uid) for uid in lengths if uid in mine]
    c, buffer, out = r3.Config(batch_size=4 * ranks.size), ReplayBuffer(), []
    run = types.SimpleNamespace(config=c, ranks=ranks, problems=problems, buffer=buffer, steps_per_epoch=steps)
    for step in range(1, epochs * steps + 1):
        batch = [problem.uid for problem in r3.batch_of(run, step)]
        again = ReplayBuffer()
        again.load_state_dict(buffer.state_dict())  # as after a resume at this step
        run.buffer = again
        assert [problem.uid for problem in r3.batch_of(run, step)] == batch
        run.buffer = buffer
        for uid in batch:
            response = Response([1], [2] * lengths[uid], np.zeros(lengths[uid]), False, False, 0.0, step)
            buffer.add(uid, [response, response])
        out.append(batch)
    return out


def test_long_queries_are_spread_over_the_steps_of_all_ranks_once_their_lengths_are_known():
    """Each rank visits each of its queries once per epoch; the slowest rank has little more to sample than the mean."""
    lengths = {f"q{i}": 8 if i % 4 else 100 + 5 * i for i in range(4 * 4 * 8)}
    of_ranks = [sampled(Ranks(rank, 4, torch.device("cpu")), 2, lengths) for rank in range(4)]
    excess = []
    for epoch in range(2):
        parts = [steps[8 * epoch :][:8] for steps in of_ranks]
        assert sorted(uid for steps in parts for step in steps for uid in step) == sorted(lengths)
        tokens = np.array([[sum(lengths[uid] for uid in step) for step in steps] for steps in parts])  # (rank, step)
        excess.append((tokens.max(0) / tokens.mean(0) - 1).mean())
    assert excess[1] < 0.6 * excess[0], excess


def waited(ranks: Ranks) -> float | None:
    run = types.SimpleNamespace(seconds={"collect": 1.0 + 2 * ranks.rank, "update": 1.0}, step=1)
    run.ranks, run.config = ranks, r3.Config(log_samples=0)
    run.sampler, run.verifier = types.SimpleNamespace(load_seconds=0.0), types.SimpleNamespace(killed=0)
    run.logs = types.SimpleNamespace(row=lambda row: setattr(run, "row", row), samples=lambda rows: None)
    run.logs.sampled_tokens, run.pass_at_1 = 0, None
    run.bar = types.SimpleNamespace(set_postfix=lambda *_, **__: None, update=lambda: None)
    run_module.log_step(run, 1, [], [], {})
    return run.row["seconds_waited"] if ranks.main else None


def test_the_wait_for_the_slowest_rank_is_a_metric(tmp_path):
    assert on_ranks(2, waited, tmp_path)[0] == 1.0  # 3 s and 1 s: one waits 2 s, the other one not at all


# ------------------------------------------------------------------------------------------------------ one numerics


def test_a_policy_with_fp32_masters_computes_as_a_model_that_was_loaded_in_bf16(tmp_path):
    random_model().save_pretrained(tmp_path)
    loaded = type(random_model()).from_pretrained(tmp_path, dtype=torch.bfloat16)
    policy = random_model()
    shard(policy, ALONE, torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    for found, expected in zip(lm.token_logprobs(policy, ROWS, 1.0), lm.token_logprobs(loaded, ROWS, 1.0), strict=True):
        assert torch.equal(found, expected)


# --------------------------------------------------------------------------------------------- activation checkpointing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpointed_blocks_run_twice_and_give_the_same_gradient(dtype):
    calls, gradients = [], []
    for recompute in (False, True):
        policy = random_model()
        for block in blocks(policy):
            block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        if recompute:
            recompute_activations(policy)
        shard(policy, ALONE, dtype)
        calls.clear()
        lm.token_logprobs(policy, ROWS, 1.0)[0].sum().backward()
        assert len(calls) == (4 if recompute else 2)
        gradients.append(torch.cat([full(p.grad).flatten() for p in policy.parameters()]))
        with torch.no_grad():
            calls.clear()
            lm.token_logprobs(policy, ROWS, 1.0)
        assert len(calls) == 2
    assert torch.equal(*gradients)


# ------------------------------------------------------------------------------------- what is left between numerics


def gap_run(shift: float, **changes):
    group = fresh_group("a", [True, False, True, False], seed=6)
    run = train_run(random_model(), grad_clip=1e9, lr=1e-12, **changes)
    now = [r3.logprobs(run, run.policy, [e]).detach().numpy() for e in r3.training_examples([group], ALONE, run.config)]
    responses = tuple(r3.replace(r, logprobs=x - shift) for r, x in zip(group.responses, now, strict=True))
    metrics = step_on(run, [r3.replace(group, responses=responses)])
    return metrics, torch.cat([p.grad.flatten() for p in run.policy.parameters() if p.grad is not None])


def test_logp_gap_is_the_distance_of_trainer_and_sampler_on_fresh_tokens():
    metrics, _ = gap_run(0.25)
    assert metrics["logp_gap"][0] / metrics["logp_gap"][1] == pytest.approx(0.25, abs=1e-5)
    assert metrics["logp_gap_max"] == (pytest.approx(0.25, abs=1e-5), 1.0)


def test_importance_sampling_weighs_by_trainer_over_sampler_up_to_tis_cap():
    _, plain = gap_run(0.0)
    for shift, factor in ((0.25, 2.718281828**0.25), (-0.5, 2.718281828**-0.5), (5.0, 2.0)):
        _, weighed = gap_run(shift)
        assert (weighed - plain * factor).norm() < 1e-5 * plain.norm()
    _, wider = gap_run(5.0, tis_cap=3.0)
    assert (wider - plain * 3).norm() < 1e-5 * plain.norm()


# ------------------------------------------------------------------------------------------------------------- resume


def state_of(ranks: Ranks, arguments: list[str], steps: int) -> dict:
    """Resumes a run on these ranks, trains until `steps`, and returns all that it then consists of."""
    ended = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Verifier", RuleVerifier)
        patch.setattr(verify, "check", lambda problems: [])
        patch.setattr(Ranks, "stop", lambda self: None)  # the process group is the test's
        patch.setattr(Ranks, "start", classmethod(lambda cls, *_: ranks))
        patch.setattr(run_module, "print_result", lambda run: None)
        begun = run_module.set_up

        def set_up(*args):
            run = begun(*args)
            ended.extend([run, {"start": parts_of(run)}])
            return run

        patch.setattr(run_module, "set_up", set_up)
        r3.main([*arguments, f"--steps={steps}", "--resume", "--override_config"])
    run, states = ended
    return states | {"end": parts_of(run)}


def parts_of(run) -> dict:
    state, named = run.optimizer.state, dict(run.policy.named_parameters())
    moments = {f"{n}/{k}": full(v).clone() for n, p in named.items() for k, v in state[p].items()}
    stored = {number: (uid, r.response_ids.tolist()) for number, (uid, r) in run.buffer.stored.items()}
    stored = {uid: [ids for of, ids in stored.values() if of == uid] for uid, _ in stored.values()}
    weights = {name: full(p).clone() for name, p in run.policy.named_parameters()}
    return {"step": run.step, "weights": weights, "moments": moments, "buffer": stored}


def test_resume_on_1_2_4_and_1_ranks_keeps_weights_moments_buffer_and_position(short_model, problem_file, tmp_path):
    given = {"model": short_model, "data": problem_file, "run_dir": tmp_path / "run"}
    arguments = [f"--{key}={value}" for key, value in (given | SHORT).items()]
    ends, steps = None, 0
    for size in (1, 2, 4, 1):
        steps += 2
        work = functools.partial(state_of, arguments=arguments, steps=steps)
        states = [work(ALONE)] if size == 1 else on_ranks(size, work, tmp_path)
        if ends:
            for state in states:
                for part in ("weights", "moments"):
                    assert state["start"][part].keys() == ends[0][part].keys()
                    for name, x in ends[0][part].items():
                        assert torch.equal(state["start"][part][name], x), f"{size} ranks: {name}"
                assert state["start"]["step"] == steps - 2
            before, after = ({}, {})
            for collected, parts in ((before, ends), (after, [s["start"] for s in states])):
                for part in parts:
                    collected.update(part["buffer"])
            assert before and before == after
        ends = [state["end"] for state in states]
        assert all(end["step"] == steps for end in ends)
