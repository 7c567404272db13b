"""The clipping laboratory: norms, fractions, cosines and bias terms of real rounds, and where they are kept."""

import csv
import io
import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import digit_side, start
from PIL import Image

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.ce_fedavg import ce_fedavg
from fl_lightning.analysis.norms import PREFIX, ClippingLab, UpdateNorm, alpha
from fl_lightning.analysis.norms_figure import draw_norms
from fl_lightning.build import prepare
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.federation import fit, initial
from fl_lightning.local.optimizers import sgd
from fl_lightning.records import Aggregate, Message, RunResult
from fl_lightning.tracking import connect

UPDATE = {"level": "update", "clip_norm": 0.25, "noise_multiplier": 0.1}


def config(algorithm: Any, lab: bool = True, **more: Any) -> RunConfig:
    fl = {"num_clients": 4, "rounds": 2, "batch_size": 8, "max_local_steps": 3, "clipping_lab": lab}
    more = {"tracking": {"enabled": False}, "engine": {"kind": "debug", "device": "cpu"}, **more}
    partition = {"kind": "dirichlet", "alpha": 0.5, "min_samples": 6}
    return RunConfig(data={"name": "digits", "subset": 0.1}, partition=partition, fl=fl, algorithm=algorithm, **more)


def found(result: RunResult, round: int = 1) -> dict[str, float]:
    """The laboratory's metrics of a round, by their short names."""
    metrics = result.rounds[round - 1].metrics
    return {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}


def gathered(run_config: RunConfig) -> tuple[ClippingLab, list[list[Message]]]:
    """The laboratory of a run, and its messages."""
    prepared = prepare(run_config)
    lab, sent = ClippingLab(), []
    for _, _, messages in fit(
        initial(prepared.objective.initial, prepared.objective.buffers()),
        rounds=run_config.fl.rounds,
        cohort_of=lambda round: prepared.cohorts[round - 1],
        algorithm=prepared.algorithm,
        engine=prepared.engine(),
        evaluate=lambda server: None,
        inspect=lab.inspect,
    ):
        sent.append(messages)
    return lab, sent


# The numbers


def message(client: int, raw: list[float], bound: float, samples: int = 1) -> Message:
    """A client that clips `raw` to `bound`, by hand."""
    update = torch.tensor(raw)
    norm = float(update.norm())
    clipped = update * min(1.0, bound / norm)
    oracle = {"clip": bound, "clipped": float(norm > bound)}
    vectors = {"update": update, "clipped": clipped}
    return Message(client, samples, 1, {"delta": clipped}, oracle=oracle, oracle_vectors=vectors)


def test_two_clients_by_hand() -> None:
    """Norms 5 and 0.5, bound 1, weights 1/4 and 3/4: alpha 0.2 and 1, so alphabar 0.6 and mean deviation 0.4.

    Raw sum (3/4, 1) + (3/8, 0) = (1.125, 1); clipped (0.15, 0.2) + (0.375, 0) = (0.525, 0.2).
    """
    lab = ClippingLab()
    messages = [message(3, [3.0, 4.0], 1.0, 10), message(5, [0.5, 0.0], 1.0, 30)]
    metrics = lab.inspect(1, messages, Aggregate({"delta": torch.zeros(2)}, (0.25, 0.75)))
    raw, clipped = (1.125, 1.0), (0.525, 0.2)
    dot = raw[0] * clipped[0] + raw[1] * clipped[1]
    assert metrics == pytest.approx(
        {
            PREFIX + "norm_min": 0.5,
            PREFIX + "norm_q1": 1.625,
            PREFIX + "norm_median": 2.75,
            PREFIX + "norm_q3": 3.875,
            PREFIX + "norm_max": 5.0,
            PREFIX + "norm_mean": 2.75,
            PREFIX + "norm_sd": 2.25,
            PREFIX + "fraction": 0.5,
            PREFIX + "alpha_mean": 0.6,
            PREFIX + "alpha_deviation": 0.4,
            PREFIX + "bound_mean": 1.0,
            PREFIX + "cosine": dot / (math.hypot(*raw) * math.hypot(*clipped)),
            PREFIX + "norm_ratio": math.hypot(*clipped) / math.hypot(*raw),
        },
        rel=1e-6,
    )
    assert [(n.client, n.num_samples, n.clipped) for n in lab.norms] == [(3, 10, True), (5, 30, False)]


