"""`privacy.audit`: canaries inside the run find a broken mechanism, and leave a right one alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import RunConfig, run
from fl_lightning.build import prepare
from fl_lightning.canaries import arm, clients
from fl_lightning.canaries.directions import directions
from fl_lightning.canaries.samples import CanaryStore, dealt
from fl_lightning.canaries.watch import begin
from fl_lightning.errors import ConfigError, PrivacyError
from fl_lightning.foreseen import foresee
from fl_lightning.local import transforms
from fl_lightning.records import RunResult, ServerState
from fl_lightning.server import noise as server_noise
from fl_lightning.uplink import clip_noise

CLAIMED = 3.0


def config(seed: int = 1, **privacy: Any) -> RunConfig:
    """Four clients of digits; at levels of a client three of eight take part."""
    client = privacy.get("level", "sample") != "sample"
    fl = {"num_clients": 8, "clients_per_round": 4} if client else {"num_clients": 4}
    return RunConfig(
        seed=seed,
        data={"name": "digits", "subset": 0.4},
        model="lenet5",
        algorithm={"name": privacy.pop("algorithm", "dp_fedavg"), "local": {"lr": 0.1 if client else 0.5}},
        fl={**fl, "rounds": 4, "batch_size": 64, "eval_every": 4},
        privacy={"level": "sample", "target_epsilon": CLAIMED, "audit": True, "audit_canaries": 128, **privacy},
        tracking={"enabled": False},
    )


LOCAL = {"level": "update"}
CENTRAL = {"level": "update", "trust_model": "central"}
POISSON = {**CENTRAL, "adjacency": "add_remove", "sampling": "poisson"}
SHARED = {"level": "update", "trust_model": "distributed"}
MODEL = {"level": "model"}

gaussian, clipped_sum, clip = transforms.gaussian, transforms.clipped_sum, clip_noise.clip


def too_little(like: Tensor, std: float, noise: torch.Generator) -> Tensor:
    return gaussian(like, std / 10, noise)


def repeated(like: Tensor, std: float, noise: torch.Generator) -> Tensor:
    return gaussian(like, std, torch.Generator().manual_seed(1))


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a tenth of the noise": lambda patch: noise_is(patch, too_little),
    "the same noise each time": lambda patch: noise_is(patch, repeated),
    "no clipping": lambda patch: unclipped(patch),
}


def noise_is(patch: pytest.MonkeyPatch, draw: Callable[..., Tensor]) -> None:
    for module in (transforms, clip_noise, server_noise):
        patch.setattr(module, "gaussian", draw)


def unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transforms, "clipped_sum", lambda rows, bound, layers=(): clipped_sum(rows, float("inf")))
    patch.setattr(clip_noise, "clip", lambda v, bound, layers=(): v)


def audited(result: RunResult) -> dict[str, Any]:
    return result.final["privacy"]["audit"]


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("privacy", [{}, LOCAL, CENTRAL, SHARED], ids=["sample", "local", "central", "distributed"])
def test_a_broken_mechanism_fails_the_run(privacy: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BROKEN[fault](monkeypatch)
    with pytest.raises(PrivacyError, match=r"released more than it claims: epsilon is at least \d.* 3 is claimed"):
        run(config(**privacy))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "privacy",
    [{}, LOCAL, CENTRAL, POISSON, SHARED, MODEL],
    ids=["sample", "local", "central", "poisson", "shared", "model"],
)
def test_a_right_mechanism_passes(privacy: dict[str, Any], seed: int) -> None:
    result = run(config(seed, **privacy))
    found = audited(result)
    assert result.badge == "PRIVATE" and not found["refuted"]
    assert 0 <= found["epsilon_lower"] < result.final["epsilon"] == pytest.approx(found["epsilon_claimed"])
    assert found["epsilon_lower"] < CLAIMED < found["epsilon_ceiling"] and found["note"] is None
    assert (found["canaries"], found["confidence"], found["delta"]) == (128, 0.95, 1e-5)
    assert 1.0 < found["epsilon_estimate"] < 6.0


@pytest.mark.parametrize(
    "privacy",
    [
        {"sampling": "without_replacement"},
        {"sampling": "full"},
        {"algorithm": "dp_fedsam", "ascent": "per_sample"},
        {"algorithm": "dp_fedsam", "ascent": "two_release"},
        {"algorithm": "sam_adpfl"},
        {"clip_bound": "per_layer", "physical_batch_size": 16},
        {"level": "update", "clip_bound": "quantile"},
        {"level": "update", "algorithm": "sam_adpfl", "trust_model": "central"},
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_every_choice_is_heard_and_keeps_its_promise(privacy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries are in what is released, whichever way: a tenth of the noise shows, the right noise does not."""
    assert not audited(run(config(2, **privacy)))["refuted"]
    noise_is(monkeypatch, too_little)
    with pytest.raises(PrivacyError, match="released more than it claims"):
        run(config(2, **privacy))


