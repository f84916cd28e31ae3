"""What an ablation is: edits of single layers, and configurations of them.

A configuration is a sparse set of edits, at most one per layer; the configuration without edits
is the baseline. Configurations are small, hashable values: the arrays that an edit needs (kept
keys, mean outputs) live in the problem that a sweep runs on.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxablate.errors import UserError

NULLS = ("zero", "mean")


@dataclasses.dataclass(frozen=True)
class LayerEdit:
    """What is done to one layer.

    Attributes:
      remove_block, remove_attention, remove_mlp: leave the residual stream as it was before.
      head_gates: a factor per query head (1 keeps, 0 silences), or None for all ones.
      null: what a gate of 0 leaves: "zero" output, or the head's "mean" output over the text.
      kept_keys: (KV head, number of kept prefix keys), sorted by head. Query heads of the group
        attend to these keys of the prefix only, and to the sequence itself.
    """

    remove_block: bool = False
    remove_attention: bool = False
    remove_mlp: bool = False
    head_gates: tuple[float, ...] | None = None
    null: str = "zero"
    kept_keys: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.null not in NULLS:
            raise UserError(f"null is {self.null!r}; it must be one of {NULLS}")
        heads = [head for head, _ in self.kept_keys]
        if heads != sorted(set(heads)):
            raise UserError(f"kept_keys names KV heads {heads}; each once, in rising order")

    @functools.cached_property
    def key(self) -> str:
        """The canonical name of this edit within a layer, such as "block" or "keep=1@97"."""
        if self.remove_block or (self.remove_attention and self.remove_mlp):
            return "block"
        parts = []
        if self.remove_attention:
            parts.append("attn")
        if self.remove_mlp:
            parts.append("mlp")
        if self.kept_keys and not self.remove_attention:
            parts.append("keep=" + ",".join(f"{head}@{count}" for head, count in self.kept_keys))
        if self.head_gates is not None and not self.remove_attention:
            parts.append(_gate_key(self.head_gates, self.null))
        return "+".join(parts)


def _gate_key(gates: tuple[float, ...], null: str) -> str:
    suffix = "" if null == "zero" else f"({null})"
    if set(gates) <= {0.0, 1.0}:
        return "off=" + ",".join(str(i) for i, gate in enumerate(gates) if gate == 0) + suffix
    # float32, as they are used: as many digits as tell two of them apart, and no more.
    written = (str(np.float32(gate)).removesuffix(".0") for gate in gates)
    return "gate=" + ",".join(written) + suffix


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Edits of layers in rising order; equal keys mean equal configurations.

    Edits that change nothing are dropped.
    """

    edits: tuple[tuple[int, LayerEdit], ...] = ()

    def __post_init__(self) -> None:
        layers = [layer for layer, _ in self.edits]
        if layers != sorted(set(layers)) or (layers and layers[0] < 0):
            raise UserError(f"a configuration edits layers {layers}; each once, in rising order")
        edits = tuple((layer, edit) for layer, edit in self.edits if edit.key)
        object.__setattr__(self, "edits", edits)

    @functools.cached_property
    def by_layer(self) -> dict[int, LayerEdit]:
        return dict(self.edits)

    @functools.cached_property
    def key(self) -> str:
        """Canonical text, "" for the baseline: "L3:block;L7:mlp", "L3:keep=1@97", "L0:off=2,5"."""
        return ";".join(f"L{layer}:{edit.key}" for layer, edit in self.edits)


def baseline() -> Configuration:
    """The configuration that edits nothing."""
    return Configuration()


def remove_blocks(layers: Iterable[int]) -> Configuration:
    """Whole layers out; the residual stream passes them unchanged."""
    return _same_edit(layers, LayerEdit(remove_block=True))


def remove_attention(layers: Iterable[int]) -> Configuration:
    """The attention of these layers out."""
    return _same_edit(layers, LayerEdit(remove_attention=True))


def remove_mlps(layers: Iterable[int]) -> Configuration:
    """The MLP of these layers out."""
    return _same_edit(layers, LayerEdit(remove_mlp=True))


def _same_edit(layers: Iterable[int], edit: LayerEdit) -> Configuration:
    return Configuration(tuple((int(layer), edit) for layer in sorted(set(layers))))


