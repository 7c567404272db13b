"""A killed run goes on to the result of the undisturbed one: weights, curves, epsilon, in the same MLflow run."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_lightning import RunConfig, run
from fl_lightning.checkpoint import LATEST, Progress, load, save
from fl_lightning.cli import invoke
from fl_lightning.errors import CheckpointError, PrivacyError
from fl_lightning.federation import Federation
from fl_lightning.records import RunResult, ServerState
from fl_lightning.session import resume
from fl_lightning.tracking import connect

KILLED = """
import os, signal, sys, json
from fl_lightning import RunConfig, run

class Killer:
    def on_start(self, info): print(info["run_id"], flush=True)
    def on_round(self, record):
        if record.round == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)
    def on_end(self, result): pass

run(RunConfig(**json.loads(sys.argv[1])), observers=[Killer()])
"""

ALGORITHMS: dict[str, tuple[object, dict]] = {
    "fedavg": ("fedavg", {}),
    "fedadam": ({"name": "fedadam", "aggregate": {"server_lr": 0.01}}, {}),
    "scaffold": ("scaffold", {}),
    "moon": ("moon", {}),
    "fedlaw": ({"name": "fedlaw", "aggregate": {"proxy_epochs": 2}}, {}),
    "sam_afl": ("sam_afl", {}),
    "ce_fedavg": ("ce_fedavg", {}),
    "dp_fedsam": ("dp_fedsam", {"level": "sample"}),
    "dp_scaffold": ("dp_scaffold", {"level": "sample"}),
    "sam_adpfl update": ("sam_adpfl", {"level": "update"}),
    "sam_adpfl personalised": ({"name": "sam_adpfl", "sharpness": {"noise_rule": "personalised"}}, {"level": "update"}),
    "quantile": (
        "dp_fedavg",
        {"level": "update", "trust_model": "central", "clip_bound": "quantile", "sampling": "poisson"},
    ),
    "decay": ("dp_fedavg", {"level": "sample", "noise_decay": 0.8, "noise_decay_rounds": 2}),
}
IN_THIS_SUITE = ("scaffold", "quantile")


def settings(name: str, folder: Path) -> dict:
    algorithm, privacy = ALGORITHMS[name]
    return {
        "algorithm": algorithm,
        "privacy": privacy or {"level": "none"},
        "fl": {"rounds": 6, "num_clients": 5, "clients_per_round": 3, "batch_size": 64, "checkpoint_every": 2},
        "partition": "dirichlet",
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
    }


def killed(config: dict, round: int) -> str:
    """The id of a run whose process was killed outright after this round."""
    arguments = [sys.executable, "-c", KILLED, json.dumps(config), str(round)]
    ended = subprocess.run(arguments, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    return ended.stdout.split()[0]


def what_counts(result: RunResult) -> dict:
    plain = result.to_dict()
    for record in plain["rounds"]:
        del record["seconds"]
    return {key: plain[key] for key in ("rounds", "final", "badge", "status", "partition_sha256")}


@pytest.mark.parametrize(
    "name", [name if name in IN_THIS_SUITE else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_a_killed_run_ends_as_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    config = settings(name, tmp_path)
    round = random.Random(name).randrange(1, 6)
    run_id = killed(config, round)
    resumed = resume(run_id, uri=config["tracking"]["uri"])
    whole = run(
        RunConfig(**{**config, "tracking": {"enabled": False}, "fl": {**config["fl"], "checkpoint_every": None}})
    )
    assert what_counts(resumed) == what_counts(whole)
    assert resumed.run_id == run_id
    client = connect(config["tracking"]["uri"])
    stored = client.get_run(run_id)
    assert stored.info.status == "FINISHED" and "error" not in stored.data.tags
    history = client.get_metric_history(run_id, "test_accuracy")
    assert [m.step for m in history] == [1, 2, 3, 4, 5, 6], "no round twice"
    assert [m.value for m in history] == [r.test_accuracy for r in whole.rounds]
    with pytest.raises(CheckpointError, match="has finished"):
        resume(run_id, uri=config["tracking"]["uri"])


def test_the_command_resumes_and_writes_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = settings("fedavg", tmp_path)
    config["fl"]["checkpoint_every"] = 4
    run_id = killed(config, 1)  # before the first checkpoint of a round: the one from the start serves
    uri = config["tracking"]["uri"]
    assert invoke(["resume", run_id, "--uri", uri, "--output", "r.json"]) == 0
    out = capsys.readouterr().out
    assert f"run id: {run_id}" in out and "round 6/6" in out
    assert len(json.loads((tmp_path / "r.json").read_text())["rounds"]) == 6
    assert invoke(["resume", "nosuchrun", "--uri", uri]) == 2
    assert "is not in sqlite" in capsys.readouterr().err
    assert invoke(["resume", run_id, "--uri", f"sqlite:///{tmp_path}/absent.db"]) == 2
    assert not (tmp_path / "absent.db").exists()


def progress() -> Progress:
    server = ServerState(torch.arange(4.0), {"n": torch.tensor(3)}, 2, {"c": torch.ones(4)})
    return Progress(Federation(server, {1: {"c_i": torch.full((4,), 0.5)}}))


def test_a_checkpoint_comes_back_whole_and_keeps_two_files(tmp_path: Path) -> None:
    whole = progress()
    for round in range(5):
        server = replace(whole.federation.server, round=round)
        save(tmp_path, replace(whole, federation=replace(whole.federation, server=server)), {"a": 1}, "hash")
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["latest.json", "round-000003.pt", "round-000004.pt"]
    stored = load(tmp_path)
    server = stored.progress.federation.server
    assert (server.round, stored.config, stored.partition_sha256, stored.ledger) == (4, {"a": 1}, "hash", None)
    torch.testing.assert_close(server.w, torch.arange(4.0), rtol=0, atol=0)
    assert int(server.buffers["n"]) == 3 and float(server.extra["c"].sum()) == 4
    assert float(stored.progress.federation.clients[1]["c_i"].sum()) == 2


def test_damage_absence_and_other_versions_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path)
    file = save(tmp_path, progress(), {}, "hash")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="SHA-256"):
        load(tmp_path)
    latest = json.loads((tmp_path / LATEST).read_text())
    (tmp_path / LATEST).write_text(json.dumps({**latest, "version": 99}))
    with pytest.raises(CheckpointError, match="version 99"):
        load(tmp_path)


def test_a_changed_noise_or_a_lost_ledger_is_refused(tmp_path: Path) -> None:
    """Case H14, of a whole run: what was spent is not forgotten, and goes on under the same mechanism only."""
    config = settings("dp_fedsam", tmp_path)
    run_id = killed(config, 3)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    stored = load(folder)
    assert stored.ledger is not None
    noisier = dict(stored.config, privacy={**stored.config["privacy"], "target_epsilon": 4.0})
    bound = dict(stored.config, privacy={**stored.config["privacy"], "clip_norm": 2.0})
    batch = dict(stored.config, fl={**stored.config["fl"], "batch_size": 32})
    for changed, field in ((noisier, "noise"), (bound, "sensitivity"), (batch, "noise|rate")):
        _rewritten(folder, config=changed)
        with pytest.raises(PrivacyError, match=field):
            resume(run_id, uri=config["tracking"]["uri"])
    _rewritten(folder, config=stored.config, ledger=None)
    with pytest.raises(PrivacyError, match="holds no privacy ledger"):
        resume(run_id, uri=config["tracking"]["uri"])


def _rewritten(folder: Path, **changes: object) -> None:
    """Changes parts of the newest checkpoint, with a fresh checksum."""
    import hashlib

    latest = json.loads((folder / LATEST).read_text())
    file = folder / latest["files"][0]["file"]
    content = torch.load(file, weights_only=True)
    content["rest"] = json.dumps({**json.loads(content["rest"]), **changes})
    torch.save(content, file)
    latest["files"][0]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / LATEST).write_text(json.dumps(latest))


def test_settings_that_would_be_ignored_are_refused() -> None:
    from fl_lightning.config.faults import InvalidConfig

    with pytest.raises(InvalidConfig, match=r"fl\.checkpoint_every=3: would be ignored with tracking\.enabled=false"):
        RunConfig(fl={"checkpoint_every": 3}, tracking={"enabled": False})
