"""The tables of a pruning run as Markdown, every number from the outcome that the rows gave."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxablate.removal_study import Outcome, Study
from jaxablate.removals import STRATEGIES
from jaxablate.scoring import format_perplexity

# In the order in which a reader compares them.
_ORDER = (*STRATEGIES, "best_true", "worst_true", "best_estimated", "worst_estimated")


def markdown(study: Study, outcome: Outcome) -> str:
    """Whole model, rank correlation, strategies, their ratio, and single layers."""
    scores = outcome.scores
    rho = scores.rank_correlation(study.alphas, study.strategy.seed)
    about = (
        f"Whole model: perplexity {format_perplexity(scores.log_ppl, 4)} over {scores.tokens:,} "
        f"tokens in {len(scores.units.weights)} windows. Removed: {study.component}. "
        + (
            "Values are exact."
            if study.estimator == "exact"
            else f"Values are estimates ({study.estimator}): read the ranks, not the sizes."
        ),
        f"Spearman ρ(α, ΔPPL of the layer removed alone) = {rho.rho:.2f}, permutation p = "
        f"{rho.p_value:.3g}.",
    )
    strategies = outcome.strategies.to_dict("records")
    strategies.sort(key=lambda row: (row["k"], _ORDER.index(row["strategy"])))
    ratios = [_ratio(row) for row in outcome.advantage.to_dict("records")]
    pieces = [
        *about,
        _table(
            ("k", "strategy", "layers", "ΔPPL", "95 % interval, or range of draws", "Δ log PPL"),
            map(_strategy, strategies),
        ),
        f"ΔPPL(Last-N) / ΔPPL(zone-aware): {'; '.join(ratios)}." if ratios else "",
        _table(
            ("layer", "zone", "α", "ΔPPL alone", "95 % interval", "Δ log PPL"),
            (
                (row["layer"], row["zone"], f"{row['alpha']:.3f}", *_costs(row))
                for row in outcome.singles.to_dict("records")
            ),
        ),
    ]
    return "\n\n".join(filter(None, pieces)) + "\n"


def _strategy(row: Mapping[Any, Any]) -> Sequence[Any]:
    layers = row["layers"] or f"median of {row['draws']}"
    return row["k"], row["strategy"], layers, *_costs(row)


def _costs(row: Mapping[Any, Any]) -> tuple[str, str, str]:
    low, high = row["delta_low"], row["delta_high"]
    ends = f"{low:.4g} to {high:.4g}" if low == low else "none"
    return f"{row['delta']:.4g}", ends, f"{row['delta_log']:.4g}"


def _ratio(row: Mapping[Any, Any]) -> str:
    words = row["note"]
    if row["value"] == row["value"]:
        words = f"{row['value']:.2f}x [{row['low']:.2f}, {row['high']:.2f}]"
    return f"k = {row['k']}: {words}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
