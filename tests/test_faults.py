"""What goes wrong in a run of days, injected: each fault is skipped, retried or ends the run with its state saved."""
# ruff: noqa: F401, F811  the fixtures short_model, start and unbroken are imported

import math
import os
import signal
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from test_signals import AlgebraVerifier, descendants
from tiny_run import RuleVerifier, assert_same_run, at, checkpoints, crash, rows, short_model, start, unbroken

import r3
import rollout
import verify
from runtime import model as lm
from runtime import optimizer
from runtime.errors import UserError
from sampling import gumbel

# ------------------------------------------------------------------------------------------------------------- safety


def test_run_from_local_files_opens_no_connection(start, tmp_path, monkeypatch):
    """Nothing is asked of the hub, even where it may be asked, and nothing is sent."""

    def refuse(*_, **__):
        raise AssertionError("a connection")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for place in ("socket.socket.connect", "socket.socket.sendto", "socket.getaddrinfo"):
        monkeypatch.setattr(place, refuse)
    start(tmp_path / "run", steps=2)


def test_code_of_a_model_is_not_run_unless_asked(short_model, monkeypatch):
    assert r3.Config().trust_remote_code is False
    asked = []
    monkeypatch.setattr(lm.AutoConfig, "from_pretrained", lambda *_, trust_remote_code: asked.append(trust_remote_code))
    for trust in (False, True):
        with pytest.raises(UserError):
            lm.load(str(short_model), "cpu", torch.float32, *[trust] * trust)
    assert asked == [False, True]


# ------------------------------------------------------------------------------------------------ numbers that are none


def spoil(monkeypatch, module, name: str, calls, spoiled):
    """Hands what module.name returns to `spoiled(result, its arguments)` in these calls, counted from 1."""
    original, count = getattr(module, name), 0

    def patched(*args, **kwargs):
        nonlocal count
        count += 1
        result = original(*args, **kwargs)
        return spoiled(result, *args) if count in calls else result

    monkeypatch.setattr(module, name, patched)


def nan_loss(result, *_):
    loss, sums = result
    return loss * math.nan, sums


def infinite_gradient(sums, run, *_):
    next(iter(run.policy.parameters())).grad[0, 0] = math.inf
    return sums


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "model.safetensors")


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("name", "fault"), [("grpo_loss", nan_loss), ("gradient", infinite_gradient)])
def test_step_with_a_loss_or_gradient_that_is_not_finite_is_skipped(start, tmp_path, name, fault, monkeypatch, capsys):
    spoil(monkeypatch, optimizer if name == "gradient" else r3, name, [3], fault)
    run_dir = start(tmp_path / "run", token_budget=99999)  # one micro-batch a step
    assert same(weights(run_dir, 2), weights(run_dir, 3)) and not same(weights(run_dir, 3), weights(run_dir, 4))
    steps = [row for row in rows(run_dir) if "skipped" in row]
    assert [row["skipped"] for row in steps] == [0, 0, 1, 0, 0, 0]
    assert steps[2]["loss"] is None and steps[2]["grad_norm"] is None and steps[2]["reward"] is not None
    said = capsys.readouterr().err
    assert "step skipped; its queries: q" in said


def test_ten_such_steps_in_a_row_end_the_run_with_its_state_saved(start, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, r3, "grpo_loss", range(5, 15), nan_loss)
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", steps=18, token_budget=99999, save_every=99, eval_data="")
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: lr = 0.001: ten steps in a row")
    assert list(checkpoints(tmp_path / "run")) == ["step_000013"]


def test_nine_such_steps_do_not_end_the_run_and_the_count_is_part_of_a_checkpoint(start, tmp_path, monkeypatch):
    changes = {"epochs": 99, "token_budget": 99999, "eval_data": "", "save_every": 7}
    spoil(monkeypatch, r3, "grpo_loss", {*range(2, 11), *range(12, 99)}, nan_loss)
    start(tmp_path / "run", steps=14, **changes)
    with pytest.raises(SystemExit):
        start(tmp_path / "run", steps=30, resume=True, override_config=True, **changes)
    assert max(checkpoints(tmp_path / "run")) == "step_000020"  # three in a row before 14, six after it, and the tenth


def test_weights_that_are_not_finite_are_never_saved(start, tmp_path, monkeypatch, capsys):
    """Neither in time, where they would push out the good ones, nor when the run ends for them."""

    def spoil_weights(result, run, *_):
        with torch.no_grad():
            next(iter(run.policy.parameters()))[5] = math.inf
        return result

    spoil(monkeypatch, r3, "update", [3], spoil_weights)
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", checkpoints_kept=1, eval_data="")
    assert end.value.code == 2 and "weights are not finite after step 3" in capsys.readouterr().err.splitlines()[-1]
    assert list(checkpoints(tmp_path / "run")) == ["step_000002"]


def test_sampling_from_logits_that_are_not_finite_names_the_query(start, tmp_path, monkeypatch, capsys):
    draw = gumbel.sample
    spoil(monkeypatch, gumbel, "sample", [70], lambda _, logits, *rest: draw(logits * math.nan, *rest))
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", save_every=99, eval_data="")
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and said.startswith("error: query 'q") and "logits are not finite" in said
    finished = max(row["step"] for row in rows(tmp_path / "run"))
    assert finished >= 2 and list(checkpoints(tmp_path / "run")) == [f"step_{finished:06d}"]


