"""Single runs side by side: what differs in their configurations, what came of it, and at what price."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.analysis.costs import cost_cells, cost_headings, cost_notes
from fl_lightning.analysis.document import Block, Figure, Heading, Notes, Table, Text
from fl_lightning.analysis.promises import Family, families, mismatch
from fl_lightning.analysis.report import privacy_of
from fl_lightning.analysis.report_figures import draw
from fl_lightning.analysis.report_formats import Format, written
from fl_lightning.analysis.report_text import rows_of
from fl_lightning.analysis.tables import (
    DELTA,
    Row,
    caption,
    caveats,
    epsilon_number,
    epsilon_text,
    settings_table,
    to_csv,
)
from fl_lightning.analysis.trials import HISTORY, Trial, from_run
from fl_lightning.errors import ConfigError
from fl_lightning.tracking import ChildRun, read_runs, resolve_uri

ABSENT = "-"
SHOWN = 8
"""Characters of a run id in a heading, more where two would look the same."""


def compare_runs(
    run_ids: Sequence[str],
    *,
    uri: str | None = None,
    out: Path | None = None,
    format: Format = "md",
    target: float | None = None,
) -> dict[str, Any]:
    """Reads runs from MLflow and writes their comparison.

    Args:
        run_ids: two or more, each a run's id or the beginning of one.
        uri: `tracking.uri`; None: see `resolve_uri`.
        out: folder of the files; None: `mlruns/reports/compare-<first id>-<second id> ...` in the start folder.
        format: "latex" and "html" write a further file; "md" and "csv" are always written.
        target: a test accuracy in [0, 1], to count rounds and seconds to.

    Returns:
        `runs` (ids), `differences` (key -> value of each run, None where it has no such key), `table` (rows as in
        `settings_table`), and the paths `markdown`, `csv`, `curves` (with `curves_2` ... for further promises and
        budgets), and `latex` or `html` where asked for.

    Raises:
        ConfigError: fewer than two runs, or one of them twice.
        TrackingError: no such run, it is a sweep, or the store cannot be used.
    """
    if len(run_ids) < 2:
        raise ConfigError("compare: needs two or more runs; for the trials of a sweep there is `fl-lightning report`")
    address = resolve_uri(uri)
    runs = read_runs(address, run_ids, history=HISTORY)
    if len({run.run_id for run in runs}) < len(runs):
        raise ConfigError("compare: a run is named twice; name each run once")
    names = short_names(runs)
    statements = privacy_of(address, runs)
    trials = [from_run(run, names[run.run_id], statements.get(run.run_id)) for run in runs]
    rows, different = settings_table(trials, target=target), differences(runs)
    found = families(rows)
    folder = out or Path.cwd() / "mlruns" / "reports" / f"compare-{'-'.join(names[run.run_id] for run in runs)}"[:120]
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(trials, rows, found, folder, "runs")
    blocks: list[Block] = [Heading(f"Comparison of {len(runs)} runs", 1), Heading("Configurations")]
    blocks += _differences(different, [names[run.run_id] for run in runs])
    if said := mismatch(found):
        blocks.append(Text(said))
    for family in found:
        blocks += _results(family, rows_of(family, rows), trials, len(found) > 1)
    blocks += [Figure(picture.path, picture.words) for picture in pictures]
    paths = {"csv": folder / "report.csv", **{picture.key: picture.path for picture in pictures}}
    paths |= written(blocks, folder, format, caveats(rows))
    paths["csv"].write_text(to_csv(rows), encoding="utf-8")
    return {
        "runs": [run.run_id for run in runs],
        "differences": different,
        "table": rows,
        **{name: str(path) for name, path in paths.items()},
    }


def short_names(runs: Sequence[ChildRun]) -> dict[str, str]:
    """Run id -> its beginning, as long as it takes to tell the runs apart."""
    length = SHOWN
    while len({run.run_id[:length] for run in runs}) < len(runs):
        length += 1
    return {run.run_id: run.run_id[:length] for run in runs}


def differences(runs: Sequence[ChildRun]) -> dict[str, list[str | None]]:
    """Configuration key -> its value in each run, for the keys whose values are not all the same.

    How the data came to be dealt out is among them, as `partition_sha256`.
    """
    keys = sorted({key for run in runs for key in run.params})
    values = {key: [run.params.get(key) for run in runs] for key in keys}
    values["partition_sha256"] = [run.tags.get("partition_sha256", "")[:SHOWN] or None for run in runs]
    return {key: found for key, found in values.items() if len(set(found)) > 1}


def _differences(different: Mapping[str, Sequence[str | None]], names: Sequence[str]) -> list[Block]:
    if not different:
        return [Text("The configurations are the same.")]
    lines = [[key, *(ABSENT if value is None else value for value in values)] for key, values in different.items()]
    headings = ["key", *(f"run {name}" for name in names)]
    return [
        Table(headings, lines, name="What differs in the configurations"),
        Notes(["A dash: the run has no such key."]),
    ]


def _results(family: Family, rows: Sequence[Row], trials: Sequence[Trial], several: bool) -> list[Block]:
    """The numbers of runs that promise the same at the same epsilon, and of those that protect nothing."""
    budget = family.budgets[0] if family.budgets else None
    title = f"Results, {family.title(budget)}" if several else "Results"
    by_run = {trial.setting: trial for trial in trials}
    spent = epsilon_heading(family)
    costs = cost_headings(rows)
    held = ["validation accuracy"] if any(row["validation_accuracy_mean"] is not None for row in rows) else []
    headings = ["run", "algorithm", "seed", "status", "rounds", *held, "test accuracy", "test loss", spent, *costs]
    lines = []
    for row in rows:
        trial = by_run[row["setting"]]
        rounds = max((round for round, _ in trial.history.get("seconds", ())), default=None)
        names = [*(name.replace(" ", "_") for name in held), "test_accuracy", "test_loss"]
        line = [
            trial.trial_id,
            trial.algorithm,
            str(trial.seed),
            trial.status,
            ABSENT if rounds is None else str(rounds),
        ]
        line += [ABSENT if (value := trial.measured(name)) is None else f"{value:.4f}" for name in names]
        epsilon = epsilon_number(row) if trial.setting in family.settings else epsilon_text(row)
        lines.append([*line, epsilon, *cost_cells(row, costs)])
    notes = [*caption(rows)[1:], *cost_notes(rows)]
    return [Heading(title), Table(headings, lines, name=title), Notes(notes)]


def epsilon_heading(family: Family) -> str:
    """The heading of a family's epsilons: it names the unit and delta that all of them have."""
    if family.promise is None:
        return "epsilon"
    unit, delta = family.promise[:2]
    return f"epsilon per {unit}, {DELTA}=" + ("?" if delta is None else f"{float(delta):g}")
