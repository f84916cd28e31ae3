"""The experiments on query heads and on head budgets from their command lines, on a tiny model."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
from test_influence_experiment import ARTICLE, CONFIG, SCORED, Child, home, refused, sources

from jaxablate import budgets, scoring
from jaxablate.checkpoint import is_checkpoint, open_checkpoint
from jaxablate.edits import head_mask
from jaxablate.problem import Problem
from jaxablate.sweep import sweep
from jaxablate.table import text_batches
from jaxablate.text import load_tokenizer, read_documents

__all__ = ["home"]
WINDOWS = ("--seq_len=32", "--max_tokens=120", "--part_size=7")


@pytest.fixture(scope="module")
def heads(home):
    child = Child(home / "cache", "experiments.heads")
    yield child
    child.close()


def model_and_problem(home) -> tuple:
    """The converted model, and the first document as one problem."""
    (path,) = filter(is_checkpoint, (home / "cache").iterdir())
    checkpoint = open_checkpoint(path)
    document = read_documents(str(home / "texts"), limit=1)[0]
    tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
    (batch,) = text_batches(document, tokenizer, seq_len=32, max_tokens=120)
    return checkpoint.restore(), Problem(batch)


def test_every_head_is_ranked_and_equals_a_sweep_of_its_own(heads, home):
    out = home / "heads"
    answer = heads.run(*sources(home), *WINDOWS, f"--out={out}")
    assert answer.code == 0, answer.err
    table = pd.read_csv(out / "heads.csv")
    assert len(table) == CONFIG.num_layers * CONFIG.num_heads
    assert table.delta_log_ppl.is_monotonic_decreasing
    model, problem = model_and_problem(home)
    masks = np.ones((2, CONFIG.num_layers, CONFIG.num_heads))
    masks[0, 1, 2] = masks[1, 3, 5] = 0
    base, nll = sweep(model, problem, [head_mask(mask) for mask in masks])
    for line, (layer, head) in zip(nll, [(1, 2), (3, 5)]):
        row = table[(table.layer == layer) & (table["head"] == head)].iloc[0]
        expected = (line.astype(float) - base.astype(float)).mean()
        assert row.delta_log_ppl == pytest.approx(expected, abs=1e-6)
    assert {path.name for path in (out / "figures").iterdir()} == {"heads.png", "heads.svg"}
    again = heads.run(*sources(home), *WINDOWS, f"--out={out}")
    assert "the result is there already" in again.out


def test_masks_give_what_single_heads_give(heads, home, tmp_path):
    masks = np.ones((3, CONFIG.num_layers, CONFIG.num_heads), np.float32)
    masks[0, 1, 2] = masks[1, 3, 5] = 0
    masks[2] = 0.5
    np.save(tmp_path / "masks.npy", masks)
    out = tmp_path / "out"
    answer = heads.run(
        *sources(home), *WINDOWS, f"--masks={tmp_path / 'masks.npy'}", f"--out={out}"
    )
    assert answer.code == 0, answer.err
    single = pd.read_csv(home / "heads" / "heads.csv").set_index("configuration")
    several = pd.read_csv(out / "heads.csv").set_index("mask")
    assert several.delta_log_ppl[0] == pytest.approx(single.delta_log_ppl["L1Q2"], abs=1e-6)
    assert several.delta_log_ppl[1] == pytest.approx(single.delta_log_ppl["L3Q5"], abs=1e-6)


def test_estimated_heads_are_derivatives_of_exact_gates(heads, home, tmp_path):
    """First order: minus the derivative by the head's gate, here from exact central differences."""
    answer = heads.run(*sources(home), *WINDOWS, "--estimator=first_order", f"--out={tmp_path}")
    assert answer.code == 0, answer.err
    assert "1 backward passes" in answer.out
    rows = pd.read_parquet(tmp_path / "rows.parquet").set_index("configuration")
    assert set(rows.estimator.drop("baseline")) == {"first_order"}
    assert rows.estimator["baseline"] == "exact"
    table = pd.read_csv(tmp_path / "heads.csv").set_index("configuration")
    assert table.low.isna().all()
    model, problem = model_and_problem(home)
    count = CONFIG.num_layers * CONFIG.num_heads
    single = np.eye(count).reshape(count, CONFIG.num_layers, CONFIG.num_heads)
    step = 0.05
    gates = np.concatenate([1 + step * single, 1 - step * single])
    _, nll = sweep(model, problem, [head_mask(gate) for gate in gates])
    above, below = nll.astype(float).mean(axis=1).reshape(2, count)
    names = [f"L{i}Q{j}" for i in range(CONFIG.num_layers) for j in range(CONFIG.num_heads)]
    found = table.delta_log_ppl[names].to_numpy()
    # Differences of float32 losses of about 6 nats: 1e-6 / 0.1; the third derivative: step² of it.
    np.testing.assert_allclose(found, (below - above) / (2 * step), rtol=0.02, atol=1e-4)
    assert np.abs(found).max() > 5e-3


