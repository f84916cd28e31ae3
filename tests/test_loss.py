"""Loss in tiles of the vocabulary and chunks of tokens, in float32 whatever the weights are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxablate import loss
from jaxablate.loss import token_nll
from jaxablate.model import Norm, Transformer, Unembedding
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import windows


def random_head(vocab, dim=16, *, transposed=False, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(0)
    kernel = scale * rng.normal(size=(dim, vocab))
    params = {"scale": 1 + 0.3 * rng.normal(size=dim), "bias": 0.3 * rng.normal(size=dim)}
    norm = Norm("layer", 1e-5, {name: jnp.asarray(a, dtype) for name, a in params.items()})
    return Unembedding(norm, jnp.asarray(kernel.T if transposed else kernel, dtype), transposed)


def random_tokens(vocab, count=33, dim=16):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(count, dim)), jnp.float32)
    return x, jnp.asarray(rng.integers(0, vocab, count), jnp.int32)


def by_definition(head, x, targets):
    """From the normalised residual stream on, in float64."""
    kernel = np.asarray(head.kernel[...].astype(jnp.float32), np.float64)
    normed = np.asarray(head.norm(x).astype(jnp.float32), np.float64)
    logits = normed @ (kernel.T if head.transposed else kernel)
    top = logits.max(axis=1, keepdims=True)
    log_mass = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return log_mass - logits[np.arange(len(logits)), np.asarray(targets)]


# Less than a tile of 2,048, exactly one, one and a bit, several and a bit.
@pytest.mark.parametrize("vocab", [7, 2048, 2049, 7001])
@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_of_the_vocabulary_equal_the_definition(vocab, transposed):
    head = random_head(vocab, transposed=transposed)
    x, targets = random_tokens(vocab)
    targets = targets.at[:2].set(jnp.asarray([0, vocab - 1], jnp.int32))
    expected = by_definition(head, x, targets)
    np.testing.assert_allclose(token_nll(head, x, targets), expected, rtol=1e-6, atol=1e-6)


def test_tiles_equal_all_logits_at_once(monkeypatch):
    vocab = 5000
    head = random_head(vocab)
    x, targets = random_tokens(vocab)
    tiled = token_nll(head, x, targets)
    assert vocab > loss._CPU_TILE
    monkeypatch.setattr(loss, "_CPU_TILE", vocab)
    whole = jax.jit(token_nll.__wrapped__)(head, x, targets)
    np.testing.assert_allclose(tiled, whole, rtol=1e-6)
    full = jax.nn.logsumexp(head(x), axis=-1) - head(x)[jnp.arange(len(targets)), targets]
    np.testing.assert_allclose(tiled, full, rtol=1e-6)


@pytest.mark.parametrize("score_tokens", [1, 7, 40])
def test_chunks_of_tokens_change_nothing(score_tokens):
    config = tiny.llama_config(num_layers=1)
    model = Transformer.from_params(config, tiny.random_params(config, scale=0.2))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 42).astype(np.int32)
    problem = Problem(windows(tokens, 16, 16))
    whole = Sweep(model, problem, SweepOptions(score_tokens=41)).baseline_nll
    found = Sweep(model, problem, SweepOptions(score_tokens=score_tokens)).baseline_nll
    assert found.shape == (41,)
    np.testing.assert_allclose(found, whole, rtol=1e-6)


def test_large_logits_do_not_overflow():
    head = random_head(3000, scale=300.0)
    x, targets = random_tokens(3000)
    found = np.asarray(token_nll(head, x, targets))
    assert found.max() > 1000  # exp of such logits is not a float32
    np.testing.assert_allclose(found, by_definition(head, x, targets), rtol=1e-5, atol=1e-3)


def test_bfloat16_weights_do_not_quantise_the_loss():
    vocab = 5000
    head = random_head(vocab, dtype=jnp.bfloat16)
    x, targets = random_tokens(vocab)
    x = x.astype(jnp.bfloat16)
    logits, found = head(x), token_nll(head, x, targets)
    assert logits.dtype == found.dtype == jnp.float32
    expected = by_definition(head, x, targets)
    # bfloat16 has steps of 0.03 at these losses.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=5e-6)
    rounded = np.asarray(found.astype(jnp.bfloat16), np.float64)
    assert np.abs(rounded - expected).max() > 5e-3
