"""A sweep that tunes chooses by what clients hold out of training, whatever the test set says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import digits
from sweeps import Swept, sweep_from

from fl_lightning import ConfigError, load_config, run
from fl_lightning.analysis.report import Sweep, make_report, write_report
from fl_lightning.analysis.scored import selection_words
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial, setting_of
from fl_lightning.config import SweepConfig, load_sweep, validate_space
from fl_lightning.config.scoring import metrics_of, scored_on, settled, tunes
from fl_lightning.privacy.statement import VALIDATED
from tune.session import ray_session
from tune.stored import sweep_to_dict

GRID = {"algorithm.local.lr": {"grid": [0.1, 0.2]}}
DRAWN = {"algorithm.local.lr": {"choice": [0.1, 0.2]}}
COUNTED = {"selection": {"distribution": "geometric", "mean": 2}}


def cells_of(sweep: SweepConfig, *base: str) -> Any:
    return validate_space(list(base), sweep)


def metric_of(sweep: SweepConfig, *base: str) -> Any:
    return settled(sweep, [cell.config for cell in cells_of(sweep, *base)]).metric


TUNING: list[dict[str, Any]] = [
    {"space": DRAWN},
    {"space": DRAWN, "search": "random", "num_samples": 2},
    {"space": DRAWN, "search": "optuna", "num_samples": 2},
    {"space": GRID, "scheduler": "asha"},
    {"space": GRID, "scheduler": "median"},
]


@pytest.mark.parametrize("settings", TUNING)
def test_a_sweep_that_tunes_holds_out_a_tenth_and_refuses_the_test_set(settings: dict[str, Any]) -> None:
    sweep = SweepConfig(**settings)
    assert tunes(sweep) and metric_of(sweep) == "validation_accuracy"
    for cell in cells_of(sweep):
        assert [config.data.validation for config in cell.variants.values()] == [0.1] * len(cell.variants)
        assert cell.configure({axis.key: axis.values[1] for axis in cell.random}).data.validation == 0.1
    assert cells_of(sweep, "data.validation=0.3")[0].config.data.validation == 0.3
    with pytest.raises(ConfigError, match=r"data\.validation=0\.0: leaves a sweep that tunes nothing but the test set"):
        cells_of(sweep, "data.validation=0")
    for kind in ("accuracy", "loss"):
        rule = rf"sweep\.metric=test_{kind}: would tune on the test set.*use sweep\.metric=validation_{kind}"
        with pytest.raises(ConfigError, match=rule):
            SweepConfig(**settings, metric=f"test_{kind}")
    assert SweepConfig(**settings, metric="validation_loss", mode="min").metric == "validation_loss"
    with pytest.raises(ConfigError, match=r"sweep\.space\.data\.validation: would score trials on different examples"):
        SweepConfig(**{**settings, "space": settings["space"] | {"data.validation": {"choice": [0.1, 0.2]}}})
    kept = json.loads(json.dumps(sweep_to_dict(settled(sweep, [cell.config for cell in cells_of(sweep)]))))
    assert SweepConfig(**kept).metric == "validation_accuracy"  # as a resumed sweep reads it


def test_a_plain_grid_may_compare_on_the_test_set() -> None:
    sweep = SweepConfig(space=GRID)
    assert not tunes(sweep) and metric_of(sweep) == "test_accuracy"
    assert cells_of(sweep)[0].config.data.validation is None
    assert metric_of(sweep, "data.validation=0.2") == "validation_accuracy"
    assert metric_of(SweepConfig(space=GRID, metric="test_accuracy"), "data.validation=0.2") == "test_accuracy"
    with pytest.raises(ConfigError, match=r"sweep\.metric=validation_loss: needs examples.*set data\.validation=0\.1"):
        cells_of(SweepConfig(space=GRID, metric="validation_loss"))
    shares = {"data.validation": {"grid": [0.1, 0.2]}}
    assert metric_of(SweepConfig(space=shares)) == "test_accuracy"
    with pytest.raises(ConfigError, match=r"data\.validation: differs among the trials \(0\.1, 0\.2\).*test_accuracy"):
        cells_of(SweepConfig(space=shares, metric="validation_accuracy"))
    mixed = SweepConfig(
        space={"algorithm": {"grid": ["fedavg", "fedsam"]}},
        settings={"fedsam": {"data.validation": 0.2}},
        scheduler="asha",
    )
    with pytest.raises(ConfigError, match=r"data\.validation: differs among the trials \(0\.1, 0\.2\)"):
        cells_of(mixed)


def test_a_choice_that_is_accounted_for_is_scored_on_the_public_test_set() -> None:
    sweep = SweepConfig(space=DRAWN, **COUNTED)
    assert not tunes(sweep) and metric_of(sweep, "algorithm=dp_fedavg") == "test_accuracy"
    assert cells_of(sweep)[0].config.data.validation is None
    assert SweepConfig(space=DRAWN, metric="test_loss", mode="min", **COUNTED).metric == "test_loss"
    with pytest.raises(ConfigError, match=r"data\.validation=0\.1: contradicts sweep\.selection.*own examples; remove"):
        cells_of(sweep, "data.validation=0.1")
    for metric in ("validation_accuracy", "oracle/train_loss"):
        with pytest.raises(ConfigError, match=rf"sweep\.metric={metric}: contradicts sweep\.selection.*test_accuracy"):
            SweepConfig(space=DRAWN, metric=metric, **COUNTED)


def test_the_shipped_sweeps_compare_and_do_not_tune() -> None:
    for name in ("demo", "rho", "iso_budget", "all_algorithms"):
        sweep, _ = load_sweep([f"sweep={name}"])
        assert not tunes(sweep) and sweep.metric is None


@pytest.mark.parametrize(
    ("metric", "on"),
    [
        ("test_loss", "test"),
        ("validation_accuracy", "validation"),
        ("epsilon", None),
        (("validation_accuracy", "epsilon"), "validation"),
        (None, None),
    ],
)
def test_every_metric_says_on_whose_examples_it_is_measured(metric: Any, on: str | None) -> None:
    assert scored_on(metric) == on
    aims = tuple((name, "max") for name in metrics_of(metric))
    assert bool(selection_words(Sweep("s", objectives=aims, metric="epsilon"))) == (on is not None)


def test_the_report_says_on_which_examples_the_best_was_named(tmp_path: Path) -> None:
    """Two settings that stand the other way round on the test set: the best is that of the held-out examples."""

    def trial(number: int, lr: float, tested: float, validated: float | None) -> Trial:
        params = {"algorithm.local.lr": lr}
        final = {"test_accuracy": tested, "validation_accuracy": validated, "validation_loss": None, "epsilon": None}
        return Trial(f"t{number}", setting_of(params), params, 1, "fedavg", "finished", final=final)

    held = [trial(0, 0.1, 0.9, 0.6), trial(1, 0.2, 0.5, 0.7)]
    plain = [trial(0, 0.1, 0.9, None), trial(1, 0.2, 0.5, None)]
    config = {"data": {"validation": 0.2}}
    for metric, trials, selection, best, said in (
        ("validation_accuracy", held, {}, 0.2, "(data.validation=0.2): the test set took no part in the choice"),
        ("test_accuracy", plain, {}, 0.1, "compares settings but does not tune them"),
        ("test_accuracy", plain, {"distribution": "geometric"}, 0.1, "the test set counts as public"),
    ):
        sweep = Sweep("s", axes=("algorithm.local.lr",), metric=metric, config=config, selection=selection)
        for format in ("md", "html", "latex"):
            paths = write_report(sweep, trials, tmp_path / metric, format=format)
            assert said in " ".join(paths["markdown" if format == "md" else format].read_text().split())
        summary = json.loads(paths["summary"].read_text())
        assert summary["best"]["params"] == {"algorithm.local.lr": best}
        assert summary["selected_on"] == metric.partition("_")[0]
    table = settings_table(held)
    assert [row["validation_accuracy_mean"] for row in table] == [0.6, 0.7] and table[0]["validation_loss_mean"] is None
    markdown = (tmp_path / "validation_accuracy" / "report.md").read_text()
    assert "| validation accuracy | test accuracy |" in " ".join(markdown.split())
    assert "validation accuracy" not in (tmp_path / "test_accuracy" / "report.md").read_text()
    assert not (tmp_path / "test_accuracy" / "validation.png").exists()


# --- real sweeps on a test set that misleads -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_session() as module:
        yield module


def misleading(folder: Path) -> list[str]:
    """Digits whose test labels are all shifted by one: who learns is wrong on the test set, who does not is not."""
    images, labels = (part[:500].numpy() for part in digits())
    np.savez(
        folder / "d.npz",
        x_train=images[:400],
        y_train=labels[:400],
        x_test=images[400:],
        y_test=(labels[400:] + 1) % 10,
    )
    return ["data=npz", f"data.root={folder}/d.npz", "fl.num_clients=3", "tracking.uri=runs", "fl.batch_size=8"]


def by_lr(swept: Swept, name: str) -> dict[float, float]:
    return {trial["params"]["algorithm.local.lr"]: trial["final"][name] for trial in swept.result["trials"]}


def test_asha_ends_and_names_trials_by_held_out_examples(ray: Any, tmp_path: Path) -> None:
    base = [*misleading(tmp_path), "fl.rounds=6"]
    space = {"algorithm.local.lr": {"grid": [0.1, 1e-6, 1e-7]}}
    sweep = SweepConfig(space=space, scheduler="asha", grace_rounds=4, max_concurrent=1)
    swept = sweep_from(tmp_path, base, sweep)
    result, tested = swept.result, by_lr(swept, "test_accuracy")
    assert tested[0.1] < min(tested[1e-6], tested[1e-7])  # the test set would have ended the one that learns
    assert result["best"]["params"] == {"algorithm.local.lr": 0.1} and result["best"]["metric"] == "validation_accuracy"
    assert result["selected_on"] == "validation" and result["stopped"] == 2
    assert [trial["final"]["stopped"] is None for trial in result["trials"]] == [True, False, False]
    assert "holds data.validation=0.1 of its examples out of training" in swept.printed
    assert "the test set took no part in the choice" in swept.printed
    assert f"on held-out examples {by_lr(swept, 'validation_accuracy')[0.1]:.4f}" in swept.printed
    later = make_report(result["sweep_id"], uri=swept.uri, out=tmp_path / "later")
    assert (
        later["best"] == result["best"] and later["selected_on"] == "validation" and later["table"] == result["table"]
    )
    alone = run(load_config([*base, "tracking.enabled=false", "algorithm.local.lr=0.1", "data.validation=0.1"]))
    assert alone.final["weights_sha256"] == result["trials"][0]["final"]["weights_sha256"]


def test_optuna_is_told_of_held_out_examples(ray: Any, tmp_path: Path) -> None:
    base = [*misleading(tmp_path), "fl.rounds=4"]
    sweep = SweepConfig(space={"algorithm.local.lr": {"loguniform": [1e-7, 0.3]}}, search="optuna", num_samples=5)
    swept = sweep_from(tmp_path, base, sweep)
    validated, tested = by_lr(swept, "validation_accuracy"), by_lr(swept, "test_accuracy")
    best = max(validated, key=lambda lr: validated[lr])
    assert (
        swept.result["best"]["params"] == {"algorithm.local.lr": best} and swept.result["selected_on"] == "validation"
    )
    assert tested[best] < max(tested.values())


@pytest.mark.slow
def test_a_private_grid_says_that_it_compares_on_the_test_set(ray: Any, tmp_path: Path) -> None:
    base = [*misleading(tmp_path), "fl.rounds=1", "algorithm=dp_fedavg"]
    swept = sweep_from(tmp_path, base, SweepConfig(space=GRID))
    assert swept.result["selected_on"] == "test" and "does not tune them" in swept.printed
    assert VALIDATED not in swept.printed
    report = Path(swept.result["report"]["markdown"]).read_text()
    assert "set data.validation=0.1" in report
    held = sweep_from(tmp_path, [*base, "data.validation=0.2"], SweepConfig(space=GRID))
    assert held.result["selected_on"] == "validation" and VALIDATED in held.printed
    assert VALIDATED in Path(held.result["report"]["markdown"]).read_text()
