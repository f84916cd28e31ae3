"""The influence experiment from its command line, on a tiny model, tokenizer and text."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
import tiny
import tiny_tokenizer

import convert
from jaxablate import tokenizer
from jaxablate.model import Transformer

ROOT = Path(__file__).resolve().parents[1]
ARTICLE, SCORED = 60, 80  # five blocks of tokens a document: enough for an interval
COMPACTABLE = ARTICLE - 4  # BOS and three more are protected, the last token is read anew
COMMON = (
    f"--article_tokens={ARTICLE}",
    f"--scored_tokens={SCORED}",
    "--documents=2",
    "--heads=L0H0,L2H1,L3H0",
    "--ratios=0,0.05,0.3,1",
    "--baseline=0.05",
    "--part_size=5",
)
CONFIG = tiny.llama_config(vocab_size=320)


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a command ended."""

    code: int
    out: str
    err: str


class Child:
    """A process that runs command lines of the experiment one after another."""

    def __init__(self, cache: Path, module: str = "experiments.influence"):
        self.cache = cache
        self.environment = os.environ | {"JAXABLATE_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "tests/experiment_child.py", module],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, cwd: Path = ROOT) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"cwd": str(cwd), "arguments": [str(argument) for argument in arguments]}
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """hf: a random model with a tokenizer; texts: two documents."""
    home = tmp_path_factory.mktemp("home")
    tokenizer_dir = tiny_tokenizer.write_tokenizer(home / "tokenizer")
    params = tiny.random_params(CONFIG, seed=2, scale=0.2)
    numpy_params = _numpy(params)
    convert.export_hf(CONFIG, numpy_params, home / "hf", tokenizer_dir)
    (home / "texts").mkdir()
    words = "keys of a head are kept where the queries look and nowhere else"
    rng = np.random.default_rng(0)
    for name in ("first", "second"):
        text = " ".join(rng.choice(words.split(), 200))
        (home / "texts" / f"{name}.txt").write_text(text)
    return home


def _numpy(tree):
    return {k: _numpy(v) if isinstance(v, dict) else np.asarray(v) for k, v in tree.items()}


@pytest.fixture(scope="module")
def child(home):
    child = Child(home / "cache")
    yield child
    child.close()


@pytest.fixture(scope="module")
def finished(child, home) -> tuple[Answer, Path]:
    """A run to the end, and its directory."""
    answer = child.run(*sources(home), *COMMON, f"--out={home / 'out'}")
    assert answer.code == 0, answer.err
    return answer, home / "out"


def sources(home: Path) -> tuple[str, str]:
    return f"--model={home / 'hf'}", f"--text={home / 'texts'}"


# What comes out


def test_rows_curves_record_and_figures_are_written(finished):
    answer, out = finished
    rows = pd.read_parquet(out / "rows.parquet")
    assert list(rows.document.unique()) == ["first.txt", "second.txt"]
    assert len(rows) == 2 * (2 + 3 * 4)
    assert len(pd.read_csv(out / "rows.csv")) == len(rows)
    assert set(rows.scored_tokens) == {SCORED}
    assert set(rows.estimator) == {"exact"}
    swept = rows[rows.layer.notna()]
    counts = {0.0: 1, 0.05: 2, 0.3: 16, 1.0: COMPACTABLE}  # floor of ratio x 56, at least one
    assert dict(zip(swept.ratio, swept.keys_kept)) == counts
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "complete"
    assert record["flags"]["article_tokens"] == ARTICLE
    curves = pd.read_csv(out / "curves.csv")
    assert len(curves) == 12
    for name in ("influence.png", "influence.svg"):
        assert (out / "figures" / name).stat().st_size > 5000
    for expected in (
        "device      CPU",
        "4 layers, 6 query heads, 2 KV heads",
        "plan        12 configurations x 2 documents",
        "baseline    log-perplexity",
        f"wrote       {out / 'curves.csv'}",
    ):
        assert expected in answer.out


def test_curves_are_recomputed_from_rows(finished):
    _, out = finished
    rows = pd.read_parquet(out / "rows.parquet")
    rows["mean"] = rows.nll_sum / rows.scored_tokens
    base = rows[rows.configuration == "baseline"].set_index("document")["mean"]
    curves = pd.read_csv(out / "curves.csv")
    for _, point in curves.iterrows():
        chosen = (rows.layer == point.layer) & (rows.kv_head == point.kv_head)
        found = rows[chosen & (rows.ratio == point.ratio)].set_index("document")["mean"]
        delta = found - base
        assert point.delta_log_ppl == pytest.approx(delta.mean(), abs=1e-12)
        assert point.standard_error == pytest.approx(delta.std(ddof=1) / np.sqrt(2), abs=1e-12)
        assert point.low <= point.delta_log_ppl <= point.high
        assert sum(map(sum, rows[chosen].block_nll)) == pytest.approx(rows[chosen].nll_sum.sum())
    at_baseline = curves[curves.ratio == 0.05]
    assert (at_baseline[["delta_log_ppl", "standard_error", "low", "high"]] == 0).all(axis=None)
    assert curves.delta_log_ppl.abs().max() > 1e-3


def test_the_full_cache_is_the_plain_model_on_the_plain_text(finished, home):
    _, out = finished
    rows = pd.read_parquet(out / "rows.parquet")
    coder = tokenizer.load_tokenizer(home / "hf")
    model = Transformer.from_params(CONFIG, tiny.random_params(CONFIG, seed=2, scale=0.2))
    for name in ("first.txt", "second.txt"):
        ids = coder.encode((home / "texts" / name).read_text())[: ARTICLE + SCORED]
        tokens = np.concatenate([[coder.bos_id], ids]).astype(np.int32)
        logits = np.asarray(model(jnp.asarray(tokens[None])), np.float64)[0, ARTICLE:-1]
        log_mass = np.log(np.exp(logits).sum(axis=1))
        expected = (log_mass - logits[np.arange(SCORED), tokens[ARTICLE + 1 :]]).sum()
        found = rows[(rows.document == name) & (rows.configuration == "full cache")]
        assert found.nll_sum.item() == pytest.approx(expected, rel=1e-6)


def test_ratios_are_told_apart_by_six_digits(child, home, tmp_path):
    flags = ("--ratios=0.1234567,0.12345668,0.3:0.5:0.1,0.4", f"--out={tmp_path / 'out'}")
    answer = child.run(*sources(home), *COMMON, "--heads=L1H0", *flags)
    assert answer.code == 0, answer.err
    curves = pd.read_csv(tmp_path / "out" / "curves.csv")
    assert list(curves.ratio) == [0.123457, 0.3, 0.4, 0.5]


# Again, elsewhere, interrupted, in shares


def test_a_second_run_redraws_and_computes_nothing(child, finished, home):
    _, out = finished
    before = {file: file.stat().st_mtime_ns for file in out.glob("parts/*")}
    rows, curves = (out / "rows.parquet").read_bytes(), (out / "curves.csv").read_bytes()
    assert len(before) == 2 * (1 + 3)
    shutil.rmtree(out / "figures")
    answer = child.run(*sources(home), *COMMON, f"--out={out}")
    assert answer.code == 0
    assert "the result is there already" in answer.out
    assert {file: file.stat().st_mtime_ns for file in out.glob("parts/*")} == before
    assert (out / "rows.parquet").read_bytes() == rows
    assert (out / "curves.csv").read_bytes() == curves
    assert (out / "figures" / "influence.png").exists()


def test_relative_paths_from_another_directory(child, finished, home, tmp_path):
    _, out = finished
    work = home / "elsewhere"
    work.mkdir()
    paths = ("--model=../hf", "--text=../texts", "--out=results/deep")
    answer = child.run(*paths, *COMMON, cwd=work)
    assert answer.code == 0, answer.err
    found = (work / "results" / "deep" / "rows.parquet").read_bytes()
    assert found == (out / "rows.parquet").read_bytes()


def test_killed_half_way_it_goes_on_to_the_same_bytes(child, finished, home, tmp_path):
    _, out = finished
    arguments = [*sources(home), *COMMON, f"--out={tmp_path / 'killed'}"]
    process = subprocess.Popen(
        [sys.executable, "experiments/influence.py", *arguments],
        cwd=ROOT,
        env=child.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    parts = tmp_path / "killed" / "parts"
    while process.poll() is None and len(list(parts.glob("*.parquet"))) < 2:
        time.sleep(0.002)
    process.kill()
    process.wait()
    done = {file.name for file in parts.glob("*.parquet")}
    assert 2 <= len(done) < 8
    assert not (tmp_path / "killed" / "rows.parquet").exists()
    kept = {name: (parts / name).stat().st_mtime_ns for name in done}
    answer = child.run(*arguments)
    assert answer.code == 0, answer.err
    assert f"going on: {len(done)} of 8 parts are there already" in answer.err
    assert {name: (parts / name).stat().st_mtime_ns for name in done} == kept
    for name in ("rows.parquet", "rows.csv", "curves.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (out / name).read_bytes()


@pytest.fixture(scope="module")
def matched(child, home) -> Path:
    """A finished run whose heads are fitted, not only selected."""
    answer = child.run(*sources(home), *COMMON, "--method=match", f"--out={home / 'match'}")
    assert answer.code == 0, answer.err
    return home / "match"


def test_fits_do_not_depend_on_what_is_there_already(child, matched, home, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(matched, out)
    parts = sorted(out.glob("parts/*.parquet"))
    for file in [out / "rows.parquet", *parts[::2]]:
        file.unlink()
    answer = child.run(*sources(home), *COMMON, "--method=match", f"--out={out}")
    assert answer.code == 0, answer.err
    assert "going on: 4 of 8" in answer.err
    assert (out / "rows.parquet").read_bytes() == (matched / "rows.parquet").read_bytes()


def test_shards_merged_equal_the_single_run(child, matched, home, tmp_path):
    flags = [*sources(home), *COMMON, "--method=match"]
    shares = [tmp_path / f"share-{i}" for i in range(2)]
    for i, share in enumerate(shares):
        answer = child.run(*flags, f"--shard={i}/2", f"--out={share}")
        assert answer.code == 0, answer.err
        assert not (share / "rows.parquet").exists()
        assert "experiments/merge.py" in answer.err
    whole = tmp_path / "whole"
    done = subprocess.run(
        [sys.executable, "experiments/merge.py", *map(str, shares), f"--out={whole}"],
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0
    assert (whole / "rows.parquet").read_bytes() == (matched / "rows.parquet").read_bytes()
    answer = child.run(*flags, f"--out={whole}")
    assert "the result is there already" in answer.out
    assert (whole / "curves.csv").read_bytes() == (matched / "curves.csv").read_bytes()


def test_smaller_chunks_and_less_memory_change_nothing(child, finished, home, tmp_path):
    _, out = finished
    flags = ("--chunk_tokens=1", "--memory_budget=1kB", "--weights=stream")
    answer = child.run(*sources(home), *COMMON, *flags, f"--out={tmp_path / 'out'}")
    assert answer.code == 0, answer.err
    found, expected = (pd.read_parquet(o / "rows.parquet") for o in (tmp_path / "out", out))
    assert list(found.configuration) == list(expected.configuration)
    np.testing.assert_allclose(found.nll_sum, expected.nll_sum, rtol=1e-6)


# What is refused, in one line


def broken_weights(home: Path, directory: Path, change) -> Path:
    """A copy of the model whose tensors {name: array} went through `change`."""
    shutil.copytree(home / "hf", directory)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    safetensors.numpy.save_file(change(tensors), directory / "model.safetensors")
    return directory


def broken_config(home: Path, directory: Path, **changes) -> Path:
    shutil.copytree(home / "hf", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def truncated(home: Path, directory: Path) -> Path:
    shutil.copytree(home / "hf", directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return directory


def absent_shard(home: Path, directory: Path) -> Path:
    shutil.copytree(home / "hf", directory)
    names = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map["model.norm.weight"] = "model-00002-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def replaced(name, make):
    return lambda tensors: tensors | {name: make(tensors.get(name))}


def _removed(directory: Path, pattern: str) -> Path:
    for file in directory.glob(pattern):
        file.unlink()
    return directory


def _small_vocabulary(home: Path, directory: Path) -> Path:
    config = CONFIG.replace(vocab_size=100)
    params = _numpy(tiny.random_params(config))
    return convert.export_hf(config, params, directory, home / "tokenizer")


UP = "model.layers.2.mlp.up_proj.weight"


def with_nan(array):
    array = array.copy()
    array[1, 1] = np.nan
    return array


BROKEN_MODELS = {
    "truncated": (truncated, "model.safetensors"),
    "absent shard": (absent_shard, "model-00002-of-00002.safetensors"),
    "missing tensor": (
        lambda h, d: broken_weights(h, d, without(UP)),
        UP,
    ),
    "extra tensor": (
        lambda h, d: broken_weights(h, d, replaced("model.extra", lambda _: np.ones(3))),
        "model.extra",
    ),
    "wrong shape": (lambda h, d: broken_weights(h, d, replaced(UP, lambda a: a[:-1].copy())), UP),
    "nan": (lambda h, d: broken_weights(h, d, replaced(UP, with_nan)), UP),
    "architecture": (
        lambda h, d: broken_config(h, d, model_type="mamba", architectures=["MambaForCausalLM"]),
        "mamba",
    ),
    "rope type": (
        lambda h, d: broken_config(h, d, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "yarn",
    ),
    "no tokenizer": (
        lambda h, d: _removed(shutil.copytree(h / "hf", d), "tokenizer*"),
        "without a tokenizer",
    ),
    "tokenizer of another model": (
        _small_vocabulary,
        "vocabulary of 100",
    ),
}


def refused(answer: Answer, *fragments: str) -> None:
    """Exit code 1 and one line that begins with "error: "."""
    assert answer.code == 1, answer
    lines = answer.err.splitlines()
    assert len(lines) == 1, answer.err
    assert lines[0].startswith("error: ")
    for fragment in fragments:
        assert fragment in lines[0]


@pytest.mark.parametrize("which", BROKEN_MODELS)
def test_a_model_that_cannot_be_used(child, home, tmp_path, which):
    make, fragment = BROKEN_MODELS[which]
    model = make(home, tmp_path / "model")
    kept = set(child.cache.rglob("*"))
    out = tmp_path / "out"
    text = f"--text={home / 'texts'}"
    refused(child.run(f"--model={model}", text, *COMMON, f"--out={out}"), fragment)
    assert not (out / "rows.parquet").exists()
    assert not list(out.rglob("*.parquet"))
    if "tokenizer" not in which:  # those are whole models, and are converted
        assert not out.exists()
        left = {path.relative_to(child.cache) for path in set(child.cache.rglob("*")) - kept}
        compiled = {path for path in left if path.parts[0].startswith("xla-")}
        assert {path for path in left - compiled if path.suffix != ".lock"} == set()


def test_weights_that_overflow_end_with_the_layer(child, home, tmp_path):
    model = broken_weights(home, tmp_path / "model", replaced(UP, lambda a: a * np.float32(1e38)))
    text = f"--text={home / 'texts'}"
    answer = child.run(f"--model={model}", text, *COMMON, f"--out={tmp_path / 'out'}")
    assert answer.code == 1
    last = answer.err.splitlines()[-1]
    assert last == "error: the context is not finite in the attention of layer 3"
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        (["--heads=L4H0"], ["L4H0 is not in this model", "layers are 0 to 3, KV heads 0 to 1"]),
        (["--heads=L0H2"], ["L0H2 is not in this model"]),  # a query head, but no KV head
        (["--heads=H0L0"], ["'H0L0' is no head"]),
        (["--heads=", "--ratios="], ["nothing to compute"]),
        (["--ratios=0,1.01"], ["--ratios: 1.01 is out of range"]),
        (["--ratios=-0.1"], ["--ratios: -0.1 is out of range"]),
        (["--ratios=nan"], ["--ratios: nan is out of range"]),
        (["--ratios=tenth"], ["--ratios: 'tenth' is no ratio"]),
        (["--ratios=0:1:0"], ["is no range"]),
        (["--baseline=1.5"], ["--baseline is 1.5"]),
        (["--baseline=nan"], ["--baseline is nan"]),
        (["--method=guess"], ["method is 'guess'", "select+beta"]),
        (["--selection=guess"], ["selection is 'guess'"]),
        (["--queries=guess"], ["reference_queries is 'guess'"]),
        (["--documents=3"], ["2 documents, and 3 were asked for"]),
        (["--articles=0,5"], ["2 documents, and 6 were asked for"]),
        (["--articles=one"], ["--articles"]),
        (["--article_tokens=5000"], ["first.txt: the text has", "5080 are needed"]),
        (["--article_tokens=5", "--protect=7"], ["leave nothing to compact"]),
        (["--text=EMPTY"], ["the text is empty"]),
        (["--text=ABSENT"], ["no such file or folder"]),
        (["--text="], ["--text is empty"]),
        (["--articles=1,1"], ["two documents have the same name"]),
        (["--model=ABSENT"], ["ABSENT"]),
        (["--out=FILE/out"], ["FILE"]),
        (["--out=FILE"], ["FILE"]),
        (["--out="], ["--out is empty"]),
        (["--memory_budget=lots"], ["--memory_budget is 'lots'"]),
        (["--shard=2/2"], ["2/2"]),
        (["--require_gpu"], ["--require_gpu, but JAX runs on CPU"]),
        (["--flagfile=absent.flags"], ["flagfile 'absent.flags'", "demo.flags"]),
        (["--no_such_flag=1"], ["no_such_flag"]),
        (["--dtype=int8"], ["int8", "bfloat16"]),
        (["--documents=many"], ["--documents"]),
        (["--documents=0"], ["--documents"]),
        (["demo.flags"], ["'demo.flags' is no flag"]),
    ],
)
def test_flags_that_make_no_sense(child, home, tmp_path, flags, fragments):
    (tmp_path / "EMPTY").write_text(" \n")
    (tmp_path / "FILE").write_text("a file")
    if any("require_gpu" in flag for flag in flags) and os.environ["JAX_PLATFORMS"] != "cpu":
        pytest.skip("there may be a GPU here")
    before = set(tmp_path.rglob("*"))
    answer = child.run(*sources(home), *COMMON, "--out=out", *flags, cwd=tmp_path)
    refused(answer, *fragments)
    assert set(tmp_path.rglob("*")) == before


def test_a_bare_flagfile_is_found_among_the_projects_own(child, tmp_path):
    """What follows overrides it: the model named here does not exist."""
    answer = child.run("--flagfile=demo.flags", "--model=nowhere", cwd=tmp_path)
    refused(answer, "nowhere")
    (tmp_path / "demo.flags").write_text("--model=here\n")
    refused(child.run("--flagfile=demo.flags", cwd=tmp_path), "here")
    refused(child.run("--flagfile", "demo.flags", cwd=tmp_path), "here")


def test_too_few_reference_queries_are_said(child, home, tmp_path):
    flags = ("--method=match", "--max_queries=10", "--heads=L0H0", "--documents=1")
    common = [flag for flag in COMMON if not flag.startswith(("--heads", "--documents"))]
    answer = child.run(*sources(home), *common, *flags, f"--out={tmp_path}")
    assert answer.code == 0, answer.err
    # Three query heads share a KV head; all 56 keys are kept at ratio 1.
    assert f"values of up to {COMPACTABLE} keys are fitted to 30 reference queries" in answer.out


@pytest.mark.parametrize("name", ["influence", "heads", "budgets", "pruning"])
def test_help_shows_the_flags_of_every_module(name):
    """Not only those of the file that is run."""
    done = subprocess.run(
        [sys.executable, f"experiments/{name}.py", "--help"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    for flag in ("--model:", "--text:", "--out:", "--seed:"):
        assert flag in done.stdout
