"""Every tensor of a source arrives exactly once and unchanged, or one error says why not."""

import json

import hf_directories as hf
import ml_dtypes
import numpy as np
import pytest

import convert
from jaxablate.errors import UserError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def converted(directory, dest, dtype=None):
    return convert.convert(convert.open_source(str(directory)), dest, dtype)


def refused(directory, tmp_path, *parts, dtype=None):
    """The one-line error of a conversion that leaves nothing behind."""
    dest = tmp_path / "refused"
    with pytest.raises(UserError) as caught:
        converted(directory, dest, dtype)
    assert list(dest.parent.glob("*refused*")) == []
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def test_each_tensor_lies_where_the_contract_says(tmp_path):
    weights = hf.tensors()
    checkpoint = converted(hf.write(tmp_path / "hf", weights), tmp_path / "ours")
    block = "model.layers.1."
    q = weights[block + "self_attn.q_proj.weight"]
    for head in range(6):
        np.testing.assert_array_equal(
            checkpoint.read("blocks/1/attn/q/kernel")[:, head], q[4 * head : 4 * head + 4].T
        )
    o = weights[block + "self_attn.o_proj.weight"]
    for head in range(6):
        np.testing.assert_array_equal(
            checkpoint.read("blocks/1/attn/o/kernel")[head], o[:, 4 * head : 4 * head + 4].T
        )
    down = checkpoint.read("blocks/1/mlp/down/kernel")
    np.testing.assert_array_equal(down, weights[block + "mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(checkpoint.read("unembed/kernel"), weights["lm_head.weight"].T)


def test_shards_equal_one_file(tmp_path):
    weights = hf.tensors(np.float16)
    one = converted(hf.write(tmp_path / "one", weights), tmp_path / "a")
    two = converted(hf.write_sharded(tmp_path / "two", weights), tmp_path / "b")
    assert one.digest == two.digest


def test_the_stored_dtype_is_kept(tmp_path):
    """bf16 to fp16 changed weights unasked (saxml #28)."""
    for dtype in (np.float32, np.float16, BFLOAT16):
        name = np.dtype(dtype).name
        weights = hf.tensors(dtype)
        checkpoint = converted(hf.write(tmp_path / name, weights), tmp_path / f"{name} ours")
        found = checkpoint.read("embed/embedding")
        assert found.dtype == np.dtype(dtype)
        assert found.tobytes() == weights["model.embed_tokens.weight"].tobytes()


def test_a_cast_prints_the_largest_change(tmp_path, capsys):
    weights = hf.tensors()
    checkpoint = converted(hf.write(tmp_path / "hf", weights), tmp_path / "ours", "bfloat16")
    found = checkpoint.read("embed/embedding")
    expected = weights["model.embed_tokens.weight"].astype(BFLOAT16)
    np.testing.assert_array_equal(found, expected)
    largest = max(
        (np.abs(w - w.astype(BFLOAT16).astype(np.float32)).max(), name)
        for name, w in weights.items()
    )
    printed = capsys.readouterr().err
    assert f"{largest[0]:.3g}" in printed
    assert largest[1] in printed


def test_a_cast_that_overflows_is_refused(tmp_path):
    weights = hf.tensors(BFLOAT16)
    weights["lm_head.weight"][3, 4] = 1e5
    directory = hf.write(tmp_path / "hf", weights)
    refused(directory, tmp_path, "lm_head.weight", "float16", dtype="float16")
    converted(directory, tmp_path / "ours")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_weights_that_are_no_numbers_are_refused(value, dtype, tmp_path):
    weights = hf.tensors(dtype)
    weights["model.layers.1.mlp.up_proj.weight"][19, 11] = value
    directory = hf.write(tmp_path / "hf", weights)
    refused(directory, tmp_path, "model.layers.1.mlp.up_proj.weight", "NaN")


def test_missing_and_extra_tensors_are_listed_together(tmp_path):
    weights = hf.tensors()
    del weights["model.layers.0.self_attn.k_proj.weight"], weights["model.norm.weight"]
    weights["model.layers.0.self_attn.sinks"] = np.zeros(6, np.float32)
    weights["model.layers.2.input_layernorm.weight"] = np.zeros(12, np.float32)
    refused(
        hf.write(tmp_path / "hf", weights), tmp_path,
        "2 missing", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight",
        "2 not known", "model.layers.0.self_attn.sinks", "model.layers.2.input_layernorm.weight",
    )  # fmt: skip


def test_buffers_of_old_files_are_known(tmp_path):
    weights = hf.tensors()
    plain = converted(hf.write(tmp_path / "hf", weights), tmp_path / "plain")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        weights[name] = np.ones(2, np.float32)
    old = converted(hf.write(tmp_path / "old", weights), tmp_path / "ours")
    assert old.digest == plain.digest


def test_wrong_shapes_and_dtypes_are_refused(tmp_path):
    weights = hf.tensors()
    weights["model.layers.0.self_attn.v_proj.weight"] = np.zeros((12, 8), np.float32)
    weights["model.norm.weight"] = np.zeros(12, np.int8)
    refused(
        hf.write(tmp_path / "hf", weights), tmp_path,
        "model.layers.0.self_attn.v_proj.weight [12, 8] instead of [8, 12]",
        "model.norm.weight int8",
    )  # fmt: skip


def test_tied_and_untied(tmp_path):
    """keras-hub #1895, mlx-lm #1298: all four cases."""
    tied = {"tie_word_embeddings": True}
    weights = hf.tensors()
    refused(hf.write(tmp_path / "other", weights, tied), tmp_path, "lm_head.weight", "differs")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    equal = converted(hf.write(tmp_path / "equal", weights, tied), tmp_path / "a")
    del weights["lm_head.weight"]
    absent = converted(hf.write(tmp_path / "absent", weights, tied), tmp_path / "b")
    assert equal.digest == absent.digest
    assert "unembed/kernel" not in equal.leaves
    refused(hf.write(tmp_path / "untied", weights), tmp_path, "1 missing", "lm_head.weight")


def test_more_layers_than_tensors_is_refused_at_once(tmp_path):
    directory = hf.write(tmp_path / "hf", hf.tensors(), {"num_hidden_layers": 10**12})
    refused(directory, tmp_path, "layers")


def test_a_huge_model_in_the_configuration_needs_no_memory(tmp_path):
    changes = {"hidden_size": 10**9, "vocab_size": 10**9, "intermediate_size": 10**9}
    directory = hf.write(tmp_path / "hf", hf.tensors(), changes)
    refused(directory, tmp_path, "of another shape", "1000000000")


def test_sources_that_are_none(tmp_path):
    for text, part in [
        ("", "required"),
        ("no/such/place", "is not there"),
        (str(tmp_path / "absent"), "is not there"),
        (str(tmp_path / "absent.gguf"), "is not there"),
        (str(tmp_path), "config.json"),
        ("x\0y", "required"),
        ("a" * 5000, "File name too long"),
        ("~no-such-user/x", "is not there"),
    ]:
        with pytest.raises(UserError, match=part) as caught:
            convert.resolve(text, tmp_path / "cache")
        assert len(str(caught.value)) < 600
    (tmp_path / "weights.pt").write_text("x")
    with pytest.raises(UserError, match=r"no \.gguf"):
        convert.resolve(str(tmp_path / "weights.pt"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(hf.CONFIG))
    with pytest.raises(UserError, match="no weights"):
        convert.resolve(str(tmp_path / "hf"))


def test_a_hub_name_without_a_network_says_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hf download someone/some-model") as caught:
        convert.resolve("someone/some-model", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_fetched_without_the_repositorys_subdirectories(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns, ignore_patterns))
        return str(hf.write(tmp_path / "snapshot", hf.tensors()))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = convert.resolve("someone/some-model", tmp_path / "cache")
    assert checkpoint.path.name.startswith("someone_some-model-")
    assert checkpoint.provenance["source"] == "someone/some-model"
    assert [(name, ignored) for name, _, ignored in asked] == [
        ("someone/some-model", ["*/*", "consolidated*"])
    ]
    assert "*.safetensors" in asked[0][1]


def test_the_cache_is_reused_until_the_source_changes(tmp_path):
    weights = hf.tensors()
    directory = hf.write(tmp_path / "hf", weights)
    first = convert.resolve(str(directory), tmp_path / "cache")
    marker = first.path / "marker"
    marker.touch()
    assert convert.resolve(str(directory), tmp_path / "cache").digest == first.digest
    assert marker.exists()
    half = convert.resolve(str(directory), tmp_path / "cache", "bfloat16")
    assert half.path != first.path
    assert half.dtype == BFLOAT16
    weights["model.norm.weight"][0] += 1
    hf.write(directory, weights)
    changed = convert.resolve(str(directory), tmp_path / "cache")
    assert changed.path != first.path
    assert changed.digest != first.digest


def test_a_damaged_cache_entry_is_converted_again(tmp_path, capsys):
    directory = hf.write(tmp_path / "hf", hf.tensors())
    first = convert.resolve(str(directory), tmp_path / "cache")
    files = [path for path in (first.path / "weights/embed").rglob("*") if path.is_file()]
    max(files, key=lambda path: path.stat().st_size).write_bytes(b"")
    second = convert.resolve(str(directory), tmp_path / "cache")
    assert second.digest == first.digest
    assert "converting again" in capsys.readouterr().err


def test_the_cache_directory_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXABLATE_CACHE", str(tmp_path / "there"))
    assert convert.cache_directory() == tmp_path / "there"
    monkeypatch.delenv("JAXABLATE_CACHE")
    assert convert.cache_directory().name == "jaxablate"


def test_a_checkpoint_is_a_source(tmp_path):
    checkpoint = converted(hf.write(tmp_path / "hf", hf.tensors()), tmp_path / "ours")
    assert convert.resolve(str(checkpoint.path)).digest == checkpoint.digest


def test_an_unwritable_cache_is_one_error(tmp_path):
    (tmp_path / "file").write_text("x")
    directory = hf.write(tmp_path / "hf", hf.tensors())
    with pytest.raises(UserError, match="JAXABLATE_CACHE"):
        convert.resolve(str(directory), tmp_path / "file")


def test_tokenizer_files_come_along(tmp_path):
    directory = hf.write(tmp_path / "hf", hf.tensors())
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("x")
    (directory / "modeling_llama.py").write_text("raise SystemExit")
    checkpoint = converted(directory, tmp_path / "ours")
    names = {path.name for path in checkpoint.tokenizer_dir.iterdir()}
    assert names == {"tokenizer.json", "chat_template.jinja"}


def test_in_a_program_of_several_processes_a_process_of_its_own_converts(tmp_path, monkeypatch):
    """Orbax would wait for the other processes of the program."""
    import jax

    directory = hf.write(tmp_path / "hf", hf.tensors())
    expected = converted(directory, tmp_path / "ours", "bfloat16")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = convert.resolve(str(directory), tmp_path / "cache", "bfloat16")
    assert found.digest == expected.digest
    weights = hf.tensors()
    weights["model.norm.weight"][0] = np.nan
    hf.write(directory, weights)
    with pytest.raises(UserError, match="could not be converted"):
        convert.resolve(str(directory), tmp_path / "cache")
