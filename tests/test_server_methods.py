"""FedNova, FedExP, FedAvgM and FedAdam: hand-sized numbers, what ties them to FedAvg, engines, presets."""

from typing import Any

import pytest
import torch
from federations import digit_side, quadratic_rounds, train
from golden_cases import assert_close, cases

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.fedadam import fedadam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedavgm import fedavgm
from fl_lightning.algorithms.fedexp import fedexp
from fl_lightning.algorithms.fednova import fednova, path_length
from fl_lightning.analysis.quadratic import Quadratic
from fl_lightning.build import prepare
from fl_lightning.config import load_config
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.errors import ConfigError
from fl_lightning.local.optimizers import LocalOptimizer, momentum, sgd
from fl_lightning.records import Message, ServerState, weights_sha256
from fl_lightning.server.aggregate import aggregate_noise, uniform

SIZES = (20, 7, 33, 50)
EVEN = (20, 20, 20)
NAMES = ("scaffold", "dp_scaffold", "fednova", "fedexp", "fedavgm", "fedadam", "ce_fedavg", "model_clipping")


def upload(client: int, delta: list[float], samples: int = 1, steps: int = 1) -> Message:
    return Message(client, samples, steps, {"delta": torch.tensor(delta, dtype=torch.float64)})


def start(*w: float) -> ServerState:
    return ServerState(torch.tensor(w, dtype=torch.float64))


def after(algorithm: Algorithm, server: ServerState, *messages: Message) -> ServerState:
    return algorithm.rule(server, algorithm.aggregate(messages))


def quadratic(a: float, b: float) -> Quadratic:
    return Quadratic(torch.tensor([[a]], dtype=torch.float64), torch.tensor([a * b], dtype=torch.float64))


CLIENTS = [quadratic(1.0, 4.0), quadratic(1.0, -2.0), quadratic(1.0, 1.0)]
"""Equal curvature, so that only the step counts can pull FedAvg away from the optimum of the mean, 1."""


# FedNova


def test_fednova_by_hand() -> None:
    """p = (.25, .75), a = (1, 3): tau_eff = 2.5; 2.5 (.25 [8]/1 + .75 [12]/3) = 12.5."""
    messages = upload(0, [8.0], samples=1, steps=1), upload(1, [12.0], samples=3, steps=3)
    assert after(fednova(sgd(0.1)), start(1.0), *messages).w.tolist() == [13.5]
    assert after(fednova(sgd(0.1), server_lr=2.0), start(1.0), *messages).w.tolist() == [26.0]
    even = after(fednova(sgd(0.1), prior=uniform), start(0.0), *messages)
    assert even.w.tolist() == [2 * (0.5 * 8 + 0.5 * 4)]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_path_length_is_how_far_unit_gradients_carry_the_optimizer(beta: float, steps: int) -> None:
    optimizer = momentum(1.0, beta)
    y = torch.zeros(1, dtype=torch.float64)
    state = optimizer.init(y)
    for step in range(1, steps + 1):
        y, state = optimizer.apply(y, torch.ones_like(y), state, step)
    assert path_length(steps, beta) == pytest.approx(-float(y), rel=1e-12)


@pytest.mark.parametrize(("optimizer", "beta"), [(sgd(0.1), 0.0), (momentum(0.05, 0.8), 0.8)], ids=["sgd", "momentum"])
def test_fednova_of_equal_steps_is_fedavg(optimizer: LocalOptimizer, beta: float) -> None:
    ends = []
    for algorithm in (fedavg(optimizer), fednova(optimizer, momentum=beta)):
        side = digit_side(algorithm, EVEN, dtype=torch.float64)
        ends.append(train(side, DebugEngine(side), 3)[0].server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-13)


def test_fednova_finds_the_optimum_that_unequal_steps_hide_from_fedavg() -> None:
    """The paper's Figure 1: FedAvg settles where clients weigh by their steps, FedNova where they weigh by p."""
    x, steps, cohorts = torch.tensor([3.0], dtype=torch.float64), (1, 2, 6), [(0, 1, 2)] * 700
    nova = quadratic_rounds(CLIENTS, fednova(sgd(0.01), prior=uniform), x, steps, cohorts)[-1]
    average = quadratic_rounds(CLIENTS, fedavg(sgd(0.01), prior=uniform), x, steps, cohorts)[-1]
    assert float(nova.server.w) == pytest.approx(1.0, abs=0.03)  # exact as lr -> 0
    assert float(average.server.w) == pytest.approx((1 * 4 - 2 * 2 + 6 * 1) / 9, abs=0.03)


def test_fednova_skips_clients_without_steps() -> None:
    algorithm = fednova(sgd(0.1))
    idle = upload(2, [0.0], samples=0, steps=0)
    both = [after(algorithm, start(0.0), upload(0, [2.0]), *rest).w.item() for rest in ((), (idle,))]
    assert both == [2.0, 2.0]
    nobody = after(algorithm, start(5.0), idle)
    assert nobody.w.item() == 5.0 and nobody.round == 1