def test_equal_norms_have_no_bias_however_small_the_bound() -> None:
    lab = ClippingLab()
    messages = [message(0, [3.0, 4.0], 0.01), message(1, [4.0, 3.0], 0.01), message(2, [-5.0, 0.0], 0.01)]
    lab.inspect(1, messages, Aggregate({"delta": torch.zeros(2)}, (1 / 3,) * 3))
    assert lab.rounds[1]["alpha_deviation"] == pytest.approx(0, abs=1e-12)
    assert lab.rounds[1]["cosine"] == pytest.approx(1, rel=1e-6)
    assert lab.rounds[1]["fraction"] == 1


@pytest.mark.parametrize(
    ("norm", "bound", "expected"),
    [
        (2.0, 0.5, 0.25),
        (0.5, 0.5, 1.0),
        (0.0, 0.5, 1.0),
        (7.0, math.inf, 1.0),
        (math.inf, 0.5, 0.0),
        (math.nan, 1, 0.0),
    ],
)
def test_alpha(norm: float, bound: float, expected: float) -> None:
    assert alpha(norm, bound) == expected


def test_idle_clients_and_empty_rounds_are_left_out() -> None:
    lab = ClippingLab()
    idle = Message(0, 0, 0, {"delta": torch.zeros(2)})
    assert lab.inspect(1, [idle], Aggregate({}, ())) == {}
    lab.inspect(2, [idle, message(1, [3.0, 4.0], 1.0)], Aggregate({"delta": torch.zeros(2)}, (0.0, 1.0)))
    assert [(n.round, n.client) for n in lab.norms] == [(2, 1)]
    assert lab.rounds[2]["cosine"] == pytest.approx(1)


def test_an_update_that_is_not_finite_shows() -> None:
    lab = ClippingLab()
    broken = torch.tensor([math.nan, 1.0])
    vectors = {"update": broken, "clipped": torch.zeros(2)}
    diverged = Message(0, 1, 1, {"delta": torch.zeros(2)}, oracle={"clip": 1.0, "clipped": 0.0}, oracle_vectors=vectors)
    lab.inspect(1, [diverged, message(1, [0.3, 0.4], 1.0)], Aggregate({"delta": torch.zeros(2)}, (0.5, 0.5)))
    assert (lab.norms[0].clipped, lab.norms[0].alpha) == (True, 0.0)
    assert math.isnan(lab.rounds[1]["norm_mean"])
    assert lab.rounds[1]["fraction"] == 0.5


# Real rounds


def test_cosine_is_that_of_the_round_with_and_without_clipping() -> None:
    """The server's step under c = 0.2 against its step under c = infinity, from the same model."""
    steps = []
    for bound in (0.2, math.inf):
        lab, sent = gathered(config({"name": "ce_fedavg", "local": {"clip": bound}}))
        steps.append(torch.stack([m.vectors["delta"].double() for m in sent[0]]).mean(0))
        if bound == 0.2:
            metrics = lab.rounds[1]
    clipped, raw = steps
    assert metrics["cosine"] == pytest.approx(float(clipped @ raw / (clipped.norm() * raw.norm())), abs=1e-6)
    assert metrics["norm_ratio"] == pytest.approx(float(clipped.norm() / raw.norm()), rel=1e-5)
    assert 0.5 < metrics["cosine"] < 1 - 1e-4
    assert lab.rounds[1]["cosine"] == pytest.approx(1)
    assert lab.rounds[1]["alpha_mean"] == 1


