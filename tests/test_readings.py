"""One table of every epsilon that may be quoted for a run: what each row counts, and what it does not prove."""

import csv
import io
import json
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from fl_lightning.privacy import Ledger, compose, epsilon, gaussian_epsilon_exact
from fl_lightning.privacy import pld as distributions
from fl_lightning.privacy.paper import eq16_epsilon
from fl_lightning.privacy.pld import pld_epsilon
from fl_lightning.privacy.readings import EVERY, ONCE, PaperReading, reading_series, readings, to_csv, to_markdown
from fl_lightning.records import REACH, Release

DELTA, ROUNDS, SIGMA = 1e-5, 20, 4.0


def update(adjacency: str, sigma: float = SIGMA, covers: tuple[str, ...] = ("delta",)) -> Release:
    """`sigma` is noise over the clip bound, as Eq. 16 counts it."""
    return Release("gaussian", "client", REACH[adjacency] * 1.5, sigma * 1.5, adjacency=adjacency, covers=covers)


def laplace(adjacency: str, e0: float, name: str) -> Release:
    return Release("laplace", "client", 0.5, 0.5 / e0, adjacency=adjacency, covers=(name,))


def gap(adjacency: str, multiplier: float = 9.0) -> Release:
    return Release("gaussian", "client", 0.5, 0.5 * multiplier, adjacency=adjacency, covers=("gap",))


def run(adjacency: str, releases: list[Release], rounds: int = ROUNDS) -> Ledger:
    """Client 0 is in every round, client 1 in every second."""
    ledger = Ledger(unit="client", delta=DELTA, adjacency=adjacency)
    for round in range(1, rounds + 1):
        for client in range(2 - round % 2):
            ledger.record(round, client, releases)
    return ledger


def by_name(rows: list[dict]) -> dict[str, dict]:
    assert len({row["reading"] for row in rows}) == len(rows)
    return {row["reading"]: row for row in rows}


def test_renyi_and_pld_rows_are_those_of_the_worst_client() -> None:
    releases = [gap("replace_one"), update("replace_one")]
    ledger = run("replace_one", releases)
    rows = by_name(readings(ledger))
    assert list(rows) == ["rdp", "pld"]
    whole = [replace(release, count=ROUNDS) for release in releases]
    assert rows["rdp"]["total"] == ledger.epsilon() == pytest.approx(epsilon(compose(whole), DELTA), rel=1e-12)
    assert rows["rdp"]["per_round"] == pytest.approx(epsilon(compose(releases), DELTA), rel=1e-12)
    assert rows["pld"]["total"] == pytest.approx(pld_epsilon(whole, DELTA), rel=1e-4)
    assert rows["pld"]["per_round"] == pytest.approx(pld_epsilon(releases, DELTA), rel=1e-3)
    z = 1 / math.sqrt(9.0**-2 + (SIGMA / 2) ** -2)
    assert rows["pld"]["total"] == pytest.approx(gaussian_epsilon_exact(z, ROUNDS, DELTA), rel=1e-4)
    for row in rows.values():
        assert row["valid"] is True and row["infinite"] is False and row["adjacency"] == "replace_one"
        assert "client 0" in row["note"]


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("raw", [True, False])
def test_paper_rows_count_as_the_paper_does(adjacency: str, raw: bool) -> None:
    """T updates at sigma = noise / C whatever the relation, and three Laplace scalars of 0.05 each: once or T times."""
    releases = [
        *(laplace(adjacency, 0.05, name) for name in ("sharpness", "loss_std", "loss_worst")),
        update(adjacency),
    ]
    ledger = run(adjacency, releases)
    rows = by_name(readings(ledger, paper=PaperReading(raw_noise=raw)))
    updates = eq16_epsilon(SIGMA, ROUNDS, DELTA)
    assert rows[ONCE]["total"] == pytest.approx(updates + 0.15, rel=1e-9)
    assert rows[EVERY]["total"] == pytest.approx(updates + 0.15 * ROUNDS, rel=1e-9)
    for name in (ONCE, EVERY):
        assert rows[name]["per_round"] == pytest.approx(eq16_epsilon(SIGMA, 1, DELTA) + 0.15, rel=1e-9)
        assert ("moves its update by up to 2C" in rows[name]["note"]) == (adjacency == "replace_one")
        assert ("raw sharpness" in rows[name]["note"]) == raw
    assert "scalars of one round, and every round released some" in rows[ONCE]["note"]
    assert rows[ONCE]["valid"] is False
    assert rows[EVERY]["valid"] is (adjacency == "zero_out" and not raw)
    if rows[EVERY]["valid"]:
        assert rows[EVERY]["total"] >= ledger.epsilon()  # a bound, and a loose one
    if adjacency == "replace_one":
        assert rows[ONCE]["total"] < rows["pld"]["total"]  # what the paper would print is below what holds


