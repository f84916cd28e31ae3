"""OUT/plan.json: every part of a whole sweep, in order, and what all of them depend on.

It is the same for every shard of one sweep, so that a merge knows what is missing and refuses what
does not belong together.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxablate import durable
from jaxablate.errors import UserError
from jaxablate.parts import PartSpec, canonical_json, digest, part_key
from jaxablate.rows import ROW_VERSION, RowSchema

FILE_NAME = "plan.json"
_MAX_BYTES = 1 << 26  # about 200,000 parts


@dataclass(frozen=True)
class Plan:
    """A sweep's identity (what changes every number) and its parts, in the order of the rows."""

    identity: Mapping[str, Any]
    parts: tuple[Mapping[str, Any], ...]

    @property
    def keys(self) -> list[str]:
        """Of all parts, in order."""
        return [part["key"] for part in self.parts]

    @property
    def schema(self) -> RowSchema:
        """Of the rows."""
        return RowSchema.from_dict(self.identity["schema"])

    @property
    def digest(self) -> str:
        """Names the plan: equal digests, equal rows."""
        return digest([self.identity, self.keys])

    def name_part(self, key: str) -> str:
        """A part in words, for messages."""
        part = self.parts[self.keys.index(key)]
        first, last = part["first"] or "baseline", part["last"] or "baseline"
        return (
            f"{key[:12]} (document {part['document']!r}, {part['configurations']} configurations "
            f"from {first} to {last})"
        )


def identity(
    *,
    experiment: str,
    model_digest: str,
    settings: Mapping[str, Any],
    constants: Mapping[str, Any],
    schema: RowSchema,
) -> dict[str, Any]:
    """What the numbers of every part depend on, as plain JSON. Raises TypeError as there."""
    whole = {
        "row_version": ROW_VERSION,
        "experiment": experiment,
        "model_digest": model_digest,
        "settings": settings,
        "constants": constants,
        "schema": schema.to_dict(),
    }
    return json.loads(canonical_json(whole))


def make_plan(run_identity: Mapping[str, Any], specs: Sequence[PartSpec]) -> Plan:
    """Raises ValueError if two parts are the same."""
    base = digest(run_identity)
    parts = tuple(
        {
            "key": part_key(base, spec),
            "document": spec.document,
            "document_digest": spec.document_digest,
            "configurations": len(spec.configurations),
            "first": spec.configurations[0],
            "last": spec.configurations[-1],
            "cost": float(spec.cost),
        }
        for spec in specs
    )
    plan = Plan(run_identity, parts)
    if len(set(plan.keys)) < len(parts):
        raise ValueError("two parts of the plan are the same")
    return plan


def write_plan(directory: Path, plan: Plan, owner: str) -> None:
    """Writes OUT/plan.json unless it already says the same."""
    content = {"checksum": _checksum(plan), "identity": plan.identity, "parts": list(plan.parts)}
    data = (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
    path = directory / FILE_NAME
    if not path.exists() or path.read_bytes() != data:
        durable.write_bytes(path, data, owner)


def read_plan(directory: Path) -> Plan:
    """Raises UserError if there is no plan, or not an intact one."""
    path = directory / FILE_NAME
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{path} is larger than {_MAX_BYTES} bytes: no plan of a sweep")
        content = json.loads(path.read_bytes())
        plan = Plan(content["identity"], tuple(content["parts"]))
        _check(plan, content["checksum"])
    except FileNotFoundError as error:
        raise UserError(f"{directory} holds no sweep: there is no {FILE_NAME} in it") from error
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no intact plan of a sweep: {error}"[:300]) from error
    return plan


def _checksum(plan: Plan) -> str:
    """Of everything in the file, costs and names included; `Plan.digest` is of what rows are."""
    return digest([plan.identity, plan.parts])


def _check(plan: Plan, expected: str) -> None:
    for part in plan.parts:
        if not re.fullmatch("[0-9a-f]{64}", part["key"]):
            raise ValueError(f"part key {part['key']!r}"[:100])
        for name, kind in (
            ("document", str),
            ("first", str),
            ("last", str),
            ("configurations", int),
        ):
            if not isinstance(part[name], kind):
                raise TypeError(f"{name} of part {part['key'][:12]}")
    if plan.identity["row_version"] != ROW_VERSION:
        raise UserError(
            f"rows of version {plan.identity['row_version']!r}, this program's is {ROW_VERSION}"
        )
    if len(set(plan.keys)) < len(plan.parts):
        raise ValueError("a part appears twice")
    if _checksum(plan) != expected:
        raise ValueError("its content does not agree with its checksum")


def differences(ours: Plan, theirs: Plan) -> list[str]:
    """One text per field in which two plans differ, such as "settings.seed (0, 1)"."""
    found = _differences(ours.identity, theirs.identity, "")
    if found or ours.keys == theirs.keys:
        return found
    mine, other = _documents(ours), _documents(theirs)
    found = [
        f"document {name!r} (digest {mine.get(name)}, {other.get(name)})"
        for name in dict.fromkeys([*mine, *other])
        if mine.get(name) != other.get(name)
    ]
    return found or ["the configurations, or how they are cut into parts"]


def _documents(plan: Plan) -> dict[str, str]:
    return {part["document"]: str(part["document_digest"])[:12] for part in plan.parts}


def _differences(ours: Any, theirs: Any, where: str) -> list[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        found = []
        for key in sorted({*ours, *theirs}):
            place = f"{where}.{key}" if where else key
            found += _differences(ours.get(key), theirs.get(key), place)
        return found
    if ours == theirs and type(ours) is type(theirs):
        return []
    return [f"{where} ({_short(ours)}, {_short(theirs)})"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
