"""A sweep from its validated cells to its table: parent run, trials on Ray Tune, report."""

import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fl_lightning import RunConfig, TrackingError
from fl_lightning.analysis.promises import families
from fl_lightning.analysis.report import (
    SWEEP_FILE,
    Sweep,
    best_setting,
    best_settings,
    store_report,
    stored_selection_cost,
    write_report,
)
from fl_lightning.analysis.selection import selection_cost
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial, setting_of
from fl_lightning.config import Cell, SweepConfig
from fl_lightning.tracking import Study, log_text, open_study, resolve_uri, run_page, tracked
from tune.plans import Chosen, choose
from tune.samples import number_of_samples
from tune.session import check_resources, ray_session
from tune.space import Plan, param_space, search
from tune.trial import OUTCOME, loss_of, trial_id_of, tune_trial

EXIT_TERMINATED = 143
"""128 + SIGTERM."""


def run_sweep(base: RunConfig, sweep: SweepConfig, cells: Sequence[Cell], *, quiet: bool = False) -> dict[str, Any]:
    """Runs every cell of a sweep as a trial of Ray Tune and compares the settings.

    A failed trial keeps its own error and harms no other; the sweep goes on. Files lie under the start folder:
    `mlruns/sweeps/<sweep id>/<trial id>/params.json`, the report in `mlruns/reports/<sweep id>/`.

    Args:
        base: the configuration all trials start from; its `tracking` holds for all.
        sweep: the sweep.
        cells: from `validate_space`.
        quiet: print failures only, to standard error.

    Returns:
        `sweep_id`, `status` ("finished", or "failed" if any trial failed), `failed` (how many), `trials`, `table` (one
        row per setting), `best` (the row with the best mean; None if no trial finished), `best_by_promise`,
        `selection` (what choosing the best private trial costs), `skipped` (cells left out as hopeless),
        `parent_run_id`, `experiment`, `tracking_uri`, `seconds`, `report` (paths).

    Raises:
        ConfigError: trials that could never start.
        TrackingError: the store cannot be used.
    """
    began = time.monotonic()
    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    sweep_id = secrets.token_hex(4)
    folder = Path.cwd() / "mlruns"
    samples = number_of_samples(base, sweep, cells)
    if sweep.selection.distribution != "none":
        say(f"number of trials: {samples}, drawn ({sweep.selection.distribution}, mean {sweep.selection.mean:g})")
    chosen = Chosen(tuple(cells))
    if sweep.skip_hopeless or not quiet:  # a plan that nobody sees and nothing follows is not made
        chosen = choose(cells, say, skip_hopeless=sweep.skip_hopeless)
    info = _describe(sweep_id, base, sweep, cells, chosen, samples)
    tracking = {"tracking.uri": resolve_uri(base.tracking.uri)} if base.tracking.enabled else {}
    with ExitStack() as stack:
        ray = stack.enter_context(ray_session())
        for note in check_resources(ray, sweep, [cell.config for cell in chosen.cells]):
            say(f"note: {note}")
        study = _open(info, base, tracking)
        say(f"sweep id: {sweep_id}")
        random = sweep.selection.distribution != "none"
        plan = Plan(sweep_id, info.axes, chosen.cells, tracking, study.run_id if study else None, own_seeds=random)
        trials: list[Trial] = []
        try:
            # Ray ends before the parent run is closed: no trial can write after its run was marked KILLED.
            with tracked(study), stack.pop_all():
                trials = _run_trials(plan, sweep, samples, folder / "sweeps" / sweep_id, quiet)
        except TrackingError as error:
            if not trials:
                raise
            _complain("the sweep is not closed in the tracking store", error)
    rows = settings_table(trials, info.skipped)
    failed = sum(not trial.finished for trial in trials)
    selection = _selection(info, trials, study)
    report = write_report(info, trials, folder / "reports" / sweep_id, selection)
    _store(study, report)
    _close(info, trials, report, study, selection, say, quiet)
    return {
        "sweep_id": sweep_id,
        "name": sweep.name,
        "status": "failed" if failed else "finished",
        "failed": failed,
        "trials": [_as_json(trial) for trial in trials],
        "table": rows,
        "best": best_setting(info, trials),
        "best_by_promise": best_settings(info, trials, families(rows, info.axes)),
        "selection": selection,
        "skipped": list(info.skipped),
        "parent_run_id": study.run_id if study else None,
        "experiment": base.tracking.experiment if study else None,
        "tracking_uri": study.uri if study else None,
        "seconds": time.monotonic() - began,
        "report": {name: str(path) for name, path in report.items()},
    }


def _selection(info: Sweep, trials: Sequence[Trial], study: Study | None) -> dict[str, Any] | None:
    """What choosing the best private trial costs; None where no trial is private."""
    if study is None:
        return selection_cost({}, trials, lambda trial: None, metric=info.metric, mode=info.mode)
    try:
        return stored_selection_cost(study.uri, info, trials)
    except TrackingError as error:
        _complain("the ledgers cannot be read back, so choosing among trials is not accounted for", error)
        return None


