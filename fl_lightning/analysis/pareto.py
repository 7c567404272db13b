"""The Pareto front of a sweep with several objectives: the settings that no other beats in one without losing another.

A front holds settings that promise the same, and, unless epsilon is itself an objective, at the same epsilon: an
accuracy is comparable only with one that was bought at the same price. Settings that protect nothing have a front of
their own, where epsilon is no objective.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_lightning.analysis.costs import quantity
from fl_lightning.analysis.document import Block, Heading, Notes, Table
from fl_lightning.analysis.promises import EPSILON_AXES, Family, Row, families, groups
from fl_lightning.analysis.statistics import mean
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial, by_setting

if TYPE_CHECKING:
    from fl_lightning.analysis.report import Sweep

Objectives = Sequence[tuple[str, str]]
"""(metric, "max" or "min") of each."""


@dataclass(frozen=True)
class Front:
    """The settings of one promise, those on the front apart.

    Attributes:
        promise: in words; empty where nothing is private.
        objectives: in the order of the sweep.
        best: setting -> its objectives, those on the front, the best by the first objective first.
        others: setting -> its objectives, those that another setting beats.
        first: the number of the first one on the front; numbers run on over the fronts of a sweep.
        family: which of the sweep's families it belongs to.
    """

    promise: str
    objectives: Objectives
    best: Mapping[str, tuple[float, ...]]
    others: Mapping[str, tuple[float, ...]]
    first: int = 1
    family: int = 0

    @property
    def numbers(self) -> dict[str, int]:
        """Setting -> its number, of those on the front."""
        return {setting: number for number, setting in enumerate(self.best, start=self.first)}


@dataclass(frozen=True)
class Outcome:
    """What a sweep's trials come to: rows of the table, who may stand beside whom, and the fronts, if it has any."""

    rows: list[Row]
    families: list[Family]
    fronts: list[Front]

    def pareto(self) -> list[dict[str, Any]] | None:
        """The table's rows on a front, each with its `promise` and `objectives`; None for a sweep with one metric."""
        if not self.fronts:
            return None
        by = {row["setting"]: row for row in self.rows}
        return [
            {**by[setting], "promise": front.promise, "objectives": _named(front, values)}
            for front in self.fronts
            for setting, values in front.best.items()
        ]


def _named(front: Front, values: Sequence[float]) -> dict[str, float]:
    return {metric: value for (metric, _), value in zip(front.objectives, values, strict=True)}


def outcome(sweep: "Sweep", trials: Sequence[Trial], target: float | None = None) -> Outcome:
    """The rows of `settings_table`, those on a front marked with `pareto` and `front`, their families and fronts."""
    rows = settings_table(trials, sweep.skipped, target)
    objectives = sweep.aims
    named = [metric for metric, _ in objectives]
    found = families(rows, (*sweep.axes, *(EPSILON_AXES if "epsilon" in named and len(named) > 1 else ())))
    made = fronts(trials, found, objectives)
    numbers = {setting: number for front in made for setting, number in front.numbers.items()}
    for row in rows:
        row["front"] = numbers.get(row["setting"])
        row["pareto"] = row["front"] is not None
    return Outcome(rows, found, made)


def achieved(group: Sequence[Trial], metric: str) -> float | None:
    """A setting's objective over its finished seeds; None where it was not measured, or is not a number.

    It is the mean, but of epsilon the largest, as in the table: a promise is no average. Where a seed has none, or
    protects nothing, epsilon is infinite. Where a scheduler has ended some seeds, all count at their last common round.
    """
    finished = [trial for trial in group if trial.finished]
    if metric == "epsilon":
        spent = [trial.measured("epsilon") if trial.privacy else None for trial in finished]
        return max((math.inf if value is None else value for value in spent), default=None)
    if any(trial.stopped for trial in finished):  # the last round that all seeds have measured
        curves = [dict(trial.history.get(metric, ())) for trial in finished]
        common = set.intersection(*(set(curve) for curve in curves))
        values = [curve[max(common)] for curve in curves] if common else []
        return mean([float(value) for value in values])
    centre = mean([value for trial in finished if (value := trial.measured(metric)) is not None])
    return None if centre is None or math.isnan(centre) else centre


