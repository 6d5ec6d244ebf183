"""A thousand steps of the embedded model: memory, open files and the cost of a step stay where they were.

    python -m pytest -m slow -s tests/test_soak.py             about four minutes on one core; prints the figures
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

SHORT = {
    "data_limit": 16,  # eight steps an epoch: by step 200 each query's part of the buffer is full
    "batch_size": 2,
    "group_size": 4,
    "max_new_tokens": 24,
    "reflection_tokens": 24,
    "min_history": 8,
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

    def noting(run, bar, epoch, groups, sampled, learning, seconds):
        trained = [a for g in groups if len(set(g.rewards)) > 1 for a in g.attempts]
        tokens = sum(len(a.prompt_ids) + len(a.response_ids) for a in trained)
        drawn = sum(len(a.response_ids) for g in sampled for a in g.attempts)
        machine = resident_mb(), len(os.listdir("/proc/self/fd")), threading.active_count()
        seen.append((*machine, len(run.buffer), seconds[0] / drawn, seconds[1] / max(1, tokens)))
        return log_step(run, bar, epoch, groups, sampled, learning, seconds)

    monkeypatch.setattr(r3, "log_step", noting)
    monkeypatch.chdir(ROOT)
    changes = [f"--{key}={value}" for key, value in SHORT.items()]
    r3.main(["--config=configs/tiny.yaml", f"--run_dir={tmp_path / 'run'}", *changes])

    memory, handles, threads, stored, sampling, training = np.array(seen).T
    early, late = slice(200, 300), slice(-100, None)
    # The cost of a token, for a fuller buffer lends more of them; its lower decile, where nothing else was running.
    costs = [1e6 * np.array([np.quantile(c[early], 0.1), np.quantile(c[late], 0.1)]) for c in (sampling, training)]
    growth = memory[late].mean() / memory[early].mean() - 1
    print(
        f"\n{STEPS} steps; step 200 and the last:"
        f"\nsampling a token     {costs[0][0]:.0f} us, {costs[0][1]:.0f} us"
        f"\ntraining on a token  {costs[1][0]:.0f} us, {costs[1][1]:.0f} us"
        f"\nmemory               {memory[200]:.0f} MB, {memory[-1]:.0f} MB; growth of its mean {100 * growth:+.2f} %"
        f"\nhandles and threads  {handles[200]:.0f} and {threads[200]:.0f}, {handles[-1]:.0f} and {threads[-1]:.0f}"
        f"\nstored attempts      {stored[200]:.0f}, {stored[-1]:.0f}"
    )
    assert len(seen) == STEPS
    assert growth < 0.05
    assert handles[200:].max() <= handles[:200].max() and threads[200:].max() <= threads[:200].max()
    assert all(last / first < 1.1 for first, last in costs)
    assert stored[-1] <= 16 * 16  # 8 successes and 8 failures of each query
