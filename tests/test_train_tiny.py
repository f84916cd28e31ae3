"""Training a small GPT-NeoX: resumable to the bit, better than n-grams, read by transformers."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import train_tiny
from jaxablate import ngrams, text, training
from jaxablate.checkpoint import open_checkpoint
from jaxablate.errors import UserError

SETTINGS = train_tiny.Settings(
    layers=2, width=32, heads=2, vocab_size=300, context=16, rows=2, steps=6, warmup=2
)


@pytest.fixture(autouse=True, scope="module")
def few_documents():
    """Six short topics, so that the tokenizer and the evaluation take no time."""
    original = text.read_documents
    documents = sorted(original("pydoc"), key=lambda one: len(one.text))[20:26]
    text.read_documents = lambda spec: tuple(documents)
    yield
    text.read_documents = original


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, train_tiny.run(out, SETTINGS)


def weights(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def test_stopped_and_resumed_gives_the_same_bits(trained, tmp_path):
    out, whole = trained
    assert train_tiny.run(tmp_path, SETTINGS, stop_after=3) is None
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step_000003"]
    resumed = train_tiny.run(tmp_path, SETTINGS)
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    assert sorted(whole.directories) == [0, 1, 2, 4, 6]
    for step, directory in whole.directories.items():
        assert weights(directory) == weights(resumed.directories[step])
    ours, theirs = (open_checkpoint(d / "checkpoints/step000006") for d in (out, tmp_path))
    assert ours.digest == theirs.digest
    # A third time nothing is computed, and the numbers are the same.
    again = train_tiny.run(tmp_path, SETTINGS)
    assert again.heldout_nll == whole.heldout_nll


def test_a_state_cut_short_by_a_kill_is_not_used(trained, tmp_path):
    train_tiny.run(tmp_path, SETTINGS, stop_after=3)
    shutil.copytree(tmp_path / "state/step_000003", tmp_path / "state/step_000005")
    (tmp_path / "state/step_000005/done").unlink()
    resumed = train_tiny.run(tmp_path, SETTINGS)
    np.testing.assert_array_equal(resumed.losses, trained[1].losses)


def test_another_seed_gives_other_weights():
    config = SETTINGS.model_config()
    first, again, other = (
        training.init_params(config, seed)["embed"]["embedding"] for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.01


def test_transformers_loads_every_step_and_gives_our_logits(trained):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    out, whole = trained
    tokens = np.random.default_rng(0).integers(0, 300, (2, 12))
    logits = []
    for step, directory in whole.directories.items():
        theirs = transformers.GPTNeoXForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
        model = open_checkpoint(out / "checkpoints" / f"step{step:06d}").restore()
        ours = np.asarray(jax.jit(model.__call__)(jnp.asarray(tokens, jnp.int32)))
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        logits.append(ours)
    assert np.abs(logits[0] - logits[-1]).max() > 1e-3  # training moved them
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole.directories[6])
    ids = tokenizer("if x is None: π")["input_ids"]
    assert tokenizer.decode(ids) == "if x is None: π"
    assert ids == text.load_tokenizer(out / "tokenizer").encode("if x is None: π").tolist()


def test_settings_of_another_run_are_refused(trained):
    out, _ = trained
    with pytest.raises(UserError, match=r"learning_rate 0\.004 then, 0\.1 now.*--out"):
        train_tiny.run(out, train_tiny.dataclasses.replace(SETTINGS, learning_rate=0.1))
    with pytest.raises(UserError, match="head size must be a multiple of 8"):
        train_tiny.run(out, train_tiny.dataclasses.replace(SETTINGS, heads=3))
    with pytest.raises(UserError, match="2 steps with 2 of warm-up"):
        train_tiny.run(out, train_tiny.dataclasses.replace(SETTINGS, steps=2))
    with pytest.raises(UserError, match="0 steps"):
        train_tiny.run(out, train_tiny.dataclasses.replace(SETTINGS, steps=0))


def test_summary_holds_the_baselines(trained):
    out, whole = trained
    summary = json.loads((out / "train.json").read_text())
    assert summary["unigram_entropy"] == whole.unigram_entropy
    assert summary["bigram_nll"] == whole.bigram_nll
    assert (out / "figures" / "training.png").stat().st_size > 10_000
    heldout = text.load_tokenizer(out / "tokenizer").encode((out / "heldout.txt").read_text())
    assert abs(len(heldout) - summary["heldout_tokens"]) <= 20


def test_unigram_entropy_and_bigrams_by_hand():
    assert ngrams.unigram_entropy(np.array([0, 0, 1, 1])) == pytest.approx(math.log(2))
    train, heldout = np.array([0, 1, 0, 1, 0]), np.array([0, 1, 0])
    unigram = {0: 4 / 7, 1: 3 / 7}
    expected = min(
        -(math.log((2 + m * unigram[1]) / (2 + m)) + math.log((2 + m * unigram[0]) / (2 + m))) / 2
        for m in ngrams.PRIORS
    )
    assert ngrams.bigram_nll(train, heldout, 2) == pytest.approx(expected, rel=1e-12)


def test_loss_is_the_mean_nll_by_definition():
    config = SETTINGS.model_config()
    params = training.init_params(config, 3)
    tokens = np.random.default_rng(1).integers(0, 300, (2, 9)).astype(np.int32)
    model = training.Transformer.from_params(config, params)
    logits = np.asarray(model(jnp.asarray(tokens[:, :-1])), np.float64)
    total = 0.0
    for row in range(2):
        for place in range(8):
            scores = logits[row, place]
            top = scores.max()
            total += top + math.log(np.exp(scores - top).sum()) - scores[tokens[row, place + 1]]
    loss = float(jax.jit(training.mean_nll, static_argnums=0)(config, params, tokens))
    assert loss == pytest.approx(total / 16, rel=1e-6)
    # evaluate: the same over a stream, every token after the first predicted once.
    stream = np.concatenate([tokens[0], tokens[1]])[:17]
    pieces = np.stack([stream[0:9], stream[8:17]])
    together = float(jax.jit(training.mean_nll, static_argnums=0)(config, params, pieces))
    got = training.evaluate(config, params, stream, rows=2, length=8)
    assert got == pytest.approx(together, rel=1e-6)


def test_initial_weights_have_their_scales():
    config = train_tiny.Settings().model_config()
    block = training.init_params(config, 0)["blocks"]["3"]
    small, residual = math.sqrt(2 / (5 * 128)), 2 / 12 / math.sqrt(128)
    assert float(block["attn"]["q"]["kernel"].std()) == pytest.approx(small, rel=0.03)
    assert float(block["mlp"]["down"]["kernel"].std()) == pytest.approx(residual, rel=0.03)
    assert float(block["attn"]["o"]["kernel"].std()) == pytest.approx(residual, rel=0.03)
    assert float(np.abs(block["mlp"]["up"]["bias"]).max()) == 0
    assert float(block["attn_norm"]["scale"].min()) == 1


def test_schedule_warms_up_and_clips():
    """The size of AdamW's first updates is the learning rate, whatever the gradient's scale."""
    optimizer = training.make_optimizer(
        learning_rate=0.5, num_steps=10, warmup_steps=5, weight_decay=0.0
    )
    params = {"q": {"kernel": jnp.ones(3)}}
    state = training.TrainState(params, optimizer.init(params))
    sizes = []
    for _ in range(10):
        before = state.params["q"]["kernel"]
        state = training.apply_gradients(optimizer, state, {"q": {"kernel": jnp.full(3, 1e6)}})
        sizes.append(float(jnp.abs(state.params["q"]["kernel"] - before).max()))
    assert sizes[0] == 0
    assert np.argmax(sizes) == 5
    assert max(sizes) == pytest.approx(0.5, rel=1e-3)
    assert sizes[9] < sizes[7] < sizes[5]


def test_gradients_are_clipped_by_their_global_norm():
    """A gradient beyond the limit moves Adam's moments as the same direction of norm 1 does."""
    optimizer = training.make_optimizer(learning_rate=0.1, num_steps=4, warmup_steps=0)
    params = {"q": {"kernel": jnp.ones(2)}}
    start = training.TrainState(params, optimizer.init(params))
    large, unit = (
        training.apply_gradients(optimizer, start, {"q": {"kernel": jnp.asarray([3.0, 4.0]) * s}})
        for s in (1000.0, 0.2)
    )
    for ours, theirs in zip(jax.tree.leaves(large), jax.tree.leaves(unit)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_weight_decay_is_for_matrices_only():
    optimizer = training.make_optimizer(
        learning_rate=0.1, num_steps=4, warmup_steps=0, weight_decay=0.5
    )
    params = {"q": {"kernel": jnp.ones(3), "bias": jnp.ones(3)}}
    zero = jax.tree.map(jnp.zeros_like, params)
    state = training.apply_gradients(
        optimizer, training.TrainState(params, optimizer.init(params)), zero
    )
    np.testing.assert_allclose(state.params["q"]["kernel"], 0.95, rtol=1e-5)
    np.testing.assert_array_equal(state.params["q"]["bias"], 1)


def test_log_spaced_steps():
    assert training.log_spaced_steps(600) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    assert training.log_spaced_steps(8) == [0, 1, 2, 4, 8]
    assert training.log_spaced_steps(1) == [0, 1]


def test_batches_depend_on_seed_and_step_alone():
    stream = np.arange(1000, dtype=np.int32)

    def draw(seed, step):
        return training.draw_batch(stream, rows=4, length=8, seed=seed, step=step)

    np.testing.assert_array_equal(draw(1, 5), draw(1, 5))
    assert not np.array_equal(draw(1, 5), draw(1, 6))
    assert not np.array_equal(draw(1, 5), draw(2, 5))
    batch = draw(0, 0)
    assert batch.shape == (4, 9)
    assert (np.diff(batch, axis=1) == 1).all()
    with pytest.raises(UserError, match="8 tokens; 9 are needed"):
        training.draw_batch(stream[:8], rows=1, length=8, seed=0, step=0)
