"""Time and peak memory of log-prob and entropy: textbook, TRL and Liger where they are installed, and entropy.py.

    python bench/entropy.py [--device cuda] [--small] [--case NAME ...] [--repeat 5] [--threads N] [--json FILE]

Three jobs: `head` (hidden states -> statistics -> gradients of hidden and weight), `logits` (the same from logits) and
`sample` (a token with its statistics). Every variant runs in a process of its own; the processes take turns, one call
each a round, so that a disturbance of the machine meets all of them. Figures are medians over the rounds.
Workspace is the peak during a first call minus inputs and gradients: of the resident set (Linux) on a CPU, of the
allocator on CUDA. Errors are against float64 on the first 64 rows: entropy absolute, gradients relative (2-norm).
On CUDA the bytes that a job has to move at least, over its time, are set against a device-to-device copy.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.pop(0)  # bench/, where trl.py is not TRL
sys.path.insert(0, str(Path(__file__).parent.parent))

TEMPERATURE = 0.8
MB = 2**20
# name: (job, T, d, V)
CASES = {
    "cpu": {
        "head-512-small": ("head", 512, 576, 49_152),
        "head-2048-small": ("head", 2048, 576, 49_152),
        "head-512-large": ("head", 512, 1536, 151_936),
        "head-2048-large": ("head", 2048, 1536, 151_936),
        "logits-512": ("logits", 512, 0, 49_152),
        "sample-64": ("sample", 64, 0, 49_152),
    },
    "cuda": {
        "logits-8192": ("logits", 8192, 0, 151_936),
        "head-8192": ("head", 8192, 1536, 151_936),
        "sample-256": ("sample", 256, 0, 151_936),
    },
    "small": {
        "head": ("head", 700, 16, 1003),
        "logits": ("logits", 64, 0, 1003),
        "sample": ("sample", 64, 0, 1003),
    },
}


# ---------------------------------------------------------------- variants: a function for each job


def naive_stats(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def naive_sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
    p = log_p.exp()
    token = torch.multinomial(p, 1)
    return token[:, 0], log_p.gather(1, token)[:, 0], -(p * log_p).sum(-1)


def naive(job: str) -> Callable:
    return {"head": lambda h, W, y: naive_stats(h @ W.t(), y), "logits": naive_stats, "sample": naive_sample}[job]


def ours(job: str) -> Callable:
    import entropy
    from sampling import gumbel

    return {
        "head": lambda h, W, y: entropy.linear_token_stats(h, W, y, TEMPERATURE),
        "logits": lambda z, y: entropy.token_stats(z, y, TEMPERATURE),
        "sample": lambda z, seeds, positions: gumbel.sample(z, TEMPERATURE, seeds, positions),
    }[job]


def trl(job: str) -> Callable:
    """What its GRPO trainer calls, with the chunk size that it calls it with."""
    from trl.trainer import utils

    chunk, fused = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._ChunkedLogProbFunction.apply
    return {
        "head": lambda h, W, y: fused(h, W, None, y, TEMPERATURE, chunk, None, 1.0, ("entropy",))[:2],
        "logits": lambda z, y: utils.selective_log_softmax_and_entropy(z, y, temperature=TEMPERATURE),
    }[job]


def liger(job: str) -> Callable:
    """Cross entropy alone: it has no entropy, so it does less. It writes the gradient over its input."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    def stats(z, y):
        logp = -liger_cross_entropy(z.clone() / TEMPERATURE, y, reduction="none")
        return logp, torch.zeros_like(logp)

    return {"logits": stats}[job]


VARIANTS = {"naive": naive, "trl": trl, "liger": liger, "ours": ours}


# ---------------------------------------------------------------- one variant, in its own process


class Work:
    """Inputs of a case, and one call of a variant on them."""

    def __init__(self, variant: str, case: tuple, device: str, dtype: torch.dtype):
        self.job, T, d, V = case
        self.run, self.device = VARIANTS[variant](self.job), device
        rng = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=rng, device=device, dtype=dtype) * scale

        self.y = torch.randint(V, (T,), generator=rng, device=device)
        self.g = torch.randn(2, T, generator=rng, device=device)
        head = self.job == "head"
        self.inputs = [normal(T, d), normal(V, d, scale=2 / d**0.5)] if head else [normal(T, V, scale=2.0)]
        if self.job != "sample":
            self.inputs = [x.requires_grad_() for x in self.inputs]

    def call(self, rows: int | None = None) -> tuple[float, float]:
        """Seconds of forward, and of forward and backward. The gradients stay in the inputs."""
        for x in self.inputs:
            x.grad = None
        first, *rest = self.inputs
        y, g = self.y[:rows], self.g[:, :rows]
        extra = (y, torch.arange(len(y), device=self.device)) if self.job == "sample" else (y,)
        start = self.now()
        self.outputs = self.run(first[:rows] if rows else first, *rest, *extra)
        middle = self.now()
        if self.job != "sample":
            (self.outputs[0] * g[0] + self.outputs[1] * g[1]).sum().backward()
        return middle - start, self.now() - start

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def workspace_mb(self) -> float:
        """Peak of a first call beyond the inputs and their gradients."""
        before = reset_peak(self.device)
        self.call()
        gradients = sum(x.nbytes for x in self.inputs if x.grad is not None)
        return (peak(self.device) - before - gradients) / MB

    def errors(self) -> tuple[float, float]:
        """Entropy (largest absolute) and gradients (largest relative), against float64 on 64 rows."""
        self.call(64)
        found, grads = self.outputs[-1].detach(), [x.grad for x in self.inputs]
        exact = [x.detach().double().requires_grad_() for x in self.inputs]
        z = exact[0][:64] @ exact[1].t() if self.job == "head" else exact[0][:64]
        log_p = (z / TEMPERATURE).log_softmax(-1)
        H = -(log_p.exp() * log_p).sum(-1)
        error = (found.double() - H).abs().max().item()
        if self.job == "sample":
            return error, 0.0
        logp = log_p.gather(1, self.y[:64, None])[:, 0]
        (logp * self.g[0, :64] + H * self.g[1, :64]).sum().backward()
        return error, max(
            ((grad.double() - x.grad).norm() / x.grad.norm()).item() for grad, x in zip(grads, exact, strict=True)
        )


