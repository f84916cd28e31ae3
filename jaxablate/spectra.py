"""The power-law exponent α of a weight matrix's singular values, its null, and depth zones.

Three estimators share the letter α but not the scale: for σ_i ~ i^-s the rank slope is s, while
the exponent of the density of λ = σ² (which `hill` and `ml` estimate) is 1 + 1/(2s). A high rank
slope is therefore a low exponent of the density, and the other way round.

Singular values come from LAPACK on the host, values only; an SVD on an accelerator is slow. The
roots of the Gram matrix's eigenvalues cost half as much as an SVD but are good to about
eps (σ_max/σ)² only: in float32 that loses the small half of a spectrum, in float64 it is more
exact than a float32 SVD wherever it is used here (`_GRAM_LIMIT`), else the SVD is taken.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import scipy.linalg
from jaxtyping import Float, Shaped
from threadpoolctl import threadpool_limits

from jaxablate.errors import UserError

Item, Result = TypeVar("Item"), TypeVar("Result")
ESTIMATORS = ("rank_slope", "hill", "ml")
MIN_VALUES = 4  # fewer singular values than this say nothing about a slope
BOUNDARY, INTERIOR = "boundary", "interior"
_NULL_STREAM = 0x5EED  # keeps the null's draws apart from other uses of the same seed
_KS_ROWS = 64  # candidates whose KS distances are computed at once; small slabs stay in cache
_GRAM_LIMIT = 1e-11  # least λ_min/λ_max for which float64 eigenvalues are close enough


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlphaFit:
    """One estimate of α.

    Attributes:
      estimator: "rank_slope", "hill" or "ml".
      alpha: the estimate.
      goodness: R² of the line (rank_slope), or the Kolmogorov-Smirnov distance (hill, ml).
      goodness_name: "r2" or "ks".
      first_rank, last_rank: the fit used the singular values of these ranks (1 = largest).
      num_values: non-zero singular values of the matrix.
      x_min: smallest λ = σ² used.
      x_max: largest λ = σ² used.
    """

    estimator: str
    alpha: float
    goodness: float
    goodness_name: str
    first_rank: int
    last_rank: int
    num_values: int
    x_min: float
    x_max: float


def singular_values(
    matrix: Shaped[np.ndarray, "rows columns"], *, dtype: str = "float64"
) -> Float[np.ndarray, " rank"]:
    """Singular values in falling order, as float64.

    Args:
      matrix: any floating dtype.
      dtype: "float64": relative error of the smallest value about 1e-5 or better; "float32": an
        SVD in float32, absolute error about 1e-7 of the largest value.

    Raises:
      UserError: the matrix has NaN or infinite entries, or `dtype` is neither of the two.
    """
    if dtype not in ("float32", "float64"):
        raise UserError(f"SVD in {dtype!r}; choose float32 or float64")
    values = np.asarray(matrix).astype(dtype)
    if not np.isfinite(values).all():
        raise UserError(f"a {matrix.shape} matrix has NaN or infinite entries; no SVD exists")
    if dtype == "float64":
        small = values if values.shape[0] <= values.shape[1] else values.T
        eigenvalues = np.linalg.eigvalsh(small @ small.T)
        if eigenvalues[0] > _GRAM_LIMIT * eigenvalues[-1]:
            return np.sqrt(eigenvalues[::-1])
    sigma = scipy.linalg.svd(values, compute_uv=False, lapack_driver="gesvd", check_finite=False)
    return sigma.astype(np.float64)


def cached_singular_values(
    matrix: Shaped[np.ndarray, "rows columns"],
    cache_dir: str | os.PathLike[str] | None,
    *,
    dtype: str = "float64",
) -> Float[np.ndarray, " rank"]:
    """`singular_values`, kept in `cache_dir` under the digest of the matrix's bytes and shape."""
    if cache_dir is None:
        return singular_values(matrix, dtype=dtype)
    digest = hashlib.sha256(f"{matrix.shape} {matrix.dtype} {dtype} 1 ".encode())
    digest.update(np.ascontiguousarray(matrix).tobytes())
    path = Path(cache_dir).resolve() / f"{digest.hexdigest()}.npy"
    if path.is_file():
        try:
            return np.load(path, allow_pickle=False)
        except (ValueError, OSError, EOFError):
            path.unlink(missing_ok=True)  # a file cut short by a full disk is no result
    sigma = singular_values(matrix, dtype=dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.save(file, sigma)
    os.replace(file.name, path)
    return sigma


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results in order, a thread per processor with a single BLAS thread each.

    LAPACK gains a fifth from a second thread of its own on matrices of a thousand rows, and twice
    from a second matrix beside the first.
    """
    with (
        threadpool_limits(1, user_api="blas"),
        concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        yield from pool.map(function, items)


def rank_slope(sigma: Float[np.ndarray, " rank"], *, fraction: float = 0.5) -> AlphaFit:
    """Minus the least-squares slope of log σ_i on log i over ranks 1..ceil(fraction * n).

    Raises:
      UserError: fraction outside (0, 1], or fewer than `MIN_VALUES` values to fit.
    """
    sigma = _nonzero(sigma)
    if not 0 < fraction <= 1:
        raise UserError(f"fraction of ranks is {fraction}; it must be above 0 and at most 1")
    last = int(np.ceil(np.round(fraction * len(sigma), 9)))  # 0.07 * 100 is 7.000000000000001
    if last < MIN_VALUES:
        raise UserError(
            f"a rank slope over {last} of {len(sigma)} singular values; at least {MIN_VALUES} "
            "are needed: raise the fraction"
        )
    x, y = np.log(np.arange(1, last + 1)), np.log(sigma[:last])
    x, y = x - x.mean(), y - y.mean()
    slope = (x @ y) / (x @ x)
    total = y @ y
    # Equal singular values lie on a line exactly (slope 0), where R² would be 0/0.
    r2 = 1.0 if total == 0 else 1 - ((y - slope * x) ** 2).sum() / total
    return _fit("rank_slope", -slope, r2, "r2", sigma, last)


def hill(sigma: Float[np.ndarray, " rank"]) -> AlphaFit:
    """Hill's estimate of the exponent of the density of λ = σ² over its upper half.

    α = 1 + m / Σ ln(λ_j / x_min) over the m values λ_j >= x_min, where x_min is the smallest
    value that is not below the median.
    """
    log_lambda = 2 * np.log(_nonzero(sigma)[::-1])
    tail = log_lambda[len(log_lambda) // 2 :]
    alpha = _density_exponent(tail)
    return _fit("hill", alpha, _ks_distance(tail, alpha), "ks", _nonzero(sigma), len(tail))


def maximum_likelihood(sigma: Float[np.ndarray, " rank"]) -> AlphaFit:
    """Exponent of the density of λ = σ² by maximum likelihood, x_min by the smallest KS distance.

    For every candidate x_min = λ_i but the largest, α_i is Hill's estimate over the tail from
    λ_i on, and its distance is the largest |F(λ_j) - j/m| over the tail, with j counted from 0
    (Clauset, Shalizi and Newman, SIAM Review 51, 2009; the empirical distribution is the one of
    the package powerlaw and of WeightWatcher). The first of equal distances is taken.
    """
    sigma = _nonzero(sigma)
    log_lambda = 2 * np.log(sigma[::-1])
    alphas, distances = _candidate_fits(log_lambda)
    best = int(np.argmin(distances))
    return _fit("ml", alphas[best], distances[best], "ks", sigma, len(sigma) - best)


_FITS: dict[str, Callable[..., AlphaFit]] = {"hill": hill, "ml": maximum_likelihood}


def fit_alpha(
    sigma: Float[np.ndarray, " rank"], estimator: str, *, fraction: float = 0.5
) -> AlphaFit:
    """α by the named estimator; `fraction` is used by rank_slope only."""
    if estimator == "rank_slope":
        return rank_slope(sigma, fraction=fraction)
    if estimator not in _FITS:
        raise UserError(f"estimator is {estimator!r}; choose from {', '.join(ESTIMATORS)}")
    return _FITS[estimator](sigma)


def gaussian_singular_values(
    shape: tuple[int, int],
    *,
    seed: int,
    cache_dir: str | os.PathLike[str] | None = None,
    dtype: str = "float64",
) -> Float[np.ndarray, " rank"]:
    """Singular values of a standard Gaussian matrix of `shape`: the null that α is read against.

    The same seed and shape give the same values. The entries' scale does not change any α.
    """
    rng = np.random.default_rng([_NULL_STREAM, seed, *shape])
    return cached_singular_values(rng.standard_normal(shape), cache_dir, dtype=dtype)


def zones(num_layers: int, boundary: int = 2) -> tuple[str, ...]:
    """Each layer's zone: the first and last `boundary` layers are "boundary", the rest "interior".

    Raises:
      UserError: `boundary` is negative. A boundary of half the layers or more leaves no interior.
    """
    if boundary < 0:
        raise UserError(f"boundary is {boundary} layers; it must be 0 or more")
    return tuple(
        BOUNDARY if min(layer, num_layers - 1 - layer) < boundary else INTERIOR
        for layer in range(num_layers)
    )


def _nonzero(sigma: Float[np.ndarray, " rank"]) -> Float[np.ndarray, " nonzero"]:
    """The values in falling order without those that are zero up to rounding in float64."""
    sigma = np.sort(np.asarray(sigma, np.float64))[::-1]
    if not len(sigma) or sigma[0] == 0:
        raise UserError("all singular values are zero; α is not defined")
    kept = sigma[sigma > sigma[0] * len(sigma) * np.finfo(np.float64).eps]
    if len(kept) < MIN_VALUES:
        raise UserError(f"{len(kept)} non-zero singular values; α needs at least {MIN_VALUES}")
    return kept


def _density_exponent(log_tail: Float[np.ndarray, " tail"]) -> float:
    spread = (log_tail - log_tail[0]).sum()
    return float(1 + len(log_tail) / spread) if spread > 0 else float("inf")


def _ks_distance(log_tail: Float[np.ndarray, " tail"], alpha: float) -> float:
    if not np.isfinite(alpha):
        return 1.0
    model = -np.expm1(-(alpha - 1) * (log_tail - log_tail[0]))
    return float(np.abs(model - np.arange(len(log_tail)) / len(log_tail)).max())


def _candidate_fits(
    log_lambda: Float[np.ndarray, " rank"],
) -> tuple[Float[np.ndarray, " candidates"], Float[np.ndarray, " candidates"]]:
    """α and KS distance with x_min at each value (ascending logs) but the last.

    The distances of all candidates are rows of one table, made in slabs of rows.
    """
    n = len(log_lambda)
    tail_sizes = np.arange(n, 1, -1)
    tail_sums = np.cumsum(log_lambda[::-1])[::-1][:-1]
    spreads = tail_sums - tail_sizes * log_lambda[:-1]
    with np.errstate(divide="ignore"):
        slopes = np.where(spreads > 0, tail_sizes / spreads, np.inf)  # α - 1
    distances = np.ones(n - 1)
    for first in range(0, n - 1, _KS_ROWS):
        rows = np.arange(first, min(first + _KS_ROWS, n - 1))
        columns = np.arange(first, n)
        gaps = log_lambda[None, first:] - log_lambda[rows, None]
        with np.errstate(invalid="ignore", over="ignore"):
            model = -np.expm1(-slopes[rows, None] * gaps)
        empirical = (columns[None, :] - rows[:, None]) / tail_sizes[rows, None]
        outside = columns[None, :] < rows[:, None]
        table = np.where(outside, 0.0, np.abs(model - empirical))
        distances[rows] = table.max(axis=1)
    distances[~np.isfinite(slopes)] = 1.0
    return 1 + slopes, distances


def _fit(
    estimator: str,
    alpha: float,
    goodness: float,
    goodness_name: str,
    sigma: Float[np.ndarray, " rank"],
    last: int,
) -> AlphaFit:
    return AlphaFit(
        estimator=estimator,
        alpha=float(alpha),
        goodness=float(goodness),
        goodness_name=goodness_name,
        first_rank=1,
        last_rank=int(last),
        num_values=len(sigma),
        x_min=float(sigma[last - 1] ** 2),
        x_max=float(sigma[0] ** 2),
    )
