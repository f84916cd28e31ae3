"""A run: what part keys depend on, resuming, damage found, the record, redrawing."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxablate import manifest, parts, results, rows
from jaxablate.errors import UserError
from tests import fake_sweep

IDENTITY: dict[str, Any] = {
    "experiment": "fake",
    "model_digest": "m",
    "settings": {"ratios": [0.1, 0.2], "protect": 4},
    "constants": {"seed": 0},
    "schema": rows.RowSchema.declare({"layer": int}),
}
SPEC: dict[str, Any] = {
    "document": "name",
    "document_digest": "d",
    "configurations": ("a", "b"),
    "inputs": {"questions": "q"},
}


def key(identity: dict[str, Any], spec: dict[str, Any]) -> str:
    plan = manifest.make_plan(manifest.identity(**identity), [results.PartSpec(**spec)])
    return plan.keys[0]


@pytest.mark.parametrize(
    "change",
    [
        {"experiment": "other"},
        {"model_digest": "n"},
        {"settings": {"ratios": [0.1, 0.3], "protect": 4}},
        {"settings": {"ratios": [0.1, 0.2], "protect": 5}},
        {"settings": {"ratios": [0.2, 0.1], "protect": 4}},
        {"settings": {"ratios": [0.1, 0.2]}},
        {"constants": {"seed": 1}},
        {"schema": rows.RowSchema.declare({"layer": float})},
        {"document": "other name"},
        {"document_digest": "e"},
        {"configurations": ("b", "a")},
        {"configurations": ("a",)},
        {"configurations": ("a,b",)},
        {"inputs": {"questions": "r"}},
    ],
    ids=str,
)
def test_whatever_changes_numbers_changes_the_key(change: dict[str, Any]) -> None:
    of_identity = {name: value for name, value in change.items() if name in IDENTITY}
    of_spec = {name: value for name, value in change.items() if name in SPEC}
    assert key(IDENTITY, SPEC) != key({**IDENTITY, **of_identity}, {**SPEC, **of_spec})


def test_keys_depend_on_the_row_version_and_not_on_cost_or_order_of_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = key(IDENTITY, SPEC)
    turned = {"settings": {"protect": 4, "ratios": (0.1, 0.2)}}
    assert key({**IDENTITY, **turned}, {**SPEC, "cost": 9.0}) == before
    monkeypatch.setattr(manifest, "ROW_VERSION", 2)
    assert key(IDENTITY, SPEC) != before


@pytest.mark.parametrize("bad", [float("nan"), {1: 2}, {"a": Path("x")}, [object()]])
def test_settings_without_an_exact_form_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"settings\.x"):
        parts.canonical_json({"x": bad})


def test_impossible_parts_are_refused() -> None:
    for wrong in ({"configurations": ()}, {"configurations": ("a", "a")}, {"cost": -1.0}):
        with pytest.raises(ValueError, match=r"part of document|cost"):
            results.PartSpec(**{**SPEC, **wrong})
    with pytest.raises(UserError, match="not UTF-8"):
        results.PartSpec(**{**SPEC, "document": "\udcff"})
    with pytest.raises(ValueError, match="are the same"):
        manifest.make_plan(manifest.identity(**IDENTITY), [results.PartSpec(**SPEC)] * 2)


def test_configurations_are_grouped_by_cost_in_order() -> None:
    groups = parts.group_configurations(list("abcdef"), [1, 1, 5, 2, 1, 1], 3)
    assert groups == [(("a", "b", "c"), 7.0), (("d", "e"), 3.0), (("f",), 1.0)]


def computed_before_failing(out: Path, parts: int, **changes: Any) -> int:
    """Runs three parts' sweep, which fails after some; returns how many it computed."""
    computed = 0
    try:
        with fake_sweep.new_run(out, **changes) as run:
            run.plan(fake_sweep.specs(3))
            for part in run.pending():
                if computed == parts:
                    raise ZeroDivisionError("no reason")
                run.write(part, fake_sweep.rows_of(part))
                computed += 1
    except ZeroDivisionError:
        return computed
    raise AssertionError("did not fail")


