"""Writing checkpoints: group by group, verified, and finished by one rename."""

import concurrent.futures
import contextlib
import gc
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxablate.checkpoint import (
    FORMAT,
    FORMAT_VERSION,
    METADATA_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    flattened,
    group_of,
    groups_of,
    open_checkpoint,
    weights_digest,
)
from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.errors import UserError
from jaxablate.stored_arrays import DTYPES, Leaf, save_arrays, verify_group

# Larger groups (an embedding) are not held beside another group.
LARGE_GROUP_BYTES = 2**29


@contextlib.contextmanager
def writing_lock(dest: Path) -> Iterator[None]:
    """Let one process at a time write `dest`; the lock dies with its process.

    Raises:
      UserError: the directory that is to hold `dest` cannot be written.
    """
    path = dest.parent / f".{dest.name}.lock"
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        file = _open_lock(path)
    except OSError as error:
        raise UserError(
            f"{dest.parent} cannot be written: {error.strerror}; choose another "
            "place, or another cache directory (JAXABLATE_CACHE)"
        ) from error
    with file:  # closing releases the lock
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _open_lock(path: Path) -> Any:
    import fcntl

    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that writes {path.parent}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        # Its holder removes the file when done: then this lock is on a file that is gone.
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()


class CheckpointWriter:
    """Receives the groups of a model one after another; see `new_checkpoint`.

    Saving goes on beside the caller, who makes the next group meanwhile; what is on the disk is
    read back and compared beside both.
    """

    def __init__(self, work: Path, config: TransformerConfig, provenance: Mapping[str, Any]):
        self.work = work
        self.config = config
        self.provenance = dict(provenance)
        self.tokenizer_dir = work / TOKENIZER_NAME
        self.leaves: dict[str, Leaf] = {}
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-writer")
        self._saving: concurrent.futures.Future[None] | None = None
        # Waiting for the disk and reading back need little memory: the next groups go on.
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-check")
        self._checks: list[concurrent.futures.Future[None]] = []

    def write(self, arrays: dict[str, np.ndarray]) -> None:
        """Take one group: all of its parameters, path -> array, C-contiguous.

        The dict is emptied: its arrays are freed as soon as they are on the disk. An error of the
        group before is raised here.
        """
        _require_parameters(self.config, arrays)
        self.wait()
        taken = dict(arrays)
        arrays.clear()
        size = sum(array.nbytes for array in taken.values())
        self._saving = self._executor.submit(self._save, taken)
        del taken
        if size > LARGE_GROUP_BYTES:
            self.wait()

    def wait(self) -> None:
        """Return when the last group is written; `finish` waits for the disk and the checks."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        self._executor.shutdown(wait=True)
        self._disk.shutdown(wait=True, cancel_futures=True)

    def _save(self, arrays: dict[str, np.ndarray]) -> None:
        directory = self.work / WEIGHTS_NAME / group_of(next(iter(arrays)))
        leaves = save_arrays(directory, arrays)
        self._checks.append(self._disk.submit(_sync_and_verify, directory, leaves))
        self.leaves |= leaves

    def finish(self) -> None:
        """Write the metadata and check that what lies on the disk can be opened."""
        self.wait()
        for check in self._checks:
            check.result()
        config = self.config.to_dict()
        weights = self.work / WEIGHTS_NAME
        files = {
            str(file.relative_to(self.work)): file.stat().st_size
            for file in sorted(weights.rglob("*"))
            if file.is_file()
        }
        ordered = {path: self.leaves[path] for path in param_shapes(self.config)}
        metadata = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "digest": weights_digest(config, ordered),
            "config": config,
            "provenance": self.provenance,
            "files": files,
            "leaves": {
                path: leaf._asdict() | {"dtype": leaf.dtype.name} for path, leaf in ordered.items()
            },
        }
        text = json.dumps(metadata, indent=1) + "\n"
        (self.work / METADATA_NAME).write_text(text)
        _sync_tree(self.work)
        open_checkpoint(self.work)


def _require_parameters(config: TransformerConfig, arrays: Mapping[str, np.ndarray]) -> None:
    # A function of its own, so that no variable holds an array beyond it.
    shapes = param_shapes(config)
    for path, array in arrays.items():
        if array.shape != shapes.get(path) or array.dtype.name not in DTYPES:
            raise ValueError(
                f"parameter {path} is {array.dtype} {array.shape}; "
                f"{shapes.get(path)} of {', '.join(DTYPES)} is required"
            )


@contextlib.contextmanager
def new_checkpoint(
    dest: Path, config: TransformerConfig, provenance: Mapping[str, Any]
) -> Iterator[CheckpointWriter]:
    """Write a checkpoint that appears at `dest` when the block ends well, and not before.

    The caller holds `writing_lock(dest)`. Leftovers of writers that were killed are removed.

    Raises:
      UserError: something is at `dest` already, or the disk is full.
    """
    if dest.exists():
        raise UserError(f"{dest} exists already; remove it or choose another name")
    for leftover in dest.parent.glob(f".{dest.name}.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = dest.parent / f".{dest.name}.partial-{uuid.uuid4().hex[:8]}"
    work.mkdir()
    writer = CheckpointWriter(work, config, provenance)
    # Every group ends with a garbage collection (see `trim_memory`), which is to look at what the
    # group made and not at all that JAX and Orbax have loaded: a third of the whole time.
    gc.collect()
    gc.freeze()
    try:
        yield writer
        writer.finish()
        work.rename(dest)
        _sync_directory(dest.parent)
    except OSError as error:
        raise UserError(f"{dest} cannot be written: {error.strerror or error}") from error
    finally:
        gc.unfreeze()
        writer.close()
        shutil.rmtree(work, ignore_errors=True)


def save_checkpoint(
    dest: str | os.PathLike[str],
    config: TransformerConfig,
    params: Mapping[str, Any],
    tokenizer_dir: Path | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Save a model that is in memory; `params` is the nested dict of `Transformer.to_params`.

    Raises:
      UserError: `dest` exists already or cannot be written.
    """
    path = Path(dest).expanduser().resolve()
    flat = flattened(params)
    with writing_lock(path), new_checkpoint(path, config, provenance or {}) as writer:
        for group in groups_of(config):
            writer.write({
                name: np.ascontiguousarray(array)
                for name, array in flat.items()
                if group_of(name) == group
            })  # fmt: skip
        if tokenizer_dir is not None:
            shutil.copytree(tokenizer_dir, writer.tokenizer_dir)
    return open_checkpoint(path)


def _sync_and_verify(directory: Path, leaves: Mapping[str, Leaf]) -> None:
    _sync_tree(directory)
    verify_group(directory, leaves)


def _sync_tree(directory: Path) -> None:
    for parent, _, names in os.walk(directory):
        for name in names:
            _sync(Path(parent, name), os.O_RDONLY)
        _sync_directory(Path(parent))


def _sync_directory(directory: Path) -> None:
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
