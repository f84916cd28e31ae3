"""Which keys of one KV head to keep: an order of all keys, of which every size keeps a prefix.

Scores are computed in float64: the attention scores of neighbouring keys differ by as little as
4e-7 of themselves, and float32 products swap such pairs from one machine to the next.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Num

from jaxablate.errors import UserError

SCORES = ("rms", "mean", "max")
SELECTIONS = (*SCORES, "random", "first_last", "omp")

# Bytes of one chunk of float64 scores: on a CPU what stays in its caches, on an accelerator
# enough rows to fill it.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 4 * 2**20, 256 * 2**20
_KEY_PADDING = 256  # keys are padded to a multiple of this, so that similar lengths compile once


@dataclasses.dataclass(frozen=True)
class AttentionStatistics:
    """What full attention of n reference queries over T keys says, per KV head (K of them).

    scores: [K, T] score of each key by the method asked for; float64.
    row_max: [K, n] m_i = max_j q_i·k_j/sqrt(H); float64.
    mass: [K, n] Z_i = sum_j exp(s_ij - m_i); float64.
    outputs: [K, n, H] attention outputs A V, float32; None where no values were given.
    """

    scores: Float[np.ndarray, "K T"]
    row_max: Float[np.ndarray, "K n"]
    mass: Float[np.ndarray, "K n"]
    outputs: Float[np.ndarray, "K n H"] | None


def num_kept(ratio: float | int, num_keys: int) -> int:
    """Keys kept of `num_keys` at a ratio: max(1, floor(ratio * num_keys)).

    The product is rounded at 1e-9 first, so that 0.29 of 100 keys are 29, not 28.
    Raises: UserError for a ratio outside 0..1 or no keys.
    """
    if not 0 <= ratio <= 1:
        raise UserError(f"ratio {ratio} of keys kept; allowed are 0 to 1")
    if num_keys < 1:
        raise UserError(f"{num_keys} keys to select from; at least 1 is needed")
    return max(1, math.floor(round(ratio * num_keys, 9)))


def rows_per_chunk(columns: int, heads: int) -> int:
    """Rows of a float64 chunk with that many columns for that many heads on this device."""
    budget = _CPU_CHUNK if jax.default_backend() == "cpu" else _ACCELERATOR_CHUNK
    rows = budget // (8 * columns * heads)
    return min(8192, max(64, 2 ** int(math.log2(max(rows, 1)))))


def heads_at_once() -> int:
    """Heads of a layer per call under vmap: all on an accelerator; one keeps a CPU in cache."""
    return 1 if jax.default_backend() == "cpu" else 2**30


def pad_rows(array: np.ndarray, multiple: int, axis: int) -> np.ndarray:
    """Zeros after the end of an axis, up to a multiple."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return np.pad(array, widths)


def scaled_scores(
    queries: Num[Array, "R H"], keys: Num[Array, "T H"], key_mask: Bool[Array, "T"]
) -> Float[Array, "R T"]:
    """s = q·k/sqrt(H) in float64, -inf on padding."""
    wide = keys.astype(jnp.float64) * keys.shape[-1] ** -0.5
    scores = jnp.einsum("rh,th->rt", queries.astype(jnp.float64), wide, precision="highest")
    return jnp.where(key_mask[None, :], scores, -jnp.inf)


def _accumulate(totals, queries, row_mask, keys, key_mask, values, *, score: str):
    """One chunk of queries of one head: attention over all keys, scores added to the totals."""
    scores = scaled_scores(queries, keys, key_mask)
    row_max = scores.max(axis=1)
    weights = jnp.exp(scores - row_max[:, None])
    mass = weights.sum(axis=1)
    attention = weights * (row_mask.astype(jnp.float64) / mass)[:, None]
    if score == "rms":
        totals = totals + jnp.square(attention).sum(axis=0)
    elif score == "mean":
        totals = totals + attention.sum(axis=0)
    else:
        totals = jnp.maximum(totals, attention.max(axis=0))
    if values is None:
        return totals, row_max, mass, None
    # The value product may be float32: its error is that of the model's own attention.
    outputs = jnp.einsum("rt,th->rh", attention.astype(jnp.float32), values, precision="highest")
    return totals, row_max, mass, outputs


@functools.partial(jax.jit, static_argnames=("score",), donate_argnums=(0,))
def _accumulate_heads(totals, queries, row_mask, keys, key_mask, values, *, score: str):
    axes = (0, 0, None, 0, None, None if values is None else 0)
    return jax.vmap(functools.partial(_accumulate, score=score), in_axes=axes)(
        totals, queries, row_mask, keys, key_mask, values
    )


