"""SCAFFOLD and DP-SCAFFOLD: reference traces, whose controls they are, what leaves a client, what it costs."""

import math
from typing import Any

import pytest
import torch
from federations import digit_side, quadratic_rounds, small_net, train
from golden_cases import assert_close, cases
from torch import nn

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_scaffold import dp_scaffold
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.scaffold import scaffold
from fl_lightning.analysis.quadratic import ClientNumbers, Quadratic, QuadraticObjective
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.workers import WorkerEngine
from fl_lightning.errors import ConfigError
from fl_lightning.federation import Federation
from fl_lightning.local.optimizers import LocalOptimizer, adam, momentum, sgd
from fl_lightning.local.solver import Context
from fl_lightning.local.transforms import gaussian
from fl_lightning.records import Aggregate, Message, ServerState, weights_sha256
from fl_lightning.rng import generator
from fl_lightning.server.aggregate import uniform
from fl_lightning.server.controls import derived_change

FILE = "scaffold.json"
EVERYONE = (0, 1, 2)
SIZES = (20, 7, 33, 50)


def quadratic(a: float, b: float) -> Quadratic:
    """(a/2)(x - b)^2 up to a constant."""
    return Quadratic(torch.tensor([[a]], dtype=torch.float64), torch.tensor([a * b], dtype=torch.float64))


CLIENTS = [quadratic(1.0, 4.0), quadratic(4.0, 0.5), quadratic(36.0, -1 / 6)]
"""(x - 4)^2/2, (2x - 1)^2/2, (6x + 1)^2/2: their sum is least at 0."""