def fronts(trials: Sequence[Trial], found: Sequence[Family], objectives: Objectives) -> list[Front]:
    """One front for each promise (and budget, unless epsilon is an objective); none with fewer than two objectives.

    A setting that has not measured an objective, or not as a finite number, is on no front and beats none.

    Args:
        trials: of the sweep.
        found: from `families`; with epsilon as an objective a family has several budgets.
        objectives: what is weighed.
    """
    if len(objectives) < 2:
        return []
    by, made, number = by_setting(trials), [], 1
    for family, promise, settings in _groups(found, any(metric == "epsilon" for metric, _ in objectives)):
        values = {setting: [achieved(by[setting], metric) for metric, _ in objectives] for setting in settings}
        known = {
            setting: tuple(item for item in measured if item is not None)
            for setting, measured in values.items()
            if all(item is not None and math.isfinite(item) for item in measured)
        }
        if not known:
            continue
        ways = [1.0 if way == "max" else -1.0 for _, way in objectives]
        beaten = {
            setting for setting, own in known.items() if any(dominates(other, own, ways) for other in known.values())
        }
        order = sorted((s for s in known if s not in beaten), key=lambda s: -ways[0] * known[s][0])
        best = {setting: known[setting] for setting in order}
        others = {setting: known[setting] for setting in known if setting in beaten}
        made.append(Front(promise, objectives, best, others, number, family))
        number += len(best)
    return made


def dominates(one: Sequence[float], other: Sequence[float], ways: Sequence[float]) -> bool:
    """Whether `one` is as good in all objectives and better in at least one; `ways` are 1 where more is better, or -1.

    >>> dominates((0.9, 2.0), (0.8, 2.0), (1.0, -1.0)), dominates((0.9, 2.0), (0.9, 2.0), (1.0, -1.0))
    (True, False)
    """
    gains = [way * (a - b) for a, b, way in zip(one, other, ways, strict=True)]
    return min(gains) >= 0 and max(gains) > 0


def _groups(found: Sequence[Family], together: bool) -> list[tuple[int, str, list[str]]]:
    """(family, promise in words, settings) of what may share a front."""
    if together:
        private = [(number, family) for number, family in enumerate(found) if family.budgets]
        return [(number, family.title(), family.settings) for number, family in private]
    of = {setting: number for number, family in enumerate(found) for setting in family.settings}
    return [(of.get(settings[0], 0) if settings else 0, promise, list(settings)) for promise, settings in groups(found)]


def front_words(front: Front) -> str:
    """`test_accuracy (max) and epsilon (min)`."""
    named = [f"{metric} ({way})" for metric, way in front.objectives]
    return " and ".join([", ".join(named[:-1]), named[-1]])


def front_blocks(front: Front, labels: Mapping[str, str], trials: Sequence[Trial]) -> list[Block]:
    """The front's table: number, setting, seeds, objectives.

    Args:
        front: whose.
        labels: setting -> its short name.
        trials: of the sweep.
    """
    seeds = {setting: sum(trial.finished for trial in group) for setting, group in by_setting(trials).items()}
    headings = ["front", "setting", "seeds", *(metric for metric, _ in front.objectives)]
    lines = [
        [str(number), labels[setting], str(seeds[setting]), *map(_shown, front.best[setting])]
        for setting, number in front.numbers.items()
    ]
    which = f", {front.promise}" if front.promise else ""
    said = [
        f"On the front of {front_words(front)} are {len(front.best)} of {len(front.best) + len(front.others)} settings"
        f"{which}: no other one is as good in all of these and better in one, by the means over seeds"
        + ("; of epsilon the largest." if any(metric == "epsilon" for metric, _ in front.objectives) else ".")
    ]
    return [Heading(f"Pareto front{which}"), Table(headings, lines, name=f"Pareto front{which}"), Notes(said)]


def _shown(value: float) -> str:
    """Four digits behind the point, or three in all of what is large.

    >>> _shown(0.98765), _shown(12345.0)
    ('0.9877', '12.3 k')
    """
    return f"{value:.4f}" if abs(value) < 100 else quantity(value)
