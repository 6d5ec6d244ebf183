"""checkpoint.py: the state of a run on the disk: a checkpoint is complete or absent, and checksums prove it.

   checkpoints/step_000040/            a Hugging Face model folder: transformers and vLLM load it as it is
       prompt.json                     prompt_suffix and system_prompt of the run, for eval.py
       training/optimizer.safetensors  moments of each parameter, by its name
       training/master.safetensors     fp32 weights, where the folder itself holds them rounded (save_dtype = bfloat16)
       training/buffer_0.json          the sample buffer of rank 0 (one per rank): its index, see bufferfile.py
       training/buffer/                its responses, in files that consecutive checkpoints share
       training/carried_0.safetensors  what rank 0 hands from a step to the next, see carried.py
       training/state.json             the step, and a checksum of the problems
       training/manifest.json          sha256 of every other file; a folder that differs from it is not used

A checkpoint is written under another name, synced and renamed. Then older ones are pruned. Nothing in it needs pickle.
Left out: sharded weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from runtime import bufferfile, carried
from runtime.errors import UserError
from runtime.files import checksum, fsync, writing
from runtime.ranks import Ranks
from runtime.sharding import full, like


def save(
    run_dir: Path,
    model,
    tokenizer,
    optimizer,
    buffer,
    state: dict,
    ranks: Ranks,
    keep: int,
    dtype: str,
    prompt=None,
    handed_on=None,
) -> None:
    """Writes checkpoints/step_NNNNNN aside, renames it when it is on the disk, then prunes all but the newest `keep`.

    state: what else a resume needs, JSON-able, its `step` among it. dtype: of the exported weights.
    prompt: what `export` writes. handed_on: see carried.py; None: nothing.
    Raises UserError where the disk is full or must not be written; the checkpoints before stay as they are.
    """
    final = run_dir / "checkpoints" / f"step_{state['step']:06d}"
    aside = final.with_name(f".{final.name}.tmp")
    training = aside / "training"
    older = [folder for folder in finished(run_dir) if number(folder) < state["step"]]
    with writing(final, f"; the newest checkpoint is {older[-1]}" if older else "; it would have been the first one"):
        weights = gathered(model.state_dict(keep_vars=True), ranks)
        names = {p: name for name, p in model.named_parameters()}
        moments = {f"{names[p]}/{key}": v for p, of_p in optimizer.state.items() for key, v in of_p.items()}
        moments = gathered(moments, ranks)
        if ranks.main:
            clean(run_dir)
            training.mkdir(parents=True)
            export(model, tokenizer, weights, aside, dtype, prompt or {})
            if dtype != "float32":
                save_file({name: weights[name] for name in names.values()}, training / "master.safetensors")
            save_file(moments, training / "optimizer.safetensors")
            (training / "state.json").write_text(json.dumps(state))
        ranks.barrier()
        files = bufferfile.save(buffer, training, ranks.rank)
        if handed_on is not None:
            carried.save(handed_on, training, ranks.rank)
        ranks.barrier()
        if ranks.main:
            written = [p for p in sorted(aside.rglob("*")) if p.is_file()]
            named = {p: p.stem for p in written if p.parent == training / "buffer"}  # after its checksum
            sums = {str(p.relative_to(aside)): named.get(p) or checksum(p) for p in written}
            (training / "manifest.json").write_text(json.dumps(sums, indent=1))
            for path in [*aside.rglob("*"), aside]:
                fsync(path)
            if final.exists():  # damaged, and passed over when the run was resumed
                shutil.rmtree(final)
            os.rename(aside, final)
            fsync(final.parent)
            for folder in older[: len(older) + 1 - keep]:
                os.rename(folder, folder.with_name(f".{folder.name}.tmp"))  # so none of this name is ever incomplete
            clean(run_dir)
        ranks.barrier()
        buffer.files = {final / "training" / "buffer" / name: numbers for name, numbers in files.items()}


def clean(run_dir: Path) -> None:
    """Removes pruned checkpoints and unfinished ones, also those of a save that was killed or failed."""
    for leftover in (run_dir / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(leftover)


def gathered(tensors: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """The tensors in the main rank's host memory, one after another; nothing on the other ranks."""
    out: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor | None] = {}  # by identity: tied weights stay tied
    for name, tensor in tensors.items():
        if id(tensor) not in same:
            value = full(tensor)
            same[id(tensor)] = value.cpu() if ranks.main else None
        out[name] = same[id(tensor)]
    return out if ranks.main else {}


