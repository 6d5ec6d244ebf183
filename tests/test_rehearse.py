"""The two runs that the project is for, without a card: a step of each under fake tensors, and the memory it plans."""

import gc
import json
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch
from conftest import random_model
from transformers import Qwen2Config

import r3
from rollout import Sampler
from runtime import config as settings
from runtime import memory
from runtime.errors import UserError
from runtime.ranks import Ranks

ROOT = Path(__file__).parent.parent
RUNS = {"r3_1.5b": (1, 1_777_088_000), "r3_7b": (8, 7_615_616_512)}  # cards, parameters


def python(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess:
    """A process of its own: the fake card is there for good, and resident memory counts all that it ever held."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | paths | environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 or not check, done.stderr
    return done


# ------------------------------------------------------------------------------------------- the two real configs


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, dict]:
    folder, found = tmp_path_factory.mktemp("plans"), {}
    every = ["--gb", "300", "--slots=8", "--gradient_checkpointing=false"]
    for name, config, *more in (*((name, name) for name in RUNS), ("keeps activations", "r3_1.5b", *every)):
        file, gpus = folder / f"{name}.json", str(RUNS[config][0])
        python("bench/memory.py", "--config", f"configs/{config}.yaml", "--gpus", gpus, "--json", str(file), *more)
        found[name] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_step_at_true_sizes_runs_and_leaves_a_tenth_of_80_gb(plans, name):
    """memory.py rehearses the step, so an operation that waits for the device or does not fit fails here, too."""
    phases = {row["phase"]: row for row in plans[name]["phases"]}
    assert list(phases) == ["load", "update", "save", "sampling"]
    assert all(row["total"] <= 72 for row in phases.values() if "total" in row)
    assert phases["sampling"]["cache"] > 30 and phases["update"]["cache"] == 0


@pytest.mark.parametrize("name", RUNS)
def test_without_a_number_the_slots_take_what_the_plan_leaves_of_the_card(plans, name):
    (sampling,) = (row["total"] for row in plans[name]["phases"] if row["phase"] == "sampling")
    assert plans[name]["config"]["slots"] is None and 71 < sampling <= 72


def test_a_card_never_gets_more_slots_than_the_step_has_responses(monkeypatch):
    shape = Qwen2Config(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    policy = types.SimpleNamespace(config=shape, parameters=lambda: [torch.zeros(1000, 1000)])
    monkeypatch.setattr(memory, "card_bytes", lambda _: 80 * 10**9)
    for reflect, ranks, slots in ((True, 1, 64), (False, 1, 32), (False, 2, 16)):
        c = r3.Config(batch_size=4, group_size=8, reflect=reflect)
        assert memory.most_slots(c, policy, Ranks(0, ranks, torch.device("cuda")), 512) == slots


def test_recomputed_activations_take_at_most_a_fifth(plans):
    """Of the 1.5B shape at 32K tokens: all that an update takes beside weights, moments and gradients."""
    kept, recomputed = (plans[name]["phases"][1]["working"] for name in ("keeps activations", "r3_1.5b"))
    assert 0 < recomputed <= kept / 5


@pytest.mark.parametrize("name", RUNS)
def test_weights_and_moments_are_those_of_the_model_spread_over_the_cards(plans, name):
    gpus, parameters = RUNS[name]
    row = plans[name]["phases"][1]
    assert row["weights"] == pytest.approx(4e-9 * parameters / gpus, rel=1e-3)
    assert row["moments"] == pytest.approx(8e-9 * parameters / gpus, rel=1e-3)
    assert row["sampler"] == pytest.approx(2e-9 * parameters, rel=1e-3)


@pytest.fixture
def benches(monkeypatch):
    """The scripts of bench/ can be imported, behind the modules of the project, for as long as a test lasts."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "bench")])


@pytest.mark.parametrize("name", RUNS)
def test_the_formula_that_a_run_begins_with_is_within_a_twentieth_of_the_rehearsal(plans, name, benches):
    import rehearse

    gpus, parameters = RUNS[name]
    c = settings.parse(r3.Config, ["--config", f"configs/{name}.yaml"])
    longest = c.max_prompt_tokens + c.reflection_tokens + rehearse.TEMPLATE_TOKENS + c.max_new_tokens
    needed = memory.needed(c, rehearse.shape_of(c.model), parameters, gpus, plans[name]["slots"], longest)
    for row in plans[name]["phases"]:
        if row["phase"] in needed:
            assert needed[row["phase"]] / 1e9 == pytest.approx(row["total"], rel=0.05)


def test_a_plan_that_does_not_fit_is_refused_with_the_keys_that_help(plans, benches):
    from bench.memory import check

    table = plans["r3_1.5b"]["phases"]
    check(table, 80)
    with pytest.raises(UserError, match=r"sampling needs 71.* allowed: 54.0 of a card of 60; what helps: less slots"):
        check(table, 60)
    with pytest.raises(UserError, match=r"update needs 47.* allowed: 36.0 of a card of 40; what helps: less token_bud"):
        check(table, 40)


@pytest.mark.parametrize(("script", "wrong"), [("memory", ("--gpus", "0")), ("rehearse", ("--gb", "-1"))])
def test_no_cards_and_cards_without_memory_are_refused_in_one_line(script, wrong):
    done = python(f"bench/{script}.py", "--config", "configs/r3_1.5b.yaml", *wrong, check=False)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith("error: command line: --gpus")
    assert "Traceback" not in done.stderr


def test_a_run_refuses_a_card_that_is_too_small_before_its_first_step(monkeypatch):
    shape = Qwen2Config(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    policy = types.SimpleNamespace(config=shape, parameters=lambda: [torch.zeros(1000, 1000)])
    sampler, c = types.SimpleNamespace(slots=4, max_len=512), r3.Config(token_budget=4096)
    card = Ranks(0, 1, torch.device("cuda"))
    for gb, fits in ((80, True), (1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, gb=gb: (0, int(gb * 1e9)))
        memory.refuse(c, policy, sampler, Ranks(0, 1, torch.device("cpu")))
        if fits:
            memory.refuse(c, policy, sampler, card)
        else:
            with pytest.raises(UserError, match=r"sampling needs .* allowed: 0.9 .* slots"):
                memory.refuse(c, policy, sampler, card)


# -------------------------------------------------------------------------------------------------- what is refused

REFUSED = """
import torch, rehearse, r3, rollout, runtime.model
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from transformers import Qwen2Config

shape = Qwen2Config(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
c = r3.Config(slots=8, token_budget=512, max_new_tokens=64, max_prompt_tokens=64, gradient_checkpointing=True)
memory = rehearse.Memory()
seen = []

def refuses(error, work):
    try:
        work()
    except error:
        seen.append(work)
    else:
        raise SystemExit(f"not refused: {len(seen)}")

with rehearse.fake_card(2, memory, 80) as card:
    run = rehearse.Rehearsal(c, shape, rehearse.OneOf(0, 2, card), torch.bfloat16, memory)
    run.update()
    run.sample()
    x, host = torch.ones(4, device=card), torch.ones(4)
    refuses(DataDependentOutputException, lambda: x.sum().item())
    refuses(DynamicOutputShapeException, lambda: x[x > 0])
    refuses(DynamicOutputShapeException, lambda: torch.where(x > 0))
    with memory.refusing("waits"):
        host.to(card, non_blocking=True)
        refuses(rehearse.Waits, lambda: host.to(card))
        refuses(rehearse.Waits, lambda: torch.tensor([1, 2], device=card))
        refuses(rehearse.Waits, lambda: x.cpu())
    with memory.refusing("copies"):
        refuses(rehearse.Waits, lambda: host.to(card, non_blocking=True))
    draw, score = rollout.gumbel.sample, r3.grpo_loss
    rollout.gumbel.sample = lambda logits, *rest: (logits.cpu(), draw(logits, *rest))[1]
    refuses(rehearse.Waits, run.sample)
    r3.grpo_loss = lambda logp, *rest: (logp.cpu(), score(logp, *rest))[1]
    refuses(rehearse.Waits, run.update)
print("all refused")
"""


def test_a_decode_step_that_copies_and_an_update_that_waits_are_refused():
    assert python("-c", REFUSED).stdout.endswith("all refused\n")


def test_a_released_cache_is_gone_with_its_last_reference():
    """Not only after the next garbage collection: the update needs its memory at once."""
    sampler = Sampler(random_model(), {0}, slots=2, max_len=16)
    gc.disable()
    try:
        sampler.generate([[3, 4]], n=2, max_new_tokens=4)
        cache = weakref.ref(sampler.cache)
        sampler.release()
        sampler.forward = None
        assert cache() is None
    finally:
        gc.enable()


# --------------------------------------------------------------------------------- the plan against measured memory

MEASURE = """
import gc, sys, torch, rehearse, r3
from pathlib import Path
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2Config

torch.set_num_threads(1)
memory, inside = rehearse.Memory(), rehearse.entropy._inside
torch.nn.Linear(256, 256)(torch.ones(64, 256)).sum().backward()  # libraries are loaded and their threads begun

def resident(field):
    return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) * 1024

for hidden, layers, vocabulary, tokens, checkpointing in eval(sys.argv[1]):
    shape = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden,
                        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4)
    c = r3.Config(token_budget=tokens, max_new_tokens=tokens, max_prompt_tokens=1, reflect=False,
                  gradient_checkpointing=checkpointing)

    def build():
        return rehearse.Rehearsal(c, shape, rehearse.OneOf(0, 1, torch.device("cpu")), torch.float32, memory)

    rehearse.entropy._inside = lambda y, logits: torch.arange(len(y))  # the CPU's path looks for them
    with FakeTensorMode(), memory:
        run = build()
        memory.begin()
        run.update()
    rehearse.entropy._inside = inside
    planned = memory.peak["cpu"]
    del run
    gc.collect()
    before = resident("VmRSS:")
    run = build()
    with torch.no_grad():
        for model in filter(None, (run.run.policy, run.run.reference)):
            for p in model.parameters():
                p.normal_(std=0.02)
        for state in run.run.optimizer.state.values():
            for value in state.values():
                value.fill_(1e-3)  # memory counts when it is written to
    Path("/proc/self/clear_refs").write_text("5")  # the kernel starts its peak anew
    run.update()
    print(planned, resident("VmHWM:") - before)
    del run, p, model, state, value
    gc.collect()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_planned_memory_is_within_a_tenth_of_what_an_update_takes():
    """Width, blocks, vocabulary, tokens, checkpointing: mostly weights and moments, then mostly activations."""
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # freed memory goes back at once
    cases = [(512, 6, 16000, 128, True), (256, 6, 2000, 1000, False)]
    lines = python("-c", MEASURE, str(cases), **exact).stdout.splitlines()
    assert len(lines) == len(cases)
    for line in lines:
        plan, taken = map(int, line.split())
        assert plan == pytest.approx(taken, rel=0.1)


# ------------------------------------------------------------------------------------------------ the first card


def test_the_step_of_the_first_card_runs_small_on_a_cpu(tmp_path):
    file = tmp_path / "step.json"
    command = "bench/step.py", "--config", "configs/r3_1.5b.yaml", "--device", "cpu", "--small"
    python(*command, "--json", str(file))
    found = {row["what"]: row for row in json.loads(file.read_text())}
    assert all(found[name]["tokens_per_second"] > 0 for name in ("sampling", "update", "generate"))