def test_strict_scalars_are_counted_by_what_they_cost_alone() -> None:
    ledger = run("zero_out", [gap("zero_out"), update("zero_out")])
    rows = by_name(readings(ledger, paper=PaperReading()))
    updates = eq16_epsilon(SIGMA, ROUNDS, DELTA)
    one, all_of_them = (epsilon(compose([replace(gap("zero_out"), count=n)]), DELTA) for n in (1, ROUNDS))
    assert rows[ONCE]["total"] == pytest.approx(updates + one, rel=1e-9)
    assert rows[EVERY]["total"] == pytest.approx(updates + all_of_them, rel=1e-9)
    assert all("same delta" in rows[name]["note"] and rows[name]["valid"] is False for name in (ONCE, EVERY))


def test_plain_updates_make_both_paper_readings_equal_and_valid_when_nothing_is_replaced() -> None:
    rows = by_name(readings(run("zero_out", [update("zero_out")]), paper=PaperReading()))
    assert rows[ONCE]["total"] == rows[EVERY]["total"] == pytest.approx(eq16_epsilon(SIGMA, ROUNDS, DELTA), rel=1e-12)
    assert rows[ONCE]["valid"] and rows[EVERY]["valid"] and rows[ONCE]["total"] > rows["rdp"]["total"]


def test_noise_that_changes_is_counted_at_its_harmonic_mean() -> None:
    """Eq. 16 at its least over q: s + 2 sqrt(s ln(1/delta)) with s = sum_t 1 / (2 sigma_t^2)."""
    ledger, s = Ledger(unit="client", delta=DELTA, adjacency="add_remove"), 0.0
    for round in range(1, 11):
        sigma = 8.0 * 0.9**round
        ledger.record(round, 0, [update("add_remove", sigma)])
        s += 1 / (2 * sigma**2)
    rows = by_name(readings(ledger, paper=PaperReading()))
    assert rows[ONCE]["total"] == pytest.approx(s + 2 * math.sqrt(s * math.log(1 / DELTA)), rel=1e-9)
    assert rows[ONCE]["per_round"] == pytest.approx(eq16_epsilon(sigma, 1, DELTA), rel=1e-9)  # the latest round's


def test_sample_level_and_foreign_updates_have_no_paper_reading() -> None:
    steps = Release("gaussian", "sample", 1.0, 0.9, 20, "poisson", 0.02, covers=("delta",))
    ledger = Ledger(unit="sample", delta=DELTA, adjacency="add_remove")
    ledger.record(1, 0, [steps])
    rows = by_name(readings(ledger, paper=PaperReading()))
    for name in (ONCE, EVERY):
        assert rows[name]["total"] is rows[name]["per_round"] is None and rows[name]["valid"] is False
        assert "steps of its training are noised" in rows[name]["note"]
    assert set(reading_series(ledger, paper=PaperReading())) == {"rdp", "pld"}
    other = run("zero_out", [update("zero_out", covers=("model",))])
    assert "covers its delta" in by_name(readings(other, paper=PaperReading()))[ONCE]["note"]
    assert by_name(readings(other, paper=PaperReading(update="model")))[ONCE]["total"] > 0


def test_what_pld_cannot_count_is_said_and_the_rest_stays() -> None:
    drawn = replace(update("replace_one"), sampling="without_replacement", rate=0.1)
    ledger = run("replace_one", [drawn])
    rows = by_name(readings(ledger))
    assert rows["rdp"]["total"] == ledger.epsilon()
    assert rows["pld"]["total"] is None and rows["pld"]["valid"] is False and rows["pld"]["infinite"] is False
    assert "sampling=without_replacement" in rows["pld"]["note"]
    assert reading_series(ledger)["pld"] == []
    many = Ledger(unit="sample", delta=DELTA, adjacency="add_remove")
    for round in range(1, 43):
        many.record(round, 0, [Release("gaussian", "sample", 1.0, 1 + round / 9, 1, "poisson", 0.1)])
    assert "42 different sampled releases" in by_name(readings(many))["pld"]["note"]


