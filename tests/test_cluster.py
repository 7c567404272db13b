"""A sweep on a Ray cluster of two nodes: the same bits, refusals before it starts, and the loss of a node.

The nodes are two raylets on this machine. They share its disks, so a folder that only one of them sees is made by a
path that means another place in every process, /proc/self/cwd.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import Nodes, descendants, hashes, sweep_process, swept, two_nodes, under_way, wait_for
from test_tracking_server import free_port, wait_until_healthy

from fl_lightning import load_config, run
from fl_lightning.tracking import children, connect, ui_command, ui_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ROUNDS = 12
CONTENT: dict[str, Any] = {
    "space": {"algorithm": {"grid": ["fedavg", "scaffold"]}},
    "seeds": [1, 2],
    "overrides": ["data.subset=0.2", "fl.num_clients=4", "tracking.uri=runs", "tracking.log_model=false"],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    cluster.start_second()
    return cluster


def write_sweep(folder: Path, rounds: int) -> None:
    overrides = [*CONTENT["overrides"], f"fl.rounds={rounds}", "fl.checkpoint_every=1"]
    (folder / "mine.yaml").write_text(yaml.safe_dump({**CONTENT, "name": "mine", "overrides": overrides}))


def test_a_joined_sweep_has_the_bits_of_runs_alone_and_leaves_the_cluster_running(nodes: Nodes, tmp_path: Path) -> None:
    write_sweep(tmp_path, rounds=2)
    storage = tmp_path / "shared"
    code, out, err = swept(
        tmp_path, nodes.environment, "sweep=mine.yaml", f"ray.address={nodes.address}", "sweep.storage=shared",
        "sweep.seeds=[3]", "--output", "o.json",
    )  # fmt: skip
    assert code == 0, err
    assert "note: 1 GPU(s) are idle" in out and err == ""
    result = json.loads((tmp_path / "o.json").read_text())
    for trial in result["trials"]:
        overrides = [item for item in CONTENT["overrides"] if not item.startswith("tracking")]
        config = load_config(
            [*overrides, "fl.rounds=2", f"algorithm={trial['params']['algorithm']}", f"seed={trial['seed']}",
             "tracking.enabled=false"]
        )  # fmt: skip
        assert trial["final"]["weights_sha256"] == run(config).final["weights_sha256"]
    for child in children(result["tracking_uri"], result["parent_run_id"]):
        assert child.tags["checkpoints"] == str(storage / "checkpoints" / child.run_id)
        assert (storage / "checkpoints").is_dir() and not Path(child.tags["checkpoints"]).exists()  # it has finished
        assert child.tags["config_sha256"]
    assert (storage / result["sweep_id"] / "t000" / "params.json").is_file()
    assert not (tmp_path / "mlruns" / "sweeps").exists() and not (tmp_path / "runs" / "checkpoints").exists()
    assert all(process.poll() is None for process in nodes.processes.values())
    assert nodes.raylet("head") and nodes.raylet("second")


CASES = """
import json, os, sys
from fl_lightning import FLError, RunConfig
from fl_lightning.config import SweepConfig
from tune.nodes import check_nodes
from tune.session import check_resources, ray_session

def said(check):
    try:
        return check()
    except FLError as error:
        return f"{type(error).__name__}: {error}"

private, digits = "/proc/self/cwd", [RunConfig()]
npz = [RunConfig(data={"name": "npz", "root": f"{private}/mine.npz"})]
with ray_session(sys.argv[1]) as ray:
    def nodes(sweep={}, configs=digits, uri="sqlite:////" + os.path.abspath("runs/mlflow.db").lstrip("/")):
        return said(lambda: check_nodes(ray, SweepConfig(**sweep), configs, uri, joined=True))
    def resources(**wanted):
        return said(lambda: check_resources(ray, SweepConfig(resources=wanted), digits))
    print(json.dumps({
        "fits": nodes(),
        "storage": nodes({"storage": f"{private}/shared"}),
        "store": nodes({"storage": "shared"}, uri=f"sqlite:///{private}/runs/mlflow.db"),
        "server": nodes(uri=sys.argv[2]),
        "data": nodes(configs=npz),
        "gpu": resources(gpu=2),
        "cpu": resources(cpu=2),
        "half": resources(gpu=0.5),
        "left": sorted(os.listdir()),
    }))