# FedExP


def test_fedexp_by_hand() -> None:
    """Delta = (1, 1), mean square (10 + 2)/2 = 6, eta_g = 6/(2 (2 + .5)) = 1.2."""
    messages = upload(0, [3.0, 1.0]), upload(1, [-1.0, 1.0])
    moved = after(fedexp(sgd(0.1), eps=0.5), start(1.0, 1.0), *messages)
    assert moved.w.tolist() == pytest.approx([2.2, 2.2], rel=1e-14)


def test_fedexp_weighs_the_squares_like_the_updates() -> None:
    """p = (.25, .75): Delta = .25*8 - .75*0 = 2, mean square .25*64 = 16, eta_g = 16/(2*4) = 2."""
    messages = upload(0, [8.0], samples=1), upload(1, [0.0], samples=3)
    assert after(fedexp(sgd(0.1), eps=0.0), start(0.0), *messages).w.item() == 4.0


def test_fedexp_never_steps_shorter_than_fedavg() -> None:
    same = [upload(k, [2.0, -1.0]) for k in range(3)]
    assert torch.equal(
        after(fedexp(sgd(0.1)), start(0.0, 0.0), *same).w, after(fedavg(sgd(0.1)), start(0.0, 0.0), *same).w
    )
    opposed = upload(0, [1.0]), upload(1, [-1.0])
    assert after(fedexp(sgd(0.1)), start(0.5), *opposed).w.item() == 0.5  # eta_g = 500, Delta = 0
    idle = upload(0, [0.0], samples=0, steps=0)
    assert after(fedexp(sgd(0.1)), start(0.5), idle).w.item() == 0.5


# FedAvgM and FedAdam


def test_fedavgm_by_hand() -> None:
    """m = 2, then .5*2 + 4 = 5; w = 0 + .1*2 = .2, then .2 + .1*5 = .7."""
    algorithm = fedavgm(sgd(0.1), server_momentum=0.5, server_lr=0.1)
    first = after(algorithm, start(0.0), upload(0, [2.0]))
    second = after(algorithm, first, upload(0, [4.0]))
    assert [first.w.item(), second.w.item()] == pytest.approx([0.2, 0.7])
    assert [first.extra["m"].item(), second.extra["m"].item()] == [2.0, 5.0]


def test_fedavgm_without_momentum_is_fedavg_bit_for_bit() -> None:
    ends = []
    for algorithm in (fedavg(sgd(0.1)), fedavgm(sgd(0.1), server_momentum=0.0)):
        side = digit_side(algorithm, SIZES)
        ends.append(train(side, DebugEngine(side), 3)[0].server.w)
    assert torch.equal(*ends)


def test_fedadam_by_hand() -> None:
    """beta1 = .5, beta2 = .75, tau = .5, eta = 1: m = 1, v = .75*.25 + .25*4 = 1.1875;
    then m = .5*1 + .5*(-4) = -1.5, v = .75*1.1875 + .25*16 = 4.890625."""
    algorithm = fedadam(sgd(0.1), server_lr=1.0, server_beta1=0.5, server_beta2=0.75, tau=0.5)
    first = after(algorithm, start(0.0), upload(0, [2.0]))
    second = after(algorithm, first, upload(0, [-4.0]))
    assert first.extra["m"].item() == 1.0 and first.extra["v"].item() == 1.1875
    assert second.extra["m"].item() == -1.5 and second.extra["v"].item() == 4.890625
    steps = [1 / (1.1875**0.5 + 0.5), -1.5 / (4.890625**0.5 + 0.5)]
    assert first.w.item() == pytest.approx(steps[0], rel=1e-14)
    assert second.w.item() == pytest.approx(sum(steps), rel=1e-14)


def test_server_moments_wait_while_nobody_trains() -> None:
    idle = upload(0, [0.0], samples=0, steps=0)
    for algorithm in (fedavgm(sgd(0.1)), fedadam(sgd(0.1))):
        first = after(algorithm, start(0.0), upload(0, [2.0]))
        second = after(algorithm, first, idle)
        assert torch.equal(second.w, first.w) and second.extra.keys() == first.extra.keys()
        assert all(torch.equal(second.extra[name], first.extra[name]) for name in first.extra)
        assert second.round == 2


def test_server_states_do_not_share_memory() -> None:
    """A round that fails leaves the one before intact: a rule may not write into the moments it was given."""
    for algorithm in (fedavgm(sgd(0.1)), fedadam(sgd(0.1))):
        first = after(algorithm, start(0.0), upload(0, [2.0]))
        kept = {name: vector.clone() for name, vector in first.extra.items()}
        after(algorithm, first, upload(0, [-3.0]))
        assert all(torch.equal(first.extra[name], kept[name]) for name in kept)


# Engines and configuration

