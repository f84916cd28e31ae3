"""Causal attention of many states behind one shared prefix of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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

    Each sequence runs on its own in a loop: one sequence's scores stay in the processor's cache,
    where those of a whole chunk of states would go through memory.
    """
    states, batch, length, heads, size = q.shape
    merged = [array.reshape(states * batch, length, -1, size) for array in (q, k, v)]
    out = jax.lax.map(lambda qkv: attend_one(*qkv, prefix), tuple(merged))
    return out.reshape(states, batch, length, heads, size)


def attend_one(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    prefix: LayerPrefix | None,
) -> Float[Array, "T N H"]:
    """`attend` for one sequence; scores, softmax and its sums in float32."""
    length, heads, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(length, kv_heads, heads // kv_heads, size)
    scores = _scores("tkgh,skh->kgts", grouped, k)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(jnp.expand_dims(causal, (0, 1)), scores, -jnp.inf)
    if prefix is None:
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return _mix("kgts,skh->tkgh", weights, v).reshape(length, heads, size)
    before = _scores("tkgh,krh->kgtr", grouped, prefix.keys)
    before = before + jnp.expand_dims(prefix.bias, (1, 2))
    # A position's own key is always there, so the largest score is finite.
    top = jnp.maximum(
        jnp.max(scores, axis=-1, keepdims=True),
        jnp.max(before, axis=-1, keepdims=True, initial=-jnp.inf),
    )
    own, past = jnp.exp(scores - top), jnp.exp(before - top)
    mass = jnp.sum(own, axis=-1) + jnp.sum(past, axis=-1)
    out = _mix("kgts,skh->tkgh", own.astype(v.dtype), v)
    out = out + _mix("kgtr,krh->tkgh", past.astype(v.dtype), prefix.values)
    out = out / jnp.expand_dims(jnp.transpose(mass, (2, 0, 1)), 3).astype(v.dtype)
    return out.reshape(length, heads, size)


def _scores(equation: str, q: Array, k: Array) -> Array:
    scale = q.shape[-1] ** -0.5
    return jnp.einsum(equation, q, k, preferred_element_type=jnp.float32) * scale


def _mix(equation: str, weights: Array, values: Array) -> Array:
    return jnp.einsum(equation, weights, values)
