"""Population-based training: what is refused, what a member takes over, how values move, and a real population."""

import json
import os
import signal
import sqlite3
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sweep_resume import started, sweep_id_of, until

from fl_lightning import RunConfig, load_config, run
from fl_lightning.analysis.report import make_report
from fl_lightning.checkpoint import load
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.config.population import perturb_every
from fl_lightning.errors import CheckpointError, ConfigError, PrivacyError
from fl_lightning.session import resume
from fl_lightning.tracking import children, connect, resolve_uri
from tune.launch import planned
from tune.member import Boundary, as_stored, read_member, to_hand_over
from tune.population import explore
from tune.resuming import resume_sweep
from tune.space import DRAWN, ID, LINEAGE, draw

LR = {"algorithm.local.lr": {"loguniform": [1e-4, 0.5]}}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"space": {"fl.batch_size": {"randint": [8, 64]}}}, r"may change between two rounds .*fl\.batch_size out"),
        (
            {"space": {"privacy.noise_multiplier": {"uniform": [1, 2]}}},
            r"take sweep\.space\.privacy\.noise_multiplier out",
        ),
        (
            {"space": LR | {"algorithm.local.rho": {"grid": [0.1]}}},
            r"make sweep\.space\.algorithm\.local\.rho a choice",
        ),
        ({"seeds": [1, 2]}, r"sweep\.seeds.*needs one seed with scheduler=pbt"),
        ({"num_samples": 1}, r"sweep\.num_samples=1: needs a population"),
        ({"search": "optuna"}, r"sweep\.search=optuna: contradicts sweep\.scheduler=pbt"),
        ({"max_concurrent": 2}, r"sweep\.max_concurrent=2: contradicts"),
        ({"grace_rounds": 2}, r"sweep\.grace_rounds=2: would be ignored with scheduler=pbt"),
        ({"scheduler": "asha", "perturb_every": 2}, r"sweep\.perturb_every=2: would be ignored with scheduler=asha"),
        ({"metric": ["test_loss", "epsilon"]}, r"sweep\.metric.*contradicts sweep\.scheduler=pbt"),
    ],
)
def test_what_a_population_cannot_be_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SweepConfig(**{"space": LR, "scheduler": "pbt", "num_samples": 4, **settings})


@pytest.mark.parametrize(
    ("every", "overrides", "rule"),
    [
        (6, [], r"perturb_every=6: the members would never be compared in fl\.rounds=6"),
        (3, ["fl.eval_every=2"], r"perturb_every=3: is no multiple of fl\.eval_every=2"),
        (3, ["fl.checkpoint_every=2"], r"perturb_every=3: is no multiple of fl\.checkpoint_every=2"),
        (2, ["tracking.enabled=false"], r"needs tracking\.enabled=true"),
    ],
)
def test_members_that_could_not_be_compared_are_refused(every: int, overrides: list[str], rule: str) -> None:
    sweep = SweepConfig(space=LR, scheduler="pbt", num_samples=4, perturb_every=every)
    with pytest.raises(ConfigError, match=rule):
        perturb_every(sweep, load_config(["fl.rounds=6", *overrides]))


@pytest.mark.parametrize(("rounds", "measured", "every"), [(20, 1, 4), (20, 3, 3), (3, 1, 1), (20, 5, 5)])
def test_members_are_compared_after_each_fifth_of_the_rounds(rounds: int, measured: int, every: int) -> None:
    sweep = SweepConfig(space=LR, scheduler="pbt", num_samples=4)
    config = load_config([f"fl.rounds={rounds}", f"fl.eval_every={measured}"])
    assert perturb_every(sweep, config) == every


def test_values_move_by_a_fifth_or_to_a_neighbour_or_are_drawn_anew_and_stay_in_their_range() -> None:
    space = LR | {
        "algorithm.local.momentum": {"choice": [0.0, 0.5, 0.9]},
        "algorithm.local.weight_decay": {"uniform": [0.0, 0.1]},
    }
    axes = list(SweepConfig(space=space, scheduler="pbt", num_samples=4).space.values())
    old = {"algorithm.local.lr": 0.45, "algorithm.local.momentum": 0.9, "algorithm.local.weight_decay": 0.05}
    found = [explore(old, axes, np.random.default_rng(seed)) for seed in range(400)]
    rates = [values["algorithm.local.lr"] for values in found]
    assert all(1e-4 <= rate <= 0.5 for rate in rates)
    assert 0.3 < np.mean(np.isclose(rates, 0.36)) < 0.5 and 0.3 < np.mean(np.isclose(rates, 0.5)) < 0.5
    assert 0.18 < np.mean([rate < 0.3 for rate in rates]) < 0.3, "drawn anew, evenly in the logarithm"
    moved = [values["algorithm.local.momentum"] for values in found]
    assert 0.35 < moved.count(0.5) / 400 < 0.55 and 0.03 < moved.count(0.0) / 400 < 0.15
    decays = [values["algorithm.local.weight_decay"] for values in found]
    assert max(decays) <= 0.1 and 0.3 < np.mean(np.isclose(decays, 0.04)) < 0.5
    assert explore(old, axes, np.random.default_rng(3)) == found[3]


