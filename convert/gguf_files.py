"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md) as a source of named tensors.

The header is read here, with every count and offset checked, because the reader of the gguf
package trusts them; that package's tables dequantise the data. Names, shapes and configuration
are given as Hugging Face's, so that one conversion table serves both.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.config_json import one_line
from convert.safetensors_files import FileReader
from jaxablate.errors import UserError

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
# Value type number -> struct code; 8 is a string and 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
STORAGE_TYPES = (*_PLAIN, *_QUANTISED)


class Entry(NamedTuple):
    """A tensor: storage type, shape with rows first, bytes of one row, first byte in the file."""

    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    start: int

    @property
    def dtype(self) -> np.dtype:
        return _PLAIN.get(self.kind, np.dtype(np.float32))


class _Cursor:
    """Reads little-endian values from a bounded buffer."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.offset = data, path, 0

    def take(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size)
        value = struct.unpack_from("<" + code, self.data, self.offset)[0]
        self.offset += size
        return value

    def need(self, size: int) -> None:
        if size > len(self.data) - self.offset:
            raise UserError(
                f"{self.path} is damaged: its header runs past the file's {len(self.data):,} bytes"
            )

    def string(self) -> str:
        length = self.take("Q")
        self.need(length)
        text = self.data[self.offset : self.offset + length]
        self.offset += length
        return text.decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise UserError(f"{self.path} is damaged: metadata of unknown type {kind}")
        return self.take(_SCALARS[kind])

    def array(self, depth: int) -> list[Any]:
        kind, count = self.take("I"), self.take("Q")
        if depth > 3:
            raise UserError(f"{self.path} is damaged: metadata arrays nested too deeply")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = struct.calcsize("<" + code) * count
            self.need(size)
            values = struct.unpack_from(f"<{count}{code}", self.data, self.offset)
            self.offset += size
            return list(values)
        self.need(count * (8 if kind == _STRING else 12))
        return [self.value(kind, depth + 1) for _ in range(count)]


class GgufFile:
    """Metadata and tensors of one file; tensors are read by memory map, rows at a time.

    Attributes:
      metadata: key -> value.
      entries: the file's own tensor names -> entry.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._reader = FileReader()
        try:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                self._size = len(data)
                self._read_header(data)
        except UserError:
            raise
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise UserError(f"{path} cannot be read: {one_line(error)}") from error

    def _read_header(self, data: mmap.mmap) -> None:
        cursor = _Cursor(data, self.path)
        if data[:4] != MAGIC:
            raise UserError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        cursor.offset = 4
        version = cursor.take("I")
        if version not in (2, 3):
            raise UserError(
                f"{self.path} has GGUF version {version} (or the other byte order); "
                "versions 2 and 3, little-endian, are read"
            )
        num_tensors, num_values = cursor.take("Q"), cursor.take("Q")
        # The shortest entries have 13 and 24 bytes: a count beyond that is a lie.
        cursor.need(num_tensors * 24)
        cursor.need(num_values * 13)
        for _ in range(num_values):
            key = cursor.string()
            if key in self.metadata:
                raise UserError(f"{self.path} is damaged: metadata {one_line(key, 80)!r} twice")
            self.metadata[key] = cursor.value(cursor.take("I"))
        infos = [_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(
                f"{self.path} is damaged: general.alignment is {alignment!r}; "
                "a power of two is required"
            )
        base = -(-cursor.offset // alignment) * alignment
        for name, shape, kind, offset in infos:
            if name in self.entries:
                raise UserError(f"{self.path} is damaged: tensor {one_line(name, 80)!r} twice")
            self.entries[name] = self._entry(name, shape, kind, base + offset)
        self._refuse_overlaps()

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        where = f"tensor {one_line(repr(name), 100)} in {self.path}"
        try:
            storage = GGMLQuantizationType(kind)
        except ValueError:
            raise UserError(f"{where} has unknown storage type {kind}") from None
        if storage.name not in STORAGE_TYPES:
            raise UserError(
                f"{where} is stored as {storage.name}; {', '.join(STORAGE_TYPES)} are read"
            )
        block, block_bytes = GGML_QUANT_SIZES[storage]
        columns = shape[-1]
        if len(shape) == 1 and storage.name in _QUANTISED:
            raise UserError(f"{where} is a quantised vector ({storage.name}); plain ones are read")
        if columns % block:
            raise UserError(
                f"{where} has rows of {columns}, no multiple of {storage.name}'s block of {block}"
            )
        row_bytes = columns // block * block_bytes
        if start + math.prod(shape[:-1]) * row_bytes > self._size:
            raise UserError(
                f"{where} runs past the file's {self._size:,} bytes: "
                "the file is truncated or damaged"
            )
        return Entry(storage.name, shape, row_bytes, start)

    def _refuse_overlaps(self) -> None:
        end, before = 0, ""
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].start):
            if entry.start < end:
                raise UserError(
                    f"{self.path} is damaged: tensor {one_line(name, 80)!r} overlaps "
                    f"{one_line(before, 80)!r}"
                )
            end = entry.start + math.prod(entry.shape[:-1]) * entry.row_bytes
            before = name

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The given rows (of a vector: elements), dequantised to float32 if they are quantised."""
        from gguf import GGMLQuantizationType, dequantize

        entry = self.entries[name]
        # What lies between the outermost rows is read at once: rows are permuted within heads.
        first, stop = int(rows.min()), int(rows.max()) + 1
        is_vector = len(entry.shape) == 1
        size = entry.dtype.itemsize if is_vector else entry.row_bytes
        data = self._reader.read(self.path, entry.start + first * size, (stop - first) * size)
        picked = data.reshape(stop - first, size)[rows - first]
        if entry.kind not in _PLAIN:
            return dequantize(picked, GGMLQuantizationType[entry.kind])
        return picked.view(entry.dtype).reshape(len(rows), *entry.shape[1:])


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.take("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise UserError(
            f"{cursor.path} is damaged: tensor {one_line(repr(name), 100)} has "
            f"{num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
        )
    # GGUF lists the fastest axis first; numpy last.
    shape = tuple(cursor.take("Q") for _ in range(num_dimensions))[::-1]
    if any(size < 1 for size in shape):
        raise UserError(
            f"{cursor.path} is damaged: tensor {one_line(repr(name), 100)} has shape {shape}"
        )
    return name, shape, cursor.take("I"), cursor.take("Q")
