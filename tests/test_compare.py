"""Single runs compared: real runs in a SQLite store, unlike promises apart, and what is refused."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_lightning import ConfigError, RunConfig, TrackingError, run
from fl_lightning.analysis.compare import compare_runs, differences, short_names
from fl_lightning.cli import app, invoke
from fl_lightning.records import RunResult
from fl_lightning.tracking import ChildRun, connect, open_study, read_runs

FL = {"num_clients": 3, "rounds": 2, "max_local_steps": 2}


def recorded_run(uri: str, **more: Any) -> RunResult:
    base: dict[str, Any] = {"fl": FL, "data": {"name": "digits", "subset": 0.2}}
    tracking = {"uri": uri, "experiment": more.pop("experiment", "e"), "log_model": False}
    return run(RunConfig(**{**base, **more}, tracking=tracking))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs without privacy, of each sample at epsilon 8, of each sample with noise too small for it, of each client."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    sample = {"algorithm": "dp_fedavg", "privacy": {"level": "sample", "target_epsilon": 8.0}}
    update = {"level": "update", "target_epsilon": 8.0, "trust_model": "central", "noise_cohort_size": 1000}
    return {
        "uri": uri,
        "plain": recorded_run(uri),
        "sharp": recorded_run(uri, algorithm="fedsam", seed=43, experiment="another"),
        "sample": recorded_run(uri, **sample),
        "client": recorded_run(uri, algorithm="dp_fedavg", privacy=update),
    }


def named(store: dict[str, Any], *names: str) -> list[str]:
    return [store[name].run_id for name in names]


def part(text: str, heading: str) -> str:
    """The section of a report under a heading that begins so."""
    return text.split(f"## {heading}")[1].split("\n## ")[0]


def test_runs_without_privacy_share_one_table_and_one_figure(store: dict[str, Any], tmp_path: Path) -> None:
    found = compare_runs(named(store, "plain", "sharp"), uri=store["uri"], out=tmp_path, target=0.0)
    text = Path(found["markdown"]).read_text()
    plain, sharp = found["runs"]
    assert found["differences"]["algorithm.name"] == ["fedavg", "fedsam"] and found["differences"]["seed"] == [
        "42",
        "43",
    ]
    assert found["differences"]["algorithm.local.rho"][0] is None and "fl.rounds" not in found["differences"]
    partitions = [store[name].partition_sha256[:8] for name in ("plain", "sharp")]
    assert found["differences"]["partition_sha256"] == partitions
    results = part(text, "Results")
    accuracy = f"{store['plain'].final['test_accuracy']:.4f}"
    line = next(line for line in results.splitlines() if line.startswith(f"| {plain[:8]}"))
    assert [cell.strip() for cell in line.strip("|").split("|")][1:6] == ["fedavg", "42", "finished", "2", accuracy]
    assert f"| {sharp[:8]}" in results and "Target: test accuracy 0," in results and "protect nothing" not in results
    assert "curves_2" not in found and Path(found["curves"]).exists() and "runs differ" not in text
    rows = list(csv.DictReader(io.StringIO(Path(found["csv"]).read_text())))
    assert [row["setting"] for row in rows] == [plain, sharp]
    assert float(rows[0]["test_accuracy_mean"]) == store["plain"].final["test_accuracy"]
    assert float(rows[1]["gradients_mean"]) == 2 * float(rows[0]["gradients_mean"])


def test_unlike_promises_get_tables_figures_and_headings_of_their_own(store: dict[str, Any], tmp_path: Path) -> None:
    runs = named(store, "sample", "client", "plain")
    found = compare_runs(runs, uri=store["uri"], out=tmp_path, format="html")
    text = Path(found["markdown"]).read_text()
    sample, client, plain = (run_id[:8] for run_id in runs)
    assert "The private runs differ in unit (sample, client)" in text
    first, second = part(text, "Results, per sample"), part(text, "Results, per client")
    assert f"| {sample}" in first and f"| {client}" not in first and f"| {plain}" in first
    assert f"| {client}" in second and f"| {sample}" not in second and f"| {plain}" in second
    assert "| epsilon per sample, δ=1e-05 |" in first and "| epsilon per client, δ=1e-05 |" in second
    assert (
        "| epsilon |" not in text and f"dp_fedavg ({sample}): (epsilon, δ=1e-05)-differential privacy of one" in first
    )
    [caveat] = found["table"][1]["warnings"]
    assert f"dp_fedavg ({client}): {caveat}" in second and caveat not in first
    assert {name for name in found if name.startswith("curves")} == {"curves", "curves_2"}
    page = Path(found["html"]).read_text()
    assert page.count("data:image/png") == 2 and page.count('class="caveat"') == 1 and "https:" not in page


def test_latex_and_csv_go_to_standard_output_alone(store: dict[str, Any], tmp_path: Path) -> None:
    command = ["compare", *(run_id[:10] for run_id in named(store, "plain", "sample")), "--uri", store["uri"]]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path), "--format", "latex"])
    assert done.exit_code == 0 and done.stdout == (tmp_path / "report.tex").read_text()
    assert r"algorithm.name & fedavg & dp\_fedavg \\" in done.stdout and r"\textbf" not in done.stdout
    assert f"latex: {tmp_path / 'report.tex'}" in done.stderr


def test_an_unfinished_run_shows_its_status_and_no_numbers(store: dict[str, Any], tmp_path: Path) -> None:
    client = connect(store["uri"])
    experiment = client.get_experiment_by_name("e").experiment_id
    cut = client.create_run(experiment, tags={"algorithm": "fedavg", "seed": "7"}).info.run_id
    client.log_metric(cut, "test_accuracy", 0.99, step=1)
    found = compare_runs([cut, *named(store, "plain")], uri=store["uri"], out=tmp_path)
    line = next(x for x in Path(found["markdown"]).read_text().splitlines() if x.startswith(f"| {cut[:8]}"))
    assert "| running" in line and "0.99" not in line
    assert found["table"][0]["n"] == 0


def test_what_is_refused(store: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [plain] = named(store, "plain")
    uri = store["uri"]
    sweep = open_study(uri, "e", "feed1234")
    sweep.finish()
    for runs, error, words in (
        ([plain], ConfigError, "two or more runs"),
        ([plain, plain[:12]], ConfigError, "named twice"),
        ([plain, "0' OR 1=1"], TrackingError, "is not in"),
        ([plain, "nosuchrun"], TrackingError, "nosuchrun is not in"),
        ([plain, sweep.run_id], TrackingError, "is a sweep.*report feed1234"),
    ):
        with pytest.raises(error, match=words):
            compare_runs(runs, uri=uri, out=tmp_path / "none")
    with pytest.raises(TrackingError, match="no such database"):
        compare_runs([plain, "a"], uri=f"sqlite:///{tmp_path}/absent.db", out=tmp_path / "none")
    assert not (tmp_path / "none").exists() and not (tmp_path / "absent.db").exists()
    assert invoke(["compare", plain, "--uri", uri]) == 2 and "error: compare" in capsys.readouterr().err
    everything = {child.run_id for child in read_runs(uri, named(store, "plain", "client"))}
    assert everything == set(named(store, "plain", "client"))


def test_names_grow_until_they_differ() -> None:
    def child(run_id: str, **params: str) -> ChildRun:
        return ChildRun(run_id, "n", "FINISHED", params, {}, {}, {})

    pair = [child("0123456789a", a="1", b="2"), child("0123456789b", a="1", b="3", c="4")]
    assert list(short_names(pair).values()) == ["0123456789a", "0123456789b"]
    assert differences(pair) == {"b": ["2", "3"], "c": [None, "4"]}
