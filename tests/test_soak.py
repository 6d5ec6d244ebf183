"""A thousand steps of the embedded model: memory, open files and the cost of a step stay where they were.

python -m pytest -m slow -s tests/test_soak.py             about six minutes on one core; prints the figures
"""

import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

import r3

ROOT = Path(r3.__file__).parent
STEPS = 1000
WARM_UP = 200  # steps

SHORT = {
    "data_limit": 4,  # two steps an epoch
    "batch_size": 2,
    "group_size": 4,
    "max_new_tokens": 64,
    "reflection_tokens": 24,
    "min_history": 8,
    "buffer_per_query": 2,  # each query's buffer is full before the warm-up ends, so that later steps do equal work
    "steps": STEPS,
    "epochs": STEPS,
    "lr": 1e-8,  # the policy stays as it is, and so does the length of its responses
    "eval_limit": 4,
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

    def noting(run, *step):
        machine = resident_mb(), len(os.listdir("/proc/self/fd")), threading.active_count()
        seen.append((*machine, len(run.buffer), sum(run.seconds.values())))
        return log_step(run, *step)

    monkeypatch.setattr(r3, "log_step", noting)
    monkeypatch.chdir(ROOT)
    changes = [f"--{key}={value}" for key, value in SHORT.items()]
    r3.main(["--config=configs/tiny.yaml", f"--run_dir={tmp_path / 'run'}", *changes])

    memory, handles, threads, stored, seconds = np.array(seen).T
    early, late = slice(WARM_UP, WARM_UP + 100), slice(-100, None)
    growth, slower = (x[late].mean() / x[early].mean() - 1 for x in (memory, seconds))
    print(
        f"\n{STEPS} steps; the hundred after step {WARM_UP} and the last hundred:"
        f"\nseconds a step       {seconds[early].mean():.3f}, {seconds[late].mean():.3f}: {100 * slower:+.1f} %"
        f"\nmemory (MB)          {memory[early].mean():.0f}, {memory[late].mean():.0f}: {100 * growth:+.1f} %"
        f"\nhandles, threads     {handles[early].max():.0f}, {threads[early].max():.0f} at most; "
        f"{handles[late].max():.0f}, {threads[late].max():.0f}"
        f"\nstored responses      {stored[WARM_UP]:.0f}, {stored[-1]:.0f}"
    )
    assert len(seen) == STEPS
    assert growth < 0.05
    assert slower < 0.10
    assert handles[WARM_UP:].max() <= handles[:WARM_UP].max() and threads[WARM_UP:].max() <= threads[:WARM_UP].max()
    assert (stored[WARM_UP:] == 4 * (2 + 2)).all()  # full from the warm-up on: all measured steps do the same work
