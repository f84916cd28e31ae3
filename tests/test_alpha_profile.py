"""α profiles from every kind of source, against numpy on the very weights."""

import json

import numpy as np
import pytest
import tiny

import convert
from convert.parameters import open_parameters
from experiments import alpha_profile
from jaxablate import profiles, spectra
from jaxablate.checkpoint import Checkpoint
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.errors import UserError

ALL = alpha_profile.Settings(matrices="q,k,v,o,mlp", estimators=spectra.ESTIMATORS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Both families as a checkpoint and as a Hugging Face directory: name -> (path, params)."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    neox = tiny.neox_config(num_heads=3, num_kv_heads=3)  # its files know no head size of their own
    for name, config in (("llama", tiny.llama_config()), ("neox", neox)):
        params = _numpy(tiny.random_params(config, 1))
        save_checkpoint(root / f"{name}-orbax", config, params)
        convert.export_hf(config, params, root / f"{name}-hf")
        for kind in ("orbax", "hf"):
            made[f"{name}-{kind}"] = (root / f"{name}-{kind}", params)
    return made


def _numpy(tree):
    return {k: _numpy(v) if isinstance(v, dict) else np.asarray(v) for k, v in tree.items()}


def slope_by_definition(matrix):
    """polyfit over the top half of numpy's singular values."""
    sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    used = int(np.ceil(len(sigma) / 2))
    return -np.polyfit(np.log(np.arange(1, used + 1)), np.log(sigma[:used]), 1)[0]


def matrix_by_definition(params, layer, name):
    block = params["blocks"][str(layer)]
    if name in ("gate", "up", "down"):
        return block["mlp"][name]["kernel"]
    kernel = block["attn"][name]["kernel"]
    return kernel.reshape(-1, kernel.shape[-1]) if name == "o" else kernel.reshape(24, -1)


@pytest.mark.parametrize("which", ["llama-orbax", "llama-hf", "neox-orbax", "neox-hf"])
def test_every_source_gives_the_slopes_of_its_weights(models, which, tmp_path):
    path, params = models[which]
    frame = alpha_profile.run(tmp_path, [(str(path), None)], ALL)
    names = ["q", "k", "v", "o", *(["gate"] if "llama" in which else []), "up", "down"]
    assert len(frame) == 4 * len(names) * 3
    slopes = frame[frame["estimator"] == "rank_slope"]
    assert list(dict.fromkeys(slopes["matrix"])) == names
    for _, row in slopes.iterrows():
        matrix = matrix_by_definition(params, row["layer"], row["matrix"])
        assert (row["rows"], row["columns"]) == matrix.shape
        assert row["alpha"] == pytest.approx(slope_by_definition(matrix), rel=1e-6)
        assert row["zone"] == "boundary"
    densities = frame[frame["estimator"] == "ml"]
    for _, row in densities.head(4).iterrows():
        matrix = matrix_by_definition(params, row["layer"], row["matrix"])
        fit = spectra.maximum_likelihood(np.linalg.svd(matrix, compute_uv=False))
        assert row["alpha"] == pytest.approx(fit.alpha, rel=1e-5)
    assert set(densities["goodness_name"]) == {"ks"}


def test_per_head(models, tmp_path):
    path, params = models["llama-hf"]
    settings = alpha_profile.Settings(matrices="q,k,o", per_head=True, fraction=1.0)
    frame = alpha_profile.run(tmp_path, [(str(path), None)], settings)
    assert len(frame) == 4 * (6 + 2 + 6)
    for name, take in (
        ("q", lambda attn, head: attn["q"]["kernel"][:, head]),
        ("k", lambda attn, head: attn["k"]["kernel"][:, head]),
        ("o", lambda attn, head: attn["o"]["kernel"][head]),
    ):
        row = frame[(frame["matrix"] == name) & (frame["layer"] == 2) & (frame["head"] == 1)].iloc[
            0
        ]
        matrix = take(params["blocks"]["2"]["attn"], 1)
        sigma = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        expected = -np.polyfit(np.log(np.arange(1, 9)), np.log(sigma), 1)[0]
        assert row["alpha"] == pytest.approx(expected, rel=1e-6)
    paths = alpha_profile.draw(tmp_path, frame, settings, None, "highest_alpha")
    assert sorted(path.stem for path in paths) == [f"heads_{m}_rank_slope" for m in "koq"]


def test_null_is_the_mean_of_seeded_gaussians_of_the_same_shape(models, tmp_path):
    path, _ = models["llama-orbax"]
    settings = alpha_profile.Settings(matrices="k", null_draws=4, seed=5)
    frame = alpha_profile.run(tmp_path, [(str(path), None)], settings)
    draws = [
        spectra.rank_slope(spectra.gaussian_singular_values((24, 16), seed=5 + i)).alpha
        for i in range(4)
    ]
    assert frame["null_alpha"].iloc[0] == pytest.approx(np.mean(draws))


def test_map_over_checkpoints(models, tmp_path):
    config = tiny.neox_config()
    specs = []
    for seed in (3, 4, 5):
        directory = tmp_path / f"step{seed}"
        save_checkpoint(directory, config, _numpy(tiny.random_params(config, seed)))
        specs.append((str(directory), None))
    settings = alpha_profile.Settings()
    frame = alpha_profile.run(tmp_path / "out", specs, settings)
    assert list(dict.fromkeys(frame["document"])) == ["step3", "step4", "step5"]
    assert len(frame) == 12
    assert frame["alpha"].nunique() == 12
    paths = alpha_profile.draw(tmp_path / "out", frame, settings, 0, "highest_alpha")
    assert [path.stem for path in paths] == ["profile_q_rank_slope", "map_q_rank_slope"]
    assert all(path.with_suffix(".svg").is_file() for path in paths)


def test_only_the_matrices_asked_for_are_read(models, tmp_path, monkeypatch):
    path, _ = models["neox-orbax"]
    seen = []
    original = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name: seen.append(name) or original(self, name)
    )
    alpha_profile.run(tmp_path, [(str(path), None)], alpha_profile.Settings(matrices="v"))
    assert seen == [f"blocks/{layer}/attn/v/kernel" for layer in range(4)]


