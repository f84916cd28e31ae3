"""Safetensors files, read some rows at a time and written as a stream.

The format (github.com/huggingface/safetensors): 8 bytes little-endian length of a JSON header,
the header {name: {dtype, shape, data_offsets}}, then the data. Every number in the header comes
from a stranger and is checked before it is used.
"""

import json
import math
import os
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.config_json import one_line, parse_json_object, read_json_file
from jaxablate.errors import UserError

# A model of 8 billion parameters has 30 kB. The bound keeps Python's objects for a header made of
# brackets under 200 MB.
MAX_HEADER_BYTES = 8_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file: dtype, shape, and its first and past-the-end byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """Name -> entry of one safetensors file.

    Raises:
      UserError: the file is truncated, its header malformed, or its offsets overlap, leave gaps,
        lie out of range or disagree with dtype and shape.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise UserError(
                    f"{path} is no safetensors file: it has {size:,} bytes and says that its "
                    f"header has {length:,}"
                )
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    header = parse_json_object(text, f"the header of {path}")
    header.pop("__metadata__", None)
    _refuse_repeated_names(text, header, path)
    entries = {
        name: _entry(path, name, value, 8 + length, size - 8 - length)
        for name, value in header.items()
    }
    _check_layout(path, entries, 8 + length, size)
    return entries


def _refuse_repeated_names(text: bytes, header: Mapping[str, Any], path: Path) -> None:
    """JSON readers keep the last of two equal keys silently; here that loses a tensor."""
    seen: list[str] = []

    def keep_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal seen
        seen = [name for name, _ in pairs]  # the outermost object is closed last
        return {}

    json.loads(text, object_pairs_hook=keep_names)
    seen = [name for name in seen if name != "__metadata__"]
    if len(seen) != len(header):
        twice = [name for name, times in Counter(seen).items() if times > 1][:3]
        raise UserError(f"the header of {path} names tensors twice: {one_line(twice)}")


def _entry(path: Path, name: str, value: Any, base: int, available: int) -> Entry:
    where = f"tensor {one_line(repr(name), 100)} in {path}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} must have dtype, shape and data_offsets in the header")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise UserError(
            f"{where} has dtype {one_line(repr(value['dtype']), 60)}; known are {', '.join(DTYPES)}"
        )
    shape, offsets = value["shape"], value["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise UserError(
            f"{where} has shape {one_line(repr(shape), 60)} and data_offsets "
            f"{one_line(repr(offsets), 60)}; lists of sizes are required"
        )
    start, stop = offsets
    if not start <= stop <= available:
        raise UserError(
            f"{where} lies at bytes {start:,} to {stop:,} of {available:,}: "
            "the file is truncated or damaged"
        )
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise UserError(
            f"{where} has {stop - start:,} bytes; dtype {value['dtype']} and shape "
            f"{shape} need {math.prod(shape) * dtype.itemsize:,}"
        )
    return Entry(dtype, tuple(shape), base + start, base + stop)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _check_layout(path: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    end, before = base, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            problem = "overlaps" if entry.start < end else "leaves a gap after"
            raise UserError(
                f"tensor {one_line(repr(name), 100)} in {path} {problem} "
                f"{one_line(before, 100)}: the header is damaged"
            )
        end, before = entry.stop, name
    if end != size:
        raise UserError(
            f"{path} has {size - end:,} bytes after its last tensor: the file is damaged"
        )


class SafetensorsFiles:
    """The tensors of some safetensors files; nothing is read until asked for.

    Rows are read into fresh memory rather than mapped: mapped pages cost as much to touch as the
    whole conversion, count as this process's memory, and end the process (SIGBUS) when the file
    is cut while it is read.
    """

    def __init__(self, paths: Iterable[Path]):
        self.entries: dict[str, Entry] = {}
        self._file_of: dict[str, Path] = {}
        self._reader = FileReader()
        for path in paths:
            for name, entry in read_header(path).items():
                if name in self.entries:
                    raise UserError(
                        f"tensor {one_line(repr(name), 100)} is both in {path} and in "
                        f"{self._file_of[name]}"
                    )
                self.entries[name] = entry
                self._file_of[name] = path

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis."""
        entry = self.entries[name]
        row_bytes = (entry.stop - entry.start) // max(1, entry.shape[0])
        data = self._reader.read(
            self._file_of[name], entry.start + start * row_bytes, (stop - start) * row_bytes
        )
        return data.view(entry.dtype).reshape(stop - start, *entry.shape[1:])


class FileReader:
    """Reads pieces of files, from any thread; they stay open until this object goes."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._opening = threading.Lock()
        weakref.finalize(self, _close_all, self._descriptors)

    def read(self, path: Path, offset: int, size: int) -> np.ndarray:
        """Bytes [offset, offset + size) as uint8.

        Raises:
          UserError: the file cannot be read, or has become shorter.
        """
        data = np.empty(size, np.uint8)
        done = 0
        try:
            with self._opening:
                if path not in self._descriptors:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
            while done < size:  # one call reads 2 GB at most
                count = os.preadv(self._descriptors[path], [data[done:].data], offset + done)
                if count == 0:
                    raise UserError(f"{path} has become shorter while it was read")
                done += count
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        return data


def _close_all(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def shard_paths(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory, by its index where there is one.

    Raises:
      UserError: the index is malformed, names a file outside the directory or an absent one, or
        there are several files without an index.
    """
    index = directory / INDEX_NAME
    if index.exists():
        return indexed_paths(index)
    if (directory / SINGLE_NAME).exists():
        return [directory / SINGLE_NAME]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) > 1:
        raise UserError(f"{directory} has {len(found)} safetensors files but no {INDEX_NAME}")
    return found


def indexed_paths(index: Path) -> list[Path]:
    """The files that an index (weight_map: tensor -> file name) names, each checked."""
    weight_map = read_json_file(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map that lists tensors and their files")
    paths = []
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    for name in sorted(names):
        # A file name and nothing else: an entry such as ../../x must not leave the directory.
        if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
            raise UserError(
                f"{index} names {one_line(repr(name), 100)}; only files in the same "
                "directory are allowed"
            )
        path = index.parent / name
        if not path.is_file():
            raise UserError(
                f"{index} names {one_line(name, 100)}, which is not there; fetch the missing file"
            )
        paths.append(path)
    return paths


def check_index(index: Path, found: Mapping[str, Any]) -> None:
    """Tensors that the index lists and the files lack, or the other way round, are an error."""
    listed = set(read_json_file(index)["weight_map"])
    absent, extra = sorted(listed - set(found)), sorted(set(found) - listed)
    if absent or extra:
        raise UserError(
            f"{index} does not match its files: tensors not in them: "
            f"{one_line(absent)}; tensors not in the index: {one_line(extra)}"
        )


def write_file(
    path: Path,
    infos: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    pieces: Iterable[np.ndarray],
) -> None:
    """Write one file from pieces: all tensors' bytes, in the order of `infos`, cut anywhere."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in infos.items():
        stop = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        written = 0
        for piece in pieces:
            written += file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
        if written != offset:
            raise RuntimeError(f"{path}: {written} bytes were given for {offset}")
        file.flush()
        os.fsync(file.fileno())
