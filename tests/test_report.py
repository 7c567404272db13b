"""Statistics, tables, figures and the report: hand-sized numbers, then real federations read back from MLflow."""

import csv
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import RunConfig, TrackingError
from fl_lightning.analysis import confidence_interval, curve, make_report, mean, sample_sd, settings_table, to_csv
from fl_lightning.analysis.figures import BAND_ALPHA, Curve, accuracy_curves
from fl_lightning.analysis.report import Sweep, best_setting, write_report
from fl_lightning.analysis.tables import caption, epsilon_text, pivot, settings_markdown
from fl_lightning.analysis.trials import Trial, labels, setting_of
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.tracking import connect, log_text, open_study, tracked
from tune.space import Plan
from tune.trial import run_trial

SAMPLE = {"unit": "sample", "delta": 1e-5, "adjacency": "add_remove", "sampling": "poisson"}


def trial(number: int, params: dict[str, Any], seed: int, accuracy: float | None, **more: Any) -> Trial:
    algorithm = params.get("algorithm", "fedavg")
    if accuracy is None:
        return Trial(f"t{number:03d}", setting_of(params), params, seed, algorithm, "failed", **more)
    final = {"test_accuracy": accuracy, "test_loss": 2 * accuracy, "epsilon": None} | more.pop("final", {})
    return Trial(f"t{number:03d}", setting_of(params), params, seed, algorithm, "finished", final=final, **more)


def test_mean_sd_and_students_interval_by_hand() -> None:
    assert mean([0.1, 0.2, 0.6]) == pytest.approx(0.3, abs=1e-15)
    assert sample_sd([0.1, 0.2, 0.6]) == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2), abs=1e-15)
    assert sample_sd([0.5]) is None and mean([]) is None and confidence_interval([0.5]) is None
    assert math.isnan(sample_sd([0.1, math.nan]))
    # Student's factor for two values at 95 % is 12.706; sd = 0.1 sqrt 2, over sqrt 2 seeds.
    low, high = confidence_interval([0.4, 0.6])
    assert (low, high) == pytest.approx((0.5 - 12.7062 * 0.1, 0.5 + 12.7062 * 0.1), abs=1e-5)
    with pytest.raises(ValueError, match="level=1"):
        confidence_interval([0.4, 0.6], level=1)


def test_a_curve_counts_the_seeds_of_each_round_and_leaves_out_nan() -> None:
    points = curve([[(1, 0.2), (2, 0.4), (3, 0.9)], [(1, 0.4), (3, math.nan)]])
    assert [(p.round, p.n) for p in points] == [(1, 2), (2, 1), (3, 1)]
    assert points[0].mean == pytest.approx(0.3) and points[0].sd == pytest.approx(0.1 * math.sqrt(2))
    assert points[1].sd is None and points[2].mean == 0.9


def test_a_row_per_setting_with_the_largest_epsilon_and_the_failures_beside() -> None:
    private = {"algorithm": "dp_fedsam"}
    rows = settings_table(
        [
            trial(0, {"algorithm": "fedavg"}, 42, 0.9),
            trial(1, {"algorithm": "fedavg"}, 43, 0.8),
            trial(2, private, 42, 0.6, final={"epsilon": 7.5}, privacy=SAMPLE),
            trial(3, private, 43, 0.5, final={"epsilon": 7.991}, privacy=SAMPLE),
            trial(4, private, 44, None, error={"type": "ValueError", "message": "no"}),
        ]
    )
    assert [row["params"]["algorithm"] for row in rows] == ["fedavg", "dp_fedsam"]
    plain, protected = rows
    assert plain["test_accuracy_mean"] == pytest.approx(0.85) and plain["n"] == 2 and plain["failed"] == 0
    assert plain["test_accuracy_sd"] == pytest.approx(0.1 / math.sqrt(2))
    assert plain["epsilon"] is None and plain["unit"] is None and epsilon_text(plain) == "-"
    assert (protected["epsilon"], protected["n"], protected["failed"]) == (7.991, 2, 1)
    assert epsilon_text(protected) == "8.00 per sample, δ=1e-05"  # rounded up, never down
    text = settings_markdown(rows)
    assert "0.8500 ± 0.0707" in text and "adjacency add_remove, sampling poisson" in text
    assert "dash under epsilon protect nothing" in text and "must not be compared" not in text
    json.dumps(rows, allow_nan=False)


