"""Tracking on a real store: what a run and a sweep hold, what it costs, and that it is quiet."""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fl_lightning.errors import TrackingError
from fl_lightning.records import RoundRecord, RunResult
from fl_lightning.tracking import (
    RunTracker,
    children,
    connect,
    find_parent,
    log_artifact_file,
    log_metrics,
    log_text,
    open_study,
    resolve_uri,
    tracked,
)

ROOT = Path(__file__).parents[1]
CONFIG = {
    "seed": 42,
    "algorithm": {"name": "fedsam", "local": {"lr": 0.1, "rho": 0.05}},
    "fl": {"num_clients": 10, "clients_per_round": None},
    "engine": {"kind": "debug"},
    "tracking": {"uri": None, "experiment": "study"},
}


def record(number: int, **changes) -> RoundRecord:
    known = {
        "train_loss": 2.0,
        "test_loss": 1.5,
        "test_accuracy": 0.1 * number,
        "seconds": 0.25,
        "epsilon": 1.0 * number,
    }
    return RoundRecord(round=number, cohort=(0, 1), **{**known, **changes})


@pytest.fixture(autouse=True)
def _no_environment_address(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return resolve_uri(start=tmp_path_factory.mktemp("a folder with blanks"))


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


# --- what a run holds ------------------------------------------------------------------------------------------------


def test_a_run_holds_configuration_tags_rounds_and_result(store, tmp_path):
    tracker = RunTracker(store)
    result = RunResult(
        None, "finished", "PRIVATE", CONFIG, "f" * 64, (), {"weights_sha256": "a1", "privacy": {"unit": "sample"}}
    )
    with tracked(tracker):
        run_id = tracker.start(CONFIG, experiment="study", tags={"note": "mine", "seed": "overridden"})
        tracker.on_start({"run_id": run_id, "num_parameters": 7, "clients": 10, "config": CONFIG})
        assert connect(store).get_run(run_id).info.status == "RUNNING"
        tracker.on_round(record(1, metrics={"oracle/drift": 0.5}))
        tracker.on_round(record(2, test_accuracy=None, test_loss=None, epsilon=None))
        tracker.on_round(record(3))
        tracker.on_end(result)
        (tmp_path / "figure.txt").write_text("figure")
        tracker.log_artifact_file(tmp_path / "figure.txt", "figures")
    run = connect(store).get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.end_time >= run.info.start_time
    assert re.fullmatch("fedsam-s42-[0-9a-f]{4}", run.info.run_name)
    assert run.data.params == {
        "seed": "42",
        "algorithm.name": "fedsam",
        "algorithm.local.lr": "0.1",
        "algorithm.local.rho": "0.05",
        "fl.num_clients": "10",
        "fl.clients_per_round": "null",
        "engine.kind": "debug",
        "tracking.uri": "null",
        "tracking.experiment": "study",
    }
    expected = {
        "algorithm": "fedsam",
        "seed": "overridden",
        "engine": "debug",
        "note": "mine",
        "kind": "run",
        "badge": "PRIVATE",
        "partition_sha256": "f" * 64,
        "weights_sha256": "a1",
        "num_parameters": "7",
        "pid": str(os.getpid()),
    }
    assert expected.items() <= run.data.tags.items()
    assert {"host", "process_start", "config_sha256", "fl_lightning_version"} <= run.data.tags.keys()
    assert run.data.metrics == {
        "test_accuracy": pytest.approx(0.3),
        "test_loss": 1.5,
        "oracle/train_loss": 2.0,
        "seconds": 0.25,
        "epsilon": 3.0,
        "oracle/drift": 0.5,
    }
    steps = [(entry.step, entry.value) for entry in connect(store).get_metric_history(run_id, "test_accuracy")]
    assert steps == [(1, pytest.approx(0.1)), (3, pytest.approx(0.3))], "a round that did not measure sends nothing"
    folder = Path(run.info.artifact_uri)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIG
    assert json.loads((folder / "result.json").read_text())["badge"] == "PRIVATE"
    assert json.loads((folder / "privacy.json").read_text()) == {"unit": "sample"}
    assert (folder / "figures/figure.txt").read_text() == "figure"
    assert not (folder / "params.json").exists()


def test_the_configuration_hash_is_of_what_is_run_not_of_where_it_is_written(store):
    def hash_of(config):
        tracker = RunTracker(store)
        with tracked(tracker):
            tracker.start(config, experiment="hashes")
        return connect(store).get_run(tracker.run_id).data.tags["config_sha256"]

    assert hash_of(CONFIG) == hash_of({**CONFIG, "tracking": {"uri": "elsewhere"}})
    assert hash_of(CONFIG) != hash_of({**CONFIG, "seed": 43})


def test_the_commit_is_a_tag_in_a_git_checkout_only(store, tmp_path, monkeypatch):
    def commit_tag():
        tracker = RunTracker(store)
        with tracked(tracker):
            tracker.start(CONFIG, experiment="commits")
        return connect(store).get_run(tracker.run_id).data.tags.get("git_commit")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_tag() is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit_tag() == head


def test_nan_stays_nan_and_an_infinity_comes_back_as_one(store):
    study = open_study(store, "bounds", "bounds-1")
    tracker = RunTracker(store)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="bounds", parent_run_id=study.run_id)
        tracker.on_round(record(1, test_loss=math.nan, epsilon=math.inf, metrics={"low": -math.inf}))
    (child,) = children(store, study.run_id)
    assert math.isnan(child.metrics["test_loss"])
    assert (child.metrics["epsilon"], child.metrics["low"]) == (math.inf, -math.inf)
    assert child.metrics["test_accuracy"] == pytest.approx(0.1)


