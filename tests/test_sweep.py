"""The engine: shared work gives every configuration what it would have got on its own."""

import itertools

import chex
import definition
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.edits import (
    Configuration,
    LayerEdit,
    baseline,
    head_mask,
    keep_keys,
    parse_heads,
    remove_attention,
    remove_blocks,
    remove_mlps,
    silence_heads,
)
from jaxablate.errors import UserError
from jaxablate.model import Transformer
from jaxablate.plan import plan_sweep, split_waves
from jaxablate.problem import Problem
from jaxablate.sweep import NonFiniteError, Sweep, SweepOptions, sweep
from jaxablate.windows import Batch

PREFIX = 9  # keys per head


def random_batch(config, lengths=(7, 5), start=PREFIX + 3, seed=0) -> Batch:
    """Padded rows; all but the first target are scored."""
    rng = np.random.default_rng(seed)
    shape = len(lengths), max(lengths)
    inside = np.arange(shape[1]) < np.asarray(lengths)[:, None]
    inputs, targets = rng.integers(0, config.vocab_size, (2, *shape)).astype(np.int32)
    return Batch(
        inputs=np.where(inside, inputs, 0),
        positions=np.broadcast_to(start + np.arange(shape[1], dtype=np.int32), shape).copy(),
        targets=np.where(inside, targets, 0),
        scored=inside & (np.arange(shape[1]) > 0),
        lengths=np.asarray(lengths, np.int32),
    )


def prefix_problem(config, lengths=(7, 5), seed=0) -> Problem:
    """Random prefix keys with a bias; what a head keeps when re-fitted is random, too."""
    rng = np.random.default_rng(seed)
    layers, heads, size = config.num_layers, config.num_kv_heads, config.head_dim
    pool = rng.normal(size=(2, layers, heads, 20, size)).astype(np.float32)
    bias = rng.normal(size=(layers, heads, 20)).astype(np.float32)
    bias[:, 0, PREFIX - 2 : PREFIX] = -np.inf  # the first head is two keys shorter than the others
    means = rng.normal(size=(layers, config.num_heads, size)).astype(np.float32)
    prefix = [
        LayerPrefix(*(jnp.asarray(a[layer, :, :PREFIX]) for a in (*pool, bias)))
        for layer in range(layers)
    ]

    def head_prefix(layer, kv_head, count):
        last = 20 - count
        return tuple(a[layer, kv_head, last:] for a in (*pool, bias))

    return Problem(random_batch(config, lengths), prefix, head_prefix, lambda layer: means[layer])


CONFIGS = {
    "llama": tiny.llama_config(num_layers=3, qkv_bias=True, qk_norm=False),
    "neox": tiny.neox_config(num_layers=3),
}
SCALE = 0.2  # float32 and float64 then agree to 1e-7 of the NLL


@pytest.fixture(scope="module", params=CONFIGS)
def setting(request):
    """(config, params, model, problem with a prefix)"""
    config = CONFIGS[request.param]
    params = tiny.random_params(config, seed=1, scale=SCALE)
    return config, params, Transformer.from_params(config, params), prefix_problem(config)


@pytest.fixture(scope="module")
def llama():
    config = CONFIGS["llama"]
    params = tiny.random_params(config, seed=1, scale=SCALE)
    return config, params, Transformer.from_params(config, params), prefix_problem(config)


def same(found, expected, tolerance=1e-6) -> None:
    """Equal to `tolerance` of the largest NLL."""
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"they differ by {error:.2e} of the NLL"


def states_at_once(problem, states) -> SweepOptions:
    return SweepOptions(chunk_tokens=states * problem.batch.inputs.size)


