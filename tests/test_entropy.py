"""Statistics of entropy.py and draws of gumbel.py, against float64 and by their distribution.

Tests that take `device` run the Triton kernels: on a card where they are marked `gpu`, else in Triton's interpreter.
Triton reads TRITON_INTERPRET when it is imported, and another test file may have imported it already. So the
interpreted tests are collected only where the variable is set, and `test_kernels_in_the_interpreter` runs this file
once more in a process that sets it.
"""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import entropy
from sampling import gumbel

ROOT = Path(entropy.__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]

# dtype of the logits: absolute tolerance of the statistics in nats, relative tolerance of the gradient (its rounding)
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-5, 1e-3), torch.bfloat16: (1e-5, 8e-3)}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where the kernels run: CPU tensors, too, are sent to them."""
    monkeypatch.setattr(entropy, "use_kernels", lambda x: True)
    return request.param


def naive(logits, targets, temperature=1.0):
    """The textbook in float64: log_softmax, gather, -sum p log p with 0 log 0 = 0."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp_min(-1e30)).sum(-1)


def model_like(T, V, dtype=torch.float32, seed=0):
    """Logits [T, V] in rows from almost uniform to almost one-hot."""
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(T, V, generator=rng) * torch.logspace(-1, 1.2, T)[:, None]).to(dtype)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def check_against_float64(logits, targets, temperature=1.0):
    """Values and gradients through both outputs."""
    atol, rtol = TOLERANCES[logits.dtype]
    upstream = torch.randn(2, len(logits), generator=torch.Generator().manual_seed(1)).to(logits.device)
    z = logits.detach().requires_grad_()
    found = entropy.token_stats(z, targets, temperature)
    exact_z = logits.detach().double().requires_grad_()
    exact = naive(exact_z, targets, temperature)
    for value, expected in zip(found, exact, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, atol=atol, rtol=1e-6)
    grad = torch.autograd.grad((torch.stack(found) * upstream).sum(), z)[0]
    exact_grad = torch.autograd.grad((torch.stack(exact) * upstream).sum(), exact_z)[0]
    assert grad.dtype == logits.dtype
    assert relative_error(grad, exact_grad) < rtol


# ---------------------------------------------------------------- statistics


