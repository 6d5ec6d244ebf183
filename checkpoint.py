"""checkpoint.py: the state of a run on the disk, complete or absent, and found again by a checksum.

   checkpoints/step_000040/            a Hugging Face model folder: transformers and vLLM load it as it is
       training/optimizer.safetensors  moments of each parameter, by its name
       training/buffer_0.safetensors   the sample buffer of rank 0 (one file a rank)
       training/state.json             step, config and the buffers' indices
       training/manifest.json          sha256 of every other file: the folder is whole or it is not used

A checkpoint is written aside, synced and renamed; older ones are pruned after that. Nothing in it needs pickle. Left out:
sharded weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from errors import UserError
from runtime import Ranks, fsync


def save(run_dir: Path, model, tokenizer, optimizer, buffer, state: dict, ranks: Ranks, keep: int) -> None:
    """Writes checkpoints/step_NNNNNN aside, renames it when it is on the disk, then prunes all but the newest `keep`.

    state: what else a resume needs, JSON-able, its `step` among it.
    """
    final = run_dir / "checkpoints" / f"step_{state['step']:06d}"
    aside = final.with_name(f".{final.name}.tmp")
    training = aside / "training"
    if ranks.main:
        shutil.rmtree(aside, ignore_errors=True)
        training.mkdir(parents=True)
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        names = {p: n for n, p in model.named_parameters()}
        states = ((names[p], state) for p, state in optimizer.state.items())
        moments = {f"{name}/{key}": value.contiguous() for name, state in states for key, value in state.items()}
        save_file(moments, training / "optimizer.safetensors")
        (training / "state.json").write_text(json.dumps(state))
    ranks.barrier()
    stored = buffer.state_dict()
    save_file({k: stored.pop(k) for k in ("tokens", "logprobs")}, training / f"buffer_{ranks.rank}.safetensors")
    (training / f"buffer_{ranks.rank}.json").write_text(json.dumps(stored))
    ranks.barrier()
    if ranks.main:
        sums = {str(p.relative_to(aside)): checksum(p) for p in sorted(aside.rglob("*")) if p.is_file()}
        (training / "manifest.json").write_text(json.dumps(sums, indent=1))
        for path in [*aside.rglob("*"), aside]:
            fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        fsync(final.parent)
        for old in finished(run_dir)[:-keep]:
            shutil.rmtree(old)
    ranks.barrier()


def finished(run_dir: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step_[0-9]*"))


def to_resume(config) -> Path | None:
    """The folder that `--resume` goes on from; None for a new run. Writes nothing.

    Raises UserError where the run directory holds a run and `resume` is not set, and where the run had another config.
    """
    run_dir = Path(config.run_dir)
    begun = (run_dir / "metrics.jsonl").exists()
    if begun and not config.resume:
        raise UserError(f"run_dir = {str(run_dir)!r} holds a run; allowed: --resume to go on with it, or another --run_dir")
    if not begun:
        return None
    before = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    free = ("resume", "override_config")
    now = {k: v for k, v in dataclasses.asdict(config).items() if k not in free and k in before}
    differing = [f"{k} (was {before[k]!r}, is {v!r})" for k, v in now.items() if before[k] != v]
    if differing and not config.override_config:
        raise UserError(f"{run_dir}: this run's config differs: {', '.join(differing)}; allowed with --override-config")
    return newest(run_dir)


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint whose files all have their checksums; a damaged one is named on stderr and passed over."""
    for folder in reversed(finished(run_dir)):
        damage = damaged(folder)
        if damage is None:
            return folder
        print(f"checkpoint {folder} is damaged ({damage}); trying the one before", file=sys.stderr)
    return None


def damaged(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / "training" / "manifest.json").read_text())
        for name, expected in manifest.items():
            if checksum(folder / name) != expected:
                return f"{name} has another checksum"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load(folder: Path, model, optimizer, buffer, ranks: Ranks) -> dict:
    """Fills optimiser and buffer from a checkpoint folder (the model was loaded from it); returns its state.json."""
    training = folder / "training"
    names = dict(model.named_parameters())
    for name, value in load_file(training / "optimizer.safetensors").items():
        parameter, key = names[name.rsplit("/", 1)[0]], name.rsplit("/", 1)[1]
        optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
    parts = [
        {**load_file(path), **json.loads(path.with_suffix(".json").read_text())}
        for path in sorted(training.glob("buffer_*.safetensors"))
    ]
    buffer.load_state_dict(*parts, keep=ranks.owns)
    return json.loads((training / "state.json").read_text())


def checksum(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
