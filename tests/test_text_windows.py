"""Windows score every token exactly once; padded rows score the answers only."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxablate.errors import UserError
from jaxablate.text import continuations, windows


def _scored(batch, tokens, bos_id):
    """The scored places in the text, checked to predict from the tokens in front of them."""
    found = []
    offset = 0 if bos_id is None else 1
    stream = tokens.tolist() if bos_id is None else [bos_id, *tokens.tolist()]
    for inputs, positions, targets, scored, length in zip(
        batch.inputs, batch.positions, batch.targets, batch.scored, batch.lengths
    ):
        np.testing.assert_array_equal(positions, np.arange(len(inputs)))
        assert not scored[length:].any()
        assert (inputs[length:] == 0).all()
        for t in np.flatnonzero(scored):
            place = stream.index(targets[t])  # the tokens are all different
            history = stream[place - t - 1 : place]
            if bos_id is not None:
                history[0] = bos_id
            assert inputs[: t + 1].tolist() == history
            found.append(place - offset)
    return found


@pytest.mark.parametrize("bos_id", [None, 1000])
@pytest.mark.parametrize("stride", [1, 7, 16])
def test_each_of_50_tokens_is_scored_exactly_once(stride, bos_id):
    tokens = np.random.default_rng(0).permutation(50).astype(np.int32) + 1
    batch = windows(tokens, seq_len=16, stride=stride, bos_id=bos_id)
    # Without BOS nothing predicts the first token.
    first = 1 if bos_id is None else 0
    assert sorted(_scored(batch, tokens, bos_id)) == list(range(first, 50))
    assert batch.inputs.shape[1] == 16
    assert batch.inputs.dtype == np.int32


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_any_window_and_stride(length, seq_len, data):
    stride = data.draw(st.integers(1, seq_len))
    bos_id = data.draw(st.sampled_from([None, 1000]))
    tokens = np.arange(1, length + 1, dtype=np.int32)
    batch = windows(tokens, seq_len, stride, bos_id)
    first = 1 if bos_id is None else 0
    assert sorted(_scored(batch, tokens, bos_id)) == list(range(first, length))
    # No window is there for nothing, and each scored token sees seq_len - stride tokens or all.
    assert batch.scored.any(axis=1).all()
    assert (batch.scored[1:].argmax(axis=1) == seq_len - stride).all()


def test_bos_is_never_doubled():
    tokens = np.array([7, 2, 3], np.int32)
    batch = windows(tokens, seq_len=8, stride=8, bos_id=7)
    assert batch.inputs[0, :2].tolist() == [7, 2]
    assert batch.scored.sum() == 2


@pytest.mark.parametrize(
    ("count", "seq_len", "stride", "message"),
    [
        (9, 0, 1, "seq_len"),
        (9, 4, 0, "stride"),
        (9, 4, 5, "stride .* got 5"),
        (1, 4, 4, "1 tokens"),
        (0, 4, 4, "0 tokens"),
    ],
)
def test_windows_refuse(count, seq_len, stride, message):
    with pytest.raises(UserError, match=message):
        windows(np.arange(count, dtype=np.int32), seq_len, stride)


def test_rows_of_different_lengths():
    prompts = [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]
    answers = [np.array([5], np.int32), np.array([6, 7, 8], np.int32)]
    batch = continuations(prompts, answers, start=10)
    np.testing.assert_array_equal(batch.inputs, [[1, 2, 3], [4, 6, 7]])
    np.testing.assert_array_equal(batch.targets, [[2, 3, 5], [6, 7, 8]])
    np.testing.assert_array_equal(batch.scored, [[0, 0, 1], [1, 1, 1]])
    np.testing.assert_array_equal(batch.positions, [[10, 11, 12]] * 2)
    padded = continuations(prompts[1:], answers[:1], start=10, length=4)
    np.testing.assert_array_equal(padded.inputs, [[4, 0, 0, 0]])
    np.testing.assert_array_equal(padded.scored, [[1, 0, 0, 0]])
    np.testing.assert_array_equal(padded.lengths, [1])


def test_rows_refuse_what_cannot_be_scored():
    one, none = np.array([1], np.int32), np.array([], np.int32)
    for prompts, answers in (([one], [none]), ([none], [one]), ([], []), ([one], [one, one])):
        with pytest.raises(UserError):
            continuations(prompts, answers, start=0)
    with pytest.raises(UserError, match="2 tokens, more than 1"):
        continuations([one], [np.array([1, 2], np.int32)], start=0, length=1)
