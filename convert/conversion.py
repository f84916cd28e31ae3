"""A source's tensors, streamed through its family's table into a checkpoint."""

import concurrent.futures
import re
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from convert import llama, neox
from convert.config_json import one_line
from convert.layouts import Rule, check_covers, source_shape, views
from convert.sources import Source
from jaxablate.checkpoint import Checkpoint, group_of, open_checkpoint
from jaxablate.checkpoint_writer import (
    LARGE_GROUP_BYTES,
    CheckpointWriter,
    new_checkpoint,
    writing_lock,
)
from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.errors import UserError
from jaxablate.stored_arrays import DTYPES, aligned_empty

FAMILIES: dict[str, ModuleType] = {
    **dict.fromkeys(llama.MODEL_TYPES, llama),
    **dict.fromkeys(neox.MODEL_TYPES, neox),
}
# What is read at once: small against a tensor, and fitting the processor's cache.
PIECE_BYTES = 2**21
# Tensors of a group that are filled side by side.
_FILLING = 2
# Rows transposed at once. numpy walks down the columns of such a block; 16 rows of two bytes are
# half a cache line of each. Measured on [14336, 4096] in bfloat16: 0.3 s/GB, with 128 rows 1.0.
TRANSPOSED_ROWS = 16


def family_of(model_type: Any) -> ModuleType:
    """The module with the table of a model type.

    Raises:
      UserError: the type is unknown, by its name.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"config.json has model_type {one_line(repr(model_type), 60)}; "
            f"{', '.join(FAMILIES)} are converted"
        )
    return FAMILIES[model_type]


class Plan:
    """Which source tensor fills which parameters; made from headers alone.

    Raises:
      UserError: the configuration is refused, or tensors are missing, left over or of another
        shape or dtype: one error that lists them all.
    """

    def __init__(self, source: Source):
        self.source = source
        self.family = family_of(source.config.get("model_type"))
        self.config: TransformerConfig = self.family.read_config(source.config)
        self.names = self._source_names()
        if self.config.num_layers > len(self.names):
            raise UserError(
                f"{source.path} has {len(self.names)} tensors, but its configuration "
                f"has {self.config.num_layers} layers"
            )
        self.rules: list[Rule] = self.family.rules(self.config)
        check_covers(self.rules, self.config)
        self.shapes = param_shapes(self.config)
        self._match()

    def _source_names(self) -> dict[str, str]:
        """The family's name of a tensor -> the file's."""
        return {self.family.ALIASES.get(name, name): name for name in self.source.tensors.entries}

    def _match(self) -> None:
        wanted = {rule.source: source_shape(rule, self.shapes) for rule in self.rules}
        entries = {name: self.source.tensors.entries[given] for name, given in self.names.items()}
        extras = [
            name for name in entries
            if name not in wanted
            and not re.fullmatch(self.family.KNOWN_EXTRAS, name)
            and not (self.config.tie_embeddings and name == self.family.UNEMBEDDING)
        ]  # fmt: skip
        problems = _listed("missing", [name for name in wanted if name not in entries])
        problems += _listed("not known", extras)
        problems += _listed("of another shape", [
            f"{name} {list(entries[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in entries and entries[name].shape != shape
        ])  # fmt: skip
        problems += _listed("of a dtype that is not read (quantised?)", [
            f"{name} {entries[name].dtype.name}"
            for name in wanted
            if name in entries and entries[name].dtype.name not in DTYPES
        ])  # fmt: skip
        if problems:
            raise UserError(
                f"the tensors of {self.source.path} do not fit its configuration: "
                + "; ".join(problems)
            )

    def groups(self) -> Iterator[list[Rule]]:
        """The rules in order, cut where another group of the checkpoint begins."""
        rules: list[Rule] = []
        for rule in self.rules:
            if rules and group_of(rule.targets[0]) != group_of(rules[0].targets[0]):
                yield rules
                rules = []
            rules.append(rule)
        yield rules

    def num_bytes(self, rule: Rule) -> int:
        entry = self.source.tensors.entries[self.names[rule.source]]
        return int(np.prod(entry.shape, dtype=np.int64)) * entry.dtype.itemsize


def _listed(what: str, names: list[str], limit: int = 6) -> list[str]:
    if not names:
        return []
    shown = ", ".join(one_line(name, 120) for name in names[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return [f"{len(names)} {what}: {shown}{more}"]


class Filler:
    """Copies source tensors into new arrays of ours: checked, cast, in pieces of some rows.

    Threads may fill several at a time.
    """

    def __init__(self, plan: Plan, dtype: np.dtype | None):
        self.plan = plan
        self.dtype = dtype
        self.largest_change = 0.0
        self.changed = ""
        self._lock = threading.Lock()

    def fill(self, rule: Rule) -> dict[str, np.ndarray]:
        """The parameters of one rule: path -> C-contiguous array.

        Raises:
          UserError: a weight is NaN or infinite, or becomes so by the cast.
        """
        name = self.plan.names[rule.source]
        tensors = self.plan.source.tensors
        entry = tensors.entries[name]
        dtype = self.dtype or entry.dtype
        arrays = {path: aligned_empty(self.plan.shapes[path], dtype) for path in rule.targets}
        into = [bits(view) for view in views(rule, list(arrays.values()))]
        num_units = into[0].shape[0]
        rows_per_unit = entry.shape[0] // num_units
        unit_bytes = max(1, self.plan.num_bytes(rule) // num_units)
        step = max(1, PIECE_BYTES // unit_bytes)
        for start in range(0, num_units, step):
            stop = min(start + step, num_units)
            rows = start * rows_per_unit, stop * rows_per_unit
            piece = self._cast(name, tensors.rows(name, *rows), dtype)
            parts = bits(piece).reshape(stop - start, len(into), *into[0].shape[1:])
            for i, view in enumerate(into):
                _copy(view[start:stop], parts[:, i])
        return arrays

    def _cast(self, name: str, piece: np.ndarray, dtype: np.dtype) -> np.ndarray:
        _require_finite(name, piece, "")
        if piece.dtype == dtype:
            return piece
        with np.errstate(over="ignore", under="ignore"):
            cast = piece.astype(dtype)
        _require_finite(name, cast, f" after the cast to {dtype.name}; choose another --dtype")
        change = float(
            np.max(np.abs(piece.astype(np.float32) - cast.astype(np.float32)), initial=0)
        )
        with self._lock:
            if (change, name) > (self.largest_change, self.changed):
                self.largest_change, self.changed = change, name
        return cast


def _copy(into: np.ndarray, piece: np.ndarray) -> None:
    if into.flags.c_contiguous:
        into[...] = piece
        return
    for start in range(0, len(piece), TRANSPOSED_ROWS):
        into[start : start + TRANSPOSED_ROWS] = piece[start : start + TRANSPOSED_ROWS]


def bits(array: np.ndarray) -> np.ndarray:
    """The array as unsigned integers: numpy copies its own dtypes faster than bfloat16."""
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def _require_finite(name: str, piece: np.ndarray, when: str) -> None:
    # All exponent bits set: NaN or infinity.
    mask = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[piece.dtype.name]
    words = bits(piece)
    if np.any((words & words.dtype.type(mask)) == mask):
        raise UserError(f"tensor {one_line(name, 120)} has NaN or infinite weights{when}")


def require_tied(plan: Plan) -> None:
    """An unembedding that a tied model carries all the same must equal the embedding.

    Raises:
      UserError: it does not.
    """
    name, table = plan.names.get(plan.family.UNEMBEDDING), plan.names[plan.family.EMBEDDING]
    if not plan.config.tie_embeddings or name is None:
        return
    tensors = plan.source.tensors
    mine, other = tensors.entries[table], tensors.entries[name]
    equal = mine.shape == other.shape and mine.dtype == other.dtype
    step = max(1, PIECE_BYTES // max(1, mine.shape[-1] * mine.dtype.itemsize))
    for start in range(0, mine.shape[0] if equal else 0, step):
        rows = start, min(start + step, mine.shape[0])
        equal = equal and np.array_equal(
            bits(tensors.rows(table, *rows)), bits(tensors.rows(name, *rows))
        )
    if not equal:
        raise UserError(
            f"{plan.source.path} says tie_word_embeddings, but {name} differs from "
            f"{table}; correct config.json"
        )


def convert(
    source: Source,
    dest: Path,
    dtype: str | None = None,
    *,
    reuse: bool = False,
    progress: bool = True,
) -> Checkpoint:
    """Write a source as a checkpoint at `dest`, one group of tensors after another.

    Args:
      dtype: "float32", "bfloat16" or "float16"; None keeps each tensor's own (quantised: float32).
      reuse: a finished checkpoint at `dest` is returned instead of refused.
      progress: a bar with the time left, when it takes more than a few seconds.

    Raises:
      UserError: see `Plan`, `Filler.fill` and `new_checkpoint`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; {', '.join(DTYPES)} are allowed")
    dest = dest.expanduser().resolve()
    with writing_lock(dest):
        if reuse and dest.exists():
            return open_checkpoint(dest)
        plan = Plan(source)
        require_tied(plan)
        filler = Filler(plan, None if dtype is None else DTYPES[dtype])
        with new_checkpoint(dest, plan.config, _provenance(source)) as writer:
            source.save_tokenizer(writer.tokenizer_dir)
            _write_groups(plan, filler, writer, progress)
    if filler.changed:
        print(
            f"cast to {dtype}: the largest change of a weight is {filler.largest_change:.3g}, "
            f"in {filler.changed}",
            file=sys.stderr,
        )
    return open_checkpoint(dest)


def _write_groups(plan: Plan, filler: Filler, writer: CheckpointWriter, progress: bool) -> None:
    with tqdm(
        desc=f"converting {plan.source.name}",
        total=sum(map(plan.num_bytes, plan.rules)),
        unit="B",
        unit_scale=True,
        delay=2,
        disable=not progress,
    ) as bar:
        for rules in plan.groups():
            if sum(map(plan.num_bytes, rules)) > LARGE_GROUP_BYTES:
                writer.wait()
            group: dict[str, np.ndarray] = {}
            with concurrent.futures.ThreadPoolExecutor(_FILLING, "fill") as pool:
                for rule, arrays in zip(rules, pool.map(filler.fill, rules)):
                    group |= arrays
                    bar.update(plan.num_bytes(rule))
                del arrays
            writer.write(group)


def _provenance(source: Source) -> dict[str, Any]:
    return {
        "source": source.name,
        "source_path": str(source.path),
        "source_kind": source.kind,
        "source_config": source.config,
        "converted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: version(name) for name in ("numpy", "orbax-checkpoint")},
    }
