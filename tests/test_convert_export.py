"""Our checkpoints as Hugging Face directories: every tensor bit by bit, for every family."""

import dataclasses
import json

import hf_directories as hf
import hf_models
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file

import convert
from convert.export import export_hf
from jaxablate.errors import UserError


def tensors_in(directory):
    """Name -> (dtype, bytes) of every tensor in every shard, by the safetensors package."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                found[name] = tensor.dtype, tuple(tensor.shape), raw
    return found


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_round_trip_is_bitwise_equal(name, tmp_path):
    dtype = torch.bfloat16 if "llama" in name else torch.float16
    model = hf_models.in_dtype(hf_models.random_model(name), dtype)
    source = hf_models.save(model, tmp_path / "hf")
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    exported = export_hf(checkpoint.config, checkpoint, tmp_path / "back")
    assert tensors_in(exported) == tensors_in(source)
    again = convert.convert(convert.open_source(str(exported)), tmp_path / "again")
    assert again.digest == checkpoint.digest


@pytest.mark.parametrize("name", ["llama 3 rope scaling", "qwen3", "neox sequential rotary 1.0"])
def test_transformers_computes_the_same_from_the_export(name, tmp_path):
    """config.json is understood by its owner, not only by us."""
    model = hf_models.random_model(name)
    source = hf_models.save(model, tmp_path / "hf")
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    exported = export_hf(checkpoint.config, checkpoint, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        exported, attn_implementation="eager", dtype=torch.float32
    )
    tokens = np.arange(60)[None] % 61
    np.testing.assert_array_equal(hf_models.logits(again, tokens), hf_models.logits(model, tokens))


def test_fewer_layers_from_memory(tmp_path):
    """A pruned model: layer 0 of 2 removed, the parameters given as a nested dict."""
    weights = hf.tensors()
    source = hf.write(tmp_path / "hf", weights)
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    params = checkpoint.restore().to_params()
    params["blocks"] = {"0": params["blocks"]["1"]}
    config = dataclasses.replace(checkpoint.config, num_layers=1)
    exported = export_hf(config, params, tmp_path / "pruned")
    found = load_file(exported / "model.safetensors")
    assert set(found) == set(hf.tensors(layers=1))
    np.testing.assert_array_equal(
        found["model.layers.0.mlp.up_proj.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    )
    assert json.loads((exported / "config.json").read_text())["num_hidden_layers"] == 1
    converted = convert.convert(convert.open_source(str(exported)), tmp_path / "again")
    assert converted.config == config


def test_large_models_are_cut_into_shards(tmp_path):
    source = hf.write(tmp_path / "hf", hf.tensors())
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    exported = export_hf(checkpoint.config, checkpoint, tmp_path / "back", shard_bytes=4000)
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert set(index["weight_map"]) == set(hf.tensors())
    assert tensors_in(exported) == tensors_in(source)
    again = convert.convert(convert.open_source(str(exported)), tmp_path / "again")
    assert again.digest == checkpoint.digest


def test_tokenizer_and_token_ids_come_along(tmp_path):
    source = hf.write(tmp_path / "hf", hf.tensors(), {"bos_token_id": 5, "eos_token_id": [6, 7]})
    (source / "tokenizer.json").write_text("{}")
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    exported = export_hf(
        checkpoint.config,
        checkpoint,
        tmp_path / "back",
        checkpoint.tokenizer_dir,
        checkpoint.provenance["source_config"],
    )
    assert (exported / "tokenizer.json").read_text() == "{}"
    raw = json.loads((exported / "config.json").read_text())
    assert raw["bos_token_id"] == 5
    assert raw["eos_token_id"] == [6, 7]


def test_what_cannot_be_exported_leaves_nothing(tmp_path):
    source = hf.write(tmp_path / "hf", hf.tensors())
    checkpoint = convert.convert(convert.open_source(str(source)), tmp_path / "ours")
    with pytest.raises(UserError, match="exists already"):
        export_hf(checkpoint.config, checkpoint, source)
    config = dataclasses.replace(checkpoint.config, num_layers=3)
    with pytest.raises(UserError, match="blocks/2/"):
        export_hf(config, checkpoint, tmp_path / "back")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"):
        export_hf(checkpoint.config, checkpoint, tmp_path / "file" / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "ours"]