def silence_heads(
    heads: Iterable[tuple[int, int]], num_heads: int, null: str = "zero"
) -> Configuration:
    """Query heads (layer, head) out; `num_heads` is N.

    Raises:
      UserError: a head is not in 0..N-1.
    """
    off: dict[int, set[int]] = {}
    for layer, head in heads:
        if not 0 <= head < num_heads:
            raise UserError(f"query head {head} of layer {layer}: heads are 0 to {num_heads - 1}")
        off.setdefault(layer, set()).add(head)
    edits = []
    for layer in sorted(off):
        gates = tuple(0.0 if head in off[layer] else 1.0 for head in range(num_heads))
        edits.append((layer, LayerEdit(head_gates=gates, null=null)))
    return Configuration(tuple(edits))


def head_mask(mask: np.ndarray, null: str = "zero") -> Configuration:
    """A gate for every query head, [L, N]; layers of all ones are not edited.

    Raises:
      UserError: the mask has not two axes or holds values that are not finite.
    """
    mask = np.asarray(mask, dtype=np.float32)
    if mask.ndim != 2 or not np.isfinite(mask).all():
        raise UserError(f"a head mask has shape {mask.shape}; it must be [L, N] and finite")
    edits = []
    for layer in np.flatnonzero((mask != 1).any(axis=1)):
        gates = tuple(float(gate) for gate in mask[layer])
        edits.append((int(layer), LayerEdit(head_gates=gates, null=null)))
    return Configuration(tuple(edits))


def keep_keys(counts: Mapping[tuple[int, int], int]) -> Configuration:
    """KV heads (layer, kv_head) re-fitted to a number of kept prefix keys."""
    layers: dict[int, list[tuple[int, int]]] = {}
    for (layer, head), count in sorted(counts.items()):
        if count < 1:
            raise UserError(f"L{layer}H{head} is to keep {count} keys; at least 1 is needed")
        layers.setdefault(layer, []).append((head, int(count)))
    return Configuration(
        tuple((layer, LayerEdit(kept_keys=tuple(kept))) for layer, kept in layers.items())
    )


def check(
    configurations: Sequence[Configuration], num_layers: int, num_heads: int, num_kv_heads: int
) -> None:
    """Refuse edits that the model has no place for.

    Raises:
      UserError: names the first configuration, what it asks for and what the model has.
    """
    for configuration in configurations:
        for layer, edit in configuration.edits:
            if layer >= num_layers:
                raise UserError(
                    f"configuration {configuration.key!r} edits layer {layer}; "
                    f"the model's layers are 0 to {num_layers - 1}"
                )
            if edit.head_gates is not None and len(edit.head_gates) != num_heads:
                raise UserError(
                    f"configuration {configuration.key!r} gates {len(edit.head_gates)} heads; "
                    f"gates are per query head and the model has {num_heads} "
                    f"(and {num_kv_heads} KV heads)"
                )
            for head, _ in edit.kept_keys:
                if not 0 <= head < num_kv_heads:
                    raise UserError(
                        f"configuration {configuration.key!r} names KV head {head}; "
                        f"the model's KV heads are 0 to {num_kv_heads - 1}"
                    )


def parse_heads(text: str, num_layers: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """Read "all", or "L0H0,L3H1", or "L0,L7H2" (a layer alone means all its heads).

    Returns: (layer, kv_head) pairs in rising order, without repeats.
    Raises:
      UserError: a name that is no head, or a head that the model has not.
    """
    if text.strip().lower() == "all":
        return [(layer, head) for layer in range(num_layers) for head in range(num_kv_heads)]
    found: set[tuple[int, int]] = set()
    for item in text.split(","):
        match = re.fullmatch(r"L(\d{1,6})(?:H(\d{1,6}))?", item.strip())
        if match is None:
            raise UserError(f"{item.strip()!r} is no head; write L<layer>H<head> or all")
        layer = int(match[1])
        heads = range(num_kv_heads) if match[2] is None else [int(match[2])]
        if layer >= num_layers or max(heads) >= num_kv_heads:
            raise UserError(
                f"{item.strip()} is not in this model: layers are 0 to {num_layers - 1}, "
                f"KV heads 0 to {num_kv_heads - 1}"
            )
        found.update((layer, head) for head in heads)
    return sorted(found)
