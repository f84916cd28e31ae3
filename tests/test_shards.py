"""Shards: how they are named and split, and that merging gives a single run's bytes."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxablate import merging, results
from jaxablate.errors import UserError
from jaxablate.shards import Shard, parse_shard, split
from tests import fake_sweep

ROOT = Path(__file__).resolve().parents[1]


def slurm(task: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    values = {"ID": task, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("", {}, None),
        (None, {}, None),
        ("0/1", {}, Shard(0, 1)),
        ("2/3", {}, Shard(2, 3)),
        ("auto", slurm(5, 3, 7, 5), Shard(2, 5)),
        ("auto", slurm(9, 1, 13, 4, step=4), Shard(2, 4)),
        ("auto/16", slurm(9, 7, 9, 2), Shard(9, 16)),
        ("auto", {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "4"}, Shard(1, 4)),
        ("auto/8", {"JOB_COMPLETION_INDEX": "1"}, Shard(1, 8)),
    ],
)
def test_shards_are_read_from_flags_and_jobs(
    text: str | None, environment: dict[str, str], expected: Shard | None
) -> None:
    assert parse_shard(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "environment", "named"),
    [
        ("3/3", {}, r"3/3.*0 <= i < n"),
        ("-1/3", {}, r"--shard=-1/3: want 'i/n'"),
        ("0/0", {}, "0/0"),
        ("1", {}, "--shard=1: want"),
        ("1/3/5", {}, "--shard=1/3/5"),
        ("１/３", {}, "want 'i/n'"),
        ("9999999999999999999999/3", {}, "want 'i/n'"),
        ("auto", {}, "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX"),
        ("auto", {"JOB_COMPLETION_INDEX": "1"}, "auto/n"),
        (
            "auto",
            {"JOB_COMPLETION_INDEX": "x", "JOB_COMPLETIONS": "4"},
            "JOB_COMPLETION_INDEX is 'x'",
        ),
        ("auto", {"JOB_COMPLETION_INDEX": "4", "JOB_COMPLETIONS": "4"}, "4/4"),
        ("auto", slurm(3, 3, 7, 2), "has gaps: give the number of shards as --shard=auto/n"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "3"}, "SLURM_ARRAY_TASK_MIN is None"),
        ("auto/4", slurm(7, 3, 7, 2), "7/4"),
    ],
)
def test_bad_shards_are_refused_by_name(text: str, environment: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_shard(text, environment)


def test_a_split_is_complete_disjoint_ordered_and_balanced() -> None:
    draw = random.Random(1)
    for count in (1, 2, 3, 7, 40):
        costs = [draw.choice([0.0, 1.0, 2.5, draw.random() * 10]) for _ in range(30)]
        shares = split(costs, count)
        assert sorted(itertools.chain(*shares)) == list(range(30))
        assert all(share == sorted(share) for share in shares)
        assert shares == split(list(costs), count)
        loads = [sum(costs[i] for i in share) for share in shares]
        assert max(loads) <= 4 / 3 * max(sum(costs) / count, max(costs)) + 1e-9


def test_ties_are_split_evenly_and_in_order() -> None:
    assert split([1.0] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert split([0.0] * 4, 2) == [[0, 2], [1, 3]]
    assert split([3.0, 1.0, 1.0, 1.0], 2) == [[0], [1, 2, 3]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole: a single run of 7 parts; 0, 1, 2: its shards."""
    base = tmp_path_factory.mktemp("swept")
    fake_sweep.sweep(base / "whole", 7)
    assert sum(fake_sweep.sweep(base / str(i), 7, Shard(i, 3)) for i in range(3)) == 7
    return base


