"""Compacted KV heads: a few of an article's keys that stand for all of them.

Fast KV Compaction via Attention Matching (arXiv 2602.16284). Everything is local to one KV head
and its article block; the query heads of a group are concatenated along the query axis n.

Regularisation: none by default, as published. Only where a matrix has not full rank to float64's
accuracy (duplicate keys, fewer queries than keys) is a ridge of 1e-13 or more added, the smallest
that works; FitReport says so. `ridge` asks for a larger one in the fit of the values.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Num

from jaxablate.errors import UserError
from jaxablate.matching import Columns, fit_beta, fit_values
from jaxablate.selection import (
    SCORES,
    SELECTIONS,
    AttentionStatistics,
    attention_statistics,
    fixed_order,
    heads_at_once,
    num_kept,
    order_by_score,
    thin_queries,
)

__all__ = [
    "METHODS",
    "SELECTIONS",
    "CompactedHead",
    "FitReport",
    "LayerFit",
    "fit_heads",
    "key_order",
    "num_kept",
    "select",
    "thin_queries",
]

METHODS = ("select", "select+beta", "select+values", "match")


@dataclasses.dataclass(frozen=True, eq=False)
class CompactedHead:
    """What is kept of one KV head's article.

    indices: [t] kept keys relative to the article's start, by falling score.
    keys: [t, H] those keys as they were, after RoPE. values: [t, H].
    beta: [t] added to q·k/sqrt(H).
    """

    indices: Int[np.ndarray, "t"]
    keys: Float[np.ndarray, "t H"]
    values: Float[np.ndarray, "t H"]
    beta: Float[np.ndarray, "t"]


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How well determined one head's fit is and what it leaves; None where not fitted.

    beta_condition, values_condition: κ of E_S and of X, estimated from below (SmolLM2: at
    most 30 % and 15 % too low).
    mass_residual: ‖E_S w - Z‖/‖Z‖. output_residual: ‖X C_v - A V‖/‖A V‖, both over the queries.
    step_size: of the projected-gradient steps, 1/σ_max². ridge: added to XᵀX, as a multiple of its
    mean diagonal entry.
    """

    beta_condition: float | None = None
    mass_residual: float | None = None
    step_size: float | None = None
    values_condition: float | None = None
    output_residual: float | None = None
    ridge: float | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LayerFit:
    """Both by (KV head's place in the arrays given, t)."""

    heads: Mapping[tuple[int, int], CompactedHead]
    reports: Mapping[tuple[int, int], FitReport]


def select(
    keys: Num[Array | np.ndarray, "T H"],
    values: Num[Array | np.ndarray, "T H"],
    order: Int[np.ndarray, "T"],
    count: int,
) -> CompactedHead:
    """The first `count` keys of the order with their own values and β = 0 (method `select`).

    Raises: UserError for a count outside 1..T.
    """
    if not 1 <= count <= keys.shape[0]:
        raise UserError(f"{count} keys to keep of {keys.shape[0]}; allowed are 1 to all")
    indices = order[:count]
    return CompactedHead(
        indices=indices,
        keys=np.asarray(keys, np.float32)[indices],
        values=np.asarray(values, np.float32)[indices],
        beta=np.zeros(count, np.float32),
    )


def key_order(
    queries: Num[Array | np.ndarray, "n H"],
    keys: Num[Array | np.ndarray, "T H"],
    method: str = "rms",
    *,
    seed: int | Sequence[int] = 0,
    limit: int | None = None,
) -> Int[np.ndarray, "T"]:
    """Order of all keys of one KV head; its first t are the ones kept at size t.

    Args: method one of SELECTIONS: `rms`, `mean`, `max` over the queries of the attention that a
    key gets; `random` (by seed); `first_last`: 0, T-1, 1, T-2, …; `omp`, greedy residual
    selection of `limit` keys (all by default), the rest by rms. Equal scores go by index.
    Raises: UserError for an unknown method, empty or non-finite arrays.
    """
    _check("selection", method, SELECTIONS)
    if method in ("random", "first_last"):
        return fixed_order(keys.shape[0], method, seed)
    score = method if method in SCORES else "rms"
    statistics = attention_statistics(queries[None], keys[None], score=score)
    return _orders(queries[None], keys[None], statistics, method, [seed], limit)[0]


