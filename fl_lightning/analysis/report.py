"""A sweep's report: table, curves and what every number means; made from MLflow alone, at any later time."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.analysis.comparisons import as_json, standings
from fl_lightning.analysis.document import Figure
from fl_lightning.analysis.pareto import outcome
from fl_lightning.analysis.promises import Family, groups
from fl_lightning.analysis.report_extras import cost_figures, first_trial_figures
from fl_lightning.analysis.report_figures import draw
from fl_lightning.analysis.report_formats import Format, written
from fl_lightning.analysis.report_text import report_blocks
from fl_lightning.analysis.selection import selection_cost
from fl_lightning.analysis.statistics import mean
from fl_lightning.analysis.tables import caveats, to_csv
from fl_lightning.analysis.trials import HISTORY, Trial, by_setting, comparable, from_children
from fl_lightning.config.scoring import scored_on
from fl_lightning.tracking import (
    ChildRun,
    children,
    connect,
    describe,
    find_parent,
    log_artifact_file,
    log_metrics,
    resolve_uri,
)

SWEEP_FILE = "sweep.json"
FOLDER = "report"
"""The artifact folder of the parent run that holds the report."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep was asked to do; kept as `sweep.json` with its parent run.

    Attributes:
        sweep_id: its short name.
        name: the study's name.
        axes: swept keys in the order of the sweep's file.
        metric: what makes a setting the best; of several objectives the first.
        mode: "max" or "min".
        objectives: (metric, mode) of each.
        space: key -> {kind: values}.
        settings: algorithm -> values by dotted key that this algorithm alone gets.
        seeds: in the order of the sweep's file.
        num_trials: how many were planned.
        config: the configuration all trials start from.
        selection: `distribution`, `mean` and `eta` of the number of trials.
        skipped: `setting`, `algorithm`, `params` and `reason` of every cell that was left out.
        budget: algorithm -> `points` (how many it gets) and `axes` (what is tuned); empty unless all get as many.
    """

    sweep_id: str
    name: str = "sweep"
    axes: tuple[str, ...] = ()
    metric: str = "test_accuracy"
    mode: str = "max"
    objectives: tuple[Sequence[str], ...] = ()
    space: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    num_trials: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    selection: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[Mapping[str, Any], ...] = ()
    budget: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def aims(self) -> tuple[tuple[str, str], ...]:
        """(metric, mode) of each objective, also of a sweep that was stored before there could be several."""
        return tuple((metric, mode) for metric, mode in self.objectives) or ((self.metric, self.mode),)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)


def make_report(
    sweep_id: str,
    *,
    uri: str | None = None,
    experiment: str | None = None,
    out: Path | None = None,
    format: Format = "md",
    target: float | None = None,
) -> dict[str, Any]:
    """Reads a sweep from MLflow, writes its report, and stores it with the parent run.

    Args:
        sweep_id: as `fl-lightning sweep` printed it.
        uri: `tracking.uri`; None: see `resolve_uri`.
        experiment: where to look; None: in all experiments.
        out: folder of the report; None: `mlruns/reports/<sweep id>` in the start folder.
        format: "latex" and "html" write a further file; "md" and "csv" are always written.
        target: a test accuracy in [0, 1], to count rounds and seconds to.

    Returns:
        `sweep_id`, `parent_run_id`, `table` (rows as in `outcome`), `statistics` (from `standings`), `best`,
        `best_by_promise`, `selected_on` (from `scored_on`), `pareto` (from `Outcome.pareto`), `selection` (from
        `selection_cost`), `skipped`, `failed`, and the paths `markdown`, `csv`, `summary`, `curves` (with
        `curves_2` ... for further promises and budgets), `validation` where examples were held out, `epsilon` where
        epsilon was varied, `pareto_front` (with `pareto_front_2` ...) of a sweep with several objectives, and `latex`
        or `html` where asked for.

    Raises:
        TrackingError: no such sweep (the message lists those that exist), or the store cannot be used.
    """
    address = resolve_uri(uri)
    parent = find_parent(address, experiment, sweep_id)
    sweep = _read_sweep(address, parent, sweep_id)
    runs = children(address, parent, history=HISTORY)
    trials = from_children(runs, privacy_of(address, runs), sweep.axes)
    selection = stored_selection_cost(address, sweep, trials)
    folder = out or Path.cwd() / "mlruns" / "reports" / sweep_id
    with tempfile.TemporaryDirectory() as fetched:
        extras = first_trial_figures(address, trials, Path(fetched)) if format == "html" else []
        paths = write_report(sweep, trials, folder, selection, format=format, target=target, extras=extras)
    store_report(address, parent, paths)
    come = outcome(sweep, trials, target)
    compared = standings(trials, come.families, sweep.metric, sweep.mode)
    return {
        "sweep_id": sweep_id,
        "parent_run_id": parent,
        "table": come.rows,
        "statistics": as_json(compared),
        "best": best_setting(sweep, trials),
        "best_by_promise": best_settings(sweep, trials, come.families),
        "selected_on": scored_on([metric for metric, _ in sweep.aims]),
        "pareto": come.pareto(),
        "selection": selection,
        "skipped": list(sweep.skipped),
        "failed": sum(not trial.finished for trial in trials),
        **{name: str(path) for name, path in paths.items()},
    }


def write_report(
    sweep: Sweep,
    trials: Sequence[Trial],
    out: Path,
    selection: Mapping[str, Any] | None = None,
    *,
    format: Format = "md",
    target: float | None = None,
    extras: Sequence[Figure] = (),
) -> dict[str, Path]:
    """Writes report.md, report.csv, summary.json and the figures to a folder; returns their paths by kind.

    Private runs of different promises or budgets share no table and no figure. `selection` is from `selection_cost`,
    `format` and `target` are as in `make_report`, `extras` are further figures for a page.
    """
    come = outcome(sweep, trials, target)
    rows, found = come.rows, come.families
    compared = standings(trials, found, sweep.metric, sweep.mode)
    best = best_settings(sweep, trials, found)
    out.mkdir(parents=True, exist_ok=True)
    title = f"{sweep.name} (sweep {sweep.sweep_id})"
    pictures = draw(trials, rows, found, out, title, fronts=come.fronts)
    if format == "html":
        extras = [*cost_figures(trials, come, out, title), *extras]
    paths = {
        "markdown": out / "report.md",
        "csv": out / "report.csv",
        **{picture.key: picture.path for picture in pictures},
        "summary": out / "summary.json",
    }
    blocks = report_blocks(sweep, trials, come, pictures, best, selection, compared, extras)
    paths |= written(blocks, out, format, caveats(rows))
    fields = {setting: standing.fields() for setting, standing in compared.items()}
    paths["csv"].write_text(to_csv(rows, fields), encoding="utf-8")
    summary: dict[str, Any] = {"sweep_id": sweep.sweep_id, "table": rows, "best": best_setting(sweep, trials)}
    summary |= {
        "statistics": as_json(compared),
        "best_by_promise": best,
        "selected_on": scored_on([metric for metric, _ in sweep.aims]),
        "pareto": come.pareto(),
        "selection": selection,
        "skipped": list(sweep.skipped),
    }
    paths["summary"].write_text(json.dumps(summary, indent=1, default=str) + "\n", encoding="utf-8")
    return paths


def stored_selection_cost(uri: str, sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """`selection_cost` with the ledgers that the trials' runs keep in the tracking store."""

    def ledger_of(trial: Trial) -> dict[str, Any] | None:
        return _artifact(uri, trial.run_id, "privacy/ledger.json") if trial.run_id else None

    return selection_cost(sweep.selection, trials, ledger_of, metric=sweep.metric, mode=sweep.mode)


