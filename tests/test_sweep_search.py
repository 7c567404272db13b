"""How a sweep chooses its trials and ends those that fall behind: grid, random, Optuna, ASHA, the median rule."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import Swept, sweep_from
from test_sweep_resume import started, sweep_id_of, until

from fl_lightning import run
from fl_lightning.analysis.report import make_report
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.errors import ConfigError
from fl_lightning.tracking import children, connect
from tune.optimised import Optimiser
from tune.pruning import REDUCTION, asha, median
from tune.resuming import resume_sweep
from tune.running import trial_of
from tune.session import ray_session
from tune.space import DRAWN, ID, LARGEST_SEED, POINT, TRIAL, Plan, completed, draw, sampler
from tune.trial import OUTCOME

LR = {"algorithm.local.lr": {"loguniform": [1e-4, 1.0]}}
ALGORITHMS = {"algorithm": {"grid": ["fedavg", "fedsam"]}}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"space": LR, "search": "grid"}, r"sweep\.search.*grid.*contradicts sweep\.space\.algorithm\.local\.lr"),
        ({"space": ALGORITHMS, "search": "random"}, r"sweep\.search.*needs an axis to draw from"),
        ({"space": LR, "search": "optuna"}, r"sweep\.search.*needs sweep\.num_samples > 1"),
        ({"space": ALGORITHMS | LR, "search": "optuna", "num_samples": 3}, r"make sweep\.space\.algorithm a choice"),
        (
            {"space": LR, "search": "optuna", "selection": {"distribution": "poisson", "mean": 3}},
            r"contradicts sweep\.selection",
        ),
        ({"space": ALGORITHMS, "grace_rounds": 2}, r"sweep\.grace_rounds.*would be ignored with scheduler=none"),
        ({"space": ALGORITHMS, "scheduler": "asha", "metric": "epsilon"}, r"sweep\.scheduler.*known in every round"),
        (
            {"space": LR, "scheduler": "asha", "selection": {"distribution": "poisson", "mean": 3}},
            r"contradicts sweep\.selection",
        ),
        ({"space": ALGORITHMS, "scheduler": "hyperband"}, r"sweep\.scheduler"),
        ({"space": ALGORITHMS, "max_retries": -1}, r"sweep\.max_retries"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SweepConfig(**settings)


def test_blind_draws_are_those_of_ray_tune_itself() -> None:
    """An independent enumeration by Ray's own search over the same space and seed."""
    from ray import tune
    from ray.tune.experiment import Experiment
    from ray.tune.search.basic_variant import BasicVariantGenerator

    space = ALGORITHMS | LR | {"fl.batch_size": {"randint": [16, 64]}, "partition": {"choice": ["iid", "dirichlet"]}}
    sweep = SweepConfig(space=space, seeds=(7, 8), num_samples=3)
    cells = tuple(validate_space(["fl.rounds=1"], sweep))
    listed = draw(Plan("s", tuple(space), cells, {}, own_seeds=True), 3)
    axes = {axis.key: sampler(axis) for axis in cells[0].random}
    config = {"cell": tune.grid_search(list(range(4))), "drawn": axes, "seed": tune.randint(0, LARGEST_SEED)}
    theirs = BasicVariantGenerator(constant_grid_search=True, random_state=7)
    theirs.add_configurations([Experiment("again", run=print, config=config, num_samples=3)])
    for number, sampled in enumerate(listed):
        assert sampled == {ID: f"t{number:03d}", **theirs.next_trial().config}
    assert theirs.next_trial() is None and len(listed) == 12


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_asha_decides_as_ray_tune_does(sign: float) -> None:
    """Trials that advance in random order: every decision is that of Ray's own brackets."""
    from types import SimpleNamespace

    from ray.tune.schedulers.async_hyperband import _Bracket

    rng = np.random.default_rng(3)
    ended = 0
    for _ in range(30):
        theirs = _Bracket(2, 40, REDUCTION, 0)
        curves: dict[int, dict[int, float]] = {}
        alive = list(range(9))
        while alive:
            name = int(rng.choice(alive))
            own = curves.setdefault(name, {})
            now = len(own) + 1
            own[now] = float(rng.normal(name / 9, 0.3))
            others = [curve for other, curve in curves.items() if other != name]
            ours = asha(own, others, grace=2, rounds=40, sign=sign)
            decision = theirs.on_result(SimpleNamespace(trial_id=str(name)), now, sign * own[now])
            assert ours == (decision == "STOP"), (name, now)
            ended += ours
            if ours or now == 39:
                alive.remove(name)
    assert ended > 100


