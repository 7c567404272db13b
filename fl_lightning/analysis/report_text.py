"""A sweep's report in blocks: tables of what compares, with what every number means."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.analysis.comparisons import NOTES as STANDING_NOTES
from fl_lightning.analysis.comparisons import Standing, standings_table
from fl_lightning.analysis.costs import cost_cells, cost_headings, cost_notes
from fl_lightning.analysis.document import Block, Figure, Heading, Notes, Table, Text
from fl_lightning.analysis.lineage import lineage_blocks
from fl_lightning.analysis.pareto import Outcome, front_blocks
from fl_lightning.analysis.promises import Family, Row, mismatch
from fl_lightning.analysis.report_figures import Picture
from fl_lightning.analysis.scored import selection_words
from fl_lightning.analysis.tables import (
    Own,
    caption,
    caveats,
    cells,
    columns,
    epsilon_text,
    pivot,
    settings_markdown,
)
from fl_lightning.analysis.trials import Trial, axis_text, labels

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


def report_blocks(
    sweep: "Sweep",
    trials: Sequence[Trial],
    come: Outcome,
    pictures: Sequence[Picture],
    best: Sequence[Mapping[str, Any]],
    selection: Mapping[str, Any] | None,
    compared: Mapping[str, Standing],
    extras: Sequence[Figure] = (),
) -> list[Block]:
    """The whole report.

    Args:
        sweep: what was asked for.
        trials: what came of it.
        come: from `outcome`.
        pictures: from `draw`.
        best: from `best_settings`.
        selection: from `selection_cost`.
        compared: from `standings`.
        extras: further figures, for formats that hold them.
    """
    rows, found = come.rows, come.families
    blocks: list[Block] = [Heading(f"{sweep.name}: sweep {sweep.sweep_id}", 1)]
    blocks.append(Text(f"{_count(len(rows), 'setting')}, {_count(len(trials), 'trial')}. {_common(sweep)}"))
    if 0 < len(trials) < sweep.num_trials:
        blocks.append(
            Text(
                f"Unfinished: {sweep.num_trials - len(trials)} of {_count(sweep.num_trials, 'trial')} had not "
                f"begun. If the sweep was stopped, `fl-lightning sweep --resume {sweep.sweep_id}` goes on."
            )
        )
    if said := budget_words(sweep):
        blocks.append(Text(said))
    if said := mismatch(found):
        blocks.append(Text(said))
    named = labels(trials)
    for front in come.fronts:
        blocks += front_blocks(front, named, trials)
    for family in found:
        blocks += _family(family, rows_of(family, rows), len(found) > 1, sweep, compared, named)
    for family in found:
        if (across := pivot(rows_of(family, rows))) is not None:
            which = f", {family.title()}" if len(found) > 1 else ""
            blocks += [Heading(f"Algorithms across settings{which}"), Table(*across)]
            blocks += [Notes([line]) for line in caveats(rows_of(family, rows))]
    blocks += [Text(best_words(item, sweep)) for item in best]
    if (best or come.fronts) and (words := selection_words(sweep)):
        blocks.append(Text(words))
    if selection is not None:
        blocks.append(Text(str(selection["words"])))
    blocks += lineage_blocks(trials)
    blocks += [Figure(picture.path, picture.words) for picture in pictures]
    blocks += extras
    failures = [trial for trial in trials if not trial.finished]
    if failures:
        headings = ["trial", "parameters", "seed", "status", "error"]
        blocks.append(Heading("Trials that did not finish"))
        blocks.append(Table(headings, [_failure(trial) for trial in failures]))
    return blocks


def _family(
    family: Family,
    rows: Sequence[Row],
    several: bool,
    sweep: "Sweep",
    compared: Mapping[str, Standing],
    named: Mapping[str, str],
) -> list[Block]:
    """What may stand in one table: the settings, the same over seeds with tests in pairs, and what they cost."""
    budget = family.budgets[0] if len(family.budgets) == 1 else None
    blocks: list[Block] = [Heading(f"Promise: {family.title(budget)}")] if several else []
    headings = columns(rows)
    lines = [cells(row, headings) for row in rows]
    bold = family.settings if family.budgets else family.references
    best = best_cells(rows, headings, [setting for setting in bold if setting in compared], compared, sweep.metric)
    marked: frozenset[tuple[int, int]] = frozenset()
    if any(row["pareto"] for row in rows):  # there is a front, and no best
        columns_marked = [headings.index(name) for name in ("algorithm", "front")]
        best = frozenset()
        marked = frozenset((n, column) for n, row in enumerate(rows) if row["pareto"] for column in columns_marked)
    title = f"{sweep.name}: {sweep.metric}" + (f", {family.title(budget)}" if several or budget else "")
    blocks += [Table(headings, lines, best, title, marked), Notes(caption(rows, sweep.settings))]
    shown = [compared[row["setting"]] for row in rows if row["setting"] in compared]
    measured = [row for row in rows if row["n"]]
    if not measured:
        return blocks
    said = caveats(rows)
    table = standings_table(shown, named, sweep.metric, f"{title}, over seeds", bold)
    notes = STANDING_NOTES if any(standing.result is not None for standing in shown) else ()
    blocks += [Heading("Over seeds", 3), table, Notes([*notes, *said])]
    return [*blocks, Heading("Cost", 3), _costs(measured, named, f"{title}, cost"), Notes([*cost_notes(rows), *said])]


def best_cells(
    rows: Sequence[Row], headings: Sequence[str], bold: Collection[str], compared: Mapping[str, Standing], metric: str
) -> frozenset[tuple[int, int]]:
    """Where a table shows the best value of a promise and budget that has several; none where it is not shown.

    `bold` are the settings that may be marked: references beside private settings may not.
    """
    heading = metric.replace("_", " ")
    if heading not in headings:
        return frozenset()
    column = headings.index(heading)
    return frozenset(
        (number, column)
        for number, row in enumerate(rows)
        if row["setting"] in bold and compared[row["setting"]].is_best
    )


def _costs(rows: Sequence[Row], named: Mapping[str, str], name: str) -> Table:
    headings = cost_headings(rows)
    lines = [[named[row["setting"]], str(row["n"]), *cost_cells(row, headings), epsilon_text(row)] for row in rows]
    return Table(["setting", "seeds", *headings, "epsilon"], lines, name=name)


def best_words(best: Mapping[str, Any], sweep: "Sweep") -> str:
    """The best setting in a sentence; `best` is from `best_setting`, with `promise` in words or without."""
    swept = ", ".join(f"{key}={axis_text(value)}" for key, value in best["params"].items()) or "the only setting"
    among = f" ({best['promise']})" if best.get("promise") else ""
    return (
        f"Best mean {sweep.metric} ({sweep.mode}){among}: {swept}, {best['mean']:.4f} over {_count(best['n'], 'seed')}"
        + (f"; {_count(best['tied'], 'other setting')} with the very same mean." if best.get("tied") else ".")
    )


def budget_words(sweep: "Sweep") -> str:
    """The tuning budget of each algorithm, where all have the same; empty otherwise."""
    if not sweep.budget:
        return ""
    points = next(iter(sweep.budget.values()))["points"]
    tuned = [f"{name}: {', '.join(own['axes']) or 'nothing'}" for name, own in sweep.budget.items()]
    seeds = _count(max(1, len(sweep.seeds)), "seed")
    each = f"{_count(points, 'point')} for each algorithm, each with {seeds}"
    return f"Equal tuning budgets: {each}. Tuned are, of {'; of '.join(tuned)}."


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
