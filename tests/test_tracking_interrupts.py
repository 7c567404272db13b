"""Commands that are stopped by signals, from outside: status in MLflow, exit code, and what is said (H19)."""

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli import invoke
from fl_lightning.errors import TrackingError
from fl_lightning.tracking import children, connect, ensure_experiment, find_parent, held_back
from fl_lightning.tracking.outbox import Item, Lane, requests
from fl_lightning.tracking.sender import Sender

LONG = ["fl.rounds=500", "data.subset=0.2", "fl.num_clients=3", "tracking.uri=runs"]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fl_lightning.cli", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)  # type: ignore[call-overload]


def until(process: subprocess.Popen[str], database: Path, question: str) -> None:
    """Waits until a query of the database gives something that is true."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if database.exists():
            try:
                with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                    if (connection.execute(question).fetchone() or (0,))[0]:
                        return
            except sqlite3.OperationalError:  # the tables are being made
                pass
        time.sleep(0.02)
    raise AssertionError(f"it got nowhere; exit code {process.poll()}")


def statuses(folder: Path) -> list[tuple[str, str, str]]:
    """(kind, status, error) of every run."""
    client = connect(f"sqlite:///{folder}/runs/mlflow.db")
    found = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return sorted((run.data.tags["kind"], run.info.status, run.data.tags.get("error", "")) for run in found)


@pytest.mark.parametrize(
    ("numbers", "code", "error"),
    [
        ([signal.SIGINT, signal.SIGINT], 130, "KeyboardInterrupt"),
        pytest.param([signal.SIGTERM], 143, "(SIGTERM)", marks=pytest.mark.slow),
        pytest.param([signal.SIGHUP], 129, "(SIGHUP)", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_as_soon_as_it_is_open_is_closed(
    tmp_path: Path, numbers: list[int], code: int, error: str
) -> None:
    process = started(tmp_path, "run", *LONG)
    try:
        until(process, tmp_path / "runs" / "mlflow.db", "SELECT count(*) FROM runs")
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.05)
        _, complained = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, complained
    ((kind, status, said),) = statuses(tmp_path)
    assert (kind, status) == ("run", "KILLED") and error in said
    assert "Traceback" not in complained


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_sweep_that_is_stopped_leaves_nothing_open(tmp_path: Path, number: int, code: int, early: bool) -> None:
    """The whole group is told, twice, as a closed terminal and an impatient user do it."""
    content = {"name": "long", "space": {"algorithm.local.lr": {"grid": [0.1, 0.2]}}, "overrides": LONG}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(content))
    process = started(tmp_path, "sweep", "sweep=long.yaml")
    trained = "SELECT count(*) FROM metrics WHERE key = 'seconds'"
    try:
        until(process, tmp_path / "runs" / "mlflow.db", "SELECT count(*) FROM runs" if early else trained)
        for _ in range(2):
            os.killpg(process.pid, number)
            time.sleep(0.05)
        _, complained = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == code, complained
    found = statuses(tmp_path)
    assert ("sweep", "KILLED") in {(kind, status) for kind, status, _ in found}
    assert not [run for run in found if run[1] == "RUNNING"], found


@pytest.mark.slow
def test_after_a_sweep_was_killed_outright_the_report_marks_its_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"name": "long", "space": {"algorithm.local.lr": {"grid": [0.1, 0.2]}}, "overrides": LONG}
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(content))
    process = started(tmp_path, "sweep", "sweep=long.yaml")
    database = tmp_path / "runs" / "mlflow.db"
    try:
        until(process, database, "SELECT count(*) FROM metrics WHERE key = 'seconds'")
    finally:
        process.kill()
        process.communicate()
    with sqlite3.connect(database) as connection:
        sweep_id = connection.execute("SELECT value FROM tags WHERE key = 'sweep_id'").fetchone()[0]
    monkeypatch.chdir(tmp_path)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:  # Ray's workers end some seconds after the driver
        parent = find_parent(f"sqlite:///{database}", None, sweep_id)
        if not [run for run in statuses(tmp_path) if run[1] == "RUNNING"]:
            break
        time.sleep(1)
    assert {run[1] for run in statuses(tmp_path)} == {"FAILED"}
    assert children(f"sqlite:///{database}", parent) and invoke(["report", sweep_id, "--uri", "runs"]) in (0, 2)


def test_signals_wait_for_what_must_not_be_left_half_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append("whole")
    assert done == ["whole"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- stores that do not answer ---------------------------------------------------------------------------------------


def test_a_server_that_hangs_is_named_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.tracking.answers.ANSWER_SECONDS", 1)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with pytest.raises(TrackingError, match="no answer within 5 s to connect and 1 s to reply"):
            ensure_experiment(f"http://127.0.0.1:{deaf.getsockname()[1]}", "study")


def test_a_locked_database_is_named_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.tracking.store.BUSY_SECONDS", 0.5)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    ensure_experiment(uri, "study")
    locked, release = threading.Event(), threading.Event()

    def lock() -> None:
        connection = sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        locked.set()
        release.wait(60)
        connection.close()

    thread = threading.Thread(target=lock)
    thread.start()
    try:
        assert locked.wait(30)
        with pytest.raises(TrackingError, match="database is locked"):
            ensure_experiment(uri, "study")
    finally:
        release.set()
        thread.join()
    ensure_experiment(uri, "study")


def test_an_interruption_before_the_sending_thread_has_begun_loses_nothing() -> None:
    """Ctrl-C may come between the making of the thread and its start; the end of the run then sends by itself."""
    sender = Sender(None, "run")  # type: ignore[arg-type]  # nothing is sent here
    sender._thread = threading.Thread(target=sender._work)
    sender.put("values", *requests("tags", [("a", "b")]))
    assert sender.drain(5.0) and sender.stop()
    assert [item.record() for item in sender.lanes["values"].pending] == [{"tags": [("a", "b")]}]


def test_a_fault_while_sending_does_not_end_the_thread() -> None:
    class Odd(Lane):
        tries = 0

        def put(self, *items: Item) -> None:
            self.tries += 1
            if self.tries == 1:
                raise ImportError("half done")
            self.pending.clear()

    sender = Sender(None, "run")  # type: ignore[arg-type]  # nothing is sent here
    sender.lanes["values"] = odd = Odd(None, "run")  # type: ignore[arg-type]
    sender.put("values", *requests("tags", [("a", "b")]))
    assert sender.drain(20.0) and odd.tries == 1 and len(odd.pending) == 1
    assert sender.drain(20.0) and odd.tries == 2 and not odd.pending
    assert sender.stop()
