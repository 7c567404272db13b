"""One run from its configuration to its result: `fl-lightning run`, a sweep's trial and the Python API are this."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fl_lightning.analysis.norms import ClippingLab
from fl_lightning.artifacts import (
    NOT_PRIVATE,
    audited,
    keep_account,
    keep_data,
    keep_model,
    keep_norms,
    paper_of,
    span,
    terms,
    undeclared_warning,
)
from fl_lightning.build import Prepared, prepare
from fl_lightning.canaries import arm
from fl_lightning.checkpoint import Progress, exclusive, load, save
from fl_lightning.clip_threshold import clipped_as, measured
from fl_lightning.config import RunConfig
from fl_lightning.config.federation import DEFAULT_CHECKPOINT_EVERY
from fl_lightning.continuing import continued, new_ledger
from fl_lightning.errors import CheckpointError, PrivacyError
from fl_lightning.federation import Bystanders, Federation, fit, initial
from fl_lightning.foreseen import Budget, budget_of
from fl_lightning.privacy import summary
from fl_lightning.privacy.readings import readings
from fl_lightning.records import Message, Observer, Release, RoundRecord, RunResult, weights_sha256
from fl_lightning.rounds import first_notes, tell, why_stopped
from fl_lightning.threads import one_thread
from fl_lightning.tracking import RunTracker, resolve_uri, tracked

PRIVATE = "PRIVATE"

AfterCheckpoint = Callable[[Path, RoundRecord], None]
"""Is called with the folder of a checkpoint that was just written, and the record of its last round."""


def run(
    config: RunConfig,
    *,
    observers: Sequence[Observer] = (),
    parent_run_id: str | None = None,
    tags: Mapping[str, Any] | None = None,
    checkpoints: Path | None = None,
    after_checkpoint: AfterCheckpoint | None = None,
) -> RunResult:
    """Trains one federation and records it.

    Everything that can be refused is refused before the run is opened in the tracking store. Training uses one thread
    per process, so that its bits do not depend on the machine's cores.

    Args:
        config: the validated configuration.
        observers: watch the run; called in order after tracking.
        parent_run_id: the MLflow run of the sweep this run is a trial of.
        tags: more MLflow tags.
        checkpoints: gets the run's folder of checkpoints; None: `RunTracker.checkpoints`.
        after_checkpoint: see `AfterCheckpoint`.

    Returns:
        The result; `result.to_dict()` is the JSON of `fl-lightning run --output`.

    Raises:
        FLError: a fault in what was asked for.

    Example:
        >>> from fl_lightning import RunConfig, run
        >>> result = run(RunConfig(algorithm="fedsam", fl={"rounds": 5}))
        >>> result.badge
        'NOT PRIVATE'
    """
    with one_thread():
        prepared = prepare(config)
        uri = resolve_uri(config.tracking.uri) if config.tracking.enabled else None
        tracker = RunTracker(uri, checkpoints=checkpoints) if uri is not None else None
        with tracked(tracker):
            if tracker is not None:
                tracker.start(
                    config.to_dict(),
                    experiment=config.tracking.experiment,
                    parent_run_id=parent_run_id,
                    tags={"config_sha256": config.sha256, **(tags or {})},
                )
            return _train(prepared, tracker, observers, after=after_checkpoint)


def resume(
    run_id: str,
    *,
    uri: str | None = None,
    observers: Sequence[Observer] = (),
    folder: Path | None = None,
    changed: RunConfig | None = None,
    donor: Path | None = None,
    after_checkpoint: AfterCheckpoint | None = None,
) -> RunResult:
    """Continues a run that was stopped or killed from its last checkpoint, in the same MLflow run.

    The result is that of the undisturbed run, bit for bit on the same device: weights, curves and epsilon.

    Args:
        run_id: MLflow's id of the run.
        uri: `tracking.uri`; None: see `resolve_uri`.
        observers: as in `run`.
        folder: of the checkpoint; None: where the run says that it keeps it.
        changed: the configuration of the rounds to come, in a population whose members change their settings on the
            way; None: that of the checkpoint.
        donor: another run's checkpoint, see `continuing.continued`; None: the run's own.
        after_checkpoint: see `AfterCheckpoint`.

    Raises:
        CheckpointError: the run is unknown, finished or still running, or its checkpoint cannot be used.
        FLError: as `run`.
    """
    with one_thread():
        tracker = RunTracker(resolve_uri(uri))
        place = tracker.reopen(run_id)
        lock = exclusive(folder or place)
        stored = load(folder or place)
        config = RunConfig(**stored.config) if changed is None else changed
        prepared = prepare(config)
        try:
            progress = continued(prepared, stored, donor)
        except CheckpointError as error:
            raise CheckpointError(f"run {run_id}: {error}") from None
        with lock, tracked(tracker):
            tracker.restart(config.to_dict())
            return _train(prepared, tracker, observers, progress, after=after_checkpoint)


def _train(
    prepared: Prepared,
    tracker: RunTracker | None,
    observers: Sequence[Observer],
    progress: Progress | None = None,
    after: AfterCheckpoint | None = None,
) -> RunResult:
    config, objective = prepared.config, prepared.objective
    watching: list[Observer] = [*([tracker] if tracker is not None else []), *observers]
    run_id = tracker.run_id if tracker is not None else None
    start = initial(objective.initial, objective.buffers())
    info = {
        "run_id": run_id,
        "experiment_id": tracker.experiment_id if tracker is not None else None,
        "tracking_uri": tracker.uri if tracker is not None else None,
        "num_parameters": start.server.w.numel(),
        "clients": config.fl.num_clients,
        "rounds": config.fl.rounds,
        "partition_sha256": prepared.partition.sha256,
        "config": config.to_dict(),
    }
    for observer in watching:
        observer.on_start(info)
    if tracker is not None:
        keep_data(prepared, tracker)
    if progress is None:
        prepared, threshold = measured(prepared, start)
        progress = Progress(
            start,
            ledger=new_ledger(prepared) if config.privacy.level != "none" else None,
            lab=ClippingLab() if config.fl.clipping_lab else None,
            threshold=threshold,
        )
    else:
        prepared = clipped_as(prepared, progress.threshold)
        if tracker is not None:
            tracker.send_again(progress.records)
    prepared, watch = arm(prepared)
    keep = _keeper(prepared, tracker, after)
    keep(progress, first=True)
    budget = None if prepared.releases is None else budget_of(prepared.releases, prepared.noise)
    asked = None
    for federation, record, messages in _rounds(prepared, progress, budget):
        progress.federation = federation
        progress.undeclared |= {name for message in messages for name in message.undeclared}
        if not progress.records:
            record = replace(record, notes=(*first_notes(progress), *record.notes))
        progress.records.append(record)
        asked = tell(watching, record)
        keep(progress)
        if asked is not None:
            break
    records = progress.records
    if not records and budget is not None:
        raise PrivacyError(f"nothing was trained: {budget.reason(0)}; raise it, or privacy.noise_multiplier")
    result = _result(prepared, progress, run_id)
    if (stopped := why_stopped(asked, budget, len(records), config.fl.rounds)) is not None:
        result = replace(result, final={**result.final, "stopped": stopped})
    if progress.threshold is not None:
        result = replace(result, final={**result.final, "clip": dict(progress.threshold)})
    if tracker is not None and progress.ledger is not None:
        keep_account(prepared, progress.ledger, result.final["privacy"]["readings"], tracker)
    if tracker is not None and progress.lab is not None:
        keep_norms(progress.lab, tracker)
    if watch is not None and progress.ledger is not None:
        result = audited(result, watch.verdict(progress.ledger), tracker)
    if tracker is not None:
        keep_model(prepared, progress.federation.server, result, tracker)
    for observer in watching:
        observer.on_end(result)
    return result


def _keeper(prepared: Prepared, tracker: RunTracker | None, after: AfterCheckpoint | None) -> Callable[..., None]:
    """Writes a checkpoint every so many rounds, and before the first, so that any killed run can be resumed."""
    config = prepared.config
    every = config.fl.checkpoint_every or DEFAULT_CHECKPOINT_EVERY

    def keep(progress: Progress, first: bool = False) -> None:
        rounds = progress.federation.server.round
        if tracker is None or (rounds % every and not first) or getattr(config.privacy, "audit", False):
            return
        save(tracker.checkpoints, progress, config.to_dict(), prepared.partition.sha256)
        tracker.send_now()
        if after is not None and not first:
            after(tracker.checkpoints, progress.records[-1])

    return keep


def _rounds(
    prepared: Prepared, progress: Progress, budget: Budget | None
) -> Iterator[tuple[Federation, RoundRecord, list[Message]]]:
    engine, ledger, lab = prepared.engine(), progress.ledger, progress.lab
    try:
        yield from fit(
            progress.federation,
            rounds=prepared.config.fl.rounds,
            cohort_of=lambda round: prepared.cohorts[round - 1],
            algorithm=prepared.algorithm,
            engine=engine,
            evaluate=prepared.evaluate,
            validate=prepared.validate,
            eval_every=prepared.config.fl.eval_every,
            ledger=ledger,
            inspect=None if lab is None else lab.inspect,
            admit=partial(budget.admit, ledger) if budget is not None and ledger is not None else None,
            bystanders=_bystanders(prepared),
        )
    finally:
        engine.close()


def _bystanders(prepared: Prepared) -> Bystanders | None:
    """Where cohorts are secret, a client that was not drawn has paid for the round as well."""
    plan, noise = prepared.releases, prepared.noise
    if plan is None or not plan.secret:
        return None

    def others(round: int, messages: Sequence[Message]) -> list[tuple[int, Sequence[Release]]]:
        present = {message.client for message in messages}
        absent = [k for k in range(len(plan.sizes)) if k not in present]
        return [(k, plan.visit(k, round, noise.multipliers[k], noise.scalar)) for k in absent]

    return others


def _result(prepared: Prepared, progress: Progress, run_id: str | None) -> RunResult:
    federation, ledger, records = progress.federation, progress.ledger, progress.records
    facts = None
    if ledger is not None:
        facts = summary(ledger, **terms(prepared))
        facts["noise_multiplier"] = span(prepared.algorithm.protection.multipliers)
        facts["warnings"] += undeclared_warning(progress.undeclared)
        facts["readings"] = readings(ledger, paper=paper_of(prepared))
        if prepared.noise.nominal_epsilon is not None:
            facts["nominal_epsilon"] = prepared.noise.nominal_epsilon  # what the paper's Eq. 16 claims
    scaled = getattr(prepared.config.privacy, "noise_cohort_size", None) is not None
    private = facts is not None and not facts["infinite"] and not progress.undeclared and not scaled
    last = records[-1]
    final = {
        "test_accuracy": last.test_accuracy,
        "test_loss": last.test_loss,
        "validation_accuracy": last.validation_accuracy,
        "validation_loss": last.validation_loss,
        "weights_sha256": weights_sha256(federation.server.w, federation.server.buffers),
        "epsilon": facts["epsilon"] if facts is not None else None,
        "privacy": facts,
        "stopped": None,
    }
    badge = PRIVATE if private else NOT_PRIVATE
    config = prepared.config.to_dict()
    return RunResult(run_id, "finished", badge, config, prepared.partition.sha256, tuple(records), final)
