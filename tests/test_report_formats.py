"""Reports in every format: standings, costs, LaTeX, the page; hand-sized numbers, then real runs from MLflow."""

import base64
import csv
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_lightning import RunConfig
from fl_lightning.analysis import make_report
from fl_lightning.analysis.comparisons import NOTES, OTHER_PARTITIONS, standings
from fl_lightning.analysis.costs import costs, quantity
from fl_lightning.analysis.document import Heading, Notes, Table, Text
from fl_lightning.analysis.latex import escape, to_latex
from fl_lightning.analysis.paired import NEEDS_MORE
from fl_lightning.analysis.promises import families
from fl_lightning.analysis.report import Sweep, write_report
from fl_lightning.analysis.tables import settings_table
from fl_lightning.analysis.trials import Trial, setting_of
from fl_lightning.cli import app
from fl_lightning.config import SweepConfig, validate_space
from fl_lightning.federation import _metrics
from fl_lightning.records import Message, ServerState
from fl_lightning.tracking import connect, log_text, open_study, tracked
from tune.space import Plan
from tune.trial import run_trial

SAMPLE = {"unit": "sample", "delta": 1e-5, "adjacency": "add_remove", "sampling": "poisson", "trust_model": "local"}
CAVEAT = "The noise is that of a cohort of 1000: this run is NOT PRIVATE."


def trials_of(name: str, accuracies: list[float], epsilon: float | None = None, **more: Any) -> list[Trial]:
    """A trial a seed; its history reaches the accuracy in the second of two rounds."""
    params = {"algorithm": name}
    privacy = None if epsilon is None else SAMPLE | {"warnings": more.pop("warnings", [])} | more.pop("promise", {})
    badge = more.pop("badge", None if epsilon is None else "PRIVATE")
    return [
        Trial(
            f"t{seed}{name}",
            setting_of(params),
            params,
            seed,
            name,
            "finished",
            final={"test_accuracy": accuracy, "test_loss": 1 - accuracy, "epsilon": epsilon},
            privacy=privacy,
            target_epsilon=epsilon,
            badge=badge,
            partition_sha256=f"p{seed}",
            history={
                "test_accuracy": ((1, accuracy / 2), (2, accuracy)),
                "seconds": ((1, 2.0), (2, 3.0)),
                "gradients" if epsilon is None else "oracle/gradients": ((1, 100.0), (2, 200.0)),
                "upload_bytes": ((1, 4000.0), (2, 4000.0)),
            },
            **more,
        )
        for seed, accuracy in enumerate(accuracies, start=42)
    ]


def test_standings_pair_seeds_of_equal_partitions_within_a_promise() -> None:
    best, worse = trials_of("a", [0.9, 0.8, 0.85]), trials_of("b", [0.7, 0.75, 0.6])
    private, strict = trials_of("c", [0.6, 0.5, 0.4], 8.0), trials_of("d", [0.3, 0.2, 0.3], 2.0)
    trials = [*best, *reversed(worse), *private, *strict]
    found = standings(trials, families(settings_table(trials)))
    a, b, c, d = (found[group[0].setting] for group in (best, worse, private, strict))
    assert a.is_best and a.result is None and b.best == a.setting
    assert b.result is not None and b.result.difference == pytest.approx((0.2 + 0.05 + 0.25) / 3)
    assert c.best is None and d.best is None  # budgets of their own: nothing to compare with
    assert a.interval == pytest.approx((0.85 - 4.302653 * 0.05 / math.sqrt(3), 0.85 + 4.302653 * 0.05 / math.sqrt(3)))

    moved = [*best, *(replace(trial, partition_sha256="other") for trial in worse)]
    apart = standings(moved, families(settings_table(moved)))[b.setting].result
    assert apart is not None and apart.words == OTHER_PARTITIONS and apart.p is None
    fewer = [*best[:2], *worse]  # the best lacks a seed
    assert standings(fewer, families(settings_table(fewer)))[b.setting].result.n == 2
    least = standings(trials, families(settings_table(trials)), "test_loss", "min")
    assert least[a.setting].is_best and least[b.setting].result.difference == pytest.approx(-(0.2 + 0.05 + 0.25) / 3)


