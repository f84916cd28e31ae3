"""Checkpoints: any number of devices, any dtype, never half-written, never silently damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import hf_directories as hf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

import convert
from jaxablate.checkpoint import (
    METADATA_NAME,
    flattened,
    is_checkpoint,
    nested,
    open_checkpoint,
)
from jaxablate.checkpoint_writer import (
    new_checkpoint,
    save_checkpoint,
    writing_lock,
)
from jaxablate.config import param_shapes
from jaxablate.errors import UserError
from jaxablate.stored_arrays import aligned_empty

ROOT = Path(__file__).resolve().parents[1]


def random_params(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = param_shapes(config)
    return nested({path: rng.normal(size=shape).astype(dtype) for path, shape in shapes.items()})


@pytest.fixture
def saved(tmp_path):
    config = tiny.llama_config(num_layers=2)
    return save_checkpoint(tmp_path / "ours", config, random_params(config))


def assert_same(params, expected):
    params, expected = flattened(params), flattened(expected)
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("make", [tiny.llama_config, tiny.neox_config])
def test_what_is_saved_is_restored(make, dtype, tmp_path):
    config = make(num_layers=2)
    params = random_params(config, dtype)
    checkpoint = save_checkpoint(tmp_path / "ours", config, params, provenance={"a": 1})
    opened = open_checkpoint(tmp_path / "ours")
    assert opened.config == config
    assert opened.digest == checkpoint.digest
    assert opened.provenance == {"a": 1}
    assert opened.dtype == np.dtype(dtype)
    assert opened.tokenizer_dir is None
    assert_same(opened.restore().to_params(), params)
    assert_same(opened.read_block(1), params["blocks"]["1"])
    np.testing.assert_array_equal(opened.read("final_norm/scale"), params["final_norm"]["scale"])


def test_restore_casts_as_numpy_does_and_keeps_the_digest(saved):
    digest = saved.digest
    for dtype in (ml_dtypes.bfloat16, np.float16):
        params = flattened(saved.restore(dtype).to_params())
        for path in saved.leaves:
            assert params[path].dtype == dtype
            np.testing.assert_array_equal(params[path], saved.read(path).astype(dtype))
    assert open_checkpoint(saved.path).digest == digest


def test_large_arrays_are_stored_in_parts(tmp_path, monkeypatch):
    """The same digest, arrays and errors, whether an array is in one part or in several."""
    from jaxablate import stored_arrays

    config = tiny.llama_config(num_layers=1)
    params = random_params(config)
    whole = save_checkpoint(tmp_path / "whole", config, params)
    monkeypatch.setattr(stored_arrays, "PART_BYTES", 1000)
    parts = save_checkpoint(tmp_path / "parts", config, params)
    assert parts.digest == whole.digest
    assert {leaf.parts for leaf in parts.leaves.values()} >= {1, 6}
    assert_same(parts.restore().to_params(), params)
    half = parts.restore(ml_dtypes.bfloat16).embedding[...]
    np.testing.assert_array_equal(half, params["embed"]["embedding"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(parts.read("embed/embedding"), params["embed"]["embedding"])
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("model",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = parts.load_group("embed", sharding=rows)["embed/embedding"]
    assert found.sharding == rows
    parts.verify()
    leaf = parts.leaves["embed/embedding"]
    parts.leaves["embed/embedding"] = leaf._replace(digest="0" * 64)
    with pytest.raises(UserError, match="embed/embedding"):
        parts.verify()


def test_digest_names_weights_and_configuration(tmp_path):
    config = tiny.llama_config(num_layers=2)
    params = random_params(config)
    digests = {save_checkpoint(tmp_path / "a", config, params).digest}
    assert save_checkpoint(tmp_path / "same", config, params).digest in digests
    params["blocks"]["1"]["attn"]["v"]["kernel"][3, 1, 2] += 1e-6
    digests.add(save_checkpoint(tmp_path / "b", config, params).digest)
    other = config.replace(rope_theta=20000.0)
    digests.add(save_checkpoint(tmp_path / "c", other, params).digest)
    half = random_params(config, np.float16)
    digests.add(save_checkpoint(tmp_path / "d", config, half).digest)
    assert len(digests) == 4


def test_streamed_blocks_equal_resident_ones(saved):
    model, streamed = saved.restore(), saved.stream()
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 61, (2, 7)))
    np.testing.assert_array_equal(streamed.embed_tokens(tokens), model.embed_tokens(tokens))
    assert streamed.config == model.config
    x = jnp.ones((3, saved.config.model_dim))
    np.testing.assert_array_equal(streamed.head(x), model.head(x))
    for layer in (0, 1, 0, 0, 1):  # forwards, again from the start, twice the same
        expected = jax.tree.leaves(model.block(layer))
        found = jax.tree.leaves(streamed.block(layer))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match="layers are 0 to 1"):
        streamed.block(2)


def test_streamed_blocks_are_freed(tmp_path):
    """Two blocks are in memory at most, whatever the number of layers."""
    import gc
    import weakref

    config = tiny.llama_config(num_layers=6)
    saved = save_checkpoint(tmp_path / "ours", config, random_params(config))
    streamed = saved.stream()
    alive = []
    for layer in range(6):
        alive.append(weakref.ref(streamed.block(layer)))
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * layer + [True]


def test_saving_beside_loading(saved, tmp_path):
    """Orbax itself loses files when one thread loads while another one saves."""
    from concurrent.futures import ThreadPoolExecutor

    params = random_params(saved.config)
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(saved.restore, progress=False) for _ in range(6)]
        saves = [
            pool.submit(save_checkpoint, tmp_path / f"again {i}", saved.config, params)
            for i in range(6)
        ]
        assert {save.result().digest for save in saves} == {saved.digest}
        for load in loads:
            assert_same(load.result().to_params(), params)


RESTORE_ON_DEVICES = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxablate.checkpoint import open_checkpoint, flattened
from jaxablate.checkpoint_writer import save_checkpoint
source, dest, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
assert len(jax.devices()) == count
checkpoint = open_checkpoint(source)
mesh = Mesh(np.array(jax.devices()), ("model",))
def sharding(path, shape):
    axes = [None] * len(shape)
    if path.endswith("mlp/up/kernel"):
        axes[1] = "model"
    return NamedSharding(mesh, P(*axes))
params = checkpoint.restore(sharding=sharding).to_params()
up = params["blocks"]["0"]["mlp"]["up"]["kernel"]
assert len(up.sharding.device_set) == count
assert up.addressable_shards[0].data.shape[1] == up.shape[1] // count
again = save_checkpoint(dest, checkpoint.config, params)
assert again.digest == checkpoint.digest
"""


