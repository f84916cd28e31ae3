"""Rank correlation with a permutation test."""

import dataclasses
import math

import numpy as np
from jaxtyping import Float

from jaxablate.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correlation:
    """Spearman's ρ and its two-sided permutation p-value."""

    rho: float
    p_value: float
    num_points: int


def spearman(
    first: Float[np.ndarray, " n"],
    second: Float[np.ndarray, " n"],
    *,
    permutations: int = 100_000,
    seed: int = 0,
) -> Correlation:
    """Rank correlation (ties get their mean rank) with a permutation p-value.

    All orders are tried where there are at most 8 points; else `permutations` are drawn, and the
    given order counts as one of them, so p is never 0. NaN where one side is constant.

    Raises:
      UserError: lengths that differ, fewer than 3 points, or values that are not numbers.
    """
    if len(first) != len(second) or len(first) < 3:
        raise UserError(
            f"a correlation needs two equal lengths of at least 3, got {len(first)} and "
            f"{len(second)}"
        )
    if np.isnan(first).any() or np.isnan(second).any():
        raise UserError("a correlation needs numbers, got NaN")
    x, y = (_standardised_ranks(values) for values in (first, second))
    if not (x.any() and y.any()):
        return Correlation(rho=math.nan, p_value=math.nan, num_points=len(first))
    rho = float(x @ y)
    exact = len(first) <= 8
    permuted = _all_orders(y) if exact else _random_orders(y, permutations, seed)
    # Sums in another order differ in the last bits; equal arrangements must count as equal.
    extreme = int((np.abs(permuted @ x) >= abs(rho) - 1e-12).sum())
    p_value = extreme / len(permuted) if exact else (extreme + 1) / (len(permuted) + 1)
    return Correlation(rho=rho, p_value=p_value, num_points=len(first))


def _standardised_ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Ranks with mean 0 and norm 1; zeros where all are equal."""
    from scipy.stats import rankdata  # 0.3 s to import

    ranks = rankdata(values)
    ranks = ranks - ranks.mean()
    norm = np.linalg.norm(ranks)
    return ranks / norm if norm > 0 else ranks


def _all_orders(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, "m n"]:
    orders = np.zeros((1, 0), int)
    for size in range(len(values)):
        grown = [np.insert(orders, place, size, axis=1) for place in range(size + 1)]
        orders = np.concatenate(grown)
    return values[orders]


def _random_orders(
    values: Float[np.ndarray, " n"], permutations: int, seed: int
) -> Float[np.ndarray, "m n"]:
    random = np.random.default_rng(seed)
    return random.permuted(np.broadcast_to(values, (permutations, len(values))), axis=1)
