"""Attention matching of KV heads: the β and values of t kept keys that act like all T.

Both fits are least squares over n reference queries (arXiv 2602.16284), solved through float64 Gram
matrices. E and X below have condition numbers up to about 3e5, whose squares float64 bears and
float32 does not; a float32 QR of the same matrix takes eight times as long. The rows of X are
those of E divided by sums that depend on β, so every size has a Gram matrix of its own; conjugate
gradients with L as preconditioner take 12 to 16 iterations, dearer than that (bench/compaction.py).

Keys are in falling order of score, so every size t keeps a prefix, and one Cholesky factor L of
G = EᵀE serves the β of all of them: with y = L^-1 EᵀZ cut to its first t entries, the solution of
Lᵀ w = y is G_t^-1 (EᵀZ)_t, followed by zeros.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxablate.selection import pad_rows, rows_per_chunk, scaled_scores

BETA_BOUND = 3.0  # β in [-3, 3], so w = exp β in [e^-3, e^3]
PROJECTED_STEPS = 2
_PROBES = 8
_BLOCKS = 4  # block rows of a Gram matrix
_SIZE_STEP = 128  # matrices are padded to few sizes, so that a grid of ratios compiles few times
_SMALLEST_RIDGE, _LARGEST_RIDGE = 1e-13, 1e-6


def padded_size(count: int) -> int:
    """The size that a matrix of `count` keys is padded to: at most 128 or a quarter more."""
    step = max(_SIZE_STEP, 2 ** (int(math.log2(count)) - 2))
    return -(-count // step) * step


def _exponentials(queries, row_max, row_mask, keys, key_mask):
    """E of one chunk of queries [R, P] float64, zero on padding."""
    scores = scaled_scores(queries, keys, key_mask)
    return jnp.exp(scores - row_max[:, None]) * row_mask[:, None]


@jax.jit
def _exponentials_heads(queries, row_max, row_mask, keys, key_mask):
    return jax.vmap(_exponentials, in_axes=(0, 0, None, 0, None))(
        queries, row_max, row_mask, keys, key_mask
    )


class Columns:
    """E = exp(s - m) of the ordered keys of B heads, in chunks of queries, computed once.

    Iterating yields (slice of the queries, E [B, R, P] float64). Chunks beyond `memory_bytes` are
    not kept but computed again at the next iteration.
    """

    def __init__(
        self,
        queries: Float[np.ndarray, "B n H"],
        row_max: Float[np.ndarray, "B n"],
        keys: Float[np.ndarray, "B t H"],
        memory_bytes: int,
    ):
        self.heads, self.num_queries, _ = queries.shape
        self.size = padded_size(keys.shape[1])
        self.rows = rows_per_chunk(self.size, self.heads)
        self.total_rows = -(-self.num_queries // self.rows) * self.rows
        self._queries = pad_rows(queries, self.rows, 1)
        self._row_max = pad_rows(row_max, self.rows, 1)
        self._row_mask = (np.arange(self.total_rows) < self.num_queries).astype(np.float64)
        self._keys = jnp.asarray(pad_rows(keys, self.size, 1))
        self._key_mask = jnp.arange(self.size) < keys.shape[1]
        self._kept: list[Array] = []
        self._num_kept = memory_bytes // (8 * self.heads * self.rows * self.size)

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        for index, start in enumerate(range(0, self.total_rows, self.rows)):
            part = slice(start, start + self.rows)
            if index < len(self._kept):
                yield part, self._kept[index]
                continue
            chunk = _exponentials_heads(
                self._queries[:, part],
                self._row_max[:, part],
                self._row_mask[part],
                self._keys,
                self._key_mask,
            )
            if index < self._num_kept:
                self._kept.append(chunk)
            yield part, chunk


def _factor(
    gram: Float[Array, "P P"], used: Bool[Array, "P"], ridge: Float[Array, ""]
) -> tuple[Float[Array, "P P"], Float[Array, ""]]:
    """Cholesky factor of the Gram matrix (identity where unused), and the ridge that it took.

    ridge: multiple of the mean diagonal that is added. Where float64 cannot factor the matrix
    (κ beyond some 1e7, duplicate keys, fewer queries than keys), the smallest of 1e-13, 1e-12, …
    times each diagonal entry is added; its solution is the one of least norm to float32's accuracy.
    """
    diagonal = jnp.where(used, jnp.diagonal(gram), 0.0)
    mean = diagonal.sum() / used.sum().astype(jnp.float64)
    floor = jnp.where(diagonal > 0, diagonal, mean)
    base = gram + jnp.diag(jnp.where(used, ridge * mean, 1.0))

    def attempt(state):
        tried, _, _ = state
        extra = jnp.where(tried < 0, 0.0, jnp.maximum(tried, _SMALLEST_RIDGE))
        factor = jnp.linalg.cholesky(
            base + jnp.diag(jnp.where(used, extra * floor, 0.0)), symmetrize_input=False
        )
        pivots = jnp.square(jnp.diagonal(factor))
        # A pivot that small is rounding: what is left of the column after the earlier ones.
        sound = jnp.all(jnp.where(used, pivots > 1e-15 * floor, True))
        following = jnp.where(tried < 0, _SMALLEST_RIDGE, tried * 10)
        return jnp.where(sound, tried, following), factor, sound

    def unfinished(state):
        tried, _, sound = state
        return ~sound & (tried < _LARGEST_RIDGE)

    start = (jnp.float64(-1.0), jnp.zeros_like(gram), jnp.array(False))
    tried, factor, _ = jax.lax.while_loop(unfinished, attempt, start)
    return factor, jnp.where(tried < 0, ridge, tried)


def _lower_solve(factor, right, *, transpose: bool):
    return jax.scipy.linalg.solve_triangular(factor, right, lower=True, trans=int(transpose))


def _largest_eigenvalue(gram, mask, tolerance: float):
    """σ_max² of each prefix [m]: power iteration on all at once until none moves by `tolerance`.

    Every entry of E and X is positive, hence those of the eigenvector too (Perron): the column
    norms start near it, and no seed is needed.
    """

    def step(state):
        vectors, previous, _, count = state
        image = mask * jnp.einsum("pq,qm->pm", gram, vectors, precision="highest")
        value = jnp.linalg.norm(image, axis=0)
        moved = jnp.max(jnp.abs(value - previous) / value)
        return image / value[None, :], value, moved, count + 1

    def moving(state):
        _, _, moved, count = state
        return (moved > tolerance) & (count < 300)

    unit = mask * jnp.sqrt(jnp.diagonal(gram))[:, None]
    unit = unit / jnp.linalg.norm(unit, axis=0, keepdims=True)
    zero = jnp.zeros(mask.shape[1], jnp.float64)
    return jax.lax.while_loop(moving, step, (unit, zero, jnp.float64(1.0), 0))[1]


def _solve(factor, right):
    """G^-1 times the columns of `right`."""
    half = _lower_solve(factor, right, transpose=False)
    return _lower_solve(factor, half, transpose=True)


def _smallest_eigenvalue(factor, mask):
    """σ_min² of each prefix [m], from above: a few inverse iterations with the nested factor."""
    vectors = mask * jax.random.normal(jax.random.key(0), mask.shape, jnp.float64)
    value = jnp.ones(mask.shape[1], jnp.float64)
    for _ in range(4):
        vectors = vectors / jnp.linalg.norm(vectors, axis=0, keepdims=True)
        half = mask * _lower_solve(factor, vectors, transpose=False)
        vectors = mask * _lower_solve(factor, half, transpose=True)
        value = 1 / jnp.linalg.norm(vectors, axis=0)
    return value


def _lower_gram(matrix: Float[Array, "R P"]) -> Float[Array, "P P"]:
    """The lower triangle of MᵀM (and a little above it): 4 block rows save 3/8 of the products."""
    size = matrix.shape[1]
    width = size // _BLOCKS
    rows = []
    for end in range(width, size + 1, width):
        block = matrix[:, end - width : end]
        row = jnp.einsum("rp,rq->pq", block, matrix[:, :end], precision="highest")
        rows.append(jnp.pad(row, ((0, 0), (0, size - end))))
    return jnp.concatenate(rows)


def _symmetric(lower: Float[Array, "P P"]) -> Float[Array, "P P"]:
    return jnp.tril(lower) + jnp.tril(lower, -1).T


def _accumulate_mass(gram, right, chunk, mass):
    """Add a chunk's EᵀE and EᵀZ."""
    gram = gram + _lower_gram(chunk)
    return gram, right + jnp.einsum("rp,r->p", chunk, mass, precision="highest")


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _accumulate_mass_heads(gram, right, chunk, mass):
    return jax.vmap(_accumulate_mass)(gram, right, chunk, mass)