def test_infinite_and_undefined_numbers_stay_out_of_the_json() -> None:
    noiseless = trial(0, {"algorithm": "dp_fedavg"}, 1, 0.7, final={"epsilon": None}, privacy=SAMPLE)
    diverged = trial(1, {"algorithm": "fedavg"}, 1, 0.1, final={"test_loss": math.nan})
    rows = settings_table([noiseless, diverged])
    assert rows[0]["epsilon"] is None and epsilon_text(rows[0]) == "infinite per sample, δ=1e-05"
    assert rows[1]["test_loss_mean"] is None and rows[1]["test_accuracy_sd"] is None
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("change", [{"delta": 1e-6}, {"unit": "client"}, {"adjacency": "replace_one"}])
def test_epsilons_of_different_promises_are_said_not_to_compare(change: dict[str, Any]) -> None:
    one = trial(0, {"privacy.delta": 1}, 1, 0.7, final={"epsilon": 2.0}, privacy=SAMPLE)
    other = trial(1, {"privacy.delta": 2}, 1, 0.7, final={"epsilon": 2.0}, privacy=SAMPLE | change)
    assert not any("must not be compared" in line for line in caption(settings_table([one])))
    assert any("must not be compared" in line for line in caption(settings_table([one, other])))


def test_csv_has_full_precision_and_an_empty_field_where_an_axis_does_not_apply() -> None:
    third = 1 / 3
    rows = settings_table(
        [trial(0, {"algorithm": "fedavg"}, 7, third), trial(1, {"algorithm": "fedsam", "rho": 0.1}, 7, 0.5)]
    )
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert float(read[0]["test_accuracy_mean"]) == third and read[0]["rho"] == "" and read[1]["rho"] == "0.1"
    assert read[0]["epsilon"] == "" and read[0]["test_accuracy_sd"] == "" and read[0]["seeds"] == "7"


def test_pivot_sets_algorithms_against_the_other_axes() -> None:
    trials = [
        trial(i, {"algorithm": name, "partition.alpha": alpha}, 1, 0.1 * i)
        for i, (name, alpha) in enumerate([("fedavg", 0.1), ("fedavg", 1.0), ("fedsam", 0.1)])
    ]
    headings, lines = pivot(settings_table(trials))
    assert headings == ["test accuracy", "partition.alpha=0.1", "partition.alpha=1.0"]
    assert lines == [["fedavg", "0.0000", "0.1000"], ["fedsam", "0.2000", "-"]]
    assert pivot(settings_table(trials[:1])) is None


def test_an_axis_with_one_value_has_no_column_but_a_sentence() -> None:
    rows = settings_table([trial(i, {"algorithm": "fedsam", "rho": i, "fl.rounds": 9}, 1, 0.5) for i in (1, 2)])
    text = settings_markdown(rows)
    headings = [cell.strip() for cell in text.splitlines()[0].strip("|").split("|")]
    assert headings == ["algorithm", "rho", "seeds", "test accuracy", "test loss", "epsilon"]
    assert "All rows: fl.rounds=9." in text
    assert "fedsam alone has fl.batch_size=64." in settings_markdown(rows, {"fedsam": {"fl.batch_size": 64}})
    assert "fl.rounds" in to_csv(rows).splitlines()[0]


def test_labels_use_the_last_part_of_what_varies_unless_two_axes_share_it() -> None:
    short = [trial(i, {"algorithm": "fedsam", "algorithm.local.rho": 0.1 * i, "fl.rounds": 3}, 1, 0.5) for i in (1, 2)]
    clash = [trial(i, {"algorithm.local.mu": i, "algorithm.aggregate.mu": 2 * i}, 1, 0.5) for i in (1, 2)]
    assert list(labels(short).values()) == ["fedsam, rho=0.1", "fedsam, rho=0.2"]
    assert labels(clash)[clash[0].setting] == "fedavg, algorithm.local.mu=1, algorithm.aggregate.mu=2"
    files = [trial(i, {"partition.path": f"/a/folder/with/a/long/name/{i}.json"}, 1, 0.5) for i in (1, 2)]
    assert labels(files)[files[1].setting] == "fedavg, path=...th/a/long/name/2.json"
    assert setting_of({"a": 1, "b": 2}) == setting_of({"b": 2, "a": 1}) != setting_of({"a": 1, "b": 3})


def test_best_is_over_means_of_the_metric_asked_for_and_nothing_when_all_failed() -> None:
    trials = [
        trial(0, {"algorithm": "fedavg"}, 1, 0.9),
        trial(1, {"algorithm": "fedavg"}, 2, 0.1),
        trial(2, {"algorithm": "fedsam"}, 1, 0.6),
        trial(3, {"algorithm": "fedsam"}, 2, 0.6),
    ]
    sweep = Sweep("s")
    assert best_setting(sweep, trials)["params"] == {"algorithm": "fedsam"}
    assert best_setting(replace(sweep, metric="test_loss", mode="min"), trials)["mean"] == pytest.approx(1.0)
    assert best_setting(replace(sweep, metric="nowhere"), trials) is None
    assert best_setting(sweep, [trial(0, {}, 1, None)]) is None