def test_without_noise_and_without_releases() -> None:
    empty = Ledger(unit="client", delta=DELTA, adjacency="zero_out")
    assert readings(empty, paper=PaperReading()) == [] and reading_series(empty) == {"rdp": [], "pld": []}
    bare = run("zero_out", [update("zero_out", 0.0)])
    rows = readings(bare, paper=PaperReading())
    assert all(row["total"] is None and row["infinite"] for row in rows) and len(rows) == 4
    assert to_markdown(rows).count("| infinite |") == 4
    assert reading_series(bare, paper=PaperReading())[ONCE][-1] == (ROUNDS, None)
    json.dumps([rows, reading_series(bare)], allow_nan=False)


@pytest.mark.parametrize("kind", ["client", "sample"])
def test_series_follows_the_rounds_and_is_quick(kind: str) -> None:
    if kind == "client":
        ledger = run("zero_out", [gap("zero_out"), update("zero_out")])
        paper = PaperReading()
    else:
        ledger, paper = Ledger(unit="sample", delta=DELTA, adjacency="add_remove"), None
        for round in range(1, ROUNDS + 1):
            ledger.record(round, 0, [Release("gaussian", "sample", 1.0, 0.9, 20, "poisson", 0.02)])
    distributions._distribution.cache_clear()
    distributions._composed.cache_clear()
    began = time.process_time()
    series = reading_series(ledger, paper=paper)
    assert time.process_time() - began < 10
    assert series["rdp"] == ledger.history
    rounds = [round for round, _ in series["pld"]]
    assert (
        len(rounds) == 8
        and rounds[0] == 1
        and rounds[-1] == ROUNDS
        and max(after - before for before, after in pairwise(rounds)) <= 3
    )
    for name, points in series.items():
        values = [value for _, value in points]
        assert values == sorted(values) and values[0] > 0, name
    rdp = dict(series["rdp"])
    assert all(0.5 * rdp[round] < value < rdp[round] for round, value in series["pld"])
    rows = by_name(readings(ledger, paper=paper))
    for name, points in series.items():
        assert points[-1] == (ROUNDS, pytest.approx(rows[name]["total"], rel=1e-9))
    assert [len(reading_series(ledger, most=n)["pld"]) for n in (1, 3, 100)] == [1, 3, ROUNDS]


def test_series_after_a_resumption_is_that_of_the_whole_run() -> None:
    straight = run("zero_out", [update("zero_out")])
    first = run("zero_out", [update("zero_out")], rounds=7)
    ledger = Ledger(unit="client", delta=DELTA, adjacency="zero_out")
    ledger.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for round in range(8, ROUNDS + 1):
        for client in range(2 - round % 2):
            ledger.record(round, client, [update("zero_out")])
    paper = PaperReading()
    assert reading_series(ledger, paper=paper) == reading_series(straight, paper=paper)
    assert readings(ledger, paper=paper) == readings(straight, paper=paper)


def test_tables_say_what_the_rows_say() -> None:
    releases = [laplace("replace_one", 0.05, "sharpness"), update("replace_one")]
    rows = readings(run("replace_one", releases), paper=PaperReading(raw_noise=True))
    lines = to_markdown(rows).splitlines()
    assert lines[0] == "| reading | adjacency | per_round | total | valid | note |"
    assert len(lines) == 2 + len(rows) and all(line.count("|") == 7 for line in lines)
    for line, row in zip(lines[2:], rows, strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[0] == row["reading"] and cells[4] == ("yes" if row["valid"] else "no")
        assert row["total"] <= float(cells[3]) <= row["total"] * 1.001  # printed upward
    back = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [float(row["total"]) for row in back] == [row["total"] for row in rows]
    assert [row["note"] for row in back] == [row["note"] for row in rows]
    assert back[0].keys() == rows[0].keys()
