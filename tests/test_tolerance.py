"""Curves refined to a tolerance: synthetic residuals with known truth, and tiny models."""

import numpy as np
import pytest
import tiny
from test_first_order import BASELINE, PREFIX, make_problem

from jaxablate import edits, estimates, refine
from jaxablate.errors import UserError
from jaxablate.sweep import Sweep

TOLERANCE = 0.002


class Curves:
    """Twelve curves over 51 sizes; the estimate misses a smooth part of up to `size`, and jumps."""

    def __init__(self, size: float, jump: float = 0.0, seed: int = 0):
        rng = np.random.default_rng(seed)
        counts = np.maximum(1, np.arange(51) * 10)
        self.curves = np.repeat(np.arange(12), 51)
        self.places = np.tile(np.log(counts), 12)
        distance = np.abs(self.places - np.log(50))
        self.scales = np.repeat(rng.uniform(0.1, 1, 12) * size, 51) * np.minimum(distance, 2)
        wave = np.repeat(rng.normal(size=12), 51) + 0.5 * np.sin(
            self.places * np.repeat(rng.uniform(0.5, 1.5, 12), 51)
        )
        self.estimates = rng.normal(size=(len(wave), 2)) * 0.01
        jumps = np.where(self.places > np.repeat(rng.uniform(4.5, 6, 12), 51), jump, 0)
        residual = self.scales * wave + np.where(self.scales > 0, jumps, 0)
        # Two questions, of which the second is off twice as much as the first.
        self.exact = self.estimates + residual[:, None] * np.asarray([2 / 3, 4 / 3])
        self.exact[self.scales == 0] = self.estimates[self.scales == 0] = 0
        self.asked: list[int] = []

    def evaluate(self, indices):
        assert not set(indices) & set(self.asked), "a point was asked for twice"
        self.asked += indices
        return self.exact[indices]

    def refine(self, tolerance=TOLERANCE):
        return refine.refine(
            self.curves, self.places, self.estimates, self.scales, self.evaluate, tolerance
        )