def test_curves_png_has_its_size_its_colours_and_a_band(tmp_path: Path) -> None:
    import numpy as np
    from matplotlib import colors, image

    points = curve([[(r, 0.1 * r) for r in range(1, 8)], [(r, 0.1 * r + 0.1) for r in range(1, 8)]])
    path = accuracy_curves([Curve("one", points), Curve("failed", [])], tmp_path / "new folder" / "c.png", title="t")
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[:2] == (720, 1500)
    line = np.asarray(colors.to_rgb("#0072B2"))
    band = BAND_ALPHA * line + 1 - BAND_ALPHA
    near = [(np.abs(pixels - colour).max(axis=-1) < 0.02).sum() for colour in (line, band)]
    assert near[0] > 500 and near[1] > 5000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A sweep of two settings and two seeds on the digits, recorded by real runs, without Ray."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    sweep = SweepConfig(space={"algorithm": {"grid": ["fedavg", "dp_fedavg"]}}, seeds=(42, 43))
    base = RunConfig(
        fl={"num_clients": 3, "rounds": 2},
        data={"name": "digits", "subset": 0.2},
        tracking={"uri": uri, "experiment": "e"},
    )
    cells = validate_space(base, sweep)
    study = open_study(uri, "e", "abcd1234", name="pair")
    described = Sweep("abcd1234", name="pair", axes=("algorithm",), config=base.to_dict())
    log_text(uri, study.run_id, described.to_json(), "sweep.json")
    plan = Plan("abcd1234", ("algorithm",), tuple(cells), {"tracking.uri": uri}, study.run_id)
    with tracked(study):
        results = [run_trial(plan, {"cell": number}, f"t{number:03d}") for number in range(4)]
    return {"uri": uri, "results": results, "parent": study.run_id}


def test_report_from_mlflow_repeats_the_runs_numbers_exactly(recorded: dict[str, Any], tmp_path: Path) -> None:
    report = make_report("abcd1234", uri=recorded["uri"], out=tmp_path / "r")
    accuracies = [result.final["test_accuracy"] for result in recorded["results"]]
    plain, private = report["table"]
    assert plain["params"] == {"algorithm": "fedavg"} and plain["seeds"] == [42, 43]
    assert plain["test_accuracy_mean"] == pytest.approx(mean(accuracies[:2]), abs=1e-15)
    assert plain["test_accuracy_sd"] == pytest.approx(sample_sd(accuracies[:2]), abs=1e-15)
    assert private["epsilon"] == max(result.final["epsilon"] for result in recorded["results"][2:])
    assert (private["unit"], private["delta"], private["sampling"]) == ("sample", 1e-5, "poisson")
    assert plain["epsilon"] is None and report["failed"] == 0
    text = Path(report["markdown"]).read_text()
    assert epsilon_text(private) in text and "curves.png" in text and "data.name=digits" in text
    stored = {entry.path for entry in connect(recorded["uri"]).list_artifacts(recorded["parent"], "report")}
    assert stored == {f"report/{name}" for name in ("report.md", "report.csv", "curves.png", "summary.json")}


def test_report_from_mlflow_equals_the_one_of_the_sweep_itself(recorded: dict[str, Any], tmp_path: Path) -> None:
    from tune.trial import outcome_of

    later = make_report("abcd1234", uri=recorded["uri"], experiment="e", out=tmp_path / "later")
    trials = []
    for number, result in enumerate(recorded["results"]):
        outcome = outcome_of(result)
        params = {"algorithm": result.config["algorithm"]["name"]}
        found = {key: outcome[key] for key in ("run_id", "final", "privacy", "badge", "metrics", "history")}
        found["target_epsilon"] = result.config["privacy"].get("target_epsilon")
        seed, algorithm = result.config["seed"], params["algorithm"]
        trials.append(Trial(f"t{number:03d}", setting_of(params), params, seed, algorithm, "finished", **found))
    sweep = Sweep("abcd1234", name="pair", axes=("algorithm",), config=recorded["results"][0].config)
    now = write_report(sweep, trials, tmp_path / "now", later["selection"])
    for kind in ("csv", "markdown", "curves"):
        assert now[kind].read_bytes() == Path(later[kind]).read_bytes(), kind


def test_unknown_sweep_names_those_that_exist(recorded: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"sweep nowhere.*abcd1234"):
        make_report("nowhere", uri=recorded["uri"], out=tmp_path)
    with pytest.raises(TrackingError, match="other"):
        make_report("abcd1234", uri=recorded["uri"], experiment="other", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_line_reports_from_another_process_and_folder(recorded: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_lightning.cli", "report", "abcd1234", "--uri", recorded["uri"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| fedavg " in done.stdout and "per sample, δ=1e-05" in done.stdout
    assert (tmp_path / "mlruns" / "reports" / "abcd1234" / "curves.png").exists()
