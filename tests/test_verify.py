"""`fl-lightning verify`: every row passes on the code as it is, and fails on code that is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import methods
from fl_lightning.cli import invoke
from fl_lightning.config.algorithms import DP_ALGORITHMS
from fl_lightning.errors import FLError
from fl_lightning.local import transforms
from fl_lightning.verify.checks import algorithm_names, all_checks
from fl_lightning.verify.identities import PAIRS
from fl_lightning.verify.table import Check, Found, chosen, judge, line, report

CHECKS = {check.name: check for check in all_checks()}


@pytest.mark.parametrize("name", CHECKS)
def test_row_passes(name: str) -> None:
    row = judge(CHECKS[name])
    assert row.passed, row.fault
    assert row.difference is not None and row.difference <= row.tolerance


def test_rows_cover_the_schema() -> None:
    assert len(CHECKS) == len(all_checks())
    assert {"fedavg", "fedprox", "scaffold", "fedlaw", "fedsam", "sam_afl", "sam_adpfl"} <= set(algorithm_names())
    for name in algorithm_names():
        assert [c for c in CHECKS if c.startswith(f"{name}/by-hand")], name
        levels = ("/update", "/sample") if name in DP_ALGORITHMS else ("",)
        for suffix in levels:
            assert CHECKS[f"{name}/engines{suffix}"].tolerance == 0
            assert not suffix or f"{name}/free{suffix}" in CHECKS


def test_a_new_algorithm_without_rows_of_its_own_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.ALGORITHMS, "unheard_of", methods.ALGORITHMS["fedavg"])
    rows = {row.name: row for row in map(judge, chosen(all_checks(), "unheard_of"))}
    assert set(rows) == {"unheard_of/by-hand", "unheard_of/engines"}
    assert not any(row.passed for row in rows.values())
    assert "has no reference" in str(rows["unheard_of/by-hand"].fault)


def test_a_missing_algorithm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(methods.ALGORITHMS, "fednova")
    rows = [judge(check) for check in chosen(all_checks(), "fednova")]
    assert len(rows) >= 5
    assert not any(row.passed for row in rows)


# Code that is wrong


def negated(module: Any, name: str) -> Callable[..., Any]:
    """The function with its result's sign turned."""
    right = getattr(module, name)
    return lambda *args, **more: -right(*args, **more)


def pulled_away(mu: float) -> transforms.GradTransform:
    """FedProx with the sign of its term turned."""
    return lambda grad, ctx: lambda w, batch: grad(w, batch) - mu * (w - ctx.anchor)


def uncontrolled() -> transforms.GradTransform:
    """SCAFFOLD with both corrections the wrong way round."""

    def transform(grad: transforms.GradFn, ctx: Any) -> transforms.GradFn:
        c, c_i = ctx.server.get("c"), ctx.state.get("c_i")
        turned = (0 if c_i is None else c_i) - (0 if c is None else c)
        return lambda w, batch: grad(w, batch) + turned

    return transform


MODULES = {
    "fl_lightning.local.transforms.ascent": ["fedsam/by-hand", "sam_afl/by-hand", "dp_fedsam/by-hand/sample"],
    "fl_lightning.local.transforms.clipped_sum": ["dp_fedavg/by-hand/one-step", "dp_fedavg/free/sample"],
    "fl_lightning.uplink.clip_noise.clip": ["dp_fedavg/by-hand/update", "dp_fedavg/free/update"],
    "fl_lightning.uplink.clip_only.clip": ["ce_fedavg/by-hand", "ce_fedavg/bound-inf", "model_clipping/bound-inf"],
}


