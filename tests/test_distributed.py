"""One JAX program in two processes of four forced CPU devices writes the rows of one process."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import tiny
import tiny_tokenizer

import convert

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300


def test_two_processes_write_the_rows_of_one(tmp_path):
    config = tiny.llama_config(num_layers=2, vocab_size=320)
    params = jax.tree.map(np.asarray, tiny.random_params(config, seed=2, scale=0.2))
    tokenizer_dir = tiny_tokenizer.write_tokenizer(tmp_path / "tokenizer")
    convert.export_hf(config, params, tmp_path / "hf", tokenizer_dir)
    text = " ".join(np.random.default_rng(0).choice(["keys", "of", "a", "head", "kept"], 200))
    (tmp_path / "text.txt").write_text(text)

    one = _start(tmp_path, "one", devices=1)
    assert _end(one) == 0, _said(tmp_path, "one")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    program = ("--distributed", f"--coordinator=localhost:{port}", "--num_processes=2")
    several = [
        _start(tmp_path, f"process-{i}", 4, *program, f"--process_id={i}", "--out=two")
        for i in range(2)
    ]
    codes = [_end(process) for process in several]
    assert codes == [0, 0], _said(tmp_path, "process-0") + _said(tmp_path, "process-1")

    expected = pd.read_parquet(tmp_path / "one" / "rows.parquet")
    found = pd.read_parquet(tmp_path / "two" / "rows.parquet")
    assert len(found) == 2 + 3  # baseline and full cache; one head at three ratios
    measured = ["nll_sum", "block_nll"]
    pd.testing.assert_frame_equal(found.drop(columns=measured), expected.drop(columns=measured))
    np.testing.assert_allclose(
        np.concatenate(found.block_nll.to_list()),
        np.concatenate(expected.block_nll.to_list()),
        rtol=0,
        atol=16 * 1e-5,  # sums of 16 tokens
    )
    assert "8 JAX devices, 2 processes" in _said(tmp_path, "process-0")
    assert "rows.parquet" not in _said(tmp_path, "process-1")  # process 0 alone reports


def _start(home: Path, name: str, devices: int, *arguments: str) -> subprocess.Popen:
    flags = [
        "--model=hf", "--text=text.txt", "--article_tokens=60", "--scored_tokens=32",
        "--heads=L0H1", "--ratios=0,0.3,1", f"--out={name}", *arguments,
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAXABLATE_CACHE": str(home / "cache"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} "
        "--xla_backend_optimization_level=0",
    }
    with (home / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / "experiments" / "influence.py", *flags],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=log,
        )


def _end(process: subprocess.Popen) -> int:
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _said(home: Path, name: str) -> str:
    return f"\n{name}:\n{(home / f'{name}.log').read_text()[-3000:]}"