def merge_command(out: Path, *directories: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "experiments/merge.py", *map(str, directories), f"--out={out}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_same_rows(out: Path, whole: Path) -> None:
    for name in ("rows.parquet", "rows.csv", "plan.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("order", list(itertools.permutations("012")))
def test_merged_shards_equal_the_single_run_in_any_order(
    swept: Path, tmp_path: Path, order: tuple[str, ...]
) -> None:
    merged = merging.merge([swept / i for i in order], tmp_path / "out")
    assert merged == merging.Merged(tmp_path / "out" / "rows.parquet", 7, 0, False)
    assert_same_rows(tmp_path / "out", swept / "whole")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert [one["shard"] for one in record["merged_from"]] == [f"{i}/3" for i in order]


def test_merging_twice_or_with_repeated_work_changes_nothing(swept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = merge_command(out, *(swept / i for i in "012"))
    assert first.returncode == 0, first.stderr
    assert f"7 parts merged: {out}/rows.parquet" in first.stdout
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    second = merge_command(out, swept / "1", swept / "1", swept / "whole", swept / "0")
    assert second.returncode == 0, second.stderr
    assert "complete already: nothing to do" in second.stdout
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    with fake_sweep.new_run(out) as run:  # the experiment's own command only draws
        run.plan(fake_sweep.specs(7))
        assert run.complete()


def test_a_missing_shard_is_named_with_a_non_zero_exit(swept: Path, tmp_path: Path) -> None:
    result = merge_command(tmp_path / "out", swept / "0", swept / "2")
    assert result.returncode == 1
    assert result.stderr.startswith("error: 2 of 7 parts are missing: ")
    assert result.stderr.count("\n") == 1
    plan = json.loads((swept / "1" / "plan.json").read_text())["parts"]
    mine = {path.stem for path in (swept / "1" / "parts").iterdir()}
    for part in plan:
        named = f"{part['key'][:12]} (document {part['document']!r}, 3 configurations from"
        assert (named in result.stderr) == (part["key"] in mine)
    assert not (tmp_path / "out").exists()


def test_shards_of_other_settings_are_refused_and_the_fields_named(
    swept: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    changes = {
        "model_digest": "n",
        "settings": {"article_tokens": 512, "ratios": [0.0, 0.5]},
        "constants": {"dtype": "float32", "seed": 1},
    }
    fake_sweep.sweep(other, 7, Shard(1, 3), **changes)
    result = merge_command(tmp_path / "out", swept / "0", other, swept / "2")
    assert result.returncode == 1
    for named in (
        'model_digest ("model", "n")',
        "settings.article_tokens (1024, 512)",
        "constants.seed (0, 1)",
    ):
        assert named in result.stderr
    assert "ratios" not in result.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="not of one sweep"):
        merging.merge([swept / "whole"], other)


def test_other_documents_or_configurations_are_refused(swept: Path, tmp_path: Path) -> None:
    def plan_of(specs: list[results.PartSpec], name: str) -> Path:
        with fake_sweep.new_run(tmp_path / name) as run:
            run.plan(specs)
        return tmp_path / name

    specs = fake_sweep.specs(7)
    changed = [*specs[:6], results.PartSpec("topic 6", "changed", fake_sweep.CONFIGURATIONS)]
    with pytest.raises(UserError, match=r"document 'topic 6' \(digest digest 6, changed\)"):
        merging.merge([swept / "0", plan_of(changed, "text")], tmp_path / "out")
    with pytest.raises(UserError, match="the configurations, or how they are cut"):
        merging.merge([swept / "0", plan_of(specs[::-1], "order")], tmp_path / "out")


def test_a_damaged_part_is_missing_unless_another_directory_has_it(
    swept: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(swept / "1", damaged)
    victim = sorted((damaged / "parts").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-20])
    with pytest.raises(merging.MissingParts, match=rf"1 of 7 .*{victim.stem[:12]}.*damaged"):
        merging.merge([swept / "0", damaged, swept / "2"], tmp_path / "out")
    merging.merge([damaged, *(swept / i for i in "012")], tmp_path / "out")
    assert_same_rows(tmp_path / "out", swept / "whole")


def test_parts_that_another_device_rounded_differently_merge_the_same_in_any_order(
    swept: Path, tmp_path: Path
) -> None:
    rounded = tmp_path / "rounded"
    with fake_sweep.new_run(rounded, Shard(1, 3)) as run:
        for part in run.plan(fake_sweep.specs(7)):
            rows = fake_sweep.rows_of(part)
            run.write(part, [{**row, "nll_sum": row["nll_sum"] * (1 + 1e-7)} for row in rows])
    directories = [rounded, *(swept / i for i in "012")]
    for name, order in (("a", directories), ("b", directories[::-1])):
        assert merging.merge(order, tmp_path / name).contradicting == 2
    assert_same_rows(tmp_path / "a", tmp_path / "b")


def test_shards_may_share_one_directory(swept: Path, tmp_path: Path) -> None:
    for i in (1, 0):
        fake_sweep.sweep(tmp_path, 7, Shard(i, 3))
        assert not (tmp_path / "rows.parquet").exists()
    with pytest.raises(merging.MissingParts):
        merging.merge([tmp_path], tmp_path)
    fake_sweep.sweep(tmp_path, 7, Shard(2, 3))  # the last one completes the whole
    assert_same_rows(tmp_path, swept / "whole")
    assert merging.merge([tmp_path], tmp_path).unchanged
    (tmp_path / "rows.parquet").unlink()
    assert not merging.merge([tmp_path], tmp_path).unchanged
    assert_same_rows(tmp_path, swept / "whole")
    assert fake_sweep.sweep(tmp_path, 7) == 0


def test_more_shards_than_parts_leave_some_idle(tmp_path: Path) -> None:
    directories = []
    for i in range(4):
        directories.append(tmp_path / str(i))
        assert fake_sweep.sweep(directories[-1], 2, Shard(i, 4)) == (i < 2)
    assert merging.merge(directories, tmp_path / "out").parts == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"identity": {}, "parts": 3, "digest": ""}',
        '{"identity": {"row_version": 1}, "parts": [{"key": "../../x"}], "digest": ""}',
        '{"identity": {"row_version": 1}, "parts": [], "digest": "0"}',
        '{"identity": {"row_version": NaN}, "parts": [], "digest": "0"}',
    ],
)
def test_a_damaged_plan_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    result = merge_command(tmp_path / "out", tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_directories_without_a_sweep_are_refused(tmp_path: Path) -> None:
    for directories in ([], [tmp_path], [tmp_path / "absent"]):
        result = merge_command(tmp_path / "out", *directories)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
