"""A sweep on several devices: states over one axis of a mesh, heads and MLP over another.

    mesh = make_mesh(parse_mesh("config:4,model:2"), config)
    model = checkpoint.restore(sharding=param_sharding(mesh))
    Sweep(model, problem, SweepOptions(mesh=mesh))

Each device runs its own states (axis `config`) on its own heads (axis `model`) by itself: the steps
are those of one device under `jax.shard_map`, with two sums per block over `model`. So the loops
over cache-sized tiles of a CPU stay loops over a device's own work.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError
from jaxablate.loss import nll_parts
from jaxablate.placement import to_host

CONFIG, MODEL = "config", "model"
_NAMES = (CONFIG, MODEL)
_WHOLE, _STATES = PartitionSpec(), PartitionSpec(CONFIG)
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

Rule = Callable[[tuple[str, ...], Any], PartitionSpec]


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
        return NamedSharding(mesh, _param_spec(tuple(path.split("/")), shape, mesh.shape[MODEL]))

    return rule


def _param_spec(names: tuple[str, ...], shape: Sequence[int], model: int) -> PartitionSpec:
    spec = _PARAM_SPECS.get("/".join(names[-2:]), _WHOLE)
    divides = all(axis is None or size % model == 0 for axis, size in zip(spec, shape))
    # Only a vocabulary may fail to divide: then every device holds it whole.
    return spec if divides else _WHOLE


class OnMesh:
    """A `placement.Placement` on a mesh with the axes `config` and `model`."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.lanes: int = mesh.shape[CONFIG]
        self.shards: int = mesh.shape[MODEL]

    def shared(self, tree: Any) -> Any:
        return jax.tree.map(lambda array: self._put(array, _WHOLE), tree)

    def prefix(self, prefix: LayerPrefix | None) -> LayerPrefix | None:
        return jax.tree.map(lambda array: self._put(array, PartitionSpec(MODEL)), prefix)

    def gather(self, parts: Sequence[Array], padding: int) -> Array:
        parts = [*parts, *[parts[-1][-1:]] * padding]
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return self._put(x, _state_spec(x, self.lanes))

    def shared_state(self, x: Array) -> Array:
        return self._put(x, _WHOLE)

    def edits(self, edits: steps.Edits) -> steps.Edits:
        return _tree_map(lambda names, a: self._put(a, _edit_spec(names, a)), edits)

    def plain_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> Array:
        return _plain_step(block, x, rope, prefix, mesh=self.mesh)

    def attention_step(self, block: Any, x: Array, rope: Any, prefix: Any) -> steps.Attended:
        return _attention_step(block, x, rope, prefix, mesh=self.mesh)

    def edited_step(
        self, block: Any, x: Array, attended: Any, edits: steps.Edits, children: int, mlp: bool
    ) -> Array:
        return _edited_step(block, x, attended, edits, children=children, mlp=mlp, mesh=self.mesh)

    def nll(
        self,
        head: Any,
        x: Float[Array, "S B T D"],
        scored: Int[Array, "n"],
        targets: Int[Array, "n"],
        size: int,
    ) -> Float[np.ndarray, "S n"]:
        return to_host(_nll(head, x, scored, targets, size=size, mesh=self.mesh))

    def _put(self, array: Any, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(self.mesh, spec)
        if isinstance(array, jax.Array):
            if array.sharding.is_equivalent_to(sharding, array.ndim):
                return array
            if len(array.sharding.device_set) == self.mesh.size:
                return _resharder(sharding)(array)
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        values = np.asarray(array)  # every host has the same
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


@functools.lru_cache(maxsize=64)
def _resharder(sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(lambda array: array, out_shardings=sharding)


# The steps of `steps`, each device on its own states and heads


@functools.partial(jax.jit, static_argnames=("mesh",))
def _plain_step(block: Any, x: Array, rope: Any, prefix: Any, mesh: Mesh) -> Array:
    states = _state_spec(x, mesh.shape[CONFIG])

    def local(block: Any, x: Array, rope: Any, prefix: Any) -> Array:
        return steps.plain_step(_part_of_block(block), x, rope, prefix)

    return _by_device(
        mesh, local, states, (block, _param_rule(mesh)), (x, states), (rope, _WHOLE),
        (prefix, PartitionSpec(MODEL)),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("mesh",))
def _attention_step(block: Any, x: Array, rope: Any, prefix: Any, mesh: Mesh) -> steps.Attended:
    states = _state_spec(x, mesh.shape[CONFIG])

    def local(block: Any, x: Array, rope: Any, prefix: Any) -> steps.Attended:
        return steps.attention_step(_part_of_block(block), x, rope, prefix)

    return _by_device(
        mesh, local, _attended_spec(states), (block, _param_rule(mesh)), (x, states),
        (rope, _WHOLE), (prefix, PartitionSpec(MODEL)),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("children", "mlp", "mesh"))
def _edited_step(
    block: Any, x: Array, attended: Any, edits: steps.Edits, children: int, mlp: bool, mesh: Mesh
) -> Array:
    lanes = mesh.shape[CONFIG]
    states = _state_spec(x, lanes)

    def local(block: Any, x: Array, attended: Any, edits: steps.Edits) -> Array:
        first = None
        if edits.swap is not None:
            first = jax.lax.axis_index(MODEL) * attended.qkv.k.shape[3]
        return steps.edited_step(
            _part_of_block(block), x, attended, edits,
            children=children // lanes, mlp=mlp, first_kv_head=first,
        )  # fmt: skip

    return _by_device(
        mesh, local, _STATES, (block, _param_rule(mesh)), (x, states),
        (attended, _attended_spec(states)), (edits, _edit_spec),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("size", "mesh"))
def _nll(
    head: Any, x: Array, scored: Array, targets: Array, size: int, mesh: Mesh
) -> Float[Array, "S n"]:
    states = _state_spec(x, mesh.shape[CONFIG])
    axis = head.vocab_axis
    split = head.kernel[...].shape[axis] % mesh.shape[MODEL] == 0
    kernel = PartitionSpec(*[None] * axis, MODEL) if split else _WHOLE

    def local(head: Any, x: Array, scored: Array, targets: Array) -> Array:
        rows = x.reshape(x.shape[0], -1, x.shape[-1])[:, scored]
        wanted = jnp.broadcast_to(targets, rows.shape[:2]).reshape(-1)
        rows = rows.reshape(-1, x.shape[-1])
        nll = functools.partial(_vocabulary_nll, head, split)
        whole = len(rows) - len(rows) % size
        parts = []
        if whole:
            pieces = rows[:whole].reshape(-1, size, rows.shape[1]), wanted[:whole].reshape(-1, size)
            parts.append(jax.lax.map(lambda piece: nll(*piece), pieces).reshape(-1))
        if whole < len(rows):
            parts.append(nll(rows[whole:], wanted[whole:]))
        return jnp.concatenate(parts).reshape(x.shape[0], -1)

    def rule(names: tuple[str, ...], leaf: Any) -> PartitionSpec:
        return kernel if names == ("kernel",) else _WHOLE

    return _by_device(
        mesh, local, states, (head, rule), (x, states), (scored, _WHOLE), (targets, _WHOLE)
    )


def _vocabulary_nll(head: Any, split: bool, x: Array, targets: Array) -> Array:
    """NLL where this device holds a part of the vocabulary, or all of it."""
    if not split:
        top, mass, chosen = nll_parts(head, x, targets)
        return top + jnp.log(mass) - chosen
    vocab = head.kernel[...].shape[head.vocab_axis]
    own = targets - jax.lax.axis_index(MODEL) * vocab
    here = (own >= 0) & (own < vocab)
    top, mass, chosen = nll_parts(head, x, jnp.clip(own, 0, vocab - 1))
    highest = jax.lax.pmax(top, MODEL)
    mass = jax.lax.psum(mass * jnp.exp(top - highest), MODEL)
    return highest + jnp.log(mass) - jax.lax.psum(jnp.where(here, chosen, 0), MODEL)


def _part_of_block(block: Any) -> Any:
    """A device's part of a block: what its heads and MLP dimensions add up to is a partial sum."""
    block.attn.o.sum_over = block.mlp.down.sum_over = MODEL
    return block


def _by_device(
    mesh: Mesh, function: Callable[..., Any], out_specs: Any, *arguments: tuple[Any, Any]
) -> Any:
    """`jax.shard_map` of a function of pytrees, each with one spec, a tree of specs, or a Rule."""
    trees: list[Any] = []
    leaves, specs = [], []
    for tree, rule in arguments:
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        trees.append(structure)
        leaves += [leaf for _, leaf in paths]
        if isinstance(rule, PartitionSpec):
            specs += [rule] * len(paths)
        elif callable(rule):
            specs += [rule(_names_of(path), leaf) for path, leaf in paths]
        elif paths:
            specs += jax.tree.leaves(rule, is_leaf=lambda s: isinstance(s, PartitionSpec))

    def local(*leaves: Array) -> Any:
        rest, arguments = list(leaves), []
        for structure in trees:
            own, rest = rest[: structure.num_leaves], rest[structure.num_leaves :]
            arguments.append(jax.tree.unflatten(structure, own))
        return function(*arguments)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
    )
    return mapped(*leaves)


def _state_spec(x: Array, lanes: int) -> PartitionSpec:
    """States over `config`; one that all share is whole everywhere."""
    return _STATES if x.shape[0] % lanes == 0 else _WHOLE


def _attended_spec(states: PartitionSpec) -> Any:
    heads: Any = PartitionSpec(*(states or (None,)), None, None, MODEL)
    return steps.Attended(steps.QKV(heads, heads, heads), heads)


def _edit_spec(names: tuple[str, ...], leaf: Any) -> PartitionSpec:
    if names[0] == "null_output":
        return PartitionSpec(MODEL)
    return PartitionSpec(CONFIG, MODEL) if names[0] == "gates" else _STATES


def _param_rule(mesh: Mesh) -> Rule:
    model = mesh.shape[MODEL]
    return lambda names, leaf: _param_spec(names, leaf.shape, model)


def _names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Attribute names of a leaf; NNX's own last one, "value", left out."""
    names = tuple(str(getattr(key, "name", key)) for key in path)
    return tuple(name for name in names if name != "value")


def _tree_map(function: Callable[[tuple[str, ...], Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, a: function(_names_of(path), a), tree)
