"""Budgets that differ share no table and no axis; caveats follow the numbers; epsilon may be the axis itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import load_config
from fl_lightning.analysis.promises import families, mismatch
from fl_lightning.analysis.report import Sweep, best_settings, write_report
from fl_lightning.analysis.report_figures import draw
from fl_lightning.analysis.tables import caption, settings_table
from fl_lightning.analysis.trials import Trial, setting_of
from fl_lightning.config import load_sweep, validate_space

PROMISE = {"unit": "sample", "delta": 1e-5, "adjacency": "add_remove", "sampling": "poisson", "trust_model": "local"}
CAVEAT = "The noise is that of a cohort of 1000: this run is NOT PRIVATE."


def private(name: str, target: float, accuracy: float = 0.5, seed: int = 42, **more: Any) -> Trial:
    params = {"algorithm": name, **more.pop("params", {})}
    facts = PROMISE | {"warnings": more.pop("warnings", [])} | more.pop("promise", {})
    final = {"test_accuracy": accuracy, "test_loss": 1.0, "epsilon": more.pop("spent", 0.999 * target)}
    history = {"test_accuracy": ((1, accuracy / 2), (2, accuracy))}
    more = {"target_epsilon": target, "badge": "PRIVATE", "history": history} | more
    number = more.pop("trial_id", f"t{seed}{name}")
    return Trial(number, setting_of(params), params, seed, name, "finished", final=final, privacy=facts, **more)


def plain(name: str = "fedavg", accuracy: float = 0.9, **params: Any) -> Trial:
    params = {"algorithm": name, **params}
    final = {"test_accuracy": accuracy, "test_loss": 1.0, "epsilon": None}
    history = {"test_accuracy": ((1, accuracy / 2), (2, accuracy))}
    return Trial("t900", setting_of(params), params, 42, name, "finished", final=final, history=history)


def report_of(trials: Sequence[Trial], out: Path, axes: tuple[str, ...] = ("algorithm",)) -> dict[str, Any]:
    paths = write_report(Sweep("s", name="study", axes=axes), trials, out)
    return {
        "text": paths["markdown"].read_text(),
        "figures": {k for k in paths if k.startswith(("cur", "eps"))},
    } | paths


def test_one_promise_at_one_budget_is_one_table_and_one_figure(tmp_path: Path) -> None:
    """What the iso-budget preset is for; how units were sampled is the mechanism's affair."""
    trials = [
        private("dp_fedavg", 8.0),
        private("sam_adpfl", 8.0, promise={"sampling": "full and poisson"}, spent=7.7),
        plain(),
    ]
    rows = settings_table(trials)
    [family] = families(rows)
    assert [len(budget.settings) for budget in family.budgets] == [2] and family.references == [trials[2].setting]
    assert mismatch([family]) == ""
    found = report_of(trials, tmp_path)
    assert found["figures"] == {"curves"} and "runs differ" not in found["text"] and "## Promise" not in found["text"]
    assert found["text"].count("| algorithm ") == 1


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"promise": {"unit": "client"}}, "unit (sample, client)"),
        ({"promise": {"delta": 1e-6}}, "delta (1e-05, 1e-06)"),
        ({"promise": {"adjacency": "replace_one"}}, "adjacency (add_remove, replace_one)"),
        ({"promise": {"trust_model": "central"}}, "trust model (local, central)"),
        ({"badge": "NOT PRIVATE"}, "badge (PRIVATE, NOT PRIVATE)"),
        ({"target": 2.0}, "epsilon (8, 2)"),
        ({"target": 8.4}, "epsilon (8, 8.4)"),  # targets are what they say, however close
    ],
)
def test_mismatched_budgets_are_refused_a_common_table_and_figure(
    other: dict[str, Any], named: str, tmp_path: Path
) -> None:
    target = other.pop("target", 8.0)
    trials = [private("dp_fedavg", 8.0), private("dp_fedsam", target, **other), plain()]
    found = report_of(trials, tmp_path)
    assert f"The private runs differ in {named}, so they share no table and no axis." in found["text"]
    assert found["figures"] == {"curves", "curves_2"} and found["curves_2"].name == "curves-2.png"
    first, second = found["text"].split("## Promise: ")[1:]
    assert "| dp_fedavg" in first and "| dp_fedsam" not in first and "| fedavg" in first
    assert "| dp_fedsam" in second and "| dp_fedavg" not in second and "| fedavg" in second
    best = best_settings(Sweep("s"), trials, families(settings_table(trials)))
    assert [item["params"]["algorithm"] for item in best] == ["dp_fedavg", "dp_fedsam", "fedavg"]
    summary = json.loads(found["summary"].read_text())
    assert [item["params"] for item in summary["best_by_promise"]] == [item["params"] for item in best]


