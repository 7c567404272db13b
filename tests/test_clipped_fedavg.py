"""CE-FedAvg and model clipping: the clipping paper's stationary points on real rounds, and its threshold rule."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import digit_side, quadratic_round, train
from golden_cases import assert_close, cases

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.algorithms.ce_fedavg import ce_fedavg
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.model_clipping import model_clipping
from fl_lightning.analysis.quadratic import Quadratic
from fl_lightning.build import prepare
from fl_lightning.clip_threshold import unclipped_norms
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.errors import ConfigError, FLError
from fl_lightning.federation import initial
from fl_lightning.local.optimizers import adam, sgd
from fl_lightning.records import Message, RunResult, weights_sha256
from fl_lightning.server.aggregate import uniform
from fl_lightning.uplink.clip_noise import clip

FILE = "clipping.json"
SIZES = (20, 7, 33, 50)


def quadratic(a: float, b: float) -> Quadratic:
    """(a/2)(x - b)^2 up to a constant."""
    return Quadratic(torch.tensor([[a]], dtype=torch.float64), torch.tensor([a * b], dtype=torch.float64))


def point(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


CLAIM_23 = [quadratic(1.0, 4.0), quadratic(4.0, 0.5), quadratic(36.0, -1 / 6)]
CLOSE = 0.05


def round_from(clients: list[Quadratic], algorithm: Algorithm, x: float, steps: int) -> float:
    return float(quadratic_round(clients, algorithm, point(x), steps)[0])


def assert_attracting(clients: list[Quadratic], algorithm: Algorithm, x: float, steps: int, tolerance: float) -> None:
    """A round stays at x, and from either side it comes nearer without leaping across by more."""
    assert abs(round_from(clients, algorithm, x, steps) - x) < tolerance
    for away in (-CLOSE, CLOSE):
        assert abs(round_from(clients, algorithm, x + away, steps) - x) < CLOSE * (1 - 1e-5)


def settings(inputs: dict[str, Any]) -> tuple[float, int, float]:
    """(eta_l, Q, c); where Q is infinite, enough steps of a stable size to solve the local problem."""
    bound = float(inputs["c"])
    return (0.02, 1500, bound) if inputs["Q"] == "inf" else (inputs["eta_l"], inputs["Q"], bound)


STATIONARY = [case for case in cases(FILE, "ce_fedavg") if "Q" in case["inputs"]]


@pytest.mark.parametrize("case", STATIONARY, ids=lambda case: case["id"])
def test_difference_clipping_settles_where_the_paper_says(case: dict) -> None:
    eta, steps, bound = settings(case["inputs"])
    expected = case["expected"]["x_inf"] if isinstance(case["expected"], dict) else case["expected"]
    algorithm = ce_fedavg(sgd(eta), clip=bound, server_lr=case["inputs"].get("eta_g", 1.0))
    assert_attracting(CLAIM_23, algorithm, expected, steps, 1e-12)


def test_optimum_of_claim_23() -> None:
    (case,) = (c for c in cases(FILE, "ce_fedavg") if "Q" not in c["inputs"])
    slopes = [f.gradient(point(case["expected"])) for f in CLAIM_23]
    assert abs(float(sum(slopes))) < 1e-14


@pytest.mark.parametrize("case", cases(FILE, "model_clip"), ids=lambda case: case["id"])
def test_model_clipping_settles_beside_the_optimum(case: dict) -> None:
    i, expected = case["inputs"], case["expected"]
    c = i["c"]
    clients = [quadratic(1.0, -0.5 * c), quadratic(1.0, -0.5 * c), quadratic(1.0, i["k"] * c)]
    algorithm = model_clipping(sgd(i["eta_l"]), clip=c)
    x = 0.0
    for _ in range(60):  # (2/3) lambda a round
        x = round_from(clients, algorithm, x, i["Q"])
    assert_close(x, expected["x_inf"], {"rel": 1e-9})
    assert_close(round_from(clients, algorithm, expected["x_inf"], i["Q"]), expected["x_inf"], case["tol"])
    assert float(sum(f.gradient(point(expected["x_star"])) for f in clients)) == pytest.approx(0, abs=1e-12)
    assert abs(x - expected["x_star"]) > 0.1 * c


@pytest.mark.parametrize("case", cases(FILE, "claim2_2"), ids=lambda case: case["id"])
def test_claim_22(case: dict) -> None:
    i = case["inputs"]
    if "i" in i:  # one client's clipped update is minus the gradient of its Huberised loss
        algorithm = ce_fedavg(sgd(i["eta_l"]), clip=i["c"])
        _, (message,) = quadratic_round([CLAIM_23[i["i"]]], algorithm, point(i["x"]), i["Q"])
        assert_close(-float(message.vectors["delta"]), case["expected"], case["tol"])
    else:
        algorithm = ce_fedavg(sgd(i["c"] / 6), clip=i["c"])  # 6 = max_i |f_i'(x*)|
        assert round_from(CLAIM_23, algorithm, 0.0, i["Q"]) == pytest.approx(case["expected"], abs=case["tol"]["abs"])
        away = round_from(CLAIM_23, ce_fedavg(sgd(i["c"] / 5.9), clip=i["c"]), 0.0, i["Q"])
        assert abs(away) > 1e-4  # one step larger and x* is lost


def test_bound_on_the_clipping_factor_needs_the_threshold() -> None:
    (case,) = cases(FILE, "thm31")
    c, u, v, expected = case["inputs"]["c"], case["inputs"]["u"], case["inputs"]["v"], case["expected"]
    alpha = {norm: float(clip(point(norm), c)) / norm for norm in (u, v)}
    assert_close([alpha[u], alpha[v]], [expected["alpha_u"], expected["alpha_v"]], case["tol"])
    assert_close(abs(alpha[u] - alpha[v]), expected["diff"], case["tol"])
    assert abs(u - v) < expected["diff"] <= abs(u - v) / c


# Identities


@pytest.mark.parametrize("algorithm", [ce_fedavg(sgd(0.1), clip=math.inf), model_clipping(sgd(0.1), clip=math.inf)])
def test_infinite_bound_is_fedavg_bit_for_bit(algorithm: Algorithm) -> None:
    ends = []
    for chosen in (fedavg(sgd(0.1), prior=uniform), algorithm):
        side = digit_side(chosen, SIZES)
        ends.append(train(side, DebugEngine(side), 3)[0].server.w)
    assert torch.equal(*ends)


def test_uploads_obey_the_bound_and_stay_in_their_direction() -> None:
    side = digit_side(ce_fedavg(sgd(0.1), clip=0.3), SIZES)
    _, _, clipped = train(side, DebugEngine(side), 1)
    side = digit_side(fedavg(sgd(0.1)), SIZES)
    _, _, free = train(side, DebugEngine(side), 1)
    for sent, raw in zip(clipped, free, strict=True):
        norm = float(raw.vectors["delta"].norm())
        torch.testing.assert_close(sent.vectors["delta"], raw.vectors["delta"] * min(1, 0.3 / norm))
        assert sent.oracle["update_norm"] == norm and sent.oracle["clipped"] == float(norm > 0.3)
        assert not sent.releases and sent.undeclared == ("delta",)
    assert [m.oracle["clipped"] for m in clipped] == [0.0, 0.0, 1.0, 1.0]


def test_server_averages_clipped_models_and_never_sees_the_models() -> None:
    side = digit_side(model_clipping(sgd(0.1), clip=1.0), SIZES)
    x = side.objective.initial
    federation, _, messages = train(side, DebugEngine(side), 1)
    side = digit_side(fedavg(sgd(0.1)), SIZES)
    _, _, free = train(side, DebugEngine(side), 1)
    models = [clip(x + m.vectors["delta"], 1.0) for m in free]
    torch.testing.assert_close(federation.server.w, sum(models) / 4, rtol=1e-5, atol=1e-6)
    assert [set(m.vectors) for m in messages] == [{"delta"}] * 4
    assert all(m.oracle["clipped"] == 1.0 for m in messages)


ALGORITHMS = {
    "ce_fedavg": ce_fedavg(adam(0.01), clip=0.2, server_lr=0.5),
    "model_clipping": model_clipping(sgd(0.1), clip=1.0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lightning_equals_debug_bit_for_bit(name: str) -> None:
    hashes = set()
    for engine in (DebugEngine, LightningEngine):
        side = digit_side(ALGORITHMS[name], SIZES, epochs=2)
        hashes.add(weights_sha256(train(side, engine(side), 2)[0].server.w, {}))
    assert len(hashes) == 1


# The threshold that is measured


def ce(clip: float | None = None, fraction: float | None = None, lr: float = 0.1, **changes: Any) -> RunConfig:
    local = {"lr": lr, "clip": clip, "clip_fraction": fraction}
    fl = {"num_clients": 4, "clients_per_round": 2, "rounds": 3, "batch_size": 100}
    base = {"algorithm": {"name": "ce_fedavg", "local": local}, "fl": fl, "partition": "dirichlet"}
    return RunConfig(**{**base, "tracking": {"enabled": False}, **changes})


def sha(result: RunResult) -> str:
    return result.final["weights_sha256"]


def test_threshold_is_half_the_mean_norm_of_the_same_run_without_clipping() -> None:
    free = run(ce(math.inf))
    mean = sum(record.metrics["oracle/update_norm"] for record in free.rounds) / 3  # two clients in every round
    found = run(ce())
    record = found.final["clip"]
    assert record["mean_norm"] == pytest.approx(mean, rel=1e-12)
    assert record["threshold"] == 0.5 * record["mean_norm"]
    assert record["fraction"] == 0.5 and record["updates"] == 6
    given = run(ce(record["threshold"]))
    assert sha(given) == sha(found) != sha(free)
    assert [r.metrics for r in given.rounds] == [r.metrics for r in found.rounds]
    assert "clip" not in given.final and "clip" not in free.final


def test_measured_threshold_says_that_it_is_not_private() -> None:
    found = run(ce(fraction=0.25))
    record = json.loads(json.dumps(found.to_dict()))["final"]["clip"]
    assert found.badge == "NOT PRIVATE" and record["private"] is False
    assert "NOT PRIVATE" in record["note"] and "0.25 x the mean norm of 6 updates" in record["note"]
    assert found.rounds[0].notes[0] == record["note"] and not found.rounds[1].notes


def test_measured_threshold_is_stored_with_the_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    found = run(ce(tracking={"uri": uri}))
    client = MlflowClient(uri)
    stored = json.loads(Path(client.download_artifacts(found.run_id, "result.json", str(tmp_path))).read_text())
    assert stored["final"]["clip"] == found.final["clip"]
    history = client.get_metric_history(found.run_id, "oracle/clipped")
    assert [point.step for point in history] == [1, 2, 3]  # the unclipped run leaves no trace of its own


def test_mean_is_over_visits_that_trained() -> None:
    """A client without steps has no update, so it is no zero in the mean."""
    prepared = prepare(ce(math.inf, fl={"num_clients": 4, "rounds": 2, "batch_size": 100}))
    norms = unclipped_norms(prepared, initial(prepared.objective.initial, {}))
    assert len(norms) == 8 and all(norm > 0 for norm in norms)
    shards = (*prepared.side.shards[:3], prepared.side.shards[3][:0])
    idle = type(prepared)(
        **{**vars(prepared), "side": type(prepared.side)(**{**vars(prepared.side), "shards": shards})}
    )
    assert len(unclipped_norms(idle, initial(prepared.objective.initial, {}))) == 6


def test_an_unmeasured_threshold_cannot_train() -> None:
    algorithm = ce_fedavg(sgd(0.1), clip=None)
    with pytest.raises(FLError, match="the threshold has not been measured"):
        algorithm.uplink[0].encode(Message(0, 1, 1, {"delta": torch.ones(2)}), torch.Generator(), {})


def test_divergence_without_clipping_is_refused_in_words() -> None:
    with pytest.raises(FLError, match=r"algorithm.local.clip=null: the mean update norm of the unclipped run is nan"):
        run(ce(lr=1e6, fl={"num_clients": 2, "rounds": 2, "local_epochs": 4, "batch_size": 100}))


def test_a_run_that_does_not_move_gives_no_threshold() -> None:
    with pytest.raises(FLError, match=r"the mean update norm of the unclipped run is 0, which gives no threshold"):
        run(ce(lr=1e-30))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"name": "ce_fedavg", "local": {"clip": 1, "clip_fraction": 0.5}},
            r"algorithm.local.clip_fraction=0.5: would be ignored with algorithm.local.clip=1.*set one of the two",
        ),
        ({"name": "ce_fedavg", "local": {"clip": 0}}, r"algorithm.local.clip=0: needs a number > 0"),
        (
            {"name": "fedavg", "local": {"clip": 1}},
            r"algorithm.local.clip=1: would be ignored.*ce_fedavg or model_clip",
        ),
        ({"name": "model_clipping", "local": {"clip_fraction": 1}}, r"clip_fraction=1: would be ignored.*ce_fedavg"),
        ({"name": "model_clipping", "aggregate": {"server_lr": 2}}, r"server_lr=2: would be ignored"),
    ],
)
def test_refusals_name_the_remedy(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(algorithm=algorithm)


def test_infinity_survives_saving() -> None:
    config = ce(math.inf)
    assert config.algorithm.local.clip == math.inf
    assert RunConfig(**config.to_dict()) == config
    assert config.with_overrides({"algorithm.local.clip": 0.5}).algorithm.local.clip == 0.5
    assert config.with_overrides({"algorithm.local.clip": ".inf"}) == config
    assert RunConfig(algorithm="ce_fedavg").algorithm.aggregate.weighting == "uniform"
    assert RunConfig(algorithm="model_clipping").algorithm.aggregate.weighting == "uniform"
