"""Points by estimates instead of exact evaluation: flags, settings, and values of one document."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxablate.errors import UserError

FLAGS = flags.FLAGS


def define_flags(tolerance: bool = True) -> None:
    """--estimator, --draws and, where points lie on curves, --tolerance."""
    flags.DEFINE_enum(
        "estimator",
        "exact",
        ("exact", "first_order", "second_order"),
        "exact: run the model for every point. first_order: all points from one backward pass a "
        "document. second_order: with the loss's curvature from --draws more passes.",
    )
    flags.DEFINE_integer("draws", 16, "Backward passes of second_order.", lower_bound=1)
    if not tolerance:
        return
    flags.DEFINE_float(
        "tolerance",
        None,
        "Exact points only where it takes them for a document's Δ log-perplexities to be within "
        "this (of SmolLM2's points 99.6 % were at 0.002); the others are estimated by second_order "
        "and corrected. Bounds are statistical.",
    )


def tolerance() -> float | None:
    """--tolerance, where the experiment has it."""
    return FLAGS["tolerance"].value if "tolerance" in FLAGS else None


def estimator() -> str:
    """What --estimator and --tolerance come to."""
    wanted = tolerance()
    if wanted is None:
        return FLAGS.estimator
    if not wanted > 0:
        raise UserError(f"--tolerance is {wanted:g}; it must be above 0, such as 0.002")
    if FLAGS.estimator == "first_order":
        raise UserError("--tolerance needs second_order estimates; leave --estimator out")
    return "second_order"


def settings() -> dict:
    """What of these flags changes numbers."""
    found: dict[str, Any] = {"estimator": estimator()}
    if estimator() == "second_order":
        found |= {"draws": FLAGS.draws, "tolerance": tolerance()}
    return found


def plan(points: int, documents: int) -> str:
    """The plan in one line."""
    passes = 1 + (FLAGS.draws if estimator() == "second_order" else 0)
    aim = "" if tolerance() is None else f", refined to within {tolerance():g}"
    return (
        f"plan        {points} points x {documents} documents by {estimator()}{aim}; "
        f"{passes} backward passes a document"
    )


def groups(points: Sequence) -> list[Sequence]:
    """Points (with .head, sorted) that are computed and written together."""
    if tolerance() is None:  # sorted by layer: points of a part share what lies below
        return [points[i : i + FLAGS.part_size] for i in range(0, len(points), FLAGS.part_size)]
    # Whole layers: their curves learn from one another where the estimates are off.
    found: list[list] = []
    for point in points:
        begins = not found or found[-1][-1].head[0] != point.head[0]
        if not found or (begins and len(found[-1]) >= FLAGS.part_size):
            found.append([])
        found[-1].append(point)
    return list(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """One point: the changes of the questions' NLL sums, or where exact the NLL of all tokens."""

    estimator: str
    bound: float | None
    changes: np.ndarray
    nll: np.ndarray | None = None


class EstimatedPoints:
    """All points of one document, estimated at once: a backward pass serves any number.

    Args:
      engine: the document's `sweep.Sweep`.
      configurations: by the points' keys; all of the document, so that no number depends on
        which parts are there already.
    """

    def __init__(self, engine, configurations: Mapping[str, Any]):
        from jaxablate.estimates import estimate

        self._engine, self._configurations = engine, configurations
        self._places = {key: i for i, key in enumerate(configurations)}
        self._estimates = estimate(
            engine, list(configurations.values()), estimator(), draws=FLAGS.draws, seed=FLAGS.seed
        )

    def values(self, points: Mapping[str, tuple[tuple[int, int], int]]) -> list[Value]:
        """Values of some points, given the head and the number of keys of each."""
        chosen = [self._places[key] for key in points]
        changes = self._estimates.changes[chosen]
        wanted = tolerance()
        if wanted is not None:
            errors = self._estimates.errors[chosen]
            return self._refined(points, changes, errors, wanted)
        found = []
        for key, change in zip(points, changes):
            if self._configurations[key].edits:
                found.append(Value(estimator(), None, change))
            else:  # the baseline itself
                found.append(Value("exact", 0.0, change, self._engine.baseline_nll))
        return found

    def _refined(
        self, points, changes: np.ndarray, errors: np.ndarray, wanted: float
    ) -> list[Value]:
        from jaxablate.estimates import Estimates, refine_curves

        heads = sorted({head for head, _ in points.values()})
        refined = refine_curves(
            self._engine,
            [self._configurations[key] for key in points],
            np.asarray([heads.index(head) for head, _ in points.values()]),
            np.asarray([count for _, count in points.values()]),
            Estimates(changes, errors),
            wanted,
        )
        return [
            Value(kind, float(bound), change, refined.nll.get(i))
            for i, (kind, bound, change) in enumerate(
                zip(refined.estimators, refined.bounds, refined.changes)
            )
        ]
