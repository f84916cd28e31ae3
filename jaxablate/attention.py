"""Causal attention of many states behind one shared prefix of keys and values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Queries of one sequence that are scored at a time: they need no keys after their tile's end, and
# their scores stay in a processor's cache. Long sequences get longer tiles, never more than 16.
_TILE, _MOST_TILES = 128, 16
# Short sequences run two at a time on a CPU: their products are too small to fill it alone.
_SHORT = 256
# Scores that an accelerator keeps at a time.
_ACCELERATOR_BYTES = 4 << 30


class LayerPrefix(NamedTuple):
    """Keys and values of one layer that every state of every document attends to.

    keys, values: [K, R, H], keys after the rotation at their original positions.
    bias: [K, R] float32, added to the scaled scores: β of a compacted key, -inf on padding.
    """

    keys: Array
    values: Array
    bias: Array


def attend(
    q: Float[Array, "S B T N H"],
    k: Float[Array, "S B T K H"],
    v: Float[Array, "S B T K H"],
    prefix: LayerPrefix | None,
) -> Float[Array, "S B T N H"]:
    """Softmax attention over the prefix and, causally, the sequence itself.

    On a CPU one sequence, or two, run at a time in a loop: their scores stay in the processor's
    cache, where those of a whole chunk of states would go through memory.
    """
    states, batch, length, heads, size = q.shape
    merged = [array.reshape(states * batch, length, -1, size) for array in (q, k, v)]
    seen = length + (0 if prefix is None else prefix.bias.shape[1])
    scores = 4 * heads * _tile(length) * seen
    out = for_each(
        lambda each: attend_one(each[0], each[1], each[2], prefix),
        tuple(merged),
        at_once=max(1, _ACCELERATOR_BYTES // scores),
        on_cpu=2 if length <= _SHORT else 1,
    )
    return out.reshape(states, batch, length, heads, size)


def for_each(
    function: Callable[[Any], Any], arrays: Any, at_once: int | None = None, on_cpu: int = 1
) -> Any:
    """Apply to every leading index: in a loop on a CPU, side by side on an accelerator.

    Args:
      at_once: on an accelerator, at most so many side by side.
      on_cpu: so many side by side in each turn of the loop, where that divides the indices.
    """
    if jax.default_backend() == "cpu":
        count = len(jax.tree.leaves(arrays)[0])
        if on_cpu > 1 and count % on_cpu == 0:
            return jax.lax.map(function, arrays, batch_size=on_cpu)
        return jax.lax.map(function, arrays)
    if at_once is not None and at_once < len(jax.tree.leaves(arrays)[0]):
        return jax.lax.map(function, arrays, batch_size=at_once)
    return jax.vmap(function)(arrays)


def _tile(length: int) -> int:
    return max(_TILE, -(-length // _MOST_TILES))


def attend_one(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    prefix: LayerPrefix | None,
) -> Float[Array, "T N H"]:
    """`attend` for one sequence; scores, softmax and its sums in float32."""
    length, heads, size = q.shape
    kv_heads = k.shape[1]
    queries = jnp.transpose(q.reshape(length, kv_heads, -1, size), (1, 2, 0, 3))
    queries = queries * jnp.asarray(size**-0.5, q.dtype)
    keys, values = jnp.transpose(k, (1, 0, 2)), jnp.transpose(v, (1, 0, 2))
    before = 0
    if prefix is not None:
        # One product over prefix and sequence is twice as fast as two merged by log-sum-exp.
        before = prefix.bias.shape[1]
        keys = jnp.concatenate([prefix.keys.astype(k.dtype), keys], axis=1)
        values = jnp.concatenate([prefix.values.astype(v.dtype), values], axis=1)
    tiles = []
    tile = _tile(length)
    for start in range(0, length, tile):
        stop = min(start + tile, length)
        mask = _causal_bias(start, stop, before)
        if prefix is not None:
            mask = jnp.expand_dims(mask, 0) + _prefix_bias(prefix, stop)
        else:
            mask = jnp.expand_dims(mask, 0)
        seen = before + stop
        tiles.append(
            _attend_tile(queries[:, :, start:stop], keys[:, :seen], values[:, :seen], mask)
        )
    out = tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=2)
    return jnp.transpose(out, (2, 0, 1, 3)).reshape(length, heads, size)


def _attend_tile(
    queries: Float[Array, "K G T H"],
    keys: Float[Array, "K S H"],
    values: Float[Array, "K S H"],
    bias: Float[Array, "X T S"],
) -> Float[Array, "K G T H"]:
    kv_heads, group, length, size = queries.shape
    flat = queries.reshape(kv_heads, group * length, size)
    scores = jnp.einsum("kth,ksh->kts", flat, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(kv_heads, group, length, -1) + jnp.expand_dims(bias, 1)
    # A position's own key is always there, so the largest score is finite.
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = jnp.einsum(
        "kts,ksh->kth",
        weights.reshape(kv_heads, group * length, -1).astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    return (mixed.reshape(kv_heads, group, length, size) / mass).astype(values.dtype)


def _causal_bias(start: int, stop: int, before: int) -> Float[Array, "T S"]:
    """0 where a query sees a key, -inf where the key comes after it."""
    positions = np.arange(start, stop)[:, None]
    keys = np.arange(-before, stop)[None, :]
    return jnp.asarray(np.where(keys <= positions, 0, -np.inf).astype(np.float32))


def _prefix_bias(prefix: LayerPrefix, length: int) -> Float[Array, "K 1 S"]:
    own = jnp.zeros((prefix.bias.shape[0], length), jnp.float32)
    return jnp.expand_dims(jnp.concatenate([prefix.bias, own], axis=1), 1)
