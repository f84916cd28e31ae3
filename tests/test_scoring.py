"""Perplexities, intervals and rank correlations against values computed by hand or by scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from jaxablate import scoring
from jaxablate.errors import UserError


def _units(samples: np.ndarray) -> scoring.Units:
    """Each row of `samples` [C, U] as a configuration measured on U documents."""
    count = samples.shape[1]
    return scoring.Units(
        kind="documents", values=samples / count, weights=np.full(count, 1 / count)
    )


def test_perplexity_of_three_tokens_by_hand():
    # p = 1/2, 1/4, 1/10: the perplexity is the geometric mean of 2, 4 and 10.
    nll = [math.log(2), math.log(4), math.log(10)]
    assert scoring.perplexity(sum(nll), 3) == pytest.approx(80 ** (1 / 3), rel=1e-12)


def test_perplexity_is_weighted_by_tokens_not_by_windows():
    # A window of 1 token at 8 nats and one of 9 tokens at 1 nat each: 17 / 10, not (8 + 1) / 2.
    assert scoring.log_perplexity(8.0 + 9.0, 1 + 9) == pytest.approx(1.7, rel=1e-12)


def test_overflow_is_infinite_and_shows_its_logarithm():
    assert scoring.perplexity(7100.0, 10) == math.inf
    assert scoring.format_perplexity(710.0) == "inf (log 710.00)"
    assert scoring.format_perplexity(709.0) == "8.22e+307"
    assert scoring.format_perplexity(math.log(13.926)) == "13.93"
    assert scoring.delta_perplexity(800.0, 1.0) == math.inf


def test_delta_perplexity_keeps_small_differences():
    delta = scoring.delta_perplexity(0.1 + 1e-13, 0.1)
    assert delta == pytest.approx(math.exp(0.1) * ((0.1 + 1e-13) - 0.1), rel=1e-9)


@pytest.mark.parametrize(("total", "tokens"), [(1.0, 0), (math.nan, 3)])
def test_perplexity_of_nothing_is_refused(total, tokens):
    with pytest.raises(UserError):
        scoring.perplexity(total, tokens)


def test_mean_log_perplexity_weighs_questions_and_articles_equally():
    # Article "b": questions of 2/1 and 9/3 nats per token; article "a": one of 10/5.
    sums = np.array([2.0, 10.0, 9.0])
    tokens = np.array([1, 5, 3])
    articles = np.array(["b", "a", "b"])
    names, means = scoring.document_means(sums, tokens, articles)
    assert names.tolist() == ["b", "a"]
    np.testing.assert_allclose(means, [2.5, 2.0], rtol=1e-15)
    assert scoring.mean_log_perplexity(sums, tokens, articles) == pytest.approx(2.25, rel=1e-15)
    # Configurations are a leading axis.
    both = scoring.mean_log_perplexity(np.stack([sums, 2 * sums]), tokens, articles)
    np.testing.assert_allclose(both, [2.25, 4.5], rtol=1e-15)


def test_standard_error_across_documents():
    values = np.array([[1.0, 2.0, 4.0, 9.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(scoring.standard_error(values), scipy.stats.sem(values, axis=1))
    assert np.isnan(scoring.standard_error(values[:, :1])).all()


@pytest.mark.parametrize("method", scoring.INTERVAL_METHODS)
@pytest.mark.parametrize("skewed", [False, True])
def test_paired_interval_covers_a_known_effect(method, skewed):
    random = np.random.default_rng(7)
    draws, documents, effect = 1000, 200, 0.03
    # Documents differ by far more than the effect; pairing removes what they share.
    difficulty = random.normal(3.0, 1.0, (draws, documents))
    noise = random.exponential(0.1, (draws, documents)) - 0.1 if skewed else 0
    noise = noise + random.normal(0.0, 0.1, (draws, documents))
    covered = 0
    for part in range(0, draws, 250):
        rows = slice(part, part + 250)
        baseline, ablated = difficulty[rows], difficulty[rows] + effect + noise[rows]
        stacked = _units(np.concatenate([baseline, ablated]))
        # Every draw has its own baseline here, so the pairs are formed by hand.
        paired = scoring.Units(
            kind="documents",
            values=stacked.values[250:] - stacked.values[:250],
            weights=stacked.weights,
        )
        interval = scoring.bootstrap(paired, method=method, seed=part)
        covered += ((interval.low <= effect) & (effect <= interval.high)).sum()
    assert 0.93 <= covered / draws <= 0.97


def test_studentized_interval_also_covers_with_ten_documents():
    random = np.random.default_rng(3)
    interval = scoring.bootstrap(_units(random.normal(0.5, 1.0, (1000, 10))))
    assert 0.93 <= ((interval.low <= 0.5) & (interval.high >= 0.5)).mean() <= 0.97


def test_pairing_subtracts_the_baseline_on_the_same_documents():
    sums = np.tile([[2.0, 4.0, 6.0], [3.0, 4.5, 9.0]], 3)
    units = scoring.document_units(sums, np.tile([1, 2, 3], 3), np.array(list("abcdefghi")))
    paired = scoring.paired_units(units)
    interval = scoring.bootstrap(paired)
    # Differences of means per token: 1, 0.25 and 1.
    np.testing.assert_allclose(interval.estimate, [0, 0.75], atol=1e-15)
    assert interval.low[0] == interval.high[0] == 0
    assert interval.kind == "documents"
    assert interval.num_units == 9


@pytest.mark.parametrize("method", scoring.INTERVAL_METHODS)
def test_too_few_units_have_no_interval(method):
    few = scoring.bootstrap(_units(np.arange(14.0).reshape(2, 7)), method=method)
    assert np.isnan(few.low).all()
    assert np.isnan(few.high).all()
    enough = scoring.bootstrap(_units(np.arange(16.0).reshape(2, 8) ** 2), method=method)
    assert (enough.low < enough.estimate).all()
    assert (enough.high > enough.estimate).all()


def test_percentile_interval_agrees_with_scipy():
    sample = np.random.default_rng(0).exponential(1.0, 40)
    ours = scoring.bootstrap(_units(sample[None]), method="percentile", draws=20_000)
    bca = scoring.bootstrap(_units(sample[None]), method="bca", draws=20_000)
    for interval, name in ((ours, "percentile"), (bca, "BCa")):
        theirs = scipy.stats.bootstrap(
            (sample,), np.mean, n_resamples=20_000, method=name, rng=np.random.default_rng(1)
        ).confidence_interval
        # Monte Carlo error of a 2.5 % quantile from 20,000 draws is about 0.02 standard errors.
        tolerance = 0.1 * scipy.stats.sem(sample)
        assert interval.low[0] == pytest.approx(theirs.low, abs=tolerance)
        assert interval.high[0] == pytest.approx(theirs.high, abs=tolerance)


def test_blocks_of_unequal_length_keep_the_mean():
    # Two questions of 5 and 2 tokens in blocks of 2: the mean is over questions, not tokens.
    nll = [np.array([[4.0, 2.0, 1.0]]), np.array([[6.0]])]
    lengths = [np.array([2, 2, 1]), np.array([2])]
    units = scoring.block_units(nll, lengths)
    interval = scoring.bootstrap(units)
    assert interval.estimate[0] == pytest.approx((7 / 5 + 6 / 2) / 2, rel=1e-15)
    assert units.weights.sum() == pytest.approx(1)
    assert units.kind == "blocks"


def test_intervals_are_seeded_and_do_not_depend_on_their_neighbours():
    sample = np.random.default_rng(0).normal(size=(3, 30))
    one, two = (scoring.bootstrap(_units(sample), seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.low, two.low)
    assert (scoring.bootstrap(_units(sample), seed=6).low != one.low).all()
    alone = scoring.bootstrap(_units(sample[1:2]), seed=5)
    np.testing.assert_allclose(alone.low, one.low[1:2], rtol=1e-12)


@pytest.mark.parametrize("method", scoring.INTERVAL_METHODS)
def test_one_unit_and_constant_units(method):
    single = scoring.bootstrap(_units(np.array([[1.0]])), method=method)
    assert single.estimate[0] == 1
    assert np.isnan([single.low[0], single.high[0]]).all()
    constant = scoring.bootstrap(_units(np.full((1, 8), 0.25)), method=method)
    np.testing.assert_allclose([constant.low, constant.high], 0.25, rtol=1e-15)


@pytest.mark.parametrize("wrong", [{"method": "normal"}, {"level": 1.0}, {"draws": 10}])
def test_interval_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        scoring.bootstrap(_units(np.ones((1, 4))), **wrong)


def test_ratio_of_deltas():
    random = np.random.default_rng(2)
    base = random.normal(3.0, 0.3, 100)
    log_ppl = np.stack([base, base + 0.2, base + 0.1 + random.normal(0, 0.01, 100)])
    units = _units(log_ppl)
    ratio = scoring.delta_ratio(units, numerator=1, denominator=2)
    means = log_ppl.mean(axis=1)
    true = (math.exp(means[1]) - math.exp(means[0])) / (math.exp(means[2]) - math.exp(means[0]))
    assert ratio.value == pytest.approx(true, rel=1e-12)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high - ratio.low < 0.15
    assert ratio.note == ""


def test_ratio_only_where_both_are_positive():
    base = np.linspace(1, 2, 10)
    ratio = scoring.delta_ratio(_units(np.stack([base, base + 1, base - 0.1])), 1, 2)
    assert math.isnan(ratio.value)
    assert math.isnan(ratio.low)
    assert "both must be positive" in ratio.note
    # A denominator whose interval reaches zero: the ratio has no upper bound.
    noisy = base + np.where(np.arange(10) % 2, 1.0, -0.98)
    assert scoring.delta_ratio(_units(np.stack([base, base + 1, noisy])), 1, 2).high == math.inf


@pytest.mark.parametrize("size", [6, 12])
@pytest.mark.parametrize("ties", [False, True])
def test_spearman_agrees_with_scipy(size, ties):
    random = np.random.default_rng(size)
    x = random.normal(size=size)
    y = x + random.normal(size=size)
    if ties:
        x, y = np.round(x), np.round(y)
    ours = scoring.spearman(x, y, permutations=20_000)
    assert ours.rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    permutations = np.inf if size == 6 else 20_000
    theirs = scipy.stats.permutation_test(
        (x,),
        lambda a: scipy.stats.spearmanr(a, y).statistic,
        permutation_type="pairings",
        n_resamples=permutations if size == 6 else 2_000,
        rng=np.random.default_rng(0),
    )
    tolerance = 1e-9 if size == 6 else 0.03
    assert ours.p_value == pytest.approx(theirs.pvalue, abs=tolerance)
    assert ours.num_points == size


def test_spearman_needs_the_published_strength_for_significance():
    # For 8 layers p < 0.02 needs |rho| >= 0.79. Without ties rho = 1 - 6 sum d^2 / (n^3 - n).
    x = np.arange(8.0)
    weak = np.array([2.0, 0, 1, 3, 6, 4, 5, 7])  # sum d^2 = 12
    assert scoring.spearman(x, weak).rho == pytest.approx(1 - 6 * 12 / 504)
    assert scoring.spearman(x, weak).p_value < 0.02
    weaker = np.array([3.0, 0, 1, 2, 7, 4, 5, 6])  # sum d^2 = 24
    assert scoring.spearman(x, weaker).rho == pytest.approx(1 - 6 * 24 / 504)
    assert scoring.spearman(x, weaker).p_value > 0.02


def test_spearman_is_seeded_and_never_zero():
    x = np.arange(20.0)
    one, two = (scoring.spearman(x, x, permutations=999) for _ in range(2))
    assert one == two
    assert one.p_value == pytest.approx(1 / 1000)


def test_spearman_of_a_constant_or_of_nan():
    x = np.arange(5.0)
    assert math.isnan(scoring.spearman(x, np.ones(5)).rho)
    with pytest.raises(UserError, match="NaN"):
        scoring.spearman(x, np.array([0, 1, np.nan, 3, 4]))
    with pytest.raises(UserError, match="at least 3"):
        scoring.spearman(x[:2], x[:2])
