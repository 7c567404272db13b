"""Where runs are kept: addresses (H16), old plain-folder stores (H21), creation by many processes at once (H20)."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fl_lightning.errors import TrackingError
from fl_lightning.tracking import connect, ensure_experiment, resolve_uri

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_environment_address(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    cleared = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**cleared, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


# --- addresses (H16) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "sqlite:///{start}/mlruns/mlflow.db"),
        ("", "sqlite:///{start}/mlruns/mlflow.db"),
        ("sqlite:///mlruns/mlflow.db", "sqlite:///{start}/mlruns/mlflow.db"),
        ("sqlite:///../x.db", "sqlite:///{parent}/x.db"),
        ("sqlite:///x.db?timeout=9", "sqlite:///{start}/x.db?timeout=9"),
        ("SQLite:////abs/x.db", "sqlite:////abs/x.db"),
        ("results/runs", "sqlite:///{start}/results/runs/mlflow.db"),
        ("./results/runs.db", "sqlite:///{start}/results/runs.db"),
        ("/abs/folder", "sqlite:////abs/folder/mlflow.db"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("postgresql+psycopg://u:p@db/x", "postgresql+psycopg://u:p@db/x"),
    ],
)
def test_addresses_are_absolute_from_the_start_folder(given, expected, tmp_path, monkeypatch):
    expected = expected.format(start=tmp_path, parent=tmp_path.parent)
    assert resolve_uri(given, start=tmp_path) == expected
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(given) == expected
    assert resolve_uri(expected, start="/elsewhere") == expected


def test_environment_is_used_when_nothing_is_configured(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///from/env.db")
    assert resolve_uri(start=tmp_path) == f"sqlite:///{tmp_path}/from/env.db"
    assert resolve_uri("http://host:1", start=tmp_path) == "http://host:1"


@pytest.mark.parametrize("given", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:x.db", "sqlite://x.db"])
def test_a_database_that_would_be_lost_is_refused(given, tmp_path):
    with pytest.raises(TrackingError, match=re.escape(f"tracking.uri={given}: ") + ".*three slashes"):
        resolve_uri(given, start=tmp_path)


def test_a_server_without_scheme_is_refused_and_not_taken_for_a_folder(tmp_path):
    for given in ("127.0.0.1:5000", "localhost:5000/"):
        with pytest.raises(TrackingError, match=re.escape(f"try http://{given}")):
            resolve_uri(given, start=tmp_path)


def test_unusable_stores_are_one_line_and_quick(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "text.db").write_text("this is no database, but it is long enough to be looked at as one" * 50)
    (tmp_path / "folder.db").mkdir()
    addresses = [f"sqlite:///{tmp_path}/{name}" for name in ("file/mlflow.db", "text.db", "folder.db")]
    addresses += ["http://127.0.0.1:9", "htp://nowhere", "postgresql://user:secret@127.0.0.1:9/x"]
    for uri in addresses:
        began = time.monotonic()
        with pytest.raises(TrackingError) as caught:
            ensure_experiment(uri, "study")
        message = str(caught.value)
        assert message.startswith("tracking.uri=") and "\n" not in message and "secret" not in message
        assert time.monotonic() - began < (40 if "postgresql" in uri else 15), uri


# --- old plain-folder stores (H21) -----------------------------------------------------------------------------------

OLD_STORE = """
import mlflow
mlflow.set_tracking_uri("file:./mlruns")
mlflow.set_experiment("old study")
with mlflow.start_run():
    mlflow.log_metric("accuracy", 0.5)
    mlflow.log_text("kept", "note.txt")
