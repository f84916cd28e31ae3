"""β and values: separate numpy solves by definition, and an independent implementation."""

import math

import numpy as np
import pytest

from jaxablate import compaction, matching, selection
from jaxablate.compaction import METHODS, fit_heads, key_order, num_kept
from jaxablate.errors import UserError

ORACLE_HEADS = ("L0H0", "L3H1", "L7H2", "L13H0", "L16H1")
ORACLE_RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
COUNTS = (1, 2, 7, 19, 40)


def layer(num_heads=2, num_queries=200, num_keys=60, size=8, seed=0):
    """Random heads whose attention is neither flat nor on one key."""
    rng = np.random.default_rng(seed)
    shapes = ((num_heads, num_queries, size), *[(num_heads, num_keys, size)] * 2)
    return tuple(rng.normal(size=shape).astype(np.float32) * 1.5 for shape in shapes)


def exponentials(queries, keys):
    """E [n, T], float64."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T / math.sqrt(keys.shape[1])
    return np.exp(scores - scores.max(axis=1, keepdims=True))


def weights_by_definition(chosen, mass):
    low, high = math.exp(-3), math.exp(3)
    weights = np.clip(np.linalg.lstsq(chosen, mass, rcond=None)[0], low, high)
    step = 1 / np.linalg.norm(chosen, 2) ** 2
    for _ in range(2):
        weights = weights - step * (chosen.T @ (chosen @ weights - mass))
        weights = np.clip(weights, low, high)
    return weights


def shares(chosen, beta):
    """X: softmax over the kept keys."""
    weighted = chosen * np.exp(beta.astype(np.float64))
    return weighted / weighted.sum(axis=1, keepdims=True)


def test_beta_of_every_size_equals_a_solve_of_its_own():
    queries, keys, values = layer()
    queries = 4 * queries  # sharp attention: some weights at either bound
    fit = fit_heads(queries, keys, values, COUNTS, method="select+beta", selection="first_last")
    clamped = np.zeros(2)
    for (place, count), kept in fit.heads.items():
        matrix = exponentials(queries[place], keys[place])
        chosen, mass = matrix[:, kept.indices], matrix.sum(axis=1)
        expected = weights_by_definition(chosen, mass)
        np.testing.assert_allclose(np.exp(kept.beta), expected, rtol=2e-5)
        np.testing.assert_array_equal(kept.values, values[place][kept.indices])
        clamped += np.array([(kept.beta == bound).sum() for bound in (-3, 3)])
        report = fit.reports[place, count]
        left = np.linalg.norm(chosen @ expected - mass) / np.linalg.norm(mass)
        assert report.mass_residual == pytest.approx(left, rel=1e-6)
        assert 1 / report.step_size == pytest.approx(np.linalg.norm(chosen, 2) ** 2, rel=1e-6)
        assert 0.5 < report.beta_condition / np.linalg.cond(chosen) < 1 + 1e-6
        assert report.ridge is None
    assert (clamped > 2).all(), "both bounds should bite somewhere"


@pytest.mark.parametrize("method", ["match", "select+values"])
def test_values_do_what_the_least_squares_solution_does(method):
    queries, keys, values = layer(seed=1)
    fit = fit_heads(queries, keys, values, COUNTS, method=method)
    for (place, count), kept in fit.heads.items():
        matrix = exponentials(queries[place], keys[place])
        full = (matrix / matrix.sum(axis=1, keepdims=True)) @ values[place].astype(np.float64)
        table = shares(matrix[:, kept.indices], kept.beta)
        expected = np.linalg.lstsq(table, full, rcond=None)[0]
        apart = np.linalg.norm(table @ (kept.values - expected)) / np.linalg.norm(full)
        assert apart < 1e-6
        report = fit.reports[place, count]
        left = np.linalg.norm(table @ expected - full) / np.linalg.norm(full)
        assert report.output_residual == pytest.approx(left, abs=1e-6)
        assert 0.5 < report.values_condition / np.linalg.cond(table) < 1 + 1e-6
        assert report.ridge == 0
        if method == "select+values":
            np.testing.assert_array_equal(kept.beta, np.zeros(count))
            assert report.beta_condition is None


def test_values_survive_rows_whose_best_key_is_not_kept():
    """A query that all kept keys serve badly: E of float32 would be zero, and X NaN."""
    queries, keys, values = layer(num_heads=1, size=4)
    keys[0, 0] = 40.0
    queries[0, 0] = 8.0  # 640 above the others, in the exponent
    fit = fit_heads(queries, keys, values, [5], selection="random", seed=1)
    assert 0 not in fit.heads[0, 5].indices
    assert np.isfinite(fit.heads[0, 5].values).all()
    assert np.isfinite(fit.heads[0, 5].beta).all()


@pytest.mark.parametrize("case", ["duplicate keys", "fewer queries than keys"])
def test_without_full_rank_a_tiny_ridge_gives_what_least_squares_gives(case):
    queries, keys, values = layer(num_heads=1, seed=2)
    if case == "duplicate keys":
        keys = np.concatenate([keys[:, :30], keys[:, :30]], axis=1)
    else:
        queries = queries[:, :25]
    count = 50
    fit = fit_heads(queries, keys, values, [1, count])
    kept = fit.heads[0, count]
    assert fit.reports[0, 1].ridge == 0
    assert 0 < fit.reports[0, count].ridge < 1e-9
    matrix = exponentials(queries[0], keys[0])
    full = (matrix / matrix.sum(axis=1, keepdims=True)) @ values[0].astype(np.float64)
    table = shares(matrix[:, kept.indices], kept.beta)
    expected = np.linalg.lstsq(table, full, rcond=1e-10)[0]
    assert np.linalg.norm(table @ (kept.values - expected)) / np.linalg.norm(full) < 1e-5
    mass = matrix.sum(axis=1)
    chosen = matrix[:, kept.indices]
    own, theirs = (
        np.linalg.norm(chosen @ w - mass)
        for w in (np.exp(kept.beta), weights_by_definition(chosen, mass))
    )
    assert own < 1.02 * theirs + 1e-6 * np.linalg.norm(mass)


def test_a_pivot_that_is_only_rounding_counts_as_dependence():
    """Cholesky may get through such a matrix, with a pivot of 1e-16 that means nothing."""
    import jax

    with jax.enable_x64(True):
        gram = jax.numpy.array([[1.0, 1.0], [1.0, 1 + 4e-16]])
        used = jax.numpy.array([True, True])
        assert np.isfinite(np.linalg.cholesky(gram)).all()
        factor, ridge = matching._factor(gram, used, jax.numpy.float64(0))
        assert float(ridge) == 1e-13
        assert float(factor[1, 1]) > 1e-7


def test_a_ridge_that_is_asked_for_is_the_one_of_its_definition():
    queries, keys, values = layer(num_heads=1)
    kept = fit_heads(queries, keys, values, [20], ridge=0.01).heads[0, 20]
    matrix = exponentials(queries[0], keys[0])
    full = (matrix / matrix.sum(axis=1, keepdims=True)) @ values[0].astype(np.float64)
    table = shares(matrix[:, kept.indices], kept.beta)
    gram = table.T @ table
    gram += 0.01 * np.trace(gram) / 20 * np.eye(20)
    np.testing.assert_allclose(kept.values, np.linalg.solve(gram, table.T @ full), atol=1e-5)
    with pytest.raises(UserError, match="ridge -1"):
        fit_heads(queries, keys, values, [20], ridge=-1)


def test_all_keys_reproduce_the_uncompressed_head():
    queries, keys, values = layer(num_queries=300)
    for method in METHODS:
        fit = fit_heads(queries, keys, values, [60], method=method)
        for place in range(2):
            kept = fit.heads[place, 60]
            assert sorted(kept.indices.tolist()) == list(range(60))
            matrix = exponentials(queries[place], keys[place])
            full = (matrix / matrix.sum(axis=1, keepdims=True)) @ values[place]
            again = exponentials(queries[place], kept.keys) * np.exp(kept.beta)
            found = again / again.sum(axis=1, keepdims=True) @ kept.values
            np.testing.assert_allclose(found, full, atol=2e-6, err_msg=method)


def test_memory_heads_under_one_vmap_and_other_sizes_change_nothing(monkeypatch):
    queries, keys, values = layer(num_heads=3, num_queries=300, seed=3)
    alone = fit_heads(queries, keys, values, [[19], [2, 40], [7, 19, 40]])
    assert set(alone.heads) == {(0, 19), (1, 2), (1, 40), (2, 7), (2, 19), (2, 40)}
    recomputed = fit_heads(queries, keys, values, [[19], [2, 40], [7, 19, 40]], memory_bytes=0)
    monkeypatch.setattr(selection, "heads_at_once", lambda: 3)
    monkeypatch.setattr(compaction, "heads_at_once", lambda: 3)
    monkeypatch.setattr(matching, "rows_per_chunk", lambda columns, heads: 128)
    together = fit_heads(queries, keys, values, [[19], [2, 40], [7, 19, 40]])
    for key, kept in alone.heads.items():
        np.testing.assert_array_equal(recomputed.heads[key].values, kept.values)
        np.testing.assert_array_equal(recomputed.heads[key].beta, kept.beta)
        np.testing.assert_array_equal(together.heads[key].indices, kept.indices)
        np.testing.assert_allclose(together.heads[key].beta, kept.beta, atol=1e-6)
        np.testing.assert_allclose(together.heads[key].values, kept.values, rtol=1e-4, atol=1e-4)


def test_runs_are_bitwise_equal_and_leave_the_precision_setting_alone():
    import jax

    queries, keys, values = layer()
    one, other = (
        fit_heads(queries, keys, values, [9], selection="random", seed=(5, 1)) for _ in range(2)
    )
    for key, kept in one.heads.items():
        for field in ("indices", "keys", "values", "beta"):
            found = getattr(other.heads[key], field)
            assert found.tobytes() == getattr(kept, field).tobytes()
            assert found.dtype in (np.float32, np.int32)
    assert one.heads[0, 9].indices.tolist() != one.heads[1, 9].indices.tolist()
    assert not jax.config.jax_enable_x64
    some = (array[1:] for array in (queries, keys, values))
    alone = fit_heads(*some, [9], selection="random", seed=(5, 1), head_ids=[1])
    np.testing.assert_array_equal(alone.heads[0, 9].indices, one.heads[1, 9].indices)


def test_a_grid_of_ratios_compiles_few_shapes():
    assert [matching.padded_size(t) for t in (1, 128, 129, 388, 971, 1025)] == [
        128, 128, 256, 512, 1024, 1280,
    ]  # fmt: skip
    assert len({matching.padded_size(num_kept(p / 100, 1942)) for p in range(51)}) == 8
    queries, keys, values = layer(num_heads=1, num_keys=120)
    fit_heads(queries, keys, values, [3])
    before = matching._solve_values_heads._cache_size()
    fit_heads(queries, keys, values, [3 + 2 * i for i in range(40)])
    assert matching._solve_values_heads._cache_size() == before


def test_what_cannot_be_fitted_is_refused():
    queries, keys, values = layer()
    with pytest.raises(UserError, match="method 'all'; allowed are select, select"):
        fit_heads(queries, keys, values, [3], method="all")
    with pytest.raises(UserError, match="selection 'all'; allowed are rms"):
        fit_heads(queries, keys, values, [3], selection="all")
    for counts in ([0], [3, 61]):
        with pytest.raises(UserError, match="keys to keep of 60"):
            fit_heads(queries, keys, values, counts)
    for counts in ([[3]], [[3], []], []):
        with pytest.raises(UserError, match="counts for"):
            fit_heads(queries, keys, values, counts)


@pytest.mark.shared
@pytest.mark.parametrize("name", ORACLE_HEADS)
def test_fits_do_what_the_independent_implementations_do(shared_dir, name):
    """Our keys, β and values against its keys, β and values, by their outputs: 1e-4 is asked."""
    oracle = shared_dir / "oracle"
    queries = np.load(oracle / "article0_queries.npz")[name]
    context = np.load(oracle / "article0_keys_values.npz")
    start, end = context["article_range"].tolist()
    keys, values = (context[f"{name}_{letter}"][start:end] for letter in "KV")
    counts = [num_kept(ratio, end - start) for ratio in ORACLE_RATIOS]
    fit = fit_heads(queries[None], keys[None], values[None], counts)
    matrix = exponentials(queries, keys)
    full = (matrix / matrix.sum(axis=1, keepdims=True)) @ values
    theirs = np.load(oracle / "article0_match_heads.npz")
    baseline = np.load(oracle / "article0_match_baseline.npz")
    for ratio, count in zip(ORACLE_RATIOS, counts):
        kept = fit.heads[0, count]
        parts = [(theirs, f"{name}_r{ratio}")] + ([(baseline, name)] if ratio == 0.05 else [])
        chosen = matrix[:, kept.indices]
        for found, prefix in parts:
            np.testing.assert_array_equal(kept.indices, found[f"{prefix}_idx"])
            np.testing.assert_allclose(kept.beta, found[f"{prefix}_beta"], atol=1.5e-2)
            own = shares(chosen, kept.beta) @ kept.values
            expected = shares(chosen, found[f"{prefix}_beta"]) @ found[f"{prefix}_C2"]
            assert np.linalg.norm(own - expected) / np.linalg.norm(full) < 1e-5, (name, ratio)
        assert fit.reports[0, count].ridge == 0


@pytest.mark.shared
def test_selection_only_is_the_independent_implementations_to_the_bit(shared_dir):
    oracle = shared_dir / "oracle"
    queries = np.load(oracle / "article0_queries.npz")
    context = np.load(oracle / "article0_keys_values.npz")
    theirs = np.load(oracle / "article0_select_heads.npz")
    start, end = context["article_range"].tolist()
    for name in ORACLE_HEADS:
        keys, values = (context[f"{name}_{letter}"][start:end] for letter in "KV")
        order = key_order(queries[name], keys)
        for ratio in ORACLE_RATIOS:
            kept = compaction.select(keys, values, order, num_kept(ratio, end - start))
            np.testing.assert_array_equal(kept.indices, theirs[f"{name}_r{ratio}_idx"])
            np.testing.assert_array_equal(kept.beta, theirs[f"{name}_r{ratio}_beta"])
            np.testing.assert_array_equal(kept.values, theirs[f"{name}_r{ratio}_C2"])
