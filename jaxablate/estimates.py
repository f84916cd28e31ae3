"""One document's influence points by estimates, and curves refined from them to a tolerance."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxablate.edits import Configuration
from jaxablate.errors import UserError
from jaxablate.first_order import Gradients
from jaxablate.refine import refine
from jaxablate.sweep import Sweep

ESTIMATORS = ("exact", "first_order", "second_order")

# The estimate's error: what the linearised network leaves out grows like the square root of the
# curvature's term (both are of the size of δ² and more), and the drawn labels' error like the
# term itself. Measured on SmolLM2; `refine` fits the common factor of both from exact points.
_NETWORK_SHARE, _DRAWN_SHARE = 1e-3, 0.5


@dataclasses.dataclass(frozen=True, eq=False)
class Estimates:
    """Changes against the baseline of C configurations on B sequences.

    changes: [C, B] of each sequence's NLL sum, nats.
    errors: [C] expected size of the error of the mean change per token, up to a common factor; 0
      for the baseline itself.
    """

    changes: Float[np.ndarray, "C B"]
    errors: Float[np.ndarray, "C"]


def estimate(
    engine: Sweep,
    configurations: Sequence[Configuration],
    estimator: str,
    draws: int = 16,
    seed: int = 0,
) -> Estimates:
    """Estimate configurations by one of ESTIMATORS but `exact`.

    Args:
      draws: backward passes with drawn labels, of `second_order` only.
      seed: of the draws.

    Raises:
      UserError: an unknown estimator; as `first_order.Gradients.run`.
    """
    if estimator not in ESTIMATORS[1:]:
        raise UserError(f"estimator is {estimator!r}; it must be one of {ESTIMATORS[1:]}")
    draws = draws if estimator == "second_order" else 0
    scores = Gradients(engine, draws, seed).run(configurations)
    if not draws:
        return Estimates(scores.loss, np.abs(scores.loss).mean(axis=1))
    curvature = scores.pooled_fisher
    term = (curvature / scored_tokens(engine)).mean(axis=1)
    errors = np.sqrt(_NETWORK_SHARE * term) + _DRAWN_SHARE * term
    return Estimates(scores.loss + curvature, errors)


def scored_tokens(engine: Sweep) -> Int[np.ndarray, "B"]:
    """Scored tokens of every sequence."""
    return engine.problem.batch.scored.sum(axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class RefinedCurves:
    """Points of some curves within a tolerance of exact.

    changes: [C, B] of each sequence's NLL sum, exact or interpolated.
    estimators: [C] "exact", "interpolated" (between exact points of its curve) or "estimated".
    bounds: [C] of the error of the document's Δ log-perplexity; 0 where exact.
    nll: token NLL [scored tokens] of the exact points, by index.
    """

    changes: Float[np.ndarray, "C B"]
    estimators: list[str]
    bounds: Float[np.ndarray, "C"]
    nll: dict[int, np.ndarray]


def refine_curves(
    engine: Sweep,
    configurations: Sequence[Configuration],
    curves: Int[np.ndarray, "C"],
    counts: Int[np.ndarray, "C"],
    estimates: Estimates,
    tolerance: float,
) -> RefinedCurves:
    """Evaluate exactly as few points as it takes for all to be within a tolerance.

    Args:
      curves: which curve (KV head) each configuration is a point of.
      counts: its number of kept keys.
      estimates: of these configurations.
      tolerance: of the document's Δ log-perplexity, the mean over sequences of nats per token.
    """
    nll: dict[int, np.ndarray] = {}
    rows = np.nonzero(engine.problem.batch.scored)[0]
    tokens = scored_tokens(engine)

    def mean_change(of: np.ndarray) -> np.ndarray:
        change = np.float64(of) - engine.baseline_nll
        return np.stack([np.bincount(rows, line, len(tokens)) for line in change]) / tokens

    def evaluate(indices: Sequence[int]) -> np.ndarray:
        found = engine.run([configurations[i] for i in indices])
        nll.update(zip(indices, found))
        return mean_change(found)

    refined = refine(
        np.asarray(curves),
        np.log(counts),
        estimates.changes / tokens,
        estimates.errors,
        evaluate,
        tolerance,
    )
    for i in np.flatnonzero([not c.edits for c in configurations]):
        nll[int(i)] = engine.baseline_nll
    return RefinedCurves(
        refined.values * tokens,
        refined.kinds,
        refined.bounds,
        nll,
    )
