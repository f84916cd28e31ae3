"""Joins the directories of several shards into the result that one run would have given."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxablate import durable, manifest, rows, run_record
from jaxablate.errors import UserError
from jaxablate.finished import assemble, is_complete
from jaxablate.lock import DirectoryLock
from jaxablate.parts import PartFiles

_OWNER = "whole"
_NAMED = 20  # parts named one by one in a message


class MissingParts(UserError):
    """Some parts of the sweep are in none of the directories; the message names them."""


@dataclass(frozen=True)
class Merged:
    """What a merge did: number of parts, parts found in several directories with other numbers
    (another device rounds differently), and whether everything was there already."""

    rows: Path
    parts: int
    contradicting: int
    unchanged: bool


def merge(directories: Sequence[Path | str], out: Path | str) -> Merged:
    """Merges `directories` (of shards, or of whole runs) of one sweep into `out`.

    The order of the directories, repeated ones, and parts computed twice do not matter; rows equal
    those of a single run byte for byte. `out` may be one of the directories, and may hold an
    earlier merge of the same sweep.

    Raises:
      UserError: a directory without a sweep; sweeps that differ, naming the fields; `out` in use
        or of another sweep.
      MissingParts: parts that are absent or damaged everywhere; nothing is written then.
    """
    sources = list(dict.fromkeys(Path(one).expanduser().resolve() for one in directories))
    if not sources:
        raise UserError("no directory to merge: give those of the shards, DIR... --out=OUT")
    target = Path(out).expanduser().resolve()
    plan = _common_plan(sources, target)
    if (target / "parts").is_dir() and target not in sources:
        sources.append(target)
    chosen, contradicting = _choose(plan, sources)
    durable.prepare_directory(target, _OWNER)
    lock = DirectoryLock(target)
    lock.acquire()
    try:
        unchanged = is_complete(target, plan)
        if not unchanged:
            _write(plan, chosen, sources, target)
    finally:
        lock.release()
    return Merged(target / "rows.parquet", len(plan.parts), contradicting, unchanged)


def _common_plan(sources: Sequence[Path], target: Path) -> manifest.Plan:
    plan = manifest.read_plan(sources[0])
    others = list(sources[1:])
    if (target / manifest.FILE_NAME).exists() and target not in sources:
        others.append(target)
    for other in others:
        if found := manifest.differences(plan, manifest.read_plan(other)):
            raise UserError(
                f"{sources[0]} and {other} are not of one sweep: they differ in "
                f"{', '.join(found)}; merge only shards of the same command"
            )
    return plan


def _choose(plan: manifest.Plan, sources: Sequence[Path]) -> tuple[dict[str, Path], int]:
    """The file to take for each part, whatever the order of the sources."""
    chosen: dict[str, Path] = {}
    absent: list[str] = []
    contradicting = 0
    for key in plan.keys:
        found: dict[str, Path] = {}
        damage = ""
        for source in sources:
            files = PartFiles(source / "parts", plan.schema, _OWNER)
            try:
                files.read(key)
                content = files.path(key).read_bytes()
            except FileNotFoundError:
                continue
            except (OSError, rows.DamagedRows) as error:
                damage = f", damaged: {error}"
            else:
                found.setdefault(hashlib.sha256(content).hexdigest(), files.path(key))
        contradicting += len(found) > 1
        if found:
            chosen[key] = found[min(found)]
        else:
            absent.append(plan.name_part(key) + damage)
    if absent:
        more = f"; and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        raise MissingParts(
            f"{len(absent)} of {len(plan.parts)} parts are missing: "
            f"{'; '.join(absent[:_NAMED])}{more}. Run their shards again, then merge"
        )
    return chosen, contradicting


def _write(
    plan: manifest.Plan, chosen: dict[str, Path], sources: Sequence[Path], target: Path
) -> None:
    files = PartFiles(target / "parts", plan.schema, _OWNER)
    durable.prepare_directory(files.directory, _OWNER)
    for directory in (target, files.directory):
        durable.remove_leftovers(directory, None)
    for key, source in chosen.items():
        if source != files.path(key):
            durable.write_bytes(files.path(key), source.read_bytes(), _OWNER)
    manifest.write_plan(target, plan, _OWNER)
    records = _records(sources)
    content: dict[str, Any] = {
        **{name: records[0].get(name) if records else None for name in ("flags", "device")},
        "experiment": plan.identity["experiment"],
        "identity": plan.identity,
        "documents": {part["document"]: part["document_digest"] for part in plan.parts},
        "versions": run_record.versions(),
        "merged_from": records,
        "plan": plan.digest,
        "rows_sha256": assemble(target, plan, files),
        "status": "complete",
    }
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    durable.write_bytes(target / "run.json", text.encode(), _OWNER)


def _records(sources: Sequence[Path]) -> list[dict[str, Any]]:
    """What the shards' own records say, as far as they can be read."""
    found = []
    for source in sources:
        for path in sorted(source.glob("run*.json")):
            try:
                record = json.loads(path.read_bytes())
            except (OSError, ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                names = ("shard", "status", "flags", "device", "versions", "sessions", "seconds")
                found.append({"file": str(path), **{name: record.get(name) for name in names}})
    return found