# ------------------------------------------------------------------------------------------------ nothing to learn from


def verifier_that_says(correct: bool):
    class Verifier(RuleVerifier):
        def submit(self, response, answer, uid=""):
            return super().submit("" if correct else "x", answer, uid)

    return Verifier


DYNAMIC = {"dynamic_sampling": True, "replay": False}


@pytest.mark.parametrize("changes", [DYNAMIC, {"length_reward": 0}], ids=str)
def test_step_whose_groups_are_all_filtered_is_skipped(start, tmp_path, short_model, changes, monkeypatch):
    """Neither weights nor moments change, and weight decay does not act alone."""
    monkeypatch.setattr("tiny_run.RuleVerifier", verifier_that_says(False))
    run_dir = start(tmp_path / "run", rank=False, weight_decay=0.1, **changes)
    assert [row["skipped"] for row in rows(run_dir) if "skipped" in row] == [1] * 6
    assert same(weights(run_dir, 6), load_file(short_model / "model.safetensors"))


# -------------------------------------------------------------------------------------------------------- out of memory


def test_micro_batch_without_memory_is_halved_and_leaves_no_gradient(unbroken, start, tmp_path, monkeypatch):
    """The fault strikes after the micro-batch's gradient was added, which is the worst moment."""
    budgets, original, micro_batches = [], r3.add_gradient, optimizer.micro_batches

    def add_gradient(run, examples):
        sums = original(run, examples)
        if budgets[-1] == 128:
            raise torch.OutOfMemoryError("a fault that a test injected")
        return sums

    def noting_budget(lengths, token_budget):
        budgets.append(token_budget)
        return micro_batches(lengths, token_budget)

    expected = unbroken(token_budget=64)
    monkeypatch.setattr(r3, "add_gradient", add_gradient)
    monkeypatch.setattr(optimizer, "micro_batches", noting_budget)
    run_dir = start(tmp_path / "run", token_budget=128)
    assert budgets == [128, 64] * 6
    assert_same_run(expected, run_dir)


def no_memory():
    raise torch.OutOfMemoryError("a fault that a test injected")


def test_no_memory_for_half_a_micro_batch_ends_the_run_saying_why(start, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, r3, "add_gradient", range(8, 999), lambda *_: no_memory())
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", token_budget=256, save_every=99, eval_data="")
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    for number in ("token_budget = 256", "max_new_tokens", "slots", "gradient_checkpointing"):
        assert number in said
    finished = max(row["step"] for row in rows(tmp_path / "run"))
    assert list(checkpoints(tmp_path / "run")) == [f"step_{finished:06d}"]


def test_no_memory_while_sampling_ends_the_run_with_what_to_change(start, tmp_path, capsys):
    with at(rollout.Sampler, "generate", 3, no_memory), pytest.raises(SystemExit) as end:
        start(tmp_path / "run", save_every=99, eval_data="")
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "out of memory while sampling" in said
    assert "slots" in said and "max_new_tokens" in said
    assert list(checkpoints(tmp_path / "run")) == ["step_000002"]


@pytest.mark.parametrize(("module", "name"), [(torch.optim.AdamW, "step"), (r3, "with_old_logprobs"), (r3.lm, "load")])
def test_no_memory_anywhere_else_is_one_line_that_says_what_helps(start, tmp_path, module, name, capsys):
    with at(module, name, 1, no_memory), pytest.raises(SystemExit) as end:
        start(tmp_path / "run", minibatches=2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and "token_budget" in said and "gradient_checkpointing" in said


# -------------------------------------------------------------------------------------------------------- the verifier


def test_worker_that_dies_is_replaced_and_the_run_goes_on(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_run.RuleVerifier", AlgebraVerifier)
    killed = []

    def kill_workers(result, *_):
        killed.extend(descendants(os.getpid()))
        for worker in killed:
            os.kill(worker, signal.SIGKILL)
        return result

    spoil(monkeypatch, r3, "update", [1], kill_workers)
    run_dir = start(tmp_path / "run", steps=2, eval_data="")
    assert len(killed) == 1
    assert [row["step"] for row in rows(run_dir)] == [1, 2]


def test_worker_that_cannot_start_ends_the_run_with_its_state_saved(start, tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_run.RuleVerifier", AlgebraVerifier)
    monkeypatch.setattr(verify.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="worker did not start"):
        start(tmp_path / "run", eval_data="")


def test_judge_that_raises_ends_the_run_with_its_state_saved(unbroken, start, tmp_path):
    with at(RuleVerifier, "submit", 60, crash), pytest.raises(RuntimeError, match="a fault that a test injected"):
        start(tmp_path / "run", save_every=99)
    finished = max(row["step"] for row in rows(tmp_path / "run") if "loss" in row)
    assert list(checkpoints(tmp_path / "run")) == [f"step_{finished:06d}"]
    start(tmp_path / "run", save_every=99, resume=True)
    assert_same_run(unbroken(save_every=99), tmp_path / "run", last_checkpoint_only=True)
