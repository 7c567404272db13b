"""A sweep that was killed or stopped goes on to the table of the undisturbed one, and repeats nothing that was done."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from stores import until
from sweeps import sweep_from

from fl_lightning.cli import invoke
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.tracking import children, connect, find_parent
from tune.resuming import resume_sweep
from tune.session import ray_session
from tune.space import Plan, draw
from tune.stored import cells_from_dict, cells_to_dict, sweep_to_dict

ROUNDS = 8
BASE = [
    "data.subset=0.2",
    "partition=dirichlet",
    "fl.num_clients=4",
    f"fl.rounds={ROUNDS}",
    "fl.checkpoint_every=1",
    "tracking.uri=runs",
]
SPACE = {"algorithm": {"grid": ["scaffold", "dp_fedavg"]}}
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_session() as module:
        yield module


@pytest.fixture(scope="module")
def undisturbed(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return sweep_from(tmp_path_factory.mktemp("whole"), BASE, SweepConfig(space=SPACE, seeds=SEEDS)).result


def what_counts(result: dict[str, Any]) -> dict[str, Any]:
    """All but names and clocks."""
    plain = json.loads(json.dumps(result))
    for trial in plain["trials"]:
        del trial["run_id"]
    for row in [*plain["table"], plain["best"], *plain["best_by_promise"]]:
        for key in [key for key in row or () if key.startswith("seconds")]:
            del row[key]
    plain["selection"].pop("run_id", None)
    return {
        k: v for k, v in plain.items() if k not in ("sweep_id", "parent_run_id", "tracking_uri", "seconds", "report")
    }


def started(folder: Path, *more: str, content: dict[str, Any] | None = None) -> subprocess.Popen[str]:
    """The same sweep, or another one, as a process of its own."""
    content = content or {"name": "sweep", "space": SPACE, "seeds": list(SEEDS), "overrides": BASE}
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "fl_lightning.cli", "sweep", "sweep=mine.yaml", *more]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **output)  # type: ignore[call-overload]


def half_way(connection: sqlite3.Connection) -> bool:
    """Two trials have ended and another one has reached its second round."""
    ended = connection.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone()[0]
    under_way = connection.execute(
        "SELECT max(step) FROM metrics JOIN runs USING (run_uuid) WHERE key = 'seconds' AND status = 'RUNNING'"
    ).fetchone()[0]
    return ended >= 2 and (under_way or 0) >= 2


def sweep_id_of(database: Path) -> str:
    with sqlite3.connect(database) as connection:
        return str(connection.execute("SELECT value FROM tags WHERE key = 'sweep_id'").fetchone()[0])


def test_a_sweep_killed_half_way_and_resumed_ends_with_the_undisturbed_table(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    database = tmp_path / "runs" / "mlflow.db"
    process = started(tmp_path)
    try:
        until(process, database, half_way)
        sweep_id = sweep_id_of(database)
        assert invoke(["sweep", "--resume", sweep_id, "--uri", "runs"]) == 2
        assert f"sweep {sweep_id} is still being run by process {process.pid}" in capsys.readouterr().err
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    uri = f"sqlite:///{database}"
    parent = find_parent(uri, None, sweep_id)
    before = {child.tags["trial_id"]: child for child in children(uri, parent)}
    client = connect(uri)
    ended = {k: client.get_run(child.run_id).info.end_time for k, child in before.items() if child.status == "FINISHED"}
    assert 2 <= len(ended) < 4

    assert invoke(["sweep", "--resume", sweep_id, "--uri", "runs", "--output", "table.json"]) == 0
    printed = capsys.readouterr().out
    resumed = json.loads((tmp_path / "table.json").read_text())
    assert what_counts(resumed) == what_counts(undisturbed)
    assert resumed["sweep_id"] == sweep_id and resumed["parent_run_id"] == parent
    assert f"resumed: {len(ended)} trials are finished" in printed and f"[{len(ended) + 1}/4]" in printed

    after = children(uri, parent)
    assert len(after) == 4 and {child.status for child in after} == {"FINISHED"}
    assert client.get_run(parent).info.status == "FINISHED"
    for child in after:
        trial_id = child.tags["trial_id"]
        assert [step for step, _ in child.history["test_accuracy"]] == list(range(1, ROUNDS + 1)), "no round twice"
        if trial_id in before:
            assert child.run_id == before[trial_id].run_id
        if trial_id in ended:
            assert client.get_run(child.run_id).info.end_time == ended[trial_id] and "resumed" not in child.tags
    under_way = [k for k, child in before.items() if k not in ended and child.history["test_accuracy"]]
    assert under_way and all(child.tags.get("resumed") for child in after if child.tags["trial_id"] in under_way)

    assert invoke(["sweep", "--resume", sweep_id, "--uri", "runs", "--output", "again.json"]) == 0
    assert "has finished already: nothing is left to run" in capsys.readouterr().out
    assert what_counts(json.loads((tmp_path / "again.json").read_text())) == what_counts(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_stopped_and_resumed_ends_with_the_undisturbed_table(
    number: int, undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = started(tmp_path)
    try:
        until(process, tmp_path / "runs" / "mlflow.db", half_way)
        process.send_signal(number)
        printed, complained = process.communicate(timeout=200)
    finally:
        process.kill()
    sweep_id = printed.split("sweep id: ")[1].split()[0]
    assert f"`fl-lightning sweep --resume {sweep_id}` goes on" in complained
    assert what_counts(resume_sweep(sweep_id, uri="runs")) == what_counts(undisturbed)


def killed_worker(process: subprocess.Popen[str], database: Path) -> str:
    """Kills the process of the trial that is under way; returns its MLflow run."""
    until(process, database, half_way)
    with sqlite3.connect(database) as connection:
        run_id, pid = connection.execute(
            "SELECT run_uuid, value FROM tags JOIN runs USING (run_uuid) WHERE key = 'pid' AND status = 'RUNNING' "
            "AND run_uuid IN (SELECT run_uuid FROM metrics)"
        ).fetchone()
    os.kill(int(pid), signal.SIGKILL)
    return str(run_id)


@pytest.mark.slow
def test_a_killed_worker_fails_its_trial_alone_and_resuming_tries_it_again(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = started(tmp_path, "--output", "first.json")
    try:
        run_id = killed_worker(process, tmp_path / "runs" / "mlflow.db")
        process.communicate(timeout=400)
    finally:
        process.kill()
    first = json.loads((tmp_path / "first.json").read_text())
    assert process.returncode == 1 and first["failed"] == 1
    [lost] = [trial for trial in first["trials"] if trial["status"] == "failed"]
    assert lost["run_id"] == run_id and "killed" in lost["error"]["message"]
    resumed = resume_sweep(first["sweep_id"], uri="runs")
    assert what_counts(resumed) == what_counts(undisturbed)
    assert next(t["run_id"] for t in resumed["trials"] if t["trial_id"] == lost["trial_id"]) == run_id


@pytest.mark.slow
def test_with_retries_a_killed_worker_goes_on_from_its_last_round_within_the_sweep(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    process = started(tmp_path, "sweep.max_retries=1", "--output", "table.json")
    database = tmp_path / "runs" / "mlflow.db"
    try:
        run_id = killed_worker(process, database)
        _, complained = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, complained
    result = json.loads((tmp_path / "table.json").read_text())
    assert what_counts(result) == what_counts(undisturbed)
    assert "is tried again" in complained
    client = connect(f"sqlite:///{database}")
    assert client.get_run(run_id).data.tags["resumed"] == "true"
    steps = [metric.step for metric in client.get_metric_history(run_id, "test_accuracy")]
    assert steps == list(range(1, ROUNDS + 1)), "no round twice"


@pytest.mark.slow
def test_a_trial_without_a_checkpoint_starts_anew_and_failed_ones_are_tried_again(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first trial has no checkpoints any more, the second could not read its data: both come to an end later."""
    monkeypatch.chdir(tmp_path)
    shards = json.dumps([list(range(client * 300, client * 300 + 60)) for client in range(3)])
    (tmp_path / "a.json").write_text(shards)
    (tmp_path / "b.json").write_text(shards[:40])
    sweep = SweepConfig(space={"partition.path": {"grid": ["a.json", "b.json"]}})
    first = sweep_from(
        tmp_path, ["partition=file", "fl.num_clients=3", "fl.rounds=2", "tracking.uri=runs"], sweep
    ).result
    assert [trial["status"] for trial in first["trials"]] == ["finished", "failed"]
    client, lost = connect(first["tracking_uri"]), first["trials"][0]["run_id"]
    client.set_terminated(lost, "FAILED")
    assert not (tmp_path / "runs" / "checkpoints" / lost).exists(), "a finished run needs none"
    (tmp_path / "b.json").write_text(shards)
    again = resume_sweep(first["sweep_id"], uri="runs")
    assert [trial["status"] for trial in again["trials"]] == ["finished", "finished"] and again["status"] == "finished"
    assert again["trials"][0]["run_id"] != lost
    assert again["trials"][0]["final"] == again["trials"][1]["final"]
    assert again["trials"][0]["final"] == first["trials"][0]["final"]
    assert client.get_run(again["parent_run_id"]).info.status == "FINISHED"
    assert "error" not in client.get_run(again["parent_run_id"]).data.tags


