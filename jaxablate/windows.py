"""Batches of token ids with the positions that count: windows over a text, and padded rows.

One convention for all: row b, column t of `inputs` is read, `targets` holds the token that it
should predict, and `scored` says whether that prediction counts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxablate.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Rows of tokens. Padding is on the right, where causal attention keeps it without effect.

    Attributes:
      inputs: token ids, 0 in the padding.
      positions: the position of each input in its sequence, for RoPE.
      targets: the token that follows each input.
      scored: True where the target's NLL counts; never in the padding.
      lengths: the number of inputs in each row that are not padding.
    """

    inputs: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]
    scored: Bool[np.ndarray, "B T"]
    lengths: Int[np.ndarray, " B"]


def windows(
    tokens: Int[np.ndarray, " M"], seq_len: int, stride: int, bos_id: int | None = None
) -> Batch:
    """Cuts a text into overlapping windows in which every token is scored exactly once.

    Window w reads `seq_len` inputs and starts `stride` tokens after the one before it; it scores
    the tokens that no earlier window scored, so each has at least `seq_len - stride` tokens before
    it (but at the start of the text). With `bos_id`, every window starts with that token, as every
    sequence that the model was trained on did, and the first token of the text is scored too;
    without it nothing predicts the first token, and all others are scored.

    Args:
      tokens: the text's ids without BOS (one that is there already is not doubled).
      seq_len: inputs in a window, BOS included.
      stride: 1 to `seq_len`. seq_len: windows that do not overlap, the cheapest.

    Raises:
      UserError: a stride out of range, or a text without a token to score.
    """
    if seq_len < 1:
        raise UserError(f"seq_len must be at least 1, got {seq_len}")
    if not 1 <= stride <= seq_len:
        raise UserError(
            f"stride must be from 1 to seq_len ({seq_len}), got {stride}: "
            f"a larger one would leave tokens unscored"
        )
    if bos_id is not None and tokens[:1].tolist() == [bos_id]:
        tokens = tokens[1:]
    # Whatever leads, targets[i] is predicted from all of stream[:i + 1] that its window holds.
    stream = tokens if bos_id is None else np.concatenate([[bos_id], tokens]).astype(tokens.dtype)
    num_targets = len(stream) - 1
    if num_targets < 1:
        raise UserError(f"the text has {len(tokens)} tokens: none can be scored")
    num_windows = 1 + max(0, -(-(num_targets - seq_len) // stride))
    index = stride * np.arange(num_windows)[:, None] + np.arange(seq_len)[None, :]
    inside = index < num_targets
    inputs = np.where(inside, stream[np.minimum(index, num_targets - 1)], 0)
    targets = np.where(inside, stream[np.minimum(index, num_targets - 1) + 1], 0)
    if bos_id is not None:
        inputs[:, 0] = bos_id
    scored = inside.copy()
    scored[1:, : seq_len - stride] = False
    return Batch(
        inputs=inputs.astype(np.int32),
        positions=np.broadcast_to(np.arange(seq_len, dtype=np.int32), index.shape).copy(),
        targets=targets.astype(np.int32),
        scored=scored,
        lengths=inside.sum(axis=1).astype(np.int32),
    )


def continuations(
    prompts: Sequence[Int[np.ndarray, " _"]],
    answers: Sequence[Int[np.ndarray, " _"]],
    start: int,
    length: int | None = None,
) -> Batch:
    """One row per (prompt, answer): reads both, scores the answer's tokens only.

    The first answer token is predicted from the last prompt token; the last answer token is a
    target, not an input.

    Args:
      prompts, answers: ids, none of them empty.
      start: position of the first prompt token (the length of the context before it).
      length: pad the rows to this many inputs; the longest row without it.

    Raises:
      UserError: an empty prompt or answer, or a row longer than `length`.
    """
    if len(prompts) != len(answers) or not prompts:
        raise UserError(f"got {len(prompts)} prompts and {len(answers)} answers")
    if min(len(ids) for ids in [*prompts, *answers]) == 0:
        raise UserError("a prompt or an answer without tokens cannot be scored")
    lengths = [len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, answers)]
    length = max(lengths) if length is None else length
    if max(lengths) > length:
        raise UserError(f"a prompt and its answer have {max(lengths)} tokens, more than {length}")
    inputs = np.zeros((len(prompts), length), np.int32)
    targets = np.zeros_like(inputs)
    scored = np.zeros(inputs.shape, bool)
    for row, (prompt, answer, used) in enumerate(zip(prompts, answers, lengths)):
        text = np.concatenate([prompt, answer])
        inputs[row, :used] = text[:-1]
        targets[row, :used] = text[1:]
        scored[row, len(prompt) - 1 : used] = True
    positions = np.broadcast_to(start + np.arange(length, dtype=np.int32), inputs.shape).copy()
    return Batch(
        inputs=inputs,
        positions=positions,
        targets=targets,
        scored=scored,
        lengths=np.asarray(lengths, np.int32),
    )
