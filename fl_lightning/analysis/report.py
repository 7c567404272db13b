"""A sweep's report: table, curves and what every number means; made from MLflow alone, at any later time."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.analysis.figures import Curve, accuracy_curves
from fl_lightning.analysis.statistics import curve, mean
from fl_lightning.analysis.tables import (
    Row,
    epsilon_text,
    markdown,
    pivot,
    settings_markdown,
    settings_table,
    to_csv,
)
from fl_lightning.analysis.trials import Trial, axis_text, by_setting, from_children, labels
from fl_lightning.tracking import ChildRun, children, connect, find_parent, log_artifact_file, resolve_uri

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
        metric: what makes a setting the best.
        mode: "max" or "min".
        space: key -> {kind: values}.
        settings: algorithm -> values by dotted key that this algorithm alone gets.
        seeds: in the order of the sweep's file.
        num_trials: how many were planned.
        config: the configuration all trials start from.
    """

    sweep_id: str
    name: str = "sweep"
    axes: tuple[str, ...] = ()
    metric: str = "test_accuracy"
    mode: str = "max"
    space: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    num_trials: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, default=str)


def make_report(
    sweep_id: str, *, uri: str | None = None, experiment: str | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Reads a sweep from MLflow, writes its report, and stores it with the parent run.

    Args:
        sweep_id: as `fl-lightning sweep` printed it.
        uri: `tracking.uri`; None: see `resolve_uri`.
        experiment: where to look; None: in all experiments.
        out: folder of the report; None: `mlruns/reports/<sweep id>` in the start folder.

    Returns:
        `sweep_id`, `parent_run_id`, `table` (rows as in `settings_table`), `best`, `failed`, and the paths `markdown`,
        `csv`, `curves`.

    Raises:
        TrackingError: no such sweep (the message lists those that exist), or the store cannot be used.
    """
    address = resolve_uri(uri)
    parent = find_parent(address, experiment, sweep_id)
    sweep = _read_sweep(address, parent, sweep_id)
    runs = children(address, parent, history=("test_accuracy", "test_loss"))
    trials = from_children(runs, _privacy_of(address, runs), sweep.axes)
    paths = write_report(sweep, trials, out or Path.cwd() / "mlruns" / "reports" / sweep_id)
    store_report(address, parent, paths)
    return {
        "sweep_id": sweep_id,
        "parent_run_id": parent,
        "table": settings_table(trials),
        "best": best_setting(sweep, trials),
        "failed": sum(not trial.finished for trial in trials),
        **{name: str(path) for name, path in paths.items()},
    }


def write_report(sweep: Sweep, trials: Sequence[Trial], out: Path) -> dict[str, Path]:
    """Writes report.md, report.csv, summary.json and curves.png to a folder; returns their paths by kind."""
    rows = settings_table(trials)
    out.mkdir(parents=True, exist_ok=True)
    paths = {
        "markdown": out / "report.md",
        "csv": out / "report.csv",
        "curves": out / "curves.png",
        "summary": out / "summary.json",
    }
    accuracy_curves(_curves(trials, rows), paths["curves"], title=f"{sweep.name} (sweep {sweep.sweep_id})")
    paths["markdown"].write_text(_text(sweep, trials, rows), encoding="utf-8")
    paths["csv"].write_text(to_csv(rows), encoding="utf-8")
    summary = {"sweep_id": sweep.sweep_id, "table": rows, "best": best_setting(sweep, trials)}
    paths["summary"].write_text(json.dumps(summary, indent=1, default=str) + "\n", encoding="utf-8")
    return paths


def store_report(uri: str, parent_run_id: str, paths: Mapping[str, Path]) -> None:
    """Keeps the report's files among the parent run's artifacts, in `report/`.

    Raises:
        TrackingError: the store cannot be used.
    """
    for path in paths.values():
        log_artifact_file(uri, parent_run_id, path, FOLDER)


def best_setting(sweep: Sweep, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """The setting with the best mean of `sweep.metric` over its finished seeds; None if no trial measured it."""
    means = []
    for setting, group in by_setting(trials).items():
        values = [value for trial in group if (value := trial.measured(sweep.metric)) is not None]
        centre = mean(values)
        if centre is not None and math.isfinite(centre):
            means.append((centre, {"setting": setting, "params": dict(group[0].params), "n": len(values)}))
    if not means:
        return None
    centre, found = (max if sweep.mode == "max" else min)(means, key=lambda item: item[0])
    return {**found, "metric": sweep.metric, "mean": centre}


def _curves(trials: Sequence[Trial], rows: Sequence[Row]) -> list[Curve]:
    names, spent = labels(trials), {row["setting"]: row for row in rows}
    found = []
    for setting, group in by_setting(trials).items():
        row = spent[setting]
        name = names[setting] if row["unit"] is None else f"{names[setting]}\n(epsilon {epsilon_text(row)})"
        histories = [trial.history.get("test_accuracy", ()) for trial in group if trial.finished]
        found.append(Curve(name, curve(histories)))
    return found


def _text(sweep: Sweep, trials: Sequence[Trial], rows: Sequence[Row]) -> str:
    parts = [f"# {sweep.name}: sweep {sweep.sweep_id}\n"]
    parts.append(f"{_count(len(rows), 'setting')}, {_count(len(trials), 'trial')}. {_common(sweep)}\n")
    parts.append(settings_markdown(rows, sweep.settings))
    across = pivot(rows)
    if across is not None:
        parts += ["## Algorithms across settings\n", markdown(*across)]
    best = best_setting(sweep, trials)
    if best is not None:
        swept = ", ".join(f"{key}={axis_text(value)}" for key, value in best["params"].items()) or "the only setting"
        parts.append(
            f"Best mean {sweep.metric} ({sweep.mode}): {swept}, {best['mean']:.4f} over {_count(best['n'], 'seed')}. "
            "Chosen on the test set, so it is optimistic; and choosing costs privacy that no epsilon here counts.\n"
        )
    parts.append("![Test accuracy by round](curves.png)\n")
    failures = [trial for trial in trials if not trial.finished]
    if failures:
        headings = ["trial", "parameters", "seed", "status", "error"]
        parts += ["## Trials that did not finish\n", markdown(headings, [_failure(trial) for trial in failures])]
    return "\n".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _common(sweep: Sweep) -> str:
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


def _read_sweep(uri: str, parent_run_id: str, sweep_id: str) -> Sweep:
    """`sweep.json` of the parent run; bare where a sweep was killed before it could write it."""
    content = _artifact(uri, parent_run_id, SWEEP_FILE)
    if content is None:
        return Sweep(sweep_id)
    known: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in content.items()}
    return Sweep(**known)


def _privacy_of(uri: str, runs: Sequence[ChildRun]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if "epsilon" in run.metrics and (content := _artifact(uri, run.run_id, "privacy.json")):
            found[run.run_id] = content
    return found


def _artifact(uri: str, run_id: str, name: str) -> dict[str, Any] | None:
    client = connect(uri)
    if not any(entry.path == name for entry in client.list_artifacts(run_id)):
        return None
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(Path(client.download_artifacts(run_id, name, folder)).read_text())
