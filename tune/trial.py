"""One trial: a federation in a worker process of Ray Tune, the very same run as `fl-lightning run` would do."""

import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from fl_lightning import FLError, Observer, RoundRecord, RunResult
from fl_lightning.analysis.trials import AXIS_TAG, HISTORY, axis_text
from fl_lightning.errors import CheckpointError
from fl_lightning.records import StopEarly
from fl_lightning.terminal import round_text
from fl_lightning.tracking import RUN_NAME, RunTracker, close_lost, last_attempt, log_text, read_json
from tune.space import EARLIER, ID, Plan, Point, Sampled, sampled_of
from tune.trial_log import LOG_FILE, listening

OUTCOME = "outcome"
"""The key of a trial's last report: JSON text with what `outcome_of` or `failure_of` gives."""


LONGEST_NAME = 80
"""Characters of a trial's name in MLflow, before its seed; the whole setting is in its tags and parameters."""

WORKER_LOST = "the worker process ended unexpectedly: it was killed, often for want of memory, or it crashed"


NODE_LOST = "the node that ran it was lost: the machine, its network or Ray on it went down"


def tune_trial(config: dict[str, Any], plan: Plan) -> None:
    """The function that Ray Tune runs in a worker; reports every round, then the outcome.

    A failure is reported with its own type, message and parameters. Unless it is a fault of what was asked for, it is
    raised again, so that Ray Tune replaces the worker: what it has left behind in the process, such as a GPU in an
    undefined state, cannot reach the next trial. With `sweep.max_retries` it is then tried again.
    """
    from ray import tune

    from tune.member import at_boundary, train_member

    if plan.start is not None and plan.start.is_dir():
        os.chdir(plan.start)
    sampled = sampled_of(config)
    trial_id = sampled[ID]
    _free_memory()
    with listening() as log:
        try:
            reporter = Reporter(tune.report, _asks(plan, trial_id), lambda round: at_boundary(plan, round), log.say)
            outcome = train_member(plan, sampled, reporter) if plan.perturb_every else _attempt(plan, sampled, reporter)
        except Exception as error:
            log.write("".join(traceback.format_exception(error)))
            run_id = _record_failure(plan, sampled, trial_id, error)
            _keep_log(plan, run_id, log.text())
            tune.report({OUTCOME: json.dumps({**failure_of(error), "run_id": run_id, "log": log.text()})})
            if isinstance(error, FLError):
                return
            raise
    tune.report({OUTCOME: json.dumps(outcome)})


def _keep_log(plan: Plan, run_id: str | None, text: str) -> None:
    """Stores what a failed trial has said with its run; its folder has it where the store cannot be used."""
    if run_id is None:
        return
    with suppress(FLError):
        log_text(str(plan.tracking["tracking.uri"]), run_id, text, LOG_FILE)


def _free_memory() -> None:
    """Gives back what the worker's earlier trials held: cycles of objects, and their blocks of the GPU's memory."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _asks(plan: Plan, trial_id: str) -> Callable[[], str | None]:
    """Asks why the trial shall end now; None: it shall not."""
    if plan.stops is None:
        return lambda: None
    import ray

    return lambda: ray.get(plan.stops.reason.remote(trial_id))


def _attempt(plan: Plan, sampled: Sampled, reporter: "Reporter") -> dict[str, Any]:
    """Runs a trial from its start or from where an earlier attempt stands; returns its outcome."""
    earlier = sampled.get(EARLIER)
    if plan.retried and plan.parent_run_id is not None:
        uri = str(plan.tracking["tracking.uri"])
        if found := last_attempt(uri, plan.parent_run_id, sampled[ID]):
            earlier, status = found
            if status == "FINISHED" and (result := read_json(uri, earlier, "result.json")) is not None:
                return stored_outcome(result)  # the process crashed when all was done
            if status in ("FINISHED", "RUNNING"):
                close_lost(uri, earlier)  # Ray Tune starts a second attempt only when the first one's process is gone
    return outcome_of(run_trial(plan, {**sampled, EARLIER: earlier}, sampled[ID], observers=[reporter]))


def run_trial(
    plan: Plan,
    sampled: Mapping[str, Any],
    trial_id: str,
    *,
    observers: Sequence[Observer] = (),
    after_checkpoint: Any = None,
) -> RunResult:
    """Runs one trial here, in this process; no Ray is needed.

    With an earlier run in `sampled` that has a usable checkpoint, it goes on with that run.

    Raises:
        Exception: whatever the federation raised.
    """
    from fl_lightning import run
    from fl_lightning.session import resume

    if (earlier := sampled.get(EARLIER)) is not None and has_checkpoint(
        uri := str(plan.tracking["tracking.uri"]), earlier
    ):
        return resume(earlier, uri=uri, observers=observers)
    point = plan.point(sampled)
    tags = tags_of(plan, {**sampled, ID: trial_id})
    return run(
        point.config,
        observers=observers,
        parent_run_id=plan.parent_run_id,
        tags=tags,
        checkpoints=plan.checkpoints,
        after_checkpoint=after_checkpoint,
    )


def has_checkpoint(uri: str, run_id: str) -> bool:
    """Whether an interrupted run can be gone on with; its checkpoint may be absent, damaged or of another version."""
    from fl_lightning.checkpoint import load

    try:
        load(RunTracker(uri).reopen(run_id))
    except CheckpointError:
        return False
    return True


def tags_of(plan: Plan, sampled: Sampled) -> dict[str, str]:
    """What a trial's run is tagged with: sweep, trial, setting, and each axis with its value."""
    point = plan.point(sampled)
    axes = {f"{AXIS_TAG}{key}": axis_text(value) for key, value in point.params.items()}
    named = {"sweep_id": plan.sweep_id, "trial_id": sampled[ID], "setting": plan.setting(sampled), **axes}
    return {**named, RUN_NAME: name_of(point, sampled[ID])}


