"""The end of a sweep: its table and report, what choosing the best trial costs, and its result as JSON."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning import TrackingError
from fl_lightning.analysis.pareto import Outcome, front_words, outcome
from fl_lightning.analysis.report import (
    Sweep,
    best_setting,
    best_settings,
    store_report,
    stored_selection_cost,
    write_report,
)
from fl_lightning.analysis.report_text import best_words, budget_words
from fl_lightning.analysis.scored import selection_words
from fl_lightning.analysis.selection import selection_cost
from fl_lightning.analysis.trials import Trial
from fl_lightning.config.scoring import scored_on
from fl_lightning.tracking import Study, run_page


def conclude(
    info: Sweep, trials: Sequence[Trial], study: Study | None, folder: Path, *, quiet: bool, began: float
) -> dict[str, Any]:
    """Writes the report, says the last words and returns the sweep's result; see `run_sweep` for its keys.

    Args:
        info: what the sweep was asked to do.
        trials: all of them.
        study: the parent run; None without tracking.
        folder: `mlruns` in the start folder.
        quiet: print failures only.
        began: `time.monotonic()` at the start.
    """
    come = outcome(info, trials)
    failed = sum(not trial.finished for trial in trials)
    selection = _selection(info, trials, study)
    report = write_report(info, trials, folder / "reports" / info.sweep_id, selection)
    _store(study, report)
    best, by_promise = best_setting(info, trials), best_settings(info, trials, come.families)
    named = by_promise or ([best] if best is not None else [])
    _last_words(info, trials, come, named, report, study, selection, quiet)
    return {
        "sweep_id": info.sweep_id,
        "name": info.name,
        "status": "failed" if failed else "finished",
        "failed": failed,
        "stopped": sum(trial.stopped for trial in trials),
        "trials": [_as_json(trial) for trial in trials],
        "table": come.rows,
        "best": best,
        "best_by_promise": by_promise,
        "selected_on": scored_on([metric for metric, _ in info.aims]),
        "pareto": come.pareto(),
        "budget": {name: dict(own) for name, own in info.budget.items()},
        "selection": selection,
        "skipped": list(info.skipped),
        "parent_run_id": study.run_id if study else None,
        "experiment": info.config["tracking"]["experiment"] if study else None,
        "tracking_uri": study.uri if study else None,
        "seconds": time.monotonic() - began,
        "report": {name: str(path) for name, path in report.items()},
    }


def complain(what: str, error: Exception) -> None:
    """One line on standard error."""
    print(f"{what}: {error}", file=sys.stderr, flush=True)


def _selection(info: Sweep, trials: Sequence[Trial], study: Study | None) -> dict[str, Any] | None:
    """What choosing the best private trial costs; None where no trial is private."""
    if study is None:
        return selection_cost({}, trials, lambda trial: None, metric=info.metric, mode=info.mode)
    try:
        return stored_selection_cost(study.uri, info, trials)
    except TrackingError as error:
        complain("the ledgers cannot be read back, so choosing among trials is not accounted for", error)
        return None


def _store(study: Study | None, report: dict[str, Path]) -> None:
    """Keeps the report with the parent run. The sweep's result is not lost for a store that has gone away."""
    if study is None:
        return
    try:
        store_report(study.uri, study.run_id, report)
    except TrackingError as error:
        complain("the report is not in the tracking store", error)


def _last_words(
    info: Sweep,
    trials: Sequence[Trial],
    come: Outcome,
    named: Sequence[Mapping[str, Any]],
    report: Mapping[str, Path],
    study: Study | None,
    selection: Mapping[str, Any] | None,
    quiet: bool,
) -> None:
    """The table, where the report lies, how to open the sweep, and what failed first."""
    from tune.summary import print_table

    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    if not quiet:
        print_table(come.rows, info.settings, come.families)
    if said := budget_words(info):
        say(said)
    for front in come.fronts:
        which = f" ({front.promise})" if front.promise else ""
        told = f"{len(front.best)} of {len(front.best) + len(front.others)} settings"
        say(f"Pareto front of {front_words(front)}{which}: {told}")
    for item in named:
        say(best_words(item, info))
    if (words := selection_words(info)) and any(trial.finished for trial in trials):
        say(words)
    if selection is not None:
        say(selection["words"])
    say(f"report: {report['markdown']}")
    for name, path in report.items():
        if name.startswith(("pareto", "curves", "validation", "epsilon", "costs")):
            say(f"{name.replace('_', ' ')}: {path}")
    if study is not None:
        say(f"MLflow: fl-lightning ui, then {run_page(study.uri, study.experiment_id, study.run_id)}")
    failures = [trial for trial in trials if not trial.finished]
    if failures:
        first = failures[0].error or {"type": "unknown", "message": "no cause was recorded"}
        print(
            f"{len(failures)} of {len(trials)} trials failed; the first, {failures[0].trial_id}: "
            f"{first['type']}: {first['message']}",
            file=sys.stderr,
            flush=True,
        )


def _as_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial_id": trial.trial_id,
        "run_id": trial.run_id,
        "status": trial.status,
        "setting": trial.setting,
        "params": dict(trial.params),
        "seed": trial.seed,
        "algorithm": trial.algorithm,
        "final": dict(trial.final),
        "privacy": trial.privacy,
        "lineage": [dict(step) for step in trial.lineage],
        "error": trial.error,
    }