PRIVATE = ["algorithm=dp_fedavg", "privacy.noise_multiplier=2.0"]


def config_of(*more: str) -> RunConfig:
    base = [
        "data.subset=0.1",
        "fl.num_clients=2",
        "fl.rounds=4",
        "fl.checkpoint_every=1",
        "tracking.uri=runs",
        "seed=3",
    ]
    return load_config([*base, *more])


def paused(config: RunConfig, round: int = 2) -> tuple[str, Path]:
    """A run that waits after a round for others: its id and its checkpoint."""
    found: list[Path] = []

    def wait(folder: Path, record: Any) -> None:
        if record.round == round:
            found.append(folder)
            raise Boundary(folder, record)

    with pytest.raises(Boundary):
        run(config, after_checkpoint=wait)
    return found[0].name, found[0]


def test_a_member_takes_over_weights_and_ledger_and_keeps_its_own_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine, own_folder = paused(config_of(*PRIVATE, "algorithm.local.lr=0.001"))
    theirs, folder = paused(config_of(*PRIVATE, "algorithm.local.lr=0.2"))
    assert connect(resolve_uri("runs")).get_run(mine).info.status == "KILLED"
    before = load(own_folder).progress.records
    changed = config_of(*PRIVATE, "algorithm.local.lr=0.1")
    with to_hand_over(folder, "t001", theirs, 2) as copy:
        assert read_member(copy) == {ID: "t001", "run_id": theirs, "round": 2}
        taken = resume(mine, uri="runs", changed=changed, donor=copy)
    straight = resume(theirs, uri="runs", changed=changed)
    assert taken.final["weights_sha256"] == straight.final["weights_sha256"]
    assert taken.rounds[:2] == tuple(before) and straight.rounds[:2] != taken.rounds[:2]
    whole = run(config_of(*PRIVATE, "algorithm.local.lr=0.1"))
    assert taken.final["epsilon"] == straight.final["epsilon"] == whole.final["epsilon"]
    assert taken.final["weights_sha256"] != whole.final["weights_sha256"], "not the same past"
    history = connect(resolve_uri("runs")).get_metric_history(mine, "test_accuracy")
    assert [metric.step for metric in history] == [1, 2, 3, 4]


def test_what_cannot_be_taken_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, own_folder = paused(config_of(*PRIVATE))
    _, later = paused(config_of(*PRIVATE), round=3)
    with pytest.raises(CheckpointError, match=r"stands at round 3, this run at 2: it cannot take it over"):
        resume(mine, uri="runs", donor=later)
    louder = config_of("algorithm=dp_fedavg", "privacy.noise_multiplier=1.0")
    with pytest.raises(PrivacyError, match="noise"):
        resume(mine, uri="runs", changed=louder, donor=own_folder)
    _, elsewhere = paused(config_of(*PRIVATE, "seed=4"))
    with pytest.raises(CheckpointError, match="its data were dealt out differently"):
        resume(mine, uri="runs", donor=elsewhere)


def test_a_member_is_read_back_with_what_it_has_taken_over() -> None:
    drawn = {ID: "t001", DRAWN: {"algorithm.local.lr": 0.1}}
    step = {"round": 2, "donor": "t000", "old": {"algorithm.local.lr": 0.1}, "new": {"algorithm.local.lr": 0.3}}
    tags = {LINEAGE: json.dumps([step])}
    config = {"algorithm": {"local": {"lr": 0.3}}}
    assert as_stored(drawn, tags, config) == {ID: "t001", DRAWN: {"algorithm.local.lr": 0.3}, LINEAGE: [step]}
    killed_before = {"algorithm": {"local": {"lr": 0.1}}}
    assert as_stored(drawn, tags, killed_before) == drawn
    assert as_stored({**drawn, LINEAGE: [step]}, tags, None) == drawn


