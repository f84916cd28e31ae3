"""python -m convert: commands, exit codes, one-line errors."""

import os
import subprocess
import sys
from pathlib import Path

import hf_directories as hf
import hf_models
import numpy as np
import pytest

from convert.__main__ import main
from jaxablate.checkpoint import is_checkpoint, open_checkpoint

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def directory(tmp_path):
    return hf.write(tmp_path / "hf", hf.tensors())


def test_convert_verify_export(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXABLATE_CACHE", str(tmp_path / "cache"))
    hf_models.save(hf_models.random_model("llama"), tmp_path / "hf")
    assert main(["hf", "ours", "--verify", "--tokens", "40"]) == 0
    out = capsys.readouterr().out
    assert "largest |difference|" in out
    assert "3 layers" in out
    assert open_checkpoint("ours").digest[:16] in out
    assert main(["export", "ours", "back"]) == 0
    assert main(["verify", "ours", "--tokens", "40"]) == 0
    assert main(["verify", "back", "--tokens", "40"]) == 0
    capsys.readouterr()
    assert main(["verify", "ours", "--tokens", "40", "--max_error", "0"]) == 1
    assert "over the limit" in capsys.readouterr().err


def test_a_wrong_conversion_fails_verification(tmp_path, capsys, monkeypatch):
    """Against the source itself: an error that export undoes would not show otherwise."""
    import dataclasses

    from convert import llama

    def exchanged(config):
        for rule in original(config):
            target = rule.targets[0]
            other = target.replace("gate", "?").replace("up", "gate").replace("?", "up")
            yield dataclasses.replace(rule, targets=(other,))

    original = llama.rules
    monkeypatch.setattr(llama, "rules", lambda config: list(exchanged(config)))
    hf_models.save(hf_models.random_model("llama"), tmp_path / "hf")
    assert main([str(tmp_path / "hf"), str(tmp_path / "ours"), "--verify"]) == 1
    assert "over the limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["{tmp}/absent", "{tmp}/x"], "is not there"),
        (["{tmp}/hf", "{tmp}/hf"], "exists already"),
        (["{tmp}/hf", "{tmp}/hf/config.json/x"], "cannot be written"),
        (["export", "{tmp}/hf", "{tmp}/x"], "is no checkpoint"),
        (["verify", "{tmp}/absent"], "is not there"),
    ],
)
def test_errors_are_one_line(arguments, part, directory, tmp_path, capsys):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert part in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_reuse(directory, tmp_path, capsys):
    arguments = [str(directory), str(tmp_path / "ours")]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert main([*arguments, "--reuse"]) == 0


def test_help_shows_examples(capsys):
    for arguments in (["--help"], ["export", "--help"], ["verify", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert "examples:" in out
        assert "smollm2-135m-instruct" in out


def test_torch_is_not_imported_for_conversion(directory, tmp_path):
    """Only --verify and .bin need PyTorch; from a working directory that is not the project's."""
    code = (
        "import sys; from convert.__main__ import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "hf", "ours", "--dtype", "bfloat16"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
    assert "largest change" in done.stderr
    assert is_checkpoint(tmp_path / "ours")


def test_the_module_runs(directory, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "convert", str(directory), str(tmp_path / "no" / "such" / "dir")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = open_checkpoint(tmp_path / "no/such/dir").read("embed/embedding")
    np.testing.assert_array_equal(found, hf.tensors()["model.embed_tokens.weight"])
