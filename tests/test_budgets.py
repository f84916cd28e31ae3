"""Head budgets: optimum on curves where it is known, rivals' formulas, the published file."""

import json
from fractions import Fraction

import numpy as np
import pytest

from jaxablate.budgets import (
    RATIOS,
    STEP,
    Curves,
    greedy_shares,
    kept_ratio,
    keys_per_head,
    predicted_delta,
    pyramid_shares,
    read_shares,
    swap_shares,
    uniform_shares,
    write_shares,
)
from jaxablate.errors import UserError

GRID = np.arange(51) / 100


def convex_curves(num_layers, num_kv_heads, seed=0):
    """a·exp(-ρ/τ): convex and falling, heights over three orders of magnitude."""
    rng = np.random.default_rng(seed)
    height = 10 ** rng.uniform(-3, 0, (num_layers, num_kv_heads, 1))
    width = rng.uniform(0.01, 0.2, (num_layers, num_kv_heads, 1))
    return Curves(GRID, height * np.exp(-GRID / width))


def best_by_marginals(curves, step, ratios):
    """The optimum for convex curves, by sorting every step that any head could take."""
    heads = curves.num_heads
    deltas = curves.deltas.reshape(heads, -1)
    lowest = 1 / heads
    down = 0
    while lowest > step * (1 + 1e-9):
        lowest, down = lowest - step, down + 1
    units = down * heads
    rungs = lowest + step * np.arange(units + 1)
    cost = np.stack(
        [
            np.mean([np.interp(rungs * heads * t, curves.ratios, d) for t in ratios], axis=0)
            for d in deltas
        ]
    )
    gains = cost[:, :-1] - cost[:, 1:]
    flat = np.argsort(-gains.ravel(), kind="stable")[:units]
    taken = np.bincount(flat // units, minlength=heads)
    return (lowest + step * taken).reshape(curves.deltas.shape[:2])


@pytest.mark.parametrize("solver", [swap_shares, greedy_shares])
def test_convex_curves_give_their_known_optimum_on_the_published_ladder(solver):
    curves = convex_curves(32, 8)
    shares = solver(curves)
    moves = (shares - 1 / 256) / STEP
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-9)
    assert moves.min() == pytest.approx(-3, abs=1e-9), "the floor is 1/256 - 0.003"
    assert shares.sum() == pytest.approx(1, abs=1e-12)
    best = best_by_marginals(curves, STEP, RATIOS)

    def surrogate(p):
        return np.mean([predicted_delta(curves, p, t) for t in RATIOS])

    np.testing.assert_allclose(surrogate(shares), surrogate(best), rtol=1e-9)
    np.testing.assert_allclose(shares, best, atol=1e-12)


def test_published_shares_have_the_structure_that_the_solver_gives(shared_dir):
    path = shared_dir / "reference" / "llama31_8b_shares.json"
    shares = read_shares(path, 32, 8)
    moves = (shares - 1 / 256) / STEP
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-9)
    assert moves.min() == pytest.approx(-3, abs=1e-9)
    assert shares[0, 0] == 0.0009062499999999997
    assert np.unravel_index(shares.argmax(), shares.shape) == (17, 6)


def test_swaps_beat_greedy_where_a_curve_is_flat_before_it_falls():
    flat_then_steep = np.where(GRID < 0.1, 1.0, 0.0)
    slope = 0.2 - 0.1 * GRID
    curves = Curves(GRID, np.stack([flat_then_steep, slope])[None])
    swapped = swap_shares(curves, step=0.02, ratios=[0.1])
    greedy = greedy_shares(curves, step=0.02, ratios=[0.1])
    assert predicted_delta(curves, swapped, 0.1) < predicted_delta(curves, greedy, 0.1)


def test_swaps_never_make_the_surrogate_worse_than_uniform_and_end():
    rng = np.random.default_rng(1)
    for seed in range(20):
        curves = Curves(GRID, np.cumsum(rng.normal(size=(3, 2, 51)), axis=-1))
        shares = swap_shares(curves, step=0.01 + 0.001 * seed)
        start, end = (
            np.mean([predicted_delta(curves, p, t) for t in RATIOS])
            for p in (uniform_shares(3, 2), shares)
        )
        assert end <= start + 1e-12
        assert shares.min() > 0
        assert shares.sum() == pytest.approx(1, abs=1e-12)


