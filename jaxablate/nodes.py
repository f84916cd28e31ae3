"""Live states of a wave, and how they are grouped for one layer's compiled steps."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Node(NamedTuple):
    """A live state: its residual stream [B, T, D] lies in a chunk at an index."""

    members: tuple[int, ...]
    chunk: jax.Array
    place: int


def runs(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Maximal runs of neighbours in one chunk."""
    run: list[Node] = []
    for node in nodes:
        if run and not (node.chunk is run[-1].chunk and node.place == run[-1].place + 1):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


def by_chunk(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    groups: dict[int, list[Node]] = {}
    for node in nodes:
        groups.setdefault(id(node.chunk), []).append(node)
    yield from groups.values()


def by_kind(edited: list[tuple[Node, Any]]) -> list[list[tuple[Node, Any]]]:
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
    return list(groups.values())


def families_of(group: list[tuple[Node, Any]]) -> list[tuple[Node | None, list[Any]]]:
    """All only children as (None, children), then (parent, its children) where there are several.

    The last is used first.
    """
    families: dict[tuple[int, int], list[tuple[Node, Any]]] = {}
    for node, branch in group:
        families.setdefault((id(node.chunk), node.place), []).append((node, branch))
    only: list[Any] = []
    several: list[tuple[Node | None, list[Any]]] = []
    for family in families.values():
        if len(family) > 1:
            several.append((family[0][0], family))
        else:
            only += family
    return [(None, only)] * bool(only) + several[::-1]


def chunks(items: list[Any], inside: int, lanes: int = 1, at_once: int = 1) -> Iterator[list[Any]]:
    """Full chunks, then falling powers of two: few shapes, no padding; empties `items`.

    Args:
      inside: states that may be inside a block at a time, on each lane.
      lanes: devices side by side, each with as many states: the last chunk alone is padded to a
        multiple.
      at_once: chunks that are inside at a time: so many share `inside`, and what is left at the
        end is split among them.
    """
    size = max(1, inside // at_once)
    size = lanes << (size.bit_length() - 1)
    while items:
        while size > lanes and size * at_once > len(items):
            size //= 2
        for _ in range(at_once):
            if items:
                yield _cut(items, size)


def _cut(items: list[Any], size: int) -> list[Any]:
    """The first items, taken off the list: whoever holds them is then the only one."""
    first = items[:size]
    del items[:size]
    return first
