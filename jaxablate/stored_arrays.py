"""One group of a checkpoint: named arrays in a directory, through Orbax, verified by sha256."""

import contextlib
import ctypes
import gc
import hashlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jaxablate.errors import UserError

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Reading a parameter needs twice its size unless it is stored in chunks; chunks cost four times
# the processor time. So the few that are larger than the first number are cut into the second.
UNCUT_BYTES = 2**28
CHUNK_BYTES = 2**26

# Orbax numbers its operations in a global counter that they look at again later: a load in one
# thread makes a save in another lose files.
_ORBAX_LOCK = threading.Lock()
# A garbage collection is not worth its time after groups that are smaller.
SMALL_GROUP_BYTES = 2**24
_ALIGNMENT = 64  # of arrays that JAX uses in place


class Leaf(NamedTuple):
    """What is known of a stored parameter: dtype, shape, and sha256 of its bytes in C order."""

    dtype: np.dtype
    shape: tuple[int, ...]
    sha256: str


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

    leaves = {
        path: Leaf(array.dtype, array.shape, array_sha256(array)) for path, array in arrays.items()
    }
    size = sum(array.nbytes for array in arrays.values())
    chunked = any(array.nbytes > UNCUT_BYTES for array in arrays.values())
    directory.parent.mkdir(exist_ok=True)
    tree = {path.replace("/", "."): _in_place(array) for path, array in arrays.items()}
    arrays.clear()
    try:
        with orbax_context(chunked):
            ocp.save(directory, tree)
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


def load_arrays(
    directory: Path, stored: Iterable[str], targets: Mapping[str, Any]
) -> dict[str, Any]:
    """Read some of the parameters that are `stored` in one group into arrays like `targets`.

    Raises:
      UserError: the group's files are damaged.
    """
    from orbax.checkpoint import v1 as ocp

    tree = {path.replace("/", "."): targets.get(path, ocp.PLACEHOLDER) for path in stored}
    try:
        with orbax_context():
            loaded = ocp.load(directory, tree)
    except (ValueError, OSError, KeyError) as error:
        message = " ".join(str(error).split())[:300]
        raise UserError(
            f"{directory} cannot be read: {message}; delete the checkpoint and convert again"
        ) from error
    return {path: loaded[path.replace("/", ".")] for path in targets}


def verify_group(directory: Path, leaves: Mapping[str, Leaf]) -> None:
    """Read the parameters of one group and compare them with their sha256.

    Raises:
      UserError: one is damaged; the message names it.
    """
    for path, leaf in leaves.items():
        # One at a time, so that checking needs little memory.
        targets = {path: numpy_target(leaf.shape, leaf.dtype)}
        array = load_arrays(directory, leaves, targets)[path]
        if array_sha256(array) != leaf.sha256:
            raise UserError(
                f"{directory} is damaged: {path} does not have its digest; "
                "delete the checkpoint and convert again"
            )


def trim_memory(collect: bool = True) -> None:
    """Give freed memory back to the system.

    Orbax leaves saved arrays in reference cycles (hence `collect`), and glibc keeps what its
    threads' buffers needed: together they would hold several groups of weights.
    """
    if collect:
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def array_sha256(array: np.ndarray) -> str:
    """Of the array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _in_place(array: np.ndarray) -> Any:
    """The array as JAX's, without a copy where it is aligned: Orbax copies numpy arrays."""
    try:
        return jax.device_put(array, jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # a process restricted to an accelerator has no CPU backend
        return array


def numpy_target(shape: Iterable[int], dtype: np.dtype) -> np.ndarray:
    # Orbax takes the type of the target: a numpy array of zero strides stands for one of `shape`.
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


@contextlib.contextmanager
def orbax_context(chunked: bool = False) -> Iterator[None]:
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
    if chunked:
        saving.storage_options.chunk_byte_size = CHUNK_BYTES
        saving.storage_options.shard_axes = (0,)
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
