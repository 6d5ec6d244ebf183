"""runtime.py: the machine under a run: devices, ranks, files that are never half-written, signals.

    ranks = Ranks.start("auto")             # one process, or those of torchrun
    signals = Signals(grace_seconds, ranks)
    with signals.saving(save): ...          # SIGTERM, Ctrl-C and a crash save the last finished step

Left out: anything that knows what is trained.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from errors import UserError

# -------------------------------------------------------------------------------------------- devices and ranks


def pick_device(name: str) -> torch.device:
    """`auto` is this rank's CUDA card where there is one, else the CPU."""
    cards = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if cards else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    allowed = ["cpu", *(f"cuda:{i}" for i in range(cards))]
    if name not in allowed:
        raise UserError(f"device = {name!r}, allowed on this machine: auto, {', '.join(allowed)}")
    return torch.device(name)


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


def free_memory(device: torch.device) -> None:
    """Gives cached blocks back to the card, so that smaller ones find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
        return {name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else None for i, name in enumerate(pairs)}

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


@contextlib.contextmanager
def writing(what: Path, hint: str = "") -> Iterator[None]:
    """A full disk, or one that must not be written, becomes a UserError that names what was to be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot be written: {reason}{hint}") from error


def write_atomically(path: Path, text: str) -> None:
    """The file has the old text or the new one, never a part of it."""
    aside = path.with_name(f".{path.name}.tmp")
    with writing(path):
        with open(aside, "w", encoding="utf-8") as f:
            f.write(text)
        fsync(aside)
        os.replace(aside, path)
        fsync(path.parent)


def json_line(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def append(path: Path, rows: list[dict]) -> None:
    with writing(path), open(path, "a", encoding="utf-8") as f:
        f.write("".join(map(json_line, rows)))


def read_jsonl(path: Path) -> list[dict]:
    """The rows of a JSONL log; a last line that a crash cut short is left out."""
    rows = []
    for line in path.read_bytes().split(b"\n"):  # not splitlines: a response may hold any Unicode line separator
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def fsync(path: Path) -> None:
    """Returns when the file, or the directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ----------------------------------------------------------------------------------------------------- signals


class Stopped(BaseException):
    """Raised where a step may be abandoned, by SIGTERM or Ctrl-C; carries the exit code 143 or 130."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Signals:
    """SIGTERM and Ctrl-C: the run abandons the `phase` that it is in, or finishes its step, saves and exits.

    A second signal, or `grace_seconds` after the first, ends the process at once: a thread of its own sees to that, for
    the main one may be deep in a kernel or a collective call. Before `saving` is entered there is nothing to save, and
    the first signal ends the run where it is.
    """

    def __init__(self, grace_seconds: float, ranks: Ranks):
        self.grace, self.ranks = grace_seconds, ranks
        self.code, self.begun, self.in_phase = 0, False, False
        self.arrivals, arrive = os.pipe()  # the C handler writes each signal's number, even while Python is not running
        os.set_blocking(arrive, False)
        self.handlers = {s: signal.signal(s, self.receive) for s in (signal.SIGTERM, signal.SIGINT)}
        self.wakeup, self.arrive = signal.set_wakeup_fd(arrive, warn_on_full_buffer=False), arrive
        threading.Thread(target=self.watch, name="signals", daemon=True).start()

    def receive(self, number: int, frame) -> None:
        if self.code:  # the second one; `watch` ends the process
            return
        self.code = 128 + number
        if not self.begun:
            sys.exit(self.code)
        with contextlib.suppress(OSError):  # not print: it may be what the signal interrupted
            os.write(2, f"\nsignal {number}: stopping; the last finished step will be saved\n".encode())
        if self.in_phase:
            raise Stopped(self.code)

    def watch(self) -> None:
        if number := os.read(self.arrivals, 1):
            again, _, _ = select.select([self.arrivals], [], [], self.grace)
            if not again or os.read(self.arrivals, 1):  # an empty read means that `close` was called
                os._exit(128 + number[0])
        os.close(self.arrivals)

    def check_all(self) -> None:
        """Stops all ranks here, or none: between collective calls they must not part."""
        codes = self.ranks.sum(self.code if r == self.ranks.rank else 0 for r in range(self.ranks.size))
        if any(codes):
            raise Stopped(int(max(codes)))

    @contextlib.contextmanager
    def phase(self) -> Iterator[None]:
        """Work that changes nothing which a checkpoint holds, without collective calls: a signal ends it anywhere.

        At its end all ranks stop or none.
        """
        self.check_all()
        with contextlib.suppress(Stopped):
            self.in_phase = True
            yield
            self.in_phase = False
        self.check_all()

    @contextlib.contextmanager
    def saving(self, save: Callable[[], None]) -> Iterator[None]:
        """Saves when the run is told to stop within the block, or crashes there; then exits with the signal's code.

        With several ranks a crash saves nothing: the others wait in a collective call for the one that is gone.
        """
        self.begun = True
        try:
            yield
        except Stopped as stop:
            self.code = stop.code  # of the rank that received it
            save()
        except Exception:
            if self.ranks.size == 1:
                try:
                    save()
                except UserError as error:
                    print(f"\n{error}", file=sys.stderr)
            raise
        if self.code:
            sys.exit(self.code)

    def close(self) -> None:
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        os.close(self.arrive)
