"""A sweep on Ray Tune, from its cells to its table, its place in MLflow and its folders."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from stores import until
from sweeps import paired_sweep, single_config, sweep_from

from fl_lightning import ConfigError, RunConfig, run
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.tracking import children, connect
from tune.session import check_resources, ray_session
from tune.space import Plan, draw
from tune.trial import WORKER_LOST, loss_of


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    """One Ray for all sweeps of this file: `run_sweep` joins it and leaves it running."""
    with ray_session() as module:
        yield module
    assert not module.is_initialized()


def test_json_has_a_trial_per_cell_and_a_row_per_setting() -> None:
    result = paired_sweep().result
    assert result["status"] == "finished" and result["failed"] == 0 and len(result["sweep_id"]) == 8
    swept = [(t["trial_id"], t["params"]["algorithm"], t["seed"], t["status"]) for t in result["trials"]]
    assert swept == [
        ("t000", "fast", 42, "finished"),
        ("t001", "fast", 43, "finished"),
        ("t002", "dp_fedavg", 42, "finished"),
        ("t003", "dp_fedavg", 43, "finished"),
    ]
    fast, private = result["table"]
    accuracies = [t["final"]["test_accuracy"] for t in result["trials"]]
    assert fast["test_accuracy_mean"] == pytest.approx(sum(accuracies[:2]) / 2, abs=1e-15)
    assert fast["test_accuracy_sd"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5, abs=1e-15)
    assert fast["epsilon"] is None and 7.9 < private["epsilon"] <= 8 and private["unit"] == "sample"
    assert result["trials"][2]["privacy"]["adjacency"] == "add_remove" and result["trials"][0]["privacy"] is None
    best = max((row for row in result["table"]), key=lambda row: row["test_accuracy_mean"])
    assert result["best"]["setting"] == best["setting"]
    json.dumps(result, allow_nan=False)


def test_a_trial_has_the_very_bits_of_the_same_run_alone() -> None:
    swept = paired_sweep()
    with chdir(swept.start):
        for trial in (swept.result["trials"][1], swept.result["trials"][2]):
            alone = run(
                single_config(
                    f"algorithm={trial['params']['algorithm']}", f"seed={trial['seed']}", "tracking.enabled=false"
                )
            )
            assert alone.final["weights_sha256"] == trial["final"]["weights_sha256"]
            assert alone.final["test_loss"] == trial["final"]["test_loss"]
            assert alone.final["epsilon"] == trial["final"]["epsilon"]


def test_plain_lines_begin_with_the_sweep_id_and_end_with_the_table() -> None:
    swept = paired_sweep()
    plan, *lines = swept.printed.splitlines()
    assert plan.startswith("plan algorithm=dp_fedavg: epsilon 8.00 per sample, δ=1e-05, R = ")  # fedavg promises none
    assert lines[0] == f"sweep id: {swept.result['sweep_id']}"
    assert sorted(line.split()[1] for line in lines[1:5]) == ["t000", "t001", "t002", "t003"]
    assert [line.split()[0] for line in lines[1:5]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "per sample, δ=1e-05" in next(line for line in lines[1:5] if "t002" in line)
    assert any(line.startswith("| dp_fedavg") for line in lines)
    assert swept.complained == ""


def test_mlflow_has_parent_and_children_with_all_their_rounds_and_tags() -> None:
    swept = paired_sweep()
    found = {child.tags["trial_id"]: child for child in children(swept.uri, swept.result["parent_run_id"])}
    assert sorted(found) == ["t000", "t001", "t002", "t003"]
    for trial in swept.result["trials"]:
        child = found[trial["trial_id"]]
        assert (child.run_id, child.status, child.tags["seed"]) == (trial["run_id"], "FINISHED", str(trial["seed"]))
        assert child.tags["sweep_id"] == swept.result["sweep_id"] and child.tags["setting"] == trial["setting"]
        assert child.tags["sweep.algorithm"] == trial["params"]["algorithm"] and child.tags["kind"] == "trial"
        assert child.tags["weights_sha256"] == trial["final"]["weights_sha256"]
        assert [step for step, _ in child.history["test_accuracy"]] == [1, 2]
        assert child.history["test_accuracy"][-1][1] == trial["final"]["test_accuracy"]
    client = connect(swept.uri)
    parent = client.get_run(swept.result["parent_run_id"])
    assert parent.info.status == "FINISHED" and parent.info.run_name == "pair"
    assert {entry.path for entry in client.list_artifacts(parent.info.run_id)} == {"sweep.json", "plan.json", "report"}


def test_random_axes_are_drawn_once_and_held_over_settings_and_seeds(tmp_path: Path) -> None:
    space = {
        "algorithm.local.variant": {"grid": ["sam", "asam"]},
        "algorithm.local.lr": {"loguniform": [1e-3, 1e-1]},
        "fl.batch_size": {"randint": [16, 17]},
        "partition": {"choice": ["iid", "dirichlet"]},
    }
    sweep = SweepConfig(space=space, seeds=(1, 2), num_samples=3)
    base = ["algorithm=fedsam", "data.subset=0.1", "fl.num_clients=2", "fl.rounds=1", "tracking.enabled=false"]
    swept = sweep_from(tmp_path, base, sweep)
    trials = swept.result["trials"]
    assert len(trials) == 12 and swept.result["failed"] == 0 and swept.result["parent_run_id"] is None
    draws: dict[float, list[dict[str, Any]]] = {}
    for trial in trials:
        params = trial["params"]
        assert list(params) == list(space)  # in the order of the sweep's file
        assert 1e-3 <= params["algorithm.local.lr"] <= 1e-1 and params["fl.batch_size"] in (16, 17)
        config = json.loads(
            (tmp_path / "mlruns" / "sweeps" / swept.result["sweep_id"] / trial["trial_id"] / "params.json").read_text()
        )
        assert (
            config["params"] == params and config["config"]["algorithm"]["local"]["lr"] == params["algorithm.local.lr"]
        )
        assert config["config"]["partition"]["kind"] == params["partition"] and config["seed"] == trial["seed"]
        draws.setdefault(params["algorithm.local.lr"], []).append(trial)
    assert [len(group) for group in draws.values()] == [4, 4, 4]
    for group in draws.values():
        assert len({(t["params"]["fl.batch_size"], t["params"]["partition"]) for t in group}) == 1
        assert {(t["params"]["algorithm.local.variant"], t["seed"]) for t in group} == {
            (v, s) for v in ("sam", "asam") for s in (1, 2)
        }
    assert [row["n"] for row in swept.result["table"]] == [2] * 6
    assert _points(sweep, base) == [(t["params"], t["seed"]) for t in trials]  # the same sweep draws the same


def _points(sweep: SweepConfig, base: list[str]) -> list[tuple[dict[str, Any], int]]:
    """What would be run, in its order, without running it."""
    plan = Plan("again", tuple(sweep.space), tuple(validate_space(base, sweep)), {})
    points = [plan.point(sampled) for sampled in draw(plan, sweep.num_samples)]
    return [(dict(point.params), point.seed) for point in points]


def test_trials_that_could_never_start_are_refused_before_anything_is_written(tmp_path: Path, ray: Any) -> None:
    for resources, rule in (
        ({"cpu": 4096}, r"resources\.cpu=4096: Ray has"),
        ({"gpu": 64}, r"resources\.gpu=64: Ray has"),
    ):
        sweep = SweepConfig(space={"algorithm": {"grid": ["fedavg"]}}, resources=resources)
        with pytest.raises(ConfigError, match=rule):
            sweep_from(tmp_path, ["tracking.uri=runs"], sweep)
    with pytest.raises(ConfigError, match=r"engine\.device=cuda with sweep\.resources\.gpu=0"):
        check_resources(ray, SweepConfig(), [RunConfig(engine={"device": "cuda"})])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_sweep_leaves_killed_runs_and_no_process(number: int, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_lightning.cli", "sweep", "sweep=demo", "fl.rounds=500", "sweep.seeds=[1]"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(process, tmp_path / "mlruns" / "mlflow.db", _rounds_are_recorded)
        workers = _descendants(process.pid)
        process.send_signal(number)
        printed, complained = process.communicate(timeout=60)
    finally:
        process.kill()
    sweep_id = printed.splitlines()[0].removeprefix("sweep id: ")
    assert process.returncode == code and f"`fl-lightning report {sweep_id}`" in complained
    assert "Traceback" not in complained
    with sqlite3.connect(tmp_path / "mlruns" / "mlflow.db") as database:
        statuses = [status for (status,) in database.execute("SELECT status FROM runs")]
    assert statuses and set(statuses) == {"KILLED"}
    deadline = time.monotonic() + 20
    while (left := [pid for pid in workers if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers and left == []


def _rounds_are_recorded(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM metrics WHERE key = 'test_accuracy'").fetchone()[0] > 2


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has just ended
            continue
    found, before = {pid}, 0
    while len(found) > before:
        before = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return sorted(found - {pid})


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_lost_worker_is_named_and_a_fault_in_starting_it_keeps_its_cause() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    lost = loss_of(ActorDiedError())["error"]
    assert lost["type"] == "ActorDiedError" and "memory" in lost["message"] and "\n" not in lost["message"]
    cause = ModuleNotFoundError("No module named 'mine'")
    assert loss_of(RayTaskError("f", "...", cause))["error"] == {
        "type": "ModuleNotFoundError",
        "message": "No module named 'mine'",
    }


LISTENING = """
import os, sys
from pathlib import Path
import tune.launch, tune.resuming
assert not {name for name in sys.modules if name == "ray" or name.startswith("ray.")}, "Ray is imported too early"
from tune.session import ray_session

