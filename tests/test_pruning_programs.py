"""The programs as a user types them: pruning and α of a model trained a moment ago."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments import train_tiny
from jaxablate import text

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
    singles = pd.read_csv(out / "singles.csv")
    assert singles["zone"].tolist() == ["boundary"] * 2 + ["interior"] * 2 + ["boundary"] * 2
    assert (tmp_path / "pruned/hf/tokenizer.json").is_file()
    # The α of the saved model: the same layers without the last.
    found = program("alpha_profile.py", "--model=pruned/hf", "--out=alpha", where=tmp_path)
    assert found.returncode == 0, found.stderr
    alphas = pd.read_csv(tmp_path / "alpha/rows.csv")["alpha"].tolist()
    assert alphas == pytest.approx(singles["alpha"].tolist()[:5], rel=1e-12)


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
