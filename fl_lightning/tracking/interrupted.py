"""Runs that ended before their last round, to be gone on with: finding one, and opening it again in the store."""

from typing import Any

from fl_lightning.errors import CheckpointError, TrackingError
from fl_lightning.tracking.location import shown, sqlite_path
from fl_lightning.tracking.orphans import mark_orphans
from fl_lightning.tracking.store import connect, explained


def find(uri: str, run_id: str) -> tuple[Any, Any]:
    """(client of the store, the interrupted run). Writes nothing but closes runs whose process is gone.

    Raises:
        CheckpointError: the run is not in the store, has finished, or is still being written by a process.
        TrackingError: the store cannot be used.
    """
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        raise TrackingError(f"tracking.uri={shown(uri)}: there is no such database, so it holds no run {run_id}")
    client = connect(uri)
    with explained(uri):
        found = _run(client, run_id)
        if found is not None and found.info.status == "RUNNING":
            mark_orphans(client, found.info.experiment_id)
            found = _run(client, run_id)
    if found is None:
        raise CheckpointError(f"run {run_id} is not in {shown(uri)}; give the id that the run printed first")
    if found.info.status == "FINISHED":
        raise CheckpointError(f"run {run_id} has finished; there is nothing to resume")
    if found.info.status == "RUNNING":
        tags = found.data.tags
        raise CheckpointError(
            f"run {run_id} is still being written by process {tags.get('pid')} on {tags.get('host')}; end it first"
        )
    return client, found


def reopen(client: Any, uri: str, run_id: str) -> tuple[int, set[str]]:
    """Sets the run RUNNING and takes its error back.

    Returns:
        The last round whose metrics are in the store, and the names of its parameters.

    Raises:
        TrackingError: the store cannot be used.
    """
    with explained(uri):
        sent = client.get_metric_history(run_id, "seconds")
        client.update_run(run_id, status="RUNNING")
        data = client.get_run(run_id).data
        if "error" in data.tags:
            client.delete_tag(run_id, "error")
    return max((metric.step for metric in sent), default=0), set(data.params)


def _run(client: Any, run_id: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
