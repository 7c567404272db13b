"""Equal tuning budgets: every algorithm gets as many points, of the axes with a meaning for it, and its own study."""

import json
from pathlib import Path
from typing import Any

import pytest
from sweeps import sweep_from

from fl_lightning.analysis.report_text import budget_words
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.errors import ConfigError
from tune.launch import budget_of
from tune.optimised import Optimiser
from tune.pruning import Pruner
from tune.running import trial_of
from tune.space import CELL, DRAWN, ID, POINT, TRIAL, Plan, completed, draw
from tune.stored import cells_from_dict, cells_to_dict, sweep_to_dict
from tune.trial import OUTCOME

ALGORITHMS = {"algorithm": {"grid": ["fedavg", "fedsam", "fedprox"]}}
LR = {"algorithm.local.lr": {"loguniform": [1e-3, 1.0]}}
RHO = {"algorithm.local.rho": {"uniform": [0.01, 0.5]}}
RANDOM = ALGORITHMS | LR | RHO


def planned(sweep: SweepConfig) -> Plan:
    return Plan("s", tuple(sweep.space), tuple(validate_space(["fl.rounds=2"], sweep)), {})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"space": LR, "num_samples": 2}, r"sweep\.equal_budget=true: would be ignored: no axis .* the algorithm"),
        (
            {"space": LR | {"algorithm": {"choice": ["fedavg", "fedsam"]}}, "num_samples": 2},
            r"needs every algorithm, not one drawn for each trial; make sweep\.space\.algorithm a grid",
        ),
        (
            {"space": ALGORITHMS | LR | {"fl.local_epochs": {"grid": [1, 2]}}, "num_samples": 2},
            r"make sweep\.space\.fl\.local_epochs a choice, or all a grid",
        ),
        ({"space": ALGORITHMS, "skip_hopeless": True}, r"contradicts sweep\.skip_hopeless"),
    ],
)
def test_what_contradicts_an_equal_budget_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SweepConfig(equal_budget=True, **settings)


def test_grids_of_unequal_sizes_are_refused_with_their_counts_and_a_remedy() -> None:
    grids = {"algorithm.local.lr": {"grid": [0.1, 0.2]}, "algorithm.local.rho": {"grid": [0.1, 0.2, 0.3]}}
    sweep = SweepConfig(space=ALGORITHMS | grids, equal_budget=True)
    with pytest.raises(ConfigError, match=r"\(fedavg 2, fedsam 6, fedprox 2\); make the axes random .*num_samples"):
        planned(sweep)
    fair = SweepConfig(
        space=ALGORITHMS | {"algorithm.local.lr": grids["algorithm.local.lr"]}, seeds=(1, 2), equal_budget=True
    )
    plan = planned(fair)
    assert len(plan.cells) == 12 and {own["points"] for own in budget_of(fair, plan.cells).values()} == {2}


def test_too_few_points_and_axes_without_meaning_are_refused() -> None:
    few = {"algorithm.local.lr": {"choice": [0.1, 0.2, 0.3]}, **RHO}
    with pytest.raises(ConfigError, match=r"fedavg has only 3 different points, of algorithm\.local\.lr; widen"):
        planned(SweepConfig(space=ALGORITHMS | few, num_samples=4, equal_budget=True))
    with pytest.raises(ConfigError, match=r"fedavg has only one point, for no axis has a meaning for it"):
        planned(SweepConfig(space=ALGORITHMS | RHO, num_samples=4, equal_budget=True))
    nobody = {"algorithm.aggregate.proxy_share": {"uniform": [0.1, 0.2]}}
    with pytest.raises(ConfigError, match=r"proxy_share: has no meaning for fedavg, fedsam, fedprox"):
        planned(SweepConfig(space=ALGORITHMS | LR | nobody, num_samples=4, equal_budget=True))
    with pytest.raises(ConfigError, match=r"algorithm\.local\.rho.*would be ignored with"):
        planned(SweepConfig(space=RANDOM, num_samples=4))


