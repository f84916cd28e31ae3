"""Damaged and hostile files: each gives a result or a one-line error, and nothing else happens."""

import json
import random
import shutil
import struct

import gguf
import hf_directories as hf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import convert
from convert.config_json import MAX_CONFIG_BYTES, parse_json_object
from convert.conversion import Filler, Plan, family_of
from convert.gguf_files import GgufFile
from convert.safetensors_files import MAX_HEADER_BYTES, read_header
from jaxablate.errors import UserError

# No deadline: the machine may be busy. Derandomised: the suite is deterministic.
FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def one_line_error(function, *arguments) -> str | None:
    """The message of a UserError; anything else that is raised fails the test."""
    try:
        function(*arguments)
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 2000
        return message
    return None


def file_with(header, data=b"", length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start, stop, shape=None, dtype="F32"):
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "0 bytes"),
        (b"\x08", "1 bytes"),
        (file_with({"a": tensor(0, 8)}, bytes(4)), "truncated"),
        (file_with({"a": tensor(0, 8)}, bytes(12)), "after its last tensor"),
        (file_with({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)), "overlaps"),
        (file_with({"a": tensor(0, 8), "b": tensor(0, 8)}, bytes(8)), "overlaps"),
        (file_with({"a": tensor(0, 8), "b": tensor(12, 16)}, bytes(16)), "leaves a gap"),
        (file_with({"a": tensor(8, 0, [2])}, bytes(8)), "truncated or damaged"),
        (file_with({"a": tensor(-8, 0, [2])}, bytes(8)), "lists of sizes"),
        (file_with({"a": tensor(0, 8, [3])}, bytes(8)), "need 12"),
        (file_with({"a": tensor(0, 8, [2.0])}, bytes(8)), "lists of sizes"),
        (file_with({"a": tensor(0, 8, [True, 2])}, bytes(8)), "lists of sizes"),
        (file_with({"a": tensor(0, 8, [2**62, 2**62])}, bytes(8)), "need"),
        (file_with({"a": tensor(0, 8, [2**70])}, bytes(8)), "lists of sizes"),
        (file_with({"a": tensor(0, 8, [1] * 9 + [2])}, bytes(8)), "lists of sizes"),
        (file_with({"a": tensor(0, 8, dtype="F33")}, bytes(8)), "F33"),
        (file_with({"a": tensor(0, 8, dtype=["F32"])}, bytes(8)), "F32"),
        (file_with({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "data_offsets"),
        (file_with({"a": 3}), "must have dtype"),
        (file_with([1]), "object is required"),
        (file_with(b'{"a"'), "not valid JSON"),
        (file_with(b'{"a\xff": 1}'), "not valid JSON"),
        (file_with(b'{"a": NaN}'), "NaN"),
        (file_with(b"[" * 100_000), "nested too deeply"),
        (file_with(b'{"a":' * 50_000), "nested too deeply"),
        (file_with(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
        (file_with({}, length=2**63), "its header has 9,223,372,036,854,775,808"),
        (file_with(b" " * (MAX_HEADER_BYTES + 1)), "header has 8,000,001"),
        (
            file_with(b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 8)).encode(),) * 2), bytes(8)),
            "twice",
        ),
    ],
)
def test_safetensors_headers_by_name(content, part, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert part in (one_line_error(read_header, path) or "accepted")


def test_no_tensors_and_empty_tensors_are_fine(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_with({"__metadata__": {"format": "pt"}}))
    assert read_header(path) == {}
    path.write_bytes(file_with({"a": tensor(0, 0, [0, 5]), "b": tensor(0, 4, [])}, bytes(4)))
    assert read_header(path)["b"].shape == ()


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ({"weight_map": {"a": "../hf/model.safetensors"}}, "same directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "same directory"),
        ({"weight_map": {"a": ".."}}, "same directory"),
        ({"weight_map": {"a": ""}}, "same directory"),
        ({"weight_map": {"a": "x\0y"}}, "same directory"),
        ({"weight_map": {"a": "absent.safetensors"}}, "not there"),
        ({"weight_map": {"a": 3}}, "not there"),
        ({"weight_map": {"a": ["x"]}}, "not there"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": 3}, "weight_map"),
        ([], "object is required"),
        ({"weight_map": {"a": "model.safetensors"}}, "does not match"),
    ],
)
def test_indexes_by_name(index, part, tmp_path):
    directory = hf.write(tmp_path / "hf", hf.tensors())
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert part in (one_line_error(convert.open_source, str(directory)) or "accepted")


def test_several_files_without_an_index(tmp_path):
    directory = hf.write_sharded(tmp_path / "hf", hf.tensors())
    (directory / "model.safetensors.index.json").unlink()
    assert "no model.safetensors.index.json" in one_line_error(convert.open_source, str(directory))


def test_huge_json_files_are_not_read(tmp_path):
    directory = hf.write(tmp_path / "hf", hf.tensors())
    with (directory / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)  # a hole: no disk is used
    assert "at most" in one_line_error(convert.open_source, str(directory))


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    """With a memory map this ends the process by a signal."""
    directory = hf.write(tmp_path / "hf", hf.tensors())
    source = convert.open_source(str(directory))
    plan = Plan(source)
    filler = Filler(plan, None)
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(4000)

    def fill_all():
        for rule in plan.rules:
            filler.fill(rule)

    assert "shorter" in one_line_error(fill_all)


VALID = file_with(
    {"__metadata__": {"format": "pt"}, "a": tensor(0, 8, [2]), "b": tensor(8, 32, [3, 2])},
    bytes(32),
)


def mutated(content: bytes, seed: int) -> bytes:
    """A few bytes changed, doubled, removed, or the end cut."""
    rng = random.Random(seed)
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) or 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at : at + rng.randint(1, 8)] = b""
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 16)]
        elif kind == 3:
            number = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            data[at : at + 8] = struct.pack("<Q", number)
        else:
            data[at:at] = rng.choice([b"9", b"-", b"[", b'"', b"{", b"1e9", b"\xff"])
    return bytes(data)


