"""Figures of α profiles, pruning and training: numbers in, matplotlib Figure out.

No pyplot state and no window: Figure objects that `save` writes as PNG and SVG. Each panel is drawn
by a `draw_...` function on given Axes, so that it stands alone or beside others.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxablate.spectra import BOUNDARY, INTERIOR

YELLOW, RED, BLUE, ORANGE, GRAY = "#E6B800", "#C0392B", "#2471A3", "#E67E22", "#7F8C8D"
PRUNED = "pruned"
ZONE_COLOURS = {BOUNDARY: YELLOW, INTERIOR: RED, PRUNED: BLUE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileBars:
    """One α per layer.

    Attributes:
      alphas: α of each layer.
      null: α of a Gaussian matrix of the same shape.
      classes: "boundary", "interior" or "pruned" for each layer.
      ylabel: such as "Q-projection α (rank slope)".
    """

    alphas: Sequence[float]
    null: float
    classes: Sequence[str]
    ylabel: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImpactLine:
    """ΔPPL of one strategy over k.

    Attributes:
      name: as the legend shows it.
      colour, marker: of the line.
      ks: numbers of removed layers.
      deltas: ΔPPL at each k; may be negative or infinite.
      low, high: ends of the interval or range at each k, or NaN.
      log_deltas: Δ log PPL at each k, named where ΔPPL overflows.
    """

    name: str
    colour: str
    marker: str
    ks: Sequence[int]
    deltas: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    log_deltas: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageBar:
    """ΔPPL(Last-N) / ΔPPL(Zone-Aware) at one k; value NaN with a `note` where there is none."""

    k: int
    value: float
    low: float
    high: float
    note: str = ""


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.svg, the same bytes for the same figure; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    figure.savefig(paths[0], dpi=160)
    with mpl.rc_context({"svg.hashsalt": "jaxablate"}):
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def alpha_profile(bars: ProfileBars, title: str) -> Figure:
    """Bars of α over layers, coloured by class, the Gaussian null as a line."""
    figure = _figure(_bar_width(len(bars.alphas)), 4.2)
    draw_alpha_profile(figure.subplots(), bars, title)
    return figure


def pruning_impact(lines: Sequence[ImpactLine], title: str) -> Figure:
    """ΔPPL of every strategy over k, on a log axis."""
    figure = _figure(6.4, 5.4)
    draw_pruning_impact(figure.subplots(), lines, title)
    return figure


def advantage(bars: Sequence[AdvantageBar], title: str) -> Figure:
    """Bars of ΔPPL(Last-N) / ΔPPL(Zone-Aware) with labels."""
    figure = _figure(5.6, 4.2)
    draw_advantage(figure.subplots(), bars, title)
    return figure


def three_panels(
    profile: ProfileBars,
    lines: Sequence[ImpactLine],
    bars: Sequence[AdvantageBar],
    title: str,
) -> Figure:
    """α profile, pruning impact and zone-aware advantage side by side."""
    figure = _figure(16.5, 5.6)
    axes = figure.subplots(1, 3, width_ratios=[1.15, 1.15, 1.0])
    draw_alpha_profile(axes[0], profile, "α profile")
    draw_pruning_impact(axes[1], lines, "Pruning impact")
    draw_advantage(axes[2], bars, "Zone-aware advantage")
    figure.suptitle(title)
    return figure


def alpha_map(
    alphas: Float[np.ndarray, "layers steps"], steps: Sequence[str], title: str, label: str
) -> Figure:
    """Heat map of α: layers upwards, checkpoints from left to right, each cell with its number."""
    figure = _figure(max(5.0, 1.8 + 0.75 * len(steps)), max(3.6, 1.6 + 0.3 * len(alphas)))
    axes = figure.subplots()
    image = axes.imshow(alphas, aspect="auto", origin="lower", cmap="viridis")
    axes.set(xlabel="checkpoint", ylabel="layer", title=title)
    axes.set_xticks(range(len(steps)), steps, rotation=45, ha="right")
    axes.set_yticks(range(0, len(alphas), 1 if len(alphas) <= 16 else 2))
    figure.colorbar(image, ax=axes, label=label)
    if alphas.size <= 400:
        middle = (np.nanmin(alphas) + np.nanmax(alphas)) / 2
        for (layer, step), value in np.ndenumerate(alphas):
            colour = "white" if value < middle else "black"
            axes.text(step, layer, f"{value:.2f}", ha="center", va="center", size=7, color=colour)
    return figure


def head_map(alphas: Float[np.ndarray, "layers heads"], title: str, label: str) -> Figure:
    """Heat map of α of every head: layers upwards, heads from left to right."""
    figure = alpha_map(alphas, [str(head) for head in range(alphas.shape[1])], title, label)
    figure.axes[0].set_xlabel("head")
    return figure


def training_curve(
    losses: Float[np.ndarray, " steps"], heldout: float, unigram: float, bigram: float
) -> Figure:
    """Training loss over steps; the held-out loss and two baselines as lines."""
    figure = _figure(6.4, 4.2)
    axes = figure.subplots()
    axes.plot(np.arange(len(losses)), losses, color=GRAY, lw=0.7, label="training batch")
    for value, name, colour, style in (
        (unigram, "entropy of single tokens", YELLOW, ":"),
        (bigram, "bigrams (interpolated)", RED, "--"),
        (heldout, "this model, held-out topics", BLUE, "-"),
    ):
        axes.axhline(value, color=colour, ls=style, label=f"{name}: {value:.2f}")
    axes.set(xlabel="step", ylabel="NLL per token [nats]", title="A small GPT-NeoX from scratch")
    axes.legend(fontsize=8)
    return figure


def alpha_against_impact(
    alphas: Sequence[float],
    deltas: Sequence[float],
    classes: Sequence[str],
    xlabel: str,
    title: str,
) -> Figure:
    """Δ log PPL of each layer removed alone against its α, a numbered point per layer."""
    figure = _figure(5.6, 4.6)
    axes = figure.subplots()
    colours = [ZONE_COLOURS[name] for name in classes]
    axes.scatter(alphas, deltas, c=colours, s=36, edgecolors="black", linewidths=0.4, zorder=3)
    for layer, point in enumerate(zip(alphas, deltas)):
        axes.annotate(str(layer), point, xytext=(4, 3), textcoords="offset points", size=7)
    if min(deltas) > 0:
        axes.set_yscale("log")
    else:
        axes.axhline(0, color="black", lw=0.6)
        if max(deltas) > 0.3:  # one layer that matters most would flatten all others
            axes.set_yscale("symlog", linthresh=0.01)
    axes.set(xlabel=xlabel, ylabel="Δ log PPL, layer removed alone", title=title)
    _class_legend(axes, classes, place="best")
    return figure


def draw_alpha_profile(axes: Axes, bars: ProfileBars, title: str) -> None:
    """See `alpha_profile`."""
    layers = np.arange(len(bars.alphas))
    axes.bar(layers, bars.alphas, color=[ZONE_COLOURS[name] for name in bars.classes], width=0.8)
    line = axes.axhline(bars.null, color="black", ls="--", lw=1.2)
    axes.set(xlabel="layer", ylabel=bars.ylabel, title=title)
    top = max(*bars.alphas, bars.null)
    axes.set_ylim(min(0.0, *bars.alphas), 1.25 * top)  # room for the legend above the bars
    axes.set_xlim(-0.7, len(layers) - 0.3)
    axes.set_xticks(layers if len(layers) <= 16 else layers[:: 2 if len(layers) <= 32 else 4])
    _class_legend(axes, bars.classes, extra=(line, f"Gaussian null: {bars.null:.3f}"))


def draw_pruning_impact(axes: Axes, lines: Sequence[ImpactLine], title: str) -> None:
    """See `pruning_impact`. What a log axis cannot hold stands at its edge with its value."""
    floor, ceiling = _axis_range(lines)
    axes.set_yscale("log")
    axes.set_ylim(floor, ceiling)
    every = sorted({k for line in lines for k in line.ks})
    for place, line in enumerate(lines):
        shift = 0.05 * (place - (len(lines) - 1) / 2)
        x = np.asarray(line.ks) + shift
        y = np.clip(line.deltas, floor, ceiling)
        axes.plot(x, y, color=line.colour, marker=line.marker, ms=5, lw=1.4, label=line.name)
        _draw_ranges(axes, line, x, floor, ceiling)
        _draw_off_axis(axes, line, x, floor, ceiling)
    axes.set(xlabel="layers removed k", ylabel="ΔPPL", title=title)
    axes.set_xticks(every)
    axes.set_xlim(every[0] - 0.35, every[-1] + 0.35)
    axes.grid(axis="y", alpha=0.3)
    # Below the axes: lines and ranges may lie anywhere within.
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def draw_advantage(axes: Axes, bars: Sequence[AdvantageBar], title: str) -> None:
    """See `advantage`."""
    known = [bar for bar in bars if math.isfinite(bar.value)]
    # Intervals may reach far beyond the bars; they are cut at twice the tallest one, and say so.
    limit = 2 * max([bar.value for bar in known], default=1.0)
    for bar in known:
        axes.bar(bar.k, bar.value, width=0.6, color=BLUE if bar.value >= 1 else ORANGE)
        top = bar.value
        if math.isfinite(bar.low) and not math.isnan(bar.high):
            top = min(bar.high, limit)
            axes.plot([bar.k, bar.k], [bar.low, top], color="black", lw=1)
            if bar.high > limit:
                axes.plot(bar.k, limit, marker="^", color="black", ms=5)
        axes.text(bar.k, top + 0.02 * limit, f"{bar.value:.1f}x", ha="center", va="bottom")
    for bar in bars:
        if not math.isfinite(bar.value):
            axes.text(bar.k, 0.02 * limit, bar.note or "no ratio", rotation=90, ha="center",
                      va="bottom", size=8, color=GRAY)  # fmt: skip
    axes.axhline(1, color="black", ls="--", lw=0.8)
    axes.set(xlabel="layers removed k", ylabel="ΔPPL(Last-N) / ΔPPL(Zone-Aware)", title=title)
    axes.set_xticks([bar.k for bar in bars])
    axes.set_xlim(min(bar.k for bar in bars) - 0.6, max(bar.k for bar in bars) + 0.6)
    axes.set_ylim(0, 1.12 * limit if known else 1.2)


def _axis_range(lines: Sequence[ImpactLine]) -> tuple[float, float]:
    """Decades that hold every positive finite number, with one to spare below and above."""
    numbers = [v for line in lines for values in (line.deltas, line.low, line.high) for v in values]
    shown = [v for v in numbers if math.isfinite(v) and v > 0]
    points = [v for line in lines for v in line.deltas if math.isfinite(v) and v > 0]
    low = max(min(shown, default=0.1), min(points, default=0.1) / 10)
    floor, ceiling = math.floor(math.log10(low)), math.ceil(math.log10(max(shown, default=10)))
    deltas = [v for line in lines for v in line.deltas]
    floor -= any(v <= 0 for v in deltas)
    ceiling += any(v == math.inf for v in deltas)
    return 10.0**floor, 10.0 ** max(ceiling, floor + 1)


def _draw_ranges(axes: Axes, line: ImpactLine, x: np.ndarray, floor: float, ceiling: float) -> None:
    low, high = np.asarray(line.low, float), np.asarray(line.high, float)
    there = ~(np.isnan(low) | np.isnan(high))
    axes.vlines(
        x[there],
        np.clip(low[there], floor, ceiling),
        np.clip(high[there], floor, ceiling),
        color=line.colour,
        lw=1,
        alpha=0.7,
    )


def _draw_off_axis(
    axes: Axes, line: ImpactLine, x: np.ndarray, floor: float, ceiling: float
) -> None:
    for place, delta, log_delta in zip(x, line.deltas, line.log_deltas):
        if delta > 0 and math.isfinite(delta):
            continue
        below = delta <= 0
        words = f"{delta:.2g}" if below else f"exp({log_delta:.0f})"
        axes.plot(
            place, floor if below else ceiling, marker="v" if below else "^", ms=9,
            mfc="white", mec=line.colour, clip_on=False, zorder=4,
        )  # fmt: skip
        axes.annotate(
            words, (place, floor if below else ceiling), xytext=(-6, 5 if below else -9),
            textcoords="offset points", size=7, color=line.colour, ha="right",
        )  # fmt: skip


def _class_legend(
    axes: Axes, classes: Sequence[str], *, extra: tuple | None = None, place: Any = "upper left"
) -> None:
    pruned = sum(name == PRUNED for name in classes)
    names: Mapping[str, str] = {
        BOUNDARY: "Boundary",
        INTERIOR: "Interior",
        PRUNED: f"Pruned (k={pruned})",
    }
    handles = [Patch(color=ZONE_COLOURS[key]) for key in names if key in classes]
    labels = [name for key, name in names.items() if key in classes]
    if extra is not None:
        handles.append(extra[0])
        labels.append(extra[1])
    axes.legend(handles, labels, fontsize=8, loc=place, ncols=2)


def _bar_width(num_layers: int) -> float:
    return max(6.4, 1.5 + 0.3 * num_layers)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")
