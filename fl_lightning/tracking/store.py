"""The one door to MLflow: a quiet import, a client of a checked store, an experiment that exists once."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import TrackingError
from fl_lightning.tracking.answers import check_answers
from fl_lightning.tracking.location import artifact_root, shown, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_SECONDS = 300.0
"""How long a process waits for another one that is creating the same SQLite store (about 2 s on a laptop)."""

BUSY_SECONDS = 10.0
"""How long to wait for a SQLite database that another program has locked; one that is in use is free in a moment."""

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's pages then open on the runs, not on the traces of language models."""

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # MLflow would try for minutes by default; training waits for no store, and we send again later ourselves.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}


def import_mlflow() -> Any:
    """MLflow, without usage reports and without its log lines; a setting of the user's environment wins."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        # Tells of a database fault with a traceback and raises as well: we report what was raised.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        logging.getLogger("alembic").setLevel(logging.WARNING)
    return mlflow


def connect(uri: str) -> "MlflowClient":
    """A client of a resolved address. The first one in a process takes 0.1 s, or 1 to 3 s if it creates the database.

    MLflow creates and migrates the tables of a SQLite file without regard to other processes that do the same, so this
    step is done under a lock file beside the database.

    Raises:
        TrackingError: the file cannot be opened or is no database of this MLflow version; a server does not answer.
    """
    mlflow = import_mlflow()
    with explained(uri):
        check_answers(uri)
        if sqlite_path(uri) is not None:
            # Costs 0.7 s: done before the lock is taken, so that starts do not queue for it.
            import_module("mlflow.store.tracking.sqlalchemy_store")
        with _creation_lock(uri):
            _check_opens(uri)
            return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def ensure_experiment(uri: str, name: str) -> str:
    """The id of the experiment of that name, created if need be; safe when many processes start at once.

    Raises:
        TrackingError: the store cannot be used, the name is not allowed, or the experiment was deleted.
    """
    client = connect(uri)
    with explained(uri), _creation_lock(uri):
        found = client.get_experiment_by_name(name) or _create_experiment(client, uri, name)
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"tracking.experiment={name} was deleted in {shown(uri)}: choose another name, or bring it back with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}`"
        )
    return str(found.experiment_id)


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Turns a fault of the store into one TrackingError line that names the address and the cause."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError, ImportError) as error:
        raise TrackingError(
            f"tracking.uri={shown(uri)} cannot be used: {one_line(error)}. Check the address and that the store "
            "answers, or set tracking.enabled=false"
        ) from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's first lines as one, at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def error_text(error: BaseException) -> str:
    """An error's type and message on one line, for the tag `error`."""
    name = type(error).__name__.lstrip("_")
    return f"{name}: {one_line(error)}" if str(error).strip() else name


def _create_experiment(client: "MlflowClient", uri: str, name: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        made = client.create_experiment(name, artifact_location=artifact_root(uri), tags=EXPERIMENT_TAGS)
        return client.get_experiment(made)
    except MlflowException as error:
        # A store with no lock of ours (a server): somebody else was faster.
        winner = client.get_experiment_by_name(name) if error.error_code == "RESOURCE_ALREADY_EXISTS" else None
        if winner is None:
            raise
        return winner


def _creation_lock(uri: str) -> Any:
    database = sqlite_path(uri)
    if database is None:
        return nullcontext()
    from filelock import FileLock

    try:
        database.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrackingError(
            f"tracking.uri={uri}: the folder {database.parent} cannot be made ({one_line(error)}); "
            "set tracking.uri to a place you can write"
        ) from error
    return FileLock(f"{database}.lock", timeout=LOCK_SECONDS)


def _check_opens(uri: str) -> None:
    """Opens a SQLite file for writing once: MLflow itself would retry a hopeless file for 100 seconds."""
    database = sqlite_path(uri)
    if database is None:
        return
    connection = sqlite3.connect(database, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("PRAGMA schema_version").fetchone()
        connection.execute("ROLLBACK")
    finally:
        connection.close()
