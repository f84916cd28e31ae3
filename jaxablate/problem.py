"""What a sweep runs on: sequences, what of them is scored, and the prefix they stand behind."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from jaxablate.attention import LayerPrefix
from jaxablate.config import TransformerConfig
from jaxablate.edits import LayerEdit
from jaxablate.errors import UserError
from jaxablate.windows import Batch

HeadPrefix = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Sequences of equal (padded) length, all behind the same prefix.

    Attributes:
      batch: token ids with positions (which go on after the prefix, whatever was removed from it),
        targets and which of them are scored; [B, T].
      prefix: a LayerPrefix per layer, shared by all sequences, or None.
      head_prefix: (layer, kv_head, count) -> keys [R, H], values [R, H] and bias [R] of that
        head when `count` of its prefix keys are kept; needed for `kept_keys` edits only.
      mean_output: layer -> [N, H], each head's mean output; needed for the "mean" null only.
    """

    batch: Batch
    prefix: Sequence[LayerPrefix] | None = None
    head_prefix: Callable[[int, int, int], HeadPrefix] | None = None
    mean_output: Callable[[int], np.ndarray] | None = None

    def check(self, config: TransformerConfig) -> None:
        """Refuse what the model cannot run.

        Raises:
          UserError: shapes that differ, nothing scored, token ids outside the vocabulary.
        """
        batch = self.batch
        shapes = {a.shape for a in (batch.inputs, batch.positions, batch.targets, batch.scored)}
        if len(shapes) != 1 or len(batch.inputs.shape) != 2:
            raise UserError(
                f"inputs, positions, targets, scored have shapes {sorted(shapes)}; "
                "one shape [B, T] is needed"
            )
        if not batch.scored.any():
            raise UserError("no token is scored; at least one is needed")
        for name, ids in (("token", batch.inputs), ("target", batch.targets[batch.scored])):
            if ids.min() < 0 or ids.max() >= config.vocab_size:
                raise UserError(
                    f"{name} ids run from {ids.min()} to {ids.max()}; this model's vocabulary "
                    f"is 0 to {config.vocab_size - 1}: the tokenizer belongs to another model"
                )
        if self.prefix is not None and len(self.prefix) != config.num_layers:
            raise UserError(
                f"the prefix has {len(self.prefix)} layers; the model has {config.num_layers}"
            )

    def swapped(self, layer: int, edits: Sequence[LayerEdit]) -> LayerPrefix:
        """Prefixes of the re-fitted heads of C edits, padded alike.

        Returns: keys and values [C, M, R, H], bias [C, M, R].
        """
        if self.head_prefix is None:
            raise UserError("kept keys are edited but this problem has no prefix to keep them of")
        rows = [[self.head_prefix(layer, *kept) for kept in edit.kept_keys] for edit in edits]
        longest = max(len(bias) for row in rows for _, _, bias in row)
        return pad_prefixes(rows, padded_length(longest))

    def mean_outputs(self, layer: int) -> np.ndarray:
        if self.mean_output is None:
            raise UserError("the null 'mean' needs the heads' mean outputs, which are not given")
        return self.mean_output(layer)


def pad_prefixes(rows: Sequence[Sequence[HeadPrefix]], length: int) -> LayerPrefix:
    """Stack prefixes of single heads: keys and values [C, M, R, H], bias [C, M, R].

    Padding has a bias of -inf, so it takes no part.
    """
    size = rows[0][0][0].shape[-1]
    shape = (len(rows), len(rows[0]), length)
    keys = np.zeros((*shape, size), rows[0][0][0].dtype)
    values = np.zeros((*shape, size), rows[0][0][1].dtype)
    bias = np.full(shape, -np.inf, np.float32)
    for c, row in enumerate(rows):
        for m, (head_keys, head_values, head_bias) in enumerate(row):
            count = len(head_bias)
            keys[c, m, :count], values[c, m, :count] = head_keys, head_values
            bias[c, m, :count] = head_bias
    return LayerPrefix(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(bias))


def padded_length(longest: int) -> int:
    """Round up to 64, 96, 128, 192, 256, 384 …: few shapes to compile, at most a third waste."""
    size = 64
    while size < longest:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
