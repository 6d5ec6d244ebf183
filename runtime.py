"""runtime.py: the machine under a run: devices, ranks, files that are never half-written, signals.

    ranks = Ranks.start("auto")                  # one process, or those of torchrun
    with runtime.saved_when_stopped(save): ...   # SIGTERM and Ctrl-C

Left out: anything that knows what is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from errors import UserError

# -------------------------------------------------------------------------------------------- devices and ranks


def pick_device(name: str) -> torch.device:
    """`auto` is this rank's CUDA card where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device = {name!r}: torch sees no CUDA card, allowed here: cpu or auto")
    if name == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"device = {name!r}, allowed: auto, cpu, cuda, cuda:0, ...") from None


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of sampling and of matrix products; master weights are always fp32. `auto`: bf16 on CUDA, else fp32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def autocast(device: torch.device, dtype: str):
    """Matrix products in the run's dtype over fp32 master weights; nothing at all in fp32."""
    chosen = pick_dtype(dtype, device)
    return contextlib.nullcontext() if chosen == torch.float32 else torch.autocast(device.type, chosen)


def peak_memory_gb(device: torch.device) -> float:
    """Largest memory so far in GB: allocated on the card, or the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1) / 1e9


@dataclass(frozen=True)
class Ranks:
    """The processes of this run. A uid lives on one rank by a fixed hash, so no sample ever crosses ranks."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls, device: str) -> Ranks:
        """One process, or those that torchrun started (gloo on the CPU, NCCL on CUDA)."""
        chosen = pick_device(device)
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls(0, 1, chosen)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), chosen)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def owns(self, uid: str) -> bool:
        return zlib.crc32(uid.encode()) % self.size == self.rank

    def sum(self, values: Iterable[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Adds up the gradients of all ranks in place; the loss carries the global denominator (SPEC 8.5)."""
        if self.size > 1:
            for p in parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)

    def mean(self, pairs: dict[str, tuple[float, float]]) -> dict[str, float | None]:
        """name -> (sum, weight) on each rank becomes name -> sum / weight over all; None where nothing was weighed."""
        sums = self.sum(x for pair in pairs.values() for x in pair)
        return {
            name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else None for i, name in enumerate(pairs)
        }

    def gather(self, rows: list) -> list:
        """The rows of all ranks, on each of them."""
        if self.size == 1:
            return rows
        parts: list[list] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, rows)
        return [row for part in parts for row in part]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def stop(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ files


def write_atomically(path: Path, text: str) -> None:
    """The file has the old text or the new one, never a part of it."""
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


def json_line(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def append(path: Path, rows: list[dict]) -> None:
    with open(path, "a", encoding="utf-8") as f:
        f.write("".join(map(json_line, rows)))


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL log; a last line that a crash cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------------- signals


class Stopped(BaseException):
    """Raised at a safe point of the step after SIGTERM or Ctrl-C; carries the exit code 143 or 130."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Signals:
    """SIGTERM and Ctrl-C ask the run to stop at its next `check()`; a second one, or `grace_seconds`, ends it at once.

    alone: with several ranks all have to stop at the same place, so only `check_all`, between steps, does it.
    """

    def __init__(self, grace_seconds: float, alone: bool = True):
        self.grace, self.alone, self.code = grace_seconds, alone, 0
        self.before = {s: signal.signal(s, self.receive) for s in (signal.SIGTERM, signal.SIGINT)}

    def receive(self, number, frame) -> None:
        if self.code:
            os._exit(self.code)
        self.code = 128 + number
        print(f"\nsignal {number}: stopping; the last finished step is saved", file=sys.stderr)
        timer = threading.Timer(self.grace, os._exit, (self.code,))
        timer.daemon = True
        timer.start()

    def check(self, *_) -> None:
        """A place where nothing has changed since the last finished step that a checkpoint would hold."""
        if self.alone and self.code:
            raise Stopped(self.code)

    def check_all(self, ranks: Ranks) -> None:
        (most,) = ranks.sum([self.code]) if ranks.size > 1 else (self.code,)
        if most:
            raise Stopped(self.code or 128 + signal.SIGTERM)

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def saved_when_stopped(save):
    """A run that is asked to stop within the block saves what it has and exits with the signal's code."""
    try:
        yield
    except Stopped as stop:
        save()
        sys.exit(stop.code)
