"""Streamed weights: a model four times larger than the memory it is given, with equal results."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny

from jaxablate.checkpoint import nested
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.config import block_param_shapes, param_shapes

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 48 << 20  # bytes, beyond the interpreter and its compiled code
LAYERS = 48
CONFIG = tiny.llama_config(
    num_layers=LAYERS, model_dim=384, mlp_dim=1536, num_heads=6, num_kv_heads=2, head_dim=64,
    rotary_dim=64, vocab_size=97,
)  # fmt: skip


def _save(path: Path, num_layers: int) -> None:
    """Random weights, stored in bfloat16."""
    config = CONFIG.replace(num_layers=num_layers)
    pool = np.random.default_rng(0).normal(size=1 << 20).astype(ml_dtypes.bfloat16)
    arrays = {}
    for index, (name, shape) in enumerate(param_shapes(config).items()):
        if name.endswith("scale"):
            arrays[name] = np.ones(shape, pool.dtype)
        else:
            flat = np.resize(np.roll(pool, 977 * index), math.prod(shape))
            arrays[name] = flat.reshape(shape) * np.asarray(0.05, pool.dtype)
    save_checkpoint(path, config, nested(arrays))


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory through /proc")
def test_a_model_four_times_larger_than_its_memory(tmp_path):
    stored = 2 * LAYERS * sum(math.prod(s) for s in block_param_shapes(CONFIG).values())
    assert stored >= 4 * LIMIT  # and twice that in float32, which it computes in
    for name, layers in (("small", 3), ("big", LAYERS)):
        _save(tmp_path / name, layers)
    done = subprocess.run(
        [sys.executable, "tests/stream_child.py", tmp_path / "small", tmp_path / "big"],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            # glibc keeps some of what was freed, in an arena for each thread: with few of them the
            # measurement is of what is in use.
            "MALLOC_ARENA_MAX": "2",
            "MALLOC_TRIM_THRESHOLD_": "1000000",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["gained"] < LIMIT
    assert found["differences"] == [0, 0, 0, 0]
    # Prefill, baseline, two waves, means of two batches at once, another baseline, its one wave:
    # each block once for each, and a block more where the next pass starts elsewhere.
    reads = found["reads"]
    assert len(reads) == LAYERS
    assert max(reads.values()) <= 9
    assert reads[str(LAYERS - 1)] <= 7
