"""Tables of what removing layers costs, as the lines and bars of figures."""

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from jaxablate import spectra
from jaxablate import spectra_figures as figures
from jaxablate.removal_study import Outcome, Study
from jaxablate.spectra_figures import AdvantageBar, ImpactLine

# strategy -> (legend, colour, marker); in the order of the legend
STYLES = {
    "zone_aware": ("Zone-Aware", figures.BLUE, "o"),
    "last_n": ("Last-N", figures.ORANGE, "s"),
    "last_n_keep_final": ("Last-N, final layer kept", "#F5B041", "P"),
    "random_interior": ("Random, interior", figures.GRAY, "D"),
    "random_all": ("Random, all layers", "#B2BABB", "d"),
    "worst": ("Worst (spectral)", figures.RED, "^"),
    "best_true": ("Best of all sets", "#1E8449", "*"),
    "worst_true": ("Worst of all sets", "#641E16", "X"),
    "best_estimated": ("Best of all sets, by the estimate", "#1E8449", "*"),
    "worst_estimated": ("Worst of all sets, by the estimate", "#641E16", "X"),
}


def draw(study: Study, outcome: Outcome, out: Path, title: str) -> list[Path]:
    """The three panels together and alone, and α against the cost of single layers."""
    if study.estimator != "exact":
        title += f" — estimated, {study.estimator.replace('_', ' ')}"
    sets = {(one.strategy, one.k): one.layers for one in outcome.chosen}
    pruned = sets.get(("zone_aware", study.strategy.kmax), ())
    zones = spectra.zones(study.num_layers, study.strategy.boundary)
    classes = [figures.PRUNED if i in pruned else zone for i, zone in enumerate(zones)]
    estimator = str(study.constants["alpha_estimator"]).replace("_", " ")
    ylabel = f"{study.constants['alpha_matrix'].upper()}-projection α ({estimator})"
    bars = figures.ProfileBars(alphas=study.alphas, null=study.null, classes=classes, ylabel=ylabel)
    lines = impact_lines(outcome.strategies)
    ratios = advantage_bars(outcome.advantage, outcome.strategies)
    singles = outcome.singles["delta_log"].tolist()
    rho = outcome.scores.rank_correlation(study.alphas, study.strategy.seed)
    words = f"Spearman ρ = {rho.rho:.2f}, p = {rho.p_value:.3g}"
    drawn = {
        "alpha_profile": figures.alpha_profile(bars, f"α profile, {title}"),
        "pruning_impact": figures.pruning_impact(lines, f"Pruning impact, {title}"),
        "alpha_against_impact": figures.alpha_against_impact(
            study.alphas, singles, classes, ylabel, words
        ),
    }
    if ratios:
        drawn["advantage"] = figures.advantage(ratios, f"Zone-aware advantage, {title}")
        drawn["pruning"] = figures.three_panels(bars, lines, ratios, title)
    return [figures.save(figure, out / "figures", name)[0] for name, figure in drawn.items()]


def impact_lines(table: pd.DataFrame) -> list[ImpactLine]:
    """A line per strategy of `removal_scores.strategy_table`."""
    lines = []
    for strategy, (name, colour, marker) in STYLES.items():
        rows = table[table["strategy"] == strategy].sort_values("k")
        if rows.empty:
            continue
        if strategy.startswith("random_"):
            name += f" (median and range of {int(rows['draws'].max())})"
        lines.append(
            ImpactLine(
                name=name,
                colour=colour,
                marker=marker,
                ks=rows["k"].tolist(),
                deltas=rows["delta"].tolist(),
                low=rows["delta_low"].tolist(),
                high=rows["delta_high"].tolist(),
                log_deltas=rows["delta_log"].tolist(),
            )
        )
    return lines


def advantage_bars(table: pd.DataFrame, impact: pd.DataFrame) -> list[AdvantageBar]:
    """A bar per k of `removal_scores.advantage_table`, with a short reason where there is none."""
    bars = []
    for row in table.to_dict("records"):
        note = ""
        if not math.isfinite(row["value"]):
            note = "no ratio: " + _reason(impact[impact["k"] == row["k"]])
        bars.append(
            AdvantageBar(
                k=row["k"], value=row["value"], low=row["low"], high=row["high"], note=note
            )
        )
    return bars


def _reason(rows: pd.DataFrame) -> str:
    words: Sequence[str] = [
        f"ΔPPL({name}) {'overflows' if value == math.inf else '≤ 0'}"
        for strategy, name in (("last_n", "Last-N"), ("zone_aware", "Zone-Aware"))
        for value in rows.loc[rows["strategy"] == strategy, "delta"]
        if value <= 0 or value == math.inf
    ]
    return ", ".join(words)
