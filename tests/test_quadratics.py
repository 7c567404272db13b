"""`fl-lightning verify quadratics`: the clipping paper's claims on real rounds, held to the reference numbers."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from golden_cases import assert_close, cases

from fl_lightning.algorithms.ce_fedavg import ce_fedavg
from fl_lightning.cli import invoke
from fl_lightning.errors import FLError
from fl_lightning.local.optimizers import sgd
from fl_lightning.verify.quadratics import (
    BOUNDS,
    CLAIM_23,
    STEPS,
    Claims,
    Rounds,
    clipped_point,
    difference_clipping,
    model_point,
    parabola,
    point,
)
from fl_lightning.verify.table import judge

FILE = "clipping.json"
CLAIMS = Claims()
"""Filled by the tests of its rows."""
REFERENCE = {
    1: (0, 0, 0, 0, 0.5),
    2: (0.02962, 0.02962, 0.02962, 0.19125, 0.5),
    5: (0.12393, 0.12393, 0.12393, 0.5, 0.5),
    10: (0.27149, 0.27149, 0.27149, 0.5, 0.5),
    50: (0.81602, 0.67824, 0.5, 0.5, 0.5),
    100: (1.09311, 0.66808, 0.5, 0.5, 0.5),
    math.inf: (13 / 9, 2 / 3, 0.5, 0.5, 0.5),
}
"""The table for Claim 2.3 at eta = 0.01 over the bounds infinity, 1, 0.5, 0.1, 0.02."""


@pytest.mark.parametrize("check", CLAIMS.checks(), ids=lambda check: check.name)
def test_row_passes(check: Any) -> None:
    row = judge(check)
    assert row.passed, row.fault
    assert row.contrast is None or row.contrast > 1e-3


def test_real_rounds_give_the_table() -> None:
    assert list(REFERENCE) == list(STEPS) and len(BOUNDS) == 5
    missing = [steps for steps in STEPS if (steps, BOUNDS[0]) not in CLAIMS.settled]
    for steps in missing:  # when this test runs by itself
        CLAIMS.claim_23(steps)
    for steps, row in REFERENCE.items():
        for c, expected in zip(BOUNDS, row, strict=True):
            assert CLAIMS.settled[steps, c] == pytest.approx(expected, abs=5e-6 if math.isfinite(steps) else 1e-10)
    text = CLAIMS.table()
    assert text[2].split() == ["1", "0.00000", "0.00000", "0.00000", "0.00000", "0.50000"]
    assert text[-1].split() == ["inf", "1.44444", "0.66667", "0.50000", "0.50000", "0.50000"]
    assert len(CLAIMS.to_list()) == 35
    json.dumps(CLAIMS.to_list(), allow_nan=False)


def test_clipping_hurts_with_one_step_and_helps_with_many() -> None:
    """The claim itself: at Q = 1 a small bound moves the point away from 0, at large Q each bound brings it nearer."""
    for steps, sign in ((1, 1), (100, -1)):
        errors = [clipped_point(CLAIM_23, 0.01, steps, c) for c in BOUNDS]
        assert all(sign * (after - before) >= -1e-12 for before, after in pairwise(errors))
        assert sign * (errors[-1] - errors[0]) > 0.4


DIFFERENCE = [case for case in cases(FILE, "ce_fedavg") if "Q" in case["inputs"]]


@pytest.mark.parametrize("case", DIFFERENCE, ids=lambda case: case["id"])
def test_closed_form_of_difference_clipping(case: dict) -> None:
    i, expected = case["inputs"], case["expected"]
    found = clipped_point(CLAIM_23, i.get("eta_l", 0.01), float(i["Q"]), float(i["c"]))
    assert_close(found, expected["x_inf"] if isinstance(expected, dict) else expected, case["tol"])


SETTLING = [case for case in DIFFERENCE if float(case["inputs"]["Q"]) <= 10 and case["inputs"]["eta_l"] >= 0.01]


@pytest.mark.parametrize("case", SETTLING[::5], ids=lambda case: case["id"])
def test_real_rounds_settle_at_the_reference_from_the_other_side(case: dict) -> None:
    i = case["inputs"]
    rounds = Rounds([parabola(a, b) for a, b in CLAIM_23], difference_clipping(i["eta_l"], float(i["c"])), i["Q"])
    x = rounds.settle(point(case["expected"]["x_inf"] - 0.3))
    assert_close(float(x), case["expected"]["x_inf"], case["tol"])


@pytest.mark.parametrize("case", cases(FILE, "model_clip"), ids=lambda case: case["id"])
def test_closed_form_of_model_clipping(case: dict) -> None:
    i = case["inputs"]
    assert_close(model_point(i["eta_l"], i["Q"], i["c"], i["k"]), case["expected"]["x_inf"], case["tol"])


def test_closed_form_at_claim_22() -> None:
    (case,) = (c for c in cases(FILE, "claim2_2") if "i" not in c["inputs"])
    c = case["inputs"]["c"]
    assert_close(clipped_point(CLAIM_23, c / 6, case["inputs"]["Q"], c), case["expected"], case["tol"])


def test_rounds_that_do_not_settle_are_told() -> None:
    rounds = Rounds([parabola(36.0, 1.0)], ce_fedavg(sgd(0.06), clip=math.inf), 1)  # 0.06 > 2/36
    with pytest.raises(FLError, match="not settled after 50 rounds"):
        rounds.settle(point(0.0), most=50)


# Code that is wrong


def passed(*names: str) -> list[bool]:
    """Whether the rows pass."""
    checks = {check.name: check for check in Claims().checks()}
    return [judge(checks[name]).passed for name in names]


def test_clipping_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.uplink.clip_only.clip", lambda v, bound: v)
    assert passed("claim-2.2/huber", "claim-2.3/Q-10") == [False, False]


def test_clipping_of_each_coordinate_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a line both are one; in three dimensions they part where clients stay clipped."""
    monkeypatch.setattr("fl_lightning.uplink.clip_only.clip", lambda v, bound: v.clamp(-bound, bound))
    assert passed("claim-2.2/huber", "claim-2.2/stationarity") == [True, False]


