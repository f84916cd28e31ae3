"""Attention in tiles against its definition in float64, one query at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxablate.attention import LayerPrefix, attend


def by_definition(q, k, v, prefix=None):
    """q [T, N, H], k and v [T, K, H]; prefix: keys, values [K, R, H] and bias [K, R]."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    length, heads, size = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for n in range(heads):
        keys, values, bias = k[:, n // group], v[:, n // group], np.zeros(length)
        before = 0
        if prefix is not None:
            first = [np.asarray(a, np.float64)[n // group] for a in prefix]
            keys, values = np.concatenate([first[0], keys]), np.concatenate([first[1], values])
            bias, before = np.concatenate([first[2], bias]), len(first[2])
        for t in range(length):
            seen = before + t + 1
            scores = keys[:seen] @ q[t, n] / np.sqrt(size) + bias[:seen]
            weights = np.exp(scores - scores.max())
            out[t, n] = weights @ values[:seen] / weights.sum()
    return out


def random_arrays(states, batch, length, heads, kv_heads, size, scale=1.0):
    rng = np.random.default_rng(0)
    shapes = [(states, batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return [scale * rng.normal(size=shape).astype(np.float32) for shape in shapes]


def random_prefix(kv_heads, length, size):
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(2, kv_heads, length, size)).astype(np.float32)
    return LayerPrefix(
        jnp.asarray(keys),
        jnp.asarray(values),
        jnp.asarray(rng.normal(size=(kv_heads, length)).astype(np.float32)),
    )


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads"),
    [
        (1, 2, 1),
        (255, 2, 2),
        (256, 3, 1),
        (257, 4, 2),  # a tile and one more
        (600, 6, 3),  # whole tiles and a rest
        (4100, 1, 1),  # more than 16 tiles of the usual length: longer ones
    ],
)
@pytest.mark.parametrize("with_prefix", [False, True])
def test_tiles_equal_the_definition(length, heads, kv_heads, with_prefix):
    q, k, v = random_arrays(1, 1, length, heads, kv_heads, 4)
    prefix = random_prefix(kv_heads, 11, 4) if with_prefix else None
    found = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), prefix)[0, 0]
    expected = by_definition(q[0, 0], k[0, 0], v[0, 0], prefix)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_states_and_sequences_are_kept_apart():
    q, k, v = random_arrays(3, 2, 9, 6, 2, 4)
    prefix = random_prefix(2, 5, 4)
    found = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), prefix)
    for state in range(3):
        for row in range(2):
            expected = by_definition(q[state, row], k[state, row], v[state, row], prefix)
            np.testing.assert_allclose(found[state, row], expected, rtol=0, atol=2e-6)


def test_padding_takes_no_part_whatever_it_holds():
    q, k, v = (jnp.asarray(a) for a in random_arrays(1, 1, 8, 6, 2, 4))
    short = random_prefix(2, 5, 4)
    bias = np.full((2, 12), -np.inf, np.float32)
    bias[:, :5] = short.bias
    keys, values = (np.full((2, 12, 4), 1e4, np.float32) for _ in range(2))
    keys[:, :5], values[:, :5] = short.keys, short.values
    padded = LayerPrefix(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(bias))
    np.testing.assert_allclose(attend(q, k, v, padded), attend(q, k, v, short), rtol=0, atol=1e-6)
    nothing = padded._replace(bias=jnp.full_like(padded.bias, -jnp.inf))
    np.testing.assert_allclose(attend(q, k, v, nothing), attend(q, k, v, None), rtol=0, atol=1e-6)


def test_large_scores_do_not_overflow():
    q, k, v = random_arrays(1, 1, 30, 2, 1, 8, scale=40.0)
    found = np.asarray(attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), None)[0, 0])
    assert np.isfinite(found).all()
    expected = by_definition(q[0, 0], k[0, 0], v[0, 0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02)  # scores of 1e4 in float32


def test_bfloat16_sums_in_float32():
    """1,000 equal weights: a sum in bfloat16 would stop at 256."""
    length = 1000
    ones = jnp.ones((1, 1, length, 1, 4), jnp.bfloat16)
    values = jnp.broadcast_to((jnp.arange(length) % 2).reshape(1, 1, length, 1, 1), ones.shape)
    found = attend(0 * ones, ones, values.astype(jnp.bfloat16), None)
    assert found.dtype == jnp.bfloat16
    assert float(found[0, 0, -1, 0, 0]) == 0.5