def descendants(pid):
    for task in Path("/proc", str(pid), "task").iterdir():
        for child in (task / "children").read_text().split():
            yield from (int(child), *descendants(int(child)))

with ray_session():
    inodes = set()
    for pid in (os.getpid(), *descendants(os.getpid())):
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # 0A: LISTEN
                print("listens at", fields[1].partition(":")[0])
"""


def test_ray_listens_on_the_loopback_address_only() -> None:
    """Of all ports that processes of a sweep's Ray have open, none is reachable from another machine.

    Ray decides when it is imported, so nothing may import it before the sweep has said so.
    """
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=120)
    listening = {line.split()[-1] for line in done.stdout.splitlines() if line.startswith("listens at")}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert done.returncode == 0, done.stderr
    assert listening and listening <= loopback


@pytest.mark.slow
def test_a_killed_worker_fails_its_trial_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_lightning.cli", "sweep", "sweep=demo", "fl.rounds=6", "sweep.seeds=[1]"]
    process = subprocess.Popen(
        [*command, "--output", "o.json"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        database = tmp_path / "mlruns" / "mlflow.db"
        until(process, database, _rounds_are_recorded)
        with sqlite3.connect(database) as connection:
            query = "SELECT r.name, t.value FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid AND t.key = 'pid' "
            running = connection.execute(query + "WHERE r.status = 'RUNNING' AND r.name <> 'demo'").fetchall()
        os.kill(int(running[0][1]), signal.SIGKILL)
        complained = process.communicate(timeout=240)[1]
    finally:
        process.kill()
    assert process.returncode == 1 and "1 of 5 trials failed" in complained and "Traceback" not in complained
    result = json.loads((tmp_path / "o.json").read_text())
    failed = [trial for trial in result["trials"] if trial["status"] == "failed"]
    assert len(failed) == 1 and failed[0]["error"]["message"] == WORKER_LOST
    with sqlite3.connect(database) as connection:
        statuses = dict(connection.execute("SELECT run_uuid, status FROM runs"))
    assert statuses.pop(failed[0]["run_id"]) == "FAILED" and statuses.pop(result["parent_run_id"]) == "FAILED"
    assert set(statuses.values()) == {"FINISHED"} and len(statuses) == 4
