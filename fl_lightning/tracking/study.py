"""A sweep in MLflow: one parent run, one child run per trial, and reading them back for tables and figures."""

import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import TrackingError
from fl_lightning.tracking.facts import NOTE, PARENT_TAG, process_tags
from fl_lightning.tracking.lifetime import held_back
from fl_lightning.tracking.location import shown, sqlite_path
from fl_lightning.tracking.orphans import mark_orphans, search
from fl_lightning.tracking.outbox import requests
from fl_lightning.tracking.store import connect, ensure_experiment, error_text, explained
from fl_lightning.tracking.values import as_text, store_name, tags_of

if TYPE_CHECKING:
    from mlflow import MlflowClient


log = logging.getLogger("fl_lightning.tracking")


@dataclass(frozen=True)
class Study:
    """An open sweep. `with tracked(open_study(...)) as study:` closes it whatever happens."""

    uri: str
    experiment_id: str
    run_id: str
    sweep_id: str

    def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
        """Closes the parent run; see `close_parent`. FINISHED becomes FAILED if a trial failed.

        A store that cannot be used any more is a warning: the trials' results are worth more than their record.
        """
        message = None if error is None else error_text(error)
        try:
            close_parent(self.uri, self.run_id, status=None if status == "FINISHED" else status, error=message)
        except TrackingError as fault:
            log.warning("tracking: sweep %s could not be closed (%s)", self.sweep_id, fault)


@dataclass(frozen=True)
class ChildRun:
    """A trial as it was recorded.

    Attributes:
        run_id: MLflow's id.
        name: the run's name.
        status: RUNNING, FINISHED, FAILED or KILLED.
        params: dotted name -> text, whole also where MLflow holds a shortened one.
        tags: all tags.
        metrics: the last value of each metric.
        history: metric -> (round, value) in order of rounds, for the metrics that were asked for.
    """

    run_id: str
    name: str
    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    history: Mapping[str, tuple[tuple[int, float], ...]]


def open_study(
    uri: str,
    experiment: str,
    sweep_id: str,
    *,
    name: str | None = None,
    tags: Mapping[str, Any] | None = None,
    keep: Callable[[Study], None] = lambda study: None,
) -> Study:
    """Creates the parent run of a sweep (tags `kind=sweep`, `sweep_id`) and closes orphans of this host first.

    `keep` stores what must be there before anything can stop the sweep; if it fails or a signal comes, the run ends.

    Raises:
        TrackingError: the store cannot be used.
    """
    experiment_id = ensure_experiment(uri, experiment)
    client = connect(uri)
    note = f"Sweep `{sweep_id}`, under way or ended early: `fl-lightning sweep --resume {sweep_id}` goes on with it."
    all_tags = {**process_tags(), "kind": "sweep", "sweep_id": sweep_id, NOTE: note, **tags_of(tags or {})}
    opened: Study | None = None
    try:
        with explained(uri):
            mark_orphans(client, experiment_id)
            with held_back():  # whatever the store has opened will be closed
                run = client.create_run(experiment_id, tags=all_tags, run_name=name or f"sweep-{sweep_id}")
                opened = Study(uri, experiment_id, str(run.info.run_id), sweep_id)
                keep(opened)
        return opened
    except BaseException as error:
        if opened is not None:
            opened.finish("FAILED" if isinstance(error, Exception) else "KILLED", error)
        raise