def test_a_run_says_beforehand_what_its_ledger_will_say() -> None:
    for privacy in ({}, LOCAL):
        wanted = config(**privacy)
        assert run(wanted).final["epsilon"] == foresee(wanted).ledger.epsilon()


def test_a_local_audit_does_not_touch_training() -> None:
    with_audit, without = config(**LOCAL), config(**LOCAL, audit=False, audit_canaries=None)
    assert run(with_audit).final["weights_sha256"] == run(without).final["weights_sha256"]


def test_a_refuted_run_is_recorded_as_failed(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    noise_is(monkeypatch, too_little)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracked = RunConfig(**{**config().to_dict(), "tracking": {"enabled": True, "uri": uri}})
    with pytest.raises(PrivacyError):
        run(tracked)
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == tracked.tracking.experiment]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FAILED" and found.data.tags["badge"] == "NOT PRIVATE"
    assert found.data.metrics["privacy/epsilon_lower"] > CLAIMED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"audit_canaries": 4}, "at least 16"),
        ({"audit": False}, "would be ignored"),
        ({"target_epsilon": None, "noise_multiplier": 0}, "no epsilon is claimed"),
        ({**CENTRAL, "noise_cohort_size": 100}, "NOT PRIVATE"),
        ({**CENTRAL, "sampling": "without_replacement"}, "fixed size"),
        ({**CENTRAL, "clip_bound": "quantile"}, "per_layer"),
    ],
)
def test_what_cannot_be_audited_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**change)


def test_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.workers=1"):
        RunConfig(**{**config().to_dict(), "engine": {"workers": 2}})


def test_more_canaries_than_parameters_are_refused() -> None:
    with pytest.raises(PrivacyError, match="5 parameters"):
        directions(6, 5, torch.Generator())


def test_directions_are_orthonormal_and_project_what_they_span() -> None:
    found = directions(7, 100, torch.Generator().manual_seed(3))
    like = torch.zeros(100, dtype=torch.float64)
    rows = found.rows(range(7), [1.0] * 7, like)
    torch.testing.assert_close(rows @ rows.T, torch.eye(7, dtype=torch.float64))
    u = torch.randn(100, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    torch.testing.assert_close(found.project(u), rows @ u)
    torch.testing.assert_close(found.rows([2], [-3.0], like)[0], -3.0 * rows[2])
    assert found.rows([], [], like).shape == (0, 100)


def test_canaries_are_dealt_in_turn_to_clients_that_train() -> None:
    shards = [torch.arange(3), torch.arange(0), torch.arange(3, 5), torch.arange(5, 9)]
    found = dealt(shards, [[1], [1], [1], []], 5, 9)
    assert [s.tolist() for s in found] == [[0, 1, 2, 9, 11, 13], [], [3, 4, 10, 12], [5, 6, 7, 8]]
    assert dealt(shards, [[]] * 4, 5, 9)[0].tolist() == [0, 1, 2]


def test_canary_clients_have_noise_of_their_own() -> None:
    prepared = prepare(config(**LOCAL))
    found = begin(16, len(prepared.objective.initial), 1, prepared.side.algorithm.protection, 8)
    audit = clients.armed(prepared.side, found, [[1]] * 8, "local", 1.0)
    audit.begin(ServerState(prepared.objective.initial), range(8), {})
    sent = torch.stack([m.vectors["delta"] for m in audit.uploads(1, [])])
    assert len(sent) == 16
    assert torch.corrcoef(sent).triu(1).abs().max() < 0.03  # d is 60,000
    again = torch.stack([m.vectors["delta"] for m in audit.uploads(2, [])])
    assert abs(float(torch.corrcoef(torch.stack([sent[0], again[0]]))[0, 1])) < 0.03


def test_canary_examples_pass_the_real_clipping_with_the_sign_and_norm_they_should() -> None:
    prepared, watch = arm(prepare(config()))
    side = prepared.side
    assert watch is not None and isinstance(side.store, CanaryStore)
    assert sum(len(shard) for shard in side.shards) == len(prepared.data.y_train) + 128
    first, w = side.store.first, side.objective.inner.initial  # type: ignore[attr-defined]
    inputs, labels = side.store.batch(torch.tensor([0, first + 5, 1, first + 6]))
    rows = side.objective.per_sample_gradients(w, (inputs, labels))
    plain = prepared.objective.per_sample_gradients(w, (inputs[[0, 2]], labels[[0, 2]]))
    torch.testing.assert_close(rows[[0, 2]], plain)
    for row, j in ((rows[1], 5), (rows[3], 6)):
        assert float(row.norm()) == pytest.approx(10.0 if watch.coins[j] else 0.0, rel=1e-5)
        assert float(watch.directions.project(row.double())[j]) == pytest.approx(10.0 * float(watch.coins[j]), rel=1e-5)
    assert side.objective.example_losses(w, (inputs, labels))[[1, 3]].tolist() == [0.0, 0.0]