def mass_gram(
    columns: Columns, mass: Float[np.ndarray, "B n"]
) -> tuple[Float[Array, "B P P"], Float[Array, "B P"]]:
    """EᵀE (its lower triangle) and EᵀZ of B heads, float64."""
    gram = jnp.zeros((columns.heads, columns.size, columns.size), jnp.float64)
    right = jnp.zeros((columns.heads, columns.size), jnp.float64)
    padded_mass = pad_rows(mass, columns.rows, 1)
    for part, chunk in columns:
        gram, right = _accumulate_mass_heads(gram, right, chunk, padded_mass[:, part])
    return gram, right


def _fit_weights(gram, right, sizes, squared_mass):
    """w [P, m] of every prefix size, the step sizes, condition numbers and residuals [m]."""
    gram = _symmetric(gram)
    place = jnp.arange(gram.shape[0])
    mask = (place[:, None] < sizes[None, :]).astype(jnp.float64)
    used = place < sizes.max()
    factor, _ = _factor(jnp.where(used[:, None] & used[None, :], gram, 0.0), used, jnp.float64(0))
    projected = _lower_solve(factor, jnp.where(used, right, 0.0)[:, None], transpose=False)
    weights = _lower_solve(factor, mask * projected, transpose=True)
    low, high = math.exp(-BETA_BOUND), math.exp(BETA_BOUND)
    weights = mask * jnp.clip(weights, low, high)
    largest = _largest_eigenvalue(gram, mask, 1e-8)
    target = mask * right[:, None]
    for _ in range(PROJECTED_STEPS):
        image = jnp.einsum("pq,qm->pm", gram, weights, precision="highest")
        weights = mask * jnp.clip(weights - (mask * image - target) / largest[None, :], low, high)
    image = jnp.einsum("pq,qm->pm", gram, weights, precision="highest")
    squared = jnp.sum(weights * image, axis=0) - 2 * jnp.sum(weights * target, axis=0)
    residual = jnp.sqrt(jnp.maximum(squared / squared_mass + 1, 0.0))
    condition = jnp.sqrt(largest / _smallest_eigenvalue(factor, mask))
    return weights, 1 / largest, condition, residual