"""


def test_what_nodes_do_not_share_is_refused_by_name_before_anything_is_written(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(b"")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{closed.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, "-c", CASES, nodes.address, server],
        cwd=tmp_path, env=nodes.environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["fits"] == []
    for case, key in (("storage", "sweep.storage"), ("store", "tracking.uri")):
        words = rf"ConfigError: {key}: 2 nodes \(.* among them\) do not see the folder /proc/self/cwd/(shared|runs) "
        assert re.match(words, said[case]), said[case]
        assert f"set {'it' if case == 'store' else key} to" in said[case]
    assert server in said["server"] and "cannot be used" in said["server"]
    assert re.match(r"ConfigError: data\.root: 2 nodes \(.*\) lack /proc/self/cwd/mine\.npz; ", said["data"]), said[
        "data"
    ]
    assert said["gpu"].startswith("ConfigError: sweep.resources.gpu=2: of 2 nodes none has more than 1")
    assert said["cpu"].startswith("ConfigError: sweep.resources.cpu=2: of 2 nodes none has more than 1")
    assert said["half"] == [] and said["left"] == ["mine.npz"]


@pytest.mark.slow
def test_a_tracking_server_must_answer_every_node(cluster: Nodes, tmp_path: Path) -> None:
    """The second node is behind a proxy that nobody runs, so it alone does not reach the server."""
    write_sweep(tmp_path, rounds=1)
    port = free_port()
    command = ui_command(f"sqlite:///{tmp_path}/server/mlflow.db", port)
    (tmp_path / "server").mkdir()
    server = subprocess.Popen(command, env=ui_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    uri = f"http://127.0.0.1:{port}"
    arguments = ("sweep=mine.yaml", "sweep.seeds=[1]", f"ray.address={cluster.address}", f"tracking.uri={uri}")
    try:
        wait_until_healthy(server, uri)
        cluster.start_second()
        cluster.kill("second")
        cluster.start_second(http_proxy="http://127.0.0.1:9")
        try:
            code, _, err = swept(tmp_path, cluster.environment, *arguments)
        finally:
            cluster.kill("second")
        assert code == 2 and "each node takes that address for itself" in err, err
        assert re.match(rf"error: tracking\.uri={uri}: node .* does not reach it \(API request to ", err), err
        assert not (tmp_path / "mlruns").exists()
        cluster.start_second()
        code, _, err = swept(tmp_path, cluster.environment, *arguments, "--output", "o.json")
        assert code == 0, err
        result = json.loads((tmp_path / "o.json").read_text())
        for child in children(uri, result["parent_run_id"]):
            assert child.tags["checkpoints"] == str(tmp_path / "mlruns" / "checkpoints" / child.run_id)
            assert (tmp_path / "mlruns" / "checkpoints" / child.run_id / "latest.json").is_file()
    finally:
        server.terminate()
        server.wait()


def interrupted(nodes: Nodes, folder: Path, *more: str) -> tuple[int, str]:
    """A sweep whose second node is lost while each node runs a trial; exit code and standard error."""
    write_sweep(folder, ROUNDS)
    process = sweep_process(
        folder, nodes.environment, "sweep=mine.yaml", f"ray.address={nodes.address}", "--output", "o.json", *more
    )

    def both() -> bool:
        assert process.poll() is None, process.communicate()
        rounds = under_way(folder / "runs" / "mlflow.db")
        there = [
            max((step for pid, step in rounds.items() if pid in descendants(nodes.raylet(name))), default=0)
            for name in ("head", "second")
        ]
        return min(there) >= 2 and there[1] < ROUNDS - 2

    try:
        wait_for(both, lambda: "the trials never ran on both nodes at once")
        nodes.kill("second")
        _, complained = process.communicate(timeout=400)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, complained


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same sweep on a Ray of its own."""
    folder = tmp_path_factory.mktemp("whole")
    write_sweep(folder, ROUNDS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    code, _, err = swept(folder, environment, "sweep=mine.yaml", "--output", "o.json")
    assert code == 0, err
    return hashes(folder / "o.json")


@pytest.mark.slow
def test_trials_of_a_lost_node_go_on_elsewhere_to_the_undisturbed_table(
    nodes: Nodes, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    code, complained = interrupted(nodes, tmp_path)  # sweep.max_retries is not set: several nodes have two
    assert code == 0, complained
    assert "is tried again: the node that ran it was lost" in complained
    assert "state-dump" not in complained and "Traceback" not in complained
    assert hashes(tmp_path / "o.json") == undisturbed
    result = json.loads((tmp_path / "o.json").read_text())
    again = [child for child in children(result["tracking_uri"], result["parent_run_id"]) if "resumed" in child.tags]
    assert len(again) == 1, "from its last round, in its own run"
    assert [step for step, _ in again[0].history["test_accuracy"]] == list(range(1, ROUNDS + 1))


@pytest.mark.slow
def test_without_retries_a_lost_node_fails_its_trials_alone_and_resuming_finishes_them(
    nodes: Nodes, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    code, complained = interrupted(nodes, tmp_path, "sweep.max_retries=0", "sweep.storage=shared")
    result = json.loads((tmp_path / "o.json").read_text())
    failed = [trial for trial in result["trials"] if trial["status"] == "failed"]
    assert code == 1 and len(failed) == result["failed"] == 1, complained
    assert failed[0]["error"]["type"] == "NodeLost" and "the node that ran it was lost" in complained
    status = connect(result["tracking_uri"]).get_run(failed[0]["run_id"]).info.status
    assert status == "FAILED"
    code, out, err = swept(
        tmp_path, nodes.environment, "--resume", result["sweep_id"], "--uri", "runs", "ray.address=null", "--output",
        "again.json",
    )  # fmt: skip
    assert code == 0, err
    assert "resumed: 3 trials are finished, 1 go on" in out
    assert hashes(tmp_path / "again.json") == undisturbed
    resumed = json.loads((tmp_path / "again.json").read_text())
    assert {t["run_id"] for t in resumed["trials"]} == {t["run_id"] for t in result["trials"]}
