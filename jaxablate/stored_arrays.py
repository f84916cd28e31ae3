"""One group of a checkpoint: named arrays in a directory, through Orbax, each with its digest."""

import concurrent.futures
import contextlib
import ctypes
import gc
import hashlib
import json
import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import jax
import ml_dtypes
import numpy as np

from jaxablate.errors import UserError

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Orbax needs twice an array's size to read it, so larger ones are stored in parts of this size.
# (Its own chunks are no help: they need as much, and a copy for saving, and four times the time.)
PART_BYTES = 2**28

# Orbax numbers its operations in a global counter that they look at again later: a load in one
# thread makes a save in another lose files.
_ORBAX_LOCK = threading.Lock()
# A garbage collection is not worth its time after groups that are smaller.
SMALL_GROUP_BYTES = 2**24
# BLAKE3 is four times as fast as SHA-256, which took longer than anything else of a conversion.
_BLAKE3 = "blake3:"
# Files, and when they were written, that this process has compared with their digests.
_CHECKED: set[tuple[str, int]] = set()
_ALIGNMENT = 64  # of arrays that JAX uses in place


class Leaf(NamedTuple):
    """What is known of a stored parameter: dtype, shape, and a digest of its bytes in C order.

    The digest is "blake3:" and hexadecimal digits; bare digits, of older checkpoints, are sha256.

    `parts` is how many arrays it is stored as, cut along its first axis.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    digest: str
    parts: int = 1

    def part_names(self, path: str) -> list[str]:
        """Orbax's names of what is stored."""
        name = path.replace("/", ".")
        return [name] if self.parts == 1 else [f"{name}.part{i}" for i in range(self.parts)]

    def part_rows(self, index: int) -> slice:
        """The rows in one part."""
        rows = self.shape[0]
        return slice(index * rows // self.parts, (index + 1) * rows // self.parts)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX, and so Orbax, takes without a copy on the CPU."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(dtype).reshape(shape)


def save_arrays(directory: Path, arrays: dict[str, np.ndarray]) -> dict[str, Leaf]:
    """Write C-contiguous arrays by path; the dict is emptied, so that they can be freed.

    Raises:
      UserError: the disk is full, or cannot be written for another reason.
    """
    from orbax.checkpoint import v1 as ocp

    size = sum(array.nbytes for array in arrays.values())
    directory.parent.mkdir(exist_ok=True)
    tree = {}
    try:
        # Hashing releases the interpreter's lock: it goes on while Orbax writes.
        with (
            concurrent.futures.ThreadPoolExecutor(1, "digest") as digests,
            orbax_context(),
            _without_closed_loops(),
        ):
            stored = {path: _stored_as(array) for path, array in arrays.items()}
            hashed = digests.map(array_digest, list(arrays.values()))
            for path, leaf in stored.items():
                array = arrays.pop(path)
                for index, name in enumerate(leaf.part_names(path)):
                    whole = leaf.parts == 1
                    tree[name] = _in_place(array if whole else array[leaf.part_rows(index)])
                del array
            ocp.save(directory, tree)
            leaves = {
                path: leaf._replace(digest=digest)
                for (path, leaf), digest in zip(stored.items(), hashed)
            }
    except (ValueError, OSError, RuntimeError) as error:  # a full disk comes as any of them
        text = " ".join(str(error).split())
        reason = re.search(r"([^:]+) \[os_error_code", text)
        raise UserError(
            f"{directory} cannot be written: {reason[1].strip() if reason else text[:300]}"
        ) from error
    del tree
    if size > SMALL_GROUP_BYTES:
        trim_memory()
    return leaves


@contextlib.contextmanager
def _without_closed_loops() -> Iterator[None]:
    """Silence what writes of a failed save report to Orbax's event loop, which is closed by then.

    The error itself is raised; these arrive while it is, and after, so that the silence stays.
    """
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook
    yield
    sys.unraisablehook = previous


def _stored_as(array: np.ndarray) -> Leaf:
    """How it is stored; its digest is not known yet."""
    parts = max(1, min(-(-array.nbytes // PART_BYTES), *array.shape[:1]))
    return Leaf(array.dtype, array.shape, "", parts)


def load_arrays(
    directory: Path, leaves: Mapping[str, Leaf], targets: Mapping[str, Any]
) -> dict[str, Any]:
    """Read some parameters of one group.

    Args:
      leaves: every parameter that is stored in the group.
      targets: path -> numpy dtype, for a numpy array; or a jax.ShapeDtypeStruct with dtype and
        sharding, for a JAX array.

    Raises:
      UserError: the group's files are damaged.
    """
    _check_once(directory, leaves, targets)
    at_once = {path: target for path, target in targets.items() if leaves[path].parts == 1}
    wanted = {}
    for path, target in at_once.items():
        (name,) = leaves[path].part_names(path)
        is_jax = isinstance(target, jax.ShapeDtypeStruct)
        wanted[name] = target if is_jax else _numpy_target(leaves[path].shape, target)
    found = _load(directory, leaves, wanted) if wanted else {}
    loaded = {path: found.pop(leaves[path].part_names(path)[0]) for path in at_once}
    for path, target in targets.items():
        if path not in at_once:
            loaded[path] = _load_in_parts(directory, leaves, path, target)
    return {path: loaded[path] for path in targets}


def _load_in_parts(directory: Path, leaves: Mapping[str, Leaf], path: str, target: Any) -> Any:
    leaf = leaves[path]
    is_jax = isinstance(target, jax.ShapeDtypeStruct)
    array = aligned_empty(leaf.shape, np.dtype(target.dtype if is_jax else target))
    for index, part in enumerate(_parts(directory, leaves, path, array.dtype)):
        array[leaf.part_rows(index)] = part
    if not is_jax:
        return array
    return jax.make_array_from_callback(leaf.shape, target.sharding, lambda rows: array[rows])


def _parts(
    directory: Path, leaves: Mapping[str, Leaf], path: str, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """What a parameter is stored as, one array after another."""
    leaf = leaves[path]
    for index, name in enumerate(leaf.part_names(path)):
        shape = leaf.shape
        if leaf.parts > 1:
            rows = leaf.part_rows(index)
            shape = (rows.stop - rows.start, *leaf.shape[1:])
        yield _load(directory, leaves, {name: _numpy_target(shape, dtype)})[name]


def _load(directory: Path, leaves: Mapping[str, Leaf], wanted: Mapping[str, Any]) -> dict[str, Any]:
    from orbax.checkpoint import v1 as ocp

    stored = [name for path, leaf in leaves.items() for name in leaf.part_names(path)]
    tree = {name: wanted.get(name, ocp.PLACEHOLDER) for name in stored}
    try:
        with orbax_context():
            loaded = ocp.load(directory, tree)
    except (ValueError, OSError, KeyError) as error:
        message = " ".join(str(error).split())[:300]
        raise UserError(
            f"{directory} cannot be read: {message}; delete the checkpoint and convert again"
        ) from error
    return {name: loaded[name] for name in wanted}


def verify_group(directory: Path, leaves: Mapping[str, Leaf]) -> None:
    """Read the parameters of one group and compare them with their digests.

    Raises:
      UserError: one is damaged; the message names it.
    """
    for path, leaf in leaves.items():
        files = _plain_files(directory, leaf, path)
        if files:
            # Not taken through Orbax, which needs memory for them, and a lock that keeps other
            # groups from being saved.
            intact = _have_digest(files, leaf)
        else:  # one at a time, and one part at a time, so that checking needs little memory
            digest = _hasher(leaf.digest)
            for part in _parts(directory, leaves, path, leaf.dtype):
                digest.update(_bytes(part))
            intact = digest.hexdigest() == leaf.digest.removeprefix(_BLAKE3)
        if not intact:
            raise _damaged(directory, path)


def _check_once(directory: Path, leaves: Mapping[str, Leaf], paths: Iterable[str]) -> None:
    """Compare parameters with their digests when this process first reads them.

    A flipped bit would give wrong numbers under the intact model's digest. Hashing plain files is
    fast beside loading them; those of older checkpoints are compared by `verify_group` alone.
    """
    for path in paths:
        files = _plain_files(directory, leaves[path], path)
        seen = {(str(file), file.stat().st_mtime_ns) for file in files if file.is_file()}
        if files and not seen <= _CHECKED:
            if not _have_digest(files, leaves[path]):
                raise _damaged(directory, path)
            _CHECKED.update(seen)


def _damaged(directory: Path, path: str) -> UserError:
    return UserError(
        f"{directory} is damaged: {path} does not have its digest; "
        "delete the checkpoint and convert again"
    )


def _plain_files(directory: Path, leaf: Leaf, path: str) -> list[Path]:
    """The files that hold a parameter's bytes and nothing else, or none."""
    files = [_plain_file(directory / "state" / name) for name in leaf.part_names(path)]
    return [file for file in files if file] if all(files) else []


def _have_digest(files: Sequence[Path], leaf: Leaf) -> bool:
    digest = _hasher(leaf.digest)
    for file in files:
        _hash_file(digest, file)
    return digest.hexdigest() == leaf.digest.removeprefix(_BLAKE3)


def _plain_file(stored: Path) -> Path | None:
    """The one file with an array's bytes in C order, if a Zarr array is stored that way."""
    try:
        about = json.loads((stored / ".zarray").read_text())
        plain = about["chunks"] == about["shape"] and about["order"] == "C"
        if not plain or about["compressor"] or about["filters"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # another format, or damaged: Orbax says which
    return stored / (".".join(["0"] * len(about["shape"])) or "0")


def _hash_file(digest: Any, file: Path) -> None:
    """Feed a file to a hash; one that cannot be read leaves it without the right digest."""
    buffer = memoryview(bytearray(2**20))
    with contextlib.suppress(OSError), file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            digest.update(buffer[:count])


def trim_memory(collect: bool = True) -> None:
    """Give freed memory back to the system.

    Orbax leaves saved arrays in reference cycles (hence `collect`), and glibc keeps what its
    threads' buffers needed: together they would hold several groups of weights.
    """
    if collect:
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def array_digest(array: np.ndarray) -> str:
    """Of the array's bytes in C order."""
    return _BLAKE3 + blake3.blake3(_bytes(array)).hexdigest()


def _hasher(digest: str) -> Any:
    """What computes digests of this kind."""
    return blake3.blake3() if digest.startswith(_BLAKE3) else hashlib.sha256()


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _in_place(array: np.ndarray) -> Any:
    """The array as JAX's, without a copy where it is aligned: Orbax copies numpy arrays."""
    try:
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # a process restricted to an accelerator has no CPU backend
        return array


def _numpy_target(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # Orbax takes the type of the target: a numpy array of zero strides stands for one of `shape`.
    return np.broadcast_to(np.zeros((), dtype), shape)


@contextlib.contextmanager
def orbax_context() -> Iterator[None]:
    """Orbax's settings; every process reads and writes for itself, without barriers.

    Its log is silent meanwhile: it prints tracebacks of errors that are raised here anyway.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    saving = context.array.saving
    saving.use_replica_parallel = False  # this process alone
    saving.array_metadata_store = None  # for random keys; its directory is made too late at times
    saving.use_compression = False  # floating-point weights hardly compress
    # A file per array: the formats that put many into one take a quarter longer to write.
    saving.use_ocdbt = saving.use_zarr3 = False
    saving.enable_write_sharding_file = False  # the target's sharding is always given

    def not_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(not_orbax)
    try:
        with _ORBAX_LOCK, context:
            yield
    finally:
        logger.removeFilter(not_orbax)
