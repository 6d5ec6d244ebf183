"""checkpoint.py: the state of a run on the disk: a checkpoint is complete or absent, and checksums prove it.

   checkpoints/step_000040/            a Hugging Face model folder: transformers and vLLM load it as it is
       prompt.json                     prompt_suffix and system_prompt of the run, for eval.py
       training/shards/                moments, and fp32 weights where the folder itself holds them rounded (save_dtype
                                       = bfloat16): each rank writes its part, by torch.distributed.checkpoint
       training/buffer_0.json          the sample buffer of rank 0 (one per rank): its index, see bufferfile.py
       training/buffer/                its responses, in files that consecutive checkpoints share
       training/carried_0.safetensors  what rank 0 hands from a step to the next, see carried.py
       training/state.json             the step, and a checksum of the problems
       training/manifest.json          sha256 of every other file; a folder that differs from it is not used
   checkpoints/best                    points to the best one (keep_best)

A checkpoint is written under another name, synced and renamed. Then older ones are pruned. Nothing in it needs pickle.
Several machines need a run_dir that all of them see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.api import CheckpointException

from runtime import bufferfile, carried
from runtime.errors import UserError
from runtime.files import checksum, fsync, writing
from runtime.ranks import Ranks
from runtime.sharding import full

FILE_BYTES = 2**31  # of all ranks' parts of a file: as much is in host memory while it is written


def save(
    run_dir: Path, model, tokenizer, optimizer, buffer, state: dict, ranks: Ranks, keep: int, dtype: str, prompt=None,
    best: int | None = None, handed_on=None,
) -> None:  # fmt: skip
    """Writes checkpoints/step_NNNNNN aside, renames it when it is on the disk, then prunes all but the newest `keep`.

    state: what else a resume needs, JSON-able, its `step` among it. dtype: of the exported weights.
    prompt: what `export` writes. best: a step that is not pruned. handed_on: see carried.py; None: nothing.
    Raises UserError where the disk is full or must not be written; the checkpoints before stay as they are.
    """
    final = run_dir / "checkpoints" / f"step_{state['step']:06d}"
    aside = final.with_name(f".{final.name}.tmp")
    training = aside / "training"
    older = [folder for folder in finished(run_dir) if number(folder) < state["step"]]
    with writing(final, f"; the newest checkpoint is {older[-1]}" if older else "; it would have been the first one"):
        if ranks.main:
            clean(run_dir)
            (training / "shards").mkdir(parents=True)
            (training / "state.json").write_text(json.dumps(state))
        weights = gathered(model.state_dict(keep_vars=True), ranks, getattr(torch, dtype))
        if ranks.main:
            export(model, tokenizer, weights, aside, dtype, prompt or {})
        del weights
        ranks.barrier()
        save_shards(training / "shards", sharded(model, optimizer, weights=dtype != "float32"), ranks)
        files = bufferfile.save(buffer, training, ranks.rank)
        if handed_on is not None:
            carried.save(handed_on, training, ranks.rank)
        ranks.barrier()
        written = [p for p in sorted(aside.rglob("*")) if p.is_file()]
        named = {p: p.stem for p in written if p.parent == training / "buffer"}  # after its checksum
        mine = written[ranks.rank :: ranks.size]
        sums = ranks.gather([(str(p.relative_to(aside)), named.get(p) or checksum(p)) for p in mine])
        if ranks.main:
            (training / "manifest.json").write_text(json.dumps(dict(sorted(sums)), indent=1))
            for path in [*aside.rglob("*"), aside]:
                fsync(path)
            if final.exists():  # damaged, and passed over when the run was resumed
                shutil.rmtree(final)
            os.rename(aside, final)
            fsync(final.parent)
            prune(run_dir, state["step"], keep, best)
        ranks.barrier()
        buffer.files = {final / "training" / "buffer" / name: numbers for name, numbers in files.items()}


def prune(run_dir: Path, step: int, keep: int, best: int | None = None) -> None:
    """Of the checkpoints up to `step`, the newest `keep` and that of step `best` stay."""
    for folder in [folder for folder in finished(run_dir) if number(folder) <= step][:-keep]:
        if number(folder) != best:
            os.rename(folder, folder.with_name(f".{folder.name}.tmp"))  # so none of this name is ever incomplete
    clean(run_dir)


def point_to_best(run_dir: Path, step: int) -> None:
    """checkpoints/best is a link to the checkpoint of `step`; it always points to a checkpoint."""
    best = run_dir / "checkpoints" / "best"
    aside = best.with_name(".best.tmp")
    with writing(best):
        aside.unlink(missing_ok=True)
        aside.symlink_to(f"step_{step:06d}")
        os.replace(aside, best)


def clean(run_dir: Path) -> None:
    """Removes pruned checkpoints and unfinished ones, also those of a save that was killed or failed."""
    for leftover in (run_dir / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(leftover)


def sharded(model, optimizer, weights: bool) -> dict[str, torch.Tensor]:
    """This rank's moments as exp_avg/NAME, exp_avg_sq/NAME and step/NAME, and its fp32 weights as weight/NAME."""
    found = {}
    for name, p in model.named_parameters():
        found |= {f"{key}/{name}": moment for key, moment in optimizer.state[p].items()} if p in optimizer.state else {}
        found |= {f"weight/{name}": p.detach()} if weights else {}
    return dict(sorted(found.items()))


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Each rank writes its part of the tensors into safetensors files, of FILE_BYTES over all ranks."""
    if tensors:
        with plain_errors():
            writer = dcp.HuggingFaceStorageWriter(str(folder), files_of(tensors), save_distributed=True)
            dcp.save(tensors, storage_writer=writer, no_dist=ranks.size == 1)


def files_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """name -> number of the file that holds it, from 1."""
    ends = list(itertools.accumulate(tensor.nbytes for tensor in tensors.values()))
    used = sorted({end // FILE_BYTES for end in ends})
    return {name: 1 + used.index(end // FILE_BYTES) for name, end in zip(tensors, ends, strict=True)}


def load_shards(folder: Path, model, optimizer, ranks: Ranks) -> None:
    """Fills weights and moments of this rank with what `sharded` returned on any number of ranks."""
    reader, parameters, tensors = dcp.HuggingFaceStorageReader(str(folder)), dict(model.named_parameters()), {}
    for key in reader.read_metadata().state_dict_metadata:
        what, name = key.split("/", 1)
        p = parameters[name]
        tensors[key] = p.detach() if what == "weight" else optimizer.state[p][what]
    if tensors:
        with plain_errors():
            dcp.load(tensors, storage_reader=reader, no_dist=ranks.size == 1)


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """torch.distributed.checkpoint collects the errors of all ranks: raises the first of them. Its warning that
    there is only one process is not shown."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def gathered(tensors: dict[str, torch.Tensor], ranks: Ranks, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors in `dtype` in the main rank's host memory, one after another; nothing on the other ranks."""
    out: dict[str, torch.Tensor] = {}
    same: dict[int, torch.Tensor | None] = {}  # by identity: tied weights stay tied
    for name, tensor in tensors.items():
        if id(tensor) not in same:
            value = full(tensor, dtype)
            same[id(tensor)] = value.cpu() if ranks.main else None
        out[name] = same[id(tensor)]
    return out if ranks.main else {}


def export(model, tokenizer, weights: dict[str, torch.Tensor], folder: Path, dtype: str, prompt: dict) -> None:
    """The model folder, weights in `dtype`: config, weights, generation config, tokenizer, chat template, prompt."""
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
    load_shards(training / "shards", model, optimizer, ranks)
    bufferfile.load(buffer, training, ranks, uids.__contains__)
    return json.loads((training / "state.json").read_text())
