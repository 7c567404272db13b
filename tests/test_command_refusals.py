"""What a command cannot do ends in one line and exit code 2, and leaves nothing behind."""

import json
import math
import socket
from pathlib import Path

import pytest

from fl_lightning import RunConfig, run
from fl_lightning.cli import invoke


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "self.yaml").write_text("fl: &x {rounds: *x}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "algorithm.local.lr=1e300"], "algorithm.local.lr=1e+300: needs a number > 0, at most 1e+30"),
        (["run", "fl.batch_size=1e23"], "needs a whole number >= 1, at most 2147483647"),
        (["run", "--config", "self.yaml"], "self.yaml: a YAML alias in it contains itself"),
        (["run", "--output", "-"], "--output=-: needs a file"),
        (["sweep", "sweep=empty.yaml"], "empty.yaml: is empty, so the sweep would vary nothing"),
        (["report", "abc", "--uri", "sqlite:///absent.db"], "there is no such database"),
        (["ui", "--uri", "foo://place"], "tracking.uri=foo://place: only a database can be shown"),
    ],
)
def test_one_line_and_nothing_left(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    before = sorted(folder.iterdir())
    assert invoke(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_a_taken_port_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert invoke(["ui", "--port", str(port)]) == 2
    assert f"--port={port}: cannot be served" in capsys.readouterr().err


def test_an_infinite_epsilon_is_null_in_every_round_as_at_the_end() -> None:
    result = run(
        RunConfig(
            algorithm="dp_fedavg",
            privacy={"level": "update", "noise_multiplier": 0},
            fl={"rounds": 1},
            tracking={"enabled": False},
        )
    )
    assert result.rounds[0].epsilon == math.inf
    plain = json.loads(json.dumps(result.to_dict(), default=str))
    assert plain["rounds"][0]["epsilon"] is None and plain["final"]["epsilon"] is None
    assert plain["final"]["privacy"]["infinite"] is True and plain["badge"] == "NOT PRIVATE"
