"""A sweep from its validated cells to its table: parent run, trials on Ray Tune, report."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_lightning import RunConfig, TrackingError
from fl_lightning.analysis.report import Sweep
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import Cell, SweepConfig
from fl_lightning.config.population import perturb_every
from fl_lightning.config.scoring import settled, tunes
from fl_lightning.config.search import check_scheduler
from fl_lightning.tracking import Study, open_study, resolve_uri, tracked
from tune.ending import complain, conclude
from tune.nodes import admitted, checkpoints_folder, sweeps_folder, with_retries
from tune.plans import Chosen, choose
from tune.running import Work, run_trials
from tune.samples import budget_of, check_objectives, number_of_samples
from tune.session import ray_session
from tune.space import ID, Plan, Sampled, draw
from tune.stored import keep_plan, keep_trial


def run_sweep(base: RunConfig, sweep: SweepConfig, cells: Sequence[Cell], *, quiet: bool = False) -> dict[str, Any]:
    """Runs every cell of a sweep as a trial of Ray Tune and compares the settings.

    A failed trial keeps its own error and harms no other; the sweep goes on. Files lie under the start folder:
    `mlruns/sweeps/<sweep id>/<trial id>/params.json` (or under `sweep.storage`), the report in
    `mlruns/reports/<sweep id>/`.

    Args:
        base: the configuration all trials start from; its `tracking` holds for all.
        sweep: the sweep.
        cells: from `validate_space`.
        quiet: print failures only, to standard error.

    Returns:
        `sweep_id`, `status` ("finished", or "failed" if any trial failed), `failed` (how many), `trials`, `table` (one
        row per setting), `best` (the row with the best mean; None if no trial finished, or there are several
        objectives), `best_by_promise`, `pareto` (with several objectives, the rows on the front of each promise, with
        `promise` and `objectives`), `budget` (algorithm -> `points` and `axes`, where all get as many),
        `selected_on` ("test" or "validation": the examples on which the best is named; None for a metric of neither),
        `selection` (what choosing the best private trial costs), `skipped` (cells left out as hopeless),
        `parent_run_id`, `experiment`, `tracking_uri`, `seconds`, `report` (paths).

    Raises:
        ConfigError: trials that could never start, a cluster that cannot be joined, or nodes that do not fit together.
        TrackingError: the store cannot be used.
    """
    began = time.monotonic()
    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    sweep_id = secrets.token_hex(4)
    sweep = settled(sweep, [config for cell in cells for config in cell.variants.values()])
    samples = number_of_samples(base, sweep, cells)
    check_objectives(sweep, cells)
    if sweep.scheduler == "pbt":
        perturb_every(sweep, cells[0].config)
    for cell in cells:
        check_scheduler(sweep, cell.config)
    if sweep.selection.distribution != "none":
        say(f"number of trials: {samples}, drawn ({sweep.selection.distribution}, mean {sweep.selection.mean:g})")
    if tunes(sweep):
        share = cells[0].config.data.validation
        say(f"each client holds data.validation={share:g} of its examples out of training, to choose by")
    chosen = Chosen(tuple(cells))
    if sweep.skip_hopeless or not quiet:  # a plan that nobody sees and nothing follows is not made
        chosen = choose(cells, say, skip_hopeless=sweep.skip_hopeless)
    info = _describe(sweep_id, base, sweep, cells, chosen, samples)
    tracking = {"tracking.uri": resolve_uri(base.tracking.uri)} if base.tracking.enabled else {}
    with ExitStack() as stack:
        ray = stack.enter_context(ray_session(sweep.ray.address))
        for note in admitted(ray, sweep, chosen.cells, tracking.get("tracking.uri")):
            say(f"note: {note}")
        given, sweep = sweep, with_retries(ray, sweep)
        plan = planned(info, sweep, chosen.cells, tracking, None)
        listed = [] if sweep.search == "optuna" else draw(plan, samples)
        study = None
        if tracking:
            tags = {"study": sweep.name}
            study = open_study(
                tracking["tracking.uri"],
                base.tracking.experiment,
                sweep_id,
                name=sweep.name,
                tags=tags,
                keep=lambda study: keep_plan(study, info, given, plan, listed),
            )
            plan = replace(plan, parent_run_id=study.run_id)
        say(f"sweep id: {sweep_id}")
        work = Work(plan, sweep, tuple(listed), info.num_trials, keep=keeper(study, plan))
        return conduct(info, work, study, stack, quiet=quiet, began=began)


def planned(
    info: Sweep, sweep: SweepConfig, cells: Sequence[Cell], tracking: Mapping[str, Any], parent_run_id: str | None
) -> Plan:
    """What the trials of a sweep share."""
    random, every = sweep.selection.distribution != "none", 0
    if sweep.scheduler == "pbt":
        every = perturb_every(sweep, cells[0].config)
        kept = cells[0].config.fl.checkpoint_every or every
        tracking = {**tracking, "fl.checkpoint_every": kept}
    return Plan(
        info.sweep_id,
        info.axes,
        tuple(cells),
        tracking,
        parent_run_id,
        own_seeds=random,
        retried=bool(sweep.max_retries),
        start=Path.cwd(),
        checkpoints=checkpoints_folder(sweep, tracking.get("tracking.uri")),
        perturb_every=every,
    )


def keeper(study: Study | None, plan: Plan) -> Callable[[Sampled], None]:
    """Stores a trial that is chosen on the way; a store that has gone away costs the resume, not the sweep."""

    def keep(sampled: Sampled) -> None:
        try:
            if study is not None:
                keep_trial(study, plan, sampled)
        except TrackingError as error:
            complain(f"trial {sampled[ID]} is not listed in the tracking store", error)

    return keep


def conduct(
    info: Sweep, work: Work, study: Study | None, stack: ExitStack, *, quiet: bool, began: float
) -> dict[str, Any]:
    """Runs what is left of a sweep, closes its parent run and gives its result.

    Args:
        info: what the sweep was asked to do.
        work: the trials to run, and those that are done.
        study: the open parent run; None without tracking.
        stack: holds Ray, which is left when the trials have ended.
        quiet: print failures only.
        began: `time.monotonic()` at the start.

    Raises:
        TrackingError: the store cannot be used, and no trial has ended.
    """
    folder = Path.cwd() / "mlruns"
    trials: list[Trial] = []
    try:
        # Ray ends before the parent run is closed: no trial can write after its run was marked KILLED.
        with tracked(study), stack.pop_all():
            trials = run_trials(work, sweeps_folder(work.sweep) / info.sweep_id, quiet)
    except TrackingError as error:
        if not trials:
            raise
        complain("the sweep is not closed in the tracking store", error)
    return conclude(info, trials, study, folder, quiet=quiet, began=began)


def _describe(
    sweep_id: str, base: RunConfig, sweep: SweepConfig, cells: Sequence[Cell], chosen: Chosen, samples: int
) -> Sweep:
    return Sweep(
        sweep_id=sweep_id,
        name=sweep.name,
        axes=tuple(sweep.space),
        metric=sweep.objectives[0][0],
        mode=sweep.objectives[0][1],
        objectives=sweep.objectives,
        settings=sweep.settings,
        space={key: {axis.kind: list(axis.values)} for key, axis in sweep.space.items()},
        seeds=tuple(dict.fromkeys(cell.seed for cell in cells)),
        num_trials=len(chosen.cells) * samples,
        config=base.to_dict(),
        selection=sweep.selection.model_dump(mode="json"),
        skipped=chosen.skipped,
        budget=budget_of(sweep, cells),
    )
