"""The influence sweep as a library: contexts, compacted heads, and what they must agree with."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxablate import influence
from jaxablate.edits import keep_keys
from jaxablate.errors import NonFiniteError, UserError
from jaxablate.model import Transformer
from jaxablate.prefill import prefill
from jaxablate.problem import Problem
from jaxablate.prompts import Case, Continuation
from jaxablate.sweep import Sweep, SweepOptions

CONFIG = tiny.llama_config(num_layers=3)
HEADS = list(itertools.product(range(3), range(2)))
CONTEXT, ARTICLE = 40, (3, 37)
LENGTH = ARTICLE[1] - ARTICLE[0]
BASE = 5
OPTIONS = SweepOptions(chunk_tokens=1)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer.from_params(CONFIG, tiny.random_params(CONFIG, seed=3, scale=0.2))


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(0)

    def ids(count):
        return rng.integers(0, CONFIG.vocab_size, count).astype(np.int32)

    continuations = tuple(
        Continuation(question_id=str(i), prompt_ids=ids(3), answer_ids=ids(n))
        for i, n in enumerate((8, 5))
    )
    return Case(
        document="made up",
        digest="",
        context_ids=ids(CONTEXT),
        article_range=ARTICLE,
        continuations=continuations,
        reference_ids=ids(50),
    )


@pytest.fixture(scope="module")
def context(model, case):
    counts = influence.influence_counts(HEADS, HEADS, BASE, [1, 17, LENGTH])
    return influence.compact_context(model, case, counts)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_the_full_cache_equals_one_forward_over_everything(model, case, context):
    problem = Problem(case.batch(), prefix=context.full_prefix())
    found = Sweep(model, problem, OPTIONS).baseline_nll
    expected = []
    for continuation in case.continuations:
        parts = [case.context_ids, continuation.prompt_ids, continuation.answer_ids]
        tokens = np.concatenate(parts)
        logits = np.asarray(model(jnp.asarray(tokens[None])), np.float64)[0, :-1]
        nll = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), tokens[1:]]
        expected.append(nll[-len(continuation.answer_ids) :])
    close(found, np.concatenate(expected))


def test_all_heads_at_all_keys_equal_the_full_cache(model, case, context):
    full = Problem(case.batch(), prefix=context.full_prefix())
    expected = Sweep(model, full, OPTIONS).baseline_nll
    everything = influence.influence_problem(context, case, LENGTH)
    close(Sweep(model, everything, OPTIONS).baseline_nll, expected)
    # From a baseline of few keys, every head edited back to all of them.
    engine = Sweep(model, influence.influence_problem(context, case, BASE), OPTIONS)
    assert np.abs(engine.baseline_nll - expected).max() > 1e-3
    close(engine.run([keep_keys(dict.fromkeys(HEADS, LENGTH))])[0], expected)


def test_no_difference_at_the_baselines_own_ratio(model, case, context):
    engine = Sweep(model, influence.influence_problem(context, case, BASE), OPTIONS)
    configurations = [influence.head_configuration(head, BASE, BASE) for head in HEADS]
    found = engine.run(configurations)
    np.testing.assert_array_equal(found, np.stack([engine.baseline_nll] * len(HEADS)))
    # Re-fitting a head to the keys that it has already changes rounding at most.
    close(engine.run([keep_keys({(1, 0): BASE})])[0], engine.baseline_nll)


def test_what_is_outside_the_article_is_kept_as_it_is(case, context):
    keys, _, bias = context.head_prefix(1, 1, BASE)
    outside = [*range(ARTICLE[0]), *range(ARTICLE[1], CONTEXT)]
    np.testing.assert_array_equal(keys[: len(outside)], context.keys[1][outside, 1])
    assert len(keys) == len(bias) == len(outside) + BASE
    assert (bias == 0).all()
    kept = context.heads[1, 1, BASE].indices
    assert len(set(kept)) == BASE
    assert 0 <= kept.min() <= kept.max() < LENGTH
    np.testing.assert_array_equal(keys[len(outside) :], context.keys[1][ARTICLE[0] + kept, 1])


def test_keys_come_in_the_order_of_their_attention(model, case, context):
    """Root mean square over the article's own queries, both query heads of the group together."""
    caches = list(prefill(model, case.context_ids))
    for layer, kv_head in HEADS:
        start, stop = ARTICLE
        group = slice(3 * kv_head, 3 * kv_head + 3)
        queries = np.moveaxis(caches[layer].q[start:stop, group], 1, 0).astype(np.float64)
        keys = caches[layer].k[start:stop, kv_head].astype(np.float64)
        scores = queries.reshape(-1, 8) @ keys.T / np.sqrt(8)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        order = np.argsort(-np.sqrt((weights**2).mean(axis=0)))
        found = context.heads[layer, kv_head, LENGTH].indices
        np.testing.assert_array_equal(found, order)


def test_a_context_is_the_same_whatever_its_padding(model, case):
    """The prefill pads to 256 positions; a plain forward of the same tokens does not."""
    caches = list(prefill(model, case.context_ids))
    longer = np.concatenate([case.context_ids, case.reference_ids[:1].repeat(230)])
    for short, long in zip(caches, prefill(model, longer)):
        for name in ("q", "k", "v"):
            assert len(getattr(short, name)) == CONTEXT
            close(getattr(long, name)[:CONTEXT], getattr(short, name))


@pytest.mark.parametrize("queries", influence.REFERENCE_QUERIES)
@pytest.mark.parametrize("selection", ["rms", "random"])
def test_a_heads_keys_do_not_depend_on_its_company(model, case, queries, selection):
    settings = influence.CompactionSettings(
        reference_queries=queries, selection=selection, seed=7, max_queries=20
    )
    everyone = influence.compact_context(model, case, {head: [BASE] for head in HEADS}, settings)
    alone = influence.compact_context(model, case, {(1, 1): [BASE]}, settings)
    assert set(alone.heads) == {(1, 1, BASE)}
    np.testing.assert_array_equal(
        alone.heads[1, 1, BASE].indices, everyone.heads[1, 1, BASE].indices
    )


def test_heads_that_were_not_fitted_are_refused(context):
    with pytest.raises(UserError, match="L1H0 was not fitted to 9 keys"):
        context.head_prefix(1, 0, 9)


def test_a_context_that_overflows_names_its_layer(case):
    params = tiny.random_params(CONFIG, scale=0.2)
    up = params["blocks"]["0"]["mlp"]["up"]
    up["kernel"] = up["kernel"].at[:].set(1e38)
    with pytest.raises(NonFiniteError, match="the attention of layer 1"):
        list(prefill(Transformer.from_params(CONFIG, params), case.context_ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "guess"}, "method is 'guess'; it must be one of select"),
        ({"selection": "guess"}, "selection is 'guess'"),
        ({"reference_queries": "guess"}, "reference_queries is 'guess'"),
        ({"max_queries": 0}, "max_queries is 0"),
    ],
)
def test_settings_that_there_are_not(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(influence.CompactionSettings(), **changes)
