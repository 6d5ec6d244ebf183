"""A thousand steps of the embedded model: memory, open files and the cost of a step stay where they were.

    python -m pytest -m slow -s tests/test_soak.py             about five minutes on one core; prints the figures
"""

import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import r3

ROOT = Path(r3.__file__).parent
STEPS = 1000

SHORT = {
    "data_limit": 32,  # eight steps an epoch: by step 200 each query's part of the buffer is full
    "batch_size": 4,
    "group_size": 4,
    "max_new_tokens": 48,
    "min_history": 8,
    "steps": STEPS,
    "epochs": STEPS,
    "lr": 1e-8,  # the policy stays as it is, and so does the work of a step
    "eval_limit": 8,
    "eval_every": 100,
    "save_every": 50,
    "device": "cpu",
}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_thousand_steps_do_not_grow_or_slow_down(tmp_path, monkeypatch):
    if not (ROOT / "data" / "tiny" / "model").is_dir():
        pytest.skip("no data/tiny/model")
    seen, log_step = [], r3.log_step

    def noting(run, *rest):
        handles = len(os.listdir("/proc/self/fd"))
        seen.append((resident_mb(), handles, threading.active_count(), time.process_time(), len(run.buffer)))
        return log_step(run, *rest)

    monkeypatch.setattr(r3, "log_step", noting)
    monkeypatch.chdir(ROOT)
    changes = [f"--{key}={value}" for key, value in SHORT.items()]
    r3.main(["--config=configs/tiny.yaml", f"--run_dir={tmp_path / 'run'}", *changes])

    memory, handles, threads, cpu, stored = np.array(seen).T
    seconds = np.diff(cpu)  # of this process alone, so that others on the machine do not count
    first, last = np.median(seconds[200:300]), np.median(seconds[-100:])
    growth = memory[-100:].mean() / memory[200:300].mean() - 1
    print(
        f"\n{STEPS} steps, {cpu[-1] - cpu[0]:.0f} CPU seconds; step 200 and the last:"
        f"\nmedian of 100 steps  {1000 * first:.0f} ms, {1000 * last:.0f} ms"
        f"\nmemory               {memory[200]:.0f} MB, {memory[-1]:.0f} MB; growth of its mean {100 * growth:+.2f} %"
        f"\nhandles and threads  {handles[200]:.0f} and {threads[200]:.0f}, {handles[-1]:.0f} and {threads[-1]:.0f}"
        f"\nstored attempts      {stored[200]:.0f}, {stored[-1]:.0f}"
    )
    assert len(seen) == STEPS
    assert growth < 0.05
    assert handles[200:].max() <= handles[:200].max() and threads[200:].max() <= threads[:200].max()
    assert abs(last / first - 1) < 0.1
    assert stored[-1] <= 32 * 16  # 8 successes and 8 failures of each query
