"""A run that is killed and resumed is the run that was never killed, bit for bit; a checkpoint is whole or absent."""
# ruff: noqa: F401, F811  the fixtures short_model, start and unbroken are imported

import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import (
    Killed,
    assert_same_run,
    at,
    checkpoints,
    crash,
    in_child,
    kill,
    needs_fork,
    reap,
    rows,
    short_model,
    start,
    terminate,
    unbroken,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import r3
from replay import ReplayBuffer
from runtime import checkpoint, files, optimizer, run
from runtime import model as lm
from runtime import ranks as machine
from runtime.errors import UserError

# ------------------------------------------------------------------------------------------------------- exact resume

VARIANTS = [
    {"minibatches": 2},
    {"save_dtype": "bfloat16"},
    {"dynamic_sampling": True, "replay": False, "rank": False},
    {"beta": 0, "weight_decay": 0.1, "dtype": "bfloat16"},
    {"buffer_tokens": 300},  # about 20 responses: the bound on all of them evicts
    {"buffer_per_query": 2},  # files of the buffer are written anew
]


@pytest.mark.parametrize("finished", [1, 2, 3, 4])  # 2 and 4 end an epoch; from 2 on, reflections are pending
def test_resumed_run_equals_the_unbroken_one(unbroken, start, tmp_path, finished):
    with at(r3, "collect", finished + 1, kill), pytest.raises(Killed):
        start(tmp_path / "run")
    assert_same_run(unbroken(), start(tmp_path / "run", resume=True))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_resumed_run_equals_the_unbroken_one_with_other_configs(unbroken, start, tmp_path, changes):
    with at(r3, "collect", 4, kill), pytest.raises(Killed):
        start(tmp_path / "run", **changes)
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes))


def test_these_runs_reflect_replay_and_rank(unbroken):
    """Otherwise the tests of this file would show little."""
    steps = [row for row in rows(unbroken()) if "loss" in row]
    assert all(sum(row[name] for row in steps) > 0 for name in ("reflected", "replayed", "ranked"))
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(unbroken()) if "eval/pass@1" in row] == [0, 2, 4, 6]


ENDS = {"kill": (kill, Killed), "crash": (crash, RuntimeError), "terminate": (terminate, SystemExit)}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", ["rollout", "gradient", "with_old_logprobs"])
def test_abandoned_step_is_done_again_from_its_beginning(unbroken, start, tmp_path, place, end):
    """A crash or a signal saves the last finished step; after a kill the run goes on from the checkpoint before."""
    changes = {"minibatches": 2, "save_every": 3}
    act, raised = ENDS[end]
    first_of_step_5 = {"rollout": 5, "gradient": 9, "with_old_logprobs": 9}[place]
    with at(optimizer if place == "gradient" else r3, place, first_of_step_5, act), pytest.raises(raised):
        start(tmp_path / "run", **changes)
    assert max(checkpoints(tmp_path / "run")) == ("step_000003" if end == "kill" else "step_000004")
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes), last_checkpoint_only=True)


@pytest.mark.parametrize(("end", "saved"), [("crash", "step_000003"), ("terminate", "step_000005")])
def test_nothing_is_saved_between_two_optimiser_steps_of_a_batch(unbroken, start, tmp_path, end, saved):
    """A crash there goes back to the checkpoint before; a signal waits for the end of the step."""
    changes = {"minibatches": 2, "save_every": 3}
    act, raised = ENDS[end]
    with at(optimizer, "gradient", 10, act), pytest.raises(raised):  # the second part of step 5
        start(tmp_path / "run", **changes)
    assert max(checkpoints(tmp_path / "run")) == saved
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes), last_checkpoint_only=True)


PLACES = [(run, "evaluate", 1), (run, "evaluate", 4), (run.Logs, "answers", 2), (run.Logs, "row", 9), (run, "save", 2)]


@pytest.mark.parametrize(("module", "name", "call"), PLACES, ids=lambda part: str(getattr(part, "__name__", part)))
def test_each_evaluation_is_in_the_log_once_wherever_it_was_killed(unbroken, start, tmp_path, module, name, call):
    changes = {"save_every": 2}
    with at(module, name, call, kill), pytest.raises(Killed):
        start(tmp_path / "run", **changes)
    assert_same_run(unbroken(**changes), start(tmp_path / "run", resume=True, **changes), last_checkpoint_only=True)


