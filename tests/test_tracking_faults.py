"""Faults around tracking: long values (H18) and a store that fails while training goes on."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from fl_lightning.records import RoundRecord
from fl_lightning.tracking import (
    RunTracker,
    children,
    connect,
    ensure_experiment,
    open_study,
    resolve_uri,
    tracked,
)
from fl_lightning.tracking.outbox import Lane, Values
from fl_lightning.tracking.values import MARK, VALUE_LIMIT

ROOT = Path(__file__).parents[1]
CONFIG = {"seed": 7, "algorithm": {"name": "fedavg"}}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return resolve_uri(f"{tmp_path_factory.mktemp('faults')}/mlruns")


@pytest.fixture
def own_store(tmp_path) -> str:
    return resolve_uri(f"{tmp_path}/mlruns")


def database(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def run_of(uri: str, run_id: str | None):
    assert run_id is not None
    return connect(uri).get_run(run_id)


# --- long values (H18) -----------------------------------------------------------------------------------------------


def test_long_and_many_values_all_arrive(store):
    """H18: an 8000-character parameter, 300 parameters, a name of 300 characters, 2000 metrics in one call."""
    long_name, long_value = "layer." + "n" * 294, "0123456789" * 800
    many = {f"p{number:03}": number for number in range(298)}
    config = {**CONFIG, "many": many, "text": long_value, long_name: "kept", "odd@name": [1, 2]}
    metrics = {f"m{number}": float(number) for number in range(2000)}
    study = open_study(store, "limits", "limits-1")
    tracker = RunTracker(store)
    with tracked(tracker):
        tracker.start(config, experiment="limits", parent_run_id=study.run_id)
        tracker.on_round(RoundRecord(1, (0,), None, None, 0.5, 0.1, metrics={**metrics, "x" * 300: 1.5, "acc@1": 2.5}))

    run = run_of(store, tracker.run_id)
    assert run.info.status == "FINISHED"
    assert len(run.data.params) == 2 + 298 + 3
    assert all(run.data.params[f"many.p{number:03}"] == str(number) for number in range(298))
    shortened = run.data.params["text"]
    assert len(shortened) == VALUE_LIMIT and shortened.endswith(MARK) and long_value.startswith(shortened[: -len(MARK)])
    (sent_name,) = (name for name, value in run.data.params.items() if value == "kept")
    assert len(sent_name) == 250 and long_name.startswith(sent_name[:239])
    whole = json.loads((Path(run.info.artifact_uri) / "params.json").read_text())
    assert whole["params"]["text"] == long_value and whole["params"][long_name] == "kept"
    assert whole["names"][sent_name] == long_name and "odd@name" in whole["names"].values()

    assert len(run.data.metrics) == 2000 + 2 + 2
    assert [run.data.metrics[name] for name in metrics] == list(metrics.values())
    names = json.loads((Path(run.info.artifact_uri) / "names.json").read_text())
    assert {original: run.data.metrics[name] for name, original in names.items()} == {"x" * 300: 1.5, "acc@1": 2.5}

    (child,) = children(store, study.run_id)
    assert (child.params["text"], child.params[long_name]) == (long_value, "kept")
    assert (child.params["odd@name"], child.params["many.p297"]) == ("[1, 2]", "297")


def test_one_refused_value_does_not_take_the_others_with_it(store, caplog):
    client, experiment = connect(store), ensure_experiment(store, "refusals")
    run_id = client.create_run(experiment).info.run_id
    lane = Lane(client, run_id)
    entries = [(f"m{number}", float(number), 1, 1) for number in range(10)]
    lane.put(Values("metrics", [*entries[:6], ("../bad", 0.0, 1, 1), *entries[6:]]))
    assert client.get_run(run_id).data.metrics == {f"m{number}": float(number) for number in range(10)}
    ((item, cause),) = lane.refused
    assert item.record() == {"metrics": [("../bad", 0.0, 1, 1)]} and "../bad" in cause
    assert not lane.pending and len(caplog.records) == 1


# --- a store that fails while training goes on -----------------------------------------------------------------------


def test_a_database_that_fails_during_training_gets_everything_later(own_store, caplog, tmp_path):
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="outage")
        tracker.log_metrics({"accuracy": 0.1}, step=1)
        assert tracker.flush()
        with sqlite3.connect(database(own_store)) as connection:
            connection.execute("ALTER TABLE metrics RENAME TO away")
        for step in (2, 3, 4):
            tracker.log_metrics({"accuracy": step / 10}, step=step)
            assert tracker.flush()
        with sqlite3.connect(database(own_store)) as connection:
            connection.execute("ALTER TABLE away RENAME TO metrics")
    history = connect(own_store).get_metric_history(tracker.run_id, "accuracy")
    assert [(entry.step, entry.value) for entry in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run_of(own_store, tracker.run_id).info.status == "FINISHED"
    (warning,) = caplog.records
    assert "no such table: metrics" in warning.getMessage() and "\n" not in warning.getMessage()
    assert not list(tmp_path.glob("tracking-lost-*"))


def test_what_cannot_be_sent_by_the_end_is_in_a_file_that_is_named(own_store, caplog, tmp_path):
    tracker = RunTracker(own_store, lost_folder=tmp_path / "absent")
    tracker._lost_folder.mkdir()
    with tracked(tracker):
        tracker.start(CONFIG, experiment="outage")
        with sqlite3.connect(database(own_store)) as connection:
            connection.execute("ALTER TABLE metrics RENAME TO away")
        began = time.monotonic()
        for step in range(1, 51):
            tracker.log_metrics({"accuracy": step / 100}, step=step)
        assert time.monotonic() - began < 2.0, "training does not wait for the store"
    (lost,) = (tmp_path / "absent").glob(f"tracking-lost-{tracker.run_id}.json")
    content = json.loads(lost.read_text())
    values = [entry[1] for item in content["not_sent"] for entry in item["metrics"]]
    assert values == [step / 100 for step in range(1, 51)] and "no such table" in content["cause"]
    assert (content["status"], content["status_written"]) == ("FINISHED", True)
    assert str(lost) in caplog.records[-1].getMessage() and len(caplog.records) == 2


def test_a_full_artifact_place_does_not_hold_up_metrics(own_store, tmp_path):
    """The artifact folder is a file, so nothing can be written under it, until it is repaired."""
    place = database(own_store).parent / "artifacts"
    place.parent.mkdir()
    place.write_text("in the way")
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="files")
        tracker.log_metrics({"accuracy": 0.5}, step=1)
        assert tracker.flush()
        assert run_of(own_store, tracker.run_id).data.metrics == {"accuracy": 0.5}
        place.unlink()
    assert (Path(run_of(own_store, tracker.run_id).info.artifact_uri) / "config.yaml").exists()


def test_a_sweep_that_cannot_be_closed_keeps_its_own_error(own_store, caplog):
    def sweep():
        with tracked(open_study(own_store, "outage", "s-9")):
            with sqlite3.connect(database(own_store)) as connection:
                connection.execute("ALTER TABLE runs RENAME TO away")
            raise ValueError("the real cause")

    with pytest.raises(ValueError, match="the real cause"):
        sweep()
    assert "sweep s-9 could not be closed" in caplog.text


def test_a_run_deleted_by_hand_does_not_stop_training(own_store, tmp_path):
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="deleted")
        assert tracker.flush()
        connect(own_store).delete_run(tracker.run_id)
        tracker.log_metrics({"accuracy": 0.5, "loss": 1.0}, step=1)
        tracker.log_artifact_file(tmp_path / "no such file")
    content = json.loads((tmp_path / f"tracking-lost-{tracker.run_id}.json").read_text())
    assert [item.get("metrics", [[item.get("file")]])[0][0] for item in content["refused"]] == [
        "accuracy",
        "loss",
        str(tmp_path / "no such file"),
    ]
