"""Estimates from gradients against PyTorch's gradients, the exact sweep and direct sums."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny
import torch
import torch_models as oracle

from jaxablate import edits, first_order, fisher
from jaxablate.attention import LayerPrefix
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.errors import UserError
from jaxablate.nested_attention import head_outputs, key_sets
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import Batch

PREFIX, LENGTH, ROWS, BASELINE = 40, 11, 3, 9
COUNTS = (1, 4, 20, 40)


def make_batch(vocab_size: int, start: int = 0, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    scored = rng.random((ROWS, LENGTH)) < 0.7
    scored[:, -1] = True
    positions = np.arange(start, start + LENGTH, dtype=np.int32)
    return Batch(
        inputs=tokens[:, :-1],
        positions=np.broadcast_to(positions, (ROWS, LENGTH)),
        targets=tokens[:, 1:],
        scored=scored,
        lengths=np.full(ROWS, LENGTH),
    )


def make_problem(config, strength: float = 1.0) -> Problem:
    """Rows of tokens behind random prefix keys, of which the baseline keeps 9 of 40.

    `strength` scales the values of all other keys' difference from what the head says without
    them, so that small strengths are small edits: their bias falls by 1 / strength.
    """
    rng = np.random.default_rng(1)
    shape = config.num_layers, config.num_kv_heads, PREFIX, config.head_dim
    keys, values = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    bias = np.where(np.arange(PREFIX) < BASELINE, 0, np.log(strength)).astype(np.float32)

    def head_prefix(layer, head, count):
        return keys[layer, head, :count], values[layer, head, :count], bias[:count]

    prefix = [
        LayerPrefix(
            jnp.asarray(keys[layer, :, :BASELINE]),
            jnp.asarray(values[layer, :, :BASELINE]),
            jnp.zeros((config.num_kv_heads, BASELINE), jnp.float32),
        )
        for layer in range(config.num_layers)
    ]
    batch = make_batch(config.vocab_size, PREFIX)
    return Problem(batch=batch, prefix=prefix, head_prefix=head_prefix)


def nll_by_row(problem: Problem, nll: np.ndarray) -> np.ndarray:
    """[C, scored] -> [C, B] sums."""
    row = np.nonzero(problem.batch.scored)[0]
    return np.stack([np.float64(nll)[:, row == b].sum(axis=1) for b in range(ROWS)], axis=1)


# Nested attention


def direct_outputs(q, k, v, keys, values, bias):
    """Softmax attention by its definition, float64, one query at a time."""
    out = np.empty(q.shape)
    for t, g in np.ndindex(q.shape[:2]):
        seen = np.concatenate([keys, k[: t + 1]]), np.concatenate([values, v[: t + 1]])
        shift = np.concatenate([bias, np.zeros(t + 1)])
        weights = scipy.special.softmax(seen[0] @ q[t, g] / np.sqrt(q.shape[2]) + shift)
        out[t, g] = weights @ seen[1]
    return out


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("counts", [(1, 2, 40, 3), (7,), (300, 5, 120)])
def test_head_outputs_of_many_key_sets(nested, counts):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(LENGTH, 3, 8)).astype(np.float32)
    k, v = (rng.normal(size=(LENGTH, 8)).astype(np.float32) for _ in range(2))
    keys, values = (rng.normal(size=(300, 8)).astype(np.float32) * 3 for _ in range(2))
    sets = []
    for count in counts:
        bias = np.zeros(count) if nested else rng.normal(size=count)
        sets.append((keys[:count], values[:count], bias.astype(np.float32)))
    arranged = key_sets(sets)
    assert arranged.nested == (nested or len(counts) == 1)
    found = head_outputs(
        *map(jnp.asarray, (q, k, v)),
        jax.tree.map(jnp.asarray, arranged.blocks),
        arranged.nested,
        arranged.num_slots,
    )
    for slot, chosen in zip(arranged.slots, sets):
        np.testing.assert_allclose(found[slot], direct_outputs(q, k, v, *chosen), atol=1e-5)


# The linear term


@pytest.fixture(scope="module", params=["llama", "neox"])
def pair(request, tmp_path_factory):
    theirs = oracle.random_llama() if request.param == "llama" else oracle.random_neox()
    ours = oracle.converted(theirs, tmp_path_factory.mktemp("gradients"))
    return ours, theirs.double()


def test_gates_have_pytorchs_gradient(pair):
    """With two sequences at a time and one left over, float32 against PyTorch's float64."""
    ours, theirs = pair
    config, batch = ours.config, make_batch(53)
    engine = Sweep(ours, Problem(batch), SweepOptions(chunk_tokens=2 * LENGTH))
    singles = list(itertools.product(range(config.num_layers), range(config.num_heads)))
    estimate = first_order.Gradients(engine).run(
        [edits.silence_heads([head], config.num_heads) for head in singles]
    )
    gates = torch.ones(config.num_layers, ROWS, config.num_heads, dtype=torch.float64)
    gates.requires_grad_()

    def hook(layer):
        def gated(module, inputs):
            heads = inputs[0].unflatten(-1, (-1, oracle.head_size(theirs)))
            return ((heads * gates[layer][:, None, :, None]).flatten(-2),)

        return gated

    handles = [
        oracle._projection(theirs, i).register_forward_pre_hook(hook(i))
        for i in range(config.num_layers)
    ]
    ids = torch.from_numpy(batch.inputs.astype(np.int64))
    logits = theirs(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    targets = torch.from_numpy(batch.targets.astype(np.int64))
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    (nll * torch.from_numpy(batch.scored)).sum().backward()
    expected = np.stack([-gates.grad[layer, :, head].numpy() for layer, head in singles])
    np.testing.assert_allclose(estimate.loss, expected, rtol=1e-4, atol=1e-4)
    assert estimate.drawn.shape == (len(singles), 0, ROWS)


@pytest.fixture(scope="module", params=["llama", "neox"])
def config(request):
    shape = {"num_layers": 3}
    return tiny.llama_config(**shape) if request.param == "llama" else tiny.neox_config(**shape)


@pytest.fixture(scope="module")
def engine(config):
    return Sweep(tiny.random_model(config), make_problem(config))


def kept_everywhere(config):
    heads = itertools.product(range(config.num_layers), range(config.num_kv_heads))
    return [edits.keep_keys({head: count}) for head in heads for count in COUNTS]


def test_small_edits_agree_to_second_order(config):
    """Halving an edit (of every KV head and count) must quarter the error of the linear term."""
    model = tiny.random_model(config)
    errors, sizes = [], []
    for strength in (0.002, 0.001):
        engine = Sweep(model, make_problem(config, strength))
        chosen = [c for c in kept_everywhere(config) if int(c.key.split("@")[1]) > BASELINE]
        base = nll_by_row(engine.problem, engine.baseline_nll[None])
        exact = nll_by_row(engine.problem, engine.run(chosen)) - base
        estimate = first_order.Gradients(engine).run(chosen).loss
        errors.append(np.sqrt(np.mean(np.square(exact - estimate))))
        sizes.append(np.sqrt(np.mean(np.square(exact))))
    print("effects", sizes, "errors", errors)
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.1)
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    assert errors[0] < 0.1 * sizes[0]