def test_random_points_are_as_many_for_each_and_hold_only_what_has_a_meaning() -> None:
    sweep = SweepConfig(space=RANDOM, num_samples=3, seeds=(1, 2), equal_budget=True)
    plan = planned(sweep)
    listed = draw(plan, 3)
    points = [plan.point(sampled) for sampled in listed]
    assert len(listed) == 3 * 3 * 2 and draw(plan, 3) == listed
    rates: dict[str, list[float]] = {}
    for point in points:
        assert ("algorithm.local.rho" in point.params) == (point.params["algorithm"] == "fedsam")
        rates.setdefault(str(point.params["algorithm"]), []).append(point.params["algorithm.local.lr"])
    assert len({tuple(found) for found in rates.values()}) == 1, "all at the same learning rates"
    assert len(set(rates["fedavg"])) == 3 and all(rates["fedavg"].count(lr) == 2 for lr in rates["fedavg"])
    assert budget_of(sweep, plan.cells) == {
        "fedavg": {"points": 3, "axes": ["algorithm.local.lr"]},
        "fedsam": {"points": 3, "axes": ["algorithm.local.lr", "algorithm.local.rho"]},
        "fedprox": {"points": 3, "axes": ["algorithm.local.lr"]},
    }


def optimiser(listed: Any = (), done: Any = (), kept: Any = None) -> Optimiser:
    objectives = ["validation_accuracy", "validation_loss"]
    sweep = SweepConfig(
        space=RANDOM, search="optuna", num_samples=4, seeds=(1, 2), equal_budget=True, metric=objectives
    )
    plan = planned(sweep)

    def read(sampled: Any, result: dict[str, Any]) -> Trial:
        return trial_of(plan, sampled, json.loads(result[OUTCOME]))

    return Optimiser(plan, sweep, listed, done, (kept if kept is not None else []).append, read)


def measured(number: int) -> dict[str, Any]:
    return {"status": "finished", "final": {"validation_accuracy": number / 100, "validation_loss": 1.0 + number}}


def everything(asked: Optimiser) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = []
    while (suggested := asked.suggest(f"r{len(trials)}")) != "FINISHED":
        trials.append(json.loads(suggested[TRIAL]))
        asked.on_trial_complete(f"r{len(trials) - 1}", {OUTCOME: json.dumps(measured(len(trials) - 1))})
    return trials


