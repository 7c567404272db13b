"""Figures, drawn without a display and readable in grey and by colour-blind eyes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from fl_lightning.analysis.statistics import Point

# Okabe and Ito's palette without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DOTS_PER_INCH = 150
BAND_ALPHA = 0.1
LABEL_WIDTH = 44
"""Characters in a line of the legend, so that a long label does not take the axes' room."""


@dataclass(frozen=True)
class Curve:
    """A named curve over rounds, with the spread over seeds in its points."""

    label: str
    points: Sequence[Point]


def accuracy_curves(curves: Sequence[Curve], path: Path, *, title: str, ylabel: str = "test accuracy") -> Path:
    """Draws mean lines with a band of one standard deviation over seeds, and the legend beside the axes.

    Colour, line style and marker all differ, with periods 7, 4 and 9: 252 curves before two look the same.

    Args:
        curves: in the order of the legend; one without points is named there and drawn nowhere.
        path: the PNG file to write; its folder is made.
        title: above the axes.
        ylabel: of the vertical axis.

    Returns:
        `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    many = len(curves) > 16
    figure = Figure(figsize=(10.0, max(4.8, 1.2 + 0.2 * min(len(curves), 40))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bands = False
    for number, item in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        rounds = [point.round for point in item.points]
        means = [point.mean for point in item.points]
        axes.plot(
            rounds,
            means,
            label="\n".join(fill(line, LABEL_WIDTH, subsequent_indent="  ") for line in item.label.split("\n")),
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
    axes.set_title(title, fontsize=11, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path
