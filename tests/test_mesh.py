"""A sweep on 1, 2, 4 and 8 forced CPU devices gives the numbers of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from jaxablate import mesh
from jaxablate.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MESHES = {
    "llama": ["config:1,model:1", "config:2", "config:2,model:2", "config:4,model:2"],
    "neox": ["model:2", "config:8"],
}


@pytest.fixture(scope="module")
def answers() -> dict:
    """Family -> mesh -> numbers; "" is one device without a mesh."""
    children = {
        family: subprocess.Popen(
            [sys.executable, "tests/mesh_child.py", family, *shapes],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for family, shapes in MESHES.items()
    }
    found = {}
    for family, child in children.items():
        out = child.communicate()[0]
        assert child.returncode == 0
        found[family] = json.loads(out)
    return found


@pytest.mark.parametrize(("family", "shape"), [(f, s) for f in MESHES for s in MESHES[f]])
def test_a_mesh_changes_no_number(answers, family, shape):
    one, several = answers[family][""], answers[family][shape]
    for name in ("baseline", "nll", "keys"):
        np.testing.assert_allclose(
            np.asarray(several[name]), np.asarray(one[name]), rtol=0, atol=1e-5, err_msg=name
        )
    for name in ("first_order", "fisher"):  # sums over the tokens of a sequence
        np.testing.assert_allclose(several[name], one[name], rtol=1e-4, atol=5e-5, err_msg=name)
    assert np.abs(one["first_order"]).max() > 1e-2
    # Every edit moves the loss by far more than that.
    moved = np.abs(np.asarray(one["nll"]) - np.asarray(one["baseline"])).max(axis=1)
    assert moved.min() > 1e-2


def test_meshes_are_read():
    assert mesh.parse_mesh("config:4,model:2") == mesh.MeshShape(config=4, model=2)
    assert mesh.parse_mesh(" model:2 ") == mesh.MeshShape(config=1, model=2)
    assert str(mesh.MeshShape(3, 2)) == "config:3,model:2"


@pytest.mark.parametrize("text", ["", "4", "data:4", "config:0", "config:2,config:2", "config:-1"])
def test_other_meshes_are_refused(text):
    with pytest.raises(UserError, match="config:4,model:2"):
        mesh.parse_mesh(text)


def test_what_does_not_divide_is_refused():
    config = tiny.llama_config()  # 2 KV heads
    with pytest.raises(UserError, match="2 KV heads do not divide by model:4"):
        mesh.make_mesh(mesh.MeshShape(model=4), config, devices=[_FakeDevice()] * 4)
    odd = tiny.llama_config(mlp_dim=41)
    with pytest.raises(UserError, match="41 MLP dimensions"):
        mesh.make_mesh(mesh.MeshShape(model=2), odd, devices=[_FakeDevice()] * 2)


def test_too_few_devices_are_said():
    count = len(jax.devices()) + 1
    with pytest.raises(UserError, match=f"needs {count} devices .*device_count={count}"):
        mesh.make_mesh(mesh.MeshShape(config=count), tiny.llama_config())


class _FakeDevice:
    platform = "cpu"