def test_asha_takes_the_first_round_measured_after_a_rung_and_ends_nobody_at_the_last_round() -> None:
    others = [{3: 0.9, 6: 0.95}] * 3
    assert asha({3: 0.1}, others, grace=2, rounds=9, sign=1.0)
    assert not asha({3: 0.1, 4: 0.05}, others, grace=2, rounds=9, sign=1.0)  # the rung was passed at round 3
    assert not asha({3: 0.1}, [], grace=2, rounds=9, sign=1.0) and not asha({9: 0.1}, others, grace=9, rounds=9, sign=1)


def test_the_median_rule_compares_the_best_with_the_others_means() -> None:
    """Means up to round 2 of the others: 0.3, 0.5, 0.7; their median is 0.5."""
    others = [{1: 0.2, 2: 0.4}, {1: 0.4, 2: 0.6}, {1: 0.6, 2: 0.8, 3: 0.99}]
    settings = {"grace": 1, "rounds": 5}
    assert median({1: 0.49, 2: 0.1}, others, **settings, sign=1.0)
    assert not median({1: 0.51, 2: 0.1}, others, **settings, sign=1.0)
    assert median({1: 0.9, 2: 0.51}, others, **settings, sign=-1.0)  # of a loss
    assert not median({1: 0.0, 2: 0.0}, others[:2], **settings, sign=1.0)  # too few
    assert not median({1: 0.0, 2: 0.0}, others, grace=3, rounds=5, sign=1.0)
    assert not median({5: 0.0}, [{5: 1.0}] * 3, **settings, sign=1.0)  # the last round
    assert not median({3: 0.0}, others, **settings, sign=1.0)  # only one has come as far


def optimiser(samples: int, listed: Any = (), done: Any = (), kept: Any = None) -> Optimiser:
    sweep = SweepConfig(space=LR, search="optuna", num_samples=samples, seeds=(1, 2), metric="validation_accuracy")
    plan = Plan("s", tuple(LR), tuple(validate_space(["fl.rounds=1"], sweep)), {})

    def read(sampled: Any, result: dict[str, Any]) -> Trial:
        return trial_of(plan, sampled, json.loads(result[OUTCOME]))

    return Optimiser(plan, sweep, listed, done, (kept if kept is not None else []).append, read)


def measured(value: float | None) -> dict[str, Any]:
    if value is None:
        return {OUTCOME: json.dumps({"status": "failed", "error": {"type": "E", "message": "m"}})}
    return {OUTCOME: json.dumps({"status": "finished", "final": {"validation_accuracy": value}})}


def test_optuna_is_told_the_mean_over_the_seeds_and_each_point_is_stored_before_it_runs() -> None:
    kept: list[Any] = []
    asked = optimiser(3, kept=kept)
    trials = []
    for number, value in enumerate((0.2, 0.4, 0.5, None, None, None)):
        suggested = asked.suggest(f"r{number}")
        trials.append(json.loads(suggested[TRIAL]))
        assert trials[-1] in kept
        asked.on_trial_complete(f"r{number}", measured(value))
    assert asked.suggest("r6") == "FINISHED"
    assert [trial[ID] for trial in trials] == [f"t00{i}" for i in range(6)] == [trial[ID] for trial in kept]
    assert [trial[POINT] for trial in trials] == [0, 0, 1, 1, 2, 2] and trials[0][DRAWN] == trials[1][DRAWN]
    told = asked.optuna._ot_study.trials
    assert [trial.value for trial in told] == [pytest.approx(0.3), 0.5, None]
    assert [trial.state.name for trial in told] == ["COMPLETE", "COMPLETE", "FAIL"]
    again = optimiser(3)
    assert json.loads(again.suggest("x")[TRIAL]) == trials[0], "seeded"
    assert all(1e-4 <= trial[DRAWN]["algorithm.local.lr"] <= 1 for trial in trials)


def test_a_resumed_optimiser_knows_what_was_measured_and_repeats_no_point() -> None:
    first = optimiser(4)
    trials = [json.loads(first.suggest(f"r{number}")[TRIAL]) for number in range(4)]
    done = [
        trial_of(first.plan, trials[i], {"status": "finished", "final": {"validation_accuracy": 0.1 * i}})
        for i in (0, 1, 2)
    ]
    assert completed([trials[0], trials[3]], 2) == trials  # a seed that was not stored in time is run all the same
    asked = optimiser(4, listed=[trials[3]], done=done)
    assert [trial.value for trial in asked.optuna._ot_study.trials] == [pytest.approx(0.05)]
    assert json.loads(asked.suggest("a")[TRIAL]) == trials[3]
    asked.on_trial_complete("a", measured(0.6))
    assert [trial.value for trial in asked.optuna._ot_study.trials] == [pytest.approx(0.05), pytest.approx(0.4)]
    fresh = []
    while (suggested := asked.suggest(f"b{len(fresh)}")) != "FINISHED":
        fresh.append(json.loads(suggested[TRIAL]))
    assert [trial[ID] for trial in fresh] == ["t004", "t005", "t006", "t007"]
    points = [trial[DRAWN]["algorithm.local.lr"] for trial in [*trials, *fresh]]
    assert len(set(points)) == 4