def store_report(uri: str, parent_run_id: str, paths: Mapping[str, Path]) -> None:
    """Keeps the report's files among the parent run's artifacts, in `report/`, and its text as the run's description.

    The best setting's mean over the seeds is a metric of the parent run, `best/METRIC`.

    Raises:
        TrackingError: the store cannot be used.
    """
    for path in paths.values():
        log_artifact_file(uri, parent_run_id, path, FOLDER)
    title, _, text = paths["markdown"].read_text(encoding="utf-8").partition("\n")
    describe(uri, parent_run_id, f"**{title.lstrip('# ')}**\n{text}")
    best = json.loads(paths["summary"].read_text(encoding="utf-8"))["best"]
    if best is not None and isinstance(best["metric"], str):
        log_metrics(uri, parent_run_id, {f"best/{best['metric']}": best["mean"]})


def best_setting(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The setting with the best mean of `sweep.metric` over its finished seeds; None if no trial measured it.

    None also of a sweep with several objectives: it has a front and no best. `tied` other settings have the very same
    mean; the first counts. Settings with trials that a scheduler has ended stand back while there are others.
    """
    means = []
    for setting, group in comparable(by_setting(trials)).items() if len(sweep.aims) == 1 else ():
        values = [value for trial in group if (value := trial.measured(sweep.metric)) is not None]
        centre = mean(values)
        if centre is not None and math.isfinite(centre):
            means.append((centre, {"setting": setting, "params": dict(group[0].params), "n": len(values)}))
    if not means:
        return None
    centre, found = (max if sweep.mode == "max" else min)(means, key=lambda item: item[0])
    tied = sum(other == centre for other, _ in means) - 1
    return {**found, "metric": sweep.metric, "mean": centre, "tied": tied}


def best_settings(sweep: Sweep, trials: Sequence[Trial], found: Sequence[Family]) -> list[dict[str, Any]]:
    """The best setting of each promise and budget, and of what protects nothing: only like is compared with like.

    As `best_setting`, with `promise` in words; it is empty in a sweep without privacy.
    """
    best = []
    for promise, settings in groups(found):
        chosen = best_setting(sweep, [trial for trial in trials if trial.setting in settings])
        if chosen is not None:
            best.append({**chosen, "promise": promise})
    return best


def _read_sweep(uri: str, parent_run_id: str, sweep_id: str) -> Sweep:
    """`sweep.json` of the parent run; bare where a sweep was killed before it could write it."""
    content = _artifact(uri, parent_run_id, SWEEP_FILE)
    if content is None:
        return Sweep(sweep_id)
    known: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in content.items()}
    return Sweep(**known)


def privacy_of(uri: str, runs: Sequence[ChildRun]) -> dict[str, Mapping[str, Any]]:
    """Run id -> privacy statement, of the runs that have one."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if "epsilon" in run.metrics and (content := _artifact(uri, run.run_id, "privacy.json")):
            found[run.run_id] = content
    return found


def _artifact(uri: str, run_id: str, name: str) -> dict[str, Any] | None:
    client = connect(uri)
    folder = name.rpartition("/")[0] or None
    if not any(entry.path == name for entry in client.list_artifacts(run_id, folder)):
        return None
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(Path(client.download_artifacts(run_id, name, folder)).read_text())
