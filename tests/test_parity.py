"""Converted models compute what PyTorch's compute: float32, atol 1e-5 on tiny models."""

import json
import os

import hf_models
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import convert
from convert import parity
from jaxablate.errors import UserError
from jaxablate.rope import inverse_frequencies

ATOL = 1e-5
TOKENS = np.random.default_rng(3).integers(0, 61, (2, 80))


def converted(directory, dest, **options):
    return convert.convert(convert.open_source(str(directory)), dest, **options)


def largest_difference(checkpoint, expected) -> float:
    found = checkpoint.restore(jnp.float32)(jnp.asarray(TOKENS))
    return float(np.abs(np.asarray(found) - expected).max())


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_logits_equal_pytorchs(name, tmp_path):
    model = hf_models.random_model(name)
    checkpoint = converted(hf_models.save(model, tmp_path / "hf"), tmp_path / "ours")
    expected = hf_models.logits(model, TOKENS)
    assert expected.std() > 0.1
    assert largest_difference(checkpoint, expected) < ATOL


def test_streamed_blocks_give_the_same_logits(tmp_path):
    model = hf_models.random_model("llama biases tied")
    checkpoint = converted(hf_models.save(model, tmp_path / "hf"), tmp_path / "ours")
    streamed = checkpoint.stream(jnp.float32)(jnp.asarray(TOKENS))
    resident = checkpoint.restore(jnp.float32)(jnp.asarray(TOKENS))
    np.testing.assert_array_equal(streamed, resident)
    np.testing.assert_allclose(streamed, hf_models.logits(model, TOKENS), rtol=0, atol=ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files(dtype, tmp_path):
    """numpy knows no bfloat16 (safetensors #598); weights arrive bit by bit all the same."""
    model = hf_models.rounded(hf_models.random_model("llama"), dtype)
    directory = hf_models.save(hf_models.in_dtype(model, dtype), tmp_path / "hf")
    checkpoint = converted(directory, tmp_path / "ours")
    assert checkpoint.dtype.name == str(dtype).removeprefix("torch.")
    assert largest_difference(checkpoint, hf_models.logits(model, TOKENS)) < ATOL


@pytest.mark.parametrize("name", ["llama", "neox parallel rotary 0.25"])
def test_pickled_weights(name, tmp_path):
    model = hf_models.rounded(hf_models.random_model(name), torch.bfloat16)
    directory = hf_models.save(model, tmp_path / "hf")
    (directory / "model.safetensors").unlink()
    stored = hf_models.in_dtype(model, torch.bfloat16).state_dict()
    torch.save(stored, directory / "pytorch_model.bin")
    checkpoint = converted(directory, tmp_path / "ours")
    assert largest_difference(checkpoint, hf_models.logits(model, TOKENS)) < ATOL


def test_pickled_objects_are_never_executed(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    directory = hf_models.save(hf_models.random_model("llama"), tmp_path / "hf")
    (directory / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Attack()}, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="weights_only"):
        converted(directory, tmp_path / "ours")
    assert not (tmp_path / "executed").exists()


def test_neox_split_in_flat_thirds_is_caught(tmp_path, monkeypatch):
    """Fused QKV is head-major (mlxcel #928): the other order must not pass parity."""
    model = hf_models.random_model("neox parallel rotary 0.25")
    directory = hf_models.save(model, tmp_path / "hf")
    with safetensors(directory) as tensors:
        for name in [n for n in tensors if "query_key_value" in n]:
            value = tensors[name]
            heads = value.reshape(3, 4, 8, *value.shape[1:]).swapaxes(0, 1)
            tensors[name] = heads.reshape(value.shape).copy()
    checkpoint = converted(directory, tmp_path / "ours")
    assert largest_difference(checkpoint, hf_models.logits(model, TOKENS)) > 0.05


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        ("llama", "rms_norm_eps", 1e-3),
        ("neox parallel rotary 0.25", "layer_norm_eps", 1e-3),
        ("neox sequential rotary 0.25", "hidden_act", "gelu"),
        ("neox parallel rotary 0.25", "use_parallel_residual", False),
        ("llama", "rope_theta", 5000.0),
        ("llama 3 rope scaling", "rope_scaling", None),
        ("qwen3", "rms_norm_eps", 1e-3),
    ],
)
def test_a_wrong_attribute_is_caught(name, attribute, value, tmp_path):
    """Every attribute is read: a changed one changes the logits beyond any tolerance here."""
    model = hf_models.random_model(name)
    directory = hf_models.save(model, tmp_path / "hf")
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    if attribute == "rope_theta":
        raw["rope_parameters"]["rope_theta"] = value
    elif attribute == "rope_scaling":
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    else:
        raw[attribute] = value
    path.write_text(json.dumps(raw))
    checkpoint = converted(directory, tmp_path / "ours")
    assert largest_difference(checkpoint, hf_models.logits(model, TOKENS)) > 1e-4


