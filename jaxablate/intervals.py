"""Bootstrap intervals of a mean, for many configurations at once on shared draws."""

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxablate.errors import UserError

INTERVAL_METHODS = ("studentized", "bca", "percentile")
DEFAULT_DRAWS = 2000
FEWEST_UNITS = 8
# Resampling matrices are drawn in slices of about this many entries (64 MB of float64).
_SLICE_ENTRIES = 8_000_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Units:
    """What a bootstrap draws: documents, or blocks of tokens of a single document.

    The statistic of a draw is sum(values of the units drawn) / sum(their weights); over all units
    once it is the mean log-perplexity itself.
    """

    kind: str
    values: Float[np.ndarray, "C U"]
    weights: Float[np.ndarray, " U"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Interval:
    """`estimate` with a two-sided confidence interval, one entry per configuration."""

    estimate: Float[np.ndarray, " C"]
    low: Float[np.ndarray, " C"]
    high: Float[np.ndarray, " C"]
    level: float
    method: str
    kind: str
    num_units: int


def bootstrap(
    units: Units,
    *,
    level: float = 0.95,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
    method: str = "studentized",
) -> Interval:
    """Bootstrap interval of each configuration's statistic; the draws are shared by all.

    `studentized` (bootstrap-t): the quantiles of (draw - estimate) / standard error of the draw,
    times the standard error of the estimate. The one whose coverage holds for few documents: for
    10 documents 95 % intervals of the other two cover in 91 %.
    `percentile`: the quantiles of the statistic over the draws.
    `bca`: those quantiles corrected for bias and skew (Efron 1987, jackknife acceleration).

    With fewer than FEWEST_UNITS both ends are NaN: too many draws then repeat one or two units,
    whose standard error says nothing and whose ratio to it is anything. Equal seeds give equal
    intervals.

    Raises:
      UserError: an unknown method, or a level or number of draws out of range.
    """
    if method not in INTERVAL_METHODS:
        raise UserError(f"interval method must be one of {INTERVAL_METHODS}, got {method!a}")
    if not 0 < level < 1 or draws < 100:
        raise UserError(f"level must be in (0, 1) and draws >= 100, got {level} and {draws}")
    estimate = units.values.sum(axis=1) / units.weights.sum()
    tails = np.full((len(estimate), 2), [(1 - level) / 2, (1 + level) / 2])
    if len(units.weights) < FEWEST_UNITS:
        low = high = np.full_like(estimate, np.nan)
    elif method == "studentized":
        low, high = _studentized(units, estimate, tails, draws, seed)
    else:
        statistics, _ = resample(units, draws, seed)
        if method == "bca":
            tails = _bca_tails(units.values, units.weights, estimate, statistics, tails)
        low, high = _row_quantiles(statistics, tails)
    return Interval(
        estimate=estimate,
        low=low,
        high=high,
        level=level,
        method=method,
        kind=units.kind,
        num_units=len(units.weights),
    )


def resample(
    units: Units, draws: int, seed: int
) -> tuple[Float[np.ndarray, "C D"], Float[np.ndarray, "C D"]]:
    """The statistic of every draw and its standard error, by matrix products over slices of draws.

    The standard error is that of a ratio of two sums, linearised: with residuals
    e_u = value_u - statistic * weight_u it is sqrt(U / (U - 1) * sum e_u^2) / sum of weights.
    """
    random = np.random.default_rng(seed)
    count = len(units.weights)
    values, weights = units.values.T, units.weights
    step = max(1, _SLICE_ENTRIES // count)
    statistics, errors = [], []
    for start in range(0, draws, step):
        # How often each unit is drawn: the same law as drawing indices, without their gather.
        times = random.multinomial(count, np.full(count, 1 / count), min(step, draws - start))
        times = times.astype(np.float64)  # for BLAS
        total = (times @ weights)[:, None]
        statistic = (times @ values) / total
        squares = (
            times @ values**2
            - 2 * statistic * (times @ (values * weights[:, None]))
            + statistic**2 * (times @ weights**2)[:, None]
        )
        errors.append(np.sqrt(np.maximum(squares, 0) * count / (count - 1)) / total)
        statistics.append(statistic)
    return np.concatenate(statistics).T, np.concatenate(errors).T


def _studentized(
    units: Units,
    estimate: Float[np.ndarray, " C"],
    tails: Float[np.ndarray, "C 2"],
    draws: int,
    seed: int,
) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]]:
    count = len(units.weights)
    residuals = units.values - estimate[:, None] * units.weights
    error = np.sqrt((residuals**2).sum(axis=1) * count / (count - 1)) / units.weights.sum()
    # Centred first: the sums of squares in the draws would cancel for a mean far from zero.
    centred = dataclasses.replace(units, values=residuals)
    shifts, errors = resample(centred, draws, seed)
    # A draw of one unit only has no standard error. Where nothing varies, all t are 0.
    floor = 1e-12 * error[:, None]
    t = np.where(errors > floor, shifts / np.where(errors > floor, errors, 1), 0)
    lowest, highest = _row_quantiles(t, tails)
    return estimate - highest * error, estimate - lowest * error


def _bca_tails(
    values: Float[np.ndarray, "C U"],
    weights: Float[np.ndarray, " U"],
    estimate: Float[np.ndarray, " C"],
    statistics: Float[np.ndarray, "C D"],
    tails: Float[np.ndarray, "C 2"],
) -> Float[np.ndarray, "C 2"]:
    from scipy import special  # not at import, which it would double

    draws = statistics.shape[1]
    below = (statistics < estimate[:, None]).mean(axis=1)
    ties = (statistics == estimate[:, None]).mean(axis=1)
    share = np.clip(below + ties / 2, 0.5 / draws, 1 - 0.5 / draws)
    bias = special.ndtri(share)[:, None]
    left_out = (values.sum(axis=1, keepdims=True) - values) / (weights.sum() - weights)
    centred = left_out.mean(axis=1, keepdims=True) - left_out
    squares = (centred**2).sum(axis=1)
    # A statistic that does not vary has no skew; its interval is the point itself.
    scale = np.where(squares > 0, squares, 1) ** 1.5
    acceleration = ((centred**3).sum(axis=1) / (6 * scale))[:, None]
    shifted = bias + special.ndtri(tails)
    return special.ndtr(bias + shifted / (1 - acceleration * shifted))


def _row_quantiles(
    statistics: Float[np.ndarray, "C D"], tails: Float[np.ndarray, "C 2"]
) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]]:
    """Quantiles at different levels for each row, linear between order statistics."""
    ordered = np.sort(statistics, axis=1)
    place = tails * (ordered.shape[1] - 1)
    floor = np.floor(place).astype(int)
    ceiling = np.minimum(floor + 1, ordered.shape[1] - 1)
    lower = np.take_along_axis(ordered, floor, axis=1)
    upper = np.take_along_axis(ordered, ceiling, axis=1)
    found = lower + (place - floor) * (upper - lower)
    return found[:, 0], found[:, 1]
