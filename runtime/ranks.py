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
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

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


def autocast(device: torch.device, dtype: str):
    """Within it matrix products are in the run's dtype over fp32 master weights; in fp32 it does nothing."""
    chosen = pick_dtype(dtype, device)
    return contextlib.nullcontext() if chosen == torch.float32 else torch.autocast(device.type, chosen)


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
        """Adds up the gradients of all ranks in place. One denominator for all of them is in the loss already."""
        if self.size > 1:
            for p in parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)

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
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