def test_costs_sum_the_rounds_and_stop_at_the_target() -> None:
    found = costs(trials_of("a", [0.9, 0.7]), 0.8)
    assert (found["rounds_to_target_mean"], found["reached"], found["seconds_to_target_mean"]) == (2, 1, 5.0)
    assert (found["gradients_mean"], found["upload_bytes_mean"], found["seconds_mean"]) == (300, 8000, 5)
    assert found["gradients_sd"] == 0 and found["rounds_to_target_sd"] is None
    assert costs(trials_of("a", [0.9], 8.0), 0.45)["rounds_to_target_mean"] == 1
    assert costs(trials_of("a", [0.9], 8.0))["gradients_mean"] == 300  # under oracle/ where it is private
    never = costs(trials_of("a", [0.3]), 0.8)
    assert never["rounds_to_target_mean"] is None and never["reached"] == 0
    bare = costs([replace(trials_of("a", [0.9])[0], history={"test_accuracy": ((2, 0.9),)})], 0.8)
    assert bare["rounds_to_target_mean"] == 2 and bare["seconds_to_target_mean"] is bare["gradients_mean"] is None
    assert [quantity(v) for v in (0.0, 999.6, 1e15)] == ["0", "1 k", "1000 T"]


def test_upload_bytes_are_what_is_sent() -> None:
    from fl_lightning.algorithms.algorithm import Protection

    delta, count = torch.zeros(10), torch.tensor(3)
    sent = Message(0, 5, 2, {"delta": delta, "c": delta}, {"gap": 1.0}, {"n": count}, oracle={"gradients": 7.0})
    silent = replace(sent, client=1, steps=0, oracle={})
    server = ServerState(delta)
    found = _metrics([sent, silent], server, server, Protection())
    assert (found["upload_bytes"], found["gradients"]) == (2 * 10 * 4 + 4 + 8, 7)
    whole = _metrics([sent, silent], server, server, Protection(level="update", trust="central"))
    assert whole["oracle/upload_bytes"] == 2 * 92 and "upload_bytes" not in whole and "gradients" not in whole


GOLDEN = r"""% Needs \usepackage{booktabs,graphicx}; best values of one promise and budget are bold.

% 100% of p_k

\begin{table}[htbp]
  \centering
  \caption{A\_b}
  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%
  \begin{tabular}{ll}
    \toprule
    x\_1 \& y & 50 \% \\
    \midrule
    \textbf{0.9 $\pm$ 0.1} & \textasciitilde{}\$\#\{\}\textasciicircum{}\textbackslash{} \\
    {}[0, 1] & $\delta$=1e-05 \textless{} 2 -{}- 3 \\
    \bottomrule
  \end{tabular}}
  \par\smallskip
  \begin{minipage}{\linewidth}\footnotesize
    one\_note\par
    another\par
  \end{minipage}
\end{table}
"""


def test_latex_is_the_golden_text() -> None:
    table = Table(["x_1 & y", "50 %"], [["0.9 ± 0.1", "~$#{}^\\"], ["[0, 1]", "δ=1e-05 < 2 -- 3"]], frozenset({(0, 0)}))
    text = to_latex([Heading("100% of\np_k"), replace(table, name="A_b"), Notes(["one_note"]), Notes(["another"])])
    assert text == GOLDEN
    assert to_latex([Text("only %words")]).splitlines()[-1] == "% only %words"
    assert escape("\n") == ""


