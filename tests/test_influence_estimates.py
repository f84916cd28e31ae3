"""--estimator and --tolerance of the influence experiment, on a tiny model."""

import shutil

import numpy as np
import pandas as pd
import pytest
from test_first_order import taylor_terms
from test_influence_experiment import (  # noqa: F401
    ARTICLE,
    COMMON,
    COMPACTABLE,
    CONFIG,
    SCORED,
    child,
    finished,
    home,
    sources,
)

import convert
from jaxablate import influence
from jaxablate.curves import influence_curves
from jaxablate.sweep import Sweep
from jaxablate.text import load_tokenizer, plain_case, read_documents

RATIOS, COUNTS = (0.0, 0.3, 1.0), (1, 16, COMPACTABLE)


def per_document(out):
    """Δ log-perplexity [configuration, document], the baseline and the full cache left out."""
    rows = pd.read_parquet(out / "rows.parquet")
    table = (rows.nll_sum / rows.scored_tokens).groupby([rows.configuration, rows.document])
    table = table.first().unstack("document")
    return table.sub(table.loc["baseline"]).drop(index=["baseline", "full cache"])


@pytest.fixture(scope="module")
def run(child, home):  # noqa: F811
    def run(name, *flags):
        out = home / name
        answer = child.run(*sources(home), *COMMON, *flags, f"--out={out}")
        assert answer.code == 0, answer.err
        return answer, out

    return run


@pytest.fixture(scope="module")
def second_order(run):
    return run("second", "--estimator=second_order", "--draws=200")


def terms_by_definition(home, name: str) -> tuple[np.ndarray, np.ndarray]:  # noqa: F811
    """Both Taylor terms per scored token of L3H0's points, from the text's file on."""
    checkpoint = convert.resolve(str(home / "hf"), home / "cache")
    (document,) = [d for d in read_documents(str(home / "texts"), limit=2) if d.name == name]
    tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
    case = plain_case(document, tokenizer, article_tokens=ARTICLE, scored_tokens=SCORED)
    model, base = checkpoint.restore(), 2
    heads = [(i, j) for i in range(CONFIG.num_layers) for j in range(CONFIG.num_kv_heads)]
    counts = influence.influence_counts(heads, [(3, 0)], base, COUNTS)
    context = influence.compact_context(model, case, counts)
    engine = Sweep(model, influence.influence_problem(context, case, base))
    points = [influence.head_configuration((3, 0), count, base) for count in COUNTS]
    linear, half_variance = taylor_terms(engine, points)
    return linear[:, 0] / SCORED, half_variance[:, 0] / SCORED


def test_estimated_rows_hold_the_taylor_terms(home, run, second_order):  # noqa: F811
    """Of the last layer, where the terms can be written down.

    The exact effects are no yardstick here: a random model's own curvature, which neither order
    has, is as large as that of its loss.
    """
    _, first = run("first_order", "--estimator=first_order")
    found = [per_document(out).loc[[f"L3H0@{r:g}" for r in RATIOS]] for out in
             (first, second_order[1])]  # fmt: skip
    for document in found[0].columns:
        linear, half_variance = terms_by_definition(home, document)
        first_order, second = (table[document].to_numpy() for table in found)
        np.testing.assert_allclose(first_order, linear, rtol=1e-3, atol=1e-7)
        # A mean of 200 squares of nearly normal numbers: √(2/200) relative, 4.5 times at most.
        np.testing.assert_allclose(second - first_order, half_variance, rtol=4.5 * 0.1)
        assert np.abs(linear).min() > 1e-5
        assert half_variance.min() > 1e-6


def test_what_estimated_rows_say(second_order):
    answer, out = second_order
    rows = pd.read_parquet(out / "rows.parquet")
    at_baseline = rows.keys_kept == 2
    references = rows.layer.isna()
    estimated = ~(at_baseline | references)
    assert set(rows.estimator[estimated]) == {"second_order"}
    assert set(rows.estimator[~estimated]) == {"exact"}
    assert rows.bound[estimated].isna().all()
    assert (rows.bound[~estimated] == 0).all()
    assert (rows.block_nll[estimated].map(len) == 0).all()
    assert (rows.block_nll[~estimated].map(len) > 0).all()
    curves = pd.read_csv(out / "curves.csv")
    assert curves.delta_log_ppl.notna().all()
    assert curves.low[curves.estimator == "second_order"].isna().all()
    assert (curves.delta_log_ppl[curves.estimator == "exact"] == 0).all()
    assert curves.standard_error.notna().all()
    assert "201 backward passes a document" in answer.out
    assert "points      9 second_order, 3 exact" in answer.out
    assert (out / "figures" / "influence.png").stat().st_size > 5000


