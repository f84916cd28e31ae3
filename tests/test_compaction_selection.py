"""Which keys are kept, in which order: numpy by definition and an independent implementation."""

import math
from fractions import Fraction

import numpy as np
import pytest

from jaxablate import selection
from jaxablate.compaction import SELECTIONS, key_order, num_kept, select, thin_queries
from jaxablate.errors import UserError

ORACLE_HEADS = ("L0H0", "L3H1", "L7H2", "L13H0", "L16H1")


def head(num_queries=150, num_keys=37, size=8, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(num_queries, size)) * scale
    return tuple(
        array.astype(np.float32)
        for array in (queries, rng.normal(size=(num_keys, size)), rng.normal(size=(num_keys, size)))
    )


def attention(queries, keys):
    """A [n, T] by definition, float64."""
    scores = queries.astype(np.float64) @ keys.astype(np.float64).T / math.sqrt(keys.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


DEFINITIONS = {
    "rms": lambda a: np.sqrt((a**2).mean(axis=0)),
    "mean": lambda a: a.mean(axis=0),
    "max": lambda a: a.max(axis=0),
}


def test_num_kept_is_the_exact_floor_and_at_least_one():
    assert num_kept(0.29, 100) == 29, "0.29 * 100 is 28.999999999999996"
    assert num_kept(0, 1942) == 1
    assert num_kept(1.0, 7) == 7
    for total in range(1, 400, 7):
        for percent in range(101):
            exact = max(1, math.floor(Fraction(percent, 100) * total))
            assert num_kept(percent / 100, total) == exact
    for ratio in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="ratio"):
            num_kept(ratio, 10)
    with pytest.raises(UserError, match="0 keys"):
        num_kept(0.5, 0)


@pytest.mark.parametrize("method", DEFINITIONS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(150, 37), (3, 300), (64, 1)])
def test_scores_outputs_and_order_follow_their_definitions(method, num_queries, num_keys):
    queries, keys, values = head(num_queries, num_keys)
    weights = attention(queries, keys)
    expected = DEFINITIONS[method](weights)
    found = selection.attention_statistics(queries[None], keys[None], values[None], method)
    np.testing.assert_allclose(found.scores[0], expected, rtol=1e-12)
    np.testing.assert_allclose(found.outputs[0], weights @ values, atol=2e-6)
    np.testing.assert_array_equal(
        key_order(queries, keys, method), np.argsort(-expected, kind="stable")
    )


def test_chunks_and_heads_under_one_vmap_change_nothing(monkeypatch):
    heads = [head(200, 50, seed=seed) for seed in range(3)]
    queries, keys, values = (np.stack(arrays) for arrays in zip(*heads))
    single = selection.attention_statistics(queries, keys, values)
    monkeypatch.setattr(selection, "heads_at_once", lambda: 2)
    monkeypatch.setattr(selection, "rows_per_chunk", lambda columns, heads: 48)
    grouped = selection.attention_statistics(queries, keys, values)
    np.testing.assert_allclose(grouped.scores, single.scores, rtol=1e-13)
    np.testing.assert_allclose(grouped.mass, single.mass, rtol=1e-13)
    np.testing.assert_allclose(grouped.row_max, single.row_max, rtol=1e-13)
    np.testing.assert_allclose(grouped.outputs, single.outputs, atol=1e-6)


def test_equal_keys_are_ordered_by_index():
    queries, keys, _ = head()
    twice = np.concatenate([keys, keys[::-1]])
    order = key_order(queries, twice).tolist()
    for index in range(len(keys)):
        first, second = order.index(index), order.index(2 * len(keys) - 1 - index)
        assert second == first + 1


def test_first_last_and_random_orders():
    queries, keys, _ = head(num_keys=7)
    assert key_order(queries, keys, "first_last").tolist() == [0, 6, 1, 5, 2, 4, 3]
    assert key_order(queries, keys[:6], "first_last").tolist() == [0, 5, 1, 4, 2, 3]
    one, same, other = (key_order(queries, keys, "random", seed=seed) for seed in (1, 1, (1, 2)))
    assert sorted(one.tolist()) == list(range(7))
    np.testing.assert_array_equal(one, same)
    assert one.tolist() != other.tolist()


def test_select_keeps_the_keys_as_they_were():
    queries, keys, values = head()
    order = key_order(queries, keys)
    kept = select(keys, values, order, 5)
    np.testing.assert_array_equal(kept.indices, order[:5])
    np.testing.assert_array_equal(kept.keys, keys[order[:5]])
    np.testing.assert_array_equal(kept.values, values[order[:5]])
    np.testing.assert_array_equal(kept.beta, np.zeros(5))
    for count in (0, 38):
        with pytest.raises(UserError, match=f"{count} keys to keep of 37"):
            select(keys, values, order, count)


def test_thinned_queries_are_the_same_rows_of_every_head_in_order():
    queries = np.arange(60, dtype=np.float32).reshape(2, 10, 3)
    thin = thin_queries(queries, 4, seed=3)
    assert thin.shape == (2, 4, 3)
    rows = thin[0, :, 0] / 3
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(thin[1] - thin[0], np.full((4, 3), 30))
    np.testing.assert_array_equal(thin, thin_queries(queries, 4, seed=3))
    assert thin_queries(queries, None) is queries
    assert thin_queries(queries, 10) is queries
    with pytest.raises(UserError, match="0 reference queries"):
        thin_queries(queries, 0)


def test_what_cannot_be_ordered_is_refused():
    queries, keys, _ = head()
    with pytest.raises(UserError, match=r"'best'.*" + ".*".join(SELECTIONS)):
        key_order(queries, keys, "best")
    with pytest.raises(UserError, match="score 'omp'"):
        selection.attention_statistics(queries[None], keys[None], score="omp")
    queries[3, 2] = np.inf
    with pytest.raises(UserError, match="queries"):
        key_order(queries, keys)
    with pytest.raises(UserError, match="empty"):
        key_order(queries[:0], keys)


@pytest.mark.shared
def test_order_is_the_independent_implementations(shared_dir):
    """970 neighbours a head, some only 4e-7 apart."""
    oracle = shared_dir / "oracle"
    queries = np.load(oracle / "article0_queries.npz")
    context = np.load(oracle / "article0_keys_values.npz")
    expected = np.load(oracle / "article0_match_heads.npz")
    start, end = context["article_range"]
    for name in ORACLE_HEADS:
        order = key_order(queries[name], context[f"{name}_K"][start:end])
        wanted = expected[f"{name}_r0.5_idx"]
        np.testing.assert_array_equal(order[: len(wanted)], wanted, err_msg=name)