def test_uniform_is_log_V_and_one_hot_is_0():
    logits = torch.zeros(2, 1000)
    logits[1, 7] = 200.0
    logp, H = entropy.token_stats(logits, torch.tensor([3, 7]))
    assert H.tolist() == pytest.approx([6.907755, 0.0], abs=1e-6)
    assert logp.tolist() == pytest.approx([-6.907755, 0.0], abs=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_reference_equals_float64(dtype, temperature):
    check_against_float64(model_like(64, 5003, dtype), torch.arange(64) * 70, temperature)


@pytest.mark.parametrize("V", [2, 151_936, 262_144])
def test_any_vocabulary_size(V):
    check_against_float64(model_like(3, V), torch.tensor([0, V - 1, V // 2]))
    H = entropy.token_stats(torch.zeros(1, V), torch.zeros(1, dtype=torch.int64))[1]
    assert H.item() == pytest.approx(math.log(V), rel=1e-6)


@pytest.mark.parametrize("offset", [-30_000.0, 10_000.0])
def test_an_offset_of_all_logits_costs_no_digits(offset):
    """log s - sum p z, without the shift, is wrong in the third digit here."""
    logits = model_like(32, 4099) + offset
    check_against_float64(logits, torch.arange(32) * 100)
    p, exact = logits.softmax(1), naive(logits, torch.arange(32))[1]
    assert (logits.logsumexp(1) - (p * logits).sum(1) - exact).abs().max() > 1e-3


def test_excluded_tokens_have_probability_0_and_no_gradient():
    logits = model_like(16, 3001)
    logits[:, 1::2] = -torch.inf
    logits[5, 2:] = -torch.inf
    logits.requires_grad_()
    check_against_float64(logits, torch.full((16,), 0))
    logp, H = entropy.token_stats(logits, torch.full((16,), 1))
    assert logp.eq(-torch.inf).all() and H[5] == 0
    grad = torch.autograd.grad(H.sum(), logits)[0]
    assert grad.isfinite().all() and grad[:, 1::2].eq(0).all()


def test_a_target_outside_of_the_vocabulary_is_loud():
    hidden, weight = torch.randn(3, 4), torch.randn(11, 4)
    targets = torch.tensor([-100, 11, 10])
    for logp, _ in (
        entropy.token_stats(hidden @ weight.t(), targets),
        entropy.linear_token_stats(hidden, weight, targets, tile_mb=1e-5),
    ):
        assert logp.isinf().tolist() == [True, True, False]


def test_strides_and_expanded_gradients():
    wide = model_like(20, 800)
    targets = torch.arange(40)[::4]
    for logits in (wide[::2, 100:700], wide.t().contiguous().t()[:10], wide[:1].expand(10, 800)):
        found = entropy.token_stats(logits.requires_grad_(), targets)
        for value, expected in zip(found, naive(logits, targets), strict=True):
            torch.testing.assert_close(value.double(), expected.detach(), atol=1e-5, rtol=0)
        grad = torch.autograd.grad(found[0].sum(), logits)[0]
        expected = torch.nn.functional.one_hot(targets, logits.shape[1]) - logits.softmax(1)
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("tile_mb", [None, 7 * 5 * 4 / 2**20])
def test_gradcheck(tile_mb):
    torch.manual_seed(0)
    hidden = torch.randn(7, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(13, 4, dtype=torch.double, requires_grad=True)
    targets = torch.randint(13, (7,))
    logits = (hidden @ weight.t()).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: entropy.token_stats(z, targets, 0.7), logits)
    linear = entropy.linear_token_stats
    assert torch.autograd.gradcheck(lambda h, W: linear(h, W, targets, 0.7, tile_mb), (hidden, weight))


# ---------------------------------------------------------------- the fused head


def head(T, d, V, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, d, generator=rng).to(dtype).requires_grad_()
    weight = (torch.randn(V, d, generator=rng) * 2 / d**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (T,), generator=rng), torch.randn(2, T, generator=rng)


def naive_head(hidden, weight, targets, upstream, temperature):
    """Values and gradients of hidden and weight in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    values = torch.stack(naive(hidden @ weight.t(), targets, temperature))
    return values.detach(), *torch.autograd.grad((values * upstream).sum(), (hidden, weight))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tile_mb", [None, 0.01])
@pytest.mark.parametrize("onednn", [entropy.ONEDNN, False])
def test_fused_head_equals_float64(dtype, tile_mb, onednn, monkeypatch):
    """2,100 rows are two tiles tall; 0.01 MB is one column wide."""
    monkeypatch.setattr(entropy, "ONEDNN", onednn)
    hidden, weight, targets, upstream = head(2100, 24, 1003, dtype)
    values = torch.stack(entropy.linear_token_stats(hidden, weight, targets, 0.7, tile_mb))
    grads = torch.autograd.grad((values * upstream).sum(), (hidden, weight))
    exact, *exact_grads = naive_head(hidden, weight, targets, upstream, 0.7)
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-5)
    for grad, expected, of in zip(grads, exact_grads, (hidden, weight), strict=True):
        assert grad.dtype == of.dtype
        assert relative_error(grad, expected) < TOLERANCES[dtype][1]


def test_weight_gradient_is_accumulated_in_fp32():
    """Sixteen tiles of equal rows: a bf16 sum, rounded at every tile, would stagnate."""
    hidden, weight, _, _ = head(1, 8, 50, torch.bfloat16)
    T = 16 * 2048
    targets = torch.zeros(T, dtype=torch.int64)
    logp, _ = entropy.linear_token_stats(hidden.expand(T, 8), weight, targets)
    grad = torch.autograd.grad(logp.sum(), weight)[0]
    expected = naive_head(hidden, weight, targets[:1], torch.tensor([[1.0], [0.0]]), 1.0)[2] * T
    assert relative_error(grad, expected) < 3e-3


def test_no_tensor_of_T_times_V_is_made():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
            return out

    hidden, weight, targets, _ = head(2048, 8, 40_000)
    with Largest() as largest:
        logp, H = entropy.linear_token_stats(hidden, weight, targets)
        (logp + H).sum().backward()
    assert weight.numel() <= largest.elements <= 2**22 < 2048 * 40_000 / 16


def test_tied_embeddings_get_both_gradients():
    table, ids = torch.randn(50, 8, requires_grad=True), torch.arange(20)
    logp, H = entropy.linear_token_stats(table[ids].tanh(), table, ids + 1)
    grad = torch.autograd.grad((logp - H).sum(), table)[0]
    logp, H = naive(table.double()[ids].tanh() @ table.double().t(), ids + 1)
    assert relative_error(grad, torch.autograd.grad((logp - H).sum(), table)[0]) < 1e-5


def test_only_the_gradients_that_are_asked_for():
    hidden, weight, targets, _ = head(9, 4, 30)
    for frozen, trained in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        trained.requires_grad_(True)
        entropy.linear_token_stats(hidden, weight, targets)[0].sum().backward()
        assert frozen.grad is None and trained.grad.abs().sum() > 0
        trained.grad = None


def test_no_tokens_give_no_statistics_and_a_gradient_of_0():
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logp, H = entropy.linear_token_stats(hidden, weight, torch.empty(0, dtype=torch.int64))
    (logp.sum() + H.sum()).backward()
    assert len(logp) == len(H) == 0 and weight.grad.eq(0).all()


def test_inputs_are_not_modified():
    hidden, weight, targets, _ = head(30, 4, 70)
    logits = (hidden @ weight.t()).detach()
    logits[:, 3] = -torch.inf
    before = [x.detach().clone() for x in (hidden, weight, logits)]
    entropy.linear_token_stats(hidden, weight, targets, 0.5)[1].sum().backward()
    entropy.token_stats(logits.requires_grad_(), targets, 0.5)[1].sum().backward()
    gumbel.sample(logits, 0.5, targets, targets)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, logits), strict=True))


# ---------------------------------------------------------------- sampling


def row(n):
    """Seeds and positions of n draws: a few seeds, many positions."""
    return torch.arange(n) % 7, torch.arange(n) // 7


def chi_square_is_plausible(counts, p):
    """Within five standard deviations of its mean."""
    expected = p * counts.sum()
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(p) - 1
    return abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_draws_follow_the_distribution(temperature):
    logits, n = torch.randn(23, generator=torch.Generator().manual_seed(3)), 100_000
    token, logp, H = gumbel.sample(logits.expand(n, 23), temperature, *row(n))
    log_p = (logits.double() / temperature).log_softmax(0)
    assert chi_square_is_plausible(torch.bincount(token, minlength=23), log_p.exp())
    torch.testing.assert_close(logp.double(), log_p[token], atol=1e-6, rtol=0)
    torch.testing.assert_close(H.double(), -(log_p.exp() * log_p).sum().expand(n), atol=1e-6, rtol=0)


def test_draws_from_a_large_flat_vocabulary_have_no_favourites():
    """The winner of 50,000 has a clock below 2^-15, where coarse noise would tie and the first index win."""
    token = gumbel.sample(torch.zeros(1, 50_000).expand(2000, -1), 1.0, *row(2000))[0]
    assert chi_square_is_plausible(torch.bincount(token // 2500, minlength=20), torch.full((20,), 1 / 20))
    assert token.unique().numel() > 1930  # 1,960 expected, 6 the standard deviation


def test_rare_tokens_are_drawn_as_rarely_as_they_should():
    logits, n = torch.tensor([0.0, -7.0, -9.0]), 200_000
    counts = torch.bincount(gumbel.sample(logits.expand(n, 3), 1.0, *row(n))[0], minlength=3)
    assert chi_square_is_plausible(counts, logits.double().softmax(0))


def test_a_draw_depends_on_seed_and_position_alone():
    logits, (seeds, positions) = model_like(40, 900).flip(0), row(40)
    token, logp, H = gumbel.sample(logits, 1.0, seeds, positions)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:11]
    again = gumbel.sample(logits[order], 1.0, seeds[order], positions[order])
    for a, b in zip(again, (token, logp, H), strict=True):
        assert torch.equal(a, b[order])
    assert not torch.equal(token, gumbel.sample(logits, 1.0, seeds + 7, positions)[0])
    assert not torch.equal(token, gumbel.sample(logits, 1.0, seeds, positions + 7)[0])


def wrapped(x, bits):
    return (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def noise_bits(seed, position, index):
    """The hash once more, on Python's integers."""
    shifted = lambda x, n, bits: (x % (1 << bits)) >> n  # noqa: E731
    x = wrapped(seed * 0x1E3779B97F4A7C15 + position * 0x5851F42D4C957F2D, 64)
    x = wrapped((x ^ shifted(x, 32, 64)) * 0x2127599BF4325C37, 64)
    x = wrapped((x ^ shifted(x, 29, 64)) * 0x369DEA0F31A53F85, 64)
    key, odd = wrapped(x ^ shifted(x, 32, 64), 32), wrapped(shifted(x, 32, 64) | 1, 32)
    h = wrapped(index * 0x297A2D39, 32)
    h = wrapped((h ^ shifted(h, 15, 32)) * 0x2C1B3C6D, 32)
    h = wrapped((h ^ key) * odd, 32)
    return wrapped((h ^ shifted(h, 15, 32)) * 0x2C1B3C6D, 32) & 0x7FFFFFFF | 1


CASES = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 8191, 151_935), (2**63 - 1, 2**31, 262_143), (42, 7, 31_999)]


def test_the_noise_is_the_same_integers_everywhere():
    seeds, positions, index = torch.tensor(CASES).t()
    key, odd = (k.to(torch.int32) for k in gumbel._row_keys(seeds, positions))
    assert gumbel._bits(index.to(torch.int32), key, odd).tolist() == [noise_bits(*case) for case in CASES]
    assert noise_bits(42, 7, 31_999) == 821_684_625


def test_the_noise_is_uniform_and_neighbours_are_independent():
    seeds, positions = torch.arange(64) - 32, torch.arange(64)
    keys = gumbel._row_keys(seeds[:, None].expand(64, 64).reshape(-1), positions.repeat(64))
    key, odd = (k.to(torch.int32)[:, None] for k in keys)
    u = gumbel._bits(torch.arange(512, dtype=torch.int32), key, odd).view(64, 64, 512) * gumbel.UNIT
    assert u.min() > 0 and u.max() < 1
    assert chi_square_is_plausible(torch.histc(u, 1000, 0, 1), torch.full((1000,), 1e-3))
    z = (u - 0.5) * 12**0.5  # mean 0, variance 1
    for axis in range(3):
        for distance in (1, 2, 8, 32):
            n = z.shape[axis] - distance
            products = z.narrow(axis, 0, n) * z.narrow(axis, distance, n)
            assert products.mean().abs() < 5 / products.numel() ** 0.5, (axis, distance)


def test_temperature_0_is_greedy_and_reports_temperature_1():
    logits = model_like(30, 700)
    logits[4, [50, 60]] = 100.0
    token, logp, H = gumbel.sample(logits, 0.0, *row(30))
    assert torch.equal(token, logits.argmax(1)) and token[4] == 50
    torch.testing.assert_close(torch.stack((logp, H)), torch.stack(entropy.token_stats(logits, token)))


def test_excluded_tokens_are_never_drawn():
    logits = torch.zeros(5000, 300)
    logits[:, 3:] = -torch.inf
    token, logp, H = gumbel.sample(logits, 1.0, *row(5000))
    assert token.unique().tolist() == [0, 1, 2]
    torch.testing.assert_close(torch.stack((-logp, H)), torch.tensor(3.0).log().expand(2, 5000))


def test_sampling_and_training_report_the_same_statistics():
    hidden, weight, _, _ = head(64, 16, 3000)
    logits = (hidden @ weight.t()).detach()
    token, logp, H = gumbel.sample(logits, 0.8, *row(64))
    for found in (entropy.token_stats(logits, token, 0.8), entropy.linear_token_stats(hidden, weight, token, 0.8, 0.1)):
        torch.testing.assert_close(torch.stack(found), torch.stack((logp, H)), atol=3e-6, rtol=0)


# ---------------------------------------------------------------- kernels


@pytest.mark.skipif(INTERPRETED, reason="this is the process that it starts")
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-k", "cpu", __file__]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=os.path.dirname(entropy.__file__),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("V", [7, 4096, 5003])
def test_kernel_equals_float64(device, dtype, V):
    logits = model_like(12, V, dtype).to(device)
    targets = torch.arange(12, device=device) % V
    check_against_float64(logits, targets, 0.6)
    check_against_float64((logits - 5000).float(), targets)
    logits[:, 1::2] = -torch.inf
    check_against_float64(logits, targets // 2 * 2)


def test_kernel_on_a_vocabulary_that_is_no_multiple_of_the_block(device):
    check_against_float64(model_like(2, 151_936).to(device), torch.tensor([151_935, 4096], device=device))


def test_kernel_on_strides(device):
    wide, targets = model_like(10, 6000).to(device), torch.arange(5, device=device) * 1000
    check_against_float64(wide[::2, 100:5900], targets)
    check_against_float64(wide.t().contiguous().t()[:5], targets)


def test_kernel_sends_targets_of_other_tiles_away(device):
    logp, _ = entropy.token_stats(torch.zeros(3, 40, device=device), torch.tensor([-1, 40, 39], device=device))
    assert logp.isinf().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_kernels_under_the_fused_head(device, dtype):
    hidden, weight, targets, upstream = head(40, 16, 203, dtype)
    exact, *exact_grads = naive_head(hidden, weight, targets, upstream, 0.7)
    inputs = [x.detach().to(device).requires_grad_() for x in (hidden, weight)]
    values = torch.stack(entropy.linear_token_stats(*inputs, targets.to(device), 0.7, 0.01))
    grads = torch.autograd.grad((values * upstream.to(device)).sum(), inputs)
    torch.testing.assert_close(values.double().cpu(), exact, atol=1e-5, rtol=1e-5)
    for grad, expected in zip(grads, exact_grads, strict=True):
        assert relative_error(grad.cpu(), expected) < 2 * TOLERANCES[dtype][1]  # the logits' gradient is rounded too


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("V", [5, 9001])
def test_kernel_draws_what_the_reference_draws(device, temperature, V):
    logits, (seeds, positions) = model_like(40, V, torch.bfloat16).float(), row(40)
    logits[:, 2] = -torch.inf
    if V > 4096 + 8:  # equal logits in two blocks, at the same place and at an earlier one
        logits[0, [7, 4096 + 7]] = logits[1, [7, 4096 + 6]] = 50.0
    expected = gumbel._sample_torch(logits, temperature, seeds * 10**12, positions)
    found = gumbel.sample(logits.to(device), temperature, seeds.to(device) * 10**12, positions.to(device))
    assert torch.equal(found[0].cpu(), expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-5, rtol=0)


def check_that_a_tiny_clock_keeps_its_digits(device):
    """Each row's smallest noise, about 1e-5, against one other at odds of 1 +- 0.001; 1 - u would be too coarse."""
    n, V, other = 6, 100_000, 3
    rows = torch.arange(n)
    key, odd = (k.to(torch.int32)[:, None] for k in gumbel._row_keys(rows, rows))
    clock = -torch.log1p(-gumbel._bits(torch.arange(V, dtype=torch.int32), key, odd).double() * gumbel.UNIT)
    smallest, logits = clock.argmin(1), torch.full((n, V), -torch.inf)
    logits[rows, smallest] = 0.0
    for margin, winner in ((1e-3, torch.full((n,), other)), (-1e-3, smallest)):
        logits[:, other] = ((clock[:, other] / clock[rows, smallest]).log() + margin).float()
        token = gumbel.sample(logits.to(device), 1.0, rows.to(device), rows.to(device))[0]
        assert torch.equal(token.cpu(), winner)


def test_a_tiny_clock_keeps_its_digits():
    check_that_a_tiny_clock_keeps_its_digits("cpu")


def test_a_tiny_clock_keeps_its_digits_in_the_kernel(device):
    check_that_a_tiny_clock_keeps_its_digits(device)


def test_kernel_grids_have_one_axis(device, monkeypatch):
    """Axes 1 and 2 end at 65,535 programs. 70,000 rows are only launched on a card; here the grid is looked at."""
    grids, T = [], 70_000
    logits = torch.zeros(T, 3, device=device, requires_grad=True)
    targets = torch.ones(T, dtype=torch.int64, device=device)
    if device == "cpu":
        record = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *a, **k: grids.append(grid)})()
        for module, name in ((entropy, "_stats_kernel"), (entropy, "_grad_kernel"), (gumbel, "_sample_kernel")):
            monkeypatch.setattr(module, name, record)
    logp, H = entropy.token_stats(logits, targets)
    (logp + H).sum().backward()
    token, _, _ = gumbel.sample(logits, 1.0, targets, targets)
    if device == "cpu":
        assert grids == [(T,)] * 3
    else:
        torch.testing.assert_close(H.cpu(), torch.tensor(3.0).log().expand(T))
        torch.testing.assert_close(logits.grad[-1].cpu(), torch.tensor([-1 / 3, 2 / 3, -1 / 3]))
        assert token.max() <= 2


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
    T, V = 17_000, 131_072
    logits = torch.zeros(T, V, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 20.0
    targets = torch.full((T,), 5, device="cuda")
    logp, H = entropy.token_stats(logits.requires_grad_(), targets)
    assert logp[-1] > -1e-3 and logp[0].item() == pytest.approx(-11.783502, abs=1e-4)
    (grad,) = torch.autograd.grad(logp.sum(), logits)
    assert grad[-1, 5].abs() < 1e-3 and grad[-2, 5].item() == pytest.approx(1, abs=1e-2)
    assert gumbel.sample(logits, 0.0, targets, targets)[0][-1] == 5


@pytest.mark.gpu
def test_sampling_is_captured_in_a_cuda_graph():
    logits, (seeds, positions) = model_like(16, 5003).cuda(), (x.cuda() for x in row(16))
    expected = gumbel.sample(logits, 0.7, seeds, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gumbel.sample(logits, 0.7, seeds, positions)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---------------------------------------------------------------- Triton missing, Triton broken


def import_another(name):
    spec = importlib.util.spec_from_file_location(name, (ROOT / Path(*name.split("."))).with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_works_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # "not found"
    monkeypatch.setitem(sys.modules, "entropy", without := import_another("entropy"))
    draws = import_another("sampling.gumbel")
    logits, targets = model_like(4, 50), torch.arange(4)
    assert without.triton is None
    pairs = (
        (without.token_stats(logits, targets), entropy.token_stats(logits, targets)),
        (draws.sample(logits, 1.0, targets, targets), gumbel.sample(logits, 1.0, targets, targets)),
    )
    for found, expected in pairs:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_broken_triton_is_not_taken_for_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("import no_such_driver_library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_driver_library"):
        import_another("entropy")