def point(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


def controls(federation: Federation) -> tuple[float, list[float]]:
    """c and all c_i; a client that was never visited has 0."""
    c_i = [float(federation.clients[i]["c_i"]) if i in federation.clients else 0.0 for i in EVERYONE]
    return float(federation.server.extra["c"]), c_i


def plain(option: str, optimizer: LocalOptimizer | None = None, **changes: Any) -> Algorithm:
    settings = {"lr": 0.01, "num_clients": 3, **changes}
    return scaffold(optimizer or sgd(settings["lr"]), option=option, **settings)


TRACES = [case for case in cases(FILE, "scaffold") if "x0" in case["inputs"]]


@pytest.mark.parametrize("case", TRACES, ids=lambda case: case["id"])
def test_reference_trace(case: dict) -> None:
    i, expected = case["inputs"], case["expected"]
    rounds = expected.get("rounds_1_to_3") or expected["rounds"]
    algorithm = plain(i["option"], lr=i["eta_l"], server_lr=i["eta_g"], num_clients=i.get("N", 3))
    cohorts = i.get("participants", [EVERYONE] * len(rounds))
    for federation, wanted in zip(
        quadratic_rounds(CLIENTS, algorithm, point(i["x0"]), i["Q"], cohorts), rounds, strict=True
    ):
        c, c_i = controls(federation)
        assert_close([float(federation.server.w), c], [wanted["x"], wanted["c"]], case["tol"])
        assert_close(c_i, wanted["c_i"], case["tol"])


@pytest.mark.parametrize("option", ["I", "II"])
def test_rounds_converge_to_the_optimum_where_fedavg_does_not(option: str) -> None:
    end = quadratic_rounds(CLIENTS, plain(option), point(2.0), 10, [EVERYONE] * 120)[-1]
    assert abs(float(end.server.w)) < 1e-9
    drifted = quadratic_rounds(CLIENTS, fedavg(sgd(0.01), prior=uniform), point(2.0), 10, [EVERYONE] * 120)[-1]
    assert float(drifted.server.w) == pytest.approx(0.27149, abs=1e-4)  # FedAvg's own fixed point


@pytest.mark.parametrize("optimizer", [adam(0.01), momentum(0.01)], ids=["adam", "momentum"])
def test_option_one_corrects_the_gradient_before_any_optimizer_sees_it(optimizer: LocalOptimizer) -> None:
    """At the optimum with c_i = grad f_i and c = 0 every direction is zero, so that even Adam stands still."""
    ahead = plain("I", optimizer)
    first = quadratic_rounds(CLIENTS, ahead, point(0.0), 1, [EVERYONE])[0]
    assert controls(first)[1] == [-4.0, -2.0, 6.0]  # Option I looks at x, not at where training ended
    assert float(first.server.extra["c"]) == pytest.approx(0.0, abs=1e-15)
    resting = Federation(ServerState(point(0.0), extra={"c": point(0.0)}), first.clients)
    assert float(visit_all(resting, ahead, 5)[0].vectors["delta"]) == 0.0


def visit_all(federation: Federation, algorithm: Algorithm, steps: int) -> list[Message]:
    from fl_lightning.client.visit import ClientSide, Schedule, Visit

    shards = [torch.tensor([i]) for i in EVERYONE]
    side = ClientSide(algorithm, QuadraticObjective(CLIENTS), ClientNumbers(), shards, Schedule(1, steps), 0)
    visits = [Visit(1, i, federation.clients.get(i, {})) for i in EVERYONE]
    return list(DebugEngine(side).run(federation.server, visits))


def test_option_two_divides_by_the_steps_actually_taken() -> None:
    """c_i+ is the mean of the gradients a client saw, however many they were."""
    steps, lr = (1, 2, 5), 0.02
    end = quadratic_rounds(CLIENTS, plain("II", lr=lr), point(2.0), steps, [EVERYONE])[0]
    for client, (f, q) in enumerate(zip(CLIENTS, steps, strict=True)):
        y, seen = point(2.0), []
        for _ in range(q):
            seen.append(f.gradient(y))
            y = y - lr * seen[-1]
        assert float(end.clients[client]["c_i"]) == pytest.approx(float(sum(seen) / q), rel=1e-12)


@pytest.mark.parametrize("option", ["I", "II"])
def test_first_round_is_fedavg_bit_for_bit(option: str) -> None:
    side = digit_side(fedavg(sgd(0.1), prior=uniform), SIZES)
    average = train(side, DebugEngine(side), 1)[0]
    side = digit_side(plain(option, lr=0.1, num_clients=4), SIZES)
    corrected = train(side, DebugEngine(side), 1)[0]
    assert torch.equal(corrected.server.w, average.server.w)
    assert float(corrected.server.extra["c"].norm()) > 0


def test_controls_stay_with_their_owners() -> None:
    side = digit_side(plain("II", lr=0.1, num_clients=4), SIZES)
    federation, _, messages = train(side, DebugEngine(side), 1, cohort=(0, 2))
    assert set(federation.clients) == {0, 2}
    assert [set(m.vectors) for m in messages] == [{"delta", "delta_c"}] * 2
    assert set(federation.server.extra) == {"c"}
    mean = sum(federation.clients[i]["c_i"] for i in (0, 2)) / 4
    torch.testing.assert_close(federation.server.extra["c"], mean)


def test_a_client_without_data_changes_neither_model_nor_controls() -> None:
    ends = []
    for sizes, cohort in (((20, 0, 33), (0, 1, 2)), ((20, 0, 33), (0, 2))):
        side = digit_side(plain("II", lr=0.1), sizes)
        ends.append(train(side, DebugEngine(side), 2, cohort)[0])
    assert torch.equal(ends[0].server.w, ends[1].server.w)
    assert torch.equal(ends[0].server.extra["c"], ends[1].server.extra["c"])
    assert set(ends[0].clients) == {0, 2}


# DP-SCAFFOLD


def shielded(level: str, clip: float, multiplier: float, adjacency: str = "add_remove") -> Protection:
    return Protection(level, clip, (multiplier,) * 4, adjacency)


def private(level: str, clip: float, z: float, *, steps: int | None = None, lr: float = 0.01, n: int = 3) -> Algorithm:
    shield = shielded(level, clip, z)
    return dp_scaffold(sgd(lr), lr=lr, num_clients=n, protection=shield, max_local_steps=steps)


@pytest.mark.parametrize("level", ["sample", "update"])
@pytest.mark.parametrize("cohorts", [[EVERYONE] * 6, [(0, 1), (1, 2), (0, 2), (0, 1, 2)]], ids=["all", "some"])
def test_without_noise_and_bound_it_is_scaffold(level: str, cohorts: list[tuple[int, ...]]) -> None:
    expected = quadratic_rounds(CLIENTS, plain("II"), point(2.0), 10, cohorts)
    got = quadratic_rounds(CLIENTS, private(level, math.inf, 0.0, steps=10), point(2.0), 10, cohorts)
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left.server.w, right.server.w, rtol=0, atol=1e-12)
        torch.testing.assert_close(left.server.extra["c"], right.server.extra["c"], rtol=1e-12, atol=1e-11)
        assert controls(left)[1] == pytest.approx(controls(right)[1], rel=1e-12, abs=1e-11)


def test_one_public_step_count_keeps_the_optimum_although_clients_stop_early() -> None:
    algorithm = private("update", math.inf, 0.0, steps=5)
    trace = quadratic_rounds(CLIENTS, algorithm, point(2.0), (2, 3, 5), [EVERYONE] * 400)
    for federation in (trace[0], trace[1], trace[-1]):
        c, c_i = controls(federation)
        assert c == pytest.approx(sum(c_i) / 3, rel=1e-10, abs=1e-10)
    assert abs(float(trace[-1].server.w)) < 1e-8


