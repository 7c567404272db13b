"""Where runs are kept: one absolute address, decided once before anything is written.

The order is: the configured `tracking.uri`, then the environment's MLFLOW_TRACKING_URI, then a database
`mlruns/mlflow.db` under the start folder with the artifacts beside it in `mlruns/artifacts`. Trials and workers receive
the resolved address, so the folder they happen to run in does not matter.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

from fl_lightning.errors import TrackingError

ENVIRONMENT_KEY = "MLFLOW_TRACKING_URI"
DATABASE_NAME = "mlflow.db"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def resolve_uri(uri: str | None = None, *, start: str | Path | None = None) -> str:
    """The absolute tracking address.

    Args:
        uri: `tracking.uri`: a database address (`sqlite:///runs/mlflow.db`, `postgresql://...`), a server
            (`http://...`), a folder (the database `mlflow.db` in it) or a path that ends in `.db`. None or empty: see
            the top of this file.
        start: the folder that relative paths count from; the current folder when None.

    Raises:
        TrackingError: the address is malformed, keeps runs in memory only, or is a plain-folder store of an older
            MLflow (the message has the migration command). A database is never started beside such a store.
    """
    folder = Path(os.path.abspath(start or Path.cwd()))
    given, key = (uri or "").strip(), "tracking.uri"
    if not given:
        given, key = os.environ.get(ENVIRONMENT_KEY, "").strip(), ENVIRONMENT_KEY
    if not given:
        given, key = "mlruns", "tracking.uri"
    if re.match(r"[\w.\-]+:\d+(/|$)", given):
        raise TrackingError(
            f"{key}={given}: an address of a server starts with http:// or https://; try http://{given}"
        )
    scheme = _scheme(given)
    if scheme == "":
        return _from_path(given, key, folder)
    if scheme == "file":
        return _refuse_file_uri(given, key, folder)
    if scheme.split("+")[0] == "sqlite":
        return _from_sqlite(given, key, folder)
    return given


def sqlite_path(uri: str) -> Path | None:
    """The database file of a resolved sqlite address; None for every other store."""
    match = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(match.group(1)) if match else None


def artifact_root(uri: str) -> str | None:
    """Where a new experiment keeps its files; None leaves the choice to the server."""
    database = sqlite_path(uri)
    if database is not None:
        return str(database.parent / "artifacts")
    if _scheme(uri).split("+")[0] in _DATABASES:
        return os.path.abspath("mlruns/artifacts")
    return None


def shown(uri: str) -> str:
    """The address with any password masked, for messages."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{parts.password}@", ":***@")))


def run_page(uri: str, experiment_id: str, run_id: str, *, port: int = 5000) -> str:
    """The web address of a run: on the store's own server, or on the one that `ui_command` starts at `port`."""
    root = uri.rstrip("/") if _scheme(uri) in ("http", "https") else f"http://127.0.0.1:{port}"
    return f"{root}/#/experiments/{experiment_id}/runs/{run_id}"


def ui_command(uri: str, port: int = 5000) -> list[str]:
    """The command line that serves the MLflow pages of a store on the loopback address; run it with `ui_environment`.

    Raises:
        TrackingError: the store is a server already and has its own pages, or is no database; the port is taken.
    """
    if _scheme(uri) in ("http", "https"):
        raise TrackingError(f"tracking.uri={shown(uri)} is a server already: open this address in a browser")
    if _scheme(uri).split("+")[0] not in _DATABASES:
        raise TrackingError(
            f"tracking.uri={shown(uri)}: only a database can be shown, {', '.join(_DATABASES)}; give one, or a folder"
        )
    _refuse_taken(port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    root = artifact_root(uri)
    return command if root is None else [*command, "--artifacts-destination", root]


def _refuse_taken(port: int) -> None:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise TrackingError(
                f"--port={port}: cannot be served on this machine ({error.strerror}); choose another with --port"
            ) from None


def ui_environment() -> dict[str, str]:
    """This process's environment for `ui_command`: no usage reports, no job runners, which this product never uses."""
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **os.environ}


def _scheme(uri: str) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.\-]+):", uri)  # two letters at least: one is a Windows drive
    if match:
        return match.group(1).lower()
    return "databricks" if uri in ("databricks", "databricks-uc", "uc") else ""


def _from_path(given: str, key: str, folder: Path) -> str:
    path = Path(os.path.abspath(folder / Path(given).expanduser()))
    if "?" in str(path):
        raise TrackingError(f"{key}={given}: the path {path} holds a '?', which a database address cannot; move it")
    database = path if path.suffix == ".db" else path / DATABASE_NAME
    _refuse_plain_store(database, key, given)
    return f"sqlite:///{database.as_posix()}"


def _from_sqlite(given: str, key: str, folder: Path) -> str:
    match = re.match(r"(sqlite(?:\+\w+)?):///([^?]*)(\?.*)?$", given, re.IGNORECASE)
    path = match.group(2) if match else ""
    if not match or path in ("", "/") or path.startswith((":memory:", "file:")):
        raise TrackingError(
            f"{key}={given}: not a database file; write sqlite:///folder/mlflow.db (three slashes, four before an "
            "absolute path). A database in memory would be lost with the process"
        )
    database = Path(os.path.abspath(folder / Path(path).expanduser()))
    _refuse_plain_store(database, key, given)
    return f"{match.group(1).lower()}:///{database.as_posix()}{match.group(3) or ''}"


def _refuse_file_uri(given: str, key: str, folder: Path) -> str:
    path = Path(os.path.abspath(folder / url2pathname(re.sub(r"^file:(//(localhost)?(?=/))?", "", given))))
    _refuse_plain_store(path / DATABASE_NAME, key, given)
    raise TrackingError(
        f"{key}={given}: MLflow no longer writes plain folders; use sqlite:///{(path / DATABASE_NAME).as_posix()}"
    )


def _refuse_plain_store(database: Path, key: str, given: str) -> None:
    """A database that exists is the user's decision (or the result of the migration); a new one would hide old runs."""
    folder = database.parent
    if database.exists() or not _holds_plain_store(folder):
        return
    target = f"sqlite:///{database.as_posix()}"
    raise TrackingError(
        f"{key}={given}: {folder} holds runs in MLflow's plain-folder format, which MLflow no longer serves. Move them "
        f"into a database once: `mlflow migrate-filestore --source {shlex.quote(str(folder))} "
        f"--target {shlex.quote(target)}` (MLflow 3.10 or newer; keep the folder, it has the artifacts), or set "
        "tracking.uri to another place"
    )


def _holds_plain_store(folder: Path) -> bool:
    """Whether a folder has experiments as older MLflow wrote them: numbered folders with a meta.yaml, or trashed."""
    places = [place for place in (folder, folder / ".trash") if place.is_dir()]
    return any(entry.name.isdigit() and (entry / "meta.yaml").exists() for place in places for entry in place.iterdir())
