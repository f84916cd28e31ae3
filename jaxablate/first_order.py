"""Estimates of very many edits from one backward pass: first order, and second by Fisher draws.

At the baseline, g = ∂ Σ NLL / ∂x at an edited place and δ, the edit's change there, give the
linear term ⟨g, δ⟩. The curvature is almost all that of the softmax loss; its term
½ E⟨ĝ_y, δ⟩², with ĝ_y the gradient for labels y drawn from the model's own distribution, is
estimated from a few draws that go back side by side (see `fisher`).

The pass goes block by block from the stream that the baseline's sweep stored: the memory is that
of one block's activations, and the cost beyond it one head's attention per head.

δ is taken where the edit acts: at a head's output for kept keys and gates (the rest of the block
linearised), after the block (computed exactly) for what is removed of a layer.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxablate import backward, fisher
from jaxablate.edits import Configuration, LayerEdit, check
from jaxablate.errors import UserError
from jaxablate.nested_attention import key_sets
from jaxablate.sweep import Sweep

# Positions in a span: ⟨ĝ_y, δ⟩ is squared span by span for the estimate of less variance.
_SPAN = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Inner products of gradients and edits: all that the estimates are made of.

    loss: [C, B] ⟨g, δ⟩ per configuration and sequence: the linear term of the NLL sum, nats.
    drawn: [C, E, B] ⟨ĝ_y, δ⟩ of E draws.
    near: [C, B] ½ mean over draws of Σ ⟨ĝ_y, δ⟩² over spans of positions.
    """

    loss: Float[np.ndarray, "C B"]
    drawn: Float[np.ndarray, "C E B"]
    near: Float[np.ndarray, "C B"]

    @property
    def fisher(self) -> Float[np.ndarray, "C B"]:
        """The second-order term of the NLL sum, nats: unbiased, relative error √(2/E)."""
        return 0.5 * np.square(self.drawn, dtype=np.float64).mean(axis=1)

    @property
    def pooled_fisher(self) -> Float[np.ndarray, "C B"]:
        """The same term with a small bias and a fraction of the variance.

        An edit at one position acts mostly on that position's own loss, so that products of
        distant positions are mostly noise of the draws. They are left out, and what they hold on
        average (about a fifth) is put back as a factor that all configurations share.
        """
        whole, near = self.fisher.sum(axis=1), self.near.sum(axis=1)
        edited = near > 0
        factor = np.mean(whole[edited] / near[edited]) if edited.any() else 1.0
        return factor * self.near