def _describe(
    sweep_id: str, base: RunConfig, sweep: SweepConfig, cells: Sequence[Cell], chosen: Chosen, samples: int
) -> Sweep:
    return Sweep(
        sweep_id=sweep_id,
        name=sweep.name,
        axes=tuple(sweep.space),
        metric=sweep.metric,
        mode=sweep.mode,
        settings=sweep.settings,
        space={key: {axis.kind: list(axis.values)} for key, axis in sweep.space.items()},
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
        num_trials=len(chosen.cells) * samples,
        config=base.to_dict(),
        selection=sweep.selection.model_dump(mode="json"),
        skipped=chosen.skipped,
    )


def _open(info: Sweep, base: RunConfig, tracking: Mapping[str, Any]) -> Study | None:
    """The sweep's parent run, with `sweep.json`; None where tracking is off."""
    if not tracking:
        return None
    uri = tracking["tracking.uri"]
    study = open_study(uri, base.tracking.experiment, info.sweep_id, name=info.name, tags={"study": info.name})
    log_text(uri, study.run_id, info.to_json(), SWEEP_FILE)
    return study


def _run_trials(plan: Plan, sweep: SweepConfig, samples: int, folder: Path, quiet: bool) -> list[Trial]:
    if not plan.cells or not samples:  # all was skipped, or the number drawn is 0
        return []
    from ray import tune

    from tune.board import Board

    board = Board(plan, folder, len(plan.cells) * samples, quiet=quiet)
    resources = {"cpu": sweep.resources.cpu, "gpu": sweep.resources.gpu}
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(tune_trial, plan=plan), resources),
        param_space=param_space(plan),
        tune_config=tune.TuneConfig(
            num_samples=samples,
            search_alg=search(sweep, plan),
            reuse_actors=True,  # a worker imports torch once, not once per trial
            trial_name_creator=lambda trial: trial_id_of(trial.trial_id),
            trial_dirname_creator=lambda trial: trial_id_of(trial.trial_id),
        ),
        run_config=tune.RunConfig(name=folder.name, storage_path=str(folder.parent), verbose=0, callbacks=[board]),
    )
    try:
        with board.shown():
            grid = tuner.fit()
    except (KeyboardInterrupt, SystemExit) as ended:
        hint = f"fl-lightning report {plan.sweep_id}"
        print(f"sweep {plan.sweep_id} stopped; `{hint}` shows what was finished", file=sys.stderr, flush=True)
        if isinstance(ended, SystemExit):  # Ray makes an exit code 1 of whatever a signal's handler raises
            raise SystemExit(EXIT_TERMINATED) from ended
        raise
    trials = [_trial(plan, grid[number]) for number in range(len(grid))]
    return sorted(trials, key=lambda trial: (len(trial.trial_id), trial.trial_id))


def _trial(plan: Plan, result: Any) -> Trial:
    """A trial from what Ray Tune has of it; a worker that died without a word is described by Ray's own error."""
    point = plan.point(result.config)
    metrics = result.metrics or {}
    outcome = json.loads(metrics[OUTCOME]) if OUTCOME in metrics else loss_of(result.error)
    return Trial(
        trial_id=Path(result.path).name,
        setting=setting_of(point.params),
        params=point.params,
        seed=point.seed,
        algorithm=point.config.algorithm.name,
        status=outcome["status"],
        run_id=outcome.get("run_id") or metrics.get("run_id"),
        final=outcome.get("final", {}),
        privacy=outcome.get("privacy"),
        target_epsilon=getattr(point.config.privacy, "target_epsilon", None),
        badge=outcome.get("badge"),
        partition_sha256=outcome.get("partition_sha256"),
        error=outcome.get("error"),
        metrics=outcome.get("metrics", {}),
        history={name: tuple(map(tuple, points)) for name, points in outcome.get("history", {}).items()},
    )


def _store(study: Study | None, report: dict[str, Path]) -> None:
    """Keeps the report with the parent run. The sweep's result is not lost for a store that has gone away."""
    if study is None:
        return
    try:
        store_report(study.uri, study.run_id, report)
    except TrackingError as error:
        _complain("the report is not in the tracking store", error)


def _complain(what: str, error: Exception) -> None:
    print(f"{what}: {error}", file=sys.stderr, flush=True)


def _close(
    info: Sweep,
    trials: Sequence[Trial],
    report: Mapping[str, Path],
    study: Study | None,
    selection: Mapping[str, Any] | None,
    say: Callable[[str], None],
    quiet: bool,
) -> None:
    """The last words: the table, where the report lies, how to open the sweep, and what failed first."""
    from tune.summary import print_table

    if not quiet:
        print_table(settings_table(trials, info.skipped), info.settings, info.axes)
    if selection is not None:
        say(selection["words"])
    say(f"report: {report['markdown']}")
    for name, path in report.items():
        if name.startswith(("curves", "epsilon")):
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
        "error": trial.error,
    }
