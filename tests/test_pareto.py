"""Several objectives: the front against an independent search by pairs, its groups, its place in every report."""

import csv
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import sweep_from

from fl_lightning.analysis.front_figure import draw_front
from fl_lightning.analysis.pareto import Front, achieved, fronts, outcome
from fl_lightning.analysis.promises import families
from fl_lightning.analysis.report import Sweep, make_report, write_report
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig, load_sweep
from fl_lightning.errors import ConfigError

BOTH = (("test_accuracy", "max"), ("epsilon", "min"))


def trial(
    setting: str, accuracy: float | None, epsilon: float | None = None, unit: str | None = None, **more: Any
) -> Trial:
    statement = {"unit": unit, "delta": 1e-5, "adjacency": "add_remove", "sampling": "full", "trust_model": "local"}
    known: dict[str, Any] = {
        "trial_id": f"{setting}{more.get('seed', 1)}",
        "setting": setting,
        "params": {"algorithm.local.lr": float(ord(setting[0]))},
        "seed": 1,
        "algorithm": "dp_fedavg",
        "status": "finished",
        "final": {"test_accuracy": accuracy, "epsilon": epsilon},
        "privacy": statement if unit else None,
        "badge": "PRIVATE" if unit else "NOT PRIVATE",
    }
    return Trial(**{**known, **more})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"metric": ["test_accuracy", "test_accuracy"]}, r"sweep\.metric.*lists test_accuracy twice"),
        ({"metric": ["test_accuracy", "epsilom"]}, r"sweep\.metric.*no such option: epsilom; did you mean epsilon"),
        ({"metric": "accuracy"}, r"sweep\.metric=accuracy.*options: test_accuracy"),
        ({"metric": []}, r"sweep\.metric.*needs a metric, or a list of metrics"),
        ({"metric": ["test_accuracy", "epsilon"], "mode": "max"}, r"sweep\.mode=max: has 1 entry for 2 metrics"),
        ({"metric": "epsilon", "mode": ["min", "min"]}, r"sweep\.mode.*has 2 entries for 1 metric;"),
        ({"mode": ["max", "least"]}, r"sweep\.mode.*no such option: least"),
        ({"metric": ["test_accuracy", "seconds"], "scheduler": "asha"}, r"sweep\.metric.*contradicts sweep\.scheduler"),
        (
            {"metric": ["test_accuracy", "seconds"], "selection": {"distribution": "poisson", "mean": 3}},
            r"sweep\.metric.*contradicts sweep\.selection",
        ),
    ],
)
def test_objectives_that_do_not_fit_together_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        SweepConfig(space={"algorithm.local.lr": {"uniform": [0.1, 1]}}, **settings)


def test_each_metric_has_its_natural_way_and_the_command_line_takes_lists() -> None:
    given = ["sweep=rho", "sweep.metric=[test_accuracy,epsilon,upload_bytes]"]
    sweep, _ = load_sweep(given)
    assert sweep.objectives == (("test_accuracy", "max"), ("epsilon", "min"), ("upload_bytes", "min"))
    assert load_sweep(["sweep=rho", "sweep.metric=test_loss"])[0].objectives == (("test_loss", "min"),)
    assert load_sweep(["sweep=rho", "sweep.metric=null"])[0].objectives == (("test_accuracy", "max"),)
    turned, _ = load_sweep(["sweep=rho", "sweep.metric=[test_accuracy,test_loss]", "sweep.mode=[min,max]"])
    assert turned.objectives == (("test_accuracy", "min"), ("test_loss", "max"))