def test_finished_run_that_is_resumed_changes_nothing(unbroken, start, tmp_path):
    shutil.copytree(unbroken(), tmp_path / "run")
    assert_same_run(unbroken(), start(tmp_path / "run", resume=True))


def test_log_line_cut_short_by_a_crash_is_made_anew(unbroken, start, tmp_path):
    with at(r3, "collect", 4, kill), pytest.raises(Killed):
        start(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "epo')
    assert_same_run(unbroken(), start(tmp_path / "run", resume=True))


def test_log_rows_may_hold_any_separator_that_unicode_knows(tmp_path):
    texts = ["a\u2028b", "a\x85b", "a\u2029b", "a\x1cb", "a\r\nb", "\x0c"]
    files.append(tmp_path / "log.jsonl", [{"text": text} for text in texts])
    assert [row["text"] for row in files.read_jsonl(tmp_path / "log.jsonl")] == texts


# ------------------------------------------------------------------------------------------------------------- kill -9


def kill_before_operation(n: int) -> None:
    """From here on this process counts what it does to names and contents of files, and kills itself before the nth."""
    left = n

    def hook(event: str, args: tuple) -> None:
        nonlocal left
        opened = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        left -= bool(opened) or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link")
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def sweep(unbroken, start, tmp_path, numbers) -> int:
    """Runs that are killed before the nth operation on files, and resumed; returns how many were killed: not those that
    have fewer operations."""
    changes = {"checkpoints_kept": 1, "steps": 4, "buffer_per_query": 2}  # the buffer's files are linked and replaced

    def work(n: int, run_dir: Path) -> None:
        kill_before_operation(n)
        start(run_dir, **changes)

    for kills, n in enumerate(numbers):
        run_dir = tmp_path / f"run{n}"
        if reap(in_child(partial(work, n, run_dir), tmp_path / "stderr")) == 0:
            return kills
        start(run_dir, resume=True, **changes)
        assert_same_run(unbroken(**changes), run_dir, last_checkpoint_only=True)
        assert set(os.listdir(run_dir / "checkpoints")) <= {"step_000003", "step_000004"}
        assert all(checkpoint.damaged(folder) is None for folder in (run_dir / "checkpoints").iterdir())
        shutil.rmtree(run_dir)
    return len(numbers)


def random_kills(unbroken, start, tmp_path, wanted: int, seed: int) -> int:
    """Kills runs at random moments until they are done all the same; returns the number of kills."""
    rng, kills, runs = random.Random(seed), 0, 0
    while kills < wanted:
        run_dir, ended, patience, runs = tmp_path / f"run{runs}", -signal.SIGKILL, 0.4, runs + 1
        while ended != 0:
            child = in_child(partial(start, run_dir, resume=True, steps=10), tmp_path / "stderr")
            time.sleep(rng.uniform(0, patience))
            os.kill(child, signal.SIGKILL)
            ended = reap(child)
            assert ended in (-signal.SIGKILL, 0), (tmp_path / "stderr").read_text()
            kills, patience = kills + (ended != 0), patience + 0.02  # a slow machine gets there, too
        assert_same_run(unbroken(steps=10), run_dir)
    return kills


@needs_fork
def test_run_killed_between_any_two_operations_on_files_resumes(unbroken, start, tmp_path):
    assert sweep(unbroken, start, tmp_path, [4, 50, 70]) == 3


@needs_fork
def test_run_killed_at_random_moments_resumes(unbroken, start, tmp_path):
    assert random_kills(unbroken, start, tmp_path, wanted=4, seed=0) >= 4


@needs_fork
@pytest.mark.slow
def test_run_killed_before_each_of_its_operations_on_files_resumes(unbroken, start, tmp_path):
    kills = sweep(unbroken, start, tmp_path, range(1, 1000))
    assert 100 < kills < 999
    print(f"{kills} kills")


@needs_fork
@pytest.mark.slow
def test_run_killed_200_times_at_random_moments_resumes(unbroken, start, tmp_path):
    assert random_kills(unbroken, start, tmp_path, wanted=200, seed=1) >= 200


# ------------------------------------------------------------------------------------------------- damage and limits


def damage_by_flipping(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_by_cutting(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [damage_by_flipping, damage_by_cutting, os.remove], ids=lambda f: f.__name__)
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(unbroken, tmp_path, damage, capsys):
    files = [p.relative_to(unbroken()) for p in (unbroken() / "checkpoints" / "step_000006").rglob("*") if p.is_file()]
    assert len(files) >= 10
    for file in files:
        shutil.copytree(unbroken() / "checkpoints", tmp_path / "run" / "checkpoints", dirs_exist_ok=True)
        damage(tmp_path / "run" / file)
        assert checkpoint.newest(tmp_path / "run").name == "step_000005"
        said = capsys.readouterr().err
        assert "step_000006 is damaged" in said and (file.name in said or file.name == "manifest.json")


@pytest.mark.parametrize("damage", [damage_by_flipping, damage_by_cutting])
def test_damaged_file_of_the_buffer_is_damage_of_each_checkpoint_that_shares_it(start, tmp_path, damage, capsys):
    changes = {"steps": 3, "buffer_per_query": 99}
    shutil.copytree(start(tmp_path / "run", **changes), tmp_path / "whole")
    folders = [tmp_path / "run" / "checkpoints" / f"step_00000{n}" / "training" / "buffer" for n in (1, 2, 3)]
    names = [set(os.listdir(folder)) for folder in folders]
    assert names[0] < names[1] < names[2]
    (second,) = names[1] - names[0]
    (third,) = names[2] - names[1]
    damage(folders[2] / third)
    assert checkpoint.newest(tmp_path / "run").name == "step_000002"
    damage(folders[2] / second)
    assert checkpoint.newest(tmp_path / "run").name == "step_000001"
    said = capsys.readouterr().err
    assert third in said and second in said
    assert_same_run(tmp_path / "whole", start(tmp_path / "run", resume=True, **changes))


def test_pruning_leaves_the_files_of_the_buffer_that_a_kept_checkpoint_shares(start, tmp_path):
    start(tmp_path / "run", steps=4, checkpoints_kept=1, buffer_per_query=99)
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    files = list((folder / "training" / "buffer").iterdir())
    assert len(files) == 4 and checkpoint.damaged(folder) is None  # one per step
    assert {p.stat().st_nlink for p in files} == {1}


def test_run_resumes_from_the_checkpoint_before_a_damaged_one_which_it_replaces(unbroken, start, tmp_path):
    shutil.copytree(unbroken(), tmp_path / "run")
    damage_by_flipping(tmp_path / "run" / "checkpoints" / "step_000006" / "model.safetensors")
    assert_same_run(unbroken(), start(tmp_path / "run", resume=True))


def test_only_older_checkpoints_are_pruned(unbroken, start, tmp_path):
    """A damaged newer one must not push out the whole ones that the run goes on from."""
    shutil.copytree(unbroken(), tmp_path / "run")
    damage_by_cutting(tmp_path / "run" / "checkpoints" / "step_000006" / "config.json")
    with at(r3, "collect", 1, terminate), pytest.raises(SystemExit):
        start(tmp_path / "run", resume=True, checkpoints_kept=1, override_config=True)
    assert "step_000005" in checkpoints(tmp_path / "run")


def test_run_without_a_whole_checkpoint_is_not_begun_anew(unbroken, start, tmp_path, capsys):
    shutil.copytree(unbroken(), tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        os.remove(folder / "training" / "state.json")
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", resume=True)
    assert end.value.code == 2 and "none of its 6 checkpoints is whole" in capsys.readouterr().err
    assert rows(tmp_path / "run") == rows(unbroken())


@needs_fork
def test_full_disk_is_one_line_and_the_checkpoint_before_stays(unbroken, start, tmp_path):
    """The largest file that the child may write is smaller than the model's."""
    with at(r3, "collect", 3, kill), pytest.raises(Killed):
        start(tmp_path / "run")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        start(tmp_path / "run", resume=True)

    assert reap(in_child(work, tmp_path / "stderr")) == 2
    said = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert said.startswith("error: ") and "step_000003: cannot be written" in said
    assert "newest checkpoint is" in said and "step_000002" in said
    assert list(checkpoints(tmp_path / "run")) == ["step_000001", "step_000002"]
    assert_same_run(unbroken(), start(tmp_path / "run", resume=True))


def test_log_on_a_full_disk_is_one_line():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left on device"):
        files.append(Path("/dev/full"), [{"step": 1}])


def test_place_that_cannot_be_written_is_one_line(start, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "file" / "run")
    assert end.value.code == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- what a checkpoint holds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_folder_loads_with_equal_logits(short_model, tmp_path, dtype):
    policy, tokenizer = lm.load(str(short_model), "cpu", torch.float32)
    optimizer, ranks = torch.optim.AdamW(policy.parameters()), machine.Ranks(0, 1, torch.device("cpu"))
    checkpoint.save(tmp_path, policy, tokenizer, optimizer, ReplayBuffer(), {"step": 1}, ranks, keep=1, dtype=dtype)
    folder = tmp_path / "checkpoints" / "step_000001"
    ids = torch.arange(20, 60)[None]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == getattr(torch, dtype)
    for p in policy.parameters():  # not the rotary frequencies, which stay fp32 in a model that is loaded in bf16
        p.data = p.data.to(loaded.dtype)
    assert torch.equal(loaded(ids).logits, policy(ids).logits)
    assert loaded.generation_config.eos_token_id == policy.generation_config.eos_token_id
    same = AutoTokenizer.from_pretrained(folder)
    assert same.chat_template == tokenizer.chat_template and same.get_vocab() == tokenizer.get_vocab()
    needed = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert {p.name for p in folder.iterdir()} >= set(needed.split())
    tied = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tied and {t.dtype for t in tied.values()} == {getattr(torch, dtype)}


def test_nothing_in_a_checkpoint_needs_pickle(unbroken, start, tmp_path, monkeypatch):
    suffixes = {p.suffix for p in (unbroken() / "checkpoints").rglob("*") if p.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja"}

    def refuse(*_, **__):
        raise AssertionError("pickle")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    shutil.copytree(unbroken(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000006")
    start(tmp_path / "run", resume=True)


# ----------------------------------------------------------------------------------------------- what may be resumed


def test_resuming_with_another_config_is_refused_with_the_differing_keys(unbroken, start, tmp_path, capsys):
    shutil.copytree(unbroken(), tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", resume=True, lr=2e-3, group_size=8)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert "lr (was 0.001, is 0.002)" in said and "group_size (was 4, is 8)" in said and "batch_size" not in said
    start(tmp_path / "run", resume=True, lr=2e-3, steps=7, override_config=True)
    assert [row["lr"] for row in rows(tmp_path / "run") if "lr" in row] == [1e-3] * 6 + [2e-3]


def test_run_directory_that_holds_a_run_is_not_overwritten(unbroken, start, capsys):
    before = rows(unbroken())
    with pytest.raises(SystemExit) as end:
        start(unbroken())
    assert end.value.code == 2 and "holds a run, allowed: --resume" in capsys.readouterr().err
    assert rows(unbroken()) == before


@pytest.mark.parametrize(("place", "changes"), [("collect", {"eval_data": ""}), ("evaluate", {}), ("set_up", {})])
def test_start_that_failed_before_its_first_row_does_not_hold_a_run(unbroken, start, tmp_path, place, changes):
    """Whatever it had written by then: the same command, or one with other settings, begins anew."""

    def fail():
        if place == "set_up":  # as a logger does that is made after the files are there
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "metrics.jsonl").touch()
        raise UserError("slots: too many")

    with at(r3 if place == "collect" else run, place, 1, fail), pytest.raises(SystemExit) as end:
        start(tmp_path / "run", slots=7, **changes)
    assert end.value.code == 2
    start(tmp_path / "run")
    assert_same_run(unbroken(), tmp_path / "run")


def test_resuming_with_other_problems_is_refused(unbroken, start, tmp_path, capsys):
    """The same config, but the file that it names has another content."""
    data = tmp_path / "problems.jsonl"
    rows_of_data = "".join(f'{{"problem": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(8))
    data.write_text(rows_of_data)
    start(tmp_path / "run", data=data, steps=1)
    data.write_text(rows_of_data.replace('"3"', '"7"'))
    with pytest.raises(SystemExit) as end:
        start(tmp_path / "run", data=data, steps=1, resume=True)
    assert end.value.code == 2 and "not the problems that this run began with" in capsys.readouterr().err


def test_moved_run_directory_resumes(unbroken, start, tmp_path):
    shutil.copytree(unbroken(), tmp_path / "moved")
    start(tmp_path / "moved", resume=True)
