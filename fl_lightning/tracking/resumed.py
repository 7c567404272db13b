"""A sweep that was stopped or killed, to be gone on with: closing what it left open, reopening its parent run."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from fl_lightning.errors import CheckpointError
from fl_lightning.tracking.facts import PARENT_TAG, process_tags
from fl_lightning.tracking.lifetime import held_back
from fl_lightning.tracking.location import shown
from fl_lightning.tracking.orphans import ORPHAN_MESSAGE, mark_orphans, search, this_process
from fl_lightning.tracking.store import connect, explained
from fl_lightning.tracking.study import Study

PATIENCE = 30.0
"""How long to wait for the workers of a killed sweep to notice it, in seconds; Ray's do within 5."""


def settle(uri: str, parent_run_id: str, sweep_id: str) -> str:
    """Closes all that an interrupted sweep left open, as FAILED; returns the status of its parent run.

    Workers on other machines end with the process that started them, so their runs are closed without asking.

    Raises:
        CheckpointError: a process still runs the sweep or one of its trials.
        TrackingError: the store cannot be used.
    """
    client, host = connect(uri), this_process().host
    deadline = time.monotonic() + PATIENCE
    with explained(uri):
        parent = client.get_run(parent_run_id)
        mark_orphans(client, parent.info.experiment_id)
        parent = client.get_run(parent_run_id)
        if parent.info.status == "RUNNING":
            tags = parent.data.tags
            raise CheckpointError(
                f"sweep {sweep_id} is still being run by process {tags.get('pid')} on {tags.get('host')}: end it, "
                "or resume on that machine if it is gone"
            )
        condition = f"attributes.status = 'RUNNING' and tags.`{PARENT_TAG}` = '{parent_run_id}'"
        while left := list(search(client, [parent.info.experiment_id], condition)):
            for run in left:
                if run.data.tags.get("host") != host:
                    close_lost(uri, run.info.run_id)
            ours = [run.data.tags.get("pid") for run in left if run.data.tags.get("host") == host]
            if ours and time.monotonic() > deadline:
                raise CheckpointError(f"sweep {sweep_id}: process {ours[0]} still runs a trial of it; end it first")
            if ours:
                time.sleep(0.5)
                mark_orphans(client, parent.info.experiment_id)
    return str(parent.info.status)


def reopen_study(uri: str, parent_run_id: str, sweep_id: str) -> Study:
    """Sets the parent run of a sweep RUNNING again, under this process and without its error. After `settle`.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri), held_back():
        parent = client.get_run(parent_run_id)
        client.update_run(parent_run_id, status="RUNNING")
        for key, value in {**process_tags(), "resumed": "true"}.items():
            client.set_tag(parent_run_id, key, value)
        if "error" in parent.data.tags:
            client.delete_tag(parent_run_id, "error")
    return Study(uri, parent.info.experiment_id, parent_run_id, sweep_id)


def close_lost(uri: str, run_id: str) -> None:
    """Sets a run FAILED whose process is known to be gone, or that says FINISHED and has no result.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        client.set_tag(run_id, "error", ORPHAN_MESSAGE)
        client.set_terminated(run_id, "FAILED")


def last_attempt(uri: str, parent_run_id: str, trial_id: str) -> tuple[str, str] | None:
    """(run id, status) of a trial's latest child run; None if it has none.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri):
        experiment_id = client.get_run(parent_run_id).info.experiment_id
        condition = f"tags.`{PARENT_TAG}` = '{parent_run_id}' and tags.trial_id = '{trial_id}'"
        found = list(search(client, [experiment_id], condition))
    return (str(found[-1].info.run_id), str(found[-1].info.status)) if found else None


def read_json(uri: str, run_id: str, name: str) -> dict[str, Any] | None:
    """A JSON artifact of a run; None if it has none of that name, or the process was killed while it wrote it.

    Raises:
        TrackingError: the store cannot be used.
    """
    return read_folder(uri, run_id, name).get(name.rpartition("/")[2])


def read_folder(uri: str, run_id: str, name: str) -> dict[str, dict[str, Any]]:
    """The JSON artifacts in a folder of a run (or one file), whole ones only, by file name.

    Raises:
        TrackingError: the store cannot be used.
    """
    client = connect(uri)
    with explained(uri), tempfile.TemporaryDirectory() as folder:
        if all(entry.path != name for entry in client.list_artifacts(run_id, name.rpartition("/")[0] or None)):
            return {}
        place = Path(client.download_artifacts(run_id, name, folder))
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
        texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    found: dict[str, dict[str, Any]] = {}
    for file_name, text in texts.items():
        try:
            found[file_name] = json.loads(text)
        except ValueError:  # half of a file
            continue
    return found


def no_plan(uri: str, sweep_id: str) -> CheckpointError:
    """The refusal of a sweep whose parent run has no list of trials."""
    return CheckpointError(
        f"sweep {sweep_id} in {shown(uri)} holds no list of its trials: it was killed before its first trial, or an "
        "older version ran it; start it anew"
    )
