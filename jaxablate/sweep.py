"""The engine: very many configurations of one model on one set of sequences, sharing work.

A wavefront over layers. Configurations that agree below a layer share their activations there:
at each layer every live state goes through the block in chunks, and a state whose configurations
part at that layer branches. See `plan` for the counting.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxablate import steps
from jaxablate.attention import LayerPrefix
from jaxablate.config import TransformerConfig
from jaxablate.edits import Configuration, LayerEdit, check
from jaxablate.errors import UserError
from jaxablate.loss import token_nll
from jaxablate.plan import Plan, branches, plan_sweep, split_waves, trie_order
from jaxablate.problem import Problem
from jaxablate.rope import rope_tables


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
      chunk_tokens: tokens (states x B x T) that go through a block in one call.
      score_tokens: tokens unembedded in one call.
      memory_budget: bytes for the states of a wave, the baseline's stored stream included.
      dtype: of the activations; None takes the embedding's.
      on_progress: called with (block evaluations done, of how many) after every chunk; whatever
        it raises stops the sweep.
    """

    chunk_tokens: int = 2048
    score_tokens: int = 512
    memory_budget: int = 4 << 30
    dtype: Any = None
    on_progress: Callable[[int, int], None] | None = None


class NonFiniteError(ArithmeticError):
    """A sweep met NaN or infinity; the message says at which layer or configuration."""