@pytest.mark.parametrize(("target", "row"), [(target, row) for target, rows in MODULES.items() for row in rows])
def test_a_wrong_sign_fails_the_row(target: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    module, _, name = target.rpartition(".")
    monkeypatch.setattr(target, negated(import_module(module), name))
    assert judge(CHECKS[row]).fault == "differs"


@pytest.mark.parametrize(
    ("target", "wrong", "row"),
    [
        ("fl_lightning.algorithms.fedprox.prox", pulled_away, "fedprox/by-hand"),
        ("fl_lightning.algorithms.scaffold.control_variate", uncontrolled, "scaffold/by-hand"),
    ],
)
def test_a_wrong_sign_gives_exit_code_1(
    target: str, wrong: Any, row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, wrong)
    assert invoke(["verify", row]) == 1
    out = capsys.readouterr().out
    assert f"FAIL  {row}" in out
    assert out.splitlines()[-1].startswith("1 of 1 rows FAIL in ") and out.rstrip().endswith(row)


def test_an_engine_that_differs_in_the_last_bit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from fl_lightning.client.module import ClientModule

    right = ClientModule._advance
    monkeypatch.setattr(
        ClientModule, "_advance", lambda self, d: right(self, torch.nextafter(d, torch.full_like(d, 9.0)))
    )
    row = judge(CHECKS["fedavg/engines"])
    assert not row.passed
    assert 0 < (row.difference or 0) < 1e-13


def test_a_setting_that_is_not_connected_fails_although_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(optimizer: Any, *, rho: float, server_lr: float = 1.0, prior: Any = None) -> Any:
        return methods.fedavg(optimizer, server_lr=server_lr, prior=prior)

    monkeypatch.setitem(methods.ALGORITHMS, "fedsam", deaf)
    row = judge(CHECKS["fedsam/rho-0"])
    assert row.difference == 0
    assert not row.passed
    assert "changes nothing" in str(row.fault)


def test_a_federation_that_does_not_train_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.verify.federations.fit", lambda start, **more: iter([(start, None, [])]))
    assert "nothing was trained" in str(judge(CHECKS["fedavg/engines"]).fault)


# Rows and their print


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (Found(0.0), None),
        (Found(1e-12), None),
        (Found(2e-12), "differs"),
        (Found(math.nan), "differs"),
        (Found(math.inf), "differs"),
        (Found(0.0, 0.1), None),
        (Found(0.0, 0.0), "the setting that should matter changes nothing: 0.0e+00"),
        (Found(0.0, math.nan), "the setting that should matter changes nothing: nan"),
    ],
)
def test_judgement(found: Found, fault: str | None) -> None:
    row = judge(Check("name", "left = right", lambda: found))
    assert (row.passed, row.fault) == (fault is None, fault)
    json.dumps(report([row]), allow_nan=False)


def test_an_error_in_a_check_is_told_in_its_row() -> None:
    def broken() -> Found:
        raise FLError("first line\nsecond line")

    row = judge(Check("name", "left = right", broken))
    assert row.difference is None and not row.passed
    assert line(row, 6) == "FAIL  name          -  1e-12  left = right  [FLError: first line second line]"


def test_names_select_whole_parts() -> None:
    names = [check.name for check in chosen(list(CHECKS.values()), "fedavg")]
    assert names == ["fedavg/by-hand", "fedavg/engines"]
    assert len(chosen(list(CHECKS.values()), "free")) == 2 * len(DP_ALGORITHMS)
    assert chosen(list(CHECKS.values()), "fed") == []
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)


# The command


def test_json_and_no_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke(["verify", "fedprox", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert [row["name"] for row in found["rows"]] == ["fedprox/mu-0", "fedprox/by-hand", "fedprox/engines"]
    for row in found["rows"]:
        assert row["passed"] is True
        assert 0 <= row["difference"] <= row["tolerance"]
    assert found["rows"][0]["contrast"] > 1e-6
    assert not list(tmp_path.iterdir())  # nothing is tracked


def test_bad_name_is_the_users_to_mend(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["verify", "fedsm"]) == 2
    assert capsys.readouterr().err == "error: verify fedsm: no such row; did you mean fedsam?\n"
    assert invoke(["verify", "xyz"]) == 2
    assert capsys.readouterr().err == "error: verify xyz: no such row; `fl-lightning verify` lists the rows\n"
    assert invoke(["verify", "--jsn"]) == 2
