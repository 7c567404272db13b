"""Real stores for tests: `mlflow server` over SQLite and over PostgreSQL, each started here on the loopback address."""

import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning.tracking import ui_command, ui_environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mlflow_server(backend: str, folder: Path) -> Iterator[str]:
    """The address of a server over a database; its artifacts lie under `folder`."""
    port = free_port()
    command = ui_command(backend, port)
    if "--artifacts-destination" in command:
        command[command.index("--artifacts-destination") + 1] = str(folder / "artifacts")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, cwd=folder, env=ui_environment(), start_new_session=True, **quiet)
    try:
        wait_until_healthy(server, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def wait_until_healthy(server: subprocess.Popen, address: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError("the server did not start")


@contextmanager
def postgresql() -> Iterator[str]:
    """The address of an empty database of a PostgreSQL server of its own; skips where there is none to start."""
    driver = next((name for name in ("psycopg", "psycopg2") if find_spec(name) is not None), None)
    if driver is None:
        pytest.skip("neither psycopg nor psycopg2 is installed")
    found = shutil.which("initdb") or next(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
    if found is None:
        pytest.skip("PostgreSQL's initdb and postgres are not on this machine")
    programs = Path(os.path.realpath(found)).parent
    who: dict[str, object] = {}
    place = Path(tempfile.mkdtemp(prefix="fl-postgres-"))
    if os.geteuid() == 0:  # the server refuses to run as root
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        os.chown(place, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    port, quiet = free_port(), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": place}
    make = [programs / "initdb", "-D", place / "data", "-A", "trust", "-U", "mlflow", "--no-sync"]
    subprocess.run(make, check=True, **quiet, **who)  # type: ignore[call-overload]
    serve = [programs / "postgres", "-D", place / "data", "-h", "127.0.0.1", "-p", str(port), "-k", place]
    server = subprocess.Popen(serve, **quiet, **who)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 60
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        while subprocess.run(ready, **quiet).returncode:  # type: ignore[call-overload]
            assert time.monotonic() < deadline and server.poll() is None, "PostgreSQL did not start"
            time.sleep(0.2)
        yield f"postgresql+{driver}://mlflow@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGINT)  # its fast end; at SIGTERM it waits until every client has left
        server.wait(60)
        shutil.rmtree(place, ignore_errors=True)


def until(process: subprocess.Popen[str], database: Path, reached: Callable[[sqlite3.Connection], bool]) -> None:
    """Waits for what a sweep has written."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
        if database.exists():
            try:
                with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                    if reached(connection):
                        return
            except sqlite3.OperationalError:  # the tables are being made
                continue
    raise AssertionError(f"the sweep got nowhere; its exit code is {process.poll()}")