def test_curves_of_some_estimated_points():
    """Intervals for the exact points alone; the weakest estimator and the mean bound are shown."""
    rng = np.random.default_rng(0)
    lines = []
    for document in ("a", "b"):
        base = rng.uniform(20, 40, 8)
        for ratio in (None, 0.0, 0.1, 0.2):
            blocks = base + (0 if ratio is None else rng.normal(size=8))
            kind = "interpolated" if ratio == 0.1 or (ratio, document) == (0.2, "b") else "exact"
            lines.append(
                {
                    "configuration": "baseline" if ratio is None else f"L0H0@{ratio:g}",
                    "document": document,
                    "question": "",
                    "layer": None if ratio is None else 0,
                    "kv_head": None if ratio is None else 0,
                    "ratio": ratio,
                    "keys_kept": 1,
                    "estimator": kind,
                    "bound": 0.0 if kind == "exact" else 0.002,
                    "nll_sum": blocks.sum(),
                    "scored_tokens": 128,
                    "block_nll": blocks if kind == "exact" else np.empty(0),
                }
            )
    rows = pd.DataFrame(lines)
    curves = influence_curves(rows)
    assert list(curves.estimator) == ["exact", "interpolated", "interpolated"]
    np.testing.assert_allclose(curves.bound, [0, 0.002, 0.001])
    assert list(curves.low.isna()) == [False, True, True]
    for ratio, point in zip((0.0, 0.1, 0.2), curves.itertuples()):
        sums = rows.nll_sum[rows.ratio == ratio].to_numpy() - rows.nll_sum[rows.ratio.isna()]
        assert point.delta_log_ppl == pytest.approx(sums.mean() / 128)
    assert curves.low[0] < curves.delta_log_ppl[0] < curves.high[0]


@pytest.mark.parametrize("tolerance", [0.02, 0.001])
def test_curves_to_a_tolerance(run, finished, tolerance):  # noqa: F811
    _, exact = finished
    answer, out = run(f"tolerance-{tolerance}", f"--tolerance={tolerance}", "--part_size=1")
    truth = per_document(exact)
    error = np.abs(per_document(out).loc[truth.index] - truth)
    rows = pd.read_parquet(out / "rows.parquet")
    kinds = rows.estimator.value_counts()
    print(tolerance, dict(kinds), "worst", error.to_numpy().max())
    assert error.to_numpy().max() <= tolerance
    assert (rows.bound <= tolerance).all()
    assert (rows.bound[rows.estimator == "exact"] == 0).all()
    assert (rows.bound[rows.estimator != "exact"] > 0).all()
    assert set(kinds.index) <= {"exact", "interpolated", "estimated"}
    assert len(list(out.glob("parts/*"))) == 2 * (1 + 3)  # a part for every layer
    assert f"refined to within {tolerance:g}" in answer.out
    if tolerance == 0.02:
        assert kinds.get("exact", 0) < len(rows)


@pytest.mark.parametrize("flags", [["--estimator=second_order", "--draws=200"],
                                   ["--tolerance=0.001", "--part_size=1"]])  # fmt: skip
def test_estimates_go_on_to_the_same_bytes(child, home, run, flags, tmp_path):  # noqa: F811
    _, whole = run("whole" + flags[0].split("=")[0], *flags)
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for file in [out / "rows.parquet", *sorted(out.glob("parts/*.parquet"))[::2]]:
        file.unlink()
    answer = child.run(*sources(home), *COMMON, *flags, f"--out={out}")
    assert answer.code == 0, answer.err
    assert "going on: 4 of 8" in answer.err
    for name in ("rows.parquet", "curves.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_settings_of_estimates_name_the_parts(child, home, second_order):  # noqa: F811
    """Another seed, number of draws or estimator shares no part with what is there."""
    _, out = second_order
    before = set(out.glob("parts/*"))
    for flags in (["--draws=100"], ["--draws=200", "--seed=1"]):
        answer = child.run(*sources(home), *COMMON, "--estimator=second_order", *flags,
                           f"--out={out}")  # fmt: skip
        assert answer.code == 0, answer.err
        assert "going on" not in answer.err
    assert len(set(out.glob("parts/*"))) == 3 * len(before)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tolerance=0"], "--tolerance is 0; it must be above 0"),
        (["--tolerance=0.01", "--estimator=first_order"], "--tolerance needs second_order"),
    ],
)
def test_refusals(child, home, flags, message, tmp_path):  # noqa: F811
    answer = child.run(*sources(home), *COMMON, *flags, f"--out={tmp_path}")
    assert answer.code == 1
    assert message in answer.err
    assert len(answer.err.strip().splitlines()) == 1