@jax.jit
def _fit_weights_heads(gram, right, sizes, squared_mass):
    return jax.vmap(_fit_weights)(gram, right, sizes, squared_mass)


def fit_beta(
    columns: Columns, mass: Float[np.ndarray, "B n"], sizes: Int[np.ndarray, "B m"]
) -> tuple[Float[np.ndarray, "B m P"], dict[str, Float[np.ndarray, "B m"]]]:
    """β of every size of B heads from one factorisation per head.

    Minimises ½‖E_S w - Z‖² with e^-3 <= w <= e^3: least squares, clamp, then 2 projected-gradient
    steps of size 1/σ_max²; β = ln w.
    Args: columns E of the ordered keys; mass Z; sizes t.
    Returns: β float32, -inf beyond t; step_size 1/σ_max², beta_condition κ of E_S (an estimate from
    below) and mass_residual ‖E_S w - Z‖/‖Z‖.
    """
    gram, right = mass_gram(columns, mass)
    fitted = _fit_weights_heads(gram, right, jnp.asarray(sizes), np.square(mass).sum(axis=1))
    weights, steps, condition, residual = (np.asarray(array) for array in fitted)
    with np.errstate(divide="ignore"):
        beta = np.log(weights.swapaxes(1, 2)).astype(np.float32)
    return beta, {
        "step_size": steps,
        "beta_condition": condition,
        "mass_residual": residual,
    }


