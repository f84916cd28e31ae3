"""Compacted KV heads: a few of an article's keys that stand for all of them.

Fast KV Compaction via Attention Matching (arXiv 2602.16284). Everything is local to one KV head
and its article block; query heads of a group are concatenated along the query axis.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jax import Array
from jaxtyping import Float, Int, Num

from jaxablate.errors import UserError
from jaxablate.selection import (
    SCORES,
    SELECTIONS,
    attention_statistics,
    fixed_order,
    num_kept,
    order_by_score,
    thin_queries,
)

__all__ = [
    "METHODS",
    "SELECTIONS",
    "CompactedHead",
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
    keys: [t, H] those keys as they were, after RoPE; values: [t, H]; beta: [t] added to q·k/sqrt(H).
    """

    indices: Int[np.ndarray, "t"]
    keys: Float[np.ndarray, "t H"]
    values: Float[np.ndarray, "t H"]
    beta: Float[np.ndarray, "t"]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerFit:
    """heads: (KV head's place in the arrays given, t) -> CompactedHead."""

    heads: Mapping[tuple[int, int], CompactedHead]


def key_order(
    queries: Num[Array | np.ndarray, "n H"],
    keys: Num[Array | np.ndarray, "T H"],
    method: str = "rms",
    *,
    seed: int | Sequence[int] = 0,
) -> Int[np.ndarray, "T"]:
    """Order of all keys of one KV head; its first t are the ones kept at size t.

    Args: method one of SELECTIONS: `rms`, `mean`, `max` over the queries of the attention that a
    key gets; `random` (by seed); `first_last`.
    Raises: UserError for an unknown method.
    """
    if method not in SELECTIONS:
        raise UserError(f"selection {method!r}; allowed are {', '.join(SELECTIONS)}")
    if method in ("random", "first_last"):
        return fixed_order(keys.shape[0], method, seed)
    if method not in SCORES:
        raise NotImplementedError(method)
    statistics = attention_statistics(queries[None], keys[None], score=method)
    return order_by_score(statistics.scores[0])


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


def fit_heads(
    queries: Num[Array | np.ndarray, "K n H"],
    keys: Num[Array | np.ndarray, "K T H"],
    values: Num[Array | np.ndarray, "K T H"],
    counts: Sequence[int] | Sequence[Sequence[int]],
    *,
    method: str = "match",
    selection: str = "rms",
    seed: int | Sequence[int] = 0,
) -> LayerFit:
    """Compact K KV heads (of one layer) to each of several numbers of keys.

    Args: queries after RoPE, the G query heads of each KV head concatenated along n; counts: the
    numbers of keys for every head, or one sequence per head.
    Raises: UserError for an unknown method or selection, or a count outside 1..T.
    """
    if method not in METHODS:
        raise UserError(f"method {method!r}; allowed are {', '.join(METHODS)}")
    if method != "select":
        raise NotImplementedError(method)
    heads = {}
    for head in range(keys.shape[0]):
        order = key_order(queries[head], keys[head], selection, seed=seed)
        wanted = counts if not counts or np.ndim(counts[0]) == 0 else counts[head]
        for count in wanted:
            heads[head, count] = select(keys[head], values[head], order, count)
    return LayerFit(heads)