def thirteen(config) -> list[Configuration]:
    """Every kind of edit, alone and together, in no order, with the baseline and a repetition."""
    heads = config.num_heads
    last_kv = config.num_kv_heads - 1
    fractions = np.random.default_rng(5).uniform(-0.5, 1.5, (config.num_layers, heads))
    several = Configuration(
        (
            (0, LayerEdit(head_gates=tuple(fractions[0]), null="mean", kept_keys=((1, 6),))),
            (1, LayerEdit(remove_attention=True)),
            (2, LayerEdit(kept_keys=((0, 4), (1, 12)), remove_mlp=True)),
        )
    )
    return [
        remove_blocks([1]),
        keep_keys({(1, last_kv): 3}),
        silence_heads([(0, 1), (2, heads - 1)], heads),
        baseline(),
        keep_keys({(0, 0): 20, (1, 1): 2}),
        several,
        remove_mlps([0, 2]),
        head_mask(fractions),
        keep_keys({(1, last_kv): 3}),
        remove_attention([1]),
        silence_heads([(1, 0)], heads, null="mean"),
        keep_keys({(1, 0): 15}),
        remove_blocks([0, 1, 2]),
    ]


@pytest.fixture(scope="module")
def whole(setting):
    """(baseline, configurations) through chunks of up to four states in one wave."""
    config, _, model, problem = setting
    return sweep(model, problem, thirteen(config), states_at_once(problem, 4))


# What each configuration gets


def test_every_configuration_equals_its_own_full_forward_by_definition(setting, whole):
    config, params, _, problem = setting
    found_baseline, found = whole
    same(found_baseline, definition.token_nll(config, params, problem, baseline()))
    for configuration, nll in zip(thirteen(config), found):
        expected = definition.token_nll(config, params, problem, configuration)
        same(nll, expected)
    distinct = np.unique(found.round(4), axis=0)
    assert len(distinct) == len({c.key for c in thirteen(config)}) == 12


def test_every_configuration_equals_its_run_alone(llama):
    config, _, model, problem = llama
    together = sweep(model, problem, thirteen(config), states_at_once(problem, 4))[1]
    for configuration, nll in zip(thirteen(config), together):
        same(Sweep(model, problem, states_at_once(problem, 4)).run([configuration])[0], nll)


