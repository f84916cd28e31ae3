"""Planning a sweep: which states each layer has, shared by how many configurations.

Configurations that agree below layer l share every activation below l. A node stands for one
distinct prefix of edits; walking the layers, a node splits where its configurations part.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxablate.edits import Configuration, LayerEdit


@dataclasses.dataclass(frozen=True)
class Branch:
    """One child of a node at a layer: the edit (None: unedited) and who follows it."""

    edit: LayerEdit | None
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a sweep will do, known before it runs.

    block_evaluations: blocks computed, an edited one counting as one and a removed one as none.
    naive_block_evaluations: the same if every configuration ran alone from the first layer.
    """

    configurations: int
    waves: int
    block_evaluations: int
    naive_block_evaluations: int


def branches(members: Sequence[int], layer: int, configurations: Sequence[Configuration]):
    """Split a node's members by their edit at this layer, the unedited branch first.

    Returns: list of Branch.
    """
    groups: dict[str, tuple[LayerEdit | None, list[int]]] = {}
    for member in members:
        edit = configurations[member].by_layer.get(layer)
        groups.setdefault("" if edit is None else edit.key, (edit, []))[1].append(member)
    ordered = sorted(groups.items(), key=lambda item: item[0] != "")
    return [Branch(edit, tuple(found)) for _, (edit, found) in ordered]


def trie_order(configurations: Sequence[Configuration]) -> list[int]:
    """Indices so that configurations sharing more lower layers stand closer together."""

    def path(index: int) -> tuple[tuple[int, str], ...]:
        # A later first edit sorts first, so that a wave starts as high up as it can.
        return tuple((-layer, edit.key) for layer, edit in configurations[index].edits)

    return sorted(range(len(configurations)), key=path)


def split_waves(order: Sequence[int], max_states: int) -> list[list[int]]:
    """Contiguous runs of the trie order, each with at most `max_states` configurations.

    A wave never has more live states than configurations, so this bounds the memory.
    """
    count = -(-len(order) // max_states)
    bounds = [round(i * len(order) / count) for i in range(count + 1)] if count else [0]
    return [list(order[a:b]) for a, b in itertools.pairwise(bounds)]


def wave_evaluations(
    wave: Sequence[int], configurations: Sequence[Configuration], num_layers: int
) -> int:
    """Block evaluations of one wave; the baseline's own states come from its stored stream."""
    total = 0
    baseline: list[tuple[int, ...]] = [tuple(wave)]  # members of the baseline's node
    nodes: list[tuple[int, ...]] = []  # and of all others
    for layer in range(num_layers):
        following: list[tuple[int, ...]] = []
        for is_baseline, members in [(True, m) for m in baseline] + [(False, m) for m in nodes]:
            for branch in branches(members, layer, configurations):
                if branch.edit is None and is_baseline:
                    baseline = [branch.members]
                    continue
                total += branch.edit is None or branch.edit.key != "block"
                following.append(branch.members)
            if is_baseline and all(configurations[m].by_layer.get(layer) for m in members):
                baseline = []
        nodes = following
    return total


def plan_sweep(configurations: Sequence[Configuration], num_layers: int, max_states: int) -> Plan:
    """Count what `sweep` will compute for these configurations, the baseline included.

    Args:
      max_states: live states that the memory budget allows.
    """
    distinct = list({c.key: c for c in configurations}.values())
    waves = split_waves(trie_order(distinct), max_states)
    shared = num_layers + sum(wave_evaluations(wave, distinct, num_layers) for wave in waves)
    naive = 0
    for configuration in configurations:
        removed = sum(edit.key == "block" for _, edit in configuration.edits)
        naive += num_layers - removed
    return Plan(len(configurations), len(waves), shared, naive)
