"""Whole runs on real data: determinism, records, JSON, badge."""

import json
import math
from pathlib import Path

import pytest

from fl_lightning import RunConfig, run
from fl_lightning.errors import ConfigError
from fl_lightning.records import RunResult

SMALL = {"num_clients": 6, "clients_per_round": 3, "rounds": 3, "batch_size": 32}


def small(**changes: object) -> RunConfig:
    base = {"fl": SMALL, "partition": {"kind": "dirichlet", "alpha": 0.5}, "tracking": {"enabled": False}}
    return RunConfig(**{**base, **changes})


def sha(result: RunResult) -> str:
    return result.final["weights_sha256"]


def test_same_seed_same_bits_for_any_engine_and_workers() -> None:
    first = run(small())
    again = run(small())
    debug = run(small(engine={"kind": "debug"}))
    spread = run(small(engine={"workers": 4}))
    for other in (again, debug, spread):
        assert sha(other) == sha(first)
        assert other.partition_sha256 == first.partition_sha256
        assert [r.cohort for r in other.rounds] == [r.cohort for r in first.rounds]
        assert [r.test_accuracy for r in other.rounds] == [r.test_accuracy for r in first.rounds]


def test_another_seed_samples_other_clients() -> None:
    one, two = run(small(seed=1)), run(small(seed=2))
    assert sha(one) != sha(two)
    assert one.partition_sha256 != two.partition_sha256
    assert [r.cohort for r in one.rounds] != [r.cohort for r in two.rounds]


def test_seed_alone_fixes_the_cohorts() -> None:
    assert [r.cohort for r in run(small(algorithm="fedsam")).rounds] == [r.cohort for r in run(small()).rounds]


def test_result_is_json_with_the_promised_fields() -> None:
    result = run(small(fl={**SMALL, "eval_every": 2}))
    data = json.loads(json.dumps(result.to_dict()))
    assert {"run_id", "status", "badge", "config", "partition_sha256", "rounds", "final"} <= set(data)
    assert data["status"] == "finished"
    assert data["badge"] == "NOT PRIVATE"
    assert [r["round"] for r in data["rounds"]] == [1, 2, 3]
    assert [r["test_accuracy"] is None for r in data["rounds"]] == [True, False, False]
    for entry in data["rounds"]:
        assert {"round", "cohort", "train_loss", "test_loss", "test_accuracy", "seconds"} <= set(entry)
        assert len(entry["cohort"]) == 3
    assert set(data["final"]) >= {"test_accuracy", "test_loss", "weights_sha256", "epsilon"}
    assert data["final"]["epsilon"] is None
    assert RunConfig(**data["config"]) == small(fl={**SMALL, "eval_every": 2})


@pytest.mark.parametrize("algorithm", ["dp_fedavg", "dp_fedsam"])
@pytest.mark.parametrize("level", ["sample", "update"])
def test_target_epsilon_is_met_and_never_exceeded(algorithm: str, level: str) -> None:
    result = run(small(algorithm=algorithm, privacy={"level": level, "target_epsilon": 4.0}))
    epsilons = [record.epsilon for record in result.rounds]
    assert epsilons == sorted(epsilons)
    assert 0.95 * 4.0 <= result.final["epsilon"] <= 4.0
    assert result.final["epsilon"] == epsilons[-1]
    assert result.badge == "PRIVATE"
    facts = result.final["privacy"]
    assert facts["unit"] == {"sample": "sample", "update": "client"}[level]
    assert facts["delta"] == 1e-5
    assert facts["adjacency"] == {"sample": "add_remove", "update": "replace_one"}[level]


def test_no_noise_is_no_privacy() -> None:
    result = run(small(algorithm="dp_fedavg", privacy={"level": "update", "noise_multiplier": 0.0}))
    assert result.badge == "NOT PRIVATE"
    assert result.final["epsilon"] is None
    assert result.final["privacy"]["infinite"] is True
    json.dumps(result.to_dict(), allow_nan=True)


def test_update_level_matches_the_exact_gaussian() -> None:
    """Participation is what counts: three of six clients a round, so the worst client pays for its own visits alone."""
    from fl_lightning.privacy import gaussian_epsilon_exact

    privacy = {"level": "update", "noise_multiplier": 4.0, "adjacency": "zero_out"}
    result = run(small(algorithm="dp_fedavg", privacy=privacy))
    visits = [client for record in result.rounds for client in record.cohort]
    most = max(visits.count(client) for client in set(visits))
    exact = gaussian_epsilon_exact(4.0, most, 1e-5)
    assert exact <= result.final["epsilon"] <= 1.15 * exact


def test_cohort_schedule_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "cohorts.json"
    path.write_text("[[5, 0], [1], [2, 3, 4]]")
    fl = {**SMALL, "cohort_schedule": str(path)}
    del fl["clients_per_round"]
    result = run(small(fl=fl))
    assert [r.cohort for r in result.rounds] == [(5, 0), (1,), (2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1]]", "fl.rounds=3"),
        ("[[0], [1], [2], [3]]", "found 4"),
        ("[[0], [], [1]]", "round 2 is \\[\\]"),
        ("[[0], [6], [1]]", "round 2 is \\[6\\]"),
        ("[[0], [1, 1], [1]]", "round 2 is \\[1, 1\\]"),
        ("[[0], ['a'], [1]]", "cannot be read as JSON"),
    ],
)
def test_bad_schedules_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cohorts.json"
    path.write_text(text)
    fl = {**SMALL, "cohort_schedule": str(path)}
    del fl["clients_per_round"]
    with pytest.raises(ConfigError, match=message):
        run(small(fl=fl))


def test_one_client_runs() -> None:
    result = run(RunConfig(fl={"num_clients": 1, "rounds": 1}, tracking={"enabled": False}))
    assert result.rounds[0].cohort == (0,)
    assert math.isfinite(result.final["test_loss"])


def test_precisions_train() -> None:
    wide = run(small(engine={"precision": "fp64"}))
    rough = run(small(engine={"precision": "bf16"}))
    plain = run(small())
    assert len({sha(wide), sha(rough), sha(plain)}) == 3
    assert wide.final["test_loss"] == pytest.approx(plain.final["test_loss"], rel=1e-3)


@pytest.mark.realdata
@pytest.mark.slow
def test_sam_afl_learns_fashion_mnist() -> None:
    config = RunConfig(
        data={"name": "fashion_mnist", "subset": 0.1},
        algorithm="sam_afl",
        fl={"rounds": 5},
        tracking={"enabled": False},
    )
    result = run(config)
    assert result.final["test_accuracy"] > 0.6
