"""Baselines without a network: how well single tokens and pairs of tokens predict a text."""

import numpy as np
from jaxtyping import Int

PRIORS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def unigram_entropy(stream: Int[np.ndarray, " M"]) -> float:
    """Entropy in nats of the stream's own token frequencies.

    No model that ignores what comes before, however trained, has a lower mean NLL on this text.
    """
    counts = np.bincount(stream)
    shares = counts[counts > 0] / len(stream)
    return float(-(shares * np.log(shares)).sum())


def bigram_nll(
    train: Int[np.ndarray, " M"], heldout: Int[np.ndarray, " H"], vocab_size: int
) -> float:
    """Mean NLL in nats of `heldout` under bigrams of `train` interpolated with its unigrams.

    P(w | v) = (count(v w) + m P(w)) / (count(v) + m), with P(w) from counts plus one. m is the
    one of `PRIORS` that does best on `heldout` itself, which favours the baseline.
    """
    unigram = np.bincount(train, minlength=vocab_size) + 1.0
    unigram /= unigram.sum()
    pairs = np.zeros((vocab_size, vocab_size))
    np.add.at(pairs, (train[:-1], train[1:]), 1.0)
    before, after = heldout[:-1], heldout[1:]
    seen, total = pairs[before, after], pairs.sum(axis=1)[before]
    return float(min(-np.log((seen + m * unigram[after]) / (total + m)).mean() for m in PRIORS))