def test_latex_bolds_the_best_of_each_promise_and_keeps_every_caveat(tmp_path: Path) -> None:
    trials = [*trials_of("a_1", [0.6, 0.5, 0.4], 8.0, warnings=[CAVEAT]), *trials_of("b", [0.5, 0.45, 0.2], 8.0)]
    trials += [*trials_of("c", [0.3], 2.0), *trials_of("d", [0.2], 2.0), *trials_of("e", [0.9]), *trials_of("f", [0.8])]
    paths = write_report(Sweep("s_1", axes=("algorithm",)), trials, tmp_path, format="latex")
    text = paths["latex"].read_text()
    bold = [line for line in text.splitlines() if "textbf" in line]
    assert [line.split(" & ")[0].strip() for line in bold] == ["a\\_1", "a\\_1", "c", "c"]  # twice: also over seeds
    tables = text.split(r"\begin{table}")[1:]
    held = [part for part in tables if "a\\_1" in part]
    assert len(held) == 3 and all("cohort of 1000" in part for part in held)
    assert not any("a\\_1 &" in part and "\n    c &" in part for part in tables)
    lines = [line.removesuffix("{%") for line in text.splitlines() if not line.startswith("%")]
    assert set(re.findall(r"(?<!\\)[&_%#$]", "\n".join(lines))) <= {"&", "$"}


def test_markdown_and_csv_hold_the_tests_and_the_costs(tmp_path: Path) -> None:
    trials = [*trials_of("a", [0.9, 0.8, 0.85]), *trials_of("b", [0.7, 0.75, 0.6]), *trials_of("c", [0.5, 0.6])]
    paths = write_report(Sweep("s", axes=("algorithm",)), trials, tmp_path, target=0.8)
    text = paths["markdown"].read_text()
    b = next(line for line in text.splitlines() if line.startswith("| b") and "+0.1667" in line)
    assert [cell.strip() for cell in b.strip("|").split("|")][1:] == [
        *("3", "0.6833", "0.0764", "0.4936 to 0.8731", "3", "+0.1667", "t", "0.11", "1.60", "6"),
    ]
    c = next(line for line in text.splitlines() if line.startswith("| c") and NEEDS_MORE in line)
    assert "-0.4500 to" not in c and NOTES[0] in text
    assert "rounds to target" in text and "not reached" in text and "Target: test accuracy 0.8" in text
    rows = {row["algorithm"]: row for row in csv.DictReader(io.StringIO(paths["csv"].read_text()))}
    assert float(rows["b"]["p"]) == pytest.approx(0.1091, abs=1e-4) and rows["a"]["comparison"] == "best"
    assert rows["c"]["p"] == "" and rows["c"]["comparison"] == NEEDS_MORE
    assert (rows["a"]["reached"], rows["a"]["seconds_to_target_mean"]) == ("3", "5.0")
    assert rows["b"]["rounds_to_target_mean"] == "" and rows["b"]["upload_bytes_mean"] == "8000.0"
    summary = json.loads(paths["summary"].read_text())
    assert summary["statistics"][1]["result"]["p_holm"] == pytest.approx(float(rows["b"]["p_holm"]))
    plain = write_report(Sweep("s", axes=("algorithm",)), trials, tmp_path / "plain")
    assert "target" not in plain["markdown"].read_text()