def test_saved_and_restored_on_any_number_of_devices(saved, tmp_path):
    """orbax #648: one device -> eight -> one, and the digest stays."""
    places = [str(saved.path), str(tmp_path / "eight"), str(tmp_path / "one")]
    for source, dest, count in ((places[0], places[1], "8"), (places[1], places[2], "1")):
        flags = f"--xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, "-c", RESTORE_ON_DEVICES, source, dest, count],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert open_checkpoint(places[2]).digest == saved.digest


def test_relative_paths(saved, tmp_path, monkeypatch):
    """apax #465: Orbax refuses them."""
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("ours").digest == saved.digest
    config = saved.config
    again = save_checkpoint("sub/dir/again", config, saved.restore().to_params())
    assert again.path == tmp_path / "sub/dir/again"
    assert open_checkpoint("./sub/dir/../dir/again").digest == saved.digest
    hf.write(tmp_path / "hf", hf.tensors())
    assert convert.convert(convert.open_source("hf"), Path("x")).path == tmp_path / "x"


def test_flipped_bytes_are_noticed_by_every_reader(saved, tmp_path):
    """Of a size that is right: only a digest can tell, and wrong numbers would be the result."""
    (file,) = (saved.path / "weights/block_1/state/blocks.1.mlp.up.kernel").glob("0*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    checkpoint = open_checkpoint(saved.path)
    readers = [
        checkpoint.restore,
        lambda: checkpoint.read("blocks/1/mlp/up/kernel"),
        lambda: checkpoint.stream(jnp.float32).block(1),
        lambda: convert.export_hf(saved.config, checkpoint, tmp_path / "hf"),
        checkpoint.verify,
    ]
    for reader in readers:
        with pytest.raises(UserError, match="blocks/1/mlp/up/kernel does not have its digest"):
            reader()
    assert checkpoint.read("blocks/0/mlp/up/kernel").shape  # what is intact can be read


def test_nothing_is_overwritten(saved):
    with pytest.raises(UserError, match="exists already"):
        save_checkpoint(saved.path, saved.config, saved.restore().to_params())


def test_an_unknown_format_version_is_refused(saved):
    file = saved.path / METADATA_NAME
    file.write_text(file.read_text().replace('"format_version": 2', '"format_version": 99'))
    with pytest.raises(UserError, match="format version 99"):
        open_checkpoint(saved.path)


def test_an_old_checkpoint_still_opens(tmp_path):
    """Written by the first version of the format; it stays as it is."""
    with tarfile.open(ROOT / "tests" / "checkpoint_v1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    checkpoint = open_checkpoint(tmp_path / "checkpoint_v1")
    checkpoint.verify()
    assert checkpoint.digest.startswith("3cd861e4982dff28")
    assert checkpoint.restore()(jnp.zeros((1, 3), jnp.int32)).shape == (1, 3, 7)


@pytest.mark.parametrize("damage", ["shorter", "absent", "longer"])
def test_files_of_another_size_are_noticed_at_once(saved, damage):
    file = max((saved.path / "weights/block_1").rglob("*"), key=lambda path: path.stat().st_size)
    file = max(
        (path for path in (saved.path / "weights/block_1").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = file.read_bytes()
    if damage == "absent":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "shorter" else data + b"x")
    with pytest.raises(UserError, match="damaged"):
        open_checkpoint(saved.path)


def test_changed_bytes_are_noticed_by_verify(saved):
    weights = saved.read("blocks/1/mlp/up/kernel").tobytes()[:64]
    for file in (saved.path / "weights/block_1").rglob("*"):
        data = bytearray(file.read_bytes()) if file.is_file() else b""
        if weights in data:
            data[data.index(weights) + 5] ^= 1
            file.write_bytes(data)
            break
    else:
        pytest.fail("the weights' bytes are not on the disk as they are")
    opened = open_checkpoint(saved.path)
    with pytest.raises(UserError, match="blocks/1/"):
        opened.verify()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda m: m.pop("digest"), "digest"),
        (lambda m: m.update(format="x"), "format"),
        (lambda m: m["config"].update(num_layers=3), "blocks/2"),
        (lambda m: m["config"].update(colour="red"), "colour"),
        (lambda m: m["leaves"].pop("embed/embedding"), "embed/embedding"),
        (lambda m: m["leaves"]["embed/embedding"].update(dtype="int8"), "int8"),
        (lambda m: m.update(leaves=3), "cannot be read"),
        (lambda m: m.update(files=None), "cannot be read"),
    ],
)
def test_damaged_metadata_is_one_error(change, part, saved):
    file = saved.path / METADATA_NAME
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    with pytest.raises(UserError, match=part) as caught:
        open_checkpoint(saved.path)
    assert "\n" not in str(caught.value)


