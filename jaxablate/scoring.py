"""From token NLLs to numbers with intervals: perplexity, paired differences, bootstrap, ranks.

Everything here is float64 on the host and works on sums that the rows of a result hold, so every
table and figure can be recomputed from the rows alone. NLLs are in nats.

Two kinds of mean occur. Plain text: total NLL / scored tokens, weighted by tokens. Questions
(arXiv 2602.16284): mean NLL over each question's answer, unweighted mean over an article's
questions, unweighted mean over articles.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Shaped

from jaxablate.correlation import Correlation, spearman
from jaxablate.errors import UserError
from jaxablate.intervals import (
    DEFAULT_DRAWS,
    FEWEST_UNITS,
    INTERVAL_METHODS,
    Interval,
    Units,
    bootstrap,
    resample,
)

__all__ = [
    "DEFAULT_DRAWS",
    "FEWEST_UNITS",
    "INTERVAL_METHODS",
    "Correlation",
    "Interval",
    "Ratio",
    "Units",
    "block_units",
    "bootstrap",
    "delta_perplexity",
    "delta_ratio",
    "document_means",
    "document_units",
    "exp_or_inf",
    "format_perplexity",
    "log_perplexity",
    "mean_log_perplexity",
    "paired_units",
    "perplexity",
    "spearman",
    "standard_error",
]


def log_perplexity(total_nll: float, tokens: int) -> float:
    """Mean NLL per scored token, in nats.

    Raises:
      UserError: no tokens, or an NLL that is not a number (the sweep should have stopped there).
    """
    if tokens < 1:
        raise UserError(f"perplexity needs at least 1 scored token, got {tokens}")
    if math.isnan(total_nll):
        raise UserError(f"the total NLL over {tokens} tokens is not a number")
    return float(total_nll) / int(tokens)


def perplexity(total_nll: float, tokens: int) -> float:
    """exp(total NLL / scored tokens): weighted by tokens. inf where that overflows."""
    return exp_or_inf(log_perplexity(total_nll, tokens))


def exp_or_inf(log_value: float) -> float:
    """exp without the exception: float64 ends at a logarithm of 709.78."""
    return math.exp(log_value) if log_value < 709.78 else math.inf


def format_perplexity(log_ppl: float, digits: int = 2) -> str:
    """For tables: "13.93"; "1.2e+08" where it is large; "inf (log 812.30)" where exp overflows."""
    value = exp_or_inf(log_ppl)
    if math.isinf(value):
        return f"inf (log {log_ppl:.{digits}f})"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.{digits}e}"


def delta_perplexity(log_ppl: float, log_ppl_baseline: float) -> float:
    """PPL - PPL of the baseline, without the cancellation of the two exponentials."""
    if exp_or_inf(log_ppl) == math.inf:
        return math.inf
    return math.exp(log_ppl_baseline) * math.expm1(log_ppl - log_ppl_baseline)


def document_means(
    nll_sums: Float[np.ndarray, "*C R"],
    tokens: Int[np.ndarray, " R"],
    documents: Shaped[np.ndarray, " R"],
) -> tuple[Shaped[np.ndarray, " A"], Float[np.ndarray, "*C A"]]:
    """Log-perplexity of each document: the unweighted mean of its questions' mean NLLs.

    Args:
      nll_sums: NLL summed over each row's scored tokens; leading axes (configurations) are kept.
      tokens: scored tokens of each row, at least 1.
      documents: each row's document.

    Returns:
      The documents in order of first appearance, and their log-perplexities.
    """
    if tokens.size == 0 or tokens.min() < 1:
        raise UserError("every row needs at least 1 scored token")
    names, first, index = np.unique(documents, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    index = rank[index]
    means = nll_sums / tokens
    shares = np.zeros((len(tokens), len(names)))
    shares[np.arange(len(tokens)), index] = 1 / np.bincount(index)[index]
    return names[order], np.einsum("...r,ra->...a", means, shares)


def mean_log_perplexity(
    nll_sums: Float[np.ndarray, "*C R"],
    tokens: Int[np.ndarray, " R"],
    documents: Shaped[np.ndarray, " R"],
) -> Float[np.ndarray, "*C"]:
    """Unweighted mean over documents of `document_means`."""
    return np.asarray(document_means(nll_sums, tokens, documents)[1].mean(axis=-1))


def standard_error(values: Float[np.ndarray, "*C A"]) -> Float[np.ndarray, "*C"]:
    """std(ddof=1) / sqrt(number of documents) over the last axis; NaN for a single one."""
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(axis=-1, ddof=1) / math.sqrt(count))


def document_units(
    nll_sums: Float[np.ndarray, "C R"],
    tokens: Int[np.ndarray, " R"],
    documents: Shaped[np.ndarray, " R"],
) -> Units:
    """One unit per document, all of the same weight."""
    _, values = document_means(nll_sums, tokens, documents)
    count = values.shape[-1]
    return Units(kind="documents", values=values / count, weights=np.full(count, 1 / count))


def block_units(
    block_nll: Sequence[Float[np.ndarray, "C _"]],
    block_tokens: Sequence[Int[np.ndarray, " _"]],
) -> Units:
    """One unit per block of consecutive tokens of one document: neighbouring tokens' losses are
    not independent, so tokens are not drawn one by one.

    Args:
      block_nll: for each question (one, for plain text), the NLL sums of its blocks.
      block_tokens: for each question, the tokens in each block.

    Returns:
      Units weighted so that every question counts the same, as in the document's mean.
    """
    count = len(block_nll)
    if count == 0 or count != len(block_tokens):
        raise UserError(f"got blocks of {count} questions and lengths of {len(block_tokens)}")
    values, weights = [], []
    for nll, lengths in zip(block_nll, block_tokens):
        total = lengths.sum() * count
        values.append(nll / total)
        weights.append(lengths / total)
    return Units(
        kind="blocks",
        values=np.concatenate(values, axis=-1),
        weights=np.concatenate(weights),
    )


def paired_units(units: Units, baseline: int = 0) -> Units:
    """Differences from configuration `baseline`, on the same units: most noise cancels."""
    values = units.values - units.values[baseline : baseline + 1]
    return dataclasses.replace(units, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """ΔPPL of one configuration over that of another, or the reason why there is none."""

    value: float
    low: float
    high: float
    note: str = ""


def delta_ratio(
    units: Units,
    numerator: int,
    denominator: int,
    baseline: int = 0,
    *,
    level: float = 0.95,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
) -> Ratio:
    """ΔPPL(numerator) / ΔPPL(denominator) with a paired percentile interval.

    A ratio means something only where both differences are positive; elsewhere all numbers are NaN
    and `note` says why. Draws in which one of them is not positive count as infinite or zero, so
    that they widen the interval instead of vanishing from it.
    """
    rows = units.values[[numerator, denominator, baseline]]
    points = rows.sum(axis=1) / units.weights.sum()
    deltas = [delta_perplexity(points[i], points[2]) for i in (0, 1)]
    if not all(math.isfinite(delta) and delta > 0 for delta in deltas):
        note = f"no ratio: ΔPPL is {deltas[0]:.4g} and {deltas[1]:.4g}, both must be positive"
        return Ratio(value=math.nan, low=math.nan, high=math.nan, note=note)
    if len(units.weights) < FEWEST_UNITS:
        return Ratio(
            value=deltas[0] / deltas[1],
            low=math.nan,
            high=math.nan,
            note=f"no interval: {len(units.weights)} units, {FEWEST_UNITS} are needed",
        )
    drawn, _ = resample(dataclasses.replace(units, values=rows), draws, seed)
    # The baseline's own perplexity cancels from the ratio.
    top, bottom = (np.maximum(np.expm1(drawn[i] - drawn[2]), 0) for i in (0, 1))
    ratios = np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1), np.inf)
    # Order statistics, not interpolated: some draws may be infinite.
    ratios.sort()
    low = ratios[math.floor((1 - level) / 2 * (draws - 1))]
    high = ratios[math.ceil((1 + level) / 2 * (draws - 1))]
    return Ratio(value=deltas[0] / deltas[1], low=float(low), high=float(high))
