"""Parts: the unit in which a sweep is computed, written and never lost.

A part is some configurations on one document. Its file, OUT/parts/<key>.parquet, is named by a
digest of all that its numbers depend on, so that changed weights, text, settings or code versions
never meet old rows.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jaxablate import durable, rows
from jaxablate.errors import UserError


@dataclass(frozen=True)
class PartSpec:
    """What one part computes.

    Args:
      document: its name, as rows show it.
      document_digest: sha256 of its text (and of its questions, where it has any).
      configurations: canonical keys, in the order of the plan.
      cost: predicted, in any unit that all parts share, such as block evaluations.
      inputs: whatever else this part's numbers depend on and the run's settings do not say.
    """

    document: str
    document_digest: str
    configurations: tuple[str, ...]
    cost: float | int = 1.0
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.configurations:
            raise ValueError(f"part of document {self.document!r} has no configurations")
        if len(set(self.configurations)) < len(self.configurations):
            raise ValueError(f"part of document {self.document!r} repeats a configuration")
        if not 0 <= self.cost < float("inf"):
            raise ValueError(f"cost {self.cost}: want a finite number, at least 0")
        try:
            self.document.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"document name {self.document!r} is not UTF-8: rename the file"
            ) from error


def canonical_json(value: Any) -> str:
    """One text per value: keys sorted, tuples as lists, numpy scalars as Python's.

    Raises TypeError, naming the place, on what has no exact JSON form.
    """
    return json.dumps(_plain(value, "settings"), sort_keys=True, separators=(",", ":"))


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise TypeError(f"{where} is {value}: want a finite number")
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: want strings")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}: want numbers, text, lists, mappings")


def digest(value: Any) -> str:
    """sha256, in hexadecimal, of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def part_key(identity_digest: str, part: PartSpec) -> str:
    """The name of a part: digest of its run's identity (row version included) and its own."""
    own = [part.document, part.document_digest, part.inputs, part.configurations]
    return digest([identity_digest, own])


def group_configurations(
    configurations: Sequence[str], costs: Sequence[float | int], part_cost: float | int
) -> list[tuple[tuple[str, ...], float]]:
    """Cuts configurations into consecutive groups of about `part_cost` each, order kept.

    A group ends as soon as it reaches `part_cost`. Choose it from settings alone, never from the
    machine's memory or load: the same plan must come out everywhere. Returns (keys, cost) pairs.
    """
    groups: list[tuple[tuple[str, ...], float]] = []
    keys: list[str] = []
    total = 0.0
    for key, cost in zip(configurations, costs, strict=True):
        keys.append(key)
        total += cost
        if total >= part_cost:
            groups.append((tuple(keys), total))
            keys, total = [], 0.0
    if keys:
        groups.append((tuple(keys), total))
    return groups


@dataclass(frozen=True)
class PartFiles:
    """The directory OUT/parts; `owner` names the lock under which this process writes."""

    directory: Path
    schema: rows.RowSchema
    owner: str

    def path(self, key: str) -> Path:
        """Where the part `key` is, if it is."""
        return self.directory / f"{key}.parquet"

    def write(self, key: str, table: pa.Table) -> None:
        """Whole and on the disk when this returns. Raises UserError when the disk is full."""
        with durable.replacing(self.path(key), self.owner) as file:
            rows.encode(file, self.schema, [table], {"part": key})

    def read(self, key: str) -> pa.Table:
        """Rows of the part `key`.

        Raises:
          FileNotFoundError: it has not been computed.
          DamagedRows: its file is damaged, or another part's.
        """
        path = self.path(key)
        table, about = rows.decode(path.read_bytes(), str(path))
        if about.get("part") != key or table.schema != self.schema.arrow:
            raise rows.DamagedRows(f"{path} holds another part's rows")
        return table

    def check(self, keys: Iterable[str]) -> tuple[set[str], list[str]]:
        """Which of `keys` are there and intact, and one line for each that is damaged."""
        intact, damage = set(), []
        for key in keys:
            try:
                self.read(key)
            except FileNotFoundError:
                continue
            except (rows.DamagedRows, OSError) as error:
                damage.append(str(error))
            else:
                intact.add(key)
        return intact, damage