@pytest.mark.parametrize("states", [1, 4, 13, 64])
def test_the_size_of_chunks_changes_nothing(llama, states):
    config, _, model, problem = llama
    expected = sweep(model, problem, thirteen(config), states_at_once(problem, 4))[1]
    same(sweep(model, problem, thirteen(config), states_at_once(problem, states))[1], expected)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_smaller_memory_budget_makes_more_waves_and_changes_nothing(llama, most):
    config, _, model, problem = llama
    options = states_at_once(problem, 4)
    expected = sweep(model, problem, thirteen(config), options)[1]
    engine = Sweep(model, problem, options)
    state = engine.trunk[0].nbytes
    budget = options.memory_budget - state * (engine.max_states - most)
    small = Sweep(model, problem, SweepOptions(options.chunk_tokens, memory_budget=budget))
    assert small.max_states == most
    plan = small.plan(thirteen(config))
    assert plan.waves == -(-12 // most)
    same(small.run(thirteen(config)), expected)
    assert small.block_evaluations == plan.block_evaluations


def test_a_chunk_that_the_budget_has_no_room_for_is_made_smaller(llama):
    config, _, model, problem = llama
    expected = sweep(model, problem, thirteen(config), states_at_once(problem, 4))[1]
    size = problem.batch.inputs.size
    enough = Sweep(model, problem, SweepOptions(64 * size, memory_budget=1 << 40))
    assert enough.chunk_tokens == 64 * size
    trunk = enough.trunk[0].nbytes * len(enough.trunk)
    budget = trunk + enough._workspace(8 * size) + 3 * enough.trunk[0].nbytes
    tight = Sweep(model, problem, SweepOptions(64 * size, memory_budget=budget))
    assert tight.chunk_tokens == 8 * size
    assert tight.max_states == 3
    same(tight.run(thirteen(config)), expected)


def test_order_and_repetition_of_configurations_change_nothing(llama, whole):
    config, _, model, problem = llama
    configurations = thirteen(config)
    order = [*np.random.default_rng(0).permutation(13).tolist(), 3, 3, 5]
    engine = Sweep(model, problem, states_at_once(problem, 4))
    expected = engine.run(configurations)
    same(engine.run([configurations[i] for i in order]), expected[order])
    # Those that are the same configuration get the same numbers, bit for bit.
    np.testing.assert_array_equal(expected[1], expected[8])
    np.testing.assert_array_equal(expected[3], engine.baseline_nll)
    assert engine.run([]).shape == (0, len(engine.baseline_nll))


def test_gates_that_differ_in_the_last_place_are_two_configurations(llama):
    config, _, model, problem = llama
    ones = np.full((config.num_layers, config.num_heads), 0.5, np.float32)
    a, b = head_mask(ones), head_mask(np.nextafter(ones, 1, dtype=np.float32))
    assert a.key != b.key
    nll = Sweep(model, problem, states_at_once(problem, 4)).run([a, b])
    assert (nll[0] != nll[1]).any()


def test_an_edit_of_nothing_is_the_baseline(llama):
    _, _, model, problem = llama
    nothing = Configuration(((0, LayerEdit()), (1, LayerEdit(remove_mlp=True)), (2, LayerEdit())))
    assert nothing == remove_mlps([1])
    engine = Sweep(model, problem, states_at_once(problem, 4))
    found = engine.run([Configuration(((1, LayerEdit()),)), nothing])
    np.testing.assert_array_equal(found[0], engine.baseline_nll)
    assert engine.block_evaluations == engine.plan([nothing]).block_evaluations == 3 + 2


def test_runs_are_bitwise_equal(setting, whole):
    config, params, _, problem = setting
    again = Transformer.from_params(config, params)
    found = sweep(again, problem, thirteen(config), states_at_once(problem, 4))
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_array_equal(found[1], whole[1])


def test_rows_of_two_lengths_equal_runs_of_their_own(llama):
    config, _, model, problem = llama
    few = [thirteen(config)[i] for i in (0, 2, 11)]
    options = states_at_once(problem, 1)
    both = sweep(model, problem, few, options)[1]
    batch, singles = problem.batch, []
    for row, length in enumerate(batch.lengths):
        fields = ("inputs", "positions", "targets", "scored")
        cut = {name: getattr(batch, name)[row : row + 1, :length] for name in fields}
        alone = Batch(**cut, lengths=batch.lengths[row : row + 1])
        problem_alone = Problem(alone, problem.prefix, problem.head_prefix, problem.mean_output)
        singles.append(sweep(model, problem_alone, few, states_at_once(problem_alone, 1))[1])
    same(both, np.concatenate(singles, axis=1))


def test_streamed_weights_equal_resident_ones(llama, tmp_path):
    from jaxablate.checkpoint_writer import save_checkpoint

    config, params, model, problem = llama
    checkpoint = save_checkpoint(tmp_path / "model", config, jax.tree.map(np.asarray, params))
    few = [thirteen(config)[i] for i in (0, 2, 4, 11)]
    options = states_at_once(problem, 1)
    resident = sweep(model, problem, few, options)
    engine = Sweep(checkpoint.stream(), problem, options)
    np.testing.assert_array_equal(engine.baseline_nll, resident[0])
    np.testing.assert_array_equal(engine.run(few), resident[1])
    # Blocks out of turn: the one that is being read ahead is not the one that is wanted.
    for index in (3, 0):
        np.testing.assert_array_equal(engine.run([few[index]])[0], resident[1][index])


# What it costs


def counted(monkeypatch) -> list[tuple]:
    """Replaces the compiled steps by ones that write down what they are traced for."""
    traced: list[tuple] = []

    def recorder(name, function, **jit_options):
        def record(*arguments, **keywords):
            leaves, structure = jax.tree.flatten((arguments, keywords))
            shapes = [(a.shape, a.dtype) if hasattr(a, "shape") else a for a in leaves]
            traced.append((name, str(shapes), str(structure)))
            return function(*arguments, **keywords)

        return jax.jit(record, **jit_options)

    for name, static in (
        ("plain_step", ()),
        ("attention_step", ()),
        ("edited_step", ("children", "mlp")),
    ):
        original = getattr(steps, name).__wrapped__
        monkeypatch.setattr(steps, name, recorder(name, original, static_argnames=static))
    return traced


def test_one_compilation_per_shape_whatever_the_depth(monkeypatch):
    traced = counted(monkeypatch)
    after = {}
    for depth in (4, 8):
        config = tiny.llama_config(num_layers=depth)
        model = tiny.random_model(config)
        problem = prefix_problem(config)
        singles = [keep_keys({(layer, 1): 3}) for layer in range(4)]
        singles += [remove_mlps([layer]) for layer in range(4)]
        Sweep(model, problem, states_at_once(problem, 2)).run(singles)
        after[depth] = list(traced)
    assert len(set(after[4])) == len(after[4]) > 0
    assert after[8] == after[4]


def test_a_block_is_traced_once_for_all_its_chunks(monkeypatch):
    chex.clear_trace_counter()
    once = chex.assert_max_traces(steps.plain_step.__wrapped__, n=1)
    monkeypatch.setattr(steps, "plain_step", jax.jit(once))
    config = tiny.llama_config(num_layers=6)
    problem = Problem(random_batch(config, start=0))
    singles = [remove_blocks([layer]) for layer in range(6)]
    engine = Sweep(tiny.random_model(config), problem, states_at_once(problem, 1))
    engine.run(singles)
    assert engine.block_evaluations == 6 + 15
    once_more = prefix_problem(config)
    with pytest.raises(AssertionError, match="traced > 1"):
        Sweep(tiny.random_model(config), once_more, states_at_once(once_more, 1))


def test_all_removal_sets_of_up_to_four_of_twelve_layers():
    sets = [remove_blocks(s) for k in range(1, 5) for s in itertools.combinations(range(12), k)]
    plan = plan_sweep(sets, 12, 10**6)
    assert len(sets) == plan.configurations == 793
    assert plan.block_evaluations == 1585
    assert plan.naive_block_evaluations == 6732
    config = tiny.llama_config(num_layers=12, model_dim=8, mlp_dim=8, num_heads=1, num_kv_heads=1)
    params = tiny.random_params(config)
    problem = Problem(random_batch(config, lengths=(4,), start=0))
    engine = Sweep(Transformer.from_params(config, params), problem, states_at_once(problem, 32))
    nll = engine.run(sets)
    assert engine.block_evaluations == 1585
    for index in (0, 11, 300, 792):
        same(nll[index], definition.token_nll(config, params, problem, sets[index]), 1e-5)


_EDITS = [
    LayerEdit(remove_block=True),
    LayerEdit(remove_mlp=True),
    LayerEdit(head_gates=(0.0, 1.0)),
    LayerEdit(kept_keys=((0, 5),)),
]


@given(
    chosen=st.lists(
        st.dictionaries(st.integers(0, 4), st.sampled_from(_EDITS), max_size=4), max_size=12
    )
)
@settings(max_examples=200, deadline=None)
def test_the_plan_counts_distinct_prefixes_of_edits(chosen):
    configurations = [Configuration(tuple(sorted(c.items(), key=lambda e: e[0]))) for c in chosen]
    expected = set()
    for edits in [{}, *chosen]:
        for layer in range(5):
            if edits.get(layer) != _EDITS[0]:
                prefix = tuple((i, edits[i].key) for i in range(layer + 1) if i in edits)
                expected.add((layer, prefix))
    plan = plan_sweep(configurations, 5, 1000)
    assert plan.block_evaluations == len(expected)


@given(order=st.permutations(range(17)), most=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_waves_take_every_configuration_once_and_hold_no_more_than_allowed(order, most):
    waves = split_waves(order, most)
    assert [index for wave in waves for index in wave] == order
    assert max(map(len, waves)) <= most
    assert len(waves) == -(-17 // most)


@pytest.mark.parametrize("states", [1, 4])
def test_progress_counts_up_to_the_plan(llama, states):
    config, _, model, problem = llama
    calls: list[tuple[int, int]] = []
    options = SweepOptions(
        states * problem.batch.inputs.size, on_progress=lambda *counts: calls.append(counts)
    )
    engine = Sweep(model, problem, options)
    assert calls == []  # the baseline is not a part of the configurations' work
    for _ in range(2):
        calls.clear()
        engine.run(thirteen(config))
        total = engine.plan(thirteen(config)).block_evaluations - config.num_layers
        done = [count for count, _ in calls]
        assert {total for _, total in calls} == {total}
        assert done == sorted(set(done))
        assert done[-1] == total


def test_progress_may_stop_a_sweep_which_can_run_again(llama):
    config, _, model, problem = llama
    stop = [True]

    def stopping(done, total):
        if stop[0]:
            raise KeyboardInterrupt

    options = SweepOptions(4 * problem.batch.inputs.size, on_progress=stopping)
    engine = Sweep(model, problem, options)
    with pytest.raises(KeyboardInterrupt):
        engine.run(thirteen(config))
    stop[0] = False
    expected = sweep(model, problem, thirteen(config), states_at_once(problem, 4))[1]
    np.testing.assert_array_equal(engine.run(thirteen(config)), expected)


# What an ablation means


def test_a_head_without_prefix_keys_sees_its_own_sequence(llama):
    config, params, model, problem = llama

    def nothing(layer, kv_head, count):
        empty = np.zeros((0, config.head_dim), np.float32)
        return empty, empty, np.zeros(0, np.float32)

    emptied = Problem(problem.batch, problem.prefix, nothing)
    heads = itertools.product(range(config.num_layers), range(config.num_kv_heads))
    everywhere = keep_keys(dict.fromkeys(heads, 1))
    engine = Sweep(model, emptied, states_at_once(problem, 4))
    found = engine.run([everywhere, keep_keys({(1, 0): 1})])
    alone = Sweep(model, Problem(problem.batch), states_at_once(problem, 4))
    same(found[0], alone.baseline_nll)
    same(found[1], definition.token_nll(config, params, emptied, keep_keys({(1, 0): 1})))
    # The same through the baseline: a head whose prefix is nothing but padding.
    padded = [layer._replace(bias=jnp.full_like(layer.bias, -jnp.inf)) for layer in problem.prefix]
    same(Sweep(model, Problem(problem.batch, padded)).baseline_nll, alone.baseline_nll)


def test_no_token_sees_what_comes_after_it(llama):
    config, _, model, problem = llama
    options = states_at_once(problem, 4)
    before = sweep(model, problem, thirteen(config), options)[1]
    changed = 4  # of the first row; its scored targets stand at 1, 2, … 6
    batch = problem.batch
    inputs = batch.inputs.copy()
    inputs[0, changed] = (inputs[0, changed] + 1) % config.vocab_size
    other = Batch(inputs=inputs, positions=batch.positions, targets=batch.targets,
                  scored=batch.scored, lengths=batch.lengths)  # fmt: skip
    problem = Problem(other, problem.prefix, problem.head_prefix, problem.mean_output)
    after = sweep(model, problem, thirteen(config), options)[1]
    np.testing.assert_array_equal(after[:, : changed - 1], before[:, : changed - 1])
    assert (after[:, changed - 1] != before[:, changed - 1]).all()
    second_row = slice(6, None)
    np.testing.assert_array_equal(after[:, second_row], before[:, second_row])


def test_positions_stay_when_keys_go(llama):
    """Row by row: what follows does not matter, where the sequence stands does."""
    _, _, model, problem = llama
    options = states_at_once(problem, 4)
    evicted = keep_keys({(layer, head): 2 for layer in range(3) for head in range(2)})
    nll = Sweep(model, problem, options).run([evicted])[0]
    batch = problem.batch
    fields = ("inputs", "positions", "targets", "scored")
    shorter = Batch(**{name: getattr(batch, name)[:, :4] for name in fields}, lengths=batch.lengths)
    problem_of = lambda b: Problem(b, problem.prefix, problem.head_prefix)  # noqa: E731
    short = Sweep(model, problem_of(shorter), options).run([evicted])[0]
    same(short, np.concatenate([nll[:3], nll[6:9]]))
    closed_up = Batch(
        **{name: getattr(batch, name) for name in fields if name != "positions"},
        positions=batch.positions - (PREFIX - 2),
        lengths=batch.lengths,
    )
    moved = Sweep(model, problem_of(closed_up), options).run([evicted])[0]
    assert np.abs(moved - nll).max() > 1e-2


def test_rotating_everything_further_changes_nothing():
    """Only distances matter: a text that starts at position 40 is the text that starts at 0."""
    config = tiny.llama_config(num_layers=2)
    model = Transformer.from_params(config, tiny.random_params(config, scale=SCALE))
    found = [
        Sweep(model, Problem(random_batch(config, start=start))).baseline_nll for start in (0, 40)
    ]
    same(*found, tolerance=3e-6)


def test_gate_zero_equals_zeroed_rows_of_the_output_projection(setting):
    config, params, model, problem = setting
    layer, head = 1, 3
    engine = Sweep(model, problem, states_at_once(problem, 4))
    gated = engine.run([silence_heads([(layer, head)], config.num_heads)])[0]
    changed = jax.tree.map(lambda a: a, params)
    kernel = changed["blocks"]["1"]["attn"]["o"]["kernel"]
    changed["blocks"]["1"]["attn"]["o"]["kernel"] = kernel.at[head].set(0)
    zeroed = Sweep(Transformer.from_params(config, changed), problem, states_at_once(problem, 4))
    same(gated, zeroed.baseline_nll)


def test_gates_of_all_heads_equal_deletion(llama):
    config, params, model, problem = llama
    off = (0.0,) * config.num_heads
    gated = Configuration(((1, LayerEdit(head_gates=off, remove_mlp=True)),))
    found = Sweep(model, problem, states_at_once(problem, 4)).run(
        [
            gated,
            remove_blocks([1]),
            Configuration(((1, LayerEdit(head_gates=off)),)),
            remove_attention([1]),
        ]
    )
    same(found[0], found[1])
    same(found[2], found[3])
    shorter = dict(params, blocks={"0": params["blocks"]["0"], "1": params["blocks"]["2"]})
    deleted = Transformer.from_params(config.replace(num_layers=2), shorter)
    prefix = [problem.prefix[0], problem.prefix[2]]
    same(Sweep(deleted, Problem(problem.batch, prefix)).baseline_nll, found[1])


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: silence_heads([(0, 6)], 6), "query head 6 of layer 0: heads are 0 to 5"),
        (lambda: silence_heads([(0, -1)], 6), "query head -1"),
        (lambda: head_mask(np.ones(6)), r"shape \(6,\); it must be \[L, N\]"),
        (lambda: head_mask(np.full((3, 6), np.nan)), "finite"),
        (lambda: keep_keys({(0, 1): 0}), "keep 0 keys; at least 1"),
        (lambda: LayerEdit(null="average"), "'average'; it must be one of"),
        (lambda: LayerEdit(kept_keys=((1, 3), (0, 3))), "in rising order"),
        (lambda: Configuration(((2, LayerEdit()), (1, LayerEdit()))), "in rising order"),
        (lambda: remove_blocks([-1]), r"layers \[-1\]"),
        (lambda: parse_heads("L0H2", 3, 2), "KV heads 0 to 1"),
        (lambda: parse_heads("L3", 3, 2), "layers are 0 to 2"),
        (lambda: parse_heads("H1", 3, 2), "'H1' is no head"),
    ],
)
def test_edits_that_make_no_sense(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        # The model has 6 query heads in 2 KV heads: neither is taken for the other.
        (head_mask(np.zeros((3, 2))), "gates 2 heads; gates are per query head .* has 6"),
        (silence_heads([(0, 1)], 2), "gates 2 heads"),
        (keep_keys({(0, 2): 3}), "KV head 2; the model's KV heads are 0 to 1"),
        (keep_keys({(0, 5): 3}), "KV head 5"),
        (remove_blocks([3]), "layer 3; the model's layers are 0 to 2"),
        (head_mask(np.zeros((4, 6))), "layer 3"),
    ],
)
def test_edits_that_the_model_has_no_place_for(llama, configuration, message):
    _, _, model, problem = llama
    engine = Sweep(model, problem, states_at_once(problem, 4))
    done = engine.block_evaluations
    with pytest.raises(UserError, match=message):
        engine.run([remove_mlps([0]), configuration])
    assert engine.block_evaluations == done


