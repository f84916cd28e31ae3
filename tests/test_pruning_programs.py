"""The programs as a user types them: pruning and α of a model trained a moment ago."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import convert
from experiments import train_tiny
from jaxablate import removals, text
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Directory of a GPT-NeoX of six layers, three steps old, and of its held-out text."""
    out = tmp_path_factory.mktemp("model")
    documents = sorted(text.read_documents("pydoc"), key=lambda one: len(one.text))[20:26]
    settings = train_tiny.Settings(
        layers=6, width=32, heads=2, vocab_size=300, context=16, rows=2, steps=3, warmup=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "read_documents", lambda spec: tuple(documents))
        train_tiny.run(out, settings)
    return out


def program(name, *arguments, where):
    """Runs experiments/NAME.py in `where`; returns the finished process."""
    environment = os.environ | {"JAXABLATE_CACHE": str(where / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / name), *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_pruning_writes_tables_figures_and_a_pruned_model(model, tmp_path):
    arguments = [
        f"--model={model}/hf/step000003",
        f"--text={model}/heldout.txt",
        "--tokens=100",
        "--seq_len=16",
        "--kmax=2",
        "--draws=3",
        "--exhaustive",
        "--out=result",
        "--save_pruned=pruned",
        "--pruned_set=last_n:1",
    ]
    done = program("pruning.py", *arguments, where=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("device ", "whole model: perplexity", "Spearman", "worst_true", "k = 2:"):
        assert words in done.stdout
    out = tmp_path / "result"
    names = {path.name for path in (out / "figures").iterdir()}
    panels = ("alpha_profile", "pruning_impact", "advantage", "pruning", "alpha_against_impact")
    assert names == {f"{panel}.{kind}" for panel in panels for kind in ("png", "svg")}
    lines = (out / "tables.md").read_text().splitlines()
    strategies = pd.read_csv(out / "strategies.csv")
    worst = strategies[(strategies.strategy == "worst_true") & (strategies.k == 2)].iloc[0]
    assert any(
        line.startswith(f"| 2 | worst_true | {worst.layers} | {worst.delta:.4g} |")
        for line in lines
    )
    assert len([line for line in lines if line.startswith("|")]) == len(strategies) + 6 + 4
    singles = pd.read_csv(out / "singles.csv")
    assert singles["zone"].tolist() == ["boundary"] * 2 + ["interior"] * 2 + ["boundary"] * 2
    assert (tmp_path / "pruned/hf/tokenizer.json").is_file()
    # The α of the saved model: the same layers without the last.
    found = program("alpha_profile.py", "--model=pruned/hf", "--out=alpha", where=tmp_path)
    assert found.returncode == 0, found.stderr
    alphas = pd.read_csv(tmp_path / "alpha/rows.csv")["alpha"].tolist()
    assert alphas == pytest.approx(singles["alpha"].tolist()[:5], rel=1e-12)


def linear_term_without_the_last_mlp(model, cache) -> float:
    """⟨∂ Σ NLL / ∂x, -MLP⟩ at the final stream by jax.grad of the head alone, nats."""
    checkpoint = convert.resolve(str(model / "hf" / "step000003"), cache)
    transformer, config = checkpoint.restore(), checkpoint.config
    batches = removals.window_batches(
        text.read_documents(str(model / "heldout.txt")),
        text.load_tokenizer(checkpoint.tokenizer_dir),
        max_tokens=100,
        seq_len=16,
        stride=16,
        bos="auto",
        windows_per_batch=4,
        vocab_size=config.vocab_size,
    )
    total, last = 0.0, config.num_layers - 1
    for one in batches:
        engine, batch = Sweep(transformer, Problem(one.batch)), one.batch

        def loss(x, batch=batch):
            logp = jax.nn.log_softmax(transformer.head(x.reshape(-1, config.model_dim)))
            picked = logp[np.arange(batch.targets.size), batch.targets.reshape(-1)]
            return -jnp.where(batch.scored.reshape(-1), picked, 0).sum()

        block, x, out = transformer.block(last), engine.trunk[last], engine.trunk[last + 1]
        heads = block.attn.heads(block.qkv(x, engine.rope), None)
        edited = block.finish(x, block.attn.project(heads), mlp=False)
        total += float((jax.grad(loss)(out) * (edited - out)).sum())
    return total


def test_estimates_of_what_is_removed(model, tmp_path):
    common = [f"--model={model}/hf/step000003", f"--text={model}/heldout.txt", "--tokens=100",
              "--seq_len=16", "--kmax=2", "--strategies=last_n,zone_aware",
              "--component=mlp"]  # fmt: skip
    for name in ("first_order", "second_order"):
        done = program(
            "pruning.py", *common, f"--estimator={name}", f"--out={name}", where=tmp_path
        )
        assert done.returncode == 0, done.stderr
    assert "17 backward passes" in done.stdout
    singles = [
        pd.read_csv(tmp_path / name / "singles.csv") for name in ("first_order", "second_order")
    ]
    assert (singles[1].delta_log >= singles[0].delta_log).all()
    # Nothing that estimates say looks like a measurement.
    assert set(singles[1].estimator) == {"second_order"}
    assert singles[1].delta_low.isna().all()
    assert pd.read_csv(tmp_path / "second_order" / "advantage.csv").empty
    assert (
        "Values are estimates (second_order)" in (tmp_path / "second_order/tables.md").read_text()
    )
    rows = pd.read_parquet(tmp_path / "first_order" / "rows.parquet")
    assert set(rows.estimator[rows.k > 0]) == {"first_order"}
    assert set(rows.estimator[rows.k == 0]) == {"exact"}
    change = rows.groupby("layers").nll_sum.sum()
    change = change - change[""]
    expected = linear_term_without_the_last_mlp(model, tmp_path / "cache")
    assert change["5"] == pytest.approx(expected, rel=1e-3)
    assert abs(expected) > 0.1
    # The linear term of a set is the sum of its layers'.
    assert change["4,5"] == pytest.approx(change["4"] + change["5"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("pruning.py", ["--kmax=3"], "k = 3 layers to remove, but there are 2 interior layers"),
        ("alpha_profile.py", ["--matrices=w"], "matrix 'w' is not in this model"),
    ],
)
def test_a_mistake_ends_in_one_line(model, tmp_path, name, arguments, words):
    common = [f"--model={model}/hf/step000003"]
    if name == "pruning.py":
        common += [f"--text={model}/heldout.txt", "--seq_len=16", "--tokens=50", "--kmax=1"]
    done = program(name, *common, *arguments, where=tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert words in lines[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*/rows.*"))