def test_norms_are_raw_under_noise_and_bounds_are_each_clients_own() -> None:
    privacy = {**UPDATE, "noise_multiplier": 2.0}
    lab, sent = gathered(config("sam_adpfl", privacy=privacy))
    free, _ = gathered(config({"name": "sam_adpfl", "sharpness": {"noise_rule": "constant"}}, privacy=UPDATE))
    firsts = [[n.update_norm for n in each.norms if n.round == 1] for each in (lab, free)]
    assert firsts[0] == firsts[1]  # whatever the noise
    assert len({n.bound for n in lab.norms}) > 2
    for norm, m in zip(lab.norms[:4], sent[0], strict=True):
        assert norm.alpha == pytest.approx(min(1.0, norm.bound / norm.update_norm))
        assert float(m.oracle_vectors["clipped"].norm()) == pytest.approx(min(norm.bound, norm.update_norm), rel=1e-5)
        assert float(m.vectors["delta"].norm()) > 10 * norm.update_norm


@pytest.mark.parametrize(
    ("algorithm", "privacy"),
    [("fedavg", {}), ("scaffold", {}), ("dp_fedavg", {"level": "sample", "noise_multiplier": 1})],
)
def test_updates_without_a_bound_have_norms_only(algorithm: str, privacy: dict[str, Any]) -> None:
    result = run(config(algorithm, **({"privacy": privacy} if privacy else {})))
    metrics = found(result, 2)
    assert set(metrics) == {f"norm_{name}" for name in ("min", "q1", "median", "q3", "max", "mean", "sd")}
    assert metrics["norm_min"] <= metrics["norm_median"] <= metrics["norm_max"]
    assert result.rounds[1].metrics["upload_norm/max"] == pytest.approx(metrics["norm_max"])


def test_model_clipping_has_a_fraction_and_a_cosine_but_no_alpha() -> None:
    metrics = found(run(config({"name": "model_clipping", "local": {"clip": 3.0}})))
    assert metrics["fraction"] == 1
    assert metrics["cosine"] < 0.9
    assert not any(name.startswith(("alpha", "bound")) for name in metrics)


def test_learned_weights_have_a_laboratory_too() -> None:
    metrics = found(run(config("dp_fedlaw", privacy=UPDATE)))
    assert 0 < metrics["cosine"] <= 1
    assert metrics["alpha_mean"] < 1


def test_the_laboratory_changes_no_result() -> None:
    """Neither weights nor badge nor epsilon nor any other metric."""
    on, off = (run(config("dp_fedavg", lab, privacy=UPDATE)) for lab in (True, False))
    assert found(on) and not found(off)
    assert (on.badge, on.final) == (off.badge, off.final)
    assert on.badge == "PRIVATE"
    for with_lab, without in zip(on.rounds, off.rounds, strict=True):
        plain = {name: value for name, value in with_lab.metrics.items() if not name.startswith(PREFIX)}
        assert plain == without.metrics
        assert with_lab.metrics[PREFIX + "fraction"] == without.metrics["oracle/clipped"]
        assert with_lab.metrics[PREFIX + "norm_mean"] == pytest.approx(without.metrics["oracle/update_norm"])
    assert "no epsilon covers them" in on.rounds[0].notes[0]
    assert not on.rounds[1].notes and not off.rounds[0].notes


def test_raw_vectors_come_from_worker_processes() -> None:
    alone, shared = (
        run(config("dp_fedavg", privacy=UPDATE, engine={"kind": "lightning", "device": "cpu", "workers": workers}))
        for workers in (1, 2)
    )
    assert [found(shared, r) for r in (1, 2)] == [found(alone, r) for r in (1, 2)]
    assert "cosine" in found(shared)


def test_raw_vectors_are_kept_only_when_asked_for() -> None:
    side = digit_side(ce_fedavg(sgd(0.1), clip=0.1), (20, 30))
    steps = fit(
        start(side),
        rounds=1,
        cohort_of=lambda r: (0, 1),
        algorithm=side.algorithm,
        engine=LightningEngine(side),
        evaluate=lambda server: None,
    )
    (messages,) = [sent for _, _, sent in steps]
    assert all(m.oracle_vectors == {} for m in messages)
    assert all(m.oracle["clip"] == 0.1 for m in messages)


# Where it is kept


