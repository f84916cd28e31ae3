"""What removing layers costs, from the rows of a sweep: ΔPPL, intervals, ratios, ranks.

Intervals are over windows of the text, paired: the whole model and the pruned one on the same
tokens. The interval of ΔPPL is that of Δ log PPL carried over at the measured perplexity of the
whole model.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from jaxablate import pruning
from jaxablate.errors import UserError
from jaxablate.pruning import LayerSet
from jaxablate.removals import Removal
from jaxablate.scoring import (
    Correlation,
    Interval,
    Ratio,
    Units,
    bootstrap,
    delta_perplexity,
    delta_ratio,
    exp_or_inf,
    paired_units,
    spearman,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one set: perplexity, ΔPPL and Δ log PPL with the ends of their intervals."""

    log_ppl: float
    delta_log: float
    delta_log_low: float
    delta_log_high: float
    delta: float
    delta_low: float
    delta_high: float


class RemovalScores:
    """Every set's cost.

    Attributes:
      sets: each set evaluated; () is the whole model.
      units: NLL of every window under every set, in the order of `sets`.
      log_ppl: of the whole model.
      tokens: scored tokens.
    """

    def __init__(self, frame: pd.DataFrame, *, draws: int = 2000, seed: int = 0):
        frame = frame.sort_values(["k", "layers", "document", "first_window"], kind="stable")
        by_set = {parse_layers(name): rows for name, rows in frame.groupby("layers", sort=False)}
        if () not in by_set:
            raise UserError("the rows have no whole model to compare with")
        self.sets = list(by_set)
        counts = [window_token_counts(row) for row in by_set[()].to_dict("records")]
        values = [np.concatenate([*rows["block_nll"]]) for rows in by_set.values()]
        self.units = Units(
            kind="windows",
            values=np.asarray(values, np.float64),
            weights=np.concatenate(counts).astype(np.float64),
        )
        self._index = {layers: place for place, layers in enumerate(self.sets)}
        self._draws, self._seed = draws, seed
        self.tokens = int(self.units.weights.sum())
        self.log_ppl = float(self.units.values[self._index[()]].sum() / self.tokens)
        paired = paired_units(self.units, self._index[()])
        self._interval: Interval = bootstrap(paired, draws=draws, seed=seed)

    def cost(self, layers: LayerSet) -> Cost:
        """Of a set that was evaluated."""
        place = self._index[layers]
        delta, low, high = (
            float(x[place])
            for x in (self._interval.estimate, self._interval.low, self._interval.high)
        )
        return Cost(
            log_ppl=self.log_ppl + delta,
            delta_log=delta,
            delta_log_low=low,
            delta_log_high=high,
            **{
                name: delta_perplexity(self.log_ppl + x, self.log_ppl)
                if math.isfinite(x)
                else math.nan
                for name, x in (("delta", delta), ("delta_low", low), ("delta_high", high))
            },
        )

    def deltas(self) -> dict[LayerSet, float]:
        """Set -> Δ log PPL; the same order as ΔPPL, and finite where that overflows."""
        return {layers: self.cost(layers).delta_log for layers in self.sets if layers}

    def single_deltas(self, num_layers: int) -> list[float]:
        """Δ log PPL of each layer removed alone."""
        return [self.cost((layer,)).delta_log for layer in range(num_layers)]

    def ratio(self, numerator: LayerSet, denominator: LayerSet) -> Ratio:
        """ΔPPL of one set over that of another, with a paired interval or the reason why not."""
        if numerator == denominator:
            return Ratio(value=1.0, low=1.0, high=1.0, note="the same layers")
        return delta_ratio(
            self.units,
            self._index[numerator],
            self._index[denominator],
            self._index[()],
            draws=self._draws,
            seed=self._seed,
        )

    def rank_correlation(self, alphas: Sequence[float], seed: int = 0) -> Correlation:
        """Spearman's ρ between α and the ΔPPL of each layer removed alone."""
        singles = np.asarray(self.single_deltas(len(alphas)))
        return spearman(np.asarray(alphas, np.float64), singles, seed=seed)


