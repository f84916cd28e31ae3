"""bench/gpu.sh runs, with a small model on the CPU; how fast, only a GPU can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_gpu_benchmark_runs_on_a_small_model(tmp_path):
    done = subprocess.run(
        ["bash", "bench/gpu.sh", "--tiny", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert max(found["parity"].values()) < 1e-5  # PyTorch is there in the tests
    assert found["configurations"] > 4
    for name in ("matmul_tflops", "tflops", "share_of_matmul", "map_hours", "ratio"):
        assert found[name] > 0
    # The share is what the configurations and the rate say.
    share = found["tflops"] / found["matmul_tflops"]
    assert found["share_of_matmul"] == pytest.approx(share)
    for line in ("device", "rate", "sweep", "map", "PyTorch", "memory"):
        assert f"\n{line} " in "\n" + done.stdout