class Gradients:
    """A backward pass over one sweep's baseline, block by block, as often as it is asked for.

    Args:
      engine: holds the model, the problem and the baseline's stored stream.
      draws: E, labels drawn per scored token; 0 gives the linear term alone.
      seed: of the draws.
    """

    def __init__(self, engine: Sweep, draws: int = 0, seed: int = 0):
        if draws < 0:
            raise UserError(f"{draws} draws; at least 0 are needed")
        self._engine, self._draws, self._seed = engine, draws, seed
        self._length = engine.problem.batch.inputs.shape[1]
        self._spans = -(-self._length // _SPAN) if draws else 1
        self._key_sets: dict = {}

    def run(self, configurations: Sequence[Configuration]) -> Scores:
        """Scores of configurations of any edits; those of several layers add up.

        Raises:
          UserError: an edit that the model or the problem has no place for, or kept keys
            together with gates or a removed MLP in one layer.
        """
        config = self._engine.model.config
        check(configurations, config.num_layers, config.num_heads, config.num_kv_heads)
        edits: dict[int, dict[str, LayerEdit]] = {}
        for configuration in configurations:
            for layer, edit in configuration.edits:
                _refuse_mixed(layer, edit)
                edits.setdefault(layer, {})[edit.key] = edit
        several = {
            (layer, edit.key)
            for configuration in configurations
            for layer, edit in configuration.edits
            if len(configuration.edits) > 1
        }
        found: dict[tuple[int, str], Scores] = {}
        spans: dict[tuple[int, str], np.ndarray] = {}
        pieces = self._row_chunks()
        gradients = [self._start(rows) for rows in pieces] if edits else []
        for layer in reversed(range(min(edits, default=0), config.num_layers if edits else 0)):
            parts = []
            for i, rows in enumerate(pieces):
                gradients[i], scores = self._layer(layer, rows, gradients[i], edits.get(layer, {}))
                parts.append(scores)
            for key in edits.get(layer, {}):
                whole = np.concatenate([part[key] for part in parts], axis=1)
                found[layer, key] = _reduce(whole)
                if (layer, key) in several:
                    spans[layer, key] = whole
        return self._collect(configurations, found, spans)

    def _row_chunks(self) -> list[slice]:
        """Sequences are independent: as many at a time as the engine's chunks hold tokens."""
        total = self._engine.problem.batch.inputs.shape[0]
        size = max(1, self._engine.options.chunk_tokens // self._length)
        size = 1 << (size.bit_length() - 1)
        chunks, start = [], 0
        while start < total:
            while size > total - start:
                size //= 2
            chunks.append(slice(start, start + size))
            start += size
        return chunks

    def _start(self, rows: slice) -> jax.Array:
        """Gradients after the last block, [F, 1, B, T, D]."""
        batch = self._engine.problem.batch
        x = self._engine.trunk[-1][0, rows]
        flat = x.reshape(-1, x.shape[-1])
        scored = np.flatnonzero(batch.scored[rows])
        before = int(batch.scored[: rows.start].sum())
        uniforms = fisher.stratified_uniforms(self._draws, int(batch.scored.sum()), self._seed)
        cotangents = fisher.loss_cotangents(
            self._engine.model.head,
            flat[scored],
            jnp.asarray(batch.targets[rows].reshape(-1)[scored]),
            jnp.asarray(uniforms[:, before : before + len(scored)]),
        )
        g = jnp.zeros((1 + self._draws, *flat.shape), jnp.float32).at[:, scored].set(cotangents)
        return g.reshape(1 + self._draws, 1, *x.shape)

    def _layer(self, layer: int, rows: slice, g: jax.Array, edits: dict[str, LayerEdit]):
        """Gradients before the layer, and the scores [F, B, P] of its edits by their key."""
        engine = self._engine
        block = engine.model.block(layer)
        x, out = (stream[:, rows] for stream in engine.trunk[layer : layer + 2])
        rope = tuple(table[rows] for table in engine.rope)
        back = backward.block_backward(block, x, rope, engine.prefix(layer), g)
        scores: dict[str, np.ndarray] = {}
        kept: dict[int, set[int]] = {}
        for key, edit in edits.items():
            if key in ("block", "attn", "mlp"):
                scores[key] = np.asarray(
                    backward.removal_scores(block, x, back.attended, out, g, key, self._spans)
                )
            elif edit.head_gates is not None:
                scores[key] = self._gate_scores(layer, back, edit)
            for head, count in edit.kept_keys:
                kept.setdefault(head, set()).add(count)
        by_head = {head: self._kept_scores(layer, back, head, kept[head]) for head in kept}
        for key, edit in edits.items():
            if edit.kept_keys:
                scores[key] = sum(by_head[head][count] for head, count in edit.kept_keys)
        return back.stream, scores

    def _gate_scores(self, layer: int, back: backward.Backward, edit: LayerEdit) -> np.ndarray:
        heads = back.attended.heads
        null = np.zeros(heads.shape[-2:], np.float32)
        if edit.null == "mean":
            null = np.asarray(self._engine.problem.mean_outputs(layer), np.float32)
        per_head = np.asarray(backward.head_scores(back, jnp.asarray(null), self._spans))
        gates = np.asarray(edit.head_gates, np.float32)
        return np.einsum("n,nfbp->fbp", 1 - gates, per_head)

    def _kept_scores(self, layer: int, back: backward.Backward, head: int, counts: set[int]):
        """Scores [F, B, P] of one KV head by its number of kept keys."""
        problem, ordered = self._engine.problem, sorted(counts)
        if problem.head_prefix is None:
            raise UserError("kept keys are edited but this problem has no prefix to keep them of")
        sets = self._key_sets.get((layer, head))
        if sets is None or sets[0] != ordered:
            prefixes = [problem.head_prefix(layer, head, count) for count in ordered]
            sets = self._key_sets[layer, head] = ordered, key_sets(prefixes)
        arranged = sets[1]
        scores = np.asarray(
            backward.kept_key_scores(
                back,
                jnp.asarray(head, jnp.int32),
                jax.tree.map(jnp.asarray, arranged.blocks),
                arranged.nested,
                arranged.num_slots,
                self._spans,
            )
        )
        return {count: scores[slot] for count, slot in zip(ordered, arranged.slots)}

    def _collect(self, configurations, found: dict, spans: dict) -> Scores:
        nothing = np.zeros((1 + self._draws, self._engine.problem.batch.inputs.shape[0], 1))
        rows = []
        for configuration in configurations:
            keys = [(layer, edit.key) for layer, edit in configuration.edits]
            if len(keys) == 1:
                rows.append(found[keys[0]])
            else:
                rows.append(_reduce(sum((spans[key] for key in keys), nothing)))
        columns = zip(*((row.loss, row.drawn, row.near) for row in rows))
        return Scores(*(np.concatenate(column) for column in columns))


def _reduce(scores: Float[np.ndarray, "F B P"]) -> Scores:
    """The scores of one edit, or of several added up."""
    wide = np.asarray(scores, np.float64)
    whole = wide.sum(axis=-1)
    near = 0.5 * np.square(wide[1:]).sum(axis=-1).sum(axis=0) / max(1, len(wide) - 1)
    return Scores(whole[:1], whole[None, 1:], near[None])


def _refuse_mixed(layer: int, edit: LayerEdit) -> None:
    kinds = [bool(edit.kept_keys), edit.head_gates is not None, edit.remove_mlp]
    if sum(kinds) > 1 and not edit.remove_attention:
        raise UserError(
            f"layer {layer} is edited in several ways at once ({edit.key}); estimates take one "
            "kind per layer: kept keys, gates, or a removal"
        )
