"""Curves within a tolerance of exact ones, from estimates and few exact evaluations.

The residual exact - estimate of one curve is modelled as a Gaussian process over the logarithm of
the number of kept keys: zero where the curve crosses its baseline, a prior deviation that grows
with the estimate's own second-order term and differs from curve to curve, and covariances that
fall with distance. Exact points are asked for, a round of them at a time, where the bound on what
remains is largest, until it is within the tolerance everywhere and the last ones of each curve
were predicted well. The size of the residuals, their length scale and their roughness come from
all exact points, of the same and of other curves, and so does the number of deviations that make
a bound: as many as the checks so far have needed.
(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapters 2 and 5.)
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxablate.errors import UserError

# Candidates of the process: length scale in e-folds of the number of keys, and the share of the
# prior variance that neighbours do not share. Longer scales, though likelier at first, promised
# more than they kept: bounds then held for 97 % of SmolLM2's points instead of 99.5 %.
_LENGTHS = (0.5, 1.0)
_ROUGHNESS = (0.003, 0.01, 0.03, 0.1, 0.3)
# A curve's own deviation is drawn towards that of all curves as if by this many points of it.
_PRIOR_POINTS = 10.0
# Deviations in a bound at least.
_LEAST_DEVIATIONS = 3.5
# Curves jump where a key matters that few others replace: no bound claims more than this share of
# the tolerance.
_LEAST_BOUND = 0.5
# A curve is settled once so many exact points in a row were predicted to this share of the
# tolerance; one whose bounds are all below that share needs none.
_PASSES, _PASS_SHARE = 2, 0.5
# Until residuals are seen: their deviation as a multiple of the prior scale, worth these points.
_FIRST_DEVIATION, _FIRST_POINTS = 0.7, 4.0


@dataclasses.dataclass(frozen=True, eq=False)
class Refined:
    """Every point of every curve.

    values: [P, Q] differences from the baseline. kinds: [P] `exact`, `interpolated` between exact
      points of its curve, or `estimated` without any.
    bounds: [P] of the error of the mean over Q, 0 where exact.
    """

    values: Float[np.ndarray, "P Q"]
    kinds: list[str]
    bounds: Float[np.ndarray, "P"]


def refine(
    curves: Int[np.ndarray, "P"],
    places: Float[np.ndarray, "P"],
    estimates: Float[np.ndarray, "P Q"],
    scales: Float[np.ndarray, "P"],
    evaluate: Callable[[Sequence[int]], Float[np.ndarray, "n Q"]],
    tolerance: float,
) -> Refined:
    """Ask `evaluate` for exact points until all others are within `tolerance`.

    Args:
      curves: which curve each point is of.
      places: where on it, in logarithms of the number of keys.
      estimates: of the differences from the baseline; their mean over Q is what is bounded.
      scales: the deviation of the estimate's error is expected to be proportional to these; 0
        where the point is the baseline itself, whose difference is exactly 0.
      evaluate: exact differences of the points with these indices.

    Raises:
      UserError: a tolerance that is not positive.
    """
    if not tolerance > 0:
        raise UserError(f"the tolerance is {tolerance:g}; it must be positive")
    state = _State(curves, places, estimates, np.maximum(scales, 0))
    while True:
        process = state.fit()
        residuals, deviations = state.predict(process)
        bounds = state.deviations_needed() * deviations
        wanted = state.choose(bounds, tolerance)
        if not len(wanted):
            break
        exact = np.asarray(evaluate(wanted.tolist()), float)
        state.add(wanted, exact, residuals, deviations, tolerance)
    values = estimates + residuals
    values[state.known] = state.exact[state.known]
    has_exact = np.isin(curves, np.unique(curves[state.known & (scales > 0)]))
    kinds = np.where(state.known, "exact", np.where(has_exact, "interpolated", "estimated"))
    bounds = np.maximum(bounds, _LEAST_BOUND * tolerance)
    return Refined(values, kinds.tolist(), np.where(state.known, 0.0, bounds))


@dataclasses.dataclass(frozen=True)
class _Process:
    """length, roughness, and the variance of residual / scale over all curves."""

    length: float
    roughness: float
    variance: float


class _State:
    """Exact points so far."""

    def __init__(self, curves, places, estimates, scales) -> None:
        self.curves, self.places, self.estimates, self.scales = curves, places, estimates, scales
        self.exact = np.zeros_like(estimates, dtype=float)
        self.known = scales == 0
        self.names = np.unique(curves)
        self.members = [np.flatnonzero(curves == curve) for curve in self.names]
        self.checks: list[float] = []
        self.passed = np.zeros(len(self.members), int)

    def add(self, wanted, exact, residuals, deviations, tolerance: float) -> None:
        self.exact[wanted] = exact
        errors = np.abs((exact - self.estimates[wanted] - residuals[wanted]).mean(axis=1))
        self.checks += (errors / np.maximum(deviations[wanted], 1e-300)).tolist()
        self.known[wanted] = True
        for point, error in zip(wanted, errors):
            place = int(np.searchsorted(self.names, self.curves[point]))
            good = error <= _PASS_SHARE * tolerance
            self.passed[place] = self.passed[place] + 1 if good else 0

    def deviations_needed(self) -> float:
        """So many that one check in fifty, at most, would have been off by more."""
        if not self.checks:
            return _LEAST_DEVIATIONS
        ordered = np.sort(self.checks)[::-1]
        return max(_LEAST_DEVIATIONS, float(ordered[len(ordered) // 50]))

    def choose(self, bounds, tolerance: float) -> Int[np.ndarray, "n"]:
        """Of every curve the point with the largest bound, where the curve is not settled.

        Settled is one whose bounds are all within the tolerance, and whose last exact points were
        predicted well: a process learnt from few points may be too sure of itself.
        """
        chosen = []
        for members, passed in zip(self.members, self.passed):
            open_points = members[~self.known[members]]
            if not len(open_points):
                continue
            worst = open_points[np.argmax(bounds[open_points])]
            unproven = passed < _PASSES and bounds[worst] > _PASS_SHARE * tolerance
            if bounds[worst] > tolerance or unproven:
                chosen.append(int(worst))
        return np.asarray(chosen, int)

    def fit(self) -> _Process:
        """The process under which the exact residuals of all curves are most likely."""
        best, most = None, -np.inf
        for length in _LENGTHS:
            for roughness in _ROUGHNESS:
                squares, determinants, count = 0.0, 0.0, 0
                for members in self.members:
                    points = self._exact_points(members)
                    if len(points):
                        y = self._whitened(points, length, roughness)
                        squares += float(y[0] @ y[0])
                        determinants += y[1]
                        count += len(points)
                weight = count + _FIRST_POINTS
                variance = (squares + _FIRST_POINTS * _FIRST_DEVIATION**2) / weight
                likelihood = -0.5 * (weight * np.log(variance) + determinants)
                if likelihood > most:
                    best, most = _Process(length, roughness, variance), likelihood
        assert best is not None
        return best

    def _exact_points(self, members):
        return members[self.known[members] & (self.scales[members] > 0)]

    def _whitened(self, points, length, roughness):
        """Residual / scale made independent, and the log-determinant of its covariance."""
        factor = np.linalg.cholesky(self._covariance(points, points, length, roughness))
        ratio = (self.exact - self.estimates)[points].mean(axis=1) / self.scales[points]
        return np.linalg.solve(factor, ratio), 2 * np.log(np.diag(factor)).sum()

    def _covariance(self, a, b, length, roughness):
        """Of residual / scale: Matérn 3/2, and a share that no two points have in common."""
        distance = np.sqrt(3) * np.abs(self.places[a][:, None] - self.places[b][None]) / length
        smooth = (1 + distance) * np.exp(-distance)
        return (1 - roughness) * smooth + roughness * (a[:, None] == b[None])

    def predict(self, process: _Process):
        """Residuals [P, Q] and the deviations [P] of their mean, given the exact points."""
        residuals = np.zeros_like(self.estimates, dtype=float)
        deviations = self.scales * np.sqrt(process.variance)
        shape = process.length, process.roughness
        for members in self.members:
            points = self._exact_points(members)
            if not len(points):
                continue
            own = self._covariance(points, points, *shape)
            cross = self._covariance(members, points, *shape)
            weights = np.linalg.solve(own, cross.T).T
            ratio = (self.exact - self.estimates)[points] / self.scales[points][:, None]
            residuals[members] = self.scales[members][:, None] * (weights @ ratio)
            y, _ = self._whitened(points, *shape)
            variance = (_PRIOR_POINTS * process.variance + y @ y) / (_PRIOR_POINTS + len(points))
            left = np.maximum(1 - np.sum(weights * cross, axis=1), 0)
            deviations[members] = self.scales[members] * np.sqrt(variance * left)
        return residuals, deviations