def test_every_family_in_the_old_spelling(tmp_path):
    """rope_theta, rotary_pct, rope_scaling at the top level (transformers #42255)."""
    for name in ("llama 3 rope scaling", "neox sequential rotary 1.0"):
        model = hf_models.random_model(name)
        directory = hf_models.save(model, tmp_path / name / "hf")
        path = directory / "config.json"
        raw = json.loads(path.read_text())
        rope = raw.pop("rope_parameters")
        if raw["model_type"] == "gpt_neox":
            raw["rotary_emb_base"] = rope["rope_theta"]
            raw["rotary_pct"] = rope["partial_rotary_factor"]
        else:
            raw["rope_theta"] = rope.pop("rope_theta")
            raw["rope_scaling"] = rope
        path.write_text(json.dumps(raw))
        checkpoint = converted(directory, tmp_path / name / "ours")
        assert largest_difference(checkpoint, hf_models.logits(model, TOKENS)) < ATOL


def test_llama_3_frequencies(tmp_path):
    """The numbers of a working implementation for Llama 3.1 (ik_llama #2291)."""
    raw = json.loads(LLAMA_31_CONFIG)
    config = convert.conversion.family_of(raw["model_type"]).read_config(raw)
    found = np.asarray(inverse_frequencies(config))
    plain = 500000.0 ** (-np.arange(64) / 64)
    blended = [2.166571e-03, 1.371894e-03, 8.567514e-04, 5.248462e-04, 3.126938e-04, 1.785078e-04]
    np.testing.assert_allclose(found[:29], plain[:29], rtol=1e-6)
    np.testing.assert_allclose(found[29:35], blended, rtol=1e-6)
    np.testing.assert_allclose(found[35:], plain[35:] / 8, rtol=1e-6)
    np.testing.assert_allclose(found[-1], 3.068926e-07, rtol=1e-6)


def test_measure_prints_a_table_and_knows_its_limits(tmp_path):
    model = hf_models.random_model("llama")
    directory = hf_models.save(model, tmp_path / "hf")
    checkpoint = converted(directory, tmp_path / "ours")
    for source in (directory, None):
        found = parity.measure(checkpoint, source, 50)
        assert found.num_tokens == 50
        assert found.within(1e-5, 1e-6)
        assert not found.within(0.0, 0.0)
        assert "largest" in found.table(1e-3, 1e-4)
    tokens = parity.example_tokens(checkpoint, 50)
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert found.reference_perplexity == pytest.approx(float(loss.exp()), rel=1e-5)


def test_nan_is_over_every_limit():
    assert not parity.Parity(2, float("nan"), float("nan"), 1.0, 1.0).within(1e9, 1e9)


def safetensors(directory):
    """The tensors of a directory as a dict of numpy arrays, written back at the end."""
    import contextlib

    from safetensors.numpy import load_file, save_file

    @contextlib.contextmanager
    def opened():
        path = directory / "model.safetensors"
        tensors = load_file(path)
        yield tensors
        save_file(tensors, path, {"format": "pt"})

    return opened()


LLAMA_31_CONFIG = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256}"""
