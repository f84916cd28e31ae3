"""Rows: declared columns, exact bytes, and files that are not what they claim."""

import csv
import io
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxablate import manifest, results, rows
from jaxablate.errors import UserError
from tests import fake_sweep

SCHEMA = rows.RowSchema.declare({"layer": int, "ratio": float, "null": str, "kept": bool})
SAME = {
    "experiment": "fake",
    "model_digest": "m",
    "document": 'topic, "quoted"\nέ',
    "document_digest": "d",
    "dtype": "float32",
    "seed": 7,
}


def row(**changes: object) -> dict[str, object]:
    plain = {"configuration": "", "scored_tokens": 3, "nll_sum": 1.25, "block_nll": [1.0, 0.25]}
    return {**plain, **changes}


def table(*more: dict[str, object]) -> pa.Table:
    first = row(layer=2, ratio=0.1, null="zero", kept=True)
    return rows.table_from_rows([first, *more], SCHEMA, SAME)


def encoded(*groups: pa.Table, **about: object) -> bytes:
    sink = io.BytesIO()
    rows.encode(sink, SCHEMA, groups, about)
    return sink.getvalue()


def test_columns_are_the_declared_ones_in_order() -> None:
    assert SCHEMA.arrow.names == [
        *("experiment", "model_digest", "document", "document_digest", "question", "configuration"),
        *("layer", "ratio", "null", "kept"),
        *("method", "estimator", "dtype", "seed", "scored_tokens", "nll_sum", "block_nll"),
    ]
    assert rows.RowSchema.declare({"alpha": float}, scored=False).arrow.names[-1] == "seed"
    assert rows.RowSchema.from_dict(SCHEMA.to_dict()) == SCHEMA
    for wrong in ({"seed": int}, {"two words": int}, {"layer": list}):
        with pytest.raises(ValueError, match="column"):
            rows.RowSchema.declare(wrong)


def test_values_come_back_exactly() -> None:
    numbers = [0.1, 1e-300, math.pi * 1e9, 5e-324]
    written = table(row(configuration="L0:block", nll_sum=np.float64(1 / 3), block_nll=numbers))
    read, about = rows.decode(encoded(written, part="key"), "file")
    assert read.equals(written)
    assert about["part"] == "key"
    assert read["nll_sum"].to_pylist() == [1.25, 1 / 3]
    assert read["block_nll"].to_pylist()[1] == numbers
    assert read["layer"].to_pylist() == [2, None]
    assert set(read["document"].to_pylist()) == {SAME["document"]}
    assert set(read["seed"].to_pylist()) == {7}
    assert set(read["estimator"].to_pylist()) == {"exact"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layers": 3}, "layers"),
        ({"layer": "three"}, "layer"),
        ({"layer": 1.5}, "layer"),
        ({"layer": True}, "layer"),
        ({"configuration": None}, "configuration"),
        ({"nll_sum": None}, "nll_sum"),
        ({"block_nll": [1.0, None]}, "block_nll"),
        ({"seed": 8}, "seed"),
    ],
)
def test_rows_of_other_columns_or_types_are_refused(wrong: dict, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        rows.table_from_rows([row(**wrong)], SCHEMA, SAME)


def test_a_missing_constant_is_refused() -> None:
    same = {name: value for name, value in SAME.items() if name != "dtype"}
    with pytest.raises(TypeError, match="'dtype' needs a value"):
        rows.table_from_rows([row()], SCHEMA, same)


@pytest.mark.parametrize("bad", [{"nll_sum": math.nan}, {"block_nll": [1.0, math.nan]}])
def test_a_likelihood_that_is_not_a_number_is_refused_by_name(bad: dict) -> None:
    with pytest.raises(UserError, match=r"configuration 'L3:block' on document .* not a number"):
        table(row(configuration="L3:block", **bad))


def test_bytes_do_not_depend_on_how_rows_were_chunked() -> None:
    whole = table(row(configuration="a"), row(configuration="b"))
    chunked = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 2)])
    assert encoded(whole) == encoded(chunked)
    assert encoded(whole) != encoded(whole.slice(0, 2))


def test_final_groups_are_bounded_and_complete() -> None:
    pieces = [table(row(configuration=str(i))) for i in range(7)]
    groups = list(rows.regroup(pieces, rows_per_group=4))
    assert [group.num_rows for group in groups] == [4, 4, 4, 2]
    read, _ = rows.decode(encoded(*groups), "file")
    assert read["configuration"].to_pylist() == [c for i in range(7) for c in ("", str(i))]


def test_csv_says_the_same_to_an_independent_reader() -> None:
    written = table(row(configuration="L0H1=3", nll_sum=1 / 3))
    sink = io.BytesIO()
    rows.write_csv(sink, SCHEMA, [written])
    read = list(csv.DictReader(io.StringIO(sink.getvalue().decode(), newline="")))
    assert [one["configuration"] for one in read] == ["", "L0H1=3"]
    assert [float(one["nll_sum"]) for one in read] == [1.25, 1 / 3]
    assert [one["layer"] for one in read] == ["2", ""]
    assert read[0]["document"] == SAME["document"]
    assert "block_nll" not in read[0]


