"""The command line through real processes: help, bad input, a run, its output."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning import RunConfig, run
from fl_lightning.cli import invoke
from fl_lightning.cli_output import write_json
from fl_lightning.terminal import display, duration, epsilon_text

CLI = [sys.executable, "-m", "fl_lightning.cli"]
COMMANDS = [[], ["run"], ["sweep"], ["report"], ["verify"], ["config"], ["data"], ["data", "prepare"], ["ui"]]
QUICK = ["fl.num_clients=3", "fl.rounds=2", "fl.max_local_steps=1"]


def cli(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([*CLI, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_and_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        f"import sys; from fl_lightning.cli import invoke; invoke({[*command, '--help']!r}); print('|', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.rpartition("|")
    assert text.startswith("Usage: fl-lightning")
    if command not in ([], ["data"]):
        assert f"Examples:\n    fl-lightning {' '.join(command)}" in text
    heavy = {"torch", "numpy", "ray", "mlflow", "hydra", "omegaconf", "lightning", "sklearn", "matplotlib"}
    assert not heavy & set(modules.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run --output /dev/null", "--output=/dev/null: is a device or a pipe"),
        ("run fl.num_client=5", "fl.num_client: no such key; did you mean fl.num_clients?"),
        (
            "run algorithm=fedavgg",
            "algorithm=fedavgg: no such option; did you mean fedavg? (options: ce_fedavg, dp_fedavg, ",
        ),
        ("run algorithm.local.lr=abc", "algorithm.local.lr=abc: needs a number > 0 (set on the command line)"),
        (
            "run fl.clients_per_round=99 fl.num_clients=10",
            "fl.clients_per_round=99: needs at most fl.num_clients=10; lower it, or raise fl.num_clients",
        ),
        ("run data=fashion_mnist data.root=/nowhere", "data.name=fashion_mnist: the Fashion-MNIST files are not in"),
        ("run fl.rounds=-1", "fl.rounds=-1: needs a whole number >= 1"),
        ("run -1", "No such option: -1"),
        ("run --quite", "No such option: --quite"),
        ("run --config none.yaml", "{cwd}/none.yaml: cannot be read: No such file or directory"),
        ("run --config-dir none", "--config-dir=none: no such folder"),
        ("run --output .", "--output=.: is a folder; give a file such as result.json"),
        ("run --output /proc/none/result.json", "--output=/proc/none/result.json: cannot write to /proc/none"),
        ("sweep sweep=dem", "sweep=dem: no such option; did you mean demo?"),
        (
            "sweep sweep=rho sweep.space.algorithm.local.rho={grid:[-1]}",
            "sweep axis algorithm.local.rho, value -1, cell [",
        ),
        ("config fl=3", "fl=3: needs a mapping of its settings"),
        ("config --keys privcy", "privcy: no such key; did you mean privacy"),
        ("data prepare mnis", "data=mnis: no such option; did you mean mnist?"),
        ("data prepare digits", "data.name=digits comes with scikit-learn and needs no files"),
        ("data prepare mnist fl.rounds=1", "fl.rounds=1: would be ignored; only data.root=DIR matters here"),
        ("ui --port 0", "Invalid value for '--port'"),
        ("rnu", "No such command 'rnu'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(command: str, message: str, tmp_path: Path) -> None:
    done = cli(*command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {message.replace('{cwd}', str(tmp_path))}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_traceback_only_on_request(tmp_path: Path) -> None:
    for done in (
        cli("run", "fl.num_client=5", "--debug", cwd=tmp_path),
        cli("run", "fl.num_client=5", cwd=tmp_path, FL_DEBUG="1"),
    ):
        assert done.returncode == 2
        assert done.stderr.startswith("Traceback (most recent call last):")
        assert done.stderr.splitlines()[-1].startswith("error: fl.num_client: no such key")


def test_a_fault_that_is_not_the_users_is_one_line_with_its_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FL_DEBUG", raising=False)
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        assert invoke(["config"]) == 1
    assert capsys.readouterr().err == "ValueError: I/O operation on closed file\n"


def test_a_reader_that_leaves_early_is_no_fault(tmp_path: Path) -> None:
    process = subprocess.Popen([*CLI, "config", "--keys"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 1)


def test_config_prints_what_it_loads(tmp_path: Path) -> None:
    first = cli("config", "algorithm=dp_fedsam", "algorithm.local.lr=1e-5", cwd=tmp_path)
    assert first.returncode == 0
    (tmp_path / "saved.yaml").write_text(first.stdout)
    assert cli("config", "--config", "saved.yaml", cwd=tmp_path).stdout == first.stdout
    assert "lr: 1.0e-05" in first.stdout


def test_a_run_in_a_pipe(tmp_path: Path) -> None:
    arguments = ["algorithm=dp_fedavg", "privacy.noise_multiplier=1", "fl.client_fraction=0.01", *QUICK]
    done = cli("run", *arguments, "--output", "new folder/result.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "new folder" / "result.json").read_text())
    lines = done.stdout.splitlines()
    assert lines[0] == f"run id: {result['run_id']}"
    assert lines[1] == "dp_fedavg on digits: 14,538 parameters, 3 clients, 2 rounds"
    for line, record in zip(lines[2:4], result["rounds"], strict=True):
        assert line.startswith(f"round {record['round']}/2  accuracy {record['test_accuracy']:.4f}  loss ")
        assert f"epsilon {epsilon_text(record['epsilon'])}" in line
        assert " clients/s" in line
    assert "eta " in lines[2]
    assert lines[-6].startswith(f"finished: accuracy {result['final']['test_accuracy']:.4f}, loss ")
    terms = "unit sample, delta 1e-05, adjacency add_remove, sampling poisson, trust model local"
    assert lines[-5] == f"PRIVATE: epsilon {epsilon_text(result['final']['epsilon'])} ({terms})"
    pld = next(row["total"] for row in result["final"]["privacy"]["readings"] if row["reading"] == "pld")
    assert lines[-4] == f"  other readings: pld {epsilon_text(pld)}" and pld < result["final"]["epsilon"]
    assert lines[-3] == f"weights sha256: {result['final']['weights_sha256'][:16]}"
    assert lines[-2].startswith("open it with: fl-lightning ui, then http://127.0.0.1:5000/#/experiments/")
    assert lines[-1] == f"result: {tmp_path}/new folder/result.json"
    assert "note: fl.client_fraction=0.01 of 3 clients is none: 1 client is sampled" in done.stderr
    assert set(result) >= {"run_id", "status", "badge", "config", "partition_sha256", "rounds", "final"}
    assert set(result["rounds"][0]) >= {"round", "cohort", "train_loss", "test_loss", "test_accuracy", "seconds"}
    assert [len(record["cohort"]) for record in result["rounds"]] == [1, 1]
    assert [path.name for path in (tmp_path / "new folder").iterdir()] == ["result.json"]
    assert RunConfig(**result["config"]).fl.rounds == 2


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*CLI, "run", "fl.rounds=100000", *QUICK[::2], "tracking.enabled=false"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("round 1/"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_sweep_and_its_report(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("space: {algorithm: {grid: [fedavg, fedsam]}}\nseeds: [1]\n")
    done = cli("sweep", "sweep=mine.yaml", *QUICK, "--output", "out/sweep.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert done.stdout.splitlines()[0] == f"sweep id: {result['sweep_id']}"
    assert [trial["algorithm"] for trial in result["trials"]] == ["fedavg", "fedsam"]
    assert len(result["table"]) == 2
    report = cli("report", result["sweep_id"], "--out", "tables", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "| fedsam " in report.stdout
    for line in report.stdout.splitlines()[-3:]:
        assert Path(line.split(": ", 1)[1]).parent == tmp_path / "tables"
        assert Path(line.split(": ", 1)[1]).is_file()
    missing = cli("report", "0000", cwd=tmp_path)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert result["sweep_id"] in missing.stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_run_on_a_terminal_keeps_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Terminal()
    config = RunConfig(fl={"num_clients": 3, "rounds": 3, "max_local_steps": 1}, tracking={"enabled": False})
    with display(screen) as observer:
        result = run(config, observers=[observer])
    text = screen.getvalue()
    assert text.startswith("run id: none (tracking.enabled=false)\n")
    assert f"3/3 accuracy {result.final['test_accuracy']:.4f}  loss {result.final['test_loss']:.4f}" in text
    assert " clients/s" in text
    assert "NOT PRIVATE: nothing was clipped or noised, no epsilon\n" in text
    assert "\x1b[?25l" in text, "the cursor is hidden while the bar moves"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "and comes back"


def test_a_bar_leaves_the_screen_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()

    def failing_run() -> None:
        with display(screen) as observer:
            observer.on_start({"run_id": "r", "num_parameters": 1, "clients": 1, "config": RunConfig().to_dict()})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_run()
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_json_is_whole_or_absent(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(file, {"clip": float("inf"), "cohort": (0, 1)})
    assert json.loads(file.read_text()) == {"clip": "inf", "cohort": [0, 1]}
    with pytest.raises(TypeError):
        write_json(file, {"broken": object()})
    assert json.loads(file.read_text())["clip"] == "inf"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_figures_in_words() -> None:
    assert epsilon_text(1.00001) == "1.001", "a printed epsilon never understates"
    assert epsilon_text(float("inf")) == "infinite"
    assert [duration(seconds) for seconds in (8.2, 200, 7500)] == ["8 s", "3 min 20 s", "2 h 5 min"]
