"""Rows of a sweep: their columns, and their exact bytes as Parquet and CSV.

One row per (configuration, document, question). Every table, curve and interval is recomputed from
rows. The bytes of a file depend on nothing but the rows and the pyarrow version: no times, no
compression, no statistics, fixed row groups.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from jaxablate.errors import UserError

# Raise it whenever the same settings would give other numbers or other columns: parts of an older
# version are then never reused.
ROW_VERSION = 1

_KINDS = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_IDENTITY = ("experiment", "model_digest", "document", "document_digest", "question")
_PROVENANCE = ("method", "estimator", "dtype", "seed")
_SCORES = ("scored_tokens", "nll_sum", "block_nll")
_DEFAULTS: dict[str, Any] = {"question": "", "method": "", "estimator": "exact", "block_nll": ()}
# A row of any file takes at least this many bytes (the length of its plain configuration string).
_LEAST_ROW_BYTES = 4
_METADATA = b"jaxablate"


class DamagedRows(UserError):
    """A file of rows that is cut short, altered, or was never one."""


@dataclass(frozen=True)
class RowSchema:
    """The columns of one experiment's rows, in order.

    Args:
      columns: the experiment's own scalar columns, (name, "str" | "int" | "float" | "bool"); their
        values may be None.
      scored: whether rows hold a likelihood: scored_tokens (count), nll_sum (nats, float64) and
        block_nll (nats, sums over consecutive blocks of the scored tokens; may be empty).
    """

    columns: tuple[tuple[str, str], ...] = ()
    scored: bool = True

    @classmethod
    def declare(cls, columns: Mapping[str, type], scored: bool = True) -> "RowSchema":
        """From {"layer": int, "ratio": float, "null": str}. Raises ValueError on a bad column."""
        fixed = {*_IDENTITY, "configuration", *_PROVENANCE, *_SCORES}
        for name, kind in columns.items():
            if not name.isidentifier() or name in fixed:
                raise ValueError(f"column {name!r}: want an identifier that is none of {fixed}")
            if getattr(kind, "__name__", kind) not in _KINDS:
                raise ValueError(f"column {name!r} of type {kind!r}: want one of {list(_KINDS)}")
        return cls(tuple((name, kind.__name__) for name, kind in columns.items()), scored)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RowSchema":
        """From what `to_dict` gave, once it has been through JSON."""
        kinds = {kind.__name__: kind for kind in (str, int, float, bool)}
        return cls.declare({name: kinds[kind] for name, kind in data["columns"]}, data["scored"])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"columns": [list(column) for column in self.columns], "scored": self.scored}

    @property
    def arrow(self) -> pa.Schema:
        """Identity, the experiment's own columns, where the numbers come from, the numbers."""
        fields = [pa.field(name, pa.string(), nullable=False) for name in _IDENTITY]
        fields.append(pa.field("configuration", pa.string(), nullable=False))
        fields += [pa.field(name, _KINDS[kind]) for name, kind in self.columns]
        fields += [pa.field(name, pa.string(), nullable=False) for name in _PROVENANCE[:3]]
        fields.append(pa.field("seed", pa.int64(), nullable=False))
        if self.scored:
            element = pa.field("element", pa.float64(), nullable=False)
            fields.append(pa.field("scored_tokens", pa.int64(), nullable=False))
            fields.append(pa.field("nll_sum", pa.float64(), nullable=False))
            fields.append(pa.field("block_nll", pa.list_(element), nullable=False))
        return pa.schema(fields)


