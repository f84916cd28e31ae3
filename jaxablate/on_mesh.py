"""A sweep's compiled steps on a mesh: each device on its own states, with its own heads.

The steps are those of one device under `jax.shard_map`, with two sums per block over the axis
`model`. So the loops over cache-sized tiles of a CPU stay loops over a device's own work.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.loss import nll_parts, scored_nll
from jaxablate.mesh import CONFIG, MODEL, STATES, WHOLE, param_spec

Rule = Callable[[tuple[str, ...], Any], PartitionSpec]


class OnMesh:
    """A `placement.Placement` on a mesh with the axes `config` and `model`."""

    at_once = 1  # its devices already are several

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.lanes: int = mesh.shape[CONFIG]
        self.shards: int = mesh.shape[MODEL]

    def shared(self, tree: Any) -> Any:
        return jax.tree.map(lambda array: self._put(array, WHOLE), tree)

    def prefix(self, prefix: LayerPrefix | None) -> LayerPrefix | None:
        return jax.tree.map(lambda array: self._put(array, PartitionSpec(MODEL)), prefix)

    def take(self, chunk: Array, start: int, count: int) -> Array:
        return chunk[start : start + count]

    def gather(self, parts: Sequence[Array], padding: int) -> Array:
        parts = [*parts, *[parts[-1][-1:]] * padding]
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return self._put(x, _state_spec(x, self.lanes))

    def shared_state(self, x: Array) -> Array:
        return self._put(x, WHOLE)

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
    ) -> Float[Array, "S n"]:
        return _nll(head, x, scored, targets, size=size, mesh=self.mesh)

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
        mesh, local, states, (block, _param_rule(mesh)), (x, states), (rope, WHOLE),
        (prefix, PartitionSpec(MODEL)),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("mesh",))
def _attention_step(block: Any, x: Array, rope: Any, prefix: Any, mesh: Mesh) -> steps.Attended:
    states = _state_spec(x, mesh.shape[CONFIG])

    def local(block: Any, x: Array, rope: Any, prefix: Any) -> steps.Attended:
        return steps.attention_step(_part_of_block(block), x, rope, prefix)

    return _by_device(
        mesh, local, _attended_spec(states), (block, _param_rule(mesh)), (x, states),
        (rope, WHOLE), (prefix, PartitionSpec(MODEL)),
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
        mesh, local, STATES, (block, _param_rule(mesh)), (x, states),
        (attended, _attended_spec(states)), (edits, _edit_spec),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("size", "mesh"))
def _nll(
    head: Any, x: Array, scored: Array, targets: Array, size: int, mesh: Mesh
) -> Float[Array, "S n"]:
    states = _state_spec(x, mesh.shape[CONFIG])
    axis = head.vocab_axis
    split = head.kernel[...].shape[axis] % mesh.shape[MODEL] == 0
    kernel = PartitionSpec(*[None] * axis, MODEL) if split else WHOLE

    def local(head: Any, x: Array, scored: Array, targets: Array) -> Array:
        nll = functools.partial(_vocabulary_nll, head, split)
        return scored_nll(nll, x, scored, targets, size)

    def rule(names: tuple[str, ...], leaf: Any) -> PartitionSpec:
        return kernel if names == ("kernel",) else WHOLE

    return _by_device(
        mesh, local, states, (head, rule), (x, states), (scored, WHOLE), (targets, WHOLE)
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
    return STATES if x.shape[0] % lanes == 0 else WHOLE


def _attended_spec(states: PartitionSpec) -> Any:
    heads: Any = PartitionSpec(*(states or (None,)), None, None, MODEL)
    return steps.Attended(steps.QKV(heads, heads, heads), heads)


def _edit_spec(names: tuple[str, ...], leaf: Any) -> PartitionSpec:
    if names[0] == "null_output":
        return PartitionSpec(MODEL)
    return PartitionSpec(CONFIG, MODEL) if names[0] == "gates" else STATES


def _param_rule(mesh: Mesh) -> Rule:
    model = mesh.shape[MODEL]
    return lambda names, leaf: param_spec(names, leaf.shape, model)


def _names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Attribute names of a leaf; NNX's own last one, "value", left out."""
    names = tuple(str(getattr(key, "name", key)) for key in path)
    return tuple(name for name in names if name != "value")


def _tree_map(function: Callable[[tuple[str, ...], Any], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, a: function(_names_of(path), a), tree)
