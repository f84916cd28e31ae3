"""Greedy selection of keys by what is still missing of the attention mass (OMP).

Orthogonal matching pursuit of Z = E·1 by columns of E: the keys with the largest correlation
EᵀR with the residual R = Z - E_S w join S, then w is fitted again by least squares, clamped as
the β fit clamps it. In Gram form (F = EᵀE, EᵀZ = F·1) nothing of the queries' length is touched
after F, and the factor of F_S grows by a few rows a step.
"""

import math

import jax
import numpy as np
import scipy.linalg
from jaxtyping import Float, Int

from jaxablate.errors import UserError
from jaxablate.matching import BETA_BOUND, Columns, mass_gram


def keys_gram(
    queries: Float[np.ndarray, "n H"],
    keys: Float[np.ndarray, "T H"],
    row_max: Float[np.ndarray, "n"],
) -> Float[np.ndarray, "T T"]:
    """F = EᵀE of all keys of one head, float64."""
    with jax.enable_x64(True):
        columns = Columns(queries[None], row_max[None], keys[None], memory_bytes=0)
        gram, _ = mass_gram(columns, np.ones_like(row_max)[None])
        lower = np.tril(np.asarray(gram[0])[: keys.shape[0], : keys.shape[0]])
    return lower + np.tril(lower, -1).T


class _GrowingFactor:
    """Cholesky factor of F_S for a growing S, and the least squares weights from it."""

    def __init__(self, gram: np.ndarray, target: np.ndarray, limit: int):
        self._gram, self._target = gram, target
        self._factor = np.zeros((limit, limit))
        self._projected = np.zeros(limit)

    def grow(self, chosen: np.ndarray, new: np.ndarray) -> bool:
        """Append keys; False where they depend on those chosen as far as float64 can tell."""
        old, end = len(chosen), len(chosen) + len(new)
        corner = self._gram[np.ix_(new, new)]
        cross = scipy.linalg.solve_triangular(
            self._factor[:old, :old], self._gram[np.ix_(chosen, new)], lower=True
        )
        rest = corner - cross.T @ cross
        try:
            block = np.linalg.cholesky(rest)
        except np.linalg.LinAlgError:
            return False
        if (np.square(np.diagonal(block)) < 1e-14 * np.diagonal(corner)).any():
            return False
        self._factor[old:end, :old] = cross.T
        self._factor[old:end, old:end] = block
        missing = self._target[new] - cross.T @ self._projected[:old]
        self._projected[old:end] = scipy.linalg.solve_triangular(block, missing, lower=True)
        return True

    def weights(self, size: int) -> np.ndarray:
        return scipy.linalg.solve_triangular(
            self._factor[:size, :size], self._projected[:size], lower=True, trans=1
        )


def greedy_order(
    gram: Float[np.ndarray, "T T"],
    fallback: Int[np.ndarray, "T"],
    limit: int | None = None,
    keys_per_step: int = 4,
    refit_every: int = 1,
) -> Int[np.ndarray, "T"]:
    """Order of all keys, the first `limit` (all by default) chosen greedily, the rest as given.

    Args: gram F = EᵀE; fallback an order for the rest, used as well from where the chosen keys
    become linearly dependent; keys_per_step keys that join at once; refit_every steps between
    fits of w, a key that joined since having w = 1 (β = 0). Equal correlations go by index.
    Raises: UserError for steps below 1.
    """
    if keys_per_step < 1 or refit_every < 1:
        raise UserError(
            f"keys_per_step {keys_per_step}, refit_every {refit_every}; at least 1 each"
        )
    num_keys = gram.shape[0]
    limit = num_keys if limit is None else min(limit, num_keys)
    target = gram.sum(axis=1)
    factor = _GrowingFactor(gram, target, limit)
    rows = np.empty((limit, num_keys))
    chosen, weights = np.empty(0, np.int32), np.empty(0)
    low, high = math.exp(-BETA_BOUND), math.exp(BETA_BOUND)
    steps = 0
    while len(chosen) < limit:
        correlation = target - weights @ rows[: len(chosen)]
        correlation[chosen] = -np.inf
        new = np.argsort(-correlation, kind="stable")[: min(keys_per_step, limit - len(chosen))]
        if not factor.grow(chosen, new):
            break
        rows[len(chosen) : len(chosen) + len(new)] = gram[new]
        chosen = np.concatenate([chosen, new.astype(np.int32)])
        weights = np.concatenate([weights, np.ones(len(new))])
        steps += 1
        if steps % refit_every == 0:
            weights = np.clip(factor.weights(len(chosen)), low, high)
    rest = fallback[~np.isin(fallback, chosen)]
    return np.concatenate([chosen, rest]).astype(np.int32)