def export(model, tokenizer, weights: dict[str, torch.Tensor], folder: Path, dtype: str, prompt: dict) -> None:
    """The model folder, weights in `dtype`: config, weights, generation config, tokenizer, chat template, prompt."""
    cast: dict[int, torch.Tensor] = {}  # by address, so that tied weights stay tied
    wanted = getattr(torch, dtype)
    weights = {name: cast.setdefault(v.data_ptr(), v.to(wanted)) for name, v in weights.items()}
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2), encoding="utf-8")
    (folder / "prompt.json").write_text(json.dumps(prompt, indent=2), encoding="utf-8")


def finished(run_dir: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    return sorted((p for p in (run_dir / "checkpoints").glob("step_*") if p.name[5:].isdigit()), key=number)


def number(folder: Path) -> int:
    return int(folder.name[5:])


def to_resume(config) -> Path | None:
    """The checkpoint that `--resume` continues from; None for a new run. Writes nothing.

    Raises UserError where the run directory holds a run and `resume` is not set, and where the run had another config.
    """
    run_dir = Path(config.run_dir)
    log = run_dir / "metrics.jsonl"
    if not finished(run_dir) and not (log.exists() and log.stat().st_size):  # a start that failed leaves an empty one
        return None
    if not config.resume:
        raise UserError(f"run_dir = {str(run_dir)!r} holds a run, allowed: --resume to go on, or another --run_dir")
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        before = {f.name: f.default for f in dataclasses.fields(config)} | before
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        what = str(error).split("\n")[0]
        raise UserError(f"{run_dir / 'config.yaml'}: this run's config cannot be read: {what}") from error
    free = ("run_dir", "resume", "override_config")
    now = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    differing = [f"{k} (was {before[k]!r}, is {v!r})" for k, v in now.items() if before[k] != v]
    if differing and not config.override_config:
        raise UserError(f"{run_dir}: this run's config differs: {', '.join(differing)}; allowed with --override-config")
    return newest(run_dir)


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files all have their checksums; None where the run ended before its first one.

    A damaged one is named on stderr and skipped. Raises UserError where all of them are damaged.
    """
    folders = finished(run_dir)
    for folder in reversed(folders):
        damage = damaged(folder)
        if damage is None:
            return folder
        print(f"checkpoint {folder} is damaged ({damage}); trying the one before", file=sys.stderr)
    if folders:
        raise UserError(f"{run_dir}: none of its {len(folders)} checkpoints is whole, allowed: a new run elsewhere")
    return None


def damaged(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((folder / "training" / "manifest.json").read_text())
        for name, expected in manifest.items():
            if checksum(folder / name) != expected:
                return f"{name} has another checksum"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(folder: Path, model, optimizer, buffer, ranks: Ranks, uids: Collection[str]) -> dict:
    """Fills optimiser, buffer and, where the folder that `model` came from rounds them, weights; returns state.json."""
    training = folder / "training"
    parameters = dict(model.named_parameters())
    if (training / "master.safetensors").exists():
        with torch.no_grad():
            for name, value in load_file(training / "master.safetensors").items():
                parameters[name].copy_(like(value, parameters[name]))
    for key, value in load_file(training / "optimizer.safetensors").items():
        name, moment = key.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][moment] = like(value, parameter)
    bufferfile.load(buffer, training, ranks, uids.__contains__)
    return json.loads((training / "state.json").read_text())
