"""Every kind of ablation against PyTorch's own models, ablated with PyTorch's own means."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch_models as oracle

from jaxablate import influence
from jaxablate.compaction import CompactedHead
from jaxablate.edits import (
    Configuration,
    LayerEdit,
    head_mask,
    keep_keys,
    remove_attention,
    remove_blocks,
    remove_mlps,
    silence_heads,
)
from jaxablate.prefill import prefill
from jaxablate.problem import Problem
from jaxablate.prompts import Case, Continuation
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import Batch

ATOL = 1e-5
LAYERS = 4
# One state at a time: one shape to compile. That chunks do not matter is the engine's own test.
OPTIONS = SweepOptions(chunk_tokens=1)
# Query heads per KV head never equal to the number of KV heads: 9/3 and 14/2 tell j // G from
# j % K and from K-major orders, which 4/2 does not.
MODELS = {
    "llama 9/3": lambda: oracle.random_llama(),
    "llama 14/2, tied": lambda: oracle.random_llama(
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=4,
        hidden_size=28,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
    ),
    "neox parallel": lambda: oracle.random_neox(),
    "neox sequential": lambda: oracle.random_neox(use_parallel_residual=False, rotary_pct=1.0),
}


@dataclasses.dataclass
class Pair:
    """The same weights here and there, and tokens [B, T + 1] to predict."""

    ours: object
    theirs: object
    tokens: np.ndarray
    engine: Sweep
    means: list[np.ndarray]

    @property
    def num_heads(self) -> int:
        return self.ours.config.num_heads

    def check(self, configuration: Configuration, tokens: np.ndarray | None = None) -> None:
        """Within the context that ablates PyTorch's model: same NLL of every token."""
        expected = oracle.token_nll(self.theirs, self.tokens)
        found = self.engine.run([configuration])[0].reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
        # An ablation that does nothing would agree with an oracle that does nothing.
        assert np.abs(found - self.engine.baseline_nll.reshape(expected.shape)).max() > 1e-2


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory) -> Pair:
    theirs = MODELS[request.param]()
    ours = oracle.converted(theirs, tmp_path_factory.mktemp("parity"))
    tokens = np.random.default_rng(0).integers(0, 53, (2, 20))
    means = oracle.mean_head_outputs(theirs, tokens)
    batch = text_batch(tokens)
    engine = Sweep(ours, Problem(batch, mean_output=lambda layer: means[layer]), OPTIONS)
    return Pair(ours, theirs, tokens, engine, means)


def text_batch(tokens: np.ndarray) -> Batch:
    inputs = tokens[:, :-1].astype(np.int32)
    rows, length = inputs.shape
    return Batch(
        inputs=inputs,
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), inputs.shape),
        targets=tokens[:, 1:].astype(np.int32),
        scored=np.ones(inputs.shape, bool),
        lengths=np.full(rows, length, np.int32),
    )


def test_unablated(pair):
    expected = oracle.token_nll(pair.theirs, pair.tokens)
    found = pair.engine.baseline_nll.reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("layers", [{0}, {3}, {1, 2}, {0, 3}, {0, 1, 2, 3}])
def test_layers_deleted_from_the_module_list(pair, layers):
    with oracle.without_layers(pair.theirs, layers):
        pair.check(remove_blocks(layers))


@pytest.mark.parametrize("layers", [{0}, {3}, {1, 2}])
def test_attention_alone_removed(pair, layers):
    with oracle.without_attention(pair.theirs, layers):
        pair.check(remove_attention(layers))


@pytest.mark.parametrize("layers", [{0}, {3}, {1, 2}])
def test_mlp_alone_removed(pair, layers):
    with oracle.without_mlp(pair.theirs, layers):
        pair.check(remove_mlps(layers))


def test_kinds_of_edits_mixed(pair):
    gates = np.linspace(0, 1.5, pair.num_heads)
    edits = (
        (0, LayerEdit(head_gates=tuple(gates), remove_mlp=True)),
        (1, LayerEdit(remove_attention=True)),
        (2, LayerEdit(remove_attention=True, remove_mlp=True)),
        (3, LayerEdit(remove_mlp=True)),
    )
    with (
        oracle.with_gates(pair.theirs, {0: gates}),
        oracle.without_attention(pair.theirs, {1, 2}),
        oracle.without_mlp(pair.theirs, {0, 2, 3}),
    ):
        pair.check(Configuration(edits))


@pytest.mark.parametrize("null", ["zero", "mean"])
def test_every_single_head_silenced(pair, null):
    singles = list(itertools.product(range(LAYERS), range(pair.num_heads)))
    found = pair.engine.run([silence_heads([head], pair.num_heads, null) for head in singles])
    for (layer, head), nll in zip(singles, found):
        gate = np.ones(pair.num_heads)
        gate[head] = 0
        with oracle.with_gates(pair.theirs, {layer: gate}, _null(pair, null)):
            expected = oracle.token_nll(pair.theirs, pair.tokens)
        np.testing.assert_allclose(nll, expected.ravel(), rtol=0, atol=ATOL)