def test_a_round_costs_less_than_20_ms(store):
    """Processor time, so that a busy machine does not fail it; on an idle laptop the clock says 6 ms."""
    tracker, seconds = RunTracker(store), []
    with tracked(tracker):
        tracker.start(CONFIG, experiment="speed")
        for number in range(1, 41):
            began = time.process_time()
            tracker.on_round(record(number))
            seconds.append(time.process_time() - began)
    assert statistics.median(seconds) < 0.020


# --- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_parent_with_children_that_read_back(store, tmp_path):
    with tracked(open_study(store, "sweeps", "s-1", tags={"owner": "me"})) as study:
        for seed in (1, 2):
            tracker = RunTracker(store)
            with tracked(tracker):
                tracker.start(
                    {**CONFIG, "seed": seed}, experiment="sweeps", parent_run_id=study.run_id, tags={"trial": seed}
                )
                for number in range(1, 4):
                    tracker.on_round(record(number, test_accuracy=seed + number / 10))
    other = open_study(store, "sweeps", "s-2")
    assert find_parent(store, "sweeps", "s-1") == find_parent(store, None, "s-1") == study.run_id != other.run_id
    parent = connect(store).get_run(study.run_id)
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "sweep-s-1")
    assert {"kind": "sweep", "sweep_id": "s-1", "owner": "me"}.items() <= parent.data.tags.items()

    first, second = children(store, study.run_id)
    assert (first.params["seed"], second.params["seed"]) == ("1", "2")
    assert (first.status, first.tags["kind"], first.tags["trial"]) == ("FINISHED", "trial", "1")
    assert first.tags["mlflow.parentRunId"] == study.run_id
    assert first.history == {"test_accuracy": ((1, 1.1), (2, 1.2), (3, 1.3))}
    assert second.metrics["test_accuracy"] == 2.3
    assert children(store, other.run_id) == []

    (tmp_path / "table.csv").write_text("a,b")
    log_artifact_file(store, study.run_id, tmp_path / "table.csv", "report")
    log_text(store, study.run_id, "# Table", "report/table.md")
    log_metrics(store, study.run_id, {f"mean{number}": float(number) for number in range(1200)})
    assert connect(store).get_run(study.run_id).data.metrics["mean1199"] == 1199.0
    folder = Path(parent.info.artifact_uri)
    assert (folder / "report/table.csv").read_text() == "a,b"
    assert (folder / "report/table.md").read_text() == "# Table"
    with pytest.raises(TrackingError, match="absent"):
        log_artifact_file(store, study.run_id, tmp_path / "absent.csv")


def test_an_unknown_sweep_lists_the_known_ones(store):
    open_study(store, "lists", "known-1")
    with pytest.raises(TrackingError, match=r"sweep nope is not in experiment lists.*known-1"):
        find_parent(store, "lists", "nope")
    with pytest.raises(TrackingError, match=r"sweep nope is not in experiment no such.*: none"):
        find_parent(store, "no such", "nope")


# --- quiet, private, in one place ------------------------------------------------------------------------------------

QUIET = """
import sys
contacted = []
watched = ("socket.connect", "socket.getaddrinfo")
sys.addaudithook(lambda event, args: contacted.append((event, args)) if event in watched else None)
from fl_lightning.tracking import RunTracker, resolve_uri, tracked
assert not {"mlflow", "torch", "sqlalchemy"} & set(sys.modules), "heavy imports are lazy"
tracker = RunTracker(resolve_uri())
with tracked(tracker):
    tracker.start({"seed": 1, "long": "x" * 8000}, experiment="quiet")
    tracker.log_metrics({"accuracy": 1.0}, step=1)
import mlflow.telemetry
assert mlflow.telemetry.get_telemetry_client() is None
assert contacted == [], contacted
"""


def test_a_first_run_prints_nothing_and_contacts_nobody(tmp_path):
    finished = python(QUIET, tmp_path)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "mlruns").iterdir()) == ["artifacts", "mlflow.db", "mlflow.db.lock"]


def test_mlflow_is_imported_by_the_tracking_package_only():
    pattern = re.compile(r"^\s*(import|from)\s+mlflow\b", re.MULTILINE)
    sources = [path for folder in ("fl_lightning", "tune") for path in (ROOT / folder).rglob("*.py")]
    users = {path.relative_to(ROOT).parts[:2] for path in sources if pattern.search(path.read_text())}
    assert users == {("fl_lightning", "tracking")}