def table_from_rows(
    rows: Iterable[Mapping[str, Any]], schema: RowSchema, same: Mapping[str, Any]
) -> pa.Table:
    """A table of `rows`, each a mapping from column to value; `same` holds values of every row.

    Raises:
      TypeError: a column that was not declared, an absent value, or one of the wrong type.
      UserError: a likelihood that is not a number.
    """
    rows = list(rows)
    arrow = schema.arrow
    for row in rows:
        if unknown := sorted(set(row) - set(arrow.names)):
            raise TypeError(f"row has columns {unknown}; declared are {arrow.names}")
        if clash := sorted(name for name in set(row) & set(same) if row[name] != same[name]):
            raise TypeError(f"row gives {clash} another value than its run or part does")
    arrays = []
    for field in arrow:
        default = same.get(field.name, _DEFAULTS.get(field.name))
        arrays.append(_column([row.get(field.name, default) for row in rows], field))
    table = pa.table(arrays, schema=arrow)
    if schema.scored:
        _refuse_nan(table)
    return table


def _column(values: Sequence[Any], field: pa.Field) -> pa.Array:
    """`values` as exactly the type of `field`."""
    try:
        # Arrow would cut the fraction off.
        if pa.types.is_integer(field.type) and any(
            isinstance(v, np.floating | float) for v in values
        ):
            raise TypeError("got a fraction")
        array = pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise TypeError(f"column {field.name!r} wants {field.type}: {error}") from error
    nulls = array.null_count
    if pa.types.is_list(field.type):
        nulls += array.flatten().null_count
    if nulls and not field.nullable:
        raise TypeError(f"column {field.name!r} needs a value in every row")
    return array


def _refuse_nan(table: pa.Table) -> None:
    """A NaN would spread silently into every mean; the row that holds it is named instead."""
    lists = table["block_nll"].to_pylist()
    for index, value in enumerate(table["nll_sum"].to_pylist()):
        if math.isnan(value) or any(math.isnan(block) for block in lists[index]):
            where = {name: table[name][index].as_py() for name in ("configuration", "document")}
            raise UserError(
                f"the likelihood of configuration {where['configuration']!r} on document "
                f"{where['document']!r} is not a number: nothing of this part was kept; check the "
                "weights, or use --dtype=float32"
            )


def encode(
    sink: io.BufferedIOBase, schema: RowSchema, groups: Iterable[pa.Table], about: Mapping[str, Any]
) -> None:
    """Writes one Parquet file, one row group per table of `groups`, with `about` in its footer."""
    arrow = schema.arrow
    coded = [f.name for f in arrow if pa.types.is_string(f.type) and f.name != "configuration"]
    digest = hashlib.sha256()
    writer = pq.ParquetWriter(
        sink,
        arrow,
        compression="none",
        use_dictionary=coded,
        write_statistics=False,
        store_schema=False,
        version="2.6",
        data_page_version="1.0",
        write_page_checksum=True,
    )
    try:
        for table in groups:
            table = table.cast(arrow).combine_chunks()
            _hash_table(digest, table)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
        footer = {**about, "row_version": ROW_VERSION, "schema": schema.to_dict()}
        footer["content"] = digest.hexdigest()
        writer.add_key_value_metadata({_METADATA: json.dumps(footer, sort_keys=True).encode()})
    finally:
        writer.close()


def decode(data: bytes, source: str) -> tuple[pa.Table, dict[str, Any]]:
    """Rows and footer of a file that `encode` wrote; `source` names it in errors.

    Nothing is trusted: row counts are bounded by the file's size before anything is allocated, and
    the content's digest must agree.

    Raises:
      DamagedRows: in one line, why the bytes are not such a file.
    """
    try:
        return _decode(data)
    except DamagedRows as error:
        reason = str(error)
    except Exception as error:  # Arrow answers damaged bytes with nearly every type there is
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    raise DamagedRows(f"{source} is no intact file of jaxablate rows: {reason}")


