"""Work in tiles on a CPU, whose speed is lost when intermediate arrays leave its cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array


def in_tiles(function: Callable[[Array], Array], x: Array, tile: int) -> Array:
    """Apply a row-wise function to tiles of rows in a loop; in one piece on an accelerator.

    Args:
      function: [M, A] -> [M, B] for any M, each row on its own.
      x: [M, A].
    """
    rows = x.shape[0]
    if rows <= tile or jax.default_backend() != "cpu":
        return function(x)
    whole = rows - rows % tile
    out = jax.lax.map(function, x[:whole].reshape(-1, tile, x.shape[1]))
    out = out.reshape(whole, -1)
    if whole == rows:
        return out
    return jnp.concatenate([out, function(x[whole:])])


def in_groups(function: Callable[[Array], Array], x: Array, rows: int) -> Array:
    """Apply to groups of leading indices in a loop on a CPU; in one piece on an accelerator.

    Args:
      function: [S, *A] -> [S, *B] for any S, each index on its own.
      x: [S, *A].
      rows: a group is the largest that divides S and has no more than so many rows, the last axis
        not counted; one index at least.
    """
    states = x.shape[0]
    most = max(1, rows * states * x.shape[-1] // x.size)
    group = max(n for n in range(1, states + 1) if states % n == 0 and n <= most)
    if group == states or jax.default_backend() != "cpu":
        return function(x)
    out = jax.lax.map(function, x.reshape(states // group, group, *x.shape[1:]))
    return out.reshape(states, *out.shape[2:])