def test_rows_are_put_in_the_order_of_the_plan() -> None:
    given_rows = [row(configuration=c, question=q) for q in ("q1", "q0") for c in ("b", "a")]
    ordered = rows.in_order(rows.table_from_rows(given_rows, SCHEMA, SAME), ["a", "b"])
    pairs = list(zip(ordered["configuration"].to_pylist(), ordered["question"].to_pylist()))
    assert pairs == [("a", "q1"), ("a", "q0"), ("b", "q1"), ("b", "q0")]
    for keys, complaint in ((["a"], "does not have"), (["a", "b", "c"], "no row of")):
        with pytest.raises(ValueError, match=complaint):
            rows.in_order(ordered, keys)
    with pytest.raises(ValueError, match="two rows"):
        rows.in_order(pa.concat_tables([ordered, ordered]), ["a", "b"])


INTACT = encoded(table(row(configuration="a"), row(configuration="b")), part="key")


def test_every_single_flipped_byte_is_noticed_or_harmless() -> None:
    expected, about = rows.decode(INTACT, "file")
    messages = []
    for position in range(len(INTACT)):
        damaged = bytearray(INTACT)
        damaged[position] ^= 0x40
        try:
            read, _ = rows.decode(bytes(damaged), "file")
        except rows.DamagedRows as error:
            messages.append(str(error))
        else:
            assert read.equals(expected)
    assert len(messages) > 0.5 * len(INTACT)  # the rest is what no reader looks at
    for message in messages:
        assert message.startswith("file is no intact file of jaxablate rows: ")
        assert "\n" not in message
    assert about["row_version"] == rows.ROW_VERSION


def test_pages_of_another_file_are_noticed_though_their_own_checksums_agree() -> None:
    other = encoded(table(row(configuration="a"), row(configuration="b", nll_sum=2.5)), part="key")
    footer = len(INTACT) - 8 - int.from_bytes(INTACT[-8:-4], "little")
    assert len(other) == len(INTACT)
    with pytest.raises(rows.DamagedRows, match="does not agree with its digest"):
        rows.decode(other[:footer] + INTACT[footer:], "file")
    flipped = bytearray(INTACT)
    flipped[footer - 1] ^= 1
    with pytest.raises(rows.DamagedRows, match="CRC"):
        rows.decode(bytes(flipped), "file")


@pytest.mark.parametrize("length", [0, 1, 4, 8, 100, len(INTACT) - 1])
def test_a_file_cut_short_is_refused(length: int) -> None:
    with pytest.raises(rows.DamagedRows):
        rows.decode(INTACT[:length], "file")


def test_other_parquet_files_are_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2]}), sink)
    with pytest.raises(rows.DamagedRows, match="no intact file of jaxablate rows"):
        rows.decode(sink.getvalue(), "file")


def test_another_row_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_VERSION", rows.ROW_VERSION + 1)
    with pytest.raises(rows.DamagedRows, match="row version 1, this program's is 2"):
        rows.decode(INTACT, "file")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    fake_sweep.sweep(out, 3)
    return out


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Overwrites, deletions, insertions and truncations, most of them in the footer."""
    count = draw(st.integers(1, 4))
    edits = [
        (
            draw(st.sampled_from(["overwrite", "delete", "insert", "cut"])),
            draw(st.one_of(st.floats(0, 1), st.floats(0.5, 1))),
            draw(st.binary(min_size=1, max_size=12)),
        )
        for _ in range(count)
    ]

    def mutate(data: bytes) -> bytes:
        for kind, place, patch in edits:
            at = int(place * len(data))
            if kind == "overwrite":
                data = data[:at] + patch + data[at + len(patch) :]
            elif kind == "delete":
                data = data[:at] + data[at + len(patch) :]
            elif kind == "insert":
                data = data[:at] + patch + data[at:]
            else:
                data = data[: max(at, 1)]
        return data

    return mutate


@settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutate=mutations())
def test_mutated_files_give_rows_or_one_line(
    finished: Path, tmp_path: Path, mutate: Callable[[bytes], bytes]
) -> None:
    intact = (finished / "rows.parquet").read_bytes()
    path = tmp_path / "rows.parquet"
    path.write_bytes(mutate(intact))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = ""
    try:
        read = results.read_rows(path)
    except UserError as error:
        message = str(error)
    else:
        assert read.equals(results.read_rows(finished))
    assert "\n" not in message
    assert len(message) < 400
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 200 * 1024


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutate=mutations())
def test_mutated_plans_are_read_or_refused_in_one_line(
    finished: Path, tmp_path: Path, mutate: Callable[[bytes], bytes]
) -> None:
    expected = manifest.read_plan(finished)
    (tmp_path / "plan.json").write_bytes(mutate((finished / "plan.json").read_bytes()))
    message = ""
    try:
        assert manifest.read_plan(tmp_path) == expected
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 400


def test_reading_what_is_not_there_says_what_to_do(tmp_path: Path, finished: Path) -> None:
    with pytest.raises(UserError, match=r"holds no sweep: there is no plan.json"):
        results.read_rows(tmp_path)
    with pytest.raises(UserError, match=r"is no file: give the experiment's command again"):
        results.read_rows(tmp_path / "rows.parquet")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is no file"):
        results.read_rows(tmp_path / "pipe")
    frame = results.read_rows(finished)
    assert len(frame) == 18
    assert frame["block_nll"][0].dtype == np.float64
    np.testing.assert_allclose(frame["block_nll"].map(sum), frame["nll_sum"], rtol=1e-15)
