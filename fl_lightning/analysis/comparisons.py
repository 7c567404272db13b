"""Each setting over its seeds, and against the best of those with the same promise and budget, in pairs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fl_lightning.analysis.document import Table
from fl_lightning.analysis.paired import Paired, holm, paired
from fl_lightning.analysis.promises import Family, groups
from fl_lightning.analysis.statistics import confidence_interval, mean, sample_sd
from fl_lightning.analysis.trials import Trial, by_setting, comparable

OTHER_PARTITIONS = "no seed with the same partition"
MINUS = "\u2212"

NOTES = (
    "The interval is Student's for the mean at 95 %. Differences are taken seed by seed on the same partition: the "
    "paired t test below 10 pairs, Wilcoxon's signed-rank test from 10 on, no p-value below 3. p is two-sided and "
    "corrected after Holm for all comparisons with the same best; d_z is the mean difference over its standard "
    "deviation. Seeds needed: for power 0.8 at 0.05 over the number of comparisons, if the effect is as seen here.",
    "The best was chosen by the same numbers that it is tested on, so these p-values are rather too small.",
)

FIELDS = ("pairs", "best_minus_this", "test", "p", "p_holm", "d_z", "seeds_needed", "comparison")


@dataclass(frozen=True)
class Standing:
    """A setting's metric over its seeds, and how it stands to the best of its group.

    Attributes:
        setting: which.
        n: finished seeds that measured the metric.
        mean: over them; None of none.
        sd: sample standard deviation; None for n < 2.
        interval: 95 % for the mean; None for n < 2.
        best: the best setting with the same promise and budget; None where nothing is there to compare.
        result: `best - this`, in pairs; None for the best itself and where there is none.
    """

    setting: str
    n: int
    mean: float | None
    sd: float | None
    interval: tuple[float, float] | None
    best: str | None = None
    result: Paired | None = None

    @property
    def is_best(self) -> bool:
        return self.best == self.setting

    def fields(self) -> dict[str, Any]:
        """FIELDS by name, None where there is nothing; `comparison` says "best" or why there is no p-value."""
        if self.result is None:
            return {**dict.fromkeys(FIELDS), "comparison": "best" if self.is_best else None}
        found = self.result
        values = (found.n, found.difference, found.test, found.p, found.p_holm, found.effect, found.needed, found.words)
        return {**dict(zip(FIELDS, values, strict=True)), "comparison": found.words or None}


def standings(
    trials: Sequence[Trial], found: Sequence[Family], metric: str = "test_accuracy", mode: str = "max"
) -> dict[str, Standing]:
    """All settings with a finished trial, by setting.

    The best has the best mean, the first of several equal ones; a mean that is not finite is never the best. Settings
    of different promises or budgets are not compared, nor are private ones with those that protect nothing.

    Args:
        trials: of the sweep.
        found: from `families`.
        metric: what is compared.
        mode: "max" or "min".
    """
    by = by_setting(trials)
    named = {setting: _standing(setting, group, metric) for setting, group in by.items()}
    named = {setting: standing for setting, standing in named.items() if standing.n}
    for _, settings in groups(found):
        able = [named[setting] for setting in settings if setting in named and _finite(named[setting].mean)]
        shown = [setting for setting in settings if setting in named]
        if len(shown) < 2 or not able:
            continue
        whole = comparable({standing.setting: by[standing.setting] for standing in able})
        able = [standing for standing in able if standing.setting in whole]
        best = (max if mode == "max" else min)(able, key=lambda standing: standing.mean or 0.0).setting
        others = [setting for setting in shown if setting != best]
        results = holm([_pairs(by[best], by[setting], metric) for setting in others])
        for setting, result in zip(others, results, strict=True):
            named[setting] = replace(named[setting], best=best, result=result)
        named[best] = replace(named[best], best=best)
    return named


def _standing(setting: str, group: Sequence[Trial], metric: str) -> Standing:
    values = [value for trial in group if (value := trial.measured(metric)) is not None]
    finite = all(map(math.isfinite, values))
    interval = confidence_interval(values) if finite else None
    return Standing(setting, len(values), mean(values), sample_sd(values), interval)


def _pairs(best: Sequence[Trial], other: Sequence[Trial], metric: str) -> Paired:
    mine, theirs = _by_seed(best, metric), _by_seed(other, metric)
    common = [seed for seed in mine if seed in theirs]
    alike = [seed for seed in common if mine[seed].partition_sha256 == theirs[seed].partition_sha256]
    result = paired([_value(mine[s], metric) for s in alike], [_value(theirs[s], metric) for s in alike])
    return replace(result, words=OTHER_PARTITIONS) if common and not alike else result


def _by_seed(group: Sequence[Trial], metric: str) -> dict[int, Trial]:
    """Whole runs only: what was measured after another number of rounds is no pair."""
    return {trial.seed: trial for trial in group if trial.measured(metric) is not None and not trial.stopped}


def _value(trial: Trial, metric: str) -> float:
    value = trial.measured(metric)
    assert value is not None, "only trials that measured it are paired"
    return value


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def as_json(named: Mapping[str, Standing]) -> list[dict[str, Any]]:
    """For a summary: plain values, None for what is not finite."""
    found = [asdict(standing) for standing in named.values()]
    for item in found:
        item |= {key: item[key] if _finite(item[key]) else None for key in ("mean", "sd")}
    return found


def standings_table(
    named: Sequence[Standing], labels: Mapping[str, str], metric: str, name: str, bold: Collection[str]
) -> Table:
    """The table over seeds, of settings that may share one.

    Args:
        named: in the order of the rows.
        labels: setting -> its short name.
        metric: what was measured.
        name: the table's.
        bold: the settings whose best is marked; another best is that of what protects nothing, beside private ones.
    """
    headings = ["setting", "seeds", f"mean {metric}", "sd", "95 % CI"]
    compared = any(standing.best is not None for standing in named)
    if compared:
        headings += ["pairs", f"best {MINUS} this", "test", "p (Holm)", "d_z", "seeds needed"]
    lines = [_line(standing, labels[standing.setting], compared, standing.setting in bold) for standing in named]
    column = headings.index(f"mean {metric}")
    best = frozenset(
        (row, column) for row, standing in enumerate(named) if standing.is_best and standing.setting in bold
    )
    return Table(headings, lines, best, name)


def _line(standing: Standing, label: str, compared: bool, bold: bool) -> list[str]:
    low_high = "-" if standing.interval is None else "{:.4f} to {:.4f}".format(*standing.interval)
    line = [label, str(standing.n), _number(standing.mean), _number(standing.sd), low_high]
    if not compared:
        return line
    result = standing.result
    if result is None:
        title = "best" if bold else "best without privacy"
        return [*line, "-", title if standing.is_best else "-", "-", "-", "-", "-"]
    told = result.words or "-"
    if result.p_holm is not None:
        told = f"{result.p_holm:.2g}" if result.p_holm >= 0.001 else "< 0.001"
    needed = str(result.needed) if result.needed is not None else "-"
    if result.needed is None and result.effect is not None:
        needed = "> 9999"
    effect = "-" if result.effect is None else f"{result.effect:.2f}"
    return [*line, str(result.n), _number(result.difference, sign=True), result.test or "-", told, effect, needed]


def _number(value: float | None, sign: bool = False) -> str:
    return "-" if value is None else f"{value:{'+' if sign else ''}.4f}"
