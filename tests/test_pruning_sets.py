"""Removal strategies as sets of layers, against definitions spelled out by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxablate import pruning
from jaxablate.errors import UserError

DEPTHS = (6, 12, 16, 24, 30, 32)


@pytest.mark.parametrize("num_layers", DEPTHS)
def test_zone_aware_never_removes_a_boundary_layer(num_layers):
    # The boundary layers have the highest scores, so an order without zones would take them first.
    alphas = [abs(layer - (num_layers - 1) / 2) for layer in range(num_layers)]
    order = pruning.removal_order("highest_alpha", num_layers, alphas=alphas)
    protected = {0, 1, num_layers - 2, num_layers - 1}
    for k in range(num_layers + 1):
        if k > num_layers - 4:
            message = f"k = {k} .* {num_layers - 4} interior layers of {num_layers}"
            with pytest.raises(UserError, match=message):
                pruning.zone_aware(order, k)
            continue
        removed = pruning.zone_aware(order, k)
        assert len(set(removed)) == k
        assert removed == tuple(sorted(removed))
        assert not protected & set(removed)
        kept = set(range(num_layers)) - protected - set(removed)
        assert all(alphas[i] >= alphas[j] for i in removed for j in kept)


@pytest.mark.parametrize("num_layers", DEPTHS)
def test_last_n_and_worst_up_to_all_layers(num_layers):
    reverse = pruning.removal_order(
        "highest_alpha", num_layers, alphas=[float(i) for i in range(num_layers)], reverse=True
    )
    for k in range(num_layers + 1):
        assert pruning.last_n(num_layers, k) == tuple(range(num_layers))[num_layers - k :]
        assert pruning.worst_spectral(reverse, k) == tuple(range(k))
        if k < num_layers:
            kept = pruning.last_n_keep_final(num_layers, k)
            assert len(kept) == k
            assert num_layers - 1 not in kept
            assert kept == tuple(range(num_layers - 1))[num_layers - 1 - k :]
    for strategy in (
        lambda k: pruning.last_n(num_layers, k),
        lambda k: pruning.worst_spectral(reverse, k),
        lambda k: pruning.last_n_keep_final(num_layers, k - 1),
    ):
        with pytest.raises(UserError, match=f"{num_layers}"):
            strategy(num_layers + 1)
    with pytest.raises(UserError, match="k is -1"):
        pruning.last_n(num_layers, -1)


def test_orders_by_hand():
    alphas = [0.1, 0.5, 0.3, 0.9, 0.2]
    assert pruning.removal_order("highest_alpha", 5, alphas=alphas) == (3, 1, 2, 4, 0)
    assert pruning.removal_order("lowest_alpha", 5, alphas=alphas) == (0, 4, 2, 1, 3)
    assert pruning.removal_order("calibrated", 5, single_deltas=[5.0, 1.0, 4.0, 2.0, 3.0]) == (
        1,
        3,
        4,
        2,
        0,
    )
    assert pruning.removal_order("highest_alpha", 5, alphas=alphas, reverse=True) == (0, 4, 2, 1, 3)
    order = pruning.removal_order("highest_alpha", 5, alphas=alphas)
    assert pruning.zone_aware(order, 2, boundary=1) == (1, 3)
    assert pruning.zone_aware(order, 2, boundary=0) == (1, 3)
    assert pruning.zone_aware(order, 1, boundary=2) == (2,)


@pytest.mark.parametrize("reverse", [False, True])
def test_ties_go_to_the_lower_index(reverse):
    for order in ("highest_alpha", "lowest_alpha"):
        ranked = pruning.removal_order(order, 6, alphas=[1.0] * 6, reverse=reverse)
        assert ranked == tuple(range(6))


@pytest.mark.parametrize("pool", pruning.POOLS)
@pytest.mark.parametrize("num_layers", DEPTHS)
def test_random_draws_are_distinct_seeded_and_from_the_pool(num_layers, pool):
    layers = range(2, num_layers - 2) if pool == "interior" else range(num_layers)
    for k in range(1, len(layers) + 1):
        drawn = pruning.random_sets(num_layers, k, draws=20, seed=7, pool=pool)
        assert drawn == pruning.random_sets(num_layers, k, draws=20, seed=7, pool=pool)
        assert len(drawn) == len(set(drawn)) == min(20, math.comb(len(layers), k))
        assert all(set(s) <= set(layers) and len(s) == k == len(set(s)) for s in drawn)
        if math.comb(len(layers), k) > 200:
            assert drawn != pruning.random_sets(num_layers, k, draws=20, seed=8, pool=pool)
    with pytest.raises(UserError, match=f"k = {len(layers) + 1} .* {len(layers)} layers"):
        pruning.random_sets(num_layers, len(layers) + 1, draws=20, seed=7, pool=pool)


def test_random_draws_reach_every_layer_about_equally():
    counts = [0] * 12
    for seed in range(100):
        for layers in pruning.random_sets(12, 3, draws=20, seed=seed, pool="all"):
            for layer in layers:
                counts[layer] += 1
    # 6,000 removals over 12 layers: 500 each, standard deviation about 21.
    assert all(400 < count < 600 for count in counts), counts


def test_all_sets_counts():
    sets = list(pruning.all_sets(12, 4))
    assert len(sets) == pruning.count_sets(12, 4) == 12 + 66 + 220 + 495 == 793
    assert len(set(sets)) == 793
    assert () not in sets
    assert list(pruning.all_sets(3, 3)) == [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    with pytest.raises(UserError, match=r"k = 5 .* 4 layers"):
        list(pruning.all_sets(4, 5))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf]), min_size=10, max_size=10))
def test_true_extremes_are_extreme_and_break_ties_by_index(values):
    deltas = dict(zip(itertools.combinations(range(5), 2), values, strict=True))
    deltas[(0,)] = -5.0
    best, worst = pruning.best_true(deltas, 2), pruning.worst_true(deltas, 2)
    assert best == min(s for s in deltas if len(s) == 2 and deltas[s] == min(values))
    assert worst == min(s for s in deltas if len(s) == 2 and deltas[s] == max(values))


def test_refusals_name_what_was_got():
    with pytest.raises(UserError, match=r"'deepest'.*highest_alpha"):
        pruning.removal_order("deepest", 4, alphas=[1.0] * 4)
    with pytest.raises(UserError, match="4 values, got 3"):
        pruning.removal_order("highest_alpha", 4, alphas=[1.0] * 3)
    with pytest.raises(UserError, match="got none"):
        pruning.removal_order("calibrated", 4, alphas=[1.0] * 4)
    with pytest.raises(UserError, match=r"NaN for layers \[1\]"):
        pruning.removal_order("highest_alpha", 2, alphas=[1.0, math.nan])
    with pytest.raises(UserError, match="0 random draws"):
        pruning.random_sets(12, 2, draws=0, seed=0)
    with pytest.raises(UserError, match="'edges'"):
        pruning.random_sets(12, 2, draws=3, seed=0, pool="edges")
    with pytest.raises(UserError, match="no results for sets of 3"):
        pruning.worst_true({(0, 1): 1.0}, 3)
    with pytest.raises(UserError, match="NaN for 1 sets"):
        pruning.best_true({(0, 1): math.nan}, 2)