def test_change_of_control_from_the_update_alone() -> None:
    (case,) = (c for c in cases(FILE, "scaffold") if c["id"] == "scaffold/dc_identity")
    i = case["inputs"]
    server = ServerState(point(0.0), extra={"c": point(i["c"])})
    change = derived_change(i["eta_l"], i["Q"])(server, Aggregate({"delta": point(i["dy"])}, (1.0,)))
    assert_close(float(change), case["expected"], case["tol"])


def test_the_identity_holds_on_a_real_visit() -> None:
    algorithm = plain("II")
    federation = quadratic_rounds(CLIENTS, algorithm, point(2.0), 7, [EVERYONE] * 3)[-1]
    change = derived_change(0.01, 7)
    for message in visit_all(federation, algorithm, 7):
        alone = Aggregate({"delta": message.vectors["delta"]}, (1.0,))
        derived = change(federation.server, alone)
        assert float(message.vectors["delta_c"]) == pytest.approx(float(derived), rel=1e-11)


def test_noise_of_a_step_is_that_of_the_published_method() -> None:
    """Their 2 sigma_g C/|batch| counts replacing one example; a multiplier z = 2 sigma_g is the same noise here."""
    (case,) = (c for c in cases(FILE, "baselines") if c["id"] == "dpscaffold/std")
    i = case["inputs"]
    algorithm = private("sample", i["C"], 2 * i["sigma_g"])
    objective = QuadraticObjective([Quadratic(torch.eye(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64))])
    x = torch.zeros(5, dtype=torch.float64)
    ctx = Context(0, x, objective, generator(1, "noise"), expected_batch=float(i["batch"]))
    empty = torch.tensor([], dtype=torch.long)
    step = algorithm.solver.direction(algorithm.solver.init(x), (empty, empty), ctx)
    assert_close((step / gaussian(x, 1.0, generator(1, "noise"))).tolist(), [case["expected"]] * 5, case["tol"])


def test_sample_level_controls_are_made_of_noised_steps() -> None:
    side = digit_side(private("sample", 1.0, 1.0, lr=0.1, n=4), SIZES)
    federation, _, messages = train(side, DebugEngine(side), 1)
    for message in messages:
        along = -message.vectors["delta"] / (message.steps * 0.1)  # c = c_i = 0 before the first round
        torch.testing.assert_close(message.vectors["delta_c"], along, rtol=1e-4, atol=1e-5)
        assert torch.equal(message.state["c_i"], message.vectors["delta_c"])
        assert message.undeclared == ()
        assert message.releases[0].covers == ("delta", "delta_c")
        assert message.releases[0].count == message.steps
    assert float(federation.server.extra["c"].norm()) > 0


def test_update_level_sends_the_protected_update_and_nothing_else() -> None:
    algorithm = private("update", 0.5, 0.3, steps=2, lr=0.1, n=4)
    side = digit_side(algorithm, SIZES, max_steps=2)
    federation, _, messages = train(side, DebugEngine(side), 1)
    for message in messages:
        assert set(message.vectors) == {"delta"} and not message.scalars
        assert message.undeclared == ()
        assert len(message.releases) == 1 and message.releases[0].noise == pytest.approx(0.15)
        raw = message.state["c_i"] * -0.2  # c_i+ = (x - y)/(Q eta_l): what the client keeps is not what it sent
        assert message.oracle["update_norm"] == pytest.approx(float(raw.norm()), rel=1e-5)
        assert not torch.allclose(raw, message.vectors["delta"], atol=1e-2)
    sent = sum(m.vectors["delta"] for m in messages) / 4
    torch.testing.assert_close(federation.server.extra["c"], -sent / 0.2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["sample", "update"])
def test_controls_cost_no_further_privacy(level: str) -> None:
    results = []
    for name in ("dp_fedavg", "dp_scaffold"):
        fl = {"num_clients": 3, "rounds": 2, "batch_size": 200, "max_local_steps": 2}
        privacy = {"level": level, "noise_multiplier": 1.1}
        results.append(run(RunConfig(algorithm=name, fl=fl, privacy=privacy, tracking={"enabled": False})))
    assert [r.badge for r in results] == ["PRIVATE"] * 2
    assert results[0].final["epsilon"] == results[1].final["epsilon"] > 0
    if level == "update":  # controls start at zero, and both average evenly
        assert results[0].rounds[0].test_loss == results[1].rounds[0].test_loss
    assert results[0].final["weights_sha256"] != results[1].final["weights_sha256"]