def test_one_head_keeps_everything():
    curves = Curves(GRID, np.sin(40 * GRID)[None, None])
    for solver in (swap_shares, greedy_shares):
        np.testing.assert_allclose(solver(curves), [[1.0]], rtol=1e-15)


def test_pyramid_shares_to_the_last_digit():
    shares = pyramid_shares(32, 8, beta=20)
    for layer in range(32):
        exact = Fraction(39, 20) + Fraction(layer, 31) * (Fraction(1, 20) - Fraction(39, 20))
        assert (shares[layer] == float(exact / 256)).all()
    assert pyramid_shares(1, 2).tolist() == [[0.5, 0.5]]
    with pytest.raises(UserError, match=r"0\.3"):
        pyramid_shares(4, 2, beta=0.3)


def test_keys_follow_the_shares_and_are_clamped():
    shares = np.array([[0.5, 0.25], [0.125, 0.125]])
    np.testing.assert_array_equal(keys_per_head(shares, 0.1, 1000), [[200, 100], [50, 50]])
    np.testing.assert_array_equal(keys_per_head(shares, 0.9, 10), [[10, 9], [4, 4]])
    np.testing.assert_array_equal(keys_per_head(shares, 0.0, 10), np.ones((2, 2)))
    np.testing.assert_array_equal(keys_per_head(uniform_shares(30, 3), 0.05, 1942), 97)
    assert kept_ratio(keys_per_head(shares, 0.1, 1000), 1000) == 0.1
    assert kept_ratio(np.array([[10, 9], [4, 4]]), 10) == 0.675


def test_shares_survive_writing_and_reading_to_the_last_bit(tmp_path):
    shares = swap_shares(convex_curves(6, 3), step=0.01)
    path = tmp_path / "budget.json"
    write_shares(path, shares)
    assert (read_shares(path) == shares).all()
    assert (read_shares(path, 6, 3) == shares).all()
    assert list(json.loads(path.read_text())) == [f"L{i}H{j}" for i in range(6) for j in range(3)]
    assert [p.name for p in tmp_path.iterdir()] == ["budget.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no head budget"),
        ("[1]", "no head budget"),
        ("{}", "no head budget"),
        ('{"L0H0": 1', "no head budget"),
        ('{"L0H0": 0.5, "L0H0": 0.5}', "L0H0 is there twice"),
        ('{"head": 1}', "'head' names no KV head"),
        ('{"L0H0": "1"}', "share '1' of L0H0"),
        ('{"L0H0": true}', "share True of L0H0"),
        ('{"L0H0": NaN}', "share nan"),
        ('{"L0H0": -0.5, "L0H1": 1.5}', "share -0.5"),
        ('{"L0H0": 0.5, "L1H1": 0.5}', "2 heads; expected 2 layers x 2"),
        ('{"L0H0": 0.5, "L0H1": 0.4}', "sum to 0.9"),
        ('{"L0H0": ' + "[" * 5000 + "]" * 5000 + "}", "budget.json"),
    ],
)
def test_a_bad_budget_file_is_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "budget.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_shares(path)
    assert says in str(caught.value)
    assert "budget.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_of_another_model_or_no_file_is_refused(tmp_path):
    write_shares(tmp_path / "b.json", uniform_shares(4, 2))
    with pytest.raises(UserError, match="8 heads; expected 3 layers x 2"):
        read_shares(tmp_path / "b.json", 3, 2)
    with pytest.raises(UserError, match="L0H1 is outside 8 layers x 1"):
        read_shares(tmp_path / "b.json", 8, 1)
    with pytest.raises(UserError, match="absent"):
        read_shares(tmp_path / "absent.json")


def test_curves_and_settings_that_cannot_serve_are_refused():
    with pytest.raises(UserError, match="do not increase"):
        Curves(np.array([0.0, 0.2, 0.1]), np.zeros((1, 1, 3)))
    deltas = np.zeros((2, 3, 51))
    deltas[1, 2, 7] = np.nan
    with pytest.raises(UserError, match=r"1 of 6 heads .* L1H2"):
        Curves(GRID, deltas)
    curves = convex_curves(2, 2)
    with pytest.raises(UserError, match="step 0"):
        swap_shares(curves, step=0.0)
    with pytest.raises(UserError, match="ratios"):
        greedy_shares(curves, ratios=[0.0])