def _decode(data: bytes) -> tuple[pa.Table, dict[str, Any]]:
    file = pq.ParquetFile(
        pa.BufferReader(data),
        page_checksum_verification=True,
        thrift_string_size_limit=max(1, len(data)),
        thrift_container_size_limit=max(1, len(data)),
    )
    try:
        about = json.loads((file.metadata.metadata or {})[_METADATA])
        schema = RowSchema.from_dict(about["schema"]).arrow
    except Exception as error:
        raise DamagedRows("its footer does not describe rows") from error
    if about["row_version"] != ROW_VERSION:
        raise DamagedRows(f"row version {about['row_version']!r}, this program's is {ROW_VERSION}")
    if not file.schema_arrow.equals(schema):
        raise DamagedRows("its columns are not the declared ones")
    counts = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
    if min(counts, default=0) < 0 or sum(counts) != file.metadata.num_rows:
        raise DamagedRows("its row counts disagree")
    if sum(counts) * _LEAST_ROW_BYTES > len(data):
        raise DamagedRows(f"{sum(counts)} rows do not fit in {len(data)} bytes")
    digest = hashlib.sha256()
    tables = []
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False).combine_chunks()
        table.validate(full=True)
        _hash_table(digest, table)
        tables.append(table)
    if digest.hexdigest() != about["content"]:
        raise DamagedRows("its content does not agree with its digest")
    return (pa.concat_tables(tables) if tables else schema.empty_table()), about


def _hash_table(digest: Any, table: pa.Table) -> None:
    for name, column in zip(table.column_names, table.columns):
        digest.update(f"{name} {column.type} {len(column)}\n".encode())
        for chunk in column.chunks:
            _hash_array(digest, chunk)


def _hash_array(digest: Any, array: pa.Array) -> None:
    """Values, nulls and lengths: what Arrow's own layout may leave open does not count."""
    digest.update(np.asarray(array.is_valid().cast(pa.int8())).tobytes())
    if pa.types.is_list(array.type):
        digest.update(np.asarray(pc.list_value_length(array).fill_null(0)).tobytes())
        _hash_array(digest, array.flatten())
    elif pa.types.is_string(array.type):
        digest.update(np.asarray(pc.binary_length(array).fill_null(0)).tobytes())
        digest.update("".join(pc.fill_null(array, "").to_pylist()).encode())
    elif pa.types.is_boolean(array.type):
        digest.update(np.asarray(array.fill_null(False).cast(pa.int8())).tobytes())
    else:
        digest.update(np.asarray(array.fill_null(0)).tobytes())


def regroup(tables: Iterable[pa.Table], rows_per_group: int = 50_000) -> Iterator[pa.Table]:
    """Joins consecutive tables until each has at least `rows_per_group` rows.

    Bounds the memory of a final file and its row groups, whose number Parquet limits to 32,767.
    """
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(one.num_rows for one in held) >= rows_per_group:
            yield pa.concat_tables(held)
            held = []
    if held:
        yield pa.concat_tables(held)


def write_csv(sink: io.BufferedIOBase, schema: RowSchema, tables: Iterable[pa.Table]) -> None:
    """The same rows as text, without the lists; None is an empty field, "" a quoted one."""
    names = [name for name in schema.arrow.names if name != "block_nll"]
    options = pyarrow.csv.WriteOptions(include_header=True)
    with pyarrow.csv.CSVWriter(
        sink, pa.schema([schema.arrow.field(name) for name in names]), write_options=options
    ) as writer:
        for table in tables:
            writer.write_table(table.select(names))


def in_order(table: pa.Table, configurations: Sequence[str]) -> pa.Table:
    """Rows sorted by their configuration's place in `configurations`, questions kept in order.

    Raises:
      ValueError: a configuration without a row, a row of another configuration, or two rows of one
        (configuration, question).
    """
    place = {key: index for index, key in enumerate(configurations)}
    found = table["configuration"].to_pylist()
    if strange := sorted(set(found) - set(place)):
        raise ValueError(f"rows of configurations {strange[:3]}, which the part does not have")
    if absent := [key for key in configurations if key not in set(found)]:
        raise ValueError(f"no row of configurations {absent[:3]}")
    pairs = list(zip(found, table["question"].to_pylist()))
    if len(set(pairs)) < len(pairs):
        raise ValueError("two rows of the same configuration and question")
    return table.take(sorted(range(len(found)), key=lambda index: place[found[index]]))
