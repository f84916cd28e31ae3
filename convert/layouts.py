"""How a tensor of another file format lies in ours: the rows of a conversion table.

A rule names one source tensor and the parameters of ours that it holds. Its layout turns each of
our arrays into a *view* in the source's order, so the same rule serves both directions: copy the
source into the views (conversion), or the views into the source (export). The source, reshaped to
[A, P, ...] for P parameters, has parameter i's view at [:, i]; P > 1 is a fused tensor.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from jaxablate.config import TransformerConfig, param_shapes

Layout = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a conversion table.

    Attributes:
      source: the tensor's name in the file.
      targets: our parameters in it, joined by "/"; more than one when the file fuses them.
      layout: our array -> a view of it in the order of the source, first axis A.
    """

    source: str
    targets: tuple[str, ...]
    layout: Layout


def as_is(array: np.ndarray) -> np.ndarray:
    """Same order and shape on both sides: embeddings, norms, biases of [D] or [F]."""
    return array


def flat(array: np.ndarray) -> np.ndarray:
    """Biases of heads: [N, H] here, [N * H] there."""
    return array.reshape(-1)


def linear(array: np.ndarray) -> np.ndarray:
    """PyTorch's Linear weight is [out, in]; ours is [in, out] or, with heads, [D, N, H]."""
    return array.reshape(array.shape[0], -1).T


def linear_from_heads(array: np.ndarray) -> np.ndarray:
    """The output projection: [N, H, D] here, [D, N * H] there."""
    return array.reshape(-1, array.shape[-1]).T


def head_major_kernel(array: np.ndarray) -> np.ndarray:
    """One of NeoX's fused query, key, value: [D, N, H] here, [N, (3,) H, D] there."""
    return array.transpose(1, 2, 0)


def views(rule: Rule, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Each of our arrays in the source's order; never a copy (writing goes through)."""
    return [rule.layout(array) for array in arrays]


def source_shape(rule: Rule, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that the source tensor must have for parameters of these shapes."""
    # Zero strides: the shape arithmetic of the layout without memory for the array.
    view = rule.layout(np.broadcast_to(np.int8(0), shapes[rule.targets[0]]))
    if len(rule.targets) == 1:
        return view.shape
    if view.ndim == 2:  # biases [N, H] fuse to [N * P * H]
        return (math.prod(view.shape) * len(rule.targets),)
    return (view.shape[0] * len(rule.targets) * math.prod(view.shape[1:-1]), view.shape[-1])


def check_covers(rules: list[Rule], config: TransformerConfig) -> None:
    """A table must fill every parameter exactly once; a bug of ours otherwise."""
    filled = [target for rule in rules for target in rule.targets]
    expected = param_shapes(config)
    if sorted(filled) != sorted(expected):
        wrong = sorted(set(filled) ^ set(expected)) or "some parameter twice"
        raise RuntimeError(f"conversion table of {config.family} does not match: {wrong}")