def reset_peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel starts its peak anew
    return resident("VmRSS")


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def serve(pipe, variant: str, case: tuple, device: str, dtype: torch.dtype, threads: int) -> None:
    """Answers each request, the name of a method, with its result or with the reason why there is none."""
    torch.set_num_threads(threads)
    try:
        warm = Work(variant, (case[0], 64, 64, 512), device, dtype)  # libraries and kernels are loaded
        warm.call()
        work = Work(variant, case, device, dtype)
        while (request := pipe.recv()) is not None:
            pipe.send(getattr(work, request)())
    except ImportError as error:
        pipe.send(f"not installed ({error.name})")
    except KeyError:
        pipe.send("does not apply")
    except Exception as error:  # a variant that fails is a row that says so; the others go on
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")


# ---------------------------------------------------------------- all variants, in turn


def measure(case: tuple, device: str, dtype: torch.dtype, repeat: int, threads: int) -> dict[str, dict | str]:
    context, workers, rows = multiprocessing.get_context("spawn"), {}, {}
    for variant in VARIANTS:
        if variant == "liger" and device == "cpu":
            continue
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(other, variant, case, device, dtype, threads), daemon=True)
        process.start()
        workers[variant], rows[variant] = (pipe, process), {"times": []}

    def ask(variant: str, request: str):
        pipe, process = workers[variant]
        with contextlib.suppress(BrokenPipeError):  # it has ended, its last message says why
            pipe.send(request)
        try:
            answer = pipe.recv()
        except EOFError:
            answer = "was killed (out of memory?)"
        if isinstance(answer, str):
            rows[variant] = answer
            del workers[variant]
        return answer

    for request, times in (("workspace_mb", 1), ("call", repeat), ("errors", 1)):
        for _ in range(times):
            for variant in list(workers):
                answer = ask(variant, request)
                if variant in workers and request == "call":
                    rows[variant]["times"].append(answer)
                elif variant in workers:
                    rows[variant][request] = answer
    for pipe, process in workers.values():
        pipe.send(None)
        process.join()
    return rows


def summary(row: dict, case: tuple, itemsize: int, copy: float | None) -> dict:
    forward, total = (statistics.median(column) for column in zip(*row["times"], strict=True))
    found = {
        "forward_ms": forward * 1e3,
        "total_ms": total * 1e3,
        "workspace_mb": row["workspace_mb"],
        "entropy_error": row["errors"][0],
        "gradient_error": row["errors"][1],
    }
    if copy and case[0] != "head":
        logits_bytes = case[1] * case[3] * itemsize
        found["forward_of_copy"] = logits_bytes / forward / copy
        found["total_of_copy"] = logits_bytes * (1 if case[0] == "sample" else 3) / total / copy
    return found


def copy_bandwidth() -> float:
    """Bytes read and written a second by a device-to-device copy of 2 GB: the median of 20."""
    source, target, seconds = torch.empty(2**31, dtype=torch.uint8, device="cuda"), None, []
    target = torch.empty_like(source)
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds)


def print_case(name: str, case: tuple, rows: dict) -> None:
    base = rows["naive"]
    job, T, d, V = case
    print(f"\n{name}: {job}, T = {T}, " + (f"d = {d}, " if d else "") + f"V = {V}")
    print("variant  forward ms   total ms  x naive  workspace MB  x naive   H error  gradient error")
    for variant, row in rows.items():
        if isinstance(row, str):
            print(f"{variant:8} {row}")
            continue
        time_ratio, memory_ratio = (
            row[key] / base[key] if isinstance(base, dict) and base[key] > 0 else float("nan")
            for key in ("total_ms", "workspace_mb")
        )
        line = f"{variant:8} {row['forward_ms']:10.1f} {row['total_ms']:10.1f} {time_ratio:8.2f} "
        line += f"{row['workspace_mb']:13.1f} {memory_ratio:8.3f} "
        line += f"{row['entropy_error']:9.1e} {row['gradient_error']:9.1e}"
        if "forward_of_copy" in row:
            line += f"   of copy: forward {row['forward_of_copy']:.0%}, all {row['total_of_copy']:.0%}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that the script runs")
    parser.add_argument("--case", nargs="+", help="only these cases")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    cases = CASES["small" if options.small else options.device]
    if unknown := set(options.case or []) - set(cases):
        parser.error(f"--case: found {sorted(unknown)}, allowed: {', '.join(cases)}")
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    copy = copy_bandwidth() if options.device == "cuda" else None
    machine = torch.cuda.get_device_name() if copy else f"CPU, {options.threads} threads"
    print(f"{machine}, torch {torch.__version__}, {dtype}" + (f", copy {copy / 1e9:.0f} GB/s" if copy else ""))
    report = {"machine": machine, "torch": torch.__version__, "copy_bytes_per_second": copy, "cases": {}}
    for name in options.case or cases:
        rows = measure(cases[name], options.device, dtype, options.repeat, options.threads)
        found = {k: v if isinstance(v, str) else summary(v, cases[name], dtype.itemsize, copy) for k, v in rows.items()}
        print_case(name, cases[name], found)
        report["cases"][name] = found
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
