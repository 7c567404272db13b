"""Trials that a scheduler ended: whom they are compared with, what their settings count for, what is said of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_lightning.analysis.comparisons import standings
from fl_lightning.analysis.pareto import achieved
from fl_lightning.analysis.promises import families
from fl_lightning.analysis.report import Sweep, best_setting, write_report
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial
from fl_lightning.cli import invoke
from fl_lightning.config import SweepConfig, validate_space
from tune.pruning import Pruner
from tune.space import TRIAL, Plan, draw

METRIC = "validation_accuracy"
AXES = ("algorithm.local.lr",)


def trial(setting: str, seed: int, curve: Sequence[float], rounds: int = 4) -> Trial:
    early = {"round": len(curve), "by": "scheduler", "reason": "behind"} if len(curve) < rounds else None
    return Trial(
        trial_id=f"{setting}{seed}",
        setting=setting,
        params={AXES[0]: float(ord(setting))},
        seed=seed,
        algorithm="fedavg",
        status="finished",
        final={METRIC: curve[-1], "test_accuracy": curve[-1], "stopped": early},
        history={
            METRIC: tuple(enumerate(curve, start=1)),
            "seconds": tuple((r, 1.0) for r in range(1, len(curve) + 1)),
        },
        partition_sha256="same",
    )


WHOLE = [trial("a", 1, [0.1, 0.2, 0.3, 0.4]), trial("a", 2, [0.1, 0.2, 0.3, 0.6])]
MIXED = [trial("b", 1, [0.5, 0.6, 0.8, 0.9]), trial("b", 2, [0.5, 0.7])]
OTHER = [trial("c", 1, [0.1, 0.2, 0.3, 0.3]), trial("c", 2, [0.1, 0.2, 0.3, 0.5])]


def test_a_trial_is_compared_with_those_of_its_own_seed() -> None:
    """Of another seed even a far better trial ends none: it has another partition and other held-out examples."""
    sweep = SweepConfig(space={AXES[0]: {"grid": [0.1, 0.2]}}, seeds=(1, 2), scheduler="asha")
    cells = validate_space(["fl.rounds=8"], sweep)
    plan, stopped = Plan("s", AXES, tuple(cells), {}), list[str]()
    pruner = Pruner(sweep, plan, lambda trial_id, reason: stopped.append(trial_id))
    listed = draw(plan, 1)
    seeds = [plan.point(sampled).seed for sampled in listed]
    assert seeds == [1, 2, 1, 2]
    for number, accuracy in ((0, 0.9), (1, 0.3), (3, 0.4), (2, 0.8)):
        ours = SimpleNamespace(config={TRIAL: json.dumps(listed[number])})
        pruner.on_trial_result(None, ours, {"round": 1, METRIC: accuracy})
    assert stopped == ["t002"]


def test_a_setting_of_which_some_trials_were_ended_is_not_named_the_best_while_others_are_whole() -> None:
    sweep = Sweep("s", metric=METRIC, mode="max", axes=AXES)
    best = best_setting(sweep, [*WHOLE, *MIXED, *OTHER])
    assert best is not None and (best["setting"], best["mean"], best["tied"]) == ("a", 0.5, 0)
    alone = best_setting(sweep, MIXED)
    assert alone is not None and alone["setting"] == "b"
    rows = settings_table([*WHOLE, *MIXED, *OTHER])
    found = standings([*WHOLE, *MIXED, *OTHER], families(rows, AXES), METRIC, "max")
    assert found["a"].is_best and not found["b"].is_best
    tested, mixed = found["c"].result, found["b"].result
    assert tested is not None and tested.n == 2 and mixed is not None and mixed.n == 1  # the pair of whole runs


def test_equal_means_are_counted() -> None:
    again = [trial("d", 1, [0.0, 0.0, 0.0, 0.6]), trial("d", 2, [0.0, 0.0, 0.0, 0.4])]
    best = best_setting(Sweep("s", metric=METRIC, mode="max", axes=AXES), [*WHOLE, *again])
    assert best is not None and (best["setting"], best["tied"]) == ("a", 1)


def test_an_optimiser_hears_of_the_last_round_that_all_seeds_have() -> None:
    assert achieved(MIXED, METRIC) == pytest.approx((0.6 + 0.7) / 2)
    assert achieved(WHOLE, METRIC) == pytest.approx(0.5)


@pytest.mark.parametrize("many", [6, 7])
def test_the_report_of_an_unfinished_sweep_says_what_is_missing(tmp_path: Path, many: int) -> None:
    sweep = Sweep("s7", metric=METRIC, mode="max", axes=AXES, num_trials=many)
    paths = write_report(sweep, [*WHOLE, *MIXED, *OTHER], tmp_path)
    text = paths["markdown"].read_text()
    assert ("Unfinished: 1 of 7 trials had not begun" in text and "sweep --resume s7" in text) == (many == 7)
    assert "mixes runs of different lengths" in text and "Best mean validation_accuracy" in text


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert invoke(["sweep", "data.subset=0.2", "sweep.space.algorithm.local.lr={grid: [0.1]}", *arguments]) == 2
    shown: Any = capsys.readouterr()
    assert shown.err.count("\n") == 1
    return str(shown.err)


def test_a_scheduler_that_could_end_nothing_and_a_folder_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    late = refused(capsys, "fl.rounds=2", "sweep.scheduler=asha", "sweep.grace_rounds=50")
    assert "sweep.scheduler=asha: would be ignored" in late and "sweep.grace_rounds=50" in late
    rarely = refused(capsys, "fl.rounds=6", "fl.eval_every=6", "sweep.scheduler=median")
    assert "fl.eval_every=6" in rarely
    (tmp_path / "file").write_text("in the way")
    folder = refused(capsys, "fl.rounds=1", f"sweep.storage={tmp_path}/file/folder")
    assert f"sweep.storage: the folder {tmp_path}/file/folder cannot be written here" in folder
    assert not (tmp_path / "mlruns").exists()