ALGORITHMS = {
    "fednova": fednova(sgd(0.1)),
    "fednova momentum": fednova(momentum(0.05, 0.9), momentum=0.9),
    "fedexp": fedexp(sgd(0.1)),
    "fedavgm": fedavgm(sgd(0.1)),
    "fedadam": fedadam(sgd(0.1)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lightning_equals_debug_bit_for_bit(name: str) -> None:
    hashes = set()
    for engine in (DebugEngine, LightningEngine):
        side = digit_side(ALGORITHMS[name], SIZES, epochs=2)
        server = train(side, engine(side), 3)[0].server
        hashes.add(weights_sha256(server.w, server.extra))
    assert len(hashes) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_trains_and_round_trips(name: str) -> None:
    changes = ["fl.num_clients=3", "fl.rounds=2", "fl.max_local_steps=2", "tracking.enabled=false"]
    config = load_config([f"algorithm={name}", *changes])
    assert RunConfig(**config.to_dict()) == config
    result = run(config)
    assert result.badge == ("PRIVATE" if name == "dp_scaffold" else "NOT PRIVATE")
    assert all(record.updated for record in result.rounds)
    assert result.config["algorithm"]["name"] == name


def test_settings_reach_the_algorithm() -> None:
    """A tenfold momentum or server step shows in the weights; so does the client's own momentum in FedNova."""

    def sha(**algorithm: Any) -> str:
        fl = {"num_clients": 3, "rounds": 2, "max_local_steps": 2}
        config = RunConfig(algorithm=algorithm, fl=fl, partition="dirichlet", tracking={"enabled": False})
        return run(config).final["weights_sha256"]

    hashes = [
        sha(name="fedavg"),
        sha(name="fedavgm"),
        sha(name="fedavgm", aggregate={"server_momentum": 0.5}),
        sha(name="fedadam"),
        sha(name="fedadam", aggregate={"server_beta1": 0.5}),
        sha(name="fedadam", aggregate={"server_beta2": 0.5}),
        sha(name="fedadam", aggregate={"tau": 0.1}),
        sha(name="fedadam", aggregate={"server_lr": 0.1}),
        sha(name="fedexp", aggregate={"eps": 0.0}),
        sha(name="fednova", aggregate={"server_lr": 0.5}),
    ]
    assert len(set(hashes)) == len(hashes)
    still = sha(name="fedavgm", aggregate={"server_momentum": 0})
    assert still == hashes[0]


def test_fednova_normalises_by_the_clients_own_momentum() -> None:
    messages = upload(0, [8.0], samples=1, steps=1), upload(1, [12.0], samples=3, steps=3)
    for local, beta in (({"optimizer": "momentum", "momentum": 0.7}, 0.7), ({"optimizer": "sgd"}, 0.0)):
        built = prepare(RunConfig(algorithm={"name": "fednova", "local": local})).algorithm
        long = 1 + (1 + beta) + (1 + beta + beta**2)  # ||a||_1 of three steps; of one step it is 1
        expected = (0.25 + 0.75 * long) * (0.25 * 8.0 + 0.75 * 12.0 / long)
        assert after(built, start(0.0), *messages).w.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"name": "fednova", "local": {"optimizer": "adam"}},
            r"algorithm.local.optimizer=adam: needs sgd or momentum with algorithm.name=fednova.*set algorithm.local",
        ),
        ({"name": "fedexp", "aggregate": {"server_lr": 2}}, r"algorithm.aggregate.server_lr=2: would be ignored with"),
        (
            {"name": "fedavgm", "aggregate": {"server_momentum": 1}},
            r"algorithm.aggregate.server_momentum=1: needs .* < 1",
        ),
        ({"name": "fedadam", "aggregate": {"tau": 0}}, r"algorithm.aggregate.tau=0: needs a number > 0"),
        ({"name": "fedavg", "aggregate": {"tau": 1}}, r"algorithm.aggregate.tau=1: would be ignored.*fedadam"),
    ],
)
def test_refusals_name_the_remedy(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(algorithm=algorithm)


# DP-FedAvg's noise under a sum


def test_noise_of_the_mean_when_the_clients_share_it() -> None:
    """McMahan et al. 2018 put z S on the sum of q N clients; here each brings its share z S/sqrt(q N) of it."""
    (case,) = (c for c in cases("scaffold.json", "baselines") if c["id"] == "dpfedavg/std")
    i, expected = case["inputs"], case["expected"]
    m = round(i["q"] * i["N"])
    shares = [i["z"] / m**0.5] * m
    assert_close(aggregate_noise([1 / m] * m, [i["S"]] * m, shares), expected, case["tol"])
    algorithm = dp_fedavg(sgd(1e-9), protection=Protection("update", i["S"], shares, "zero_out"), prior=uniform)
    side = digit_side(algorithm, (5,) * m)
    x = side.objective.initial
    noise = train(side, DebugEngine(side), 1)[0].server.w - x
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)  # 690 coordinates: 3 standard errors are 8 %
