"""Runs, resumes, sweeps, reports are the same on a file, on servers over SQLite and PostgreSQL, and on PostgreSQL."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from stores import mlflow_server, postgresql

from fl_lightning.cli import invoke
from fl_lightning.session import resume
from fl_lightning.tracking import children, connect, find_parent, read_json, resolve_uri

KILLED = """
import os, signal, sys
from fl_lightning import load_config, run

class Killer:
    def on_start(self, info): print(info["run_id"], flush=True)
    def on_round(self, record):
        if record.round == 3: os.kill(os.getpid(), signal.SIGKILL)
    def on_end(self, result): pass

run(load_config(sys.argv[1:]), observers=[Killer()])
"""
SETTINGS = [
    "data.subset=0.2",
    "fl.num_clients=3",
    "fl.rounds=5",
    "fl.checkpoint_every=2",
    "algorithm=dp_fedavg",
    "privacy.target_epsilon=8",
]
ARTIFACTS = {
    "config.yaml",
    "partition/partition.json",
    "partition/partition.svg",
    "privacy.json",
    "privacy/ledger.json",
    "privacy/statement.txt",
    "result.json",
}


@pytest.fixture(params=["sqlite", "server over sqlite", "server over postgresql", "postgresql"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with ExitStack() as stack:
        database = resolve_uri("runs")
        if request.param.endswith("postgresql"):
            database = stack.enter_context(postgresql())
        if request.param.startswith("server"):
            database = stack.enter_context(mlflow_server(database, tmp_path))
        yield database


def artifacts(client: Any, run_id: str, folder: str | None = None) -> Iterator[str]:
    for entry in client.list_artifacts(run_id, folder):
        yield from artifacts(client, run_id, entry.path) if entry.is_dir else [entry.path]


@pytest.mark.slow
def test_runs_resumes_sweeps_and_reports_are_the_same_on_every_store(uri: str, tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *SETTINGS, f"tracking.uri={uri}"], capture_output=True, text=True, timeout=300
    )
    assert killed.returncode == -9, killed.stderr
    run_id = killed.stdout.split()[0]
    result = resume(run_id, uri=uri)
    client = connect(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.tags["resumed"] == "true"
    assert run.data.tags["weights_sha256"] == result.final["weights_sha256"] and run.data.tags["badge"] == "PRIVATE"
    assert run.data.params["privacy.target_epsilon"] == "8.0"
    for name in ("test_accuracy", "test_loss", "epsilon", "seconds", "oracle/train_loss"):
        history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))
        assert [step for step, _ in history] == [1, 2, 3, 4, 5], f"{name}: no round lost, none twice"
    accuracy = [metric.value for metric in client.get_metric_history(run_id, "test_accuracy")]
    assert accuracy == [record.test_accuracy for record in result.rounds]
    assert set(artifacts(client, run_id)) >= ARTIFACTS
    assert {item.dataset.name for item in run.inputs.dataset_inputs} == {"digits"}
    assert read_json(uri, run_id, "result.json")["final"]["weights_sha256"] == result.final["weights_sha256"]

    sweep = {"name": "pair", "space": {"algorithm.local.lr": {"grid": [0.05, 0.2]}}, "overrides": SETTINGS[:3]}
    (tmp_path / "pair.yaml").write_text(json.dumps(sweep))
    table = tmp_path / "table.json"
    assert invoke(["sweep", "sweep=pair.yaml", f"tracking.uri={uri}", "--quiet", "--output", str(table)]) == 0
    swept = json.loads(table.read_text())
    parent = find_parent(uri, None, swept["sweep_id"])
    trials = children(uri, parent)
    assert client.get_run(parent).info.status == "FINISHED" and len(trials) == 2
    assert {child.tags["mlflow.parentRunId"] for child in trials} == {parent}
    assert all([step for step, _ in child.history["test_accuracy"]] == [1, 2, 3, 4, 5] for child in trials)
    assert {"sweep.json", "plan.json", "report/report.md"} <= set(artifacts(client, parent))
    again = ["report", swept["sweep_id"], "--uri", uri, "--out", str(tmp_path / "out"), "--format", "html"]
    assert invoke(again) == 0
    assert "data:image/svg+xml;base64," in (tmp_path / "out" / "report.html").read_text(), "the partition's picture"
    assert invoke(["sweep", "--resume", swept["sweep_id"], "--uri", uri, "--quiet", "--output", str(table)]) == 0
    assert json.loads(table.read_text())["table"] == swept["table"]


TRIAL = """
import sys
from fl_lightning import load_config, run
run(load_config(sys.argv[2:]), parent_run_id=sys.argv[1], tags={"trial_id": "t" + sys.argv[-1]})
"""


@pytest.mark.slow
def test_eight_trials_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight processes write into one SQLite file, with a metric of every round and all files."""
    from fl_lightning.tracking import open_study, tracked

    monkeypatch.chdir(tmp_path)
    uri, rounds = resolve_uri("runs"), 12
    settings = ["data.subset=0.2", "fl.num_clients=3", f"fl.rounds={rounds}", "algorithm=dp_fedavg"]
    settings += ["fl.checkpoint_every=1", "privacy.target_epsilon=8", f"tracking.uri={uri}"]
    with tracked(open_study(uri, "fl_lightning", "eight")) as study:
        begun = [
            subprocess.Popen(
                [sys.executable, "-c", TRIAL, study.run_id, *settings, f"seed={seed}"],
                stderr=subprocess.PIPE,
                text=True,
            )
            for seed in range(8)
        ]
        complaints = [process.communicate(timeout=500)[1] for process in begun]
        assert [process.returncode for process in begun] == [0] * 8, complaints
        assert "tracking" not in "".join(complaints)
    client = connect(uri)
    trials = children(uri, study.run_id, history=())
    assert sorted(child.params["seed"] for child in trials) == [str(seed) for seed in range(8)]
    assert client.get_run(study.run_id).info.status == "FINISHED"
    names = set(trials[0].metrics)
    assert {"test_accuracy", "test_loss", "epsilon", "seconds", "oracle/train_loss"} <= names
    for child in trials:
        assert child.status == "FINISHED" and set(child.params) == set(trials[0].params)
        assert set(child.tags) == set(trials[0].tags) and child.tags["trial_id"] == f"tseed={child.params['seed']}"
        result = read_json(uri, child.run_id, "result.json")
        for name in names - {name for name in names if name.startswith("system/")}:
            steps = sorted(metric.step for metric in client.get_metric_history(child.run_id, name))
            assert steps == list(range(1, rounds + 1)), f"{name}: no round lost, none twice"
        told = [metric.value for metric in client.get_metric_history(child.run_id, "test_accuracy")]
        assert told == [record["test_accuracy"] for record in result["rounds"]]
        assert set(artifacts(client, child.run_id)) >= ARTIFACTS
        models = client.search_logged_models([study.experiment_id], filter_string=f"source_run_id = '{child.run_id}'")
        assert [model.name for model in models] == ["model"]
    assert not list(tmp_path.glob("tracking-lost-*"))