@settings(FUZZ, max_examples=1500)
@given(seed=st.integers(0, 2**32))
def test_mutated_safetensors_headers(seed, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(mutated(VALID, seed))
    one_line_error(read_header, path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = st.sampled_from([*hf.CONFIG, "rope_scaling", "rope_parameters", "sliding_window", "x"])
KNOWN_ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_type": st.sampled_from(["default", "llama3", "yarn"]) | JSON,
        "factor": JSON,
        "low_freq_factor": JSON,
        "high_freq_factor": JSON,
        "original_max_position_embeddings": JSON,
    },
)


@settings(FUZZ, max_examples=1000)
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt_neox"]) | JSON,
    changes=st.dictionaries(NAMES, JSON | KNOWN_ROPE, max_size=3),
)
def test_mutated_configurations(family, changes):
    raw = hf.CONFIG | {"layer_norm_eps": 1e-5} | changes | {"model_type": family}

    def read():
        config = family_of(raw["model_type"]).read_config(raw)
        assert config.num_layers > 0

    one_line_error(read)


@settings(FUZZ, max_examples=500)
@given(text=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_json(text):
    one_line_error(parse_json_object, text, "a file")


@settings(FUZZ, max_examples=300)
@given(
    weight_map=st.dictionaries(
        st.text(max_size=5),
        st.sampled_from(["model.safetensors", "../x", "config.json", "."]) | JSON,
        max_size=3,
    )
    | JSON
)
def test_mutated_indexes(weight_map, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "indexed"
    if not directory.exists():
        hf.write(directory, hf.tensors())
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    one_line_error(convert.open_source, str(directory))


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ccc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_small_file_is_read(small_gguf):
    file = GgufFile(small_gguf)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ccc"]
    np.testing.assert_array_equal(file.rows("token_embd.weight", np.arange(3)), np.ones((3, 32)))


def test_mutated_gguf_headers(small_gguf, tmp_path):
    content = small_gguf.read_bytes()
    path = tmp_path / "mutated.gguf"

    @settings(FUZZ, max_examples=1500)
    @given(seed=st.integers(0, 2**32))
    def check(seed):
        # The header alone: half of the file is data.
        head = mutated(content[: content.index(b"output_norm") + 60], seed)
        path.write_bytes(head + content[len(head) :])
        one_line_error(convert.open_source, str(path))

    check()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "byte order"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "runs past"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "runs past"),
        (
            b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62),
            "runs past",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(30), "runs past"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77) + bytes(9), "type 77"),
    ],
)
def test_gguf_headers_by_name(content, part, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert part in (one_line_error(GgufFile, path) or "accepted")


def test_nested_gguf_arrays_do_not_recurse_without_end(tmp_path):
    nest = struct.pack("<IQ", 9, 1) * 1000
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 9) + nest)
    assert "nested too deeply" in one_line_error(GgufFile, path)


def test_mutated_directories_never_leave_half_a_checkpoint(tmp_path):
    """Whole conversions of files with changed bytes: a checkpoint that opens, or nothing."""
    weights = hf.tensors(np.float16)
    content = hf.write(tmp_path / "hf", weights).joinpath("model.safetensors").read_bytes()
    for seed in range(40):
        changed = mutated(content[:2500], seed) + content[2500:]
        (tmp_path / "hf/model.safetensors").write_bytes(changed)
        dest = tmp_path / "ours"

        def run(dest=dest):
            source = convert.open_source(str(tmp_path / "hf"))
            convert.convert(source, dest).verify()

        message = one_line_error(run)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == (["hf", "ours"] if message is None else ["hf"])
        shutil.rmtree(dest, ignore_errors=True)
