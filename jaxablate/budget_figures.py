"""Figures of head budgets: tables in, a matplotlib Figure out."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure


def budget_figure(table: pd.DataFrame, title: str) -> Figure:
    """Log-perplexity over the overall ratio, a line per budget, and differences from uniform.

    Args:
      table: as `curves.budget_table`.
    """
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    full = table[table.budget == "full cache"]
    lines = table[table.budget != "full cache"]
    for i, (name, line) in enumerate(lines.groupby("budget", sort=False)):
        line = line.sort_values("ratio")
        colour = f"C{i}"
        left.plot(line.ratio, line.log_ppl, marker="o", markersize=4, color=colour, label=name)
        # Side by side, or the intervals of one ratio hide each other.
        x = line.ratio * (1 + 0.04 * i)
        centre = line.delta.to_numpy(float)
        spread = np.abs(np.stack([centre - line.low, line.high - centre]))
        right.errorbar(
            x, centre, yerr=np.nan_to_num(spread), fmt="o-", markersize=4, linewidth=1, capsize=2,
            color=colour,
        )  # fmt: skip
    if len(full):
        left.axhline(full.log_ppl.iloc[0], color="black", linestyle=":", label="full cache")
    right.axhline(0, color="black", linewidth=0.8)
    for axes in (left, right):
        axes.set_xscale("log")
        ticks = sorted(lines.ratio.unique())
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("overall ratio of keys kept")
    left.set_ylabel("log(perplexity)")
    right.set_ylabel("Δ log(perplexity) from uniform")
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def share_maps(maps: Sequence[tuple[str, np.ndarray]], title: str) -> Figure:
    """Layer x head maps of each budget's share, as a multiple of the uniform share."""
    layers, heads = maps[0][1].shape
    width = 1.6 + len(maps) * max(1.4, 0.25 * heads)
    figure = Figure(figsize=(width, min(12.0, 1.8 + 0.19 * layers)), layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(maps), sharey=True))
    most = max(values.max() for _, values in maps)
    for axes, (name, values) in zip(all_axes, maps):
        axes.imshow(values, cmap="viridis", vmin=0, vmax=most, aspect="auto")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("KV head")
        axes.set_xticks(range(0, heads, 1 + heads // 16))
    all_axes[0].set_ylabel("layer")
    all_axes[0].set_yticks(range(0, layers, 1 + layers // 20))
    figure.colorbar(
        all_axes[0].images[0], ax=list(all_axes), label="share / uniform share", shrink=0.8
    )
    figure.suptitle(title, fontsize=10)
    return figure
