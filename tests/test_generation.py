"""Generated tokens against transformers' generate(), with the same weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import llama_config, neox_config, random_model, random_params

from jaxablate import generation
from jaxablate.errors import UserError
from jaxablate.generation import GenerationOptions, generate
from jaxablate.model import Transformer

CONTEXT = np.random.default_rng(0).integers(0, 61, 37).astype(np.int32)
PROMPTS = [
    np.random.default_rng(length).integers(0, 61, length).astype(np.int32)
    for length in (1, 5, 40, 12)
]


def _torch_llama(config, params):
    """A transformers Llama that holds our weights."""
    import torch
    import transformers

    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.model_dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()

    def linear(kernel, inputs):
        """Kernel with `inputs` leading input axes -> [out, in]."""
        array = np.asarray(kernel)
        rows = int(np.prod(array.shape[:inputs]))
        return torch.tensor(array.reshape(rows, -1).T.copy())

    def vector(array):
        return torch.tensor(np.asarray(array))

    state = {
        "model.embed_tokens.weight": vector(params["embed"]["embedding"]),
        "model.norm.weight": vector(params["final_norm"]["scale"]),
        "lm_head.weight": linear(params["unembed"]["kernel"], 1),
    }
    for index, block in params["blocks"].items():
        start = f"model.layers.{index}."
        state[start + "input_layernorm.weight"] = vector(block["attn_norm"]["scale"])
        state[start + "post_attention_layernorm.weight"] = vector(block["mlp_norm"]["scale"])
        for name in "qkvo":
            kernel = block["attn"][name]["kernel"]
            inputs = 2 if name == "o" else 1
            state[f"{start}self_attn.{name}_proj.weight"] = linear(kernel, inputs)
        for name in ("gate", "up", "down"):
            state[f"{start}mlp.{name}_proj.weight"] = linear(block["mlp"][name]["kernel"], 1)
    theirs.load_state_dict(state, strict=True)
    return theirs


@pytest.fixture(scope="module")
def llama():
    config = llama_config()
    params = random_params(config, seed=3)
    return Transformer.from_params(config, params), _torch_llama(config, params)


def _their_greedy(theirs, ids, count, stop):
    import torch

    found = theirs.generate(
        torch.tensor(ids[None].astype(np.int64)),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
    )[0, len(ids) :].tolist()
    return found[: found.index(stop)] if stop in found else found


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT[:0]], ids=["context", "no context"])
def test_greedy_equals_transformers_for_prompts_of_different_lengths(llama, context):
    ours, theirs = llama
    free = _their_greedy(theirs, np.concatenate([context, PROMPTS[1]]), 20, 10**6)
    stop = free[7]  # a token that ends one continuation early, some others later or never
    options = GenerationOptions(max_new_tokens=20)
    found = generate(ours, context, PROMPTS, [stop], options)
    for prompt, new in zip(PROMPTS, found):
        assert new.tolist() == _their_greedy(theirs, np.concatenate([context, prompt]), 20, stop)
    assert stop not in found[1]
    assert len(found[1]) <= 7


def test_greedy_neox_equals_its_own_full_forward():
    # Another family (parallel residual, layer norm, biases, partial rotation), without a cache.
    model = random_model(neox_config(), seed=5)
    found = generate(model, CONTEXT, PROMPTS[:3], [], GenerationOptions(max_new_tokens=6))
    rows = [np.concatenate([CONTEXT, prompt, new]) for prompt, new in zip(PROMPTS, found)]
    padded = np.zeros((3, max(map(len, rows))), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    predicted = np.asarray(jax.jit(lambda m, t: jnp.argmax(m(t), axis=-1))(model, padded))
    for row, (ids, new) in enumerate(zip(rows, found)):
        assert predicted[row, len(ids) - 7 : len(ids) - 1].tolist() == new.tolist()


def test_batches_change_nothing(llama):
    for options in (
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "temperature": 1.3, "top_p": 0.9, "seed": 4},
    ):
        together = generate(llama[0], CONTEXT, PROMPTS, [], GenerationOptions(**options))
        apart = generate(
            llama[0], CONTEXT, PROMPTS, [], GenerationOptions(**options, batch_tokens=1)
        )
        for one, other in zip(together, apart):
            np.testing.assert_array_equal(one, other)


def test_sampling_is_seeded(llama):
    def draw(seed):
        options = GenerationOptions(max_new_tokens=12, temperature=1.0, seed=seed)
        return [ids.tolist() for ids in generate(llama[0], CONTEXT, PROMPTS, [], options)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    # Equal prompts draw differently.
    twins = generate(
        llama[0],
        CONTEXT,
        [PROMPTS[1]] * 2,
        [],
        GenerationOptions(max_new_tokens=12, temperature=1.0),
    )
    assert twins[0].tolist() != twins[1].tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_nucleus_equals_transformers(top_p):
    import torch
    from transformers.generation.logits_process import TopPLogitsWarper

    logits = np.random.default_rng(1).normal(size=(5, 61)).astype(np.float32) * 3
    ours = np.asarray(generation.keep_top_p(jnp.asarray(logits), jnp.float32(top_p)))
    theirs = torch.tensor(logits)
    if top_p < 1:
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_samples_follow_the_tempered_distribution():
    logits = jnp.asarray([[2.0, 1.0, 0.0, -1.0]] * 20_000)
    keys = jax.random.split(jax.random.key(0), len(logits))
    chosen, _ = generation.next_tokens(
        jax.tree_util.Partial(lambda x: x),
        logits,
        keys,
        np.int32(0),
        np.float32(2.0),
        np.float32(1.0),
        greedy=False,
    )
    expected = np.exp(np.asarray(logits[0]) / 2)
    expected /= expected.sum()
    shares = np.bincount(np.asarray(chosen), minlength=4) / len(chosen)
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / np.sqrt(len(chosen)))


def test_one_compilation_for_all_lengths_layers_and_steps(llama, monkeypatch):
    chex.clear_trace_counter()
    for name in ("_prefill_step", "_decode_step"):
        step = getattr(generation, name).__wrapped__
        counted = jax.jit(chex.assert_max_traces(step, n=1 if name == "_decode_step" else 2))
        monkeypatch.setattr(generation, name, counted)
    for context, prompts in ((CONTEXT, PROMPTS[:2]), (CONTEXT[:20], PROMPTS[1:4:2])):
        generate(llama[0], context, prompts, [], GenerationOptions(max_new_tokens=5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"batch_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_options_out_of_range(wrong):
    with pytest.raises(UserError):
        GenerationOptions(**wrong)


def test_what_cannot_be_continued(llama):
    model = llama[0]
    with pytest.raises(UserError, match="none may be empty"):
        generate(model, CONTEXT, [PROMPTS[0], PROMPTS[0][:0]], [])
    with pytest.raises(UserError, match="vocabulary of 61"):
        generate(model, CONTEXT, [np.array([61], np.int32)], [])
    with pytest.raises(UserError, match="257 positions; the model has 256"):
        generate(model, CONTEXT, [PROMPTS[0]], [], GenerationOptions(max_new_tokens=256 - 37))


def test_progress_counts_rows_still_running(llama):
    counts = []
    found = generate(
        llama[0], CONTEXT, PROMPTS, [], GenerationOptions(max_new_tokens=4), counts.append
    )
    assert counts == [4, 4, 4, 4]
    assert [len(ids) for ids in found] == [4] * 4
