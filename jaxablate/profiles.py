"""α of chosen matrices of every layer: what is read, and what a row says.

A matrix is named by what it does: q, k, v, o, up, down, gate; mlp stands for the last three.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError
from jaxablate.spectra import AlphaFit

ATTENTION = ("q", "k", "v", "o")
MLP = ("gate", "up", "down")
LABELS = {
    "q": "Q-projection",
    "k": "K-projection",
    "v": "V-projection",
    "o": "O-projection",
    "gate": "MLP gate",
    "up": "MLP up",
    "down": "MLP down",
}
# Columns of a row of α beside the identity of model and checkpoint.
COLUMNS: dict[str, type] = {
    "layer": int,
    "matrix": str,
    "head": int,
    "rows": int,
    "columns": int,
    "zone": str,
    "alpha": float,
    "goodness": float,
    "goodness_name": str,
    "first_rank": int,
    "last_rank": int,
    "num_values": int,
    "x_min": float,
    "x_max": float,
    "null_alpha": float,
    "matrix_digest": str,
}


class LayerMatrix(NamedTuple):
    """One matrix to fit: its name, head (None: the whole) and two-dimensional values."""

    matrix: str
    head: int | None
    values: np.ndarray


def parse_matrices(text: str, config: TransformerConfig, per_head: bool) -> tuple[str, ...]:
    """Read "q,k,mlp"; the order given is kept, repeats are dropped.

    Raises:
      UserError: an unknown name, or an MLP matrix per head.
    """
    names: list[str] = []
    for item in text.replace(" ", "").split(","):
        found = [name for name in MLP if name != "gate" or config.is_gated]
        if item != "mlp":
            found = [item]
        if item not in (*ATTENTION, *MLP, "mlp") or (item == "gate" and not config.is_gated):
            raise UserError(
                f"matrix {item!r} is not in this model; choose from q, k, v, o, mlp, up, down"
                + (", gate" if config.is_gated else "")
            )
        names += [name for name in found if name not in names]
    if per_head and (wrong := [name for name in names if name in MLP]):
        raise UserError(f"{', '.join(wrong)}: an MLP matrix has no heads; per head are q, k, v, o")
    return tuple(names)


def layer_matrices(
    read: Callable[[str], Shaped[np.ndarray, "..."]], layer: int, matrix: str, per_head: bool
) -> Iterator[LayerMatrix]:
    """A layer's matrix as a whole, [D, N*H] or [N*H, D], or head by head, [D, H] or [H, D].

    Args:
      read: path such as "blocks/3/attn/q/kernel" -> array.
      layer: index.
      matrix: "q", "k", "v", "o", "gate", "up" or "down".
      per_head: one matrix per query head (q, o) or KV head (k, v).
    """
    part = "mlp" if matrix in MLP else "attn"
    kernel = read(f"blocks/{layer}/{part}/{matrix}/kernel")
    if part == "mlp":
        yield LayerMatrix(matrix, None, kernel)
    elif per_head:
        heads = kernel if matrix == "o" else np.moveaxis(kernel, 1, 0)
        for head, values in enumerate(heads):
            yield LayerMatrix(matrix, head, values)
    else:
        rows = kernel.shape[0] * kernel.shape[1] if matrix == "o" else kernel.shape[0]
        yield LayerMatrix(matrix, None, kernel.reshape(rows, -1))


def matrix_key(layer: int, matrix: str, head: int | None) -> str:
    """The name of a matrix in rows: "L3:q", or "L3H1:q"."""
    return f"L{layer}{'' if head is None else f'H{head}'}:{matrix}"


def fit_row(
    fit: AlphaFit, null: AlphaFit, which: LayerMatrix, layer: int, zone: str, digest: str
) -> dict[str, Any]:
    """One row: the fit, the null's α for the same shape and estimator, and what was fitted."""
    return {
        "configuration": matrix_key(layer, which.matrix, which.head),
        "question": fit.estimator,
        "estimator": fit.estimator,
        "layer": layer,
        "matrix": which.matrix,
        "head": which.head,
        "rows": which.values.shape[0],
        "columns": which.values.shape[1],
        "zone": zone,
        "alpha": fit.alpha,
        "goodness": fit.goodness,
        "goodness_name": fit.goodness_name,
        "first_rank": fit.first_rank,
        "last_rank": fit.last_rank,
        "num_values": fit.num_values,
        "x_min": fit.x_min,
        "x_max": fit.x_max,
        "null_alpha": null.alpha,
        "matrix_digest": digest,
    }


def alphas_by_layer(
    rows: Sequence[dict[str, Any]], matrix: str, estimator: str
) -> tuple[list[float], float]:
    """α of each layer in order, and the null's, of rows of one checkpoint, whole matrices."""
    chosen = [
        row
        for row in rows
        if (row["matrix"], row["estimator"]) == (matrix, estimator) and row["head"] is None
    ]
    chosen.sort(key=lambda row: row["layer"])
    return [row["alpha"] for row in chosen], chosen[0]["null_alpha"]
