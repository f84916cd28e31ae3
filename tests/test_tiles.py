"""Loops that keep work in a processor's cache: they change the order of work and no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxablate import model, steps, tiles
from jaxablate.rope import rope_tables


@pytest.mark.parametrize(
    ("shape", "rows", "group"),
    [
        ((6, 2, 5, 3), 20, 2),  # ten rows a state
        ((6, 2, 5, 3), 45, 3),  # four states do not divide six
        ((7, 1, 4, 3), 8, 1),  # two do not divide seven
        ((6, 2, 5, 3), 1, 1),  # never less than a state
        ((6, 2, 5, 3), 60, 6),
    ],
)
def test_groups_of_states(shape, rows, group):
    sizes = []

    def function(x):
        sizes.append(x.shape[0])
        return jnp.cumsum(x, axis=2)[..., :2] * 2  # mixes positions, not states

    x = jax.random.normal(jax.random.key(0), shape)
    found = tiles.in_groups(function, x, rows)
    np.testing.assert_allclose(found, np.cumsum(x, axis=2)[..., :2] * 2, rtol=1e-6, atol=1e-6)
    assert set(sizes) == {group}


@pytest.mark.parametrize("rows", [5, 12, 13])
def test_tiles_of_rows(rows):
    sizes = []

    def function(x):
        sizes.append(len(x))
        return jnp.flip(x, axis=1) + 1

    x = jax.random.normal(jax.random.key(0), (rows, 3))
    np.testing.assert_array_equal(tiles.in_tiles(function, x, 6), np.flip(x, axis=1) + 1)
    assert set(sizes) == {min(rows, 6)} | ({rows % 6} - {0} if rows > 6 else set())


@pytest.mark.parametrize("config", [tiny.llama_config(), tiny.neox_config()])
def test_a_block_in_groups_and_tiles_is_the_block(config, monkeypatch):
    block = tiny.random_model(config).block(1)
    x = jax.random.normal(jax.random.key(1), (4, 2, 9, config.model_dim))
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
    rope = rope_tables(config, positions)
    whole = jax.jit(block.__call__)(x, rope)
    for group, tile in ((36, 1024), (1024, 7), (36, 7)):
        monkeypatch.setattr(steps, "_GROUP_TOKENS", group)
        monkeypatch.setattr(model, "_MLP_TILE", tile)
        step = jax.jit(lambda *arguments: steps.plain_step.__wrapped__(*arguments))
        np.testing.assert_allclose(step(block, x, rope, None), whole, rtol=2e-5, atol=2e-5)
