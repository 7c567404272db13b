"""What a page shows beside the report: accuracy by cost, and the first trial's partition and update norms."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.analysis.costs import accumulated
from fl_lightning.analysis.document import Figure
from fl_lightning.analysis.figures import Spending, accuracy_by_cost
from fl_lightning.analysis.pareto import Outcome
from fl_lightning.analysis.promises import Row
from fl_lightning.analysis.report_figures import file_name, plots_of, shown_name
from fl_lightning.analysis.statistics import curve, mean
from fl_lightning.analysis.tables import caveats
from fl_lightning.analysis.trials import Trial, by_setting, labels
from fl_lightning.tracking import connect

COST_AXES = {"gradients": "example gradients", "upload_bytes": "bytes uploaded", "seconds": "seconds"}

ARTIFACTS = {
    "partition/partition.svg": "How the data of trial {trial} (seed {seed}) are dealt out to its clients",
    "clipping/norms.png": "Update norms of trial {trial} (seed {seed}) against the clip bound, with their histogram",
}
ORACLE = "Read from raw data or raw updates, as only a simulation can; no epsilon covers it."


def first_trial_figures(uri: str, trials: Sequence[Trial], folder: Path) -> list[Figure]:
    """The pictures that the first finished trial keeps among its artifacts, fetched to a folder."""
    first = next((trial for trial in trials if trial.finished and trial.run_id is not None), None)
    if first is None or first.run_id is None:
        return []
    client, figures = connect(uri), []
    for name, words in ARTIFACTS.items():
        place = name.partition("/")[0]
        if any(entry.path == name for entry in client.list_artifacts(first.run_id, place)):
            path = Path(client.download_artifacts(first.run_id, name, str(folder)))
            said = words.format(trial=first.trial_id, seed=first.seed)
            figures.append(Figure(path, said, [ORACLE], extra=True))
    return figures


def cost_figures(trials: Sequence[Trial], come: Outcome, out: Path, title: str) -> list[Figure]:
    """Accuracy against gradients, bytes and seconds spent, a figure for each promise and budget as over rounds.

    Files costs.png, costs-2.png ...; none where no cost was recorded.
    """
    figures, rows = [], come.rows
    for count, (_, family, budget) in enumerate(plots := plots_of(come.families, come.fronts), start=1):
        shown = {*family.references, *(budget.settings if budget else ())}
        spendings = _spendings(trials, rows, shown)
        if not any(spending.spent for spending in spendings):
            continue
        words = "Test accuracy by cost" + (f", {family.title(budget)}" if len(plots) > 1 else "")
        heading = f"{title}: {family.title(budget)}" if len(plots) > 1 else title
        notes = caveats([row for row in rows if row["setting"] in shown])
        path = accuracy_by_cost(spendings, out / file_name("costs", count), COST_AXES, title=heading, notes=notes)
        figures.append(Figure(path, words, extra=True))
    return figures


def _spendings(trials: Sequence[Trial], rows: Sequence[Row], shown: set[str]) -> list[Spending]:
    """Mean accuracy and mean accumulated cost of each evaluated round, over the finished seeds."""
    spent = {row["setting"]: row for row in rows}
    private = any(spent[setting]["unit"] is not None for setting in shown)
    named, found = labels(trials), []
    for setting, group in by_setting(trials).items():
        finished = [trial for trial in group if trial.finished]
        if setting not in shown or not finished:
            continue
        points = curve([trial.history.get("test_accuracy", ()) for trial in finished])
        costs = {}
        for name in COST_AXES:
            sums = [dict(accumulated(_history(trial, name))) for trial in finished]
            rounds = [point.round for point in points if all(point.round in each for each in sums)]
            if len(rounds) == len(points):
                costs[name] = [mean([each[round] for each in sums]) or 0.0 for round in rounds]
        found.append(Spending(shown_name(named[setting], spent[setting], private), points, costs))
    return found


def _history(trial: Trial, name: str) -> Sequence[tuple[int, float]]:
    return trial.history.get(name) or trial.history.get(f"oracle/{name}") or ()
