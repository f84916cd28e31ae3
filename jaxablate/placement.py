"""Where a sweep's arrays lie and its compiled steps run: one device here, a mesh in `mesh`."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.loss import states_nll
from jaxablate.side_by_side import steps_at_once


class Placement(Protocol):
    """What `sweep.Sweep` asks of the devices.

    Attributes:
      lanes: states go through a step this many at a time; chunks are padded to a multiple.
      shards: over how many devices one state's heads, MLP and vocabulary are split.
      at_once: steps to run side by side, see `side_by_side`.
    """

    lanes: int
    shards: int
    at_once: int

    def shared(self, tree: Any) -> Any:
        """Arrays that every state reads: whole on every device."""

    def prefix(self, prefix: LayerPrefix | None) -> LayerPrefix | None:
        """One layer's shared prefix."""

    def take(self, chunk: Array, start: int, count: int) -> Array:
        """Some neighbouring states of a chunk, [count, B, T, D]."""

    def gather(self, parts: Sequence[Array], padding: int) -> Array:
        """States [S, B, T, D] one after the other; the last repeated `padding` times."""

    def shared_state(self, x: Array) -> Array:
        """One state [1, B, T, D] that all states of a step start from."""

    def edits(self, edits: steps.Edits) -> steps.Edits: ...

    def plain_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> Array: ...

    def attention_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> steps.Attended: ...

    def edited_step(
        self, block: Any, x: Array, attended: Any, edits: steps.Edits, children: int, mlp: bool
    ) -> Array: ...

    def nll(self, head: Any, x: Array, scored: Array, targets: Array, size: int) -> Array:
        """NLL [S, n] of the `scored` positions of every state, `size` tokens at a time."""


class OneDevice:
    """JAX's default device: arrays stay where they are."""

    lanes = 1
    shards = 1

    def __init__(self) -> None:
        self.at_once = steps_at_once()

    def shared(self, tree: Any) -> Any:
        return jax.tree.map(jnp.asarray, tree)

    def prefix(self, prefix: LayerPrefix | None) -> LayerPrefix | None:
        return prefix

    def take(self, chunk: Array, start: int, count: int) -> Array:
        return chunk if count == len(chunk) else _take_states(chunk, np.int32(start), count)

    def gather(self, parts: Sequence[Array], padding: int) -> Array:
        return parts[0] if len(parts) == 1 else jnp.concatenate(list(parts))

    def shared_state(self, x: Array) -> Array:
        return x

    def edits(self, edits: steps.Edits) -> steps.Edits:
        return edits

    def plain_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> Array:
        return steps.plain_step(block, x, rope, prefix)

    def attention_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> steps.Attended:
        return steps.attention_step(block, x, rope, prefix)

    def edited_step(
        self, block: Any, x: Array, attended: Any, edits: steps.Edits, children: int, mlp: bool
    ) -> Array:
        return steps.edited_step(block, x, attended, edits, children=children, mlp=mlp)

    def nll(
        self,
        head: Any,
        x: Float[Array, "S B T D"],
        scored: Int[Array, "n"],
        targets: Int[Array, "n"],
        size: int,
    ) -> Float[Array, "S n"]:
        return states_nll(head, x, scored, targets, size)


@functools.partial(jax.jit, static_argnames="count")
def _take_states(chunk: Array, start: Array, count: int) -> Array:
    # Compiled: an eager slice takes longer than a block of a small model.
    return jax.lax.dynamic_slice_in_dim(chunk, start, count)


def to_host(array: Any) -> np.ndarray:
    """An array's values, also where parts of it lie on other hosts: then all hosts must call."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)