def test_run_again_computes_nothing_and_leaves_every_byte(tmp_path: Path) -> None:
    assert fake_sweep.sweep(tmp_path, 4) == 4
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with fake_sweep.new_run(tmp_path) as run:
        run.plan(fake_sweep.specs(4))
        assert run.complete()
        assert run.missing() == []
        assert run.finish() == tmp_path / "rows.parquet"
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_two_runs_write_the_same_bytes_and_rows_are_in_the_order_of_the_plan(
    tmp_path: Path,
) -> None:
    fake_sweep.sweep(tmp_path / "a", 4)
    with fake_sweep.new_run(tmp_path / "b") as run:
        for part in reversed(run.plan(fake_sweep.specs(4))):
            run.write(part, reversed(fake_sweep.rows_of(part)))
        run.finish()
        frame = run.read()
    assert list(frame["document"]) == [f"topic {i}" for i in range(4) for _ in range(6)]
    assert list(frame["configuration"][:6:2]) == list(fake_sweep.CONFIGURATIONS)
    with fake_sweep.new_run(tmp_path / "c") as run:
        for part in reversed(run.plan(fake_sweep.specs(4))):
            run.write(part, fake_sweep.rows_of(part))
        run.finish()
    for name in ("rows.parquet", "rows.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    ],
    ids=["truncated", "empty", "altered"],
)
def test_damaged_parts_are_computed_again_and_said_so(
    tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sweep.sweep(tmp_path, 4)
    intact = (tmp_path / "rows.parquet").read_bytes()
    victim = sorted((tmp_path / "parts").iterdir())[1]
    victim.write_bytes(damage(victim.read_bytes()))
    (tmp_path / "rows.parquet").unlink()
    capsys.readouterr()
    assert fake_sweep.sweep(tmp_path, 4) == 1
    said = capsys.readouterr().err
    assert f"{victim} is no intact file" in said
    assert "computing it again" in said
    assert (tmp_path / "rows.parquet").read_bytes() == intact


def test_a_part_under_another_parts_name_is_not_believed(tmp_path: Path) -> None:
    fake_sweep.sweep(tmp_path, 2)
    first, second = sorted((tmp_path / "parts").iterdir())
    first.write_bytes(second.read_bytes())
    (tmp_path / "rows.parquet").unlink()
    assert fake_sweep.sweep(tmp_path, 2) == 1


def test_altered_final_rows_are_made_again_from_parts(tmp_path: Path) -> None:
    fake_sweep.sweep(tmp_path, 2)
    intact = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(intact[:-9])
    assert fake_sweep.sweep(tmp_path, 2) == 0
    assert (tmp_path / "rows.parquet").read_bytes() == intact
    (tmp_path / "run.json").write_text("{")
    assert fake_sweep.sweep(tmp_path, 2) == 0
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "complete"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"article_tokens": 512, "ratios": [0.0, 0.5]}},
        {"model_digest": "other weights"},
        {"constants": {"dtype": "float32", "seed": 1}},
    ],
    ids=["settings", "weights", "seed"],
)
def test_other_settings_never_meet_old_rows_and_going_back_costs_nothing(
    tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sweep.sweep(tmp_path, 3)
    before = (tmp_path / "rows.parquet").read_bytes()
    assert computed_before_failing(tmp_path, 0, **change) == 0
    said = capsys.readouterr().err
    assert "was used before with other" in said
    assert next(iter(change)) in said
    with pytest.raises(UserError, match="of an earlier run with other settings"):
        results.read_rows(tmp_path)
    assert fake_sweep.sweep(tmp_path, 3, **change) == 3
    assert (tmp_path / "rows.parquet").read_bytes() != before
    assert fake_sweep.sweep(tmp_path, 3) == 0
    assert (tmp_path / "rows.parquet").read_bytes() == before


def test_killed_between_the_new_plan_and_its_record_is_not_complete(tmp_path: Path) -> None:
    fake_sweep.sweep(tmp_path, 3)
    with fake_sweep.new_run(tmp_path, model_digest="n") as other:
        identity = other._identity
    manifest.write_plan(tmp_path, manifest.make_plan(identity, fake_sweep.specs(3)), "whole")
    assert fake_sweep.sweep(tmp_path, 3, model_digest="n") == 3


def test_a_longer_plan_reuses_the_shorter_ones_parts(tmp_path: Path) -> None:
    assert fake_sweep.sweep(tmp_path, 2) == 2
    assert fake_sweep.sweep(tmp_path, 5) == 3
    assert len(results.read_rows(tmp_path)) == 30


def test_record_says_what_was_run_and_for_how_long(tmp_path: Path) -> None:
    assert computed_before_failing(tmp_path, 1, device="a chip") == 1
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "failed: no reason"
    assert record["parts"] == {"plan": 3, "mine": 3, "done": 1}
    fake_sweep.sweep(tmp_path, 3, device="a chip")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "complete"
    assert record["device"] == "a chip"
    assert record["flags"] == {"seed": 0}
    assert record["identity"]["settings"]["article_tokens"] == 1024
    assert record["documents"]["topic 1"] == "digest 1"
    assert set(record["versions"]) >= {"python", "jax", "flax", "numpy", "jaxablate"}
    assert [one["parts_computed"] for one in record["sessions"]] == [1, 2]
    assert record["seconds"] == pytest.approx(sum(one["seconds"] for one in record["sessions"]))


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="constants \\['layers'\\] are no columns"):
        fake_sweep.new_run(tmp_path, constants={"layers": 3})
    with fake_sweep.new_run(tmp_path) as run:
        with pytest.raises(RuntimeError, match="plan"):
            run.missing()
        first, *_ = run.plan(fake_sweep.specs(2))
        with pytest.raises(RuntimeError, match=r"2 parts .* not computed"):
            run.finish()
        with pytest.raises(ValueError, match="not in the plan"):
            run.write(fake_sweep.specs(3)[2], [])
        with pytest.raises(ValueError, match="no row of"):
            run.write(first, fake_sweep.rows_of(first)[:2])
        assert len(run.missing()) == 2


def test_experiments_without_likelihoods_have_rows_too(tmp_path: Path) -> None:
    arguments = {"columns": {"alpha": float}, "scored": False}
    with fake_sweep.new_run(tmp_path, **arguments) as run:
        (part,) = run.plan([results.PartSpec("", "", ("L0/q", "L0/k"))])
        run.write(part, [{"configuration": "L0/k", "alpha": 3.0}, {"configuration": "L0/q"}])
        run.finish()
        frame = run.read()
    assert list(frame["configuration"]) == ["L0/q", "L0/k"]
    assert frame["alpha"][1] == 3.0