class Node(NamedTuple):
    """A live state: its residual stream [B, T, D] lies in a chunk at an index."""

    members: tuple[int, ...]
    chunk: jax.Array
    place: int


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
        self.rope = rope_tables(model.config, jnp.asarray(problem.batch.positions))
        scored = np.flatnonzero(problem.batch.scored)
        self._scored = jnp.asarray(scored)
        self._targets = jnp.asarray(problem.batch.targets.reshape(-1)[scored])
        self._done, self._total = 0, 0
        self.trunk = self._run_baseline()
        self.baseline_nll = self._score(self.trunk[-1], "the baseline")[0]

    def plan(self, configurations: Sequence[Configuration]) -> Plan:
        """What `run` would compute for these configurations."""
        return plan_sweep(configurations, self.model.config.num_layers, self.max_states)

    @property
    def max_states(self) -> int:
        """Live states that the memory budget allows, at least one chunk of one state."""
        state = self.trunk[0].nbytes
        room = self.options.memory_budget - state * len(self.trunk) - self._workspace()
        # A state is held twice while its chunk goes through a block.
        return max(1, int(room // (2 * state)))

    def _workspace(self) -> int:
        """Bytes that one chunk needs inside a block, and one call of the unembedding."""
        config = self.model.config
        wide = 3 * config.mlp_dim + 4 * config.num_heads * config.head_dim + 4 * config.model_dim
        chunk = max(self.options.chunk_tokens, self.problem.batch.inputs.size) * wide
        return 4 * max(chunk, 2 * self.options.score_tokens * config.vocab_size)

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
        nll = np.empty((len(unique), len(self._scored)), np.float32)
        for wave in split_waves(trie_order(unique), self.max_states):
            for member, values in self._run_wave(wave, unique):
                nll[member] = values
        index = {key: i for i, key in enumerate(keys)}
        return nll[[index[c.key] for c in configurations]]

    # The baseline

    def _run_baseline(self) -> list[jax.Array]:
        """The baseline's residual stream [1, B, T, D] before every block and after the last."""
        x = jnp.expand_dims(self.model.embed_tokens(jnp.asarray(self.problem.batch.inputs)), 0)
        x = x.astype(self.options.dtype or x.dtype)
        trunk = [x]
        for layer in range(self.model.config.num_layers):
            x = steps.plain_step(self.model.block(layer), x, self.rope, self.prefix(layer))
            self.block_evaluations += 1
            trunk.append(x)
        if not bool(jnp.isfinite(x).all()):
            raise NonFiniteError(_first_non_finite(trunk))
        return trunk

    def prefix(self, layer: int) -> LayerPrefix | None:
        """The prefix that all states share at a layer."""
        return None if self.problem.prefix is None else self.problem.prefix[layer]

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
        if trunk_members:
            for member in trunk_members:
                yield member, self.baseline_nll
        for nodes_of_chunk in _by_chunk(nodes):
            names = configurations[nodes_of_chunk[0].members[0]].key
            nll = self._score(nodes_of_chunk[0].chunk, f"configuration {names!r}")
            for node in nodes_of_chunk:
                for member in node.members:
                    yield member, nll[node.place]

    def _advance(
        self,
        layer: int,
        nodes: list[Node],
        edited: list[tuple[Node, Any]],
        configurations: Sequence[Configuration],
    ) -> list[Node]:
        """All live states through one layer."""
        block = self.model.block(layer)
        plain: list[Node] = []
        for node in nodes:
            for branch in branches(node.members, layer, configurations):
                if branch.edit is None:
                    plain.append(node._replace(members=branch.members))
                else:
                    edited.append((node, branch))
        following = []
        for chunk in self._chunks(plain):
            x = _gather(chunk)
            following += self._take(
                steps.plain_step(block, x, self.rope, self.prefix(layer)), chunk
            )
        for group in _by_kind(edited):
            following += self._edit(layer, block, group)
        return following

    def _take(self, x: jax.Array, chunk: Sequence[Node]) -> list[Node]:
        """New nodes for the states of a computed chunk."""
        self.block_evaluations += len(chunk)
        self._done += len(chunk)
        if self.options.on_progress is not None:
            x.block_until_ready()
            self.options.on_progress(self._done, self._total)
        return [Node(node.members, x, index) for index, node in enumerate(chunk)]

    def _chunks(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Split into full chunks, then falling powers of two: few shapes, no padding."""
        size = max(1, self.options.chunk_tokens // self.problem.batch.inputs.size)
        size = 1 << (size.bit_length() - 1)
        start = 0
        while start < len(items):
            while size > len(items) - start:
                size //= 2
            yield items[start : start + size]
            start += size

    def _edit(self, layer: int, block: Any, group: list[tuple[Node, Any]]) -> list[Node]:
        """Edited children of one kind; children of one parent share its attention."""
        edit = group[0][1].edit
        if edit.key == "block":
            return [node._replace(members=branch.members) for node, branch in group]
        following = []
        for parent, children in _families(group):
            attended = None
            if parent is not None and not edit.remove_attention:
                attended = steps.attention_step(
                    block, _gather([parent]), self.rope, self.prefix(layer)
                )
            for chunk in self._chunks(children):
                x = _gather([node for node, _ in chunk] if parent is None else [parent])
                if parent is None and not edit.remove_attention:
                    attended = steps.attention_step(block, x, self.rope, self.prefix(layer))
                edits = self._edit_arrays(layer, [branch.edit for _, branch in chunk])
                x = steps.edited_step(
                    block, x, attended, edits, children=len(chunk), mlp=not edit.remove_mlp
                )
                members = [node._replace(members=branch.members) for node, branch in chunk]
                following += self._take(x, members)
        return following

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

    def _score(self, x: jax.Array, what: str) -> np.ndarray:
        """NLL of the scored tokens of a chunk of finished states, [S, scored tokens]."""
        states = x.shape[0]
        x = x.reshape(states, -1, x.shape[-1])[:, self._scored].reshape(-1, x.shape[-1])
        targets = jnp.tile(self._targets, states)
        size = self.options.score_tokens
        parts = [
            token_nll(self.model.head, x[i : i + size], targets[i : i + size])
            for i in range(0, len(targets), size)
        ]
        nll = np.concatenate([np.asarray(part) for part in parts]).reshape(states, -1)
        if not np.isfinite(nll).all():
            raise NonFiniteError(f"the loss of {what} is not finite")
        return nll


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


def _gather(nodes: Sequence[Node]) -> jax.Array:
    """The states of some nodes as one array [S, B, T, D]; a whole chunk in order is not copied."""
    chunk = nodes[0].chunk
    if len(nodes) == chunk.shape[0] and all(
        node.chunk is chunk and node.place == i for i, node in enumerate(nodes)
    ):
        return chunk
    parts: list[jax.Array] = []
    for run in _runs(nodes):
        start, stop = run[0].place, run[-1].place + 1
        parts.append(run[0].chunk[start:stop])
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _runs(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Maximal runs of neighbours in one chunk."""
    run: list[Node] = []
    for node in nodes:
        if run and not (node.chunk is run[-1].chunk and node.place == run[-1].place + 1):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def _by_chunk(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        groups.setdefault(id(node.chunk), []).append(node)
    yield from groups.values()


def _by_kind(edited: list[tuple[Node, Any]]) -> Iterator[list[tuple[Node, Any]]]:
    """Group edits that run through the same compiled step."""
    groups: dict[Any, list[tuple[Node, Any]]] = {}
    for node, branch in edited:
        edit = branch.edit
        kind = (
            edit.key == "block",
            edit.remove_attention,
            edit.remove_mlp,
            edit.head_gates is not None,
            edit.null,
            len(edit.kept_keys),
        )
        groups.setdefault(kind, []).append((node, branch))
    yield from groups.values()


def _families(group: list[tuple[Node, Any]]) -> Iterator[tuple[Node | None, list[Any]]]:
    """(parent, its children) where there are several, then (None, all only children)."""
    families: dict[tuple[int, int], list[tuple[Node, Any]]] = {}
    for node, branch in group:
        families.setdefault((id(node.chunk), node.place), []).append((node, branch))
    only = []
    for family in families.values():
        if len(family) > 1:
            yield family[0][0], family
        else:
            only += family
    if only:
        yield None, only


def _first_non_finite(trunk: Sequence[jax.Array]) -> str:
    for layer, x in enumerate(trunk):
        if not bool(jnp.isfinite(x).all()):
            where = "the embedding" if layer == 0 else f"layer {layer - 1}"
            return f"the baseline is not finite after {where}"
    return "the baseline is not finite"


__all__ = ["Model", "NonFiniteError", "Sweep", "SweepOptions", "UserError", "sweep"]