def _accumulate_values(gram, right, chunk, weights, outputs):
    """Add a chunk's XᵀX and Xᵀ(AV), X = E w / (E w summed over the kept keys)."""
    part = chunk[:, : weights.shape[0]] * weights[None, :]
    total = part.sum(axis=1)
    shares = part / jnp.where(total > 0, total, 1.0)[:, None]
    gram = gram + _lower_gram(shares)
    wide = outputs.astype(jnp.float64)
    return gram, right + jnp.einsum("rp,rh->ph", shares, wide, precision="highest")


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _accumulate_values_heads(gram, right, chunk, weights, outputs):
    return jax.vmap(_accumulate_values)(gram, right, chunk, weights, outputs)


def _solve_values(gram, right, count, squared_outputs, ridge):
    """C_v [P, H], condition number, residual and the ridge used."""
    gram = _symmetric(gram)
    used = jnp.arange(gram.shape[0]) < count
    factor, ridge = _factor(gram, used, ridge)
    # A few random columns solved along with the others tell σ_min, after a second solve.
    mask = used.astype(jnp.float64)[:, None]
    probes = jax.random.normal(jax.random.key(0), (gram.shape[0], _PROBES), jnp.float64)
    together = _solve(factor, jnp.concatenate([right, mask * probes], axis=1))
    solved, probes = together[:, :-_PROBES], mask * together[:, -_PROBES:]
    probes = _solve(factor, probes / jnp.linalg.norm(probes, axis=0, keepdims=True))
    smallest = 1 / jnp.linalg.norm(probes, axis=0).max()
    image = jnp.einsum("pq,qh->ph", gram, solved, precision="highest")
    squared = jnp.sum(solved * image) - 2 * jnp.sum(solved * right)
    residual = jnp.sqrt(jnp.maximum(squared / squared_outputs + 1, 0.0))
    condition = jnp.sqrt(_largest_eigenvalue(gram, mask, 1e-3)[0] / smallest)
    return solved, condition, residual, ridge


@jax.jit
def _solve_values_heads(gram, right, count, squared_outputs, ridge):
    return jax.vmap(_solve_values, in_axes=(0, 0, 0, 0, None))(
        gram, right, count, squared_outputs, ridge
    )


def fit_values(
    columns: Columns,
    outputs: Float[np.ndarray, "B n H"],
    counts: Int[np.ndarray, "B"],
    beta: Float[np.ndarray, "B P"],
    ridge: float | int = 0.0,
) -> tuple[Float[np.ndarray, "B p H"], dict[str, Float[np.ndarray, "B"]]]:
    """Values of B heads at one size each: argmin ‖X C - A V‖_F² (+ ridge).

    X is the softmax over the kept keys of s + β. Args: columns E of the ordered keys; outputs A V;
    counts t; beta, -inf beyond t; ridge, a multiple of the mean squared column norm of X (0: none).
    Returns: values float32, zero beyond t; values_condition κ of X (an estimate from below),
    output_residual ‖X C - A V‖/‖A V‖, and the ridge used, larger where X has not full rank.
    """
    size = min(columns.size, padded_size(int(counts.max())))
    weights = jnp.exp(jnp.asarray(beta[:, :size]).astype(jnp.float64))
    gram = jnp.zeros((columns.heads, size, size), jnp.float64)
    right = jnp.zeros((columns.heads, size, outputs.shape[-1]), jnp.float64)
    padded_outputs = pad_rows(outputs, columns.rows, 1)
    for part, chunk in columns:
        gram, right = _accumulate_values_heads(gram, right, chunk, weights, padded_outputs[:, part])
    squared = np.square(outputs.astype(np.float64)).sum(axis=(1, 2))
    fitted = _solve_values_heads(gram, right, jnp.asarray(counts), squared, jnp.float64(ridge))
    values, condition, residual, used = (np.asarray(array) for array in fitted)
    return values.astype(np.float32), {
        "values_condition": condition,
        "output_residual": residual,
        "ridge": used,
    }