def name_of(point: Point, trial_id: str) -> str:
    """What MLflow's lists and legends show of a trial: `t003 fedsam lr=0.1 s42`."""
    parts = [key.rpartition(".")[2] for key in point.params]
    said = []
    for key, part, value in zip(point.params, parts, point.params.values(), strict=True):
        shown = f"{value:.4g}" if isinstance(value, float) else axis_text(value)
        said.append(shown if key == "algorithm" else f"{part if parts.count(part) == 1 else key}={shown}")
    return f"{' '.join([trial_id, *said])[:LONGEST_NAME]} s{point.seed}"


def _record_failure(plan: Plan, sampled: Mapping[str, Any], trial_id: str, error: Exception) -> str | None:
    """Sees to it that a failed trial has a child run, also when it ended before it could open one; its id.

    None without tracking, and where the store cannot be used: the trial's own error counts, and gets a note.
    """
    if plan.parent_run_id is None:
        return None
    uri = str(plan.tracking["tracking.uri"])
    try:
        if found := last_attempt(uri, plan.parent_run_id, trial_id):
            return found[0]
        point = plan.point(sampled)
        config = point.config
        tags = {"config_sha256": config.sha256, **tags_of(plan, sampled)}
        tracker = RunTracker(uri)
        experiment = config.tracking.experiment
        tracker.start(config.to_dict(), experiment=experiment, parent_run_id=plan.parent_run_id, tags=tags)
        tracker.finish("FAILED", error)
    except FLError as lost:
        error.add_note(f"and the failed trial is not in the tracking store: {lost}")
        return None
    return tracker.run_id


class Reporter:
    """An observer that tells Ray Tune of every round, and ends the run where the sweep's scheduler says so."""

    def __init__(
        self,
        report: Callable[..., None],
        shall_end: Callable[[], str | None],
        held: Callable[[int], bool] = lambda round: False,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Args:
        report: Ray Tune's.
        shall_end: why the run shall end now; None: it shall not.
        held: whether a round is reported elsewhere, with its checkpoint.
        say: is told each round in words.
        """
        self.report, self.shall_end, self.held, self.say = report, shall_end, held, say
        self.run_id: str | None = None

    def on_start(self, info: Mapping[str, Any]) -> None:
        self.run_id = info["run_id"]

    def on_round(self, record: RoundRecord) -> None:
        self.say(f"round {record.round}: {round_text(record, 0.0)}")
        if self.held(record.round):
            return
        self.report(measured_of(record, self.run_id))
        if (reason := self.shall_end()) is not None:  # the report returns when the scheduler has seen it
            raise StopEarly(reason, "scheduler")

    def on_end(self, result: RunResult) -> None:
        """Nothing: the outcome is reported when the run is closed in MLflow as well."""


def measured_of(record: RoundRecord, run_id: str | None) -> dict[str, Any]:
    """What Ray Tune is told of a round."""
    measured = {
        "round": record.round,
        "test_accuracy": record.test_accuracy,
        "test_loss": record.test_loss,
        "validation_accuracy": record.validation_accuracy,
        "validation_loss": record.validation_loss,
        "epsilon": record.epsilon,
        "seconds": record.seconds,
    }
    return {"run_id": run_id, **{key: value for key, value in measured.items() if value is not None}}


def outcome_of(result: RunResult) -> dict[str, Any]:
    """What the sweep keeps of a finished trial."""
    return stored_outcome(asdict(result))


def stored_outcome(result: Mapping[str, Any]) -> dict[str, Any]:
    """`outcome_of` from the `result.json` that the trial's run keeps."""
    final, rounds = dict(result["final"]), result["rounds"]
    last = rounds[-1]
    return {
        "status": "finished",
        "run_id": result["run_id"],
        "badge": result["badge"],
        "partition_sha256": result["partition_sha256"],
        "privacy": final.pop("privacy", None),
        "final": final,
        "metrics": {**last["metrics"], "oracle/train_loss": last["train_loss"], "seconds": last["seconds"]},
        "history": history_of(rounds),
    }


def history_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The rounds of the metrics in `HISTORY` that the run has measured, as MLflow would give them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in rounds:
        for name in HISTORY:
            value = record.get(name, record["metrics"].get(name))
            if value is not None:
                found.setdefault(name, []).append((record["round"], value))
    return found


def failure_of(error: BaseException) -> dict[str, Any]:
    """What the sweep keeps of a failed trial: the fault's own type and message."""
    return {"status": "failed", "error": {"type": type(error).__name__, "message": str(error) or repr(error)}}


def loss_of(error: BaseException | None, node: str | None = None) -> dict[str, Any]:
    """What the sweep keeps of a trial that ended without a word, from Ray's own error and the node it last ran on."""
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

    if isinstance(error, RayTaskError):  # raised before or after our function, by the start of the worker, say
        return failure_of(error.cause)
    if isinstance(error, ActorUnavailableError) or "node has died" in str(error):
        message = NODE_LOST + (f" ({node})" if node else "")
        return {"status": "failed", "error": {"type": "NodeLost", "message": message}}
    if error is None or isinstance(error, RayActorError):
        kind = "WorkerLost" if error is None else type(error).__name__
        return {"status": "failed", "error": {"type": kind, "message": WORKER_LOST}}
    return failure_of(error)