def test_what_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(UserError, match="python -m convert"):
        open_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path)


def test_unknown_parameters_and_layers_are_named(saved):
    with pytest.raises(UserError, match="blocks/9/x"):
        saved.read("blocks/9/x")
    with pytest.raises(UserError, match="layer is 2"):
        saved.read_block(2)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    config = tiny.llama_config(num_layers=1)
    flat = flattened(random_params(config))
    dest = tmp_path / "ours"

    def fail_in_the_middle():
        with writing_lock(dest), new_checkpoint(dest, config, {}) as writer:
            writer.write({"embed/embedding": flat["embed/embedding"]})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_weights_that_reach_the_disk_changed_are_noticed(tmp_path, monkeypatch):
    """orbax #605: a save that "succeeded" had a partial file."""
    from jaxablate import stored_arrays

    def save_other(array):
        return jnp.asarray(array) * 2

    monkeypatch.setattr(stored_arrays, "_in_place", save_other)
    config = tiny.llama_config(num_layers=1)
    with pytest.raises(UserError, match="does not have its digest"):
        save_checkpoint(tmp_path / "ours", config, random_params(config))
    assert list(tmp_path.iterdir()) == []


def test_aligned_arrays_are_taken_in_place():
    array = aligned_empty((5, 7), np.dtype(ml_dtypes.bfloat16))
    array[...] = 1
    assert array.ctypes.data % 64 == 0
    assert array.flags.c_contiguous


CONVERT = "import sys, convert; print(convert.resolve(sys.argv[1], sys.argv[2]).digest)"


def start(directory, cache, **options):
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, str(directory), str(cache)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_converters_into_one_cache_wait_for_each_other(tmp_path):
    directory = hf.write(tmp_path / "hf", hf.tensors())
    processes = [start(directory, tmp_path / "cache") for _ in range(3)]
    digests = set()
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err[-2000:]
        digests.add(out)
    assert len(digests) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_killed_conversion_leaves_nothing_finished_and_starts_again(tmp_path):
    """Killed once its first groups are on the disk; the next start cleans up and completes."""
    rng = np.random.default_rng(0)
    weights = hf.tensors(layers=40)
    wide = {name: rng.normal(size=(w.shape[0] * 8, w.shape[1] * 8) if w.ndim == 2 else w.size * 8)
            for name, w in weights.items()}  # fmt: skip
    changes = {"num_hidden_layers": 40, "hidden_size": 96, "head_dim": 32}
    changes |= {"intermediate_size": 160, "vocab_size": 240}
    wide = {name: value.astype(np.float32) for name, value in wide.items()}
    directory = hf.write(tmp_path / "hf", wide, changes)
    cache = tmp_path / "cache"
    process = start(directory, cache)
    deadline = time.monotonic() + 120
    while not list(cache.glob(".*partial*/weights/block_1")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    leftovers = [path.name for path in cache.iterdir()]
    assert any("partial" in name for name in leftovers)
    assert all(name.startswith(".") for name in leftovers)
    again = start(directory, cache)
    out, err = again.communicate()
    assert again.returncode == 0, err[-2000:]
    found = [path for path in cache.iterdir() if "partial" in path.name or is_checkpoint(path)]
    assert len(found) == 1
    assert open_checkpoint(found[0]).digest == out.strip()
    shutil.rmtree(cache)
    assert convert.resolve(str(directory), cache).digest == out.strip()