def test_weights_that_are_not_equal_give_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fl_lightning.server import aggregate

    def first_counts_twice(messages: Any) -> list[float]:
        return [2.0] + [1.0] * (len(messages) - 1)

    monkeypatch.setattr("fl_lightning.algorithms.model_clipping.mean", lambda prior: aggregate.mean(first_counts_twice))
    assert invoke(["verify", "claim-2.1/model-clipping", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["passed"]) for row in found["rows"]] == [("claim-2.1/model-clipping", False)]


def test_command_prints_rows_and_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.verify.quadratics.STEPS", (10,))
    monkeypatch.setattr("fl_lightning.verify.quadratics.BOUNDS", (math.inf, 0.5))
    assert invoke(["verify", "quadratics"]) == 0
    out = capsys.readouterr().out
    assert "pass  claim-2.3/Q-10" in out
    assert "   10   0.27149   0.27149" in out
    assert "all 8 rows pass" in out
    assert invoke(["verify", "claim-2.3/Q-10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(cell["Q"], cell["c"]) for cell in found["claim_2_3"]] == [(10, "inf"), (10, 0.5)]
    assert all(isinstance(cell["x_inf"], float) for cell in found["claim_2_3"])


def test_rounds_are_those_of_the_library() -> None:
    """One round by hand: mean of clip(s_i (b_i - x), c)."""
    rounds = Rounds([parabola(a, b) for a, b in CLAIM_23], difference_clipping(0.01, 0.1), 10)
    x, sent = rounds.once(point(0.2))
    moves = [max(-0.1, min(0.1, (1 - (1 - 0.01 * a) ** 10) * (b - 0.2))) for a, b in CLAIM_23]
    assert [float(m.vectors["delta"]) for m in sent] == pytest.approx(moves, rel=1e-12)
    assert torch.allclose(x, point(0.2 + sum(moves) / 3), rtol=1e-14)
