"""Removing layers: against PyTorch with the layers deleted, counts, tables, saved models."""

import copy
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import convert
from convert.pruned import save_pruned
from jaxablate import pruning, removal_figures, removals, results
from jaxablate.checkpoint import open_checkpoint
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.errors import UserError
from jaxablate.model import Transformer
from jaxablate.plan import plan_sweep
from jaxablate.removal_scores import RemovalScores, window_token_counts
from jaxablate.removal_study import Study, run_study
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.text import Tokenizer, make_document

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

OPTIONS = SweepOptions(chunk_tokens=64)


class Bytes(Tokenizer):
    """A tokenizer of 61 ids without BOS: characters modulo 61."""

    def __init__(self):
        pass  # no files behind it

    def leading_bos(self, policy):
        return None

    def encode_start(self, text, num_tokens):
        return np.asarray([ord(c) % 61 for c in text[:num_tokens]], np.int32)


def text_batches(tokens=100, seq_len=16, stride=16, windows_per_batch=3, characters=400):
    rng = np.random.default_rng(0)
    document = make_document("text", "".join(chr(97 + i) for i in rng.integers(0, 26, characters)))
    return removals.window_batches(
        [document],
        Bytes(),
        max_tokens=tokens,
        seq_len=seq_len,
        stride=stride,
        bos="never",
        windows_per_batch=windows_per_batch,
        vocab_size=61,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Both families with six layers: name -> (our model, PyTorch's, checkpoint)."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    llama = tiny.llama_config(num_layers=6)
    neox = tiny.neox_config(num_layers=6, num_heads=3, num_kv_heads=3)
    for name, config in (("llama", llama), ("neox", neox)):
        params = jax.tree.map(np.asarray, tiny.random_params(config, 2, scale=0.2))
        checkpoint = save_checkpoint(root / name, config, params)
        convert.export_hf(config, params, root / f"{name}-hf")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(root / f"{name}-hf").eval()
        made[name] = (Transformer.from_params(config, params), theirs, checkpoint)
    return made


def without_layers(theirs, layers):
    """PyTorch's model with these entries of its ModuleList deleted."""
    pruned = copy.deepcopy(theirs)
    body = pruned.model if hasattr(pruned, "model") else pruned.gpt_neox
    kept = [block for i, block in enumerate(body.layers) if i not in layers]
    body.layers = torch.nn.ModuleList(kept)
    body.config.num_hidden_layers = len(kept)
    return pruned


def torch_nll(model, batches):
    """Total NLL and tokens over the same windows."""
    total, tokens = 0.0, 0
    for batch in batches:
        there = len(batch.token_counts)
        inputs = torch.tensor(batch.batch.inputs[:there].astype(np.int64))
        targets = torch.tensor(batch.batch.targets[:there].astype(np.int64))
        with torch.no_grad():
            logits = model(inputs, use_cache=False).logits.double()
        nll = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        scored = torch.tensor(batch.batch.scored[:there])
        total += float(nll[scored].sum())
        tokens += int(scored.sum())
    return total, tokens


def make_study(model, **changes):
    fields = {
        "config": model.config,
        "digest": "weights",
        "dtype": "float32",
        "batches": text_batches(),
        "alphas": [0.1, 0.5, 0.4, 0.2, 0.6, 0.3],
        "null": 0.2,
        "strategy": removals.StrategySettings(kmax=3, boundary=1, draws=3),
        "constants": {
            "seq_len": 16,
            "stride": 16,
            "bos": "never",
            "text_tokens": 100,
            "alpha_matrix": "q",
            "alpha_estimator": "rank_slope",
            "alpha_fraction": 0.5,
        },
    }
    return Study(**(fields | changes))


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_every_set_equals_pytorch_with_those_layers_deleted(models, family, tmp_path):
    model, theirs, _ = models[family]
    study = make_study(model, exhaustive=True)
    outcome = run_study(study, tmp_path, lambda: model, OPTIONS)
    assert len(outcome.scores.sets) == 1 + pruning.count_sets(6, 3) == 42
    for layers in outcome.scores.sets:
        total, tokens = torch_nll(without_layers(theirs, layers), study.batches)
        assert tokens == outcome.scores.tokens == 100
        ours = math.exp(outcome.scores.cost(layers).log_ppl)
        assert ours == pytest.approx(math.exp(total / tokens), rel=1e-5), layers


@pytest.mark.parametrize("family", ["llama", "neox"])
@pytest.mark.parametrize("component", ["attention", "mlp"])
def test_half_a_layer_equals_pytorch_with_that_part_silenced(models, family, component, tmp_path):
    model, theirs, _ = models[family]
    study = make_study(model, component=component)
    outcome = run_study(study, tmp_path, lambda: model, OPTIONS)
    for layers in [(), (0,), (5,), (1, 4), (2, 3, 4)]:
        if layers not in outcome.scores.sets:
            continue
        pruned = copy.deepcopy(theirs)
        body = pruned.model if hasattr(pruned, "model") else pruned.gpt_neox
        for layer in layers:
            block = body.layers[layer]
            if component == "mlp":
                block.mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
            else:
                attention = getattr(block, "self_attn", None) or block.attention
                attention.register_forward_hook(
                    lambda module, args, out: (torch.zeros_like(out[0]), *out[1:])
                )
        total, tokens = torch_nll(pruned, study.batches)
        ours = outcome.scores.cost(layers).log_ppl
        assert math.exp(ours) == pytest.approx(math.exp(total / tokens), rel=1e-5), layers


def test_793_sets_cost_1585_block_evaluations():
    sets = removals.sweep_sets(12, [], 4)
    assert len(sets) == 794  # the whole model among them
    plan = plan_sweep([removals.removal(s, "block") for s in sets], 12, 10**9)
    assert plan.block_evaluations == 1585
    alone = sum(12 - len(layers) for layers in pruning.all_sets(12, 4))
    assert alone == 6732
    assert plan.naive_block_evaluations == alone + 12


def test_the_engine_counts_what_was_planned():
    config = tiny.neox_config(num_layers=6)
    engine = Sweep(tiny.random_model(config), _problem(text_batches(40)[0]), OPTIONS)
    configurations = [removals.removal(s, "block") for s in removals.sweep_sets(6, [], 3)]
    engine.run(configurations)
    assert engine.block_evaluations == plan_sweep(configurations, 6, 10**9).block_evaluations


def _problem(batch):
    from jaxablate.problem import Problem

    return Problem(batch.batch)


def test_batches_and_strides_change_no_perplexity(models, tmp_path):
    model, theirs, _ = models["neox"]
    reference = None
    few = removals.StrategySettings(kmax=1, boundary=1, strategies=("zone_aware", "last_n"))
    for windows_per_batch in (2, 7):
        batches = text_batches(windows_per_batch=windows_per_batch)
        study = make_study(model, batches=batches, strategy=few)
        out = tmp_path / str(windows_per_batch)
        scores = run_study(study, out, lambda: model, OPTIONS).scores
        values = [scores.cost(layers).log_ppl for layers in scores.sets]
        reference = values if reference is None else reference
        np.testing.assert_allclose(values, reference, rtol=1e-6)
        assert scores.units.values.shape == (len(values), 7)
    overlapping = text_batches(stride=5)
    constants = make_study(model).constants | {"stride": 5}
    study = make_study(model, batches=overlapping, constants=constants, strategy=few)
    scores = run_study(study, tmp_path / "overlap", lambda: model, OPTIONS).scores
    total, tokens = torch_nll(theirs, overlapping)
    assert scores.tokens == tokens == 100
    assert scores.log_ppl == pytest.approx(total / tokens, rel=1e-6)
    counts = [n for batch in overlapping for n in batch.token_counts]
    np.testing.assert_array_equal(scores.units.weights, counts)


def test_window_counts_are_read_back_from_rows():
    for stride in (1, 5, 16):
        batches = text_batches(tokens=61, stride=stride)
        for batch in batches:
            row = {
                "block_nll": [0.0] * len(batch.token_counts),
                "stride": stride,
                "seq_len": 16,
                "first_window": batch.first,
                "scored_tokens": sum(batch.token_counts),
            }
            assert tuple(window_token_counts(row)) == batch.token_counts
        assert sum(sum(batch.token_counts) for batch in batches) == 61
        # The last batch is padded: another shape would be compiled once more for every block.
        assert {batch.batch.inputs.shape for batch in batches} == {(3, 16)}
        assert batches[-1].batch.scored[len(batches[-1].token_counts) :].sum() == 0


def test_tables_by_definition(models, tmp_path):
    model, _, _ = models["llama"]
    # Nine windows: fewer than eight give no interval.
    study = make_study(model, exhaustive=True, batches=text_batches(tokens=130))
    outcome = run_study(study, tmp_path, lambda: model, OPTIONS)
    full = math.exp(outcome.scores.log_ppl)
    ppl = {s: math.exp(outcome.scores.cost(s).log_ppl) for s in outcome.scores.sets}
    table = outcome.strategies.set_index(["strategy", "k"])
    assert table.loc[("zone_aware", 2), "layers"] == "1,4"
    assert table.loc[("last_n", 2), "layers"] == "4,5"
    assert table.loc[("last_n_keep_final", 2), "layers"] == "3,4"
    assert table.loc[("worst", 2), "layers"] == "0,3"
    for k in (1, 2, 3):
        of_size = {s: p for s, p in ppl.items() if len(s) == k}
        assert table.loc[("worst_true", k), "ppl"] == pytest.approx(max(of_size.values()))
        assert table.loc[("best_true", k), "ppl"] == pytest.approx(min(of_size.values()))
        drawn = [ppl[one.layers] for one in outcome.chosen
                 if (one.strategy, one.k) == ("random_all", k)]  # fmt: skip
        assert len(drawn) == 3
        random = table.loc[("random_all", k)]
        assert random["delta"] == pytest.approx(np.median(drawn) - full, rel=1e-6)
        assert random["delta_low"] == pytest.approx(min(drawn) - full, rel=1e-6)
        assert random["delta_high"] == pytest.approx(max(drawn) - full, rel=1e-6)
    zone = table.loc[("zone_aware", 3)]
    assert zone["delta"] == pytest.approx(ppl[1, 2, 4] - full, rel=1e-9)
    assert zone["delta_log"] == pytest.approx(math.log(ppl[1, 2, 4] / full), abs=1e-9)
    assert zone["delta_low"] <= zone["delta"] <= zone["delta_high"]
    for row in outcome.advantage.to_dict("records"):
        last, aware = (table.loc[(name, row["k"]), "delta"] for name in ("last_n", "zone_aware"))
        if last > 0 and aware > 0:
            assert row["value"] == pytest.approx(last / aware, rel=1e-9)
        else:
            assert math.isnan(row["value"])
            assert "both must be positive" in row["note"]
    assert outcome.singles["delta"].tolist() == pytest.approx([ppl[i,] - full for i in range(6)])
    paths = removal_figures.draw(study, outcome, tmp_path, "tiny")
    assert {path.stem for path in paths} == {
        "alpha_profile", "pruning_impact", "advantage", "pruning", "alpha_against_impact"
    }  # fmt: skip


def test_rows_say_what_was_done_and_a_second_run_computes_nothing(models, tmp_path):
    model, _, _ = models["neox"]
    study = make_study(model)
    first = run_study(study, tmp_path, lambda: model, OPTIONS)
    rows = results.read_rows(tmp_path)
    assert set(rows["component"]) == {"block"}
    assert set(rows["seq_len"]) == {16}
    whole = rows[rows["layers"] == ""]
    assert whole["configuration"].tolist() == ["", "", ""]
    assert whole["question"].tolist() == ["windows 0-2", "windows 3-5", "windows 6-6"]
    last = rows[rows["layers"] == "4,5"].iloc[0]
    assert "last_n" in last["strategies"].split()
    assert last["configuration"] == "L4:block;L5:block"

    def never():
        raise AssertionError("the model was loaded")

    again = run_study(study, tmp_path, never, OPTIONS)
    assert again.strategies.equals(first.strategies)


def test_calibrated_order_takes_the_cheapest_interior_layers(models, tmp_path):
    model, _, _ = models["llama"]
    strategy = removals.StrategySettings(kmax=2, boundary=1, draws=2, order="calibrated")
    outcome = run_study(make_study(model, strategy=strategy), tmp_path, lambda: model, OPTIONS)
    costs = outcome.singles["delta"].tolist()
    cheapest = sorted(range(1, 5), key=lambda layer: costs[layer])
    dearest = sorted(range(6), key=lambda layer: -costs[layer])
    sets = {(one.strategy, one.k): one.layers for one in outcome.chosen}
    assert sets["zone_aware", 2] == tuple(sorted(cheapest[:2]))
    assert sets["worst", 2] == tuple(sorted(dearest[:2]))
    # What calibration computed is taken over, not computed again, and is the same.
    other = make_study(model, strategy=dataclasses.replace(strategy, order="highest_alpha"))
    direct = run_study(other, tmp_path / "direct", lambda: model, OPTIONS)
    assert direct.singles["delta_log"].tolist() == pytest.approx(
        outcome.singles["delta_log"].tolist(), abs=1e-6
    )


def test_shards_join_to_the_same_rows(models, tmp_path):
    from jaxablate import merging

    model, _, _ = models["neox"]
    study = make_study(model)
    whole = run_study(study, tmp_path / "whole", lambda: model, OPTIONS)
    for i in range(2):
        shard = results.parse_shard(f"{i}/2", {})
        part = run_study(study, tmp_path / f"{i}", lambda: model, OPTIONS, shard=shard)
        assert part is None
    merging.merge([str(tmp_path / f"{i}") for i in range(2)], str(tmp_path / "joined"))
    joined = RemovalScores(results.read_rows(tmp_path / "joined"))
    assert joined.deltas() == whole.scores.deltas()


def test_exhaustive_beyond_the_limit_is_refused_with_the_numbers(models, tmp_path):
    model, _, _ = models["llama"]
    study = make_study(model, exhaustive=True)
    with pytest.raises(UserError, match=r"41 sets of up to 3 of 6 layers over 100 tokens .*TFLOP"):
        run_study(study, tmp_path, lambda: model, OPTIONS, max_teraflop=1e-9)
    assert not (tmp_path / "rows.parquet").exists()


def test_k_too_large_is_refused_with_the_numbers(models, tmp_path):
    model, _, _ = models["llama"]
    strategy = removals.StrategySettings(kmax=5, boundary=1)
    with pytest.raises(UserError, match=r"k = 5 .* 4 interior layers of 6 \(boundary 1\)"):
        run_study(make_study(model, strategy=strategy), tmp_path, lambda: model, OPTIONS)
    with pytest.raises(UserError, match="kmax is 0"):
        removals.StrategySettings(kmax=0)
    with pytest.raises(UserError, match="unknown strategies best"):
        removals.StrategySettings(strategies=("best",))
    with pytest.raises(UserError, match="399 tokens to score and 500 were asked for"):
        text_batches(tokens=500)
    with pytest.raises(UserError, match="component is 'head'"):
        removals.removal((1,), "head")


@pytest.mark.parametrize(
    ("family", "component"),
    [("llama", "block"), ("neox", "block"), ("llama", "attention"), ("neox", "mlp")],
)
def test_a_saved_pruned_model_gives_our_logits_in_transformers(models, family, component, tmp_path):
    model, _, checkpoint = models[family]
    saved, exported = save_pruned(checkpoint, (1, 4), component, tmp_path / "pruned")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    assert theirs.config.num_hidden_layers == (4 if component == "block" else 6)
    batch = text_batches(40)[0]
    engine = Sweep(model, _problem(batch), OPTIONS)
    nll = engine.run([removals.removal((1, 4), component)])[0]
    total, tokens = torch_nll(theirs, [batch])
    assert float(nll.astype(np.float64).sum()) == pytest.approx(total, rel=1e-6)
    tokens = batch.batch.inputs
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    restored = open_checkpoint(saved).restore()
    ours = np.asarray(jax.jit(restored.__call__)(jnp.asarray(tokens)))
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    with pytest.raises(UserError, match="exists already"):
        save_pruned(checkpoint, (1,), component, tmp_path / "pruned")


def test_nothing_or_everything_cannot_be_saved(models, tmp_path):
    checkpoint = models["llama"][2]
    with pytest.raises(UserError, match="no model is left"):
        save_pruned(checkpoint, range(6), "block", tmp_path)
    for wrong in ([], [6], [-1]):
        with pytest.raises(UserError, match="0 to 5"):
            save_pruned(checkpoint, wrong, "block", tmp_path)


def test_parse_set():
    chosen = {("zone_aware", 2): (3, 4), ("last_n", 2): (4, 5)}
    assert removals.parse_set("zone_aware:2", 6, chosen) == (3, 4)
    assert removals.parse_set("5, 1,1", 6, chosen) == (1, 5)
    with pytest.raises(UserError, match="layer 6 is not in this model"):
        removals.parse_set("6", 6, chosen)
    with pytest.raises(UserError, match=r"zone_aware:2, last_n:2"):
        removals.parse_set("zone_aware:3", 6, chosen)


@pytest.mark.slow
def test_three_sets_of_smollm2_equal_pytorch(tmp_path):
    """SmolLM2-135M on real text, layers deleted from PyTorch's ModuleList."""
    from jaxablate.text import load_tokenizer, read_documents

    try:
        checkpoint = convert.resolve("smollm2-135m-instruct")
    except UserError as error:
        pytest.skip(str(error))
    exported = convert.export_hf(checkpoint.config, checkpoint, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    batches = removals.window_batches(
        read_documents("pydoc:types"),
        load_tokenizer(checkpoint.tokenizer_dir),
        max_tokens=250,
        seq_len=128,
        stride=128,
        bos="auto",
        windows_per_batch=2,
        vocab_size=checkpoint.config.vocab_size,
    )
    engine = Sweep(checkpoint.restore(), _problem(batches[0]), SweepOptions())
    sets = [(), (14,), (3, 20), (7, 8, 9, 28)]
    nll = engine.run([removals.removal(layers, "block") for layers in sets])
    for layers, row in zip(sets, nll):
        total, tokens = torch_nll(without_layers(theirs, layers), batches)
        ours = math.exp(row.astype(np.float64).sum() / tokens)
        assert ours == pytest.approx(math.exp(total / tokens), rel=1e-4), layers


def test_operations_by_hand():
    """Blocks of all window rows, the padding too; scores of the scored tokens only."""
    config = tiny.llama_config(num_layers=6)
    batches = text_batches(40, windows_per_batch=2)
    configurations = [removals.removal(layers, "block") for layers in [(), (5,), (4, 5)]]
    plan = plan_sweep(configurations, 6, 10**9)
    assert plan.block_evaluations == 6  # all three are prefixes of the whole model
    attention = 24 * (6 + 2 + 2 + 6) * 8 + 2 * 6 * 8 * 16  # q, k, v, o; scores and values
    block = 2 * (attention + 3 * 24 * 40)
    expected = 6 * 4 * 16 * block + 3 * 40 * 2 * 24 * 61
    assert removals.sweep_operations(config, plan, batches) == pytest.approx(expected)
