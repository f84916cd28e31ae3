"""Settings that every test runs under: strict dtypes and ranks, warnings are errors, offline."""

import os
import signal
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Shapes in annotations are checked at run time, in the tests only.
_hook = install_import_hook("jaxablate", "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Real text and an independent implementation's numbers, beside the checkout; else skip."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not (path / "oracle").is_dir():
        pytest.skip(f"no reference numbers and texts at {path}")
    return path


@pytest.fixture
def interrupted_by_default() -> Iterator[None]:
    """SIGINT as Python sets it: in the background of a shell it is ignored from the start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