def test_random_trials_are_read_back_not_drawn_again(tmp_path: Path) -> None:
    """Cells and draws survive their file bit by bit, also where an option chooses which other keys there are."""
    space = {
        "algorithm": {"grid": ["fedavg", "fedsam"]},
        "algorithm.local.lr": {"loguniform": [1e-3, 1e-1]},
        "partition": {"choice": ["iid", "dirichlet"]},
        "fl.batch_size": {"randint": [16, 64]},
    }
    sweep = SweepConfig(space=space, seeds=(3, 2**40), num_samples=3, settings={"fedsam": {"algorithm.local.rho": 0.1}})
    plan = Plan("s", tuple(space), tuple(validate_space(["fl.rounds=1"], sweep)), {})
    listed = draw(plan, 3)
    content = json.loads(json.dumps({"sweep": sweep_to_dict(sweep), **cells_to_dict(plan.cells), "listed": listed}))
    read = SweepConfig(**content["sweep"])
    assert read == sweep
    axes = [axis for axis in read.space.values() if axis.is_random]
    back = Plan("s", tuple(space), cells_from_dict(content, axes), {})
    assert len(content["settings"]) == 2 and len(back.cells) == 4
    points = [(plan.point(sampled), back.point(sampled)) for sampled in content["listed"]]
    assert len(points) == 12 and len({point.params["algorithm.local.lr"] for point, _ in points}) == 3
    for whole, read_back in points:
        assert (whole.params, whole.seed) == (read_back.params, read_back.seed)
        assert whole.config == read_back.config and whole.config.sha256 == read_back.config.sha256


def test_what_cannot_be_resumed_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    from fl_lightning.tracking import open_study, resolve_uri

    study = open_study(resolve_uri("runs"), "e", "0badcafe")
    study.finish("KILLED")
    for arguments, said in (
        (["--resume", "0badcafe", "--uri", "runs"], "holds no list of its trials"),
        (["--resume", "nosuch", "--uri", "runs"], "sweep nosuch is not in"),
        (["--resume", "0badcafe", "fl.rounds=3"], "fl.rounds=3: would be ignored with --resume"),
        (["--uri", "runs", "sweep=demo"], "--uri=runs: would be ignored without --resume; set tracking.uri=runs"),
    ):
        assert invoke(["sweep", *arguments]) == 2
        assert said in capsys.readouterr().err
