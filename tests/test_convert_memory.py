"""Conversion streams: its memory is that of the largest tensor, whatever the model's size."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEGABYTE = 2**20
# Peak resident memory of a process that imports and starts everything, then converts.
CONVERT = """
import json, resource, sys, time
import jax, convert
from pathlib import Path
from orbax.checkpoint import v1 as ocp
jax.config.update("jax_platforms", "cpu")
jax.devices()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, begin = peak(), time.monotonic()
checkpoint = convert.convert(convert.open_source(sys.argv[1]), Path(sys.argv[2]))
print(json.dumps({"memory": peak() - before, "seconds": time.monotonic() - begin,
                  "bytes": checkpoint.num_bytes, "digest": checkpoint.digest}))
"""
MAKE = """
import dataclasses, sys
sys.path.insert(0, "bench")
from pathlib import Path
import make_random_checkpoint as bench
config, shards = bench.random_config(sys.argv[1])
changes = dict(change.split("=") for change in sys.argv[3:])
config = dataclasses.replace(config, **{name: int(value) for name, value in changes.items()})
bench.make(config, Path(sys.argv[2]), shards)
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def largest_tensor(directory):
    from convert.safetensors_files import read_header

    return max(
        math.prod(entry.shape) * entry.dtype.itemsize
        for path in directory.glob("*.safetensors")
        for entry in read_header(path).values()
    )


def check(directory, dest):
    found = json.loads(run(CONVERT, directory, dest).splitlines()[-1])
    limit = 1.3 * largest_tensor(directory) + 300 * MEGABYTE
    assert found["memory"] <= limit, f"{found['memory']:,} bytes over {limit:,.0f}"
    return found


def test_a_model_of_half_a_gigabyte(tmp_path):
    """550 MB, the largest tensor 32 MB: holding the model would be noticed."""
    changes = ["num_layers=6", "vocab_size=8000"]
    run(MAKE, "1b", tmp_path / "hf", *changes)
    found = check(tmp_path / "hf", tmp_path / "ours")
    assert found["bytes"] > 1.6 * (1.3 * 32 + 300) * MEGABYTE
    shutil.rmtree(tmp_path / "ours")


LIMITED = """
import resource, signal, sys
from convert.__main__ import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_is_full(tmp_path):
    """Files may have a megabyte: the third group does not fit. One line, and nothing is left."""
    run(MAKE, "tiny", tmp_path / "hf", "mlp_dim=8000")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "hf"), str(tmp_path / "ours")],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("cannot be written: File too large\n")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.slow
def test_a_model_of_8_billion_parameters(tmp_path):
    """Llama 3.1's shape, 16 GB in 4 shards: memory, and at least half the speed of a file copy."""
    if shutil.disk_usage(tmp_path).free < 45e9:
        pytest.skip("less than 45 GB of disk are free")
    source = tmp_path / "hf"
    run(MAKE, "8b", source)
    copy = f"import shutil, os; shutil.copytree({str(source)!r}, {str(tmp_path / 'copy')!r})"
    seconds = "import time; begin = time.monotonic()"
    copied = float(run(f"{seconds}; {copy}; os.sync(); print(time.monotonic() - begin)"))
    shutil.rmtree(tmp_path / "copy")
    found = check(source, tmp_path / "ours")
    print(f"copied in {copied:.0f} s, converted in {found['seconds']:.0f} s, "
          f"{found['memory'] / MEGABYTE:.0f} MB")  # fmt: skip
    shutil.rmtree(tmp_path)
    assert found["bytes"] == 16_060_522_496
    assert found["seconds"] <= 2 * copied
