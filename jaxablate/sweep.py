"""The engine: very many configurations of one model on one set of sequences, sharing work.

A wavefront over layers. Configurations that agree below a layer share their activations there:
at each layer every live state goes through the block in chunks, and a state whose configurations
part at that layer branches. See `plan` for the counting.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.config import TransformerConfig
from jaxablate.edits import Configuration, LayerEdit, check
from jaxablate.errors import NonFiniteError, UserError
from jaxablate.nodes import Node, by_chunk, by_kind, chunks, families_of, runs
from jaxablate.on_mesh import OnMesh
from jaxablate.placement import OneDevice, Placement, to_host
from jaxablate.plan import Plan, branches, plan_sweep, split_waves, trie_order
from jaxablate.problem import Problem
from jaxablate.rope import rope_tables
from jaxablate.side_by_side import side_by_side

# Chunks that an accelerator is given before progress waits for one: it never runs dry.
_CHUNKS_AHEAD = 4

Result = TypeVar("Result")
Members = tuple[int, ...]
# Computes once what all edited children of a state start from: the state and its attention.
Parent = Callable[[], tuple[jax.Array, steps.Attended | None]]


@runtime_checkable
class Model(Protocol):
    """What the engine needs of a model; resident and streamed transformers both are one."""

    config: TransformerConfig

    def block(self, layer: int) -> Any: ...

    def embed_tokens(self, tokens: Any) -> Any: ...

    @property
    def head(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """How a sweep runs; no field changes a number beyond rounding.

    Attributes:
      chunk_tokens: tokens (states x B x T) that are inside a block at a time, on each device, on
        a CPU in two calls side by side; fewer where the memory budget has no room for what the
        block makes of them.
      score_tokens: tokens unembedded in one call.
      memory_budget: bytes of each device for the states of a wave, the baseline's stored stream
        included.
      dtype: of the activations; None takes the embedding's.
      on_progress: called with (block evaluations done, of how many) after every chunk; whatever
        it raises stops the sweep.
      mesh: devices to split states and heads over, see `mesh.make_mesh`; None: JAX's default one.
    """

    chunk_tokens: int = 2048
    score_tokens: int = 512
    memory_budget: int = 4 << 30
    dtype: Any = None
    on_progress: Callable[[int, int], None] | None = None
    mesh: jax.sharding.Mesh | None = None


class Sweep:
    """One model on one problem: the baseline is computed once, configurations as asked for.

    Attributes:
      block_evaluations: blocks computed so far, the baseline's included.
      trunk: the baseline's residual stream [1, B, T, D] before every block and after the last.
      rope: rotary tables of all positions.
    """

    def __init__(self, model: Model, problem: Problem, options: SweepOptions = SweepOptions()):
        problem.check(model.config)
        self.model, self.problem, self.options = model, problem, options
        self.block_evaluations = 0
        self.place: Placement = OnMesh(options.mesh) if options.mesh else OneDevice()
        positions = jnp.asarray(problem.batch.positions)
        self.rope = self.place.shared(rope_tables(model.config, positions))
        self._prefix = [self.place.prefix(layer) for layer in problem.prefix or ()]
        scored = np.flatnonzero(problem.batch.scored)
        targets = problem.batch.targets.reshape(-1)[scored]
        self._scored, self._targets = self.place.shared(
            (scored.astype(np.int32), targets.astype(np.int32))
        )
        self._done, self._total = 0, 0
        self._in_flight: collections.deque[tuple[jax.Array, int]] = collections.deque()
        self.trunk = self._run_baseline()
        self.baseline_nll = _finite(self.score(self.trunk[-1])[0], "the baseline")

    def plan(self, configurations: Sequence[Configuration]) -> Plan:
        """What `run` would compute for these configurations."""
        return plan_sweep(configurations, self.model.config.num_layers, self.max_states)

    @property
    def max_states(self) -> int:
        """Live states that the memory budget allows, at least one chunk of one state."""
        state = self.trunk[0].nbytes
        room = self.options.memory_budget - state * len(self.trunk)
        room -= self._workspace(self.chunk_tokens)
        return max(1, int(room // state)) * self.place.lanes

    @property
    def chunk_tokens(self) -> int:
        """Tokens inside a block: `options.chunk_tokens`, or what the budget has room for."""
        size, least = self.options.chunk_tokens, self.problem.batch.inputs.size
        states = self.trunk[0].nbytes * (len(self.trunk) + 1)
        while size > least and states + self._workspace(size) > self.options.memory_budget:
            size //= 2
        return max(size, least)

    def _workspace(self, chunk_tokens: int) -> int:
        """Bytes that a device needs for so many tokens in a block, or one call of the unembedding.

        These tokens' states before and after the block are in it: other states exist once.
        """
        config = self.model.config
        wide = 3 * config.mlp_dim + 4 * config.num_heads * config.head_dim + 4 * config.model_dim
        logits = 2 * self.options.score_tokens * config.vocab_size
        return 4 * max(chunk_tokens * wide, logits) // self.place.shards

    def run(self, configurations: Sequence[Configuration]) -> np.ndarray:
        """Token NLL in nats of every configuration, float32 [C, scored tokens].

        Scored tokens stand in the order of `problem.batch.scored`, row by row.

        Raises:
          UserError: an edit that the model or the problem has no place for.
          NonFiniteError: NaN or infinity, with the configuration's key.
        """
        config = self.model.config
        check(configurations, config.num_layers, config.num_heads, config.num_kv_heads)
        distinct = {c.key: c for c in configurations}
        keys = list(distinct)
        unique = list(distinct.values())
        self._done, self._total = 0, self.plan(unique).block_evaluations - config.num_layers
        self._in_flight.clear()
        nll = np.empty((len(unique), len(self._scored)), np.float32)
        for wave in split_waves(trie_order(unique), self.max_states):
            for member, values in self._run_wave(wave, unique):
                nll[member] = values
        index = {key: i for i, key in enumerate(keys)}
        return nll[[index[c.key] for c in configurations]]

    # The baseline

    def _run_baseline(self) -> list[jax.Array]:
        """The baseline's residual stream [1, B, T, D] before every block and after the last."""
        inputs = self.place.shared(self.problem.batch.inputs)
        x = jnp.expand_dims(self.model.embed_tokens(inputs), 0)
        x = self.place.shared_state(x.astype(self.options.dtype or x.dtype))
        trunk = [x]
        for layer in range(self.model.config.num_layers):
            block = self.model.block(layer)
            x = self.place.plain_step(block, x, self.rope, self.prefix(layer))
            self.block_evaluations += 1
            trunk.append(x)
        if not bool(jnp.isfinite(x).all()):
            raise NonFiniteError(_first_non_finite(trunk))
        return trunk

    def prefix(self, layer: int) -> LayerPrefix | None:
        """The prefix that all states share at a layer."""
        return self._prefix[layer] if self._prefix else None

    # One wave

    def _run_wave(
        self, wave: Sequence[int], configurations: Sequence[Configuration]
    ) -> Iterator[tuple[int, np.ndarray]]:
        trunk_members: tuple[int, ...] = tuple(wave)
        nodes: list[Node] = []
        for layer in range(self.model.config.num_layers):
            trunk_node = Node(trunk_members, self.trunk[layer], 0)
            groups = branches(trunk_members, layer, configurations)
            trunk_members = groups[0].members if groups and groups[0].edit is None else ()
            edited = [(trunk_node, b) for b in groups if b.edit is not None]
            if nodes or edited:
                nodes = self._advance(layer, nodes, edited, configurations)
        self._report(0)
        if trunk_members:
            for member in trunk_members:
                yield member, self.baseline_nll
        finished = list(by_chunk(nodes))
        chunks_nll = self._side_by_side(self._nll, (own[0].chunk for own in finished))
        for nodes_of_chunk, nll in zip(finished, map(to_host, chunks_nll)):
            for node in nodes_of_chunk:
                name = configurations[node.members[0]].key
                values = _finite(nll[node.place], f"configuration {name!r}")
                for member in node.members:
                    yield member, values

    def _advance(
        self,
        layer: int,
        nodes: list[Node],
        edited: list[tuple[Node, Any]],
        configurations: Sequence[Configuration],
    ) -> list[Node]:
        """All live states through one layer; `nodes` is emptied, each freed once it is through."""
        block = self.model.block(layer)
        plain: list[Node] = []
        for node in nodes:
            for branch in branches(node.members, layer, configurations):
                if branch.edit is None:
                    plain.append(node._replace(members=branch.members))
                else:
                    edited.append((node, branch))
            del node
        nodes.clear()
        following = []

        def step(chunk: list[Node]) -> tuple[jax.Array, list[Members]]:
            x = self._gather(chunk)
            x = self.place.plain_step(block, x, self.rope, self.prefix(layer))
            return x, [node.members for node in chunk]

        for x, members in self._side_by_side(step, self._chunks(plain)):
            following += self._take(x, members)
        # Parents go as soon as their children are there: every list is emptied on the way.
        kinds = by_kind(edited)
        edited.clear()
        for group in kinds:
            following += self._edit(layer, block, group)
        return following

    def _take(self, x: jax.Array, members: Sequence[Members]) -> list[Node]:
        """New nodes for the states of a computed chunk."""
        self.block_evaluations += len(members)
        self._done += len(members)
        if self.options.on_progress is not None:
            self._in_flight.append((x, self._done))
            self._report(_CHUNKS_AHEAD if jax.default_backend() != "cpu" else 0)
        return [Node(own, x, index) for index, own in enumerate(members)]

    def _report(self, ahead: int) -> None:
        """Report chunks as they are done, once more than `ahead` are on their way."""
        while self.options.on_progress is not None and len(self._in_flight) > ahead:
            x, done = self._in_flight.popleft()
            x.block_until_ready()
            self.options.on_progress(done, self._total)

    def _chunks(self, items: list[Any]) -> Iterator[list[Any]]:
        """See `nodes.chunks`; empties `items`."""
        inside = max(1, self.chunk_tokens // self.problem.batch.inputs.size)
        return chunks(items, inside, self.place.lanes, self._at_once)

    @property
    def _at_once(self) -> int:
        """Calls of a block side by side: no more than states that may be inside."""
        inside = self.chunk_tokens // self.problem.batch.inputs.size
        return max(1, min(inside, self.place.at_once))

    def _side_by_side(
        self, step: Callable[[Any], Result], items: Iterable[Any]
    ) -> Iterator[Result]:
        return side_by_side(step, items, self._at_once)

    def _gather(self, nodes: Sequence[Node]) -> jax.Array:
        """The states of some nodes [S, B, T, D], and padding to fill the lanes.

        A whole chunk in order is not copied.
        """
        chunk, padding = nodes[0].chunk, self._padding(nodes)
        if len(nodes) + padding == chunk.shape[0] and all(
            node.chunk is chunk and node.place == i for i, node in enumerate(nodes)
        ):
            return chunk
        parts = [self.place.take(r[0].chunk, r[0].place, len(r)) for r in runs(nodes)]
        return self.place.gather(parts, padding)

    def _padding(self, items: Sequence[Any]) -> int:
        return -len(items) % self.place.lanes

    def _edit(self, layer: int, block: Any, group: list[tuple[Node, Any]]) -> list[Node]:
        """Edited children of one kind; children of one parent share its attention."""
        edit = group[0][1].edit
        if edit.key == "block":
            return [node._replace(members=branch.members) for node, branch in group]
        families = families_of(group)
        group.clear()

        def step(task: tuple[Parent | None, list[Any]]) -> tuple[jax.Array, list[Members]]:
            parent, children = task
            if parent is None:
                x = self._gather([node for node, _ in children])
                attended = self._attend(layer, block, x, edit)
            else:
                x, attended = parent()
            padded = [branch.edit for _, branch in children]
            padded += [padded[-1]] * self._padding(children)
            edits = self.place.edits(self._edit_arrays(layer, padded))
            out = self.place.edited_step(
                block, x, attended, edits, children=len(padded), mlp=not edit.remove_mlp
            )
            return out, [branch.members for _, branch in children]

        def tasks() -> Iterator[tuple[Parent | None, list[Any]]]:
            while families:
                node, children = families.pop()
                parent = None if node is None else self._parent(layer, block, node, edit)
                del node
                for chunk in self._chunks(children):
                    yield parent, chunk

        following = []
        for x, members in self._side_by_side(step, tasks()):
            following += self._take(x, members)
        return following

    def _parent(self, layer: int, block: Any, node: Node, edit: LayerEdit) -> Parent:
        """A parent's state and its attention, computed when its first children are."""

        def compute() -> tuple[jax.Array, steps.Attended | None]:
            x = self.place.shared_state(self.place.take(node.chunk, node.place, 1))
            return x, self._attend(layer, block, x, edit)

        return functools.cache(compute)

    def _attend(
        self, layer: int, block: Any, x: jax.Array, edit: LayerEdit
    ) -> steps.Attended | None:
        if edit.remove_attention:
            return None
        return self.place.attention_step(block, x, self.rope, self.prefix(layer))

    def _edit_arrays(self, layer: int, edits: list[LayerEdit]) -> steps.Edits:
        swap_heads = swap = gates = null_output = None
        first = edits[0]
        if first.remove_attention:
            return steps.Edits()
        if first.kept_keys:
            heads = [[head for head, _ in edit.kept_keys] for edit in edits]
            swap_heads = jnp.asarray(np.asarray(heads, np.int32))
            swap = self.problem.swapped(layer, edits)
        if first.head_gates is not None:
            gates = jnp.asarray(np.asarray([edit.head_gates for edit in edits], np.float32))
            if first.null == "mean":
                null_output = jnp.asarray(self.problem.mean_outputs(layer))
        return steps.Edits(swap_heads, swap, gates, null_output)

    # Scoring

    def score(self, x: jax.Array) -> np.ndarray:
        """NLL of the scored tokens of a chunk of finished states, [S, scored tokens]."""
        return to_host(self._nll(x))

    def _nll(self, x: jax.Array) -> jax.Array:
        size = self.options.score_tokens
        return self.place.nll(self.model.head, x, self._scored, self._targets, size)


def sweep(
    model: Model,
    problem: Problem,
    configurations: Sequence[Configuration],
    options: SweepOptions = SweepOptions(),
) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate configurations on one problem, sharing all work they have in common.

    Returns: token NLL in nats of the baseline [scored tokens] and of the configurations
      [C, scored tokens], float32.
    Raises: as `Sweep.run`.
    """
    engine = Sweep(model, problem, options)
    return engine.baseline_nll, engine.run(configurations)


def _finite(nll: np.ndarray, what: str) -> np.ndarray:
    if not np.isfinite(nll).all():
        raise NonFiniteError(f"the loss of {what} is not finite")
    return nll


def _first_non_finite(trunk: Sequence[jax.Array]) -> str:
    for layer, x in enumerate(trunk):
        if not bool(jnp.isfinite(x).all()):
            where = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return f"the baseline is not finite after {where}"
    return "the baseline is not finite"


__all__ = ["Model", "NonFiniteError", "Sweep", "SweepOptions", "UserError", "sweep"]
