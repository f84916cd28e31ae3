"""bfloat16 weights and activations through the engine, and the noise floor of their tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tiny

from jaxablate import edits, rounding
from jaxablate.attention import LayerPrefix
from jaxablate.model import Transformer
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import Batch

CONFIGS = {
    "llama": tiny.llama_config(num_layers=2),
    "qwen3": tiny.llama_config(num_layers=2, qk_norm=True, qkv_bias=True, tie_embeddings=True),
    "neox": tiny.neox_config(num_layers=2),
}


def engine_of(config, dtype, chunk_tokens: int = 64) -> Sweep:
    params = jax.tree.map(lambda a: a.astype(dtype), tiny.random_params(config, scale=0.15))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (2, 33)).astype(np.int32)
    heads, size = config.num_kv_heads, config.head_dim
    keys, values = (rng.normal(size=(heads, 6, size)).astype(np.float32) for _ in range(2))
    prefix = LayerPrefix(
        jnp.asarray(keys[:, :3]), jnp.asarray(values[:, :3]), jnp.zeros((heads, 3), jnp.float32)
    )
    batch = Batch(
        inputs=tokens[:, :-1],
        positions=np.broadcast_to(np.arange(6, 38, dtype=np.int32), (2, 32)),
        targets=tokens[:, 1:],
        scored=np.ones((2, 32), bool),
        lengths=np.full(2, 32),
    )
    problem = Problem(
        batch,
        [prefix] * config.num_layers,
        lambda layer, head, n: (keys[head, :n], values[head, :n], np.zeros(n, np.float32)),
    )
    model = Transformer.from_params(config, params)
    return Sweep(model, problem, SweepOptions(chunk_tokens=chunk_tokens))


@pytest.mark.parametrize("family", CONFIGS)
def test_differences_are_those_of_float32_within_the_noise_floor(family):
    config = CONFIGS[family]
    configurations = [
        *[edits.silence_heads([(layer, head)], config.num_heads)
          for layer in range(2) for head in range(3)],
        *[edits.keep_keys({(layer, 1): 6}) for layer in range(2)],
        *[edits.remove_attention([layer]) for layer in range(2)],
        edits.remove_mlps([1]),
        edits.remove_blocks([0]),
    ]  # fmt: skip
    deltas = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        engine = engine_of(config, dtype)
        assert engine.trunk[-1].dtype == dtype
        nll = engine.run(configurations)
        assert nll.dtype == np.float32
        deltas[np.dtype(dtype).name] = nll.mean(axis=1) - engine.baseline_nll.mean()
    floor = rounding.noise_floor(rows_of(engine), "baseline")
    error = np.abs(deltas["bfloat16"] - deltas["float32"])
    # A floor of two standard deviations: nearly all within it, none far out, effects far above.
    assert np.mean(error < floor) > 0.8
    assert error.max() < 2.5 * floor
    assert np.abs(deltas["float32"]).max() > 10 * floor


def test_losses_are_not_quantised():
    """NLL of many tokens in bfloat16: logits and log-sum-exp have more than 8 bits."""
    nll = engine_of(CONFIGS["llama"], jnp.bfloat16).baseline_nll
    as_bfloat16 = np.asarray(jnp.asarray(nll).astype(jnp.bfloat16).astype(jnp.float32))
    assert np.mean(nll != as_bfloat16) > 0.9


def test_repeats_differ_and_shrink_with_the_step():
    config = CONFIGS["llama"]
    found = {}
    for dtype in (jnp.float16, jnp.bfloat16):
        engine = engine_of(config, dtype, chunk_tokens=1 << 20)
        repeats = rounding.repeats(engine, count=5)
        assert repeats.shape == (5, len(engine.baseline_nll))
        assert len(np.unique(repeats.sum(axis=1))) == 5  # each rounds in its own way
        moved = repeats.mean(axis=1) - engine.baseline_nll.mean()
        found[dtype] = np.sqrt(np.mean(moved**2))
    assert found[jnp.float16] < found[jnp.bfloat16] / 3  # 11 bits instead of 8
    assert rounding.repeats(engine_of(config, jnp.bfloat16, chunk_tokens=1), 3).shape[0] == 3


def rows_of(engine: Sweep) -> pd.DataFrame:
    names = rounding.configuration_names("bfloat16")
    nll = np.concatenate([engine.baseline_nll[None], rounding.repeats(engine, len(names))])
    return pd.DataFrame(
        {
            "configuration": ["baseline", *names],
            "document": "text",
            "nll_sum": nll.sum(axis=1, dtype=np.float64),
            "scored_tokens": nll.shape[1],
        }
    )


def test_the_floor_is_twice_the_root_mean_square_of_what_repeats_move():
    rows = pd.DataFrame(
        {
            "configuration": ["base", "rounding 0", "rounding 1"] * 2 + ["L0:mlp"] * 2,
            "document": ["a"] * 3 + ["b"] * 3 + ["a", "b"],
            "nll_sum": [10.0, 11, 9, 40, 42, 40, 99, 99],
            "scored_tokens": [10] * 3 + [20] * 3 + [10, 20],
        }
    )
    # Means of two documents: 1.5; 1.6 and 1.45.
    assert rounding.noise_floor(rows, "base") == pytest.approx(2 * np.sqrt((0.1**2 + 0.05**2) / 2))
    assert list(rows[~rounding.is_repeat(rows)].configuration.unique()) == ["base", "L0:mlp"]
    only = rows[rows.configuration == "base"]
    assert np.isnan(rounding.noise_floor(only, "base"))
    assert rounding.configuration_names("float32") == []