def strategy_table(
    scores: RemovalScores, chosen: Sequence[Removal], exhaustive_kmax: int | None
) -> pd.DataFrame:
    """One row per strategy and k: ΔPPL and Δ log PPL with intervals.

    Random strategies: the median over draws, and in place of the interval the range over draws.
    An exhaustive sweep adds worst_true and best_true.
    """
    chosen = list(chosen)
    if exhaustive_kmax is not None:
        deltas = scores.deltas()
        for k in range(1, exhaustive_kmax + 1):
            chosen.append(Removal("best_true", k, pruning.best_true(deltas, k)))
            chosen.append(Removal("worst_true", k, pruning.worst_true(deltas, k)))
    groups: dict[tuple[str, int], list[Removal]] = {}
    for one in chosen:
        groups.setdefault((one.strategy, one.k), []).append(one)
    rows = [_strategy_row(scores, members) for members in groups.values()]
    return pd.DataFrame(rows)


def _strategy_row(scores: RemovalScores, members: Sequence[Removal]) -> dict[str, Any]:
    costs = [scores.cost(one.layers) for one in members]
    first = members[0]
    row: dict[str, Any] = {"strategy": first.strategy, "k": first.k, "draws": len(members)}
    if not first.strategy.startswith("random_"):
        row |= {"layers": format_layers(first.layers), **dataclasses.asdict(costs[0])}
        return row | {"ppl": exp_or_inf(costs[0].log_ppl), "range": "95 % interval"}
    logs = np.asarray([cost.delta_log for cost in costs])
    for name, value in (("", np.median(logs)), ("_low", logs.min()), ("_high", logs.max())):
        row[f"delta_log{name}"] = float(value)
        row[f"delta{name}"] = delta_perplexity(scores.log_ppl + float(value), scores.log_ppl)
    log_ppl = scores.log_ppl + row["delta_log"]
    return row | {
        "layers": "",
        "log_ppl": log_ppl,
        "ppl": exp_or_inf(log_ppl),
        "range": f"all {len(costs)} draws",
    }


def single_table(
    scores: RemovalScores, alphas: Sequence[float], zones: Sequence[str]
) -> pd.DataFrame:
    """One row per layer: zone, α, and the cost of removing it alone."""
    rows = []
    for layer, (alpha, zone) in enumerate(zip(alphas, zones)):
        cost = scores.cost((layer,))
        rows.append({"layer": layer, "zone": zone, "alpha": alpha, **dataclasses.asdict(cost)})
    return pd.DataFrame(rows)


def advantage_table(scores: RemovalScores, chosen: Sequence[Removal]) -> pd.DataFrame:
    """ΔPPL(Last-N) / ΔPPL(zone-aware) for each k, with its interval or the reason why not."""
    sets: Mapping[tuple[str, int], LayerSet] = {
        (one.strategy, one.k): one.layers for one in chosen if one.draw == 0
    }
    rows = []
    for k in sorted({one.k for one in chosen}):
        if ("last_n", k) in sets and ("zone_aware", k) in sets:
            ratio = scores.ratio(sets["last_n", k], sets["zone_aware", k])
            rows.append({"k": k, **dataclasses.asdict(ratio)})
    return pd.DataFrame(rows, columns=["k", "value", "low", "high", "note"])


def format_layers(layers: LayerSet) -> str:
    """ "2,5,7"; "" for none."""
    return ",".join(str(layer) for layer in layers)


def parse_layers(text: str) -> LayerSet:
    """The inverse of `format_layers`."""
    return tuple(int(item) for item in text.split(",")) if text else ()


def window_token_counts(row: Mapping[str, Any]) -> np.ndarray:
    """Scored tokens of each window of a row.

    The first window of a text scores seq_len tokens, each later one `stride`; the last of the
    text has what is left.
    """
    count = len(row["block_nll"])
    counts = np.full(count, row["stride"], np.int64)
    if row["first_window"] == 0:
        counts[0] = row["seq_len"]
    counts[-1] = row["scored_tokens"] - counts[:-1].sum()
    return counts
