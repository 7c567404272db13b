"""Cases H15, H16, H17 and H20: what went wrong in other people's sweeps."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from sweeps import Swept, paired_sweep, single_config, sweep_from

from fl_lightning import ConfigError, run
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.tracking import children, connect
from tune.session import ray_session
from tune.space import Plan
from tune.trial import run_trial

SPLITS = {"fl.num_clients": 3, "fl.rounds": 1}
BASE = ["partition=file", "fl.num_clients=3", "fl.rounds=1"]


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[Any]:
    with ray_session() as module:
        yield module


def write_splits(folder: Path, broken: str) -> dict[str, Any]:
    """Four natural splits of the digits, some of them torn in half by a full disk; the axis that compares them."""
    for number, name in enumerate("abcd"):
        shards = [list(range(client * 300 + number, client * 300 + number + 60)) for client in range(3)]
        text = json.dumps(shards)
        (folder / f"{name}.json").write_text(text[: len(text) // 2] if name in broken else text)
    return {"partition.path": {"grid": ["a.json", "b.json", "c.json", "d.json"]}}


class TestH15:
    """A failed trial keeps its own error; its siblings and the exit code tell the truth."""

    @pytest.fixture(scope="class")
    def swept(self, tmp_path_factory: pytest.TempPathFactory) -> Swept:
        folder = tmp_path_factory.mktemp("h15")
        return sweep_from(folder, BASE, SweepConfig(space=write_splits(folder, "c"), seeds=(7,)))

    def test_three_results_are_kept_and_the_failure_has_type_message_and_parameters(self, swept: Swept) -> None:
        result = swept.result
        assert (result["status"], result["failed"]) == ("failed", 1)
        assert [t["status"] for t in result["trials"]] == ["finished", "finished", "failed", "finished"]
        assert all(0 <= t["final"]["test_accuracy"] <= 1 for t in result["trials"] if t["status"] == "finished")
        failed = result["trials"][2]
        torn = str(swept.start / "c.json")
        assert failed["params"] == {"partition.path": torn} and failed["seed"] == 7
        with pytest.raises(Exception) as alone:
            run(swept.cells[2].config)
        assert failed["error"] == {"type": alone.type.__name__, "message": str(alone.value)}
        assert torn in failed["error"]["message"]

    def test_what_the_failed_trial_has_said_is_in_its_folder_and_with_its_run(self, swept: Swept) -> None:
        failed = swept.result["trials"][2]
        folders = swept.start / "mlruns" / "sweeps" / swept.result["sweep_id"]
        said = (folders / "t002" / "log.txt").read_text()
        assert "Traceback" in said and f"{failed['error']['type']}: {failed['error']['message'][:40]}" in said
        assert "log.txt" in {entry.path for entry in connect(swept.uri).list_artifacts(failed["run_id"])}
        assert not (folders / "t001" / "log.txt").exists()

    def test_the_siblings_numbers_are_those_of_runs_of_their_own(self, swept: Swept) -> None:
        last = swept.result["trials"][3]  # its worker is the one that replaced the failed trial's
        with chdir(swept.start):
            alone = run(swept.cells[3].config.with_overrides({"tracking.enabled": False}))
        assert alone.final["weights_sha256"] == last["final"]["weights_sha256"]

    def test_the_table_the_report_and_what_is_printed_show_it(self, swept: Swept) -> None:
        error = swept.result["trials"][2]["error"]
        assert [row["failed"] for row in swept.result["table"]] == [0, 0, 1, 0]
        assert swept.result["table"][2]["test_accuracy_mean"] is None
        sentence = f"1 of 4 trials failed; the first, t002: {error['type']}: {error['message']}"
        assert sentence in swept.complained
        text = Path(swept.result["report"]["markdown"]).read_text()
        assert "did not finish" in text and error["message"] in text

    def test_mlflow_has_the_failed_child_with_its_error_and_a_failed_parent(self, swept: Swept) -> None:
        found = {child.tags["trial_id"]: child for child in children(swept.uri, swept.result["parent_run_id"])}
        assert [found[f"t00{i}"].status for i in range(4)] == ["FINISHED", "FINISHED", "FAILED", "FINISHED"]
        failed = swept.result["trials"][2]
        assert found["t002"].run_id == failed["run_id"]
        assert found["t002"].tags["error"].startswith(f"{failed['error']['type']}: {failed['error']['message'][:60]}")
        assert found["t002"].params["partition.path"] == failed["params"]["partition.path"]
        assert connect(swept.uri).get_run(swept.result["parent_run_id"]).info.status == "FAILED"

    def test_when_all_fail_there_is_no_best_and_the_first_cause_is_printed(self, tmp_path: Path) -> None:
        write_splits(tmp_path, "ab")
        content = {"space": {"partition.path": {"grid": ["a.json", "b.json"]}}, "seeds": [7], "overrides": BASE}
        (tmp_path / "all.yaml").write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "fl_lightning.cli", "sweep", "sweep=all.yaml", "--output", "o.json", "--quiet"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
        result = json.loads((tmp_path / "o.json").read_text())
        assert result["best"] is None and result["failed"] == 2
        error = result["trials"][0]["error"]
        assert f"2 of 2 trials failed; the first, t000: {error['type']}: {error['message']}" in done.stderr

    def test_an_impossible_value_is_refused_before_the_first_trial(self) -> None:
        sweep = SweepConfig(space={"privacy.clip_norm": {"grid": [1.0, 0.5, -1, 2.0]}})
        with pytest.raises(ConfigError, match=r"privacy\.clip_norm.*-1.*> 0"):
            validate_space(["algorithm=dp_fedavg"], sweep)


class TestH16:
    """Relative paths mean the start folder: single run, sweep and trial in this process agree."""

    def test_three_modes_one_result_one_data_set_one_store(self, tmp_path: Path) -> None:
        swept = paired_sweep()
        trial = swept.result["trials"][0]
        with chdir(swept.start):
            single = run(single_config("algorithm=fast", "seed=42"))
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        plan = Plan("local", ("algorithm",), swept.cells, {"tracking.uri": swept.uri})
        with chdir(elsewhere):
            local = run_trial(plan, {"cell": 0}, "t000")
        assert single.final == local.final
        assert single.final["weights_sha256"] == trial["final"]["weights_sha256"]
        assert single.config["data"]["root"] == str(swept.start / "my data" / "digits.npz")
        assert [path.relative_to(swept.start) for path in swept.start.rglob("*.npz")] == [Path("my data/digits.npz")]
        assert [path.relative_to(swept.start) for path in swept.start.rglob("*.db")] == [Path("my runs/mlflow.db")]
        assert list(elsewhere.iterdir()) == []
        for run_id in (trial["run_id"], single.run_id, local.run_id):
            assert connect(swept.uri).get_run(run_id).info.status == "FINISHED"


DEEP = "d" * 30
WIDE_AXES: dict[str, Any] = {
    "algorithm.local.lr": 0.01234567890123456,
    "algorithm.local.weight_decay": 0.00012345678901234,
    "algorithm.local.rho": 0.05123456789012345,
    "algorithm.local.beta1": 0.91234567890123456,
    "algorithm.local.beta2": 0.99123456789012345,
    "algorithm.aggregate.server_lr": 0.98765432109876543,
    "algorithm.aggregate.mu": 9.12345678901234567,
    "algorithm.aggregate.gamma": 0.99912345678901234,
    "partition.alpha": 5.12345678901234567,
    "data.subset": 0.20123456789012345,
    "algorithm.local.variant": "asam",
    "algorithm.aggregate.weighting": "uniform",
    "algorithm.aggregate.gap_at": "train_mean",
    "algorithm.local.optimizer": "adam",
    "algorithm": "sam_afl",
    "data": "digits",
    "partition": "dirichlet",
    "model": "lenet5",
    "engine": "debug",
    "engine.precision": "fp64",
    "engine.device": "cpu",
    "partition.min_samples": 3,
    "fl.num_clients": 2,
    "fl.rounds": 1,
    "fl.local_epochs": 1,
    "fl.max_local_steps": 2,
    "fl.batch_size": 19,
    "fl.eval_every": 1,
}


class TestH17:
    """Folder names do not grow with the number of swept parameters."""

    def test_28_swept_parameters_from_a_deep_folder(self, tmp_path: Path) -> None:
        start = tmp_path
        while len(str(start)) < 120:
            start = start / DEEP[: max(1, min(30, 119 - len(str(start))))]
        start.mkdir(parents=True)
        sweep = SweepConfig(space={key: {"grid": [value]} for key, value in WIDE_AXES.items()}, seeds=(5,))
        swept = sweep_from(start, [], sweep)
        trial = swept.result["trials"][0]
        assert trial["status"] == "finished", trial["error"]
        assert trial["params"] == WIDE_AXES and len(WIDE_AXES) >= 25
        paths = [path.relative_to(start) for path in start.rglob("*")]
        assert max(len(part) for path in paths for part in path.parts) <= 100
        assert max(len(str(path)) for path in paths) < 250 - 60  # below a root of 60 characters
        folder = start / "mlruns" / "sweeps" / swept.result["sweep_id"] / trial["trial_id"]
        assert json.loads((folder / "params.json").read_text())["params"] == WIDE_AXES
        child = children(swept.uri, swept.result["parent_run_id"])[0]
        assert child.params["algorithm.local.beta1"] == repr(WIDE_AXES["algorithm.local.beta1"])

    def test_a_list_as_a_value_is_refused_in_words(self) -> None:
        with pytest.raises(ConfigError, match="plain values, no lists"):
            SweepConfig(space={"fl.batch_size": {"grid": [[16, 32], 64]}})


def test_h20_all_trials_of_a_sweep_are_in_its_experiment_with_their_files() -> None:
    swept = paired_sweep()
    client = connect(swept.uri)
    experiments = {found.name: found.experiment_id for found in client.search_experiments()}
    assert sorted(experiments) == ["Default", "relative"]
    assert client.search_runs([experiments["Default"]]) == []
    runs = [client.get_run(trial["run_id"]) for trial in swept.result["trials"]]
    assert {found.info.experiment_id for found in runs} == {experiments["relative"]}
    for found in runs:
        files = {entry.path for entry in client.list_artifacts(found.info.run_id)}
        assert {"config.yaml", "result.json", "partition"} <= files
    assert os.path.isdir(swept.start / "my runs" / "artifacts")