def fit_heads(
    queries: Num[Array | np.ndarray, "K n H"],
    keys: Num[Array | np.ndarray, "K T H"],
    values: Num[Array | np.ndarray, "K T H"],
    counts: Sequence[int] | Sequence[Sequence[int]],
    *,
    method: str = "match",
    selection: str = "rms",
    seed: int | Sequence[int] = 0,
    head_ids: Sequence[int] | None = None,
    ridge: float | int = 0.0,
    memory_bytes: int = 2**30,
) -> LayerFit:
    """Compact K KV heads (of one layer) to each of several numbers of keys.

    Args:
      queries: reference queries after RoPE, the G query heads of each KV head along n.
      counts: the numbers of keys t for every head, or one sequence of them per head.
      method: `select` keeps values and β = 0; `select+beta` fits β; `select+values` fits values
        at β = 0; `match` fits β, then the values given β.
      seed: of the random selection; head k draws from (*seed, head_ids[k]). Pass (seed, layer).
      head_ids: the heads' numbers in their layer where the arrays hold only some (default 0..K-1),
        so that a head's random keys do not depend on its company.
      ridge: added to XᵀX, as a multiple of its mean diagonal entry.
      memory_bytes: for the matrix E of n x max(counts) float64 numbers per head, which is computed
        once if it fits.
    Raises: UserError for an unknown method or selection, a count outside 1..T, a negative ridge.
    """
    _check("method", method, METHODS)
    _check("selection", selection, SELECTIONS)
    num_heads, num_keys, _ = keys.shape
    wanted = _counts_per_head(counts, num_heads, num_keys)
    if not ridge >= 0:
        raise UserError(f"ridge {ridge}; allowed are 0 and above")
    wants_values = method in ("select+values", "match")
    if method == "select" and selection in ("random", "first_last"):
        statistics = None
    else:
        score = selection if selection in SCORES else "rms"
        statistics = attention_statistics(queries, keys, values if wants_values else None, score)
    limit = max((sizes[-1] for sizes in wanted), default=1)
    prefix = (seed,) if isinstance(seed, int) else tuple(seed)
    seeds = [(*prefix, head) for head in (range(num_heads) if head_ids is None else head_ids)]
    if len(seeds) != num_heads:
        raise UserError(f"head_ids {head_ids} for arrays of {num_heads} heads; one each")
    orders = _orders(queries, keys, statistics, selection, seeds, limit)
    heads = {
        (head, count): select(keys[head], values[head], orders[head], count)
        for head, sizes in enumerate(wanted)
        for count in sizes
    }
    reports = dict.fromkeys(heads, FitReport())
    if method == "select" or statistics is None:
        return LayerFit(heads, reports)
    wide_keys = np.asarray(keys, np.float32)
    ordered = np.stack([wide_keys[head, order[:limit]] for head, order in enumerate(orders)])
    for start in range(0, num_heads, heads_at_once()):
        group = list(range(start, min(num_heads, start + heads_at_once())))
        columns_of = np.asarray(queries, np.float32)[group], statistics.row_max[group]
        limit = max(wanted[head][-1] for head in group)
        with jax.enable_x64(True):
            columns = Columns(*columns_of, ordered[group, :limit], memory_bytes)
            fitted = _fit_group(columns, statistics, group, wanted, method, ridge)
        for key, (changes, report) in fitted.items():
            heads[key] = dataclasses.replace(heads[key], **changes)
            reports[key] = report
    return LayerFit(heads, reports)


def _check(what: str, got: str, allowed: Sequence[str]) -> None:
    if got not in allowed:
        raise UserError(f"{what} {got!r}; allowed are {', '.join(allowed)}")


def _counts_per_head(counts, num_heads: int, num_keys: int) -> list[list[int]]:
    """Sorted sizes without repetition, one list per head."""
    shared = all(np.ndim(count) == 0 for count in counts)
    lists = [counts] * num_heads if shared else list(counts)
    if len(lists) != num_heads or not all(len(sizes) for sizes in lists):
        raise UserError(f"counts for {len(lists)} heads, arrays of {num_heads}; one size each")
    wanted = [sorted({int(count) for count in sizes}) for sizes in lists]
    for sizes in wanted:
        if sizes[0] < 1 or sizes[-1] > num_keys:
            raise UserError(f"{sizes} keys to keep of {num_keys}; allowed are 1 to all")
    return wanted


def _orders(
    queries, keys, statistics: AttentionStatistics | None, selection: str, seeds, limit: int | None
) -> list[np.ndarray]:
    """The order of all keys of every head."""
    if selection in ("random", "first_last") or statistics is None:
        return [fixed_order(keys.shape[1], selection, seed) for seed in seeds]
    orders = [order_by_score(scores) for scores in statistics.scores]
    if selection != "omp":
        return orders
    from jaxablate.omp import greedy_order, keys_gram  # SciPy's import takes long

    wide_queries, wide_keys = np.asarray(queries, np.float32), np.asarray(keys, np.float32)
    return [
        greedy_order(keys_gram(wide_queries[h], wide_keys[h], statistics.row_max[h]), order, limit)
        for h, order in enumerate(orders)
    ]


def _fit_group(
    columns: Columns,
    statistics: AttentionStatistics,
    group: list[int],
    wanted: list[list[int]],
    method: str,
    ridge: float,
) -> dict[tuple[int, int], tuple[dict[str, np.ndarray], FitReport]]:
    """Fit the heads of one vmap: by (head, t) the fields that change, and a report."""
    rounds = max(len(wanted[head]) for head in group)
    # Heads with fewer sizes than others do their last one again.
    sizes = np.array(
        [[wanted[h][min(i, len(wanted[h]) - 1)] for i in range(rounds)] for h in group]
    )
    beta_report: dict[str, np.ndarray] = {}
    if method == "select+values":
        inside = np.arange(columns.size) < sizes[:, :, None]
        beta = np.where(inside, 0.0, -np.inf).astype(np.float32)
    else:
        beta, beta_report = fit_beta(columns, statistics.mass[group], sizes)
    fitted = {}
    for i in range(rounds):
        report = {name: numbers[:, i] for name, numbers in beta_report.items()}
        values = None
        if method != "select+beta" and statistics.outputs is not None:
            outputs = statistics.outputs[group]
            values, about = fit_values(columns, outputs, sizes[:, i], beta[:, i], ridge)
            report |= about
        for place, head in enumerate(group):
            count = int(sizes[place, i])
            changes = {"beta": beta[place, i, :count]}
            if values is not None:
                changes["values"] = values[place, :count]
            numbers = {name: float(column[place]) for name, column in report.items()}
            fitted[head, count] = changes, FitReport(**numbers)
    return fitted