# Engines


ALGORITHMS = {
    "scaffold I": plain("I", adam(0.01), num_clients=4),
    "scaffold II": plain("II", lr=0.1, num_clients=4),
    "dp_scaffold sample": private("sample", 1.0, 1.0, lr=0.1, n=4),
    "dp_scaffold update": private("update", 0.5, 0.1, steps=8, lr=0.1, n=4),
}


def digest(algorithm: Algorithm, engine: Any, **options: Any) -> tuple[str, str, list[str]]:
    side = digit_side(algorithm, SIZES, epochs=2, **options)
    built = engine(side)
    try:
        federation = train(side, built, 3)[0]
    finally:
        built.close()
    own = [weights_sha256(federation.clients[i]["c_i"], {}) for i in sorted(federation.clients)]
    return (
        weights_sha256(federation.server.w, federation.server.buffers),
        weights_sha256(federation.server.extra["c"], {}),
        own,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lightning_equals_debug_bit_for_bit(name: str) -> None:
    assert digest(ALGORITHMS[name], LightningEngine) == digest(ALGORITHMS[name], DebugEngine)


def test_option_one_leaves_batch_norm_statistics_alone() -> None:
    """Measuring g_i(x) is no training pass: the buffers are FedAvg's."""
    ends = []
    for algorithm in (fedavg(sgd(0.1), prior=uniform), plain("I", lr=0.1, num_clients=4)):
        side = digit_side(algorithm, SIZES, model=small_net(norm=True))
        ends.append(train(side, DebugEngine(side), 1)[0].server)
    assert torch.equal(ends[0].w, ends[1].w)
    for name, tensor in ends[0].buffers.items():
        assert torch.equal(tensor, ends[1].buffers[name]), name


def test_option_one_measures_any_number_of_examples_under_batch_norm() -> None:
    """Data that fills whole batches and one example more: no batch of one, which BatchNorm could not take."""
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    side = digit_side(plain("I", lr=0.1), (501,), batch_size=64, max_steps=1, model=flat)
    _, _, (message,) = train(side, DebugEngine(side), 1)
    assert float(message.vectors["delta_c"].norm()) > 0


def test_workers_carry_the_controls() -> None:
    algorithm = ALGORITHMS["scaffold II"]
    assert digest(algorithm, lambda side: WorkerEngine(side, 2)) == digest(algorithm, DebugEngine)


# Configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algorithm": {"name": "scaffold", "local": {"optimizer": "adam"}}},
            r"algorithm.local.optimizer=adam: needs sgd with algorithm.local.option=II.*set algorithm.local.option=I$",
        ),
        (
            {"algorithm": {"name": "scaffold", "local": {"optimizer": "momentum"}}},
            r"algorithm.local.optimizer=momentum: needs sgd with algorithm.local.option=II",
        ),
        (
            {"algorithm": {"name": "dp_scaffold", "local": {"optimizer": "adam"}}},
            r"algorithm.local.optimizer=adam: needs sgd with algorithm.name=dp_scaffold",
        ),
        (
            {"algorithm": "dp_scaffold", "privacy": "update"},
            r"fl.max_local_steps=null: is required with .*dp_scaffold and privacy.level=update.*private n_k; set fl",
        ),
        (
            {"algorithm": {"name": "scaffold", "aggregate": {"weighting": "samples"}}},
            r"algorithm.aggregate.weighting=samples: no such option",
        ),
        (
            {"algorithm": "dp_scaffold", "privacy": "none"},
            r"privacy.level=none: needs sample or update.*choose algorithm=scaffold",
        ),
        (
            {"algorithm": {"name": "dp_scaffold", "local": {"option": "I"}}},
            r"algorithm.local.option=I: would be ignored with algorithm.name=dp_scaffold",
        ),
    ],
)
def test_refusals_name_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**changes)


def test_defaults_and_what_is_allowed() -> None:
    config = RunConfig(algorithm="scaffold")
    assert config.algorithm.local.option == "II" and config.algorithm.aggregate.weighting == "uniform"
    assert RunConfig(algorithm="dp_scaffold").privacy.level == "sample"
    RunConfig(algorithm={"name": "scaffold", "local": {"optimizer": "adam", "option": "I"}})
    RunConfig(algorithm="dp_scaffold", privacy="update", fl={"max_local_steps": 5})
    moved = RunConfig(algorithm="fedavg").with_overrides({"algorithm": "scaffold"})
    assert moved == config
    assert moved.with_overrides({"algorithm": "fedavg"}) == RunConfig()