"""


def test_an_old_plain_store_is_refused_with_a_migration_that_works(tmp_path):
    assert python(OLD_STORE, tmp_path, MLFLOW_ALLOW_FILE_STORE="true").returncode == 0
    before = sorted(tmp_path.rglob("*"))
    messages = []
    for given in (None, "mlruns", "sqlite:///mlruns/mlflow.db", "file:./mlruns", f"file://{tmp_path}/mlruns"):
        with pytest.raises(TrackingError) as caught:
            resolve_uri(given, start=tmp_path)
        messages.append(str(caught.value))
    escape = python(
        "from fl_lightning.tracking import resolve_uri; resolve_uri()", tmp_path, MLFLOW_ALLOW_FILE_STORE="true"
    )
    assert escape.returncode != 0 and "migrate-filestore" in escape.stderr
    assert sorted(tmp_path.rglob("*")) == before, "no second store was started"

    commands = {re.search("`(.*?)`", message).group(1) for message in messages}
    assert len(commands) == 1
    migration = [sys.executable, "-m", *shlex.split(commands.pop())]
    subprocess.run(migration, check=True, capture_output=True, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"})
    uri = resolve_uri(start=tmp_path)
    assert uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    client = connect(uri)
    (old,) = client.search_runs([client.get_experiment_by_name("old study").experiment_id])
    assert old.data.metrics == {"accuracy": 0.5}
    with pytest.raises(TrackingError, match=re.escape(f"use {uri}")):
        resolve_uri("file:mlruns", start=tmp_path)


def test_a_new_plain_store_is_refused_with_the_address_to_use(tmp_path):
    with pytest.raises(TrackingError, match=re.escape(f"use sqlite:///{tmp_path}/a b/mlflow.db")):
        resolve_uri("file:a%20b", start=tmp_path)
    assert not list(tmp_path.iterdir())


# --- experiments -----------------------------------------------------------------------------------------------------

RACE = """
import multiprocessing, sys
from fl_lightning.tracking import RunTracker, tracked
from fl_lightning.tracking.store import import_mlflow

import_mlflow()  # once, so that the processes below start at the same moment
import mlflow.store.tracking.sqlalchemy_store

def work(uri, number, barrier):
    barrier.wait()
    tracker = RunTracker(uri)
    with tracked(tracker):
        tracker.start({"seed": number, "algorithm": {"name": "fedavg"}}, experiment="new name")
        tracker.log_metrics({"accuracy": 0.5}, step=1)
        tracker.log_text(str(number), "note.txt")

context = multiprocessing.get_context("fork")
for uri in sys.argv[1:]:
    barrier = context.Barrier(8)
    processes = [context.Process(target=work, args=(uri, number, barrier)) for number in range(8)]
    for process in processes: process.start()
    for process in processes: process.join()
    assert [process.exitcode for process in processes] == [0] * 8, [process.exitcode for process in processes]
"""


@pytest.mark.parametrize("repetitions", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_eight_processes_race_on_an_empty_store(tmp_path, repetitions):
    """H20. Every repetition: 8 finished runs in the experiment with their files, and none in the default one."""
    uris = [resolve_uri(start=tmp_path / str(repetition)) for repetition in range(repetitions)]
    finished = subprocess.run(
        [sys.executable, "-c", RACE, *uris],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    for uri in uris:
        client = connect(uri)
        names = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
        assert sorted(names) == ["Default", "new name"]
        assert client.search_runs([names["Default"]]) == []
        runs = client.search_runs([names["new name"]])
        assert sorted(run.data.params["seed"] for run in runs) == [str(number) for number in range(8)]
        for run in runs:
            assert (run.info.status, run.data.metrics) == ("FINISHED", {"accuracy": 0.5})
            folder = Path(run.info.artifact_uri)
            assert folder.is_relative_to(Path(uri.removeprefix("sqlite:///")).parent / "artifacts")
            assert (folder / "note.txt").read_text() == run.data.params["seed"]
            assert (folder / "config.yaml").exists()


def test_a_deleted_experiment_is_named_with_the_way_back(tmp_path):
    store = resolve_uri(start=tmp_path)
    client, number = connect(store), ensure_experiment(store, "doomed")
    assert ensure_experiment(store, "doomed") == number
    client.delete_experiment(number)
    with pytest.raises(TrackingError, match=f"doomed was deleted.*--experiment-id {number}"):
        ensure_experiment(store, "doomed")
