"""Sweeps of the size that is promised: 24 trials through kill -9, and 50 trials that leave nothing behind."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from fl_lightning.cli import invoke
from fl_lightning.tracking import children, connect, find_parent

OVERRIDES = ["data.subset=0.2", "fl.num_clients=4", "fl.rounds=4", "fl.checkpoint_every=1", "tracking.uri=runs"]
GRID = {
    "name": "grid",
    "space": {
        "algorithm": {"grid": ["fedavg", "fedsam", "scaffold", "dp_fedavg"]},
        "algorithm.local.lr": {"grid": [0.05, 0.1, 0.2]},
    },
    "seeds": [1, 2],
    "overrides": OVERRIDES,
}
MANY = {
    "name": "many",
    "space": {"algorithm.local.lr": {"grid": [round(0.01 * number, 2) for number in range(1, 51)]}},
    "overrides": ["data.subset=0.2", "fl.num_clients=3", "fl.rounds=1", "tracking.uri=runs"],
}


def started(folder: Path, content: dict[str, Any], *more: str) -> subprocess.Popen[bytes]:
    (folder / "mine.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "fl_lightning.cli", "sweep", "sweep=mine.yaml", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finished_trials(database: Path) -> int:
    query = "SELECT count(*) FROM runs JOIN tags USING (run_uuid) WHERE status = 'FINISHED' AND key = 'trial_id'"
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return int(connection.execute(query).fetchone()[0])
    except sqlite3.OperationalError:  # not there, or the tables are being made
        return 0


def without_clocks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table but for its seconds, the one thing in it that no seed decides."""
    return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in result["table"]]


def wait_for(process: subprocess.Popen[bytes], database: Path, trials: int) -> None:
    deadline = time.monotonic() + 540
    while finished_trials(database) < trials:
        assert time.monotonic() < deadline and process.poll() is None, f"exit code {process.poll()}"
        time.sleep(0.05)


@pytest.mark.slow
def test_24_trials_killed_half_way_and_resumed_end_with_the_undisturbed_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    whole.mkdir()
    torn.mkdir()
    monkeypatch.chdir(whole)
    (whole / "mine.yaml").write_text(yaml.safe_dump(GRID))
    assert invoke(["sweep", "sweep=mine.yaml", "--quiet", "--output", "table.json"]) == 0
    undisturbed = json.loads((whole / "table.json").read_text())

    monkeypatch.chdir(torn)
    database = torn / "runs" / "mlflow.db"
    process = started(torn, GRID)
    try:
        wait_for(process, database, 12)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    with sqlite3.connect(database) as connection:
        sweep_id = str(connection.execute("SELECT value FROM tags WHERE key = 'sweep_id'").fetchone()[0])
    uri = f"sqlite:///{database}"
    parent, client = find_parent(uri, None, sweep_id), connect(uri)
    before = {
        child.tags["trial_id"]: (child.run_id, client.get_run(child.run_id).info.end_time)
        for child in children(uri, parent, history=())
        if child.status == "FINISHED"
    }
    assert 12 <= len(before) < 24
    assert invoke(["sweep", "--resume", sweep_id, "--uri", "runs", "--quiet", "--output", "table.json"]) == 0
    resumed = json.loads((torn / "table.json").read_text())
    assert len(undisturbed["table"]) == 12 and without_clocks(resumed) == without_clocks(undisturbed)
    assert [trial["final"] for trial in resumed["trials"]] == [trial["final"] for trial in undisturbed["trials"]]
    after = children(uri, parent)
    assert len(after) == 24 and {child.status for child in after} == {"FINISHED"}
    for child in after:
        assert [step for step, _ in child.history["test_accuracy"]] == [1, 2, 3, 4], "no round lost, none twice"
        if (known := before.get(child.tags["trial_id"])) is not None:
            assert (child.run_id, client.get_run(child.run_id).info.end_time) == known, "not repeated"


def held(process: psutil.Process) -> dict[int, tuple[int, int]]:
    """Open files and bytes of memory of the driver, and of the workers that train."""
    found = {}
    for each in [process, *process.children(recursive=True)]:
        try:
            if each.pid == process.pid or "ImplicitFunc" in " ".join(each.cmdline()):
                found[each.pid] = (each.num_fds(), each.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
def test_50_trials_leave_no_process_no_open_file_and_no_memory_behind(tmp_path: Path) -> None:
    database = tmp_path / "runs" / "mlflow.db"
    process = started(tmp_path, MANY)
    try:
        driver = psutil.Process(process.pid)
        wait_for(process, database, 10)
        early = held(driver)
        family = driver.children(recursive=True)
        wait_for(process, database, 48)
        late = held(driver)
        family += driver.children(recursive=True)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
    assert len(early) >= 2 and set(early) == set(late), "the same driver and workers all along"
    for pid, (files, memory) in late.items():
        assert files <= early[pid][0] + 10, f"open files grew from {early[pid][0]} to {files}"
        assert memory <= early[pid][1] + 120e6, f"memory grew from {early[pid][1]} to {memory} bytes"
    assert psutil.wait_procs(family, timeout=60)[1] == [], "every process of the sweep has ended"
    assert finished_trials(database) == 50
    assert not list((tmp_path / "runs" / "checkpoints").glob("*/*")), "finished trials keep no checkpoints"
    trials = [folder for folder in (tmp_path / "mlruns" / "sweeps").glob("*/*") if folder.is_dir()]
    assert len(trials) == 50 and all(len(list(folder.iterdir())) <= 3 for folder in trials)
