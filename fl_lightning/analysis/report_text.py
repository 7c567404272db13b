"""A sweep's report as markdown: tables of what compares, with what every number means."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.analysis.promises import Family, Row, mismatch
from fl_lightning.analysis.report_figures import Picture
from fl_lightning.analysis.tables import Own, caveats, markdown, pivot, settings_markdown
from fl_lightning.analysis.trials import Trial, axis_text

if TYPE_CHECKING:
    from fl_lightning.analysis.report import Sweep


def tables(rows: Sequence[Row], found: Sequence[Family], own: Own) -> str:
    """One table for each family, with its caption, and the sentence that says why there are several."""
    parts = [f"{said}\n"] if (said := mismatch(found)) else []
    for family in found:
        if len(found) > 1:
            budget = family.budgets[0] if len(family.budgets) == 1 else None
            parts.append(f"## Promise: {family.title(budget)}\n")
        parts.append(settings_markdown(rows_of(family, rows), own))
    return "\n".join(parts)


def rows_of(family: Family, rows: Sequence[Row]) -> list[Row]:
    """The family's rows and its references, in the order of the rows."""
    shown = {*family.settings, *family.references}
    return [row for row in rows if row["setting"] in shown]


def report_text(
    sweep: "Sweep",
    trials: Sequence[Trial],
    rows: Sequence[Row],
    found: Sequence[Family],
    pictures: Sequence[Picture],
    best: Sequence[Mapping[str, Any]],
    selection: Mapping[str, Any] | None,
) -> str:
    """The whole report.

    Args:
        sweep: what was asked for.
        trials: what came of it.
        rows: from `settings_table`.
        found: from `families`.
        pictures: from `draw`.
        best: from `best_settings`.
        selection: from `selection_cost`.
    """
    parts = [f"# {sweep.name}: sweep {sweep.sweep_id}\n"]
    parts.append(f"{_count(len(rows), 'setting')}, {_count(len(trials), 'trial')}. {_common(sweep)}\n")
    parts.append(tables(rows, found, sweep.settings))
    for family in found:
        if (across := pivot(rows_of(family, rows))) is not None:
            which = f", {family.title()}" if len(found) > 1 else ""
            parts += [f"## Algorithms across settings{which}\n", markdown(*across)]
            parts += [f"{line}\n" for line in caveats(rows_of(family, rows))]
    parts += [_best(item, sweep) for item in best]
    if best:
        parts.append("Chosen on the test set, so it is optimistic.\n")
    if selection is not None:
        parts.append(f"{selection['words']}\n")
    parts += [f"![{picture.words}]({picture.path.name})\n" for picture in pictures]
    failures = [trial for trial in trials if not trial.finished]
    if failures:
        headings = ["trial", "parameters", "seed", "status", "error"]
        parts += ["## Trials that did not finish\n", markdown(headings, [_failure(trial) for trial in failures])]
    return "\n".join(parts)


def _best(best: Mapping[str, Any], sweep: "Sweep") -> str:
    swept = ", ".join(f"{key}={axis_text(value)}" for key, value in best["params"].items()) or "the only setting"
    among = f" ({best['promise']})" if best["promise"] else ""
    return (
        f"Best mean {sweep.metric} ({sweep.mode}){among}: {swept}, {best['mean']:.4f} over "
        f"{_count(best['n'], 'seed')}.\n"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _common(sweep: "Sweep") -> str:
    """What all trials share, in a sentence, as far as the sweep does not vary it."""
    shown = ("data.name", "partition.kind", "partition.alpha", "model.kind", "fl.num_clients", "fl.rounds")
    varied = {*sweep.axes, *(key for values in sweep.settings.values() for key in values)}
    facts = []
    for key in shown:
        value: Any = sweep.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        group = key.partition(".")[0]
        if value is not None and key not in varied and group not in varied:
            facts.append(f"{key}={axis_text(value)}")
    return f"All trials: {', '.join(facts)}." if facts else ""


def _failure(trial: Trial) -> list[str]:
    swept = ", ".join(f"{key}={axis_text(value)}" for key, value in trial.params.items())
    error = f"{trial.error['type']}: {trial.error['message']}" if trial.error else "-"
    return [trial.trial_id, swept, str(trial.seed), trial.status, error]