class Page(HTMLParser):
    """What a page refers to, which elements are left open, and its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.tables: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "table" in self.open:
            self.tables[-1] += data + "|"


def test_the_page_stands_alone_and_keeps_promises_apart(tmp_path: Path) -> None:
    trials = [*trials_of("<b>a", [0.6, 0.5], 8.0, warnings=[CAVEAT]), *trials_of("b", [0.5], 2.0)]
    error = {"type": "ValueError", "message": "<i>a message too long for a cell that is kept on one line</i>"}
    trials.append(Trial("t9", "x", {"algorithm": "c"}, 9, "c", "failed", error=error))
    text = write_report(Sweep("s", name="x & y"), trials, tmp_path, format="html")["html"].read_text()
    page = Page(text)
    assert page.open == [] and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert "http:" not in text and "https:" not in text and "<script" not in text and "@import" not in text
    assert "<title>x &amp; y: sweep s</title>" in text and "<b>a" not in text and "<i>" not in text
    assert len(page.links) == 4  # curves and costs of each budget
    for link in page.links:
        assert base64.b64decode(link.partition(",")[2])[:4] == b"\x89PNG"
    assert len(page.tables) == 7 and "<i>a message" in page.tables[-1]
    assert not any("<b>a" in table and "|b|" in table for table in page.tables)
    assert text.count(f'<li class="caveat">&lt;b&gt;a: {CAVEAT}</li>') == 3
    assert (tmp_path / "costs-2.png").exists()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two algorithms and three seeds on the digits, recorded by real runs with the clipping laboratory, without Ray."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    sweep = SweepConfig(space={"algorithm": {"grid": ["fedavg", "fedsam"]}}, seeds=(42, 43, 44))
    base = RunConfig(
        fl={"num_clients": 3, "rounds": 2, "clipping_lab": True, "max_local_steps": 2},
        data={"name": "digits", "subset": 0.2},
        tracking={"uri": uri, "experiment": "e", "log_model": False},
    )
    cells = validate_space(base, sweep)
    study = open_study(uri, "e", "abcd1234", name="pair")
    described = Sweep("abcd1234", name="pair", axes=("algorithm",), config=base.to_dict())
    log_text(uri, study.run_id, described.to_json(), "sweep.json")
    plan = Plan("abcd1234", ("algorithm",), tuple(cells), {"tracking.uri": uri}, study.run_id)
    with tracked(study):
        results = [run_trial(plan, {"cell": number}, f"t{number:03d}") for number in range(6)]
    return {"uri": uri, "results": results, "parent": study.run_id}


def test_a_page_from_mlflow_has_costs_tests_and_the_first_trials_pictures(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    report = make_report("abcd1234", uri=recorded["uri"], out=tmp_path, format="html", target=0.01)
    plain, sharp = report["table"]
    results = recorded["results"]
    size = 4 * int(connect(recorded["uri"]).get_run(results[0].run_id).data.tags["num_parameters"])
    assert plain["upload_bytes_mean"] == 2 * 3 * size  # two rounds, three clients, one vector each
    batch = [sum(r.metrics["gradients"] for r in result.rounds) for result in results[:3]]
    assert plain["gradients_mean"] == sum(batch) / 3 and batch[0] == 2 * 3 * 2 * 32
    assert sharp["gradients_mean"] == 2 * plain["gradients_mean"]  # SAM takes two a step
    assert plain["reached"] == 3 and plain["rounds_to_target_mean"] == 1
    assert plain["seconds_mean"] == pytest.approx(sum(sum(r.seconds for r in x.rounds) for x in results[:3]) / 3)
    tested = [item["result"] for item in report["statistics"] if item["result"]]
    pairs = zip(results[:3], results[3:], strict=True)
    differences = [a.final["test_accuracy"] - b.final["test_accuracy"] for a, b in pairs]
    assert tested[0]["n"] == 3 and abs(tested[0]["difference"]) == pytest.approx(abs(sum(differences) / 3))
    text = Path(report["html"]).read_text()
    assert len(Page(text).links) == 4  # curves, costs, partition, update norms
    assert "no epsilon covers it" in text and "Update norms of trial t000" in text
    stored = {entry.path for entry in connect(recorded["uri"]).list_artifacts(recorded["parent"], "report")}
    assert "report/report.html" in stored


def test_the_command_prints_the_format_alone(
    recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["report", "abcd1234", "--uri", recorded["uri"]]
    found = {f: CliRunner().invoke(app, [*command, "--format", f]) for f in ("latex", "csv", "html")}
    assert [result.exit_code for result in found.values()] == [0, 0, 0]
    folder = tmp_path / "mlruns" / "reports" / "abcd1234"
    assert found["latex"].stdout == (folder / "report.tex").read_text()
    assert found["csv"].stdout == (folder / "report.csv").read_text() and "csv: " in found["csv"].stderr
    assert f"html: {folder / 'report.html'}" in found["html"].stdout and "<table" not in found["html"].stdout
    assert CliRunner().invoke(app, [*command, "--format", "pdf"]).exit_code == 2
    assert CliRunner().invoke(app, [*command, "--target", "1.5"]).exit_code == 2