def test_removals_are_the_change_after_the_block(config):
    """The last block's removals against the loss's gradient at the final stream, by jax.grad of
    the plain head: nothing but the head stands between."""
    model, last = tiny.random_model(config), config.num_layers - 1
    problem = Problem(make_batch(config.vocab_size))
    engine = Sweep(model, problem)
    kinds = (edits.remove_blocks, edits.remove_attention, edits.remove_mlps)
    found = first_order.Gradients(engine).run([kind([last]) for kind in kinds]).loss

    def loss(x):
        logp = jax.nn.log_softmax(model.head(x.reshape(-1, config.model_dim)))
        targets = problem.batch.targets.reshape(-1)
        picked = logp[np.arange(len(targets)), targets].reshape(ROWS, LENGTH)
        return -jnp.where(problem.batch.scored, picked, 0).sum()

    x, out = engine.trunk[last], engine.trunk[last + 1]
    block = model.block(last)
    heads = block.attn.heads(block.qkv(x, engine.rope), None)
    changed = (x, block.finish(x, None), block.finish(x, block.attn.project(heads), mlp=False))
    g = jax.grad(loss)(out)
    expected = [(g * (edited - out)).sum(axis=(0, 2, 3)) for edited in changed]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_edits_add_up_and_repeat(config, engine):
    gates = tuple(np.linspace(-1, 1, config.num_heads))
    singles = [
        edits.keep_keys({(0, 1): 4}),
        edits.keep_keys({(0, 0): 20}),
        edits.remove_mlps([1]),
        edits.head_mask(np.stack([np.ones_like(gates), np.ones_like(gates), gates])),
        edits.baseline(),
    ]
    both = edits.Configuration(
        (*edits.keep_keys({(0, 0): 20, (0, 1): 4}).edits, *singles[2].edits, *singles[3].edits)
    )
    found = first_order.Gradients(engine, draws=3).run([*singles, both, singles[0]])
    np.testing.assert_allclose(found.loss[:5].sum(axis=0), found.loss[5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.drawn[:5].sum(axis=0), found.drawn[5], rtol=1e-4, atol=1e-4)
    assert (found.loss[4] == 0).all()
    assert (found.loss[0] == found.loss[6]).all()


def test_mean_null(config):
    means = np.random.default_rng(0).normal(size=(config.num_heads, config.head_dim))
    problem = dataclasses.replace(
        make_problem(config), mean_output=lambda layer: means.astype(np.float32)
    )
    gradients = first_order.Gradients(Sweep(tiny.random_model(config), problem))
    towards = [edits.silence_heads([(2, 1)], config.num_heads, null) for null in ("zero", "mean")]
    zero, mean = gradients.run(towards).loss
    # The null's own share is linear in it: at twice the mean it counts twice.
    doubled = dataclasses.replace(problem, mean_output=lambda layer: 2 * means.astype(np.float32))
    engine = Sweep(tiny.random_model(config), doubled)
    twice = first_order.Gradients(engine).run(towards[1:]).loss[0]
    np.testing.assert_allclose(twice - zero, 2 * (mean - zero), rtol=1e-4, atol=1e-4)
    assert np.abs(mean - zero).max() > 1e-2


# The second-order term


def taylor_terms(engine: Sweep, configurations) -> tuple[np.ndarray, np.ndarray]:
    """What the estimators estimate, for edits of one head's keys in the last layer; [C, B] each.

    With p the model's distribution and δz the logits' derivative along the edit, the linear term
    Σ (E_p(δz) - δz_target) and the Gauss-Newton term ½ Σ Var_p(δz) over the scored tokens. Only
    W_O, the rest of the block, the final norm and the unembedding follow there.
    """
    config, model, batch = engine.model.config, engine.model, engine.problem.batch
    last, group = config.num_layers - 1, config.group_size
    block, x = model.block(last), engine.trunk[last]
    qkv = block.qkv(x, engine.rope)
    heads = block.attn.heads(qkv, engine.prefix(last))

    def logits(heads):
        out = block.finish(x, block.attn.project(heads))
        return model.head(out.reshape(-1, config.model_dim)).reshape(*batch.inputs.shape, -1)

    p = scipy.special.softmax(np.float64(logits(heads)), axis=-1)
    linear, half_variance = [], []
    for configuration in configurations:
        ((head, count),) = configuration.edits[0][1].kept_keys
        chosen = engine.problem.head_prefix(last, head, count)
        new = np.array(heads)
        for b in range(len(batch.inputs)):
            q = qkv.q[0, b, :, head * group : (head + 1) * group]
            own = qkv.k[0, b, :, head], qkv.v[0, b, :, head]
            new[0, b, :, head * group : (head + 1) * group] = direct_outputs(
                *map(np.float64, (q, *own)), *chosen
            )
        dz = np.float64(jax.jvp(logits, (heads,), (jnp.asarray(new) - heads,))[1])
        mean = (p * dz).sum(axis=-1)
        at_target = np.take_along_axis(dz, batch.targets[..., None], axis=-1)[..., 0]
        linear.append(((mean - at_target) * batch.scored).sum(axis=-1))
        variance = (p * dz**2).sum(axis=-1) - mean**2
        half_variance.append(0.5 * (variance * batch.scored).sum(axis=-1))
    return np.stack(linear), np.stack(half_variance)


@pytest.fixture(scope="module")
def curvature(config, engine):
    """Edits of the last layer and their Gauss-Newton terms."""
    chosen = [edits.keep_keys({(config.num_layers - 1, 0): n}) for n in COUNTS]
    return chosen, taylor_terms(engine, chosen)[1]


def test_fisher_term_is_the_gauss_newton_term(engine, curvature):
    chosen, exact = curvature
    draws = 4000
    found = first_order.Gradients(engine, draws=draws, seed=1).run(chosen)
    # The relative error of a mean of squares of (nearly normal) numbers is √(2/E): 2.2 %.
    np.testing.assert_allclose(found.fisher, exact, rtol=4.5 * np.sqrt(2 / draws))
    assert exact.min() > 1e-4


def test_fisher_term_is_unbiased(engine, curvature):
    """Few draws, many seeds: the mean over seeds stays within its standard error of the truth."""
    chosen, exact = curvature
    seeds = 100
    runs = np.stack(
        [
            first_order.Gradients(engine, draws=2, seed=seed).run(chosen).fisher
            for seed in range(seeds)
        ]
    )
    error = runs.std(axis=0, ddof=1) / np.sqrt(seeds)
    assert (np.abs(runs.mean(axis=0) - exact) < 4 * error).all()
    assert (error < 0.25 * exact).all()


def test_pooled_term_is_nearer_to_the_truth(engine, curvature):
    """At the last layer positions do not mix, so that nothing but noise is left out."""
    chosen, exact = curvature
    runs = [first_order.Gradients(engine, draws=8, seed=seed).run(chosen) for seed in range(40)]
    errors = [
        np.stack([term(run) for run in runs]) / exact - 1
        for term in (lambda run: run.fisher, lambda run: run.pooled_fisher)
    ]
    spread = [np.sqrt(np.mean(np.square(error))) for error in errors]
    print("relative errors", spread)
    assert spread[1] < 0.8 * spread[0]
    assert np.abs(errors[1].mean(axis=0)).max() < 0.3


def test_each_draw_alone_is_uniform():
    """Of 3 draws of 30,000 tokens each: every tenth as often, and one in every third per token."""
    uniforms = fisher.stratified_uniforms(3, 30000, seed=0)
    for draw in uniforms:
        counts = np.bincount((10 * draw).astype(int), minlength=10)
        assert np.abs(counts - 3000).max() < 5 * np.sqrt(2700)
    assert (np.sort((3 * uniforms).astype(int), axis=0) == [[0], [1], [2]]).all()


def test_labels_are_drawn_from_the_distribution():
    """Each label's frequency over all draws, and independence of each draw from token to token."""
    config = tiny.llama_config(vocab_size=7)
    model = tiny.random_model(config)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, config.model_dim)).astype(np.float32))
    draws = 20000
    uniforms = fisher.stratified_uniforms(draws, 5, seed=3)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    p = scipy.special.softmax(np.float64(model.head(x)), axis=-1)
    labels = np.asarray(fisher._invert(jnp.asarray(p.astype(np.float32)), jnp.asarray(uniforms)))
    counts = np.stack([np.bincount(labels[:, t], minlength=7) for t in range(5)])
    np.testing.assert_allclose(counts / draws, p, atol=2e-4)  # stratified: 1 / draws, not 1/√
    correlation = np.corrcoef(uniforms[:, :2].T)[0, 1]
    assert abs(correlation) < 4 / np.sqrt(draws)


# What cannot be estimated


def test_streamed_weights_give_the_same_estimates(tmp_path):
    config = tiny.llama_config(num_layers=3)
    model, problem = tiny.random_model(config), make_problem(config)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", config, model.to_params())
    chosen = [*kept_everywhere(config), edits.remove_mlps([1]), edits.remove_attention([0])]
    resident, streamed = (
        first_order.Gradients(Sweep(weights, problem), draws=2).run(chosen)
        for weights in (model, checkpoint.stream(jnp.float32))
    )
    np.testing.assert_array_equal(streamed.loss, resident.loss)
    np.testing.assert_array_equal(streamed.drawn, resident.drawn)
    assert np.abs(resident.loss).min() > 0


def test_refusals(engine):
    mixed = edits.LayerEdit(kept_keys=((0, 4),), remove_mlp=True)
    with pytest.raises(UserError, match="several ways"):
        first_order.Gradients(engine).run([edits.Configuration(((1, mixed),))])
    with pytest.raises(UserError, match="layers are 0 to 2"):
        first_order.Gradients(engine).run([edits.remove_blocks([3])])
    with pytest.raises(UserError, match="at least 0"):
        first_order.Gradients(engine, draws=-1)