def test_only_needed_tensors_of_a_directory_are_read(models, monkeypatch):
    path, params = models["neox-hf"]
    parameters = open_parameters(str(path))
    tensors = parameters.read._filler.plan.source.tensors
    seen = []
    original = tensors.rows
    monkeypatch.setattr(
        tensors, "rows", lambda name, *span: seen.append(name) or original(name, *span)
    )
    for name in ("q", "k"):
        got = parameters.read(f"blocks/1/attn/{name}/kernel")
        np.testing.assert_array_equal(got, params["blocks"]["1"]["attn"][name]["kernel"])
    assert set(seen) == {"gpt_neox.layers.1.attention.query_key_value.weight"}
    assert len(seen) == 1  # q and k come fused; the tensor is read once


def test_second_run_computes_nothing(models, tmp_path, monkeypatch):
    path, _ = models["llama-orbax"]
    first = alpha_profile.run(tmp_path, [(str(path), None)], ALL, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(spectra, "cached_singular_values", None)
    second = alpha_profile.run(tmp_path, [(str(path), None)], ALL, cache_dir=tmp_path / "cache")
    assert first.equals(second)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "complete"


def test_profile_marks_what_zone_aware_removes():
    bars = alpha_profile.profile_bars(
        [9.0, 8.0, 1.0, 3.0, 2.0, 4.0, 8.0, 9.0], 0.2, 2, 2, "highest_alpha", "α"
    )
    b, i, p = "boundary", "interior", "pruned"
    assert list(bars.classes) == [b, b, i, p, i, p, b, b]
    lowest = alpha_profile.profile_bars(
        [9.0, 8.0, 1.0, 3.0, 2.0, 4.0, 8.0, 9.0], 0.2, 2, 1, "lowest_alpha", "α"
    )
    assert list(lowest.classes) == [b, b, p, i, i, i, b, b]
    few = alpha_profile.profile_bars([1.0] * 6, 0.2, 2, None, "highest_alpha", "α")
    assert list(few.classes) == [b, b, p, p, b, b]
    with pytest.raises(UserError, match=r"k = 3 .* 2 interior layers of 6"):
        alpha_profile.profile_bars([1.0] * 6, 0.2, 2, 3, "highest_alpha", "α")


def test_refusals(models, tmp_path):
    llama, neox = (str(models[f"{name}-hf"][0]) for name in ("llama", "neox"))
    config = tiny.neox_config()
    with pytest.raises(UserError, match="'x' is not in this model"):
        alpha_profile.run(tmp_path, [(llama, None)], alpha_profile.Settings(matrices="q,x"))
    with pytest.raises(UserError, match="'gate' is not in this model"):
        profiles.parse_matrices("gate", config, False)
    with pytest.raises(UserError, match="up, down: an MLP matrix has no heads"):
        profiles.parse_matrices("mlp", config, True)
    with pytest.raises(UserError, match="'mle'"):
        alpha_profile.run(tmp_path, [(llama, None)], alpha_profile.Settings(estimators=("mle",)))
    with pytest.raises(UserError, match=r"different models .*neox-hf: gpt_neox of 4 layers"):
        alpha_profile.run(tmp_path, [(llama, None), (neox, None)], alpha_profile.Settings())
    with pytest.raises(UserError, match="listed twice"):
        alpha_profile.run(tmp_path, [(llama, None), (llama, None)], alpha_profile.Settings())
    with pytest.raises(UserError, match="is not there"):
        alpha_profile.run(tmp_path, [("no-such-model", None)], alpha_profile.Settings())
    with pytest.raises(UserError, match=r"step9 of owner/absent-model .*hf download"):
        open_parameters("owner/absent-model", "step9")
    with pytest.raises(UserError, match="revisions are of a hub name"):
        open_parameters(llama, "step9")
    assert alpha_profile.parse_specs("a/b", "s1, s2") == [("a/b", "s1"), ("a/b", "s2")]
    root = models["llama-hf"][0].parent
    expanded = [
        str(root / f"{name}-{kind}") for name in ("llama", "neox") for kind in ("hf", "orbax")
    ]
    assert alpha_profile.parse_specs(str(root), None) == [(path, None) for path in expanded]
    assert alpha_profile.parse_specs("x,y", None) == [("x", None), ("y", None)]
    with pytest.raises(UserError, match="lists 2"):
        alpha_profile.parse_specs("x,y", "s1")
