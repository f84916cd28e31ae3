"""From rows of an influence sweep to curves with intervals."""

import numpy as np
import pandas as pd

from jaxablate import scoring
from jaxablate.errors import UserError

BASELINE, FULL_CACHE = "baseline", "full cache"
# Tokens of a block, the unit of the bootstrap within a document.
BLOCK_TOKENS = 16
# From the strongest to the weakest statement about a point.
ESTIMATORS = ("exact", "interpolated", "second_order", "estimated", "first_order")


def point_key(layer: int, kv_head: int, ratio: float) -> str:
    """The configuration's name of one head at one ratio, such as L3H1@0.05."""
    return f"L{layer}H{kv_head}@{ratio:g}"


def influence_curves(rows: pd.DataFrame, seed: int = 0, level: float = 0.95) -> pd.DataFrame:
    """Δ log-perplexity of every head and ratio against the baseline, on the same tokens.

    Args:
      rows: as `results.read_rows` gives them, baseline rows included.
      seed: of the bootstrap; level: of its interval.

    Returns: one row per head and ratio, sorted: layer, kv_head, ratio, keys_kept (mean over
      documents), log_ppl, delta_log_ppl, standard_error (across documents), low, high (paired
      bootstrap over documents, or with fewer than eight over blocks of tokens: NaN then where a
      point was not evaluated exactly), documents, estimator (the weakest of the documents'),
      bound (of what the estimator may be off by, mean over documents; NaN where none is known).
    """
    units, keys, documents = case_units(rows)
    paired = scoring.paired_units(units)
    interval = scoring.bootstrap(paired, seed=seed, level=level)
    log_ppl = _log_ppl(rows, keys)
    delta = np.where(np.isnan(interval.estimate), log_ppl - log_ppl[0], interval.estimate)
    errors = _standard_errors(rows, keys)
    table = pd.DataFrame(
        {
            "configuration": keys,
            "log_ppl": log_ppl,
            "delta_log_ppl": delta,
            "standard_error": errors,
            "low": interval.low,
            "high": interval.high,
        }
    )
    about = rows.groupby("configuration", sort=False).agg(
        layer=("layer", "first"),
        kv_head=("kv_head", "first"),
        ratio=("ratio", "first"),
        keys_kept=("keys_kept", "mean"),
        estimator=("estimator", _weakest),
    )
    if "bound" in rows:
        bounds = rows.groupby(["configuration", "document"], sort=False).bound.first()
        about["bound"] = bounds.groupby("configuration").agg(lambda b: b.mean(skipna=False))
    else:
        about["bound"] = np.nan
    table = table.join(about, on="configuration")
    table["documents"] = documents
    table = table[table.layer.notna()]
    order = ["layer", "kv_head", "ratio", "keys_kept", "log_ppl", "delta_log_ppl",
             "standard_error", "low", "high", "documents", "estimator", "bound"]  # fmt: skip
    table = table.astype({"layer": int, "kv_head": int})[order]
    return table.sort_values(["layer", "kv_head", "ratio"], ignore_index=True)


def _weakest(names: pd.Series) -> str:
    return max(names, key=ESTIMATORS.index)


def _log_ppl(rows: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """Log-perplexity of each configuration, from the sums of all questions."""
    means = (rows.nll_sum / rows.scored_tokens).groupby([rows.configuration, rows.document])
    return means.mean().unstack("document").loc[keys].to_numpy(float).mean(axis=1)


def _standard_errors(rows: pd.DataFrame, keys: list[str]) -> np.ndarray:
    """Across documents, of the difference from the baseline; NaN with one document."""
    means = (rows.nll_sum / rows.scored_tokens).groupby([rows.configuration, rows.document])
    table = means.mean().unstack("document")
    delta = table.sub(table.loc[BASELINE], axis=1)
    return scoring.standard_error(delta.loc[keys].to_numpy(float))


def reference_log_ppl(rows: pd.DataFrame, configuration: str) -> float:
    """Mean log-perplexity of the baseline or the full cache."""
    part = rows[rows.configuration == configuration]
    if part.empty:
        raise UserError(f"the rows hold no {configuration!r}")
    sums, tokens = part.nll_sum.to_numpy(float)[None], part.scored_tokens.to_numpy(np.int64)
    return float(scoring.mean_log_perplexity(sums, tokens, part.document.to_numpy(str))[0])


def case_units(rows: pd.DataFrame, first: str = BASELINE) -> tuple[scoring.Units, list[str], int]:
    """Units of the bootstrap with one line per configuration, `first` leading.

    Returns: the units (documents, or blocks of tokens where there are fewer than eight), the
      configurations in the order of their lines, and the number of documents.

    Raises:
      UserError: a configuration that was not computed on every document and question.
    """
    scored = rows.drop_duplicates(["document", "question"])[["document", "question"]]
    index = pd.MultiIndex.from_frame(scored)
    keys = [first, *[key for key in rows.configuration.unique() if key != first]]
    wide = rows.set_index(["document", "question"])
    sums, blocks = [], []
    tokens = np.zeros(0, np.int64)
    for key, part in wide.groupby("configuration", sort=False):
        if len(part) != len(index):
            raise UserError(f"configuration {key!r} was computed on {len(part)} of {len(index)}")
    groups = dict(tuple(wide.groupby("configuration", sort=False)))
    for key in keys:
        part = groups[key].loc[index]
        sums.append(part.nll_sum.to_numpy(float))
        blocks.append(part.block_nll.to_list())
        if key != first:  # an estimate has no sums of blocks: nothing to draw
            blocks[-1] = [
                np.full(len(base), np.nan) if len(own) < len(base) else own
                for own, base in zip(blocks[-1], blocks[0])
            ]
        tokens = part.scored_tokens.to_numpy(np.int64)
    names = scored.document.to_numpy(str)
    count = len(set(names))
    if count >= scoring.FEWEST_UNITS:
        return scoring.document_units(np.stack(sums), tokens, names), keys, count
    per_question = [np.stack([line[q] for line in blocks]) for q in range(len(index))]
    return _pooled_blocks(per_question, tokens, names), keys, count


def _pooled_blocks(
    per_question: list[np.ndarray], tokens: np.ndarray, names: np.ndarray
) -> scoring.Units:
    """Blocks of tokens of few documents, each document weighing the same."""
    documents = list(dict.fromkeys(names))
    values, weights = [], []
    for name in documents:
        chosen = [q for q, of in enumerate(names) if of == name]
        parts = [per_question[q] for q in chosen]
        lengths = [block_lengths(int(tokens[q]), per_question[q].shape[1]) for q in chosen]
        units = scoring.block_units(parts, lengths)
        values.append(units.values / len(documents))
        weights.append(units.weights / len(documents))
    return scoring.Units(
        kind="blocks", values=np.concatenate(values, axis=1), weights=np.concatenate(weights)
    )


def block_sums(nll: np.ndarray, block_tokens: int = BLOCK_TOKENS) -> list[float]:
    """Sums over consecutive blocks of scored tokens, float64, of at least so many tokens.

    Blocks are as equal as can be, so that their lengths follow from their number.
    """
    count = max(1, len(nll) // block_tokens)
    return [float(part.astype(np.float64).sum()) for part in np.array_split(nll, count)]


def block_lengths(total: int, count: int) -> np.ndarray:
    """Tokens of each of the `count` blocks that `block_sums` makes of `total` scored tokens."""
    return np.asarray([len(part) for part in np.array_split(np.arange(total), count)])