def _statistics(queries, keys, values, score: str) -> AttentionStatistics:
    """attention_statistics of heads that fit under one vmap."""
    heads, num_queries, _ = queries.shape
    num_keys = keys.shape[1]
    padded_keys = jnp.asarray(pad_rows(keys, _KEY_PADDING, 1))
    padded_values = None if values is None else jnp.asarray(pad_rows(values, _KEY_PADDING, 1))
    key_mask = jnp.arange(padded_keys.shape[1]) < num_keys
    rows = rows_per_chunk(padded_keys.shape[1], heads)
    padded_queries = pad_rows(queries, rows, 1)
    row_mask = np.arange(padded_queries.shape[1]) < num_queries
    totals = jnp.zeros((heads, padded_keys.shape[1]), jnp.float64)
    chunks = []
    for start in range(0, num_queries, rows):
        part = slice(start, start + rows)
        totals, *chunk = _accumulate_heads(
            totals, padded_queries[:, part], row_mask[part], padded_keys, key_mask, padded_values,
            score=score,
        )  # fmt: skip
        chunks.append(chunk)

    def joined(index: int) -> np.ndarray:
        parts = [np.asarray(chunk[index]) for chunk in chunks]
        return np.concatenate(parts, axis=1)[:, :num_queries]

    scores = np.asarray(totals)[:, :num_keys]
    if score != "max":
        scores = scores / num_queries
    if score == "rms":
        scores = np.sqrt(scores)
    return AttentionStatistics(
        scores=scores,
        row_max=joined(0),
        mass=joined(1),
        outputs=None if values is None else joined(2),
    )


def attention_statistics(
    queries: Num[Array | np.ndarray, "K n H"],
    keys: Num[Array | np.ndarray, "K T H"],
    values: Num[Array | np.ndarray, "K T H"] | None = None,
    score: str = "rms",
) -> AttentionStatistics:
    """One pass of full attention over chunks of queries; no n x T matrix is kept.

    Args: queries after RoPE, the query heads of a KV head concatenated along n; keys after RoPE;
    values for the outputs; score one of SCORES.
    Raises: UserError for an unknown score, empty or non-finite arrays.
    """
    if score not in SCORES:
        raise UserError(f"score {score!r}; allowed are {', '.join(SCORES)}")
    wide_queries, wide_keys = np.asarray(queries, np.float32), np.asarray(keys, np.float32)
    wide_values = None if values is None else np.asarray(values, np.float32)
    for name, array in zip(("queries", "keys", "values"), (wide_queries, wide_keys, wide_values)):
        if array is not None and (array.size == 0 or not np.isfinite(array).all()):
            raise UserError(f"{name} of shape {array.shape}: empty or not finite everywhere")
    parts = []
    with jax.enable_x64(True):
        for head in range(0, wide_keys.shape[0], heads_at_once()):
            group = slice(head, head + heads_at_once())
            some_values = None if wide_values is None else wide_values[group]
            parts.append(_statistics(wide_queries[group], wide_keys[group], some_values, score))
    outputs = None if values is None else np.concatenate([part.outputs for part in parts])
    return AttentionStatistics(
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.row_max for part in parts]),
        np.concatenate([part.mass for part in parts]),
        outputs,
    )


def order_by_score(scores: Float[np.ndarray, "T"]) -> Int[np.ndarray, "T"]:
    """Key indices by falling score; equal scores by index."""
    return np.argsort(-scores, kind="stable").astype(np.int32)


def fixed_order(num_keys: int, method: str, seed: int | Sequence[int]) -> Int[np.ndarray, "T"]:
    """An order that looks at no key: `random` from a seed, or `first_last`: 0, T-1, 1, T-2, …"""
    if method == "random":
        return np.random.default_rng(seed).permutation(num_keys).astype(np.int32)
    order = np.empty(num_keys, np.int32)
    order[0::2] = np.arange((num_keys + 1) // 2)
    order[1::2] = num_keys - 1 - np.arange(num_keys // 2)
    return order


def thin_queries(
    queries: Num[Array | np.ndarray, "... n H"], number: int | None, seed: int | Sequence[int] = 0
) -> Num[Array | np.ndarray, "... m H"]:
    """Keep `number` reference queries, drawn without replacement, in their order.

    Every leading index (KV head) keeps the same rows. None, or as many as there are, keeps all.
    Raises: UserError for a number below 1.
    """
    total = queries.shape[-2]
    if number is None or number >= total:
        return queries
    if number < 1:
        raise UserError(f"{number} reference queries asked for; at least 1 is needed")
    rows = np.sort(np.random.default_rng(seed).choice(total, number, replace=False))
    return queries[..., rows, :]
