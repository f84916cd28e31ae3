"""Which layers to remove: strategies that turn α, zones and ΔPPL into sets of layers.

A set of layers is a rising tuple of indices. Equal scores go to the lower index, in every order.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxablate.errors import UserError
from jaxablate.spectra import INTERIOR, zones

LayerSet = tuple[int, ...]

ORDERS = ("highest_alpha", "lowest_alpha", "calibrated")
POOLS = ("interior", "all")
_RANDOM_STREAM = 0xD2A3  # keeps these draws apart from other uses of the same seed


def removal_order(
    order: str,
    num_layers: int,
    *,
    alphas: Sequence[float] | None = None,
    single_deltas: Sequence[float] | None = None,
    reverse: bool = False,
) -> tuple[int, ...]:
    """All layers, the first to be removed first.

    Args:
      order: "highest_alpha", "lowest_alpha", or "calibrated" (smallest ΔPPL of the layer alone).
      num_layers: L.
      alphas: α of every layer, for the first two orders.
      single_deltas: ΔPPL of removing each layer alone, for "calibrated".
      reverse: the opposite order of scores; equal scores still go to the lower index.

    Raises:
      UserError: unknown order, or the scores it needs are absent, not L many or NaN.
    """
    if order not in ORDERS:
        raise UserError(f"order is {order!r}; choose from {', '.join(ORDERS)}")
    scores = single_deltas if order == "calibrated" else alphas
    if scores is None or len(scores) != num_layers:
        name = "the ΔPPL of each single layer" if order == "calibrated" else "α of each layer"
        got = "none" if scores is None else len(scores)
        raise UserError(f"order {order} needs {name}: {num_layers} values, got {got}")
    if any(math.isnan(score) for score in scores):
        raise UserError(f"order {order} got NaN for layers {_nan_layers(scores)}")
    sign = -1.0 if (order == "highest_alpha") != reverse else 1.0
    return tuple(sorted(range(num_layers), key=lambda layer: (sign * scores[layer], layer)))


def zone_aware(order: Sequence[int], k: int, *, boundary: int = 2) -> LayerSet:
    """The first k interior layers of `order`; the boundary layers are never removed.

    Raises:
      UserError: fewer than k interior layers.
    """
    interior = interior_layers(len(order), boundary)
    _check_k(
        "zone_aware", k, len(interior), f"interior layers of {len(order)} (boundary {boundary})"
    )
    eligible = set(interior)
    return tuple(sorted([layer for layer in order if layer in eligible][:k]))


def worst_spectral(reversed_order: Sequence[int], k: int) -> LayerSet:
    """The first k of all layers in the reverse of the zone-aware order (`reverse=True`)."""
    _check_k("worst", k, len(reversed_order), "layers")
    return tuple(sorted(reversed_order[:k]))


def last_n(num_layers: int, k: int) -> LayerSet:
    """The deepest k layers."""
    _check_k("last_n", k, num_layers, "layers")
    return tuple(range(num_layers - k, num_layers))


def last_n_keep_final(num_layers: int, k: int) -> LayerSet:
    """The deepest k layers but the very last one, which stays in place."""
    _check_k("last_n_keep_final", k, num_layers - 1, f"layers before the last of {num_layers}")
    return tuple(range(num_layers - 1 - k, num_layers - 1))


def random_sets(
    num_layers: int, k: int, *, draws: int, seed: int, pool: str = "interior", boundary: int = 2
) -> list[LayerSet]:
    """Distinct random sets of k layers from the interior or from all layers.

    Where the pool has no more than `draws` sets of k layers, all of them are returned, each once:
    the whole population says more than a sample with repetitions.

    Args:
      num_layers: L.
      k: layers in a set.
      draws: how many sets.
      seed: the same seed, pool, L and k give the same sets, whatever other k are drawn.
      pool: "interior" or "all".
      boundary: layers at either end that are not in the interior.

    Raises:
      UserError: unknown pool, draws < 1, or fewer than k layers in the pool.
    """
    if pool not in POOLS:
        raise UserError(f"pool of random layers is {pool!r}; choose from {', '.join(POOLS)}")
    if draws < 1:
        raise UserError(f"{draws} random draws asked for; at least 1 is needed")
    layers = interior_layers(num_layers, boundary) if pool == "interior" else range(num_layers)
    _check_k(f"random ({pool})", k, len(layers), f"layers in the pool, of {num_layers}")
    if math.comb(len(layers), k) <= draws:
        return list(itertools.combinations(layers, k))
    rng = np.random.default_rng([_RANDOM_STREAM, seed, POOLS.index(pool), num_layers, k])
    found: dict[LayerSet, None] = {}
    while len(found) < draws:
        drawn = rng.choice(np.asarray(layers), size=k, replace=False)
        found[tuple(sorted(int(layer) for layer in drawn))] = None
    return list(found)


def all_sets(num_layers: int, max_removed: int, *, min_removed: int = 1) -> Iterator[LayerSet]:
    """Every set of min_removed..max_removed layers, small sets first, then by index."""
    _check_k("all sets", max_removed, num_layers, "layers")
    for k in range(min_removed, max_removed + 1):
        yield from itertools.combinations(range(num_layers), k)


def count_sets(num_layers: int, max_removed: int) -> int:
    """How many sets `all_sets` yields: Σ_{k=1}^{max} C(L, k)."""
    return sum(math.comb(num_layers, k) for k in range(1, max_removed + 1))


def worst_true(deltas: Mapping[LayerSet, float], k: int) -> LayerSet:
    """The set of k layers with the largest ΔPPL of an exhaustive sweep's results."""
    return _extreme(deltas, k, sign=-1.0)


def best_true(deltas: Mapping[LayerSet, float], k: int) -> LayerSet:
    """The set of k layers with the smallest ΔPPL of an exhaustive sweep's results."""
    return _extreme(deltas, k, sign=1.0)


def interior_layers(num_layers: int, boundary: int) -> LayerSet:
    """Indices of the layers that are not among the first or last `boundary`."""
    return tuple(
        layer for layer, zone in enumerate(zones(num_layers, boundary)) if zone == INTERIOR
    )


def _extreme(deltas: Mapping[LayerSet, float], k: int, *, sign: float) -> LayerSet:
    candidates = sorted(layers for layers in deltas if len(layers) == k)
    if not candidates:
        raise UserError(f"no results for sets of {k} layers; an exhaustive sweep to {k} has them")
    broken = [layers for layers in candidates if math.isnan(deltas[layers])]
    if broken:
        raise UserError(f"ΔPPL is NaN for {len(broken)} sets of {k} layers, first {broken[0]}")
    return min(candidates, key=lambda layers: sign * deltas[layers])


def _check_k(strategy: str, k: int, available: int, what: str) -> None:
    if k < 0:
        raise UserError(f"k is {k}; the number of removed layers must be 0 or more")
    if k > available:
        raise UserError(
            f"{strategy}: k = {k} layers to remove, but there are {available} {what}; "
            f"use k of at most {available}"
        )


def _nan_layers(scores: Sequence[float]) -> list[int]:
    return [layer for layer, score in enumerate(scores) if math.isnan(score)]
