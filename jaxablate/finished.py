"""The finished rows of a run in OUT: put together from parts, vouched for, read back."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxablate import durable, manifest, rows
from jaxablate.errors import UserError
from jaxablate.parts import PartFiles


def assemble(out: Path, plan: manifest.Plan, files: PartFiles) -> str:
    """Writes OUT/rows.csv and OUT/rows.parquet from all parts; returns the latter's sha256.

    The bytes depend on the rows and their order alone. Raises UserError if a part is absent or
    damaged, or the disk full.
    """
    about = {"plan": plan.digest}

    def tables() -> Iterator[Any]:
        return rows.regroup(_read_part(files, plan, key) for key in plan.keys)

    with durable.replacing(out / "rows.csv", files.owner) as sink:
        rows.write_csv(sink, plan.schema, tables())
    with durable.replacing(out / "rows.parquet", files.owner) as sink:
        rows.encode(sink, plan.schema, tables(), about)
    return _file_sha256(out / "rows.parquet")


def _read_part(files: PartFiles, plan: manifest.Plan, key: str) -> Any:
    try:
        return files.read(key)
    except (OSError, rows.DamagedRows) as error:
        raise UserError(
            f"part {plan.name_part(key)} cannot be read any more ({error}); give the command "
            "again to compute it anew"
        ) from error


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_complete(out: Path, plan: manifest.Plan) -> bool:
    """Whether run.json vouches for these bytes of rows.parquet as this plan's."""
    try:
        record = json.loads((out / "run.json").read_bytes())
        return (
            record["status"] == "complete"
            and record["plan"] == plan.digest
            and manifest.read_plan(out).digest == plan.digest
            and (out / "rows.csv").exists()
            and record["rows_sha256"] == _file_sha256(out / "rows.parquet")
        )
    except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_rows(source: Path | str) -> Any:
    """Finished rows as a pandas DataFrame; block_nll holds one float64 array per row.

    Args:
      source: a directory of results, or a file of rows.

    Raises:
      UserError: it holds no finished rows, or a file that is damaged.
    """
    path = Path(source).expanduser().resolve()
    expected = None
    if path.is_dir():
        expected = manifest.read_plan(path).digest
        path = path / "rows.parquet"
    if not path.is_file():  # nor a pipe or a device, which would never end
        raise UserError(f"{path} is no file: give the experiment's command again to finish its run")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    table, about = rows.decode(data, str(path))
    if expected is not None and about.get("plan") != expected:
        raise UserError(
            f"{path} is of an earlier run with other settings: give the experiment's command "
            "again to finish the latest"
        )
    return table.to_pandas()