def test_second_order_heads_go_on_to_the_same_bytes(heads, home, tmp_path):
    flags = ["--estimator=second_order", "--draws=8"]
    whole, out = tmp_path / "whole", tmp_path / "out"
    for place in (whole, out):
        answer = heads.run(*sources(home), *WINDOWS, *flags, f"--out={place}")
        assert answer.code == 0, answer.err
        if place == out:
            break
        shutil.copytree(whole, out)
        for part in [out / "rows.parquet", *sorted(out.glob("parts/*.parquet"))[::2]]:
            part.unlink()
    assert (out / "rows.parquet").read_bytes() == (whole / "rows.parquet").read_bytes()
    rows = pd.read_parquet(out / "rows.parquet").set_index("configuration")
    assert set(rows.estimator.drop("baseline")) == {"second_order"}


def test_the_mean_null_is_another_ablation(heads, home, tmp_path):
    answer = heads.run(*sources(home), *WINDOWS, "--null=mean", f"--out={tmp_path}")
    assert answer.code == 0, answer.err
    zero = pd.read_csv(home / "heads" / "heads.csv").set_index("configuration").delta_log_ppl
    mean = pd.read_csv(tmp_path / "heads.csv").set_index("configuration").delta_log_ppl
    assert (zero - mean[zero.index]).abs().max() > 1e-4
    assert set(pd.read_parquet(tmp_path / "rows.parquet")["null"]) == {"mean"}


@pytest.mark.parametrize(
    ("masks", "fragment"),
    [
        (np.ones((2, CONFIG.num_layers, CONFIG.num_kv_heads)), "query head (not KV head)"),
        (np.full((1, CONFIG.num_layers, CONFIG.num_heads), np.nan), "not finite"),
        (np.array(["a"]), "needs numbers"),
        (None, "cannot be read"),
    ],
)
def test_masks_that_do_not_fit_are_refused(heads, home, tmp_path, masks, fragment):
    file = tmp_path / "masks.npy"
    if masks is None:
        file.write_bytes(b"no array")
    else:
        np.save(file, masks)
    answer = heads.run(*sources(home), f"--masks={file}", f"--out={tmp_path / 'out'}")
    refused(answer, fragment)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def curves(home):
    child = Child(home / "cache")
    out = home / "curves"
    answer = child.run(
        *sources(home), *CASE, "--heads=all", "--ratios=0,0.1,0.3,0.6", f"--out={out}"
    )
    child.close()
    assert answer.code == 0, answer.err
    return out


CASE = (f"--article_tokens={ARTICLE}", f"--scored_tokens={SCORED}", "--documents=2")


@pytest.fixture
def child(home):
    child = Child(home / "cache", "experiments.budgets")
    yield child
    child.close()


def test_budgets_are_made_and_scored(child, home, curves, tmp_path):
    shares = np.full((CONFIG.num_layers, CONFIG.num_kv_heads), 1 / 8)
    budgets.write_shares(tmp_path / "published.json", shares)
    out = tmp_path / "out"
    arguments = (
        *sources(home), *CASE, f"--curves={curves}", "--ratios=0.1,0.3", f"--out={out}",
        f"--budget_files={tmp_path / 'published.json'}",
    )  # fmt: skip
    answer = child.run(*arguments)
    assert answer.code == 0, answer.err
    assert "no honest test" in answer.out
    table = pd.read_csv(out / "budgets.csv").set_index(["budget", "ratio"])
    uniform, published = table.loc["uniform"], table.loc["published"]
    # Equal shares are the uniform budget, whatever their name.
    pd.testing.assert_series_equal(uniform.log_ppl, published.log_ppl)
    assert (uniform.delta == 0).all()
    rows = pd.read_parquet(out / "rows.parquet")
    part = rows[rows.configuration == "swap@0.1"]
    mean = scoring.mean_log_perplexity(
        part.nll_sum.to_numpy()[None], part.scored_tokens.to_numpy(), part.document.to_numpy(str)
    )
    assert table.log_ppl["swap", 0.1] == pytest.approx(float(mean[0]), abs=1e-12)
    assert (table.padded_ratio >= table.kept_ratio - 1e-12).all()
    made = json.loads((out / "swap.json").read_text())
    assert sum(made.values()) == pytest.approx(1)
    names = {path.stem for path in (out / "figures").iterdir()}
    assert names == {"budgets", "budget_maps"}
    assert "the result is there already" in child.run(*arguments).out
    refused(child.run(*arguments, "--curves=" + str(tmp_path)), "plan.json")
    (tmp_path / "bad.json").write_text('{"L0H0": 2}')
    refused(child.run(*arguments, f"--budget_files={tmp_path / 'bad.json'}"), "bad.json")