@pytest.mark.parametrize("null", ["zero", "mean"])
def test_fractional_gates_everywhere(pair, null):
    mask = np.random.default_rng(1).uniform(-0.5, 1.5, (LAYERS, pair.num_heads))
    mask[1] = np.arange(pair.num_heads) % 2
    with oracle.with_gates(pair.theirs, dict(enumerate(mask)), _null(pair, null)):
        pair.check(head_mask(mask, null))


def _null(pair: Pair, null: str):
    return (lambda layer: pair.means[layer]) if null == "mean" else None


# Keys of a prefix

CONTEXT, PROTECTED, BASELINE_COUNT = 24, 2, 6


@pytest.fixture(scope="module")
def case() -> Case:
    """A context and two continuations of different length."""
    rng = np.random.default_rng(2)

    def ids(count):
        return rng.integers(0, 53, count).astype(np.int32)

    return Case(
        document="made up",
        digest="",
        context_ids=ids(CONTEXT),
        article_range=(PROTECTED, CONTEXT - 3),
        continuations=tuple(
            Continuation(question_id=str(i), prompt_ids=ids(2), answer_ids=ids(n))
            for i, n in enumerate((9, 6))
        ),
        reference_ids=ids(0),
    )


def random_context(model, case: Case, counts) -> influence.CompactedContext:
    """The context's own keys and values; which keys a head keeps, and their β, is random."""
    rng = np.random.default_rng(3)
    start, _ = case.article_range
    caches = list(prefill(model, case.context_ids))
    heads = {}
    for layer, cache in enumerate(caches):
        for kv_head, count in itertools.product(range(cache.k.shape[1]), counts):
            chosen = rng.permutation(case.article_tokens)[:count]
            heads[layer, kv_head, count] = CompactedHead(
                indices=chosen,
                keys=cache.k[start + chosen, kv_head],
                values=cache.v[start + chosen, kv_head],
                beta=rng.normal(size=count).astype(np.float32),
            )
    keys, values = [cache.k for cache in caches], [cache.v for cache in caches]
    return influence.CompactedContext(keys, values, case.article_range, heads)


def masked_nll(pair: Pair, case: Case, kept) -> np.ndarray:
    """PyTorch's NLL of the answers when continuations see kept(layer, kv_head) alone.

    The context itself is read with its full cache. `kept` gives (indices, β), or None for all.
    """
    group = pair.ours.config.group_size
    start, stop = case.article_range
    found = []
    for continuation in case.continuations:
        answer = continuation.answer_ids
        tokens = np.concatenate([case.context_ids, continuation.prompt_ids, answer])[None]
        biases = {}
        for layer in range(LAYERS):
            bias = oracle.causal_bias(pair.theirs, tokens)
            for kv_head in range(pair.ours.config.num_kv_heads):
                chosen = kept(layer, kv_head)
                if chosen is None:
                    continue
                column = np.full(stop - start, np.finfo(np.float32).min)
                column[chosen[0]] = chosen[1]
                heads = slice(kv_head * group, (kv_head + 1) * group)
                rows = bias[0, heads, CONTEXT:, start:stop]
                rows[:] = oracle.torch.from_numpy(column.astype(np.float32))
            biases[layer] = bias
        with oracle.with_bias(pair.theirs, biases):
            found.append(oracle.token_nll(pair.theirs, tokens)[0, -len(answer) :])
    return np.concatenate(found)


def test_keys_kept_of_one_head(pair, case):
    config = pair.ours.config
    heads = list(itertools.product(range(LAYERS), range(config.num_kv_heads)))
    counts = (1, 4, 11)
    context = random_context(pair.ours, case, [BASELINE_COUNT, *counts])
    engine = Sweep(pair.ours, influence.influence_problem(context, case, BASELINE_COUNT), OPTIONS)

    def kept_with(changed):
        def kept(layer, kv_head):
            count = changed.get((layer, kv_head), BASELINE_COUNT)
            head = context.heads[layer, kv_head, count]
            return head.indices, head.beta

        return kept

    expected = masked_nll(pair, case, kept_with({}))
    np.testing.assert_allclose(engine.baseline_nll, expected, rtol=0, atol=ATOL)
    changes = [{head: counts[i % 3]} for i, head in enumerate(heads)]
    # Several heads at once, of one layer and of several.
    changes.append({(1, 0): 4, (1, config.num_kv_heads - 1): 11, (3, 1): 1})
    changes.append({(0, 1): 11, (3, 0): 1})
    for changed, nll in zip(changes, engine.run([keep_keys(c) for c in changes])):
        expected = masked_nll(pair, case, kept_with(changed))
        np.testing.assert_allclose(nll, expected, rtol=0, atol=ATOL)
        assert np.abs(nll - engine.baseline_nll).max() > 1e-3


def test_the_full_cache(pair, case):
    context = influence.compact_context(pair.ours, case, {})
    problem = Problem(case.batch(), prefix=context.full_prefix())
    expected = masked_nll(pair, case, lambda layer, kv_head: None)
    found = Sweep(pair.ours, problem, OPTIONS).baseline_nll
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