BASE = ["data.subset=0.2", "fl.num_clients=3", "fl.rounds=6", "tracking.uri=runs"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_session() as module:
        yield module


@pytest.fixture(scope="module")
def pruned(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """One good learning rate, then two that cannot learn, one after the other."""
    space = {"algorithm.local.lr": {"grid": [0.1, 1e-6, 1e-7]}}
    sweep = SweepConfig(space=space, scheduler="asha", grace_rounds=2, max_concurrent=1, resources={"cpu": 1})
    return sweep_from(tmp_path_factory.mktemp("asha"), BASE, sweep)


def test_a_trial_that_falls_behind_ends_as_a_finished_run_of_its_own(pruned: Swept) -> None:
    result = pruned.result
    assert (result["status"], result["failed"], result["stopped"]) == ("finished", 0, 2)
    assert [row["stopped"] for row in result["table"]] == [0, 1, 1]
    whole, *ended = result["trials"]
    assert whole["final"]["stopped"] is None
    for trial in ended:
        reason = "sweep.scheduler=asha: its validation_accuracy falls behind the other trials'"
        assert trial["final"]["stopped"] == {"round": 2, "by": "scheduler", "reason": reason}
    assert result["best"]["setting"] == whole["setting"]
    assert "| stopped" in pruned.printed and "Trials ended early by the scheduler: 2" in pruned.printed
    with chdir(pruned.start):  # two rounds are two rounds, whoever ends them
        alone = run(pruned.cells[1].config.with_overrides({"fl.rounds": 2, "tracking.enabled": False}))
    assert alone.final["weights_sha256"] == ended[0]["final"]["weights_sha256"]


def test_mlflow_and_the_report_made_from_it_know_of_the_early_end(pruned: Swept) -> None:
    found = {child.tags["trial_id"]: child for child in children(pruned.uri, pruned.result["parent_run_id"])}
    assert {child.status for child in found.values()} == {"FINISHED"}
    assert [step for step, _ in found["t001"].history["test_accuracy"]] == [1, 2]
    assert json.loads(found["t002"].tags["stopped"])["by"] == "scheduler" and "stopped" not in found["t000"].tags
    assert connect(pruned.uri).get_run(pruned.result["parent_run_id"]).info.status == "FINISHED"
    report = make_report(pruned.result["sweep_id"], uri=pruned.uri, out=pruned.start / "again")
    assert [row["stopped"] for row in report["table"]] == [0, 1, 1] and report["failed"] == 0


def test_without_a_scheduler_a_grid_needs_no_metric_in_every_round() -> None:
    assert SweepConfig(space=ALGORITHMS, metric="epsilon", mode="min", search="grid").scheduler == "none"


@pytest.mark.slow
def test_an_optuna_and_asha_sweep_killed_and_resumed_has_all_its_trials_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {
        "space": LR | {"algorithm": {"choice": ["fedavg", "fedsam"]}},
        "search": "optuna",
        "scheduler": "asha",
        "num_samples": 5,
        "seeds": [1, 2],
        "overrides": [*BASE, "fl.checkpoint_every=1", "fl.rounds=8"],
    }
    process = started(tmp_path, content=content)
    database = tmp_path / "runs" / "mlflow.db"
    try:
        until(
            process,
            database,
            lambda store: (
                store.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone()[0] >= 3
                and store.execute("SELECT count(*) FROM runs").fetchone()[0] >= 5
            ),
        )
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    sweep_id, uri = sweep_id_of(database), f"sqlite:///{database}"
    with chdir(tmp_path):
        result = resume_sweep(sweep_id, uri="runs")
    assert result["status"] == "finished" and [t["trial_id"] for t in result["trials"]] == [
        f"t{i:03d}" for i in range(10)
    ]
    assert [trial["seed"] for trial in result["trials"]] == [1, 2] * 5
    points = [(t["params"]["algorithm.local.lr"], t["params"]["algorithm"]) for t in result["trials"]]
    assert points[::2] == points[1::2] and len(set(points)) == 5
    assert result["stopped"] >= 1
    found = children(uri, result["parent_run_id"])
    assert len(found) == 10 and {child.status for child in found} == {"FINISHED"}
    for child in found:
        rounds = [step for step, _ in child.history["test_accuracy"]]
        assert rounds == list(range(1, len(rounds) + 1)), "no round twice"