CONTENT = {
    "space": LR,
    "scheduler": "pbt",
    "perturb_every": 2,
    "num_samples": 4,
    "seeds": [1],
    "overrides": ["data.subset=0.3", "fl.num_clients=4", "fl.rounds=6", "tracking.uri=runs"],
}


def what_counts(result: dict[str, Any]) -> list[Any]:
    """All of the members but names and clocks."""
    plain = json.loads(json.dumps(result["trials"]))
    return [{key: value for key, value in trial.items() if key != "run_id"} for trial in plain]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pbt")
    process = started(folder, "--output", "table.json", content=CONTENT)
    try:
        printed, complained = process.communicate(timeout=550)
    finally:
        process.kill()
    assert process.returncode == 0, complained
    result = json.loads((folder / "table.json").read_text())
    return folder, {**result, "printed": printed}


@pytest.mark.slow
def test_the_worst_members_go_on_from_the_best(undisturbed: tuple[Path, dict[str, Any]]) -> None:
    folder, result = undisturbed
    assert result["status"] == "finished" and [trial["trial_id"] for trial in result["trials"]] == [
        "t000",
        "t001",
        "t002",
        "t003",
    ]
    uri = f"sqlite:///{folder / 'runs' / 'mlflow.db'}"
    runs = {child.tags["trial_id"]: child for child in children(uri, result["parent_run_id"])}
    first = SweepConfig(**CONTENT)
    with chdir(folder):
        plan = planned_of(first)
    for trial, sampled in zip(result["trials"], draw(plan, 4), strict=True):
        child = runs[trial["trial_id"]]
        assert [step for step, _ in child.history["test_accuracy"]] == list(range(1, 7)), "a point for each round"
        steps = trial["lineage"]
        assert json.loads(child.tags.get("lineage", "[]")) == steps
        values = [sampled[DRAWN], *(step["new"] for step in steps)]
        assert [step["old"] for step in steps] == values[:-1] and trial["params"] == values[-1]
        assert child.tags["sweep.algorithm.local.lr"] == json.dumps(values[-1]["algorithm.local.lr"])
    taken = [
        (step["round"], trial["trial_id"], step["donor"]) for trial in result["trials"] for step in trial["lineage"]
    ]
    assert sorted(round for round, _, _ in taken) == [2, 4], "one of four each time, and none at the end"
    for round, member, donor in taken:
        curves = {name: dict(child.history["test_accuracy"]) for name, child in runs.items()}
        assert curves[donor][round] == max(curve[round] for curve in curves.values())
        assert curves[member][round] == min(curve[round] for curve in curves.values())
        assert f"{member} goes on from {donor} after round {round}" in result["printed"]
    with chdir(folder):
        report = make_report(result["sweep_id"], uri="runs", out=folder / "again")
    assert [row["params"] for row in report["table"]] == [trial["params"] for trial in result["trials"]]


def planned_of(sweep: SweepConfig) -> Any:
    from fl_lightning.analysis.report import Sweep

    cells = validate_space(list(sweep.overrides), sweep)
    return planned(Sweep("s", axes=tuple(sweep.space)), sweep, cells, {}, None)


@pytest.mark.slow
def test_a_population_killed_and_resumed_ends_as_the_undisturbed_one(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = tmp_path / "runs" / "mlflow.db"
    process = started(tmp_path, content=CONTENT)

    def beyond_the_first_comparison(store: sqlite3.Connection) -> bool:
        query = "SELECT count(*) FROM metrics WHERE key = 'seconds' AND step = 3"
        return bool(store.execute(query).fetchone()[0] >= 2)

    try:
        until(process, database, beyond_the_first_comparison)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    sweep_id = sweep_id_of(database)
    result = resume_sweep(sweep_id, uri="runs")
    assert result["status"] == "finished"
    assert what_counts(result) == what_counts(undisturbed[1])
    runs = children(f"sqlite:///{database}", result["parent_run_id"])
    assert len(runs) == 4 and {child.status for child in runs} == {"FINISHED"}
    for child in runs:
        assert [step for step, _ in child.history["test_accuracy"]] == list(range(1, 7)), "no round twice"
    again = resume_sweep(sweep_id, uri="runs")
    assert what_counts(again) == what_counts(result)
