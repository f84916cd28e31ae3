"""From rows of the budgets experiment to one table: log-perplexity of each budget at each ratio."""

import dataclasses

import numpy as np
import pandas as pd

from jaxablate import scoring
from jaxablate.curves import case_units


def budget_table(rows: pd.DataFrame, reference: str = "uniform", seed: int = 0) -> pd.DataFrame:
    """Every budget at every overall ratio, compared with the reference at that ratio.

    Args:
      rows: as `results.read_rows` gives them.
      reference: the budget that differences are taken from, on the same tokens.
      seed: of the bootstrap.

    Returns: one row per budget and ratio: budget, ratio, kept_ratio (keys really kept),
      padded_ratio (keys in memory, layers padded to their longest head), log_ppl, log_ppl_low,
      log_ppl_high, delta (from the reference), low, high (95 % intervals), documents.
    """
    first = str(rows.configuration.iloc[0])
    units, keys, documents = case_units(rows, first)
    about = rows.groupby("configuration", sort=False).agg(
        budget=("budget", "first"),
        ratio=("ratio", "first"),
        kept_ratio=("kept_ratio", "mean"),
        padded_ratio=("padded_ratio", "mean"),
    )
    own = scoring.bootstrap(units, seed=seed)
    table = about.loc[keys].reset_index()
    table["log_ppl"], table["log_ppl_low"], table["log_ppl_high"] = own.estimate, own.low, own.high
    against = np.full(len(keys), -1)
    for i, row in enumerate(table.itertuples()):
        same = table.index[(table.budget == reference) & (table.ratio == row.ratio)]
        against[i] = same[0] if len(same) else -1
    values = np.where(
        (against >= 0)[:, None], units.values - units.values[against], np.nan
    )  # the full cache has no rival at its own ratio
    paired = scoring.bootstrap(dataclasses.replace(units, values=values), seed=seed)
    table["delta"], table["low"], table["high"] = paired.estimate, paired.low, paired.high
    table["documents"] = documents
    columns = ["budget", "ratio", "kept_ratio", "padded_ratio", "log_ppl", "log_ppl_low",
               "log_ppl_high", "delta", "low", "high", "documents"]  # fmt: skip
    return table[columns].sort_values(["ratio", "budget"], kind="stable", ignore_index=True)
