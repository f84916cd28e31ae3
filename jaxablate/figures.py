"""Figures of the sweeps: tidy tables in, a matplotlib Figure out; nothing is computed here."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Most distinct first; after ten curves colours repeat with another line style.
_COLOURS = [f"C{i}" for i in range(10)]
_STYLES = ("-", "--", ":", "-.")


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    # Without a date and with fixed ids, the same rows draw the same bytes.
    with mpl.rc_context({"svg.hashsalt": "jaxablate"}):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def influence_figure(
    curves: pd.DataFrame, baseline_ratio: float, title: str, band: str = "interval"
) -> Figure:
    """Δ log-perplexity over the fraction of the article's keys that a head keeps.

    Args:
      curves: as `curves.influence_curves`, only the heads to draw.
      band: "interval" (paired bootstrap) or "standard_error" (across documents).
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    groups = list(curves.groupby(["layer", "kv_head"], sort=True))
    some_estimated = "estimator" in curves and (curves.estimator != "exact").any()
    for i, ((layer, head), curve) in enumerate(groups):
        colour = _COLOURS[i % len(_COLOURS)]
        style = _STYLES[i // len(_COLOURS) % len(_STYLES)]
        axes.plot(
            curve.ratio, curve.delta_log_ppl, style, color=colour, linewidth=1.5,
            marker=None if some_estimated else "o", markersize=3,
            label=f"Layer {layer} Head {head}",
        )  # fmt: skip
        low, high = curve.low, curve.high
        if band == "standard_error":
            low = curve.delta_log_ppl - curve.standard_error
            high = curve.delta_log_ppl + curve.standard_error
        if np.isfinite(low).all():
            axes.fill_between(curve.ratio, low, high, color=colour, alpha=0.15, linewidth=0)
        elif some_estimated:  # intervals are of exact points alone
            known = np.isfinite(low)
            axes.vlines(curve.ratio[known], low[known], high[known], color=colour, alpha=0.3)
            exact = curve.estimator == "exact"
            axes.plot(curve.ratio[exact], curve.delta_log_ppl[exact], "o", color=colour, ms=3.5)
            axes.plot(curve.ratio[~exact], curve.delta_log_ppl[~exact], "o", color=colour, ms=2.5,
                      markerfacecolor="white", markeredgewidth=0.7)  # fmt: skip
    if some_estimated:
        axes.plot([], [], "o", color="gray", ms=3.5, label="exact")
        axes.plot([], [], "o", color="gray", ms=2.5, markerfacecolor="white",
                  label="interpolated or estimated")  # fmt: skip
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axvline(
        baseline_ratio, color="gray", linestyle="--", linewidth=0.9,
        label=f"baseline ratio {baseline_ratio:g}",
    )  # fmt: skip
    axes.set_xlabel("Head Ratio (fraction of original keys)")
    axes.set_ylabel("Δ log(perplexity) from baseline")
    axes.set_title(title, fontsize=11)
    _outside_legend(axes, len(groups) + 1)
    return figure


def _outside_legend(axes: Axes, entries: int) -> None:
    if entries <= 8:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5),
                    ncols=1 + entries // 30)  # fmt: skip


def head_map_figure(
    maps: Sequence[tuple[str, np.ndarray]], head_name: str, title: str, value_name: str
) -> Figure:
    """Layer x head maps of one quantity, side by side on one colour scale centred at zero.

    Args:
      maps: (label, values [L, heads]); NaN where nothing was computed.
      head_name: "KV head" or "query head".
    """
    layers, heads = maps[0][1].shape
    width = min(14.0, 2.4 + len(maps) * max(2.4, 0.28 * heads + 0.8))
    figure = Figure(figsize=(width, min(12.0, 1.6 + 0.19 * layers)), layout="constrained")
    all_axes = np.atleast_1d(figure.subplots(1, len(maps), sharey=True))
    finite = np.concatenate([values[np.isfinite(values)] for _, values in maps])
    limit = float(np.abs(finite).max()) if finite.size else 1.0
    for axes, (label, values) in zip(all_axes, maps):
        axes.imshow(
            values, cmap="RdBu_r", vmin=-(limit or 1.0), vmax=limit or 1.0, aspect="auto",
            interpolation="nearest", origin="upper",
        )  # fmt: skip
        axes.set_facecolor("lightgray")  # not computed
        axes.set_xlabel(head_name)
        axes.set_title(label, fontsize=10)
        axes.set_xticks(range(0, heads, 1 + heads // 16))
    all_axes[0].set_ylabel("layer")
    all_axes[0].set_yticks(range(0, layers, 1 + layers // 20))
    figure.colorbar(all_axes[0].images[0], ax=list(all_axes), label=value_name, shrink=0.8)
    figure.suptitle("\n".join(textwrap.wrap(title, int(12 * width))), fontsize=11)
    return figure