def close_parent(
    uri: str, run_id: str, *, failed: bool | None = None, status: str | None = None, error: str | None = None
) -> str:
    """Closes a sweep's parent run and returns the status it got.

    Children that still say RUNNING (a worker was killed) become KILLED if the sweep was, FAILED otherwise. With neither
    `status` nor `failed`, the parent is FAILED if any trial is not FINISHED. Attempts of one trial share a tag
    `trial_id`; the last one counts.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        last: dict[str, str] = {}
        for child in _child_runs(client, run_id):
            final = child.info.status
            if final == "RUNNING":
                final = "KILLED" if status == "KILLED" else "FAILED"
                client.set_tag(child.info.run_id, "error", "the sweep ended and the trial had not closed its run")
                client.set_terminated(child.info.run_id, final)
            last[child.data.tags.get("trial_id", child.info.run_id)] = final
        if failed is None:
            failed = any(final != "FINISHED" for final in last.values())
        status = status or ("FAILED" if failed else "FINISHED")
        if error:
            client.set_tag(run_id, "error", error)
        client.set_terminated(run_id, status)
    return status


def find_parent(uri: str, experiment: str | None, sweep_id: str) -> str:
    """The run id of a sweep's parent, in one experiment or (None) in all.

    Raises:
        TrackingError: no such sweep; the message lists the latest ones.
    """
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise TrackingError(f"tracking.uri={shown(uri)}: there is no such database, so it holds no sweep {sweep_id}")
    client = connect(uri)
    with explained(uri):
        if experiment is None:
            ids = [found.experiment_id for found in client.search_experiments()]
        else:
            named = client.get_experiment_by_name(experiment)
            ids = [named.experiment_id] if named else []
        for each in ids:
            mark_orphans(client, each)
        sweeps = {run.data.tags["sweep_id"]: run.info.run_id for run in _sweeps(client, ids)}
    if sweep_id not in sweeps:
        known = ", ".join(list(sweeps)[-5:]) or "none"
        place = shown(uri) if experiment is None else f"experiment {experiment} of {shown(uri)}"
        raise TrackingError(f"sweep {sweep_id} is not in {place}; the latest sweeps there: {known}")
    return sweeps[sweep_id]


def children(uri: str, parent_run_id: str, *, history: Iterable[str] = ("test_accuracy",)) -> list[ChildRun]:
    """All trials of a sweep, oldest first, with the rounds of the metrics named in `history`.

    Raises:
        TrackingError: the store cannot be used.
    """
    client, names = connect(uri), tuple(history)
    with explained(uri):
        return [_child(client, run, names) for run in _child_runs(client, parent_run_id)]


def read_runs(uri: str, run_ids: Sequence[str], *, history: Iterable[str] = ("test_accuracy",)) -> list[ChildRun]:
    """Runs by their ids or the beginnings of them, in the order asked for; `history` as in `children`.

    Raises:
        TrackingError: no such run or several, it is a sweep's, or the store cannot be used.
    """
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise TrackingError(f"tracking.uri={shown(uri)}: there is no such database, so it holds no run {run_ids[0]}")
    client, names, found = connect(uri), tuple(history), []
    with explained(uri):
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        for each in ids:
            mark_orphans(client, each)
        for run_id in run_ids:
            alike = list(search(client, ids, f"attributes.run_id LIKE '{run_id}%'")) if run_id.isalnum() else []
            if len(alike) != 1:
                many = f"is the beginning of {len(alike)} runs in" if alike else "is not in"
                raise TrackingError(
                    f"run {run_id} {many} {shown(uri)}; give a run's whole id, as `run` printed it first"
                )
            if alike[0].data.tags.get("kind") == "sweep":
                sweep_id = alike[0].data.tags.get("sweep_id")
                raise TrackingError(f"run {run_id} is a sweep; compare its trials by fl-lightning report {sweep_id}")
            found.append(_child(client, alike[0], names))
    return found


def log_artifact_file(uri: str, run_id: str, path: str | Path, folder: str | None = None) -> None:
    """Stores a file among a run's artifacts; the run may be closed already.

    Raises:
        TrackingError: the file or the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        client.log_artifact(run_id, str(path), folder)


def log_text(uri: str, run_id: str, text: str, path: str) -> None:
    """Stores a text as the artifact `path` of a run; the run may be closed already.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        client.log_text(run_id, text, path)


def describe(uri: str, run_id: str, text: str) -> None:
    """Sets the markdown that MLflow shows at the top of a run's page; a text that is too long ends in dots.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        for key, value in tags_of({NOTE: text}).items():
            client.set_tag(run_id, key, value)


def log_metrics(uri: str, run_id: str, metrics: Mapping[str, float], *, step: int = 0) -> None:
    """Adds metrics to a run that may be closed already, such as a sweep's statistics over seeds to its parent.

    Raises:
        TrackingError: the store cannot be used.
    """
    client, now = connect(uri), int(time.time() * 1000)
    with explained(uri):
        for request in requests("metrics", [(store_name(k), float(v), now, step) for k, v in metrics.items()]):
            request.send(client, run_id)


def _sweeps(client: "MlflowClient", experiment_ids: list[str]) -> list[Any]:
    return list(search(client, experiment_ids, "tags.kind = 'sweep'")) if experiment_ids else []


def _child_runs(client: "MlflowClient", parent_run_id: str) -> list[Any]:
    experiment_id = client.get_run(parent_run_id).info.experiment_id
    return list(search(client, [experiment_id], f"tags.`{PARENT_TAG}` = '{parent_run_id}'"))


def _child(client: "MlflowClient", run: Any, names: tuple[str, ...]) -> ChildRun:
    run_id = run.info.run_id
    params = dict(run.data.params)
    if "params_file" in run.data.tags:
        params = _whole_params(client, run_id, run.data.tags["params_file"])
    return ChildRun(
        run_id=run_id,
        name=run.info.run_name,
        status=run.info.status,
        params=params,
        tags=dict(run.data.tags),
        metrics={key: _unbounded(value) for key, value in run.data.metrics.items()},
        history={name: _rounds(client, run_id, name) if name in run.data.metrics else () for name in names},
    )


def _whole_params(client: "MlflowClient", run_id: str, file: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        content = json.loads(Path(client.download_artifacts(run_id, file, folder)).read_text())
    return {name: as_text(value) for name, value in content["params"].items()}


def _rounds(client: "MlflowClient", run_id: str, name: str) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((entry.step, _unbounded(entry.value)) for entry in client.get_metric_history(run_id, name)))


def _unbounded(value: float) -> float:
    """MLflow's databases hold an infinity as the largest float."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value
