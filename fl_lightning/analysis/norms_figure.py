"""The clipping laboratory's picture: update norms round by round against the bound, and what clipping made of them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.analysis.figures import COLOURS, DOTS_PER_INCH, MARKERS, STYLES

if TYPE_CHECKING:
    from fl_lightning.analysis.norms import UpdateNorm

FEW_ROUNDS = 25
"""Up to so many rounds each gets its own violin and dots; beyond, bands of quartiles read better."""

WIDE_SPAN = 20.0
"""Ratio of largest to smallest norm from which the axis is logarithmic."""

KEPT, CLIPPED, BOUND = COLOURS[0], COLOURS[1], COLOURS[6]
RATIOS = {
    "fraction": "clipped fraction",
    "cosine": "cosine of clipped and\nunclipped aggregate",
    "alpha_mean": "mean alpha = c/max(c, norm)",
    "alpha_deviation": "mean |alpha - its mean|",
}


def draw_norms(norms: "Sequence[UpdateNorm]", rounds: Mapping[int, Mapping[str, float]], path: Path) -> Path:
    """Draws the norms of every round (left), of all rounds (right), and the round's ratios below, where there are any.

    Clipped updates differ from kept ones by colour and by marker, the lines by colour, style and marker.

    Args:
        norms: every client's update in every round; those that are not finite are left out.
        rounds: metrics by round, as `ClippingLab.rounds`.
        path: the PNG file to write.

    Returns:
        `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    finite = [norm for norm in norms if math.isfinite(norm.update_norm)]
    shown = [name for name in RATIOS if any(name in found for found in rounds.values())]
    figure = Figure(figsize=(11.0, 6.6 if shown else 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 if shown else 1, 2, width_ratios=(4, 1), height_ratios=(3, 1.7) if shown else (1,))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharey=left)
    values = [norm.update_norm for norm in finite]
    log = bool(values) and min(values) > 0 and max(values) > WIDE_SPAN * min(values)
    if log:
        left.set_yscale("log")
    _norms(left, finite, log)
    _histogram(right, finite, log)
    bounded = any(norm.alpha is not None for norm in finite)
    left.set_ylabel("update norm before clipping and noise" if bounded else "update norm")
    left.set_title(_title(finite), fontsize=11, loc="left")
    axes = [left, right]
    if shown:
        below = figure.add_subplot(grid[1, 0], sharex=left)
        _ratios(below, rounds, shown)
        handles, labels = below.get_legend_handles_labels()
        corner = figure.add_subplot(grid[1, 1])
        corner.axis("off")
        corner.legend(handles, labels, loc="center left", fontsize=8, frameon=False, handlelength=3.0)
        axes.append(below)
    axes[-1 if shown else 0].set_xlabel("round")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    if finite:
        left.set_xlim(min(norm.round for norm in finite) - 0.6, max(norm.round for norm in finite) + 0.6)
    for each in axes:
        each.grid(True, color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _title(norms: "Sequence[UpdateNorm]") -> str:
    if any(norm.alpha is not None for norm in norms):
        return "Update norms against the bound"
    if any(norm.clipped is not None for norm in norms):
        return "Update norms (what is clipped is the model)"
    return "Update norms (updates have no bound)"


def _norms(axes: Any, norms: "Sequence[UpdateNorm]", log: bool) -> None:
    numbers = sorted({norm.round for norm in norms})
    by_round = {number: [norm for norm in norms if norm.round == number] for number in numbers}
    if len(numbers) > FEW_ROUNDS:
        table = np.array([np.quantile([n.update_norm for n in by_round[r]], (0, 0.25, 0.5, 0.75, 1)) for r in numbers])
        axes.fill_between(numbers, table[:, 0], table[:, 4], color=KEPT, alpha=0.12, linewidth=0, label="all clients")
        axes.fill_between(numbers, table[:, 1], table[:, 3], color=KEPT, alpha=0.35, linewidth=0, label="middle half")
        axes.plot(numbers, table[:, 2], color=KEPT, linewidth=1.6, label="median")
    else:
        for number in numbers:
            _violin(axes, number, [norm.update_norm for norm in by_round[number]], log)
        for clipped, colour, marker in ((False, KEPT, MARKERS[0]), (True, CLIPPED, MARKERS[2])):
            some = [norm for norm in norms if bool(norm.clipped) == clipped]
            if some:
                aside = [norm.round + _aside(norm, by_round[norm.round]) for norm in some]
                label = "clipped" if clipped else "client" if norms[0].clipped is None else "not clipped"
                heights = [norm.update_norm for norm in some]
                axes.scatter(aside, heights, s=16, color=colour, marker=marker, linewidths=0, label=label, zorder=3)
    _bound(axes, by_round)
    if norms:
        axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=4)
        axes.margins(y=0.14)


def _aside(norm: "UpdateNorm", same_round: "Sequence[UpdateNorm]") -> float:
    """Where in the round's column a client's dot stands, so that dots do not hide each other."""
    place = [other.client for other in same_round].index(norm.client)
    return 0.4 * ((place + 0.5) / len(same_round) - 0.5)


def _violin(axes: Any, number: int, values: Sequence[float], log: bool) -> None:
    from matplotlib.mlab import GaussianKDE

    scale = np.log10(values) if log else np.asarray(values)
    if len(scale) < 3 or np.ptp(scale) <= 1e-9 * max(1.0, float(np.abs(scale).max())):
        return
    heights = np.linspace(scale.min(), scale.max(), 100)
    density = GaussianKDE(scale)(heights)
    width = 0.42 * density / density.max()
    heights = 10**heights if log else heights
    axes.fill_betweenx(heights, number - width, number + width, color="#bbbbbb", alpha=0.5, linewidth=0)


def _bound(axes: Any, by_round: "Mapping[int, Sequence[UpdateNorm]]") -> None:
    """One dashed line; where clients have bounds of their own, their mean, and dots for the least and the largest."""
    bounds = {}
    for number, norms in by_round.items():
        found = [norm.bound for norm in norms if norm.bound is not None and math.isfinite(norm.bound)]
        if found:
            bounds[number] = (min(found), sum(found) / len(found), max(found))
    if not bounds:
        return
    apart = any(high > low * (1 + 1e-9) for low, _, high in bounds.values())
    if len(bounds) == 1:
        ((number, (_, middle, _)),) = bounds.items()
        x, y = [number - 0.5, number + 0.5], [middle, middle]
    else:
        x, y = list(bounds), [middle for _, middle, _ in bounds.values()]
    axes.plot(x, y, color=BOUND, linestyle=STYLES[1], linewidth=1.4, label="mean bound" if apart else "bound", zorder=4)
    if apart:
        for side in (0, 2):
            line = [bounds[number][side] for number in bounds]
            label = "least and largest bound" if side == 0 else None
            axes.plot(list(bounds), line, color=BOUND, linestyle=STYLES[3], linewidth=1.0, label=label, zorder=4)


def _histogram(axes: Any, norms: "Sequence[UpdateNorm]", log: bool) -> None:
    values = [norm.update_norm for norm in norms]
    if not values:
        return
    low, high = min(values), max(values)
    if high <= low:
        low, high = 0.9 * low, 1.1 * high or 1.0
    edges = np.geomspace(low, high, 25) if log else np.linspace(low, high, 25)
    parts = [[norm.update_norm for norm in norms if bool(norm.clipped) == clipped] for clipped in (False, True)]
    axes.hist(parts, bins=edges, orientation="horizontal", stacked=True, color=[KEPT, CLIPPED], hatch=["", "////"])
    axes.set_xlabel("updates, all rounds")
    axes.tick_params(axis="y", labelleft=False)


def _ratios(axes: Any, rounds: Mapping[int, Mapping[str, float]], shown: Sequence[str]) -> None:
    least = 0.0
    for place, name in enumerate(shown):
        points = [(number, found[name]) for number, found in rounds.items() if name in found]
        least = min([least, *(value for _, value in points if math.isfinite(value))])
        axes.plot(
            [number for number, _ in points],
            [value for _, value in points],
            label=RATIOS[name],
            color=COLOURS[(1, 0, 2, 3)[place % 4]],
            linestyle=STYLES[place % len(STYLES)],
            marker=MARKERS[place],
            markersize=4,
            markevery=(place % max(1, len(points) // 8), max(1, len(points) // 8)),
            linewidth=1.5,
        )
    axes.set_ylim(least - 0.05, 1.05)