def test_given_noise_is_grouped_by_what_it_spends() -> None:
    def given(name: str, spent: float) -> Trial:
        return private(name, 1.0, target_epsilon=None, spent=spent)

    def budgets(*trials: Trial) -> list[float]:
        return [family.budgets[0].epsilon for family in families(settings_table(trials))]

    assert budgets(private("a", 8.0), given("b", 7.7), given("c", 3.0), given("d", 3.1)) == [8.0, 3.0]
    # a budget that was not used up is worth what was spent
    assert budgets(private("a", 8.0), private("b", 8.0, spent=2.0)) == [8.0, 2.0]


def test_epsilon_as_the_axis_is_drawn_against_accuracy(tmp_path: Path) -> None:
    def at(name: str, epsilon: float, accuracy: float, seed: int) -> Trial:
        key = f"t{name}{epsilon}{seed}"
        return private(name, epsilon, accuracy, seed, params={"privacy.target_epsilon": epsilon}, trial_id=key)

    trials = [
        at(name, epsilon, 0.1 * epsilon + 0.01 * seed + (name == "dp_fedsam") * 0.05, seed)
        for name in ("dp_fedavg", "dp_fedsam")
        for epsilon in (0.5, 2.0, 8.0)
        for seed in (1, 2)
    ]
    axes = ("algorithm", "privacy.target_epsilon")
    [family] = families(settings_table(trials), axes)
    assert [budget.epsilon for budget in family.budgets] == [0.5, 2.0, 8.0]
    found = report_of([*trials, plain()], tmp_path, axes)
    assert found["figures"] == {"curves", "curves_2", "curves_3", "epsilon"}
    assert "Epsilon is what this sweep varies (0.5, 2, 8)" in found["text"]
    assert found["text"].count("| algorithm ") == 1  # one table: epsilon is a column of it
    # without the axis the same runs share nothing
    assert len(families(settings_table(trials), ("algorithm",))) == 3


def test_caveats_stand_under_the_table_and_inside_the_figure(tmp_path: Path) -> None:
    from matplotlib import image

    caveated = private("dp_fedavg", 8.0, warnings=[CAVEAT], badge="NOT PRIVATE")
    rows = settings_table([caveated])
    lines = caption(rows)
    assert f"dp_fedavg: {CAVEAT}" in lines
    assert not any("not a promise" in line for line in lines)  # the caveat itself says it
    unsaid = settings_table([private("dp_fedavg", 8.0, badge="NOT PRIVATE")])
    assert "dp_fedavg: NOT PRIVATE, the epsilon is not a promise of these runs." in caption(unsaid)
    with_it, without = report_of([caveated], tmp_path / "a"), report_of([private("dp_fedavg", 8.0)], tmp_path / "b")
    assert CAVEAT in with_it["text"] and CAVEAT not in without["text"]
    shapes = [image.imread(found["curves"]).shape for found in (with_it, without)]
    assert shapes[0][0] > shapes[1][0] and shapes[0][1] == shapes[1][1]
    below = image.imread(with_it["curves"])[-48:, :, :3]
    assert (below.min(axis=-1) < 0.4).sum() > 500  # there are letters in the added strip


