"""The figure of a Pareto front: the first objective against each other one; shapes tell what colours tell as well."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.analysis.figures import COLOURS, blank, folded, saved
from fl_lightning.analysis.pareto import Front

OTHERS = "#7f7f7f"
ABOVE = 2.0
"""How many times the largest epsilon is as large as the smallest before their axis is logarithmic."""


def draw_front(
    front: Front,
    labels: Mapping[str, str],
    path: Path,
    *,
    title: str,
    references: Sequence[tuple[str, float]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Draws the settings on the front as numbered discs and the others as hollow grey squares.

    With two objectives a stepped line joins those on the front: what lies behind it is beaten. With more there is a
    panel for each further one, and a setting on the front may look beaten in a panel.

    Args:
        front: what to draw.
        labels: setting -> its short name, for the legend.
        path: the PNG file to write; its folder is made.
        title: above the axes; says the promise.
        references: (label, value of the first objective) of runs without privacy, dotted across the axes.
        notes: sentences that belong to what is drawn, under the axes.

    Returns:
        `path`.
    """
    (upright, way), *across = front.objectives
    figure, axes = blank(max(4.8, 1.4 + 0.17 * len(front.best)), title, notes, panels=len(across))
    panels = axes if len(across) > 1 else [axes]
    for column, (panel, (metric, _)) in enumerate(zip(panels, across, strict=True), start=1):
        _points(panel, front, column, line=len(across) == 1)
        for number, (label, value) in enumerate(references, start=1):
            colour = COLOURS[number % len(COLOURS)]
            panel.axhline(value, label=folded(label), color=colour, linestyle=":", linewidth=1.4)
        _axis(panel, metric, [values[column] for values in (*front.best.values(), *front.others.values())])
    panels[0].set_ylabel(f"{upright.replace('_', ' ')} ({'more' if way == 'max' else 'less'} is better)")
    _legend(figure, panels[0], front, labels)
    return saved(figure, path)


def _points(panel: Any, front: Front, column: int, *, line: bool) -> None:
    others, best = list(front.others.values()), list(front.best.values())
    size = 130 if len(best) < 100 else 190
    panel.scatter(
        [values[column] for values in others],
        [values[0] for values in others],
        marker="s",
        s=34,
        facecolors="none",
        edgecolors=OTHERS,
        linewidths=1.1,
        label="not on the front",
    )
    if line:
        ordered = sorted((values[column], values[0]) for values in best)
        less = front.objectives[column][1] == "min"
        panel.step(*zip(*ordered, strict=True), where="post" if less else "pre", color=COLOURS[0], linewidth=1.2)
    x, y = [values[column] for values in best], [values[0] for values in best]
    panel.scatter(x, y, s=size, color=COLOURS[0], zorder=3, label="on the front")
    for number, values in enumerate(best, start=front.first):
        place = {"ha": "center", "va": "center", "fontsize": 7.5, "color": "white", "fontweight": "bold"}
        panel.annotate(str(number), (values[column], values[0]), zorder=4, **place)
    panel.margins(0.08)


def _axis(panel: Any, metric: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

    panel.set_xlabel(metric.replace("_", " ") + (" (logarithmic)" if (log := _is_wide(metric, values)) else ""))
    if log:
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
    elif metric in ("gradients", "upload_bytes", "seconds"):
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))


def _is_wide(metric: str, values: Sequence[float]) -> bool:
    return metric == "epsilon" and min(values) > 0 and max(values) > ABOVE * min(values)


def _legend(figure: Any, panel: Any, front: Front, labels: Mapping[str, str]) -> None:
    """What the shapes mean, and below it every number's setting."""
    from matplotlib.lines import Line2D

    handles, named = panel.get_legend_handles_labels()
    for setting, number in front.numbers.items():
        handles.append(Line2D([], [], linestyle="none"))
        named.append(folded(f"{number}: {labels[setting]}"))
    figure.legend(
        handles,
        named,
        loc="outside right upper",
        fontsize=9 if len(front.best) <= 16 else 7,
        alignment="left",
        handlelength=1.6,
        frameon=False,
        ncols=1 + (len(named) - 1) // 40,
    )
