"""Figures, drawn without a display and readable in grey and by colour-blind eyes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from fl_lightning.analysis.statistics import Point

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DOTS_PER_INCH = 150
BAND_ALPHA = 0.1
LABEL_WIDTH = 44
"""Characters in a line of the legend, so that a long label does not take the axes' room."""

TITLE_WIDTH, NOTE_WIDTH = 80, 150
"""Characters in a line above and below the axes."""
NOTE_HEIGHT = 0.16
"""Inches of a line below the axes."""


@dataclass(frozen=True)
class Curve:
    """A named curve over rounds, with the spread over seeds in its points."""

    label: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Trade:
    """Accuracy at several epsilons of one method: (epsilon, mean, sample standard deviation or None) each."""

    label: str
    points: Sequence[tuple[float, float, float | None]]


def accuracy_curves(
    curves: Sequence[Curve], path: Path, *, title: str, ylabel: str = "test accuracy", notes: Sequence[str] = ()
) -> Path:
    """Draws mean lines with a band of one standard deviation over seeds, and the legend beside the axes.

    Colour, line style and marker all differ, with periods 7, 4 and 9: 252 curves before two look the same.

    Args:
        curves: in the order of the legend; one without points is named there and drawn nowhere.
        path: the PNG file to write; its folder is made.
        title: above the axes.
        ylabel: of the vertical axis.
        notes: sentences that belong to what is drawn, under the axes.

    Returns:
        `path`.
    """
    from matplotlib.ticker import MaxNLocator

    many = len(curves) > 16
    figure, axes = blank(max(4.8, 1.2 + 0.2 * min(len(curves), 40)), title, notes)
    bands = False
    for number, item in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        rounds = [point.round for point in item.points]
        means = [point.mean for point in item.points]
        axes.plot(
            rounds,
            means,
            label=folded(item.label),
            color=colour,
            linestyle=STYLES[number % len(STYLES)],
            linewidth=1.6,
            marker=MARKERS[number % len(MARKERS)],
            markersize=4.5,
            # Markers of different curves fall on different rounds, so they do not hide each other.
            markevery=(number % max(1, len(rounds) // 8), max(1, len(rounds) // 8)),
        )
        spread = [point for point in item.points if point.sd is not None]
        if spread:
            bands = True
            axes.fill_between(
                [point.round for point in spread],
                [max(0.0, point.mean - (point.sd or 0.0)) for point in spread],
                [point.mean + (point.sd or 0.0) for point in spread],
                color=colour,
                alpha=BAND_ALPHA,
                linewidth=0,
            )
    axes.set_xlabel("round")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if curves:
        columns = 1 + (len(curves) - 1) // 40
        figure.legend(
            loc="outside right upper",
            title="mean, band: \u00b11 sd over seeds" if bands else None,
            title_fontsize=9,
            alignment="left",
            fontsize=7 if many else 9,
            handlelength=3.2,
            frameon=False,
            ncols=columns,
        )
    return saved(figure, path)


@dataclass(frozen=True)
class Spending:
    """Accuracy by what it cost: `spent[name][i]` belongs to `points[i]`; a cost that was not recorded is absent."""

    label: str
    points: Sequence[Point]
    spent: Mapping[str, Sequence[float]]


def accuracy_by_cost(
    spendings: Sequence[Spending], path: Path, axes: Mapping[str, str], *, title: str, notes: Sequence[str] = ()
) -> Path:
    """Draws mean accuracy against each cost, side by side under one legend; lines look as in `accuracy_curves`.

    Args:
        spendings: in the order of the legend.
        path: the PNG file to write; its folder is made.
        axes: cost -> what its axis says.
        title: above the panels.
        notes: sentences that belong to what is drawn, under the panels.

    Returns:
        `path`.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure, panels = blank(4.2, title, notes, panels=len(axes))
    for panel, (name, words) in zip(panels, axes.items(), strict=True):
        for number, item in enumerate(spendings):
            spent = item.spent.get(name, ())
            panel.plot(
                spent,
                [point.mean for point in item.points] if spent else [],
                label=folded(item.label),
                color=COLOURS[number % len(COLOURS)],
                linestyle=STYLES[number % len(STYLES)],
                linewidth=1.6,
                marker=MARKERS[number % len(MARKERS)],
                markersize=4.5,
                markevery=(number % max(1, len(spent) // 4), max(1, len(spent) // 4)),
            )
        panel.set_xlabel(words)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
    panels[0].set_ylabel("test accuracy")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=3,
        fontsize=8,
        handlelength=3.2,
        frameon=False,
    )
    return saved(figure, path)


def accuracy_against_epsilon(
    trades: Sequence[Trade],
    path: Path,
    *,
    title: str,
    ticks: Sequence[float] = (),
    references: Sequence[tuple[str, float]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Draws final accuracy against epsilon, one line per method, on a logarithmic axis of epsilons of ONE promise.

    Args:
        trades: a point per budget, in any order.
        path: the PNG file to write; its folder is made.
        title: above the axes; says the promise.
        ticks: the budgets; none: the points' own epsilons, which lie just below their budgets.
        references: (label, mean accuracy) of runs without privacy, dotted across the axes.
        notes: sentences that belong to what is drawn, under the axes.

    Returns:
        `path`.
    """
    from matplotlib.ticker import NullLocator

    figure, axes = blank(4.8, title, notes)
    ticks = sorted(ticks) or sorted({epsilon for trade in trades for epsilon, _, _ in trade.points})
    for number, trade in enumerate(trades):
        points = sorted(trade.points)
        axes.errorbar(
            [epsilon for epsilon, _, _ in points],
            [centre for _, centre, _ in points],
            yerr=[spread or 0.0 for _, _, spread in points],
            label=folded(trade.label),
            color=COLOURS[number % len(COLOURS)],
            linestyle=STYLES[number % len(STYLES)],
            marker=MARKERS[number % len(MARKERS)],
            linewidth=1.6,
            markersize=5,
            capsize=3,
        )
    for number, (label, centre) in enumerate(references, start=len(trades)):
        colour = COLOURS[number % len(COLOURS)]
        axes.axhline(centre, label=folded(label), color=colour, linestyle=":", linewidth=1.4)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("epsilon")
    axes.set_ylabel("test accuracy")
    spread = any(item is not None for trade in trades for _, _, item in trade.points)
    figure.legend(
        loc="outside right upper",
        title="mean, bar: \u00b11 sd over seeds" if spread else None,
        title_fontsize=9,
        alignment="left",
        fontsize=9,
        handlelength=3.2,
        frameon=False,
    )
    return saved(figure, path)


def blank(height: float, title: str, notes: Sequence[str], panels: int = 1) -> tuple[Any, Any]:
    """A figure with one pair of axes, or a list of `panels` beside each other, the title above and the notes below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text = "\n".join(fill(note, NOTE_WIDTH, subsequent_indent="  ") for note in notes)
    lines = text.count("\n") + 1 if text else 0
    figure = Figure(figsize=(10.0, height + NOTE_HEIGHT * lines), layout="constrained")
    FigureCanvasAgg(figure)
    every = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    if panels == 1:
        every[0].set_title(fill(title, TITLE_WIDTH), fontsize=11, loc="left")
    else:
        figure.suptitle(fill(title, TITLE_WIDTH + 30), fontsize=11, x=0.01, ha="left")
    for axes in every:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if text:
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8)
    return figure, every[0] if panels == 1 else every


def folded(text: str) -> str:
    """A label for a legend, in lines of LABEL_WIDTH."""
    return "\n".join(fill(line, LABEL_WIDTH, subsequent_indent="  ") for line in text.split("\n"))


def saved(figure: Any, path: Path) -> Path:
    """Writes the figure; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
