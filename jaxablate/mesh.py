"""A sweep on several devices: states over one axis of a mesh, heads and MLP over another.

    mesh = make_mesh(parse_mesh("config:4,model:2"), config)
    model = checkpoint.restore(sharding=param_sharding(mesh))
    Sweep(model, problem, SweepOptions(mesh=mesh))

Each device runs its own states (axis `config`) on its own heads (axis `model`) by itself: the steps
are those of one device under `jax.shard_map`, with two sums per block over `model`. So the loops
over cache-sized tiles of a CPU stay loops over a device's own work.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError

CONFIG, MODEL = "config", "model"
_NAMES = (CONFIG, MODEL)
WHOLE, STATES = PartitionSpec(), PartitionSpec(CONFIG)
_HEADS_OUT = PartitionSpec(None, MODEL)
# Parameter -> the axis that is split over `model`: heads, F, or the vocabulary.
_PARAM_SPECS = {
    "q/kernel": _HEADS_OUT,
    "k/kernel": _HEADS_OUT,
    "v/kernel": _HEADS_OUT,
    "q/bias": PartitionSpec(MODEL),
    "k/bias": PartitionSpec(MODEL),
    "v/bias": PartitionSpec(MODEL),
    "o/kernel": PartitionSpec(MODEL),
    "gate/kernel": _HEADS_OUT,
    "up/kernel": _HEADS_OUT,
    "gate/bias": PartitionSpec(MODEL),
    "up/bias": PartitionSpec(MODEL),
    "down/kernel": PartitionSpec(MODEL),
    "embed/embedding": PartitionSpec(MODEL),
    "unembed/kernel": _HEADS_OUT,
}


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along `config` (states) and along `model` (heads, MLP, vocabulary)."""

    config: int = 1
    model: int = 1

    def __str__(self) -> str:
        return f"config:{self.config},model:{self.model}"


def parse_mesh(text: str) -> MeshShape:
    """Read "config:4,model:2", either of which may be left out.

    Raises:
      UserError: another axis, one named twice, or a size that is no positive number.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(config|model)\s*:\s*(\d{1,6})\s*", item, re.ASCII)
        if found is None or int(found[2]) < 1 or found[1] in sizes:
            raise UserError(
                f"--mesh is {text!r}; write how many devices each axis has, such as "
                "config:4,model:2 (config: configurations side by side; model: parts of the heads)"
            )
        sizes[found[1]] = int(found[2])
    return MeshShape(**sizes)


def make_mesh(shape: MeshShape, config: TransformerConfig, devices: Sequence[Any] = ()) -> Mesh:
    """A mesh of the first devices of all processes, neighbours along `model`.

    Raises:
      UserError: too few devices, or some of several hosts' left out; KV heads or MLP dimensions
        that do not divide by `model`.
    """
    devices = list(devices) or jax.devices()
    count = shape.config * shape.model
    if count > len(devices):
        raise UserError(
            f"--mesh={shape} needs {count} devices and there are {len(devices)}"
            + (
                "; a CPU counts as several under XLA_FLAGS="
                f"--xla_force_host_platform_device_count={count}"
                if devices[0].platform == "cpu"
                else ""
            )
        )
    if jax.process_count() > 1 and count != len(devices):
        raise UserError(
            f"--mesh={shape} uses {count} of the {len(devices)} devices of "
            f"{jax.process_count()} hosts; several hosts must use all of theirs"
        )
    for name, size in (("KV heads", config.num_kv_heads), ("MLP dimensions", config.mlp_dim)):
        if size % shape.model:
            raise UserError(
                f"--mesh={shape}: {size} {name} do not divide by model:{shape.model}; "
                "use a divisor of both for model, and the other devices for config"
            )
    return Mesh(np.asarray(devices[:count]).reshape(shape.config, shape.model), _NAMES)


def param_sharding(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Parameter's path and shape -> its sharding, for `Checkpoint.restore` and `.stream`."""

    def rule(path: str, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(mesh, param_spec(tuple(path.split("/")), shape, mesh.shape[MODEL]))

    return rule


def param_spec(names: tuple[str, ...], shape: Sequence[int], model: int) -> PartitionSpec:
    spec = _PARAM_SPECS.get("/".join(names[-2:]), WHOLE)
    divides = all(axis is None or size % model == 0 for axis, size in zip(spec, shape))
    # Only a vocabulary may fail to divide: then every device holds it whole.
    return spec if divides else WHOLE
