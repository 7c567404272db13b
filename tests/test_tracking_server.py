"""The same calls against a real `mlflow server` on a loopback port, and a server that goes away during training."""

import math
import os
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import torch
import yaml
from stores import free_port, wait_until_healthy

from fl_lightning.errors import TrackingError
from fl_lightning.records import RoundRecord
from fl_lightning.tracking import (
    RunTracker,
    children,
    connect,
    find_parent,
    open_study,
    resolve_uri,
    run_page,
    tracked,
    ui_command,
    ui_environment,
)
from fl_lightning.tracking.inputs import DataInput
from fl_lightning.tracking.model import FinalModel, model_files

CONFIG = {"seed": 7, "algorithm": {"name": "fedavg"}}


def test_pages_of_a_run():
    assert run_page("sqlite:////x/mlflow.db", "3", "abc", port=8080) == "http://127.0.0.1:8080/#/experiments/3/runs/abc"
    assert run_page("http://host:1/", "3", "abc") == "http://host:1/#/experiments/3/runs/abc"
    with pytest.raises(TrackingError, match="open this address"):
        ui_command("http://host:1")


def train_and_fail(tracker: RunTracker, config: dict, parent_run_id: str) -> None:
    with tracked(tracker):
        tracker.start(config, experiment="remote", parent_run_id=parent_run_id)
        tracker.on_round(RoundRecord(1, (0,), 2.0, math.nan, 0.1, 0.25, epsilon=math.inf))
        many = {f"m{number}": float(number) for number in range(2000)}
        tracker.on_round(RoundRecord(2, (0,), 2.0, 1.5, 0.2, 0.25, epsilon=1.0, metrics=many))
        tracker.log_item(
            DataInput("two", "training", "ab" * 32, "here", False, ("uint8", (-1, 1)), ("int64", (-1,)), {})
        )
        tracker.log_item(
            FinalModel(
                str(tracker.experiment_id),
                model_files(torch.nn.Linear(2, 3), torch.zeros(1, 2)),
                ("float32", (-1, 2)),
                ("float32", (-1, 3)),
            )
        )
        raise ZeroDivisionError("planned")


@pytest.mark.slow
def test_the_same_calls_work_over_http_and_the_ui_serves_local_runs(tmp_path):
    import mlflow

    local = resolve_uri(start=tmp_path)
    tracker = RunTracker(local)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="local")
        tracker.log_metrics({"accuracy": 0.5}, step=1)
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        ui_command(local, port),
        cwd=tmp_path,
        env=ui_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_healthy(server, address)
        page = f"{address}/get-artifact?path=config.yaml&run_uuid={tracker.run_id}"
        with urllib.request.urlopen(page, timeout=30) as answer:
            assert yaml.safe_load(answer.read()) == CONFIG

        with tracked(open_study(address, "remote", "far-1")) as study:
            distant = RunTracker(address)
            long = {**CONFIG, "long": "x" * 8000, "many": {f"p{number}": number for number in range(300)}, "none": ""}
            with pytest.raises(ZeroDivisionError):
                train_and_fail(distant, long, study.run_id)
        (child,) = children(address, find_parent(address, None, "far-1"))
        assert child.status == "FAILED" and child.tags["error"] == "ZeroDivisionError: planned"
        assert (child.params["long"], child.params["many.p299"], child.params["none"]) == ("x" * 8000, "299", "")
        assert [child.metrics[f"m{number}"] for number in range(2000)] == list(range(2000))
        assert child.history["test_accuracy"] == ((1, 0.1), (2, 0.2))
        history = connect(address).get_metric_history(child.run_id, "test_loss")
        assert math.isnan(history[0].value) and history[1].value == 1.5
        (dataset,) = connect(address).get_run(child.run_id).inputs.dataset_inputs
        assert (dataset.dataset.name, dataset.dataset.digest) == ("two", "ab" * 16)
        mlflow.set_tracking_uri(address)
        assert mlflow.pytorch.load_model(f"runs:/{child.run_id}/model")(torch.zeros(5, 2)).shape == (5, 3)
        assert connect(address).get_run(study.run_id).info.status == "FAILED"
        assert {found.path for found in connect(address).list_artifacts(child.run_id)} >= {"config.yaml", "error.txt"}
        assert not (tmp_path / "mlartifacts").exists(), "artifacts go beside the database"
    finally:
        mlflow.set_tracking_uri(None)
        os.environ.pop("MLFLOW_TRACKING_URI", None)  # MLflow writes it, for its own child processes
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_a_server_that_is_restarted_during_training_gets_everything(tmp_path):
    local, port = resolve_uri(f"{tmp_path}/mlruns"), free_port()
    connect(local)
    address = f"http://127.0.0.1:{port}"

    def serve() -> subprocess.Popen:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen(ui_command(local, port), cwd=tmp_path, env=ui_environment(), **quiet)
        wait_until_healthy(server, address)
        return server

    server = serve()
    tracker = RunTracker(address, lost_folder=tmp_path)
    try:
        with tracked(tracker):
            tracker.start(CONFIG, experiment="restart")
            tracker.log_metrics({"accuracy": 0.1}, step=1)
            server.terminate()
            server.wait(30)
            began = time.monotonic()
            for step in range(2, 20):
                tracker.log_metrics({"accuracy": step / 10}, step=step)
            assert time.monotonic() - began < 10, "one attempt, then training goes on"
            server = serve()
        assert len(connect(address).get_metric_history(tracker.run_id, "accuracy")) == 19
        assert connect(address).get_run(tracker.run_id).info.status == "FINISHED"
    finally:
        server.terminate()
        server.wait(30)