def test_edits_that_the_problem_has_no_data_for(llama):
    _, _, model, problem = llama
    engine = Sweep(model, Problem(problem.batch), states_at_once(problem, 4))
    with pytest.raises(UserError, match="no prefix to keep them of"):
        engine.run([keep_keys({(1, 0): 3})])
    with pytest.raises(UserError, match="mean outputs, which are not given"):
        engine.run([silence_heads([(1, 0)], 6, null="mean")])


def test_problems_that_the_model_cannot_run(llama):
    config, _, model, problem = llama
    batch = problem.batch
    fields = {name: getattr(batch, name) for name in
              ("inputs", "positions", "targets", "scored", "lengths")}  # fmt: skip

    def refused(message, **changes):
        prefix = changes.pop("prefix", problem.prefix)
        with pytest.raises(UserError, match=message):
            Sweep(model, Problem(Batch(**(fields | changes)), prefix))

    refused("no token is scored", scored=np.zeros_like(batch.scored))
    refused("vocabulary is 0 to 60", inputs=batch.inputs + config.vocab_size)
    refused("target ids run from", targets=batch.targets + config.vocab_size)
    refused("prefix has 2 layers; the model has 3", prefix=problem.prefix[:2])


def test_nan_weights_are_named_by_layer(llama):
    config, params, _, problem = llama
    broken = jax.tree.map(lambda a: a, params)
    kernel = broken["blocks"]["1"]["mlp"]["up"]["kernel"]
    broken["blocks"]["1"]["mlp"]["up"]["kernel"] = kernel.at[0, 0].set(jnp.nan)
    with pytest.raises(NonFiniteError, match="not finite after layer 1"):
        Sweep(Transformer.from_params(config, broken), problem)
    broken["embed"]["embedding"] = jnp.full_like(broken["embed"]["embedding"], jnp.inf)
    with pytest.raises(NonFiniteError, match="after the embedding"):
        Sweep(Transformer.from_params(config, broken), problem)


def test_a_configuration_that_overflows_is_named(llama):
    _, _, model, problem = llama
    huge = np.ones((3, 6))
    huge[1, 2] = 3e38
    configurations = [silence_heads([(1, head)], 6) for head in range(3)]
    configurations.insert(2, head_mask(huge))
    engine = Sweep(model, problem, states_at_once(problem, 4))
    with pytest.raises(NonFiniteError, match=r"configuration 'L1:gate=1,1,3e\+38,1,1,1'"):
        engine.run(configurations)