def test_artifacts_and_metrics_are_tracked(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/store.db"
    tracking = {"uri": uri, "experiment": "lab"}
    result = run(config({"name": "ce_fedavg", "local": {"clip": 0.2}}, tracking=tracking))
    client = connect(uri)
    kept = Path(client.download_artifacts(result.run_id, "clipping", str(tmp_path)))
    assert sorted(path.name for path in kept.iterdir()) == ["norms.csv", "norms.png"]
    rows = list(csv.DictReader((kept / "norms.csv").open()))
    assert list(rows[0]) == [entry.name for entry in fields(UpdateNorm)]
    assert [(row["round"], row["client"]) for row in rows] == [(str(r), str(k)) for r in (1, 2) for k in range(4)]
    for round in (1, 2):
        some = [row for row in rows if row["round"] == str(round)]
        norms = np.array([float(row["update_norm"]) for row in some])
        factors = np.minimum(1, 0.2 / norms)
        assert [float(row["alpha"]) for row in some] == pytest.approx(factors, rel=1e-6)
        assert [row["clipped"] == "True" for row in some] == (norms > 0.2).tolist()
        metrics = found(result, round)
        assert metrics["alpha_mean"] == pytest.approx(factors.mean())
        assert metrics["alpha_deviation"] == pytest.approx(np.abs(factors - factors.mean()).mean())
        assert metrics["norm_q1"] == pytest.approx(np.quantile(norms, 0.25))
        assert metrics["norm_sd"] == pytest.approx(norms.std())
    history = client.get_metric_history(result.run_id, "oracle/clipping/cosine")
    assert [point.value for point in history] == [found(result, r)["cosine"] for r in (1, 2)]
    with Image.open(kept / "norms.png") as picture:
        assert picture.size == (1650, 990)
    json.dumps(result.to_dict(), allow_nan=False)
    without = run(config("fedavg", lab=False, tracking=tracking))
    assert "clipping" not in [item.path for item in client.list_artifacts(without.run_id)]


def test_an_infinite_bound_is_written_as_such() -> None:
    lab, _ = gathered(config({"name": "ce_fedavg", "local": {"clip": math.inf}}))
    rows = list(csv.DictReader(io.StringIO(lab.to_csv())))
    assert {(row["bound"], row["clipped"], row["alpha"]) for row in rows} == {("inf", "False", "1.0")}
    assert "bound_mean" not in lab.rounds[1]


# The picture


def norm(round: int, client: int, value: float, bound: float | None) -> UpdateNorm:
    factor = None if bound is None else alpha(value, bound)
    return UpdateNorm(round, client, 1, 1, value, bound, None if factor is None else factor < 1, factor)


def colours(path: Path) -> set[tuple[int, int, int]]:
    with Image.open(path) as picture:
        return set(picture.convert("RGB").get_flattened_data())


KEPT, CLIPPED, BOUND = (0, 114, 178), (213, 94, 0), (0, 0, 0)


@pytest.mark.parametrize("rounds", [1, 5, 60])
def test_picture_shows_norms_bound_and_what_was_clipped(rounds: int, tmp_path: Path) -> None:
    norms = [norm(r, k, 0.1 * (k + 1) * (1 + r / 60), 0.5) for r in range(1, rounds + 1) for k in range(10)]
    found = {r: {"fraction": 0.5, "cosine": 0.9} for r in range(1, rounds + 1)}
    seen = colours(draw_norms(norms, found, tmp_path / "norms.png"))
    assert {KEPT, CLIPPED, BOUND} <= seen


def test_picture_without_a_bound_has_neither_bound_nor_clipped_marks(tmp_path: Path) -> None:
    seen = colours(draw_norms([norm(1, k, k + 1.0, None) for k in range(5)], {1: {}}, tmp_path / "norms.png"))
    assert KEPT in seen
    assert CLIPPED not in seen


@pytest.mark.parametrize(
    "values", [[], [1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [math.nan], [1e-6, 1.0, 1e6], [math.inf, 1.0]]
)
def test_picture_of_odd_rounds(values: list[float], tmp_path: Path) -> None:
    norms = [norm(1, k, value, 1.0) for k, value in enumerate(values)]
    assert draw_norms(norms, {1: {}}, tmp_path / "made" / "norms.png").stat().st_size > 1000