def test_the_front_is_that_of_an_independent_search() -> None:
    """Three objectives on a coarse grid, so that there are ties; a point is beaten by any other as good everywhere."""
    rng = np.random.default_rng(5)
    objectives = (("test_accuracy", "max"), ("test_loss", "min"), ("validation_loss", "min"))
    for _ in range(20):
        numbers = rng.integers(0, 4, (12, 3)).astype(float)
        trials = [
            trial(chr(97 + i), a, final={"test_accuracy": a, "test_loss": b, "validation_loss": c})
            for i, (a, b, c) in enumerate(numbers)
        ]
        [front] = fronts(trials, families(settings_table(trials)), objectives)
        gains = numbers * [1, -1, -1]
        beaten = {
            i for i, j in product(range(12), repeat=2) if (gains[j] >= gains[i]).all() and (gains[j] != gains[i]).any()
        }
        assert {ord(name) - 97 for name in front.best} == set(range(12)) - beaten
        assert {ord(name) - 97 for name in front.others} == beaten
        firsts = [values[0] for values in front.best.values()]
        assert firsts == sorted(firsts, reverse=True)


def test_promises_of_different_units_are_on_fronts_of_their_own_and_what_is_not_known_is_on_none() -> None:
    trials = [
        trial("a", 0.9, 8.0, "sample"),
        trial("b", 0.8, 9.0, "sample"),  # beaten by a
        trial("c", 0.5, 1.0, "client"),  # would beat nobody on a's front, and stands on its own
        trial("d", 0.99, None, "sample"),  # an infinite epsilon
        trial("e", 0.99),  # protects nothing
        trial("f", None, 0.1, "sample"),  # accuracy not measured
        trial("g", 0.9, 7.9, "sample", status="failed"),
        trial("h", 0.9, 8.0, "sample"),  # the same as a: neither beats the other
    ]
    come = outcome(Sweep("s", objectives=BOTH), trials)
    assert [(list(front.best), list(front.others)) for front in come.fronts] == [(["a", "h"], ["b"]), (["c"], [])]
    assert [front.promise.split(",")[0] for front in come.fronts] == ["per sample", "per client"]
    marked = {row["setting"]: row["front"] for row in come.rows if row["pareto"]}
    assert marked == {"a": 1, "h": 2, "c": 3} and all(isinstance(row["pareto"], bool) for row in come.rows)
    found = come.pareto()
    assert found is not None and [row["setting"] for row in found] == ["a", "h", "c"]
    assert found[0]["objectives"] == {"test_accuracy": 0.9, "epsilon": 8.0} and found[2]["promise"].startswith(
        "per client"
    )
    assert achieved(trials[3:4], "epsilon") == achieved(trials[4:5], "epsilon") == float("inf")
    assert achieved(trials[6:7], "epsilon") is None


def test_without_epsilon_as_an_objective_every_budget_has_a_front_of_its_own() -> None:
    objectives = (("test_accuracy", "max"), ("test_loss", "min"))
    trials = [
        trial(name, accuracy, final={"test_accuracy": accuracy, "test_loss": 1 - accuracy, "epsilon": epsilon}, **more)
        for name, accuracy, epsilon, more in (
            ("a", 0.5, 1.0, {"unit": "client"}),
            ("b", 0.9, 8.0, {"unit": "client"}),
            ("c", 0.4, 1.0, {"unit": "client"}),
            ("d", 0.95, None, {}),
        )
    ]
    come = outcome(Sweep("s", objectives=objectives), trials)
    assert [(list(front.best), list(front.others)) for front in come.fronts] == [
        (["a"], ["c"]),
        (["b"], []),
        (["d"], []),
    ]
    assert outcome(Sweep("s"), trials).pareto() is None and not any(
        row["pareto"] for row in outcome(Sweep("s"), trials).rows
    )


def test_costs_are_sums_over_the_rounds_and_epsilon_is_the_largest_over_seeds() -> None:
    history = {"upload_bytes": ((1, 10.0), (2, 5.0)), "seconds": ((1, 1.0), (2, 2.0))}
    pair = [trial("a", 0.5, 2.0, "client", seed=1, history=history), trial("a", 0.7, 3.0, "client", seed=2)]
    assert achieved(pair, "test_accuracy") == pytest.approx(0.6) and achieved(pair, "epsilon") == 3.0
    assert achieved(pair, "upload_bytes") == 15.0 and pair[0].measured("seconds") == 3.0
    assert pair[1].measured("seconds") is None