# Residuals of up to 0.3, 3 and 20 tolerances. The last need more: with deviations of 20 tolerances
# a bound of 3.5 deviations asks Matérn 3/2 for exact points every 0.1 e-folds of the keys; the
# ten points below 100 keys lie further apart than that, those above ask for 1.6 / 0.1 = 16, and
# 26 of 51 are half.
@pytest.mark.parametrize(("size", "most"), [(0.0003, 0.15), (0.003, 0.15), (0.02, 0.5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_smooth_residuals(size, most, seed):
    curves = Curves(size, seed=seed)
    found = curves.refine()
    error = np.abs((found.values - curves.exact).mean(axis=1))
    print(size, "exact", len(curves.asked), "of", len(error), "worst", error.max())
    assert np.mean(error <= TOLERANCE) >= 0.99
    assert np.mean(error <= found.bounds + 1e-12) >= 0.99
    assert found.bounds.max() <= TOLERANCE
    assert len(curves.asked) <= most * len(error)
    if size == 0.003:  # the estimate alone is not enough
        alone = np.abs((curves.estimates - curves.exact).mean(axis=1))
        assert np.mean(alone <= TOLERANCE) < 0.9


def test_jumps_are_found_or_bounded():
    curves = Curves(0.003, jump=0.003)
    found = curves.refine()
    error = np.abs((found.values - curves.exact).mean(axis=1))
    assert np.mean(error <= TOLERANCE) >= 0.97


def test_what_rows_say():
    curves = Curves(0.003)
    found = curves.refine()
    kinds, asked = np.asarray(found.kinds), np.zeros(len(curves.curves), bool)
    asked[curves.asked] = True
    baseline = curves.scales == 0
    assert ((kinds == "exact") == (asked | baseline)).all()
    np.testing.assert_array_equal(found.values[kinds == "exact"], curves.exact[kinds == "exact"])
    assert (found.bounds[kinds == "exact"] == 0).all()
    assert (found.bounds[kinds != "exact"] > 0).all()
    for curve in range(12):
        own = set(kinds[curves.curves == curve])
        assert own <= {"exact", "interpolated"} or own == {"exact", "estimated"}


def test_corrections_keep_each_questions_share():
    """Interpolated residuals of the two questions stand as 1 to 2, as those of exact points do."""
    curves = Curves(0.003)
    found = curves.refine()
    interpolated = np.asarray(found.kinds) == "interpolated"
    correction = (found.values - curves.estimates)[interpolated]
    np.testing.assert_allclose(correction[:, 1], 2 * correction[:, 0], atol=1e-12)
    assert np.abs(correction).max() > 1e-3


# How many checks it takes to believe in an estimate that expects to be off by s tolerances: after
# n exact points without residual the variance has fallen to 4 / (4 + n) of 0.7², and a curve needs
# 3.5 deviations of what neighbours leave open within one tolerance. For s = 3 that is reached by
# n of about 30 (2 or 3 a curve), below 10 %; for s = 20 only by 5 to 7 points a curve, 12 %.
@pytest.mark.parametrize(("size", "most"), [(0.003, 0.10), (0.02, 0.15)])
def test_perfect_estimates(size, most):
    perfect = Curves(size)
    perfect.exact = perfect.estimates.copy()
    perfect.refine()
    print(size, len(perfect.asked))
    assert len(perfect.asked) < most * 612


def test_useless_estimates():
    useless = Curves(0.02)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(612, 1)) * 0.02 * (useless.scales[:, None] > 0)
    useless.exact = useless.estimates + noise
    found = useless.refine()
    error = np.abs((found.values - useless.exact).mean(axis=1))
    assert len(useless.asked) > 0.5 * 612  # what cannot be predicted is evaluated
    assert np.mean(error <= TOLERANCE) >= 0.99


def test_smaller_tolerances_ask_for_more():
    asked = []
    for tolerance in (0.01, 0.002, 0.0005):
        curves = Curves(0.01)
        assert curves.refine(tolerance).bounds.max() <= tolerance
        asked.append(len(curves.asked))
    assert asked[0] < asked[1] < asked[2]


def test_repeats_to_the_bit():
    first, second = Curves(0.005).refine(), Curves(0.005).refine()
    assert first.values.tobytes() == second.values.tobytes()
    assert first.bounds.tobytes() == second.bounds.tobytes()


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_tolerance_must_be_positive(tolerance):
    with pytest.raises(UserError, match="must be positive"):
        Curves(0.01).refine(tolerance)


# With a model


@pytest.fixture(scope="module")
def engine():
    config = tiny.llama_config(num_layers=3)
    return Sweep(tiny.random_model(config), make_problem(config, strength=0.02))


def points_of(config):
    counts = [1, 4, *range(BASELINE, PREFIX + 1, 3)]
    found = []
    for layer in range(config.num_layers):
        for head in range(config.num_kv_heads):
            for count in counts:
                chosen = {} if count == BASELINE else {(layer, head): count}
                found.append((2 * layer + head, count, edits.keep_keys(chosen)))
    return map(list, zip(*found))


def test_refined_curves_of_a_model(engine):
    curves, counts, configurations = points_of(engine.model.config)
    tokens = estimates.scored_tokens(engine)
    estimated = estimates.estimate(engine, configurations, "second_order", draws=16)
    nll = np.float64(engine.run(configurations))
    row = np.nonzero(engine.problem.batch.scored)[0]
    change = nll - engine.baseline_nll
    exact = np.stack([change[:, row == b].sum(axis=1) for b in range(len(tokens))], axis=1)
    for tolerance in (0.05, 0.005):
        found = estimates.refine_curves(
            engine, configurations, np.asarray(curves), np.asarray(counts), estimated, tolerance
        )
        error = np.abs(((found.changes - exact) / tokens).mean(axis=1))
        print(tolerance, {k: found.estimators.count(k) for k in set(found.estimators)}, error.max())
        assert np.mean(error <= tolerance) >= 0.97
        for i, kind in enumerate(found.estimators):
            assert (kind == "exact") == (i in found.nll)
            if kind == "exact":
                np.testing.assert_allclose(found.nll[i], nll[i], rtol=2e-6)  # other chunks
                np.testing.assert_allclose(found.changes[i], exact[i], atol=1e-4)
    assert {"exact", "interpolated"} <= set(found.estimators)


def test_estimators_of_a_model(engine):
    _, _, configurations = points_of(engine.model.config)
    first = estimates.estimate(engine, configurations, "first_order")
    second = estimates.estimate(engine, configurations, "second_order", draws=64)
    base = [i for i, c in enumerate(configurations) if not c.edits]
    assert (first.changes[base] == 0).all()
    assert (second.changes[base] == 0).all()
    assert (second.errors[base] == 0).all()
    assert (second.errors[[i for i in range(len(configurations)) if i not in base]] > 0).all()
    assert (second.changes >= first.changes).all()  # a sum of squares is added
    with pytest.raises(UserError, match="first_order"):
        estimates.estimate(engine, configurations, "third_order")
