"""ranks.py: the machine under a run: its devices, their memory, and the processes of torchrun.

    ranks = Ranks.start("auto")                # one process, or those of torchrun
    total, count = ranks.sum([loss, 1])        # over all of them
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is this rank's CUDA card where there is one, else the CPU."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
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


def peak_memory_gb(device: torch.device) -> float:
    """Largest memory so far in GB: allocated on the card; on a CPU the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1) / 1e9


def free_memory(device: torch.device) -> None:
    """Gives cached blocks back to the card, so that smaller ones find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU: glibc keeps freed memory. Else it would return it and fetch it again, page by page, in each step."""
    if device.type == "cpu" and sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
        mallopt(M_TRIM_THRESHOLD, 2**30)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest that it takes


@dataclass(frozen=True)
class Ranks:
    """The processes of this run. A uid lives on one rank, so no response ever crosses ranks."""

    rank: int
    size: int
    device: torch.device
    heartbeat: Heartbeat | None = None

    @classmethod
    def start(cls, device: str, timeout: float = 60.0) -> Ranks:
        """One process, or those that torchrun started (gloo on the CPU, NCCL on CUDA).

        A rank that is not heard of for `timeout` seconds ends the others, which say its number.
        """
        chosen = pick_device(device)
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return cls(0, 1, chosen)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        # a rank may wait for hours while another one samples: who is dead is known by its heartbeat, not by this limit
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(days=1))
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(rank, size, chosen, Heartbeat(rank, size, timeout))

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, uids: Iterable[str]) -> set[str]:
        """The uids of this rank: as many on each rank, one more or less, and the same ones whatever their order."""
        return set(sorted(uids, key=lambda uid: (zlib.crc32(uid.encode()), uid))[self.rank :: self.size])

    def sum(self, values: Iterable[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        total = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def max(self, value: float) -> float:
        """The largest value of all ranks."""
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def mean(self, pairs: dict[str, tuple[float, float]]) -> dict[str, float | None]:
        """name -> (sum, weight) on each rank becomes name -> sum / weight over all; None where the weight is 0."""
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
        if self.heartbeat:
            self.heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


class Heartbeat:
    """A thread that tells the other ranks that this one is alive, and ends this process when one of them is not.

    Signs of life are counters in the store that torchrun (or rank 0) keeps; they need no collective call.
    """

    def __init__(self, rank: int, size: int, timeout: float):
        self.rank, self.size, self.timeout, self.stopped = rank, size, timeout, threading.Event()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.PrefixStore("heartbeat", dist.TCPStore(*address, is_master=False, wait_for_workers=False))
        self.interval = min(5.0, timeout / 4)
        self.sign(0)
        self.thread = threading.Thread(target=self.watch, name="heartbeat", daemon=True)
        self.thread.start()

    def sign(self, count: int) -> None:
        self.store.set(str(self.rank), str(count) if count >= 0 else "done")

    def watch(self) -> None:
        seen, count = {}, 0  # rank -> (its counter, when it was first read)
        while not self.stopped.wait(self.interval):
            count += 1
            for rank in range(self.size):
                try:
                    self.sign(count)
                    value = self.store.get(str(rank)) if self.store.check([str(rank)]) else None
                except (RuntimeError, dist.DistError):
                    rank, value = 0, seen.get(0, (None,))[0]  # the store has gone with the process that kept it
                before, since = seen.setdefault(rank, (value, time.monotonic()))
                if value != before:
                    seen[rank] = value, time.monotonic()
                elif value != b"done" and time.monotonic() - since > self.timeout:
                    silent = f"rank {rank} of {self.size} is gone: no sign of life for {self.timeout:g} s"
                    os.write(2, f"\n{silent}; rank {self.rank} ends\n".encode())
                    os._exit(1)

    def wait(self) -> None:
        """After a failed collective call: until `watch` has found the rank that is gone, or not."""
        self.stopped.wait(2 * self.timeout)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError, dist.DistError):
            self.sign(-1)
        self.stopped.set()
