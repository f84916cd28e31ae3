"""Other people's model files -> a jaxablate checkpoint, and back.

    checkpoint = convert.resolve("smollm2-135m-instruct")
    model = checkpoint.restore()

On the command line: python -m convert --help
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax

from convert.conversion import convert
from convert.export import export_hf
from convert.sources import REGISTERED, Source, fingerprint, open_source
from jaxablate.checkpoint import FORMAT_VERSION, Checkpoint, is_checkpoint, open_checkpoint
from jaxablate.errors import UserError

__all__ = ["REGISTERED", "cache_directory", "convert", "export_hf", "open_source", "resolve"]


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where converted models are kept: the argument, $JAXABLATE_CACHE or ~/.cache/jaxablate."""
    chosen = cache_dir or os.environ.get("JAXABLATE_CACHE") or "~/.cache/jaxablate"
    return Path(chosen).expanduser().resolve()


def resolve(
    source: str, cache_dir: str | os.PathLike[str] | None = None, dtype: str | None = None
) -> Checkpoint:
    """The checkpoint of a model, converted once into the cache if it is none yet.

    Args:
      source: a checkpoint's directory (opened as it is, whatever `dtype`), or any source of
        `open_source`: a Hugging Face directory, a .gguf file, a hub name, a registered name.
      cache_dir: see `cache_directory`.
      dtype: of the weights in the cache; None: as the source stores them.

    Raises:
      UserError: there is no such source, or it cannot be converted.
    """
    if is_checkpoint(source):
        return open_checkpoint(source)
    opened = open_source(source)
    dest = cache_directory(cache_dir) / _cache_name(opened, dtype)
    if dest.exists():
        try:
            return open_checkpoint(dest)
        except UserError as error:
            print(f"converting again: {error}", file=sys.stderr)
            shutil.rmtree(dest, ignore_errors=True)
    if jax.process_count() > 1:
        return _convert_in_own_process(source, dest, dtype)
    return convert(opened, dest, dtype, reuse=True)


def _cache_name(source: Source, dtype: str | None) -> str:
    name = re.sub(r"[^\w.-]+", "_", source.name).strip(".")[:80] or "model"
    suffix = f"-{dtype}" if dtype else ""
    return f"{name}{suffix}-v{FORMAT_VERSION}-{fingerprint(source)[:16]}"


def _convert_in_own_process(source: str, dest: Path, dtype: str | None) -> Checkpoint:
    """Conversion belongs to one process; in a program of several, Orbax would wait for all."""
    command = [sys.executable, "-m", "convert", source, str(dest), "--reuse"]
    command += ["--dtype", dtype] if dtype else []
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    if done.returncode:
        raise UserError(f"{source} could not be converted; the reason is above")
    return open_checkpoint(dest)
