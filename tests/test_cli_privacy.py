"""`fl-lightning privacy epsilon` and `noise`: numbers, words, and refusals of one line."""

import json
import math
import subprocess
import sys
import time
from typing import Any

import pytest

from fl_lightning.cli import invoke
from fl_lightning.privacy import compose, epsilon, gaussian_epsilon_exact
from fl_lightning.privacy.calculator import needed
from fl_lightning.records import Release

DIGITS = ["--batch-size", "64", "--n", "1797", "--steps", "145", "--delta", "1e-4"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert invoke(["privacy", *arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


@pytest.mark.parametrize("target", ["0.1", "0.5", "1", "3", "8", "50", "500"])
def test_noise_meets_every_budget_closely_and_soon(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """CASES H23."""
    began = time.process_time()
    found = told(capsys, "noise", "--target-epsilon", target, *DIGITS)
    assert time.process_time() - began < 10
    assert 0.95 * float(target) <= found["epsilon"] <= float(target) == found["target_epsilon"]
    again = told(capsys, "epsilon", "--noise-multiplier", str(found["noise_multiplier"]), *DIGITS)
    assert again["epsilon"] == found["epsilon"] == found["readings"]["rdp"]
    release = Release(
        "gaussian", "sample", 1.0, found["noise_multiplier"], count=145, sampling="poisson", rate=64 / 1797
    )
    assert again["epsilon"] == pytest.approx(epsilon(compose([release]), 1e-4), rel=1e-12)


@pytest.mark.parametrize("target", [0.5, 8.0])
def test_noise_by_pld_is_less_and_still_within_the_budget(target: float) -> None:
    tight = needed(target, 145, delta=1e-4, rate=64 / 1797, accountant="pld")
    loose = needed(target, 145, delta=1e-4, rate=64 / 1797)
    assert 0.95 * target <= tight["epsilon"] == tight["readings"]["pld"] <= target < tight["readings"]["rdp"]
    assert tight["noise_multiplier"] < loose["noise_multiplier"]


def test_rate_above_one_counts_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    """CASES H22: n = 20, batch 32; and q = 1."""
    common = ["epsilon", "--noise-multiplier", "1.1", "--steps", "5", "--accountant", "all"]
    capped = told(capsys, *common, "--batch-size", "32", "--n", "20")
    assert (capped["rate"], capped["sampling"]) == (1.0, "full")
    assert 10.20 <= capped["epsilon"] <= 11.01 and 10.195 <= capped["readings"]["exact"] <= 10.205
    assert capped == told(capsys, *common) == told(capsys, *common, "--rate", "1.6", "--sampling", "poisson")
    second = told(capsys, "epsilon", "--noise-multiplier", "2", "--steps", "10", "--accountant", "all")
    assert 7.51 <= second["readings"]["exact"] <= second["readings"]["pld"] <= second["epsilon"] <= 8.09
    assert second["readings"]["pld"] <= second["readings"]["exact"] * 1.001


def test_replacing_a_unit_doubles_the_sensitivity(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--steps", "200", "--accountant", "all"]
    removed = told(capsys, "epsilon", "--noise-multiplier", "35.35", *steps)
    replaced = told(capsys, "epsilon", "--noise-multiplier", "70.7", "--adjacency", "replace_one", *steps)
    assert replaced["accountant_multiplier"] == removed["noise_multiplier"]
    assert replaced["readings"] == removed["readings"]
    assert removed["readings"]["exact"] == gaussian_epsilon_exact(35.35, 200, 1e-5)
    assert invoke(["privacy", "epsilon", "--noise-multiplier", "70.7", "--adjacency", "replace_one", *steps]) == 0
    words = capsys.readouterr().out
    assert "can move a clipped vector by 2C" in words and "noise / sensitivity = 35.35" in words


def test_sampling_follows_the_adjacency_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["epsilon", "--noise-multiplier", "2", "--steps", "100", "--rate", "0.1", "--accountant", "all"]
    assert told(capsys, *sampled)["sampling"] == "poisson"
    fixed = told(capsys, *sampled, "--adjacency", "replace_one")
    assert fixed["sampling"] == "without_replacement" and fixed["readings"]["pld"] is None
    assert fixed["readings"]["exact"] is None and fixed["epsilon"] > told(capsys, *sampled)["epsilon"]
    zeroed = told(capsys, *sampled, "--adjacency", "zero_out")
    assert zeroed["sampling"] == "poisson" and zeroed["readings"]["pld"] < zeroed["readings"]["rdp"]


def test_no_noise_is_no_privacy(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "epsilon", "--noise-multiplier", "0", "--steps", "3")
    assert found["epsilon"] is None and found["infinite"] is True
    assert invoke(["privacy", "epsilon", "--noise-multiplier", "0", "--steps", "3"]) == 0
    assert "Without noise there is no privacy." in capsys.readouterr().out


def test_words_say_what_an_epsilon_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["privacy", "epsilon", "--noise-multiplier", "0.9", "--steps", "300", "--rate", "0.02"]) == 0
    words = capsys.readouterr().out
    assert words.startswith("epsilon 3.301 at delta 1e-05\n300 Gaussian releases, each unit in each by itself")
    for part in ("q = 0.02", "one unit is added or removed (add_remove)", "Noise multiplier 0.9", "Renyi"):
        assert part in words


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("noise --target-epsilon 0 --steps 5", "--target-epsilon=0: needs a finite number above 0"),
        ("noise --target-epsilon -1 --steps 5", "--target-epsilon=-1: needs a finite number above 0"),
        ("noise --target-epsilon nan --steps 5", "--target-epsilon=nan: needs a finite number above 0"),
        ("noise --target-epsilon 1e-9 --steps 5", "cannot be met within 5 percent"),
        ("noise --target-epsilon 3", "Missing option '--steps'"),
        ("noise --target-epsilon 3 --steps 0", "--steps=0: needs a whole number >= 1"),
        ("noise --target-epsilon 3 --steps 2.5", "--steps=2.5: needs a whole number >= 1"),
        ("epsilon --noise-multiplier abc --steps 5", "--noise-multiplier=abc: needs a finite number of at least 0"),
        ("epsilon --noise-multiplier -1 --steps 5", "--noise-multiplier=-1: needs a finite number of at least 0"),
        ("epsilon --noise-multiplier 1 --steps 5 --delta 1", "--delta=1: needs a number below 1"),
        ("epsilon --noise-multiplier 1 --steps 5 --rate 0", "--rate=0: needs a finite number above 0"),
        ("epsilon --noise-multiplier 1 --steps 5 --rate 0.1 --n 9", "--rate=0.1: contradicts --batch-size and --n"),
        ("epsilon --noise-multiplier 1 --steps 5 --n 9", "--batch-size and --n: the rate is their ratio"),
        ("epsilon --noise-multiplier 1 --steps 5 --adjacency both", "--adjacency=both: not known; use one of add_"),
        ("epsilon --noise-multiplier 1 --steps 5 --rate .1 --sampling full", "--rate=0.1: would be ignored"),
        (
            "epsilon --noise-multiplier 1 --steps 5 --rate .1 --sampling poisson --adjacency replace_one",
            "sampling=poisson with adjacency=replace_one has no proof",
        ),
        (
            "epsilon --noise-multiplier 1 --steps 5 --rate .1 --adjacency replace_one --accountant pld",
            "sampling=without_replacement and adjacency=replace_one has no PLD accountant",
        ),
        ("plan fl.round=3", "fl.round: no such key; did you mean fl.rounds?"),
        ("plna", "No such command 'plna'"),
    ],
)
def test_bad_input_is_one_line(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["privacy", *command.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize("command", ["epsilon", "noise", "plan"])
def test_help_has_examples_and_loads_nothing_heavy(command: str) -> None:
    code = f"import sys; from fl_lightning.cli import invoke; invoke(['privacy', {command!r}, '--help'])"
    code += "; print('|', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.rpartition("|")
    assert f"Examples:\n    fl-lightning privacy {command} " in text
    assert not {"torch", "numpy", "scipy", "dp_accounting", "ray", "mlflow"} & set(modules.split())
    for line in text.splitlines():
        if line.startswith("    fl-lightning privacy") and command != "plan":
            assert invoke(line.split()[1:]) == 0  # the examples are true


def test_pld_and_exact_agree_where_both_are_known() -> None:
    from fl_lightning.privacy.calculator import spent

    found = spent(30.0, 200, delta=1e-5, accountant="pld")
    assert math.isclose(found["epsilon"], found["readings"]["exact"], rel_tol=1e-3)
    assert found["epsilon"] >= found["readings"]["exact"] * (1 - 1e-9)
