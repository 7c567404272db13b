"""Which Ray a sweep joins: `ray.address`, RAY_ADDRESS, and what is refused before Ray is asked."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fl_lightning import ConfigError, RunConfig, load_config
from fl_lightning.cli import invoke
from fl_lightning.config import SweepConfig, load_ray, load_sweep, needed_paths
from tune.joining import Cluster, check_answers, find_cluster
from tune.looking import looker
from tune.nodes import differences
from tune.stored import sweep_to_dict


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def left_by_ray(tmp_path: Path, address: str) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)


def test_the_address_is_read_from_the_command_line_and_the_sweeps_file(tmp_path: Path) -> None:
    sweep, overrides = load_sweep(["sweep=demo", "ray.address=10.0.0.7:6379", "fl.rounds=3"])
    assert sweep.ray.address == "10.0.0.7:6379" and "fl.rounds=3" in overrides and "ray" not in " ".join(overrides)
    file = tmp_path / "mine.yaml"
    file.write_text("space: {algorithm: {grid: [fedavg]}}\nray: {address: auto}\n")
    assert load_sweep([f"sweep={file}"])[0].ray.address == "auto"
    assert load_sweep([f"sweep={file}", "ray.address=null"])[0].ray.address is None
    assert sweep_to_dict(load_sweep([f"sweep={file}"])[0])["ray"] == {"address": "auto"}
    assert load_ray([]) is None
    found = load_ray(["ray.address=auto"])
    assert found is not None and found.address == "auto"


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("ray.address=ray://head:10001", r"ray\.address=ray://head:10001: needs a sweep that is started on a node"),
        ("ray.address=head", r"ray\.address=head: needs auto, or host:port"),
        ("ray.address=head:99999", r"ray\.address=head:99999: needs auto, or host:port"),
        ("ray.adress=auto", r"^ray\.adress: no such key; did you mean ray\.address\?"),
        ("sweep.storage=s3://bucket/x", r"sweep\.storage=s3://bucket/x: needs a folder that every node has mounted"),
        ("sweep.resources.gpu=1.5", r"sweep\.resources\.gpu=1\.5: needs a fraction below 1, or a whole number"),
    ],
)
def test_what_cannot_be_joined_or_shared_is_refused(argument: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_sweep(["sweep=demo", argument])


def test_whole_gpus_and_fractions_fit() -> None:
    assert [SweepConfig(resources={"gpu": gpu}).resources.gpu for gpu in (0.25, 1, 2)] == [0.25, 1.0, 2.0]


def test_where_a_sweep_runs_is_no_part_of_what_its_trials_compute() -> None:
    assert not any(key.startswith(("ray", "storage")) for key in RunConfig().to_dict())
    with pytest.raises(ConfigError, match=r"ray\.address: no such key"):
        load_config(["ray.address=auto"])


def test_auto_is_the_environments_cluster_else_the_one_of_the_last_ray_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_cluster(None) is None
    with pytest.raises(ConfigError, match=r"ray\.address=auto: no Ray cluster was started on this machine .*ray start"):
        find_cluster("auto")
    left_by_ray(tmp_path, "10.0.0.7:6379\n")
    found = find_cluster("auto")
    assert found is not None and (found.address, found.given) == ("10.0.0.7:6379", "ray.address=auto")
    assert find_cluster(None) is None, "a cluster that nobody asked for is not joined"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.8:6379")
    for asked in (None, "auto", "10.0.0.8:6379"):
        joined = find_cluster(asked)
        assert joined is not None and joined.address == "10.0.0.8:6379"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    by_environment = find_cluster(None)
    assert by_environment is not None and by_environment.given == "RAY_ADDRESS=auto"


@pytest.mark.parametrize(("asked", "present"), [("10.0.0.7:6379", "10.0.0.8:6379"), ("auto", "local")])
def test_contradicting_addresses_are_refused(asked: str, present: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", present)
    with pytest.raises(ConfigError, match=rf"ray\.address={asked}: contradicts RAY_ADDRESS={present}"):
        find_cluster(asked)


def test_a_faulty_environment_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS=ray://head:10001: needs a sweep that is started on a node"):
        find_cluster(None)


def test_an_address_at_which_nothing_answers_ends_the_command_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert invoke(["sweep", "sweep=demo", f"ray.address={address}", "--quiet"]) == 2
        assert f"error: ray.address={address}: no Ray cluster answers at {address}" in capsys.readouterr().err
        left_by_ray(tmp_path, address)
        assert invoke(["sweep", "sweep=demo", "ray.address=auto", "--quiet"]) == 2
        assert f"error: ray.address=auto: no Ray cluster answers at {address}" in capsys.readouterr().err
    assert not (tmp_path / "mlruns").exists()


def test_what_answers_and_is_no_ray_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing would keep Ray waiting for minutes."""
    monkeypatch.setattr("tune.joining.PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"ray\.address=auto: no Ray cluster answers at {address} \(timed out\)"):
            check_answers(Cluster(address, "ray.address=auto"))
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.handle_request).start()
        with pytest.raises(ConfigError, match=r"what answers there is no Ray cluster"):
            check_answers(Cluster(f"127.0.0.1:{web.server_port}", "ray.address=auto"))


def test_the_files_that_runs_read_are_known_by_their_keys(tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for file in ("train-images", "t10k-images"):
        (tmp_path / "MNIST" / "raw" / f"{file}-idx3-ubyte").touch()
    for file in ("train-labels", "t10k-labels"):
        (tmp_path / "MNIST" / "raw" / f"{file}-idx1-ubyte").touch()
    mnist = RunConfig(data={"name": "mnist", "root": tmp_path})
    assert needed_paths([mnist])["data.root"][0].name == "train-images-idx3-ubyte"
    absent = RunConfig(data={"name": "cifar10", "root": tmp_path})
    assert needed_paths([absent]) == {"data.root": [tmp_path]}
    split = RunConfig(partition={"kind": "file", "path": tmp_path / "a.json"}, fl={"cohort_schedule": "b.json"})
    assert needed_paths([split, split]) == {
        "fl.cohort_schedule": [Path.cwd() / "b.json"],
        "partition.path": [tmp_path / "a.json"],
    }
    assert needed_paths([RunConfig()]) == {}


def test_other_code_or_versions_on_a_node_are_named() -> None:
    here = looker()({"tokens": {}, "paths": {}, "uri": None, "packages": ("fl-lightning", "torch")})
    assert list(differences(here, {"a": here})) == []
    versions = here["versions"]
    other = {**here, "versions": {**versions, "torch": "2.0.0"}, "code": "0" * 64, "commit": "1234", "python": "3.10"}
    said = list(differences(here, {"a": here, "b": other, "c": {**here, "code": None}}))
    assert [line.partition(":")[0] for line in said] == ["node b"] * 3 + ["node c"]
    assert "Python 3.10" in said[0] and "torch 2.0.0" in said[1] and "commit 1234 there" in said[2]
    assert "fl_lightning is not installed there" in said[3]
    plain = (versions["torch"] or "").partition("+")[0]
    builds = [{**here, "versions": {**versions, "torch": f"{plain}+{build}"}} for build in ("cu128", "cpu")]
    assert list(differences(here, {"a": builds[0]})) == [], "the driver may lack a GPU"
    assert "different builds" in next(iter(differences(here, {"a": builds[0], "b": builds[1]})))