def test_a_caveat_touches_only_the_figures_of_its_runs(tmp_path: Path) -> None:
    trials = [private("dp_fedavg", 8.0), private("dp_fedsam", 2.0, warnings=["Mind this."])]
    found = report_of(trials, tmp_path)
    first, second = found["text"].split("## Promise: ")[1:]
    assert "Mind this." not in first.split("## ")[0] and "dp_fedsam: Mind this." in second
    from matplotlib import image

    assert image.imread(found["curves"]).shape[0] < image.imread(found["curves_2"]).shape[0]


def test_infinite_epsilon_is_a_reference_and_failures_stay_in_the_first_table() -> None:
    noiseless = private("dp_fedavg", 8.0, spent=None, params={"privacy.noise_multiplier": 0})
    failed = Trial("t1", "x", {"algorithm": "dp_fedlaw"}, 42, "dp_fedlaw", "failed")
    rows = settings_table([private("dp_fedsam", 8.0), private("dp_scaffold", 2.0), noiseless, failed])
    first, second = families(rows)
    assert set(first.references) == {noiseless.setting, "x"} and second.references == [noiseless.setting]
    assert families(settings_table([failed]))[0].references == ["x"]
    assert families([])[0].settings == []


def test_skipped_cells_are_rows_of_the_table(tmp_path: Path) -> None:
    skipped = {
        "setting": "cell",
        "algorithm": "sam_adpfl",
        "params": {"algorithm": "sam_adpfl"},
        "reason": "hopeless: R",
    }
    rows = settings_table([private("dp_fedavg", 8.0)], [skipped])
    assert [(row["n"], row["failed"], row["skipped"]) for row in rows] == [(1, 0, None), (0, 0, "hopeless: R")]
    paths = write_report(Sweep("s", skipped=(skipped,)), [private("dp_fedavg", 8.0)], tmp_path)
    line = next(line for line in paths["markdown"].read_text().splitlines() if line.startswith("| sam_adpfl"))
    assert "hopeless: R" in line and json.loads(paths["summary"].read_text())["skipped"] == [skipped]


def test_nothing_but_skipped_cells_or_no_trial_at_all_is_still_a_report(tmp_path: Path) -> None:
    paths = write_report(Sweep("s"), [], tmp_path)
    assert "0 settings, 0 trials" in paths["markdown"].read_text() and paths["curves"].exists()


def test_pictures_hold_what_they_say(tmp_path: Path) -> None:
    """The second budget's curve is not in the first figure: its colour is missing there."""
    from matplotlib import colors, image

    trials = [private("dp_fedavg", 8.0), private("dp_fedsam", 2.0)]
    rows = settings_table(trials)
    pictures = draw(trials, rows, families(rows), tmp_path, "t")
    second = np.asarray(colors.to_rgb("#D55E00"))
    for picture in pictures:
        pixels = image.imread(picture.path)[..., :3]
        assert not (np.abs(pixels - second).max(axis=-1) < 0.02).any()  # one curve each, so one colour each


def test_the_shipped_sweep_is_at_one_budget() -> None:
    sweep, base = load_sweep(["sweep=iso_budget"])
    configs = [cell.config for cell in validate_space(base, sweep)]
    assert {config.algorithm.name for config in configs} == {
        "dp_fedavg",
        "dp_fedsam",
        "dp_scaffold",
        "dp_fedlaw",
        "sam_adpfl",
    }
    promises = {
        (p.level, p.target_epsilon, p.delta, p.adjacency, p.sampling) for p in (config.privacy for config in configs)
    }
    assert promises == {("sample", 8.0, 1e-5, "add_remove", "poisson")}
    assert load_config(["algorithm=dp_fedavg", "privacy=iso_budget", "privacy.target_epsilon=2"]).privacy.delta == 1e-5