def test_optuna_has_a_study_for_each_algorithm_and_asks_them_in_turn() -> None:
    asked = optimiser()
    trials = everything(asked)
    points = [asked.plan.point(sampled) for sampled in trials]
    assert [trial[ID] for trial in trials] == [f"t{number:03d}" for number in range(24)]
    assert [point.params["algorithm"] for point in points[::2]] == ["fedavg", "fedsam", "fedprox"] * 4
    assert [point.seed for point in points] == [1, 2] * 12
    assert all(one[DRAWN] == other[DRAWN] for one, other in zip(trials[::2], trials[1::2], strict=True))
    assert [len(study._ot_study.trials) for study in asked.studies] == [4, 4, 4]
    assert set(asked.studies[0]._ot_study.trials[0].params) == set(LR)
    assert set(asked.studies[1]._ot_study.trials[0].params) == {*LR, *RHO}
    told = [trial.values for trial in asked.studies[1]._ot_study.trials]  # of trials 2, 3, then 8, 9, then ...
    assert told == [[pytest.approx(first / 100 + 0.005), first + 1.5] for first in (2, 8, 14, 20)]
    assert [way.name for way in asked.studies[0]._ot_study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert everything(optimiser()) == trials, "seeded"


def test_a_resumed_search_tells_each_study_its_own_and_keeps_the_budget() -> None:
    first = optimiser()
    trials = everything(first)[:9]
    done = [trial_of(first.plan, trials[n], measured(n)) for n in (0, 1, 2, 3, 6, 7, 8)]
    left = [sampled for sampled in completed(trials, first.plan.cells) if sampled[ID] in ("t004", "t005", "t009")]
    assert left[-1] == {**trials[8], ID: "t009", CELL: trials[8][CELL] + 1}
    again = optimiser(left, done)
    assert [len(study._ot_study.trials) for study in again.studies] == [2, 1, 0]
    assert again.studies[1]._ot_study.trials[0].values == [pytest.approx(0.025), 3.5]
    more = everything(again)
    assert [sampled[ID] for sampled in more] == ["t004", "t005", "t009", *(f"t{n:03d}" for n in range(10, 24))]
    counts = [sum(point % 3 == study for point in again.points) for study in range(3)]
    assert counts == [4, 4, 4] and len({(point % 3, *values.values()) for point, values in again.points.items()}) == 12
    assert {sampled[POINT] for sampled in more} == {2, 4, *range(5, 12)}


def test_a_stored_budget_is_read_back_with_each_algorithms_own_axes() -> None:
    sweep = SweepConfig(
        space=RANDOM, num_samples=3, seeds=(1, 2), equal_budget=True, metric=["validation_accuracy", "seconds"]
    )
    plan = planned(sweep)
    content = json.loads(json.dumps({"sweep": sweep_to_dict(sweep), **cells_to_dict(plan.cells)}))
    read = SweepConfig(**content["sweep"])
    cells = cells_from_dict(content, [axis for axis in read.space.values() if axis.is_random])
    assert read == sweep and [cell.random for cell in cells] == [cell.random for cell in plan.cells]
    back = Plan("s", plan.axes, cells, {})
    assert [back.point(sampled) for sampled in draw(plan, 3)] == [plan.point(sampled) for sampled in draw(plan, 3)]


def test_a_scheduler_ends_no_trial_because_of_another_algorithms() -> None:
    """fedsam is far better in each round; only the second, worse fedavg is ended."""
    from types import SimpleNamespace

    def ended(equal: bool) -> list[str]:
        sweep = SweepConfig(space=ALGORITHMS | LR, num_samples=2, equal_budget=equal, scheduler="asha")
        plan, stopped = planned(sweep), []
        pruner = Pruner(sweep, plan, lambda trial_id, reason: stopped.append(trial_id))
        listed = draw(plan, 2)
        for number, accuracy in ((1, 0.9), (0, 0.5), (3, 0.4)):  # fedsam, fedavg, fedavg
            ours = SimpleNamespace(config={TRIAL: json.dumps(listed[number])})
            pruner.on_trial_result(None, ours, {"round": 1, "validation_accuracy": accuracy})
        return stopped

    assert ended(True) == ["t003"] and ended(False) == ["t000", "t003"]


@pytest.mark.slow
def test_a_sweep_states_the_budget_of_each_algorithm(tmp_path: Path) -> None:
    base = ["data.subset=0.1", "fl.num_clients=2", "fl.rounds=1", "tracking.uri=runs"]
    space = {"algorithm": {"grid": ["fedavg", "fedsam"]}, **LR, **RHO}
    sweep = SweepConfig(space=space, search="optuna", num_samples=3, seeds=(1, 2), equal_budget=True, max_concurrent=1)
    swept = sweep_from(tmp_path, base, sweep)
    result = swept.result
    assert result["status"] == "finished" and len(result["trials"]) == 12
    assert [row["algorithm"] for row in result["table"]] == ["fedavg", "fedsam"] * 3
    assert [row["n"] for row in result["table"]] == [2] * 6
    assert {name: own["points"] for name, own in result["budget"].items()} == {"fedavg": 3, "fedsam": 3}
    said = (
        "Equal tuning budgets: 3 points for each algorithm, each with 2 seeds. Tuned are, of fedavg: "
        "algorithm.local.lr; of fedsam: algorithm.local.lr, algorithm.local.rho."
    )
    assert said in swept.printed and said in Path(result["report"]["markdown"]).read_text()


def test_without_an_equal_budget_nothing_is_said_of_one() -> None:
    from fl_lightning.analysis.report import Sweep

    assert budget_words(Sweep("s")) == "" and budget_of(SweepConfig(space=ALGORITHMS), ()) == {}