def test_a_figure_shows_every_setting_and_numbers_those_on_the_front(tmp_path: Path) -> None:
    best = {"a": (0.9, 8.0, 5.0), "b": (0.8, 1.0, 4.0)}
    front = Front("per client", (*BOTH, ("upload_bytes", "min")), best, {"c": (0.7, 9.0, 6.0)}, first=3)
    names = {"a": "fedsam, rho=0.1", "b": "fedavg", "c": "fedlaw"}
    path = draw_front(front, names, tmp_path / "f.png", title="t", references=[("none", 0.95)], notes=["a note"])
    whole = path.stat().st_size
    assert whole > 10_000
    fewer = draw_front(replace(front, best={"a": best["a"]}), names, tmp_path / "g.png", title="t")
    assert fewer.stat().st_size < whole and front.numbers == {"a": 3, "b": 4}


def test_a_report_marks_the_rows_in_every_format(tmp_path: Path) -> None:
    trials = [trial("a", 0.9, 8.0, "sample"), trial("b", 0.8, 9.0, "sample"), trial("c", 0.5, 1.0, "sample")]
    sweep = Sweep("s", objectives=BOTH, metric="test_accuracy", mode="max", axes=("algorithm.local.lr",))
    paths = {
        **write_report(sweep, trials, tmp_path, format="html"),
        **write_report(sweep, trials, tmp_path, format="latex"),
    }
    text = {name: paths[name].read_text() for name in ("markdown", "latex", "html")}
    assert paths["pareto_front"].name == "pareto.png" and "epsilon" not in paths
    assert "![Pareto front of test_accuracy (max) and epsilon (min), per sample" in text["markdown"]
    assert "are 2 of 3 settings" in text["markdown"] and "Best mean" not in text["markdown"]
    lines = [line.split("|") for line in text["markdown"].splitlines() if line.startswith("| dp_fedavg ")]
    assert [line[-2].strip() for line in lines[:3]] == ["1", "-", "2"]
    assert r"\textbf{dp\_fedavg}" in text["latex"] and r"\textbf{2}" in text["latex"]
    assert text["html"].count('class="short front"') == 4 and 'class="short best"' not in text["html"]
    rows = list(csv.DictReader(paths["csv"].open()))
    assert [(row["pareto"], row["front"]) for row in rows] == [("True", "1"), ("False", ""), ("True", "2")]
    summary = json.loads(paths["summary"].read_text())
    assert [row["setting"] for row in summary["pareto"]] == ["a", "c"] and summary["best"] is None


@pytest.mark.slow
def test_a_grid_sweep_has_a_front_too_also_from_mlflow_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ["data.subset=0.1", "fl.num_clients=2", "fl.rounds=1", "tracking.uri=runs", "algorithm=dp_fedavg"]
    space = {"privacy.noise_multiplier": {"grid": [1.0, 4.0]}, "algorithm.local.lr": {"grid": [0.1]}}
    swept = sweep_from(tmp_path, base, SweepConfig(space=space, metric=["epsilon", "upload_bytes", "test_accuracy"]))
    result = swept.result
    assert result["best"] is None and result["best_by_promise"] == [] and result["status"] == "finished"
    assert result["pareto"] and all(row["pareto"] for row in result["pareto"])
    spent = [row["epsilon"] for row in result["table"]]
    assert result["pareto"][0]["epsilon"] == min(spent) and spent[0] > spent[1]
    assert "Pareto front of epsilon (min), upload_bytes (min) and test_accuracy (max) (per sample" in swept.printed
    again = make_report(result["sweep_id"], uri="runs", out=tmp_path / "again")
    assert [row["front"] for row in again["table"]] == [row["front"] for row in result["table"]]
    assert Path(again["pareto_front"]).exists()


def test_epsilon_is_refused_as_an_objective_where_nothing_is_private(tmp_path: Path) -> None:
    sweep = SweepConfig(space={"algorithm.local.lr": {"grid": [0.1, 0.2]}}, metric=["test_accuracy", "epsilon"])
    with pytest.raises(ConfigError, match=r"sweep\.metric=epsilon: no trial is private"):
        sweep_from(tmp_path, ["fl.rounds=1"], sweep)
