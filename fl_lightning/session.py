"""One run from its configuration to its result: `fl-lightning run`, a sweep's trial and the Python API are this."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fl_lightning.analysis.norms import LAB_NOTE, ClippingLab
from fl_lightning.build import Prepared, prepare
from fl_lightning.clip_threshold import measured
from fl_lightning.config import RunConfig
from fl_lightning.federation import Federation, fit, initial
from fl_lightning.privacy import Ledger, statement, summary
from fl_lightning.records import Message, Observer, RoundRecord, RunResult, weights_sha256
from fl_lightning.tracking import RunTracker, resolve_uri, tracked

PRIVATE, NOT_PRIVATE = "PRIVATE", "NOT PRIVATE"
TRUST_MODEL = "local"


def run(
    config: RunConfig,
    *,
    observers: Sequence[Observer] = (),
    parent_run_id: str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> RunResult:
    """Trains one federation and records it.

    Everything that can be refused is refused before the run is opened in the tracking store. Training uses one thread
    per process, so that its bits do not depend on the machine's cores.

    Args:
        config: the validated configuration.
        observers: watch the run; called in order after tracking.
        parent_run_id: the MLflow run of the sweep this run is a trial of.
        tags: more MLflow tags.

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
    with _one_thread():
        prepared = prepare(config)
        tracker = RunTracker(resolve_uri(config.tracking.uri)) if config.tracking.enabled else None
        if tracker is not None:
            tracker.start(
                config.to_dict(),
                experiment=config.tracking.experiment,
                parent_run_id=parent_run_id,
                tags={"config_sha256": config.sha256, **(tags or {})},
            )
        with tracked(tracker):
            return _train(prepared, tracker, observers)


def _train(prepared: Prepared, tracker: RunTracker | None, observers: Sequence[Observer]) -> RunResult:
    config, objective = prepared.config, prepared.objective
    watching: list[Observer] = [*([tracker] if tracker is not None else []), *observers]
    protected = config.privacy.level != "none"
    shield = prepared.algorithm.protection
    ledger = Ledger(unit=shield.unit, delta=shield.delta, adjacency=shield.adjacency) if protected else None
    start = federation = initial(objective.initial, objective.buffers())
    run_id = tracker.run_id if tracker is not None else None
    info = {
        "run_id": run_id,
        "experiment_id": tracker.experiment_id if tracker is not None else None,
        "tracking_uri": tracker.uri if tracker is not None else None,
        "num_parameters": federation.server.w.numel(),
        "clients": config.fl.num_clients,
        "rounds": config.fl.rounds,
        "partition_sha256": prepared.partition.sha256,
        "config": config.to_dict(),
    }
    for observer in watching:
        observer.on_start(info)
    if tracker is not None:
        _keep_manifest(prepared, tracker)
    prepared, threshold = measured(prepared, start)
    undeclared: set[str] = set()
    records: list[RoundRecord] = []
    lab = ClippingLab() if config.fl.clipping_lab else None
    for federation, record, messages in _rounds(prepared, start, ledger, lab):
        undeclared |= {name for message in messages for name in message.undeclared}
        if threshold is not None and not records:
            record = replace(record, notes=(threshold["note"], *record.notes))
        if lab is not None and not records:
            record = replace(record, notes=(LAB_NOTE, *record.notes))
        records.append(record)
        for observer in watching:
            observer.on_round(record)
    result = _result(prepared, federation, ledger, run_id, records, undeclared)
    if threshold is not None:
        result = replace(result, final={**result.final, "clip": dict(threshold)})
    if tracker is not None and ledger is not None:
        _keep_account(prepared, ledger, tracker)
    if tracker is not None and lab is not None:
        _keep_norms(lab, tracker)
    for observer in watching:
        observer.on_end(result)
    return result


def _rounds(
    prepared: Prepared, federation: Federation, ledger: Ledger | None, lab: ClippingLab | None = None
) -> Iterator[tuple[Federation, RoundRecord, list[Message]]]:
    engine = prepared.engine()
    try:
        yield from fit(
            federation,
            rounds=prepared.config.fl.rounds,
            cohort_of=lambda round: prepared.cohorts[round - 1],
            algorithm=prepared.algorithm,
            engine=engine,
            evaluate=prepared.evaluate,
            eval_every=prepared.config.fl.eval_every,
            ledger=ledger,
            inspect=None if lab is None else lab.inspect,
        )
    finally:
        engine.close()


def _result(
    prepared: Prepared,
    federation: Federation,
    ledger: Ledger | None,
    run_id: str | None,
    records: Sequence[RoundRecord],
    undeclared: set[str],
) -> RunResult:
    facts = None
    if ledger is not None:
        facts = summary(ledger, **_terms(prepared))
        facts["noise_multiplier"] = _span(prepared.algorithm.protection.multipliers)
        if prepared.noise.nominal_epsilon is not None:
            facts["nominal_epsilon"] = prepared.noise.nominal_epsilon  # what the paper's Eq. 16 claims
    private = facts is not None and not facts["infinite"] and not undeclared
    last = records[-1]
    final = {
        "test_accuracy": last.test_accuracy,
        "test_loss": last.test_loss,
        "weights_sha256": weights_sha256(federation.server.w, federation.server.buffers),
        "epsilon": facts["epsilon"] if facts is not None else None,
        "privacy": facts,
    }
    badge = PRIVATE if private else NOT_PRIVATE
    config = prepared.config.to_dict()
    return RunResult(run_id, "finished", badge, config, prepared.partition.sha256, tuple(records), final)


def _terms(prepared: Prepared) -> dict[str, Any]:
    return {
        "level": prepared.config.privacy.level,
        "clip_norm": prepared.algorithm.protection.clip,
        "trust_model": TRUST_MODEL,
        "sizes": {client: len(shard) for client, shard in enumerate(prepared.partition.indices)},
        "public_examples": prepared.public_examples,
    }


def _span(multipliers: Sequence[float]) -> dict[str, float]:
    return {"min": min(multipliers), "max": max(multipliers)}


def _keep_manifest(prepared: Prepared, tracker: RunTracker) -> None:
    from fl_lightning.data.manifest import save_manifest

    with tempfile.TemporaryDirectory() as folder:
        for path in save_manifest(prepared.partition, Path(folder)):
            tracker.log_artifact_file(path, "partition")


def _keep_norms(lab: ClippingLab, tracker: RunTracker) -> None:
    tracker.log_text(lab.to_csv(), "clipping/norms.csv")
    with tempfile.TemporaryDirectory() as folder:
        tracker.log_artifact_file(lab.draw(Path(folder) / "norms.png"), "clipping")


def _keep_account(prepared: Prepared, ledger: Ledger, tracker: RunTracker) -> None:
    import json

    tracker.log_text(json.dumps(ledger.to_dict(), indent=1), "privacy/ledger.json")
    tracker.log_text(statement(ledger, **_terms(prepared)) + "\n", "privacy/statement.txt")


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
