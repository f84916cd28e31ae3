"""One KV head's attention for many sets of prefix keys at the price of the largest.

Where sets are nested, each is the one before with some keys more: a running softmax (as in
arXiv 2112.05682) goes through all keys once and puts down its output at the end of every set.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate.attention import for_each
from jaxablate.problem import HeadPrefix, padded_length

_BLOCKS = (16, 32, 64, 128, 256)


class KeyBlocks(NamedTuple):
    """Prefix keys of one KV head in blocks of P keys, M blocks, for C sets.

    keys, values [M, P, H], bias [M, P] (-inf on padding); slot [M]: the set whose end comes at or
    after each block.
    """

    keys: Any
    values: Any
    bias: Any
    slot: Any


@dataclasses.dataclass(frozen=True, eq=False)
class KeySets:
    """C sets of prefix keys of one KV head: nested (one running pass), or each on its own."""

    blocks: KeyBlocks
    nested: bool
    slots: Int[np.ndarray, "C"]
    num_slots: int


class _Running(NamedTuple):
    """Softmax so far of M rows: largest score [M], mass [M] and mixed values [M, H]."""

    top: Array
    mass: Array
    mixed: Array


def key_sets(prefixes: Sequence[HeadPrefix]) -> KeySets:
    """Arrange sets of keys for `head_outputs`; finds out by itself whether they are nested."""
    order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i][2]))
    nested = all(_begins(prefixes[a], prefixes[b]) for a, b in itertools.pairwise(order))
    slots = np.empty(len(prefixes), np.int64)
    slots[order] = np.arange(len(order))
    if nested:
        ordered = [prefixes[i] for i in order]
        return KeySets(_cut(ordered), True, slots, _rounded(len(order)))
    size = padded_length(max(len(bias) for _, _, bias in prefixes))
    count = _rounded(len(prefixes))
    blocks = _empty(count, size, prefixes[0])
    for i, (keys, values, bias) in enumerate(prefixes):
        blocks.keys[i, : len(bias)], blocks.values[i, : len(bias)] = keys, values
        blocks.bias[i, : len(bias)] = bias
        blocks.slot[i] = i
    return KeySets(blocks, False, np.arange(len(prefixes)), count)


def _begins(small: HeadPrefix, large: HeadPrefix) -> bool:
    return all(np.array_equal(a, b[: len(a)]) for a, b in zip(small, large))


def _cut(ordered: Sequence[HeadPrefix]) -> KeyBlocks:
    """The largest set in blocks, a new one beginning at every set's end."""
    ends = [len(bias) for _, _, bias in ordered]
    segments = [(start, stop) for start, stop in zip([0, *ends], ends)]

    def cost(size: int) -> int:  # a block costs its keys, and about 8 keys' time to start
        return sum(max(1, -(-(b - a) // size)) for a, b in segments) * (size + 8)

    size = min(_BLOCKS, key=cost)
    pieces = []
    for slot, (start, stop) in enumerate(segments):
        pieces += [(slot, a, min(a + size, stop)) for a in range(start, stop, size)]
    keys, values, bias = ordered[-1]
    blocks = _empty(_rounded(len(pieces)), size, ordered[-1])
    blocks.slot[:] = len(ordered) - 1
    for i, (slot, a, b) in enumerate(pieces):
        blocks.keys[i, : b - a], blocks.values[i, : b - a] = keys[a:b], values[a:b]
        blocks.bias[i, : b - a], blocks.slot[i] = bias[a:b], slot
    return blocks


def _empty(count: int, size: int, like: HeadPrefix) -> KeyBlocks:
    keys = np.zeros((count, size, like[0].shape[1]), like[0].dtype)
    bias = np.full((count, size), -np.inf, np.float32)
    return KeyBlocks(keys, np.zeros_like(keys), bias, np.zeros(count, np.int32))


def _rounded(count: int) -> int:
    """Up to a power of two, or one and a half of it: few shapes to compile."""
    size = 1
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 and size * 3 // 4 >= count else size


def head_outputs(
    q: Float[Array, "T G H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    blocks: KeyBlocks,
    nested: bool,
    num_slots: int,
) -> Float[Array, "C T G H"]:
    """Outputs of one KV head's query heads in one sequence, for every set; float32.

    Args:
      q, k, v: the sequence's own queries, keys and values; attention among them is causal.
    """
    length, group, size = q.shape
    rows = jnp.transpose(q, (1, 0, 2)).reshape(group * length, size)
    rows = rows * jnp.asarray(size**-0.5, q.dtype)
    causal = np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)
    own = _Running(
        jnp.full(group * length, -jnp.inf, jnp.float32),
        jnp.zeros(group * length, jnp.float32),
        jnp.zeros((group * length, size), jnp.float32),
    )
    own = _attend_more(own, rows, k, v, jnp.asarray(np.tile(causal, (group, 1))))

    def more(running: _Running, block: KeyBlocks) -> _Running:
        return _attend_more(running, rows, block.keys, block.values, _rows(block.bias, rows))

    if nested:

        def step(carry, block):
            running, out = carry
            running = more(running, block)
            return (running, out.at[block.slot].set(_output(running))), None

        out = jnp.zeros((num_slots, group * length, size), jnp.float32)
        (_, out), _ = jax.lax.scan(step, (own, out), blocks)
    else:
        out = for_each(lambda block: _output(more(own, block)), blocks)
    return jnp.transpose(out.reshape(num_slots, group, length, size), (0, 2, 1, 3))


def _rows(bias: Float[Array, "P"], rows: Array) -> Float[Array, "M P"]:
    return jnp.broadcast_to(jnp.expand_dims(bias, 0), (rows.shape[0], bias.shape[0]))


def _attend_more(
    running: _Running,
    rows: Float[Array, "M H"],
    keys: Float[Array, "P H"],
    values: Float[Array, "P H"],
    bias: Float[Array, "M P"],
) -> _Running:
    scores = jnp.einsum(
        "mh,ph->mp", rows, keys.astype(rows.dtype), preferred_element_type=jnp.float32
    )
    scores = scores + bias
    top = jnp.maximum(running.top, jnp.max(scores, axis=-1))
    kept = jnp.exp(running.top - top)
    weights = jnp.exp(scores - jnp.expand_dims(top, 1))
    mixed = jnp.einsum(
        "mp,ph->mh", weights.astype(rows.dtype), values.astype(rows.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    mixed = running.mixed * jnp.expand_dims(kept, 1) + mixed
    return _Running(top, running.mass * kept + jnp.sum(weights, axis=-1), mixed)


def _output(running: _Running) -> Float[Array, "M H"]:
    return running.mixed / jnp.expand_dims(running.mass, 1)
