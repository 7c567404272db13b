"""FedLAW: golden gradients, an autograd oracle for whole rounds, where its proxy set comes from, what is private."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import digit_side, digits, small_net, train
from golden_cases import assert_close, cases
from test_engines import SAMPLE, SIZES, UPDATE, digest

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.dp_fedlaw import dp_fedlaw
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedlaw import fedlaw
from fl_lightning.build import prepare
from fl_lightning.config import load_config
from fl_lightning.data import load_data
from fl_lightning.data.loading import ImageStore
from fl_lightning.data.proxy import ProxySet, hold_out
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.engine.workers import WorkerEngine
from fl_lightning.errors import ConfigError
from fl_lightning.local.optimizers import sgd
from fl_lightning.privacy import Ledger, statement, summary
from fl_lightning.records import Message, ServerState
from fl_lightning.server.aggregate import by_samples, uniform
from fl_lightning.server.learned import Mixture, learn, side_by_side


def proxy_of(count: int = 30, *, batch_size: int = 8, norm: bool = False, dtype=torch.float32) -> ProxySet:
    """The last digits of the set, which no client of `digit_side` holds."""
    images, labels = digits()
    objective = ModelObjective(small_net(norm), dtype=dtype)
    store = ImageStore(images[-count:], labels[-count:], [0.3], [0.37], dtype=dtype)
    return ProxySet(objective, store, batch_size, seed=42, merge_single=norm)


class Target:
    """L(w) = ||w - target||^2 / 2, whatever the batch; counts what it is asked."""

    def __init__(self, target: torch.Tensor, batches: int = 1) -> None:
        self.target, self.batches = target, batches
        self.rounds: list[int] = []
        self.seen: list[torch.Tensor] = []

    def gradient(self, w: torch.Tensor, batch: object) -> torch.Tensor:
        self.seen.append(w)
        return w - self.target

    def passes(self, round: int):
        self.rounds.append(round)
        while True:
            yield [None] * self.batches


@pytest.mark.parametrize("case", cases("fedlaw.json", "fedlaw"), ids=lambda case: case["id"])
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_golden_gradients(case: dict, start: float) -> None:
    """The chain rule from the objective's gradient, wherever the server's model stands (w_k = w + Delta_k)."""
    inputs, expected = case["inputs"], case["expected"]
    theta = torch.tensor(inputs["theta"], dtype=torch.float64)
    w = torch.full((theta.shape[1],), start, dtype=torch.float64)
    x, y = torch.tensor(inputs["p"], dtype=torch.float64).log(), torch.tensor(inputs["y0"], dtype=torch.float64)
    mixture = Mixture.of(x, y, w, theta - w)
    along_x, along_y = mixture.gradients(theta - w, mixture.w - torch.tensor(inputs["target"], dtype=torch.float64))
    got = {
        "w": mixture.w.tolist(),
        "lam": mixture.lam.tolist(),
        "gamma": float(mixture.gamma),
        "grad_x": along_x.tolist(),
        "grad_y": float(along_y),
    }
    for key, value in expected.items():
        assert_close(got[key], value, case["tol"])


def oracle(theta, p, target, lr: float, epochs: int, batches: int, **schedule):
    """The official code's loop: autograd through softmax and exp, torch's Adam and StepLR."""
    z = torch.cat([p.log(), torch.zeros(1, dtype=torch.float64)]).requires_grad_()
    adam = torch.optim.Adam([z], lr=lr, betas=(0.5, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(adam, schedule.get("step", 20), schedule.get("decay", 0.5))
    for _ in range(epochs):
        for _ in range(batches):
            adam.zero_grad()
            w = z[-1].exp() * (torch.softmax(z[:-1], 0) @ theta)
            (0.5 * (w - target).square().sum()).backward()
            adam.step()
        scheduler.step()
    with torch.no_grad():
        return z[-1].exp() * (torch.softmax(z[:-1], 0) @ theta), z[-1].exp()


@pytest.mark.parametrize(("epochs", "schedule"), [(20, {}), (50, {}), (9, {"step": 4, "decay": 0.1})])
def test_a_round_is_the_official_codes(epochs: int, schedule: dict) -> None:
    """Weights, shrinkage, Adam's betas, the rate halved after every 20 passes, against autograd."""
    rng = torch.Generator().manual_seed(3)
    theta = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    w, target = (torch.randn(6, generator=rng, dtype=torch.float64) for _ in range(2))
    messages = [Message(k, n, 1, {"delta": theta[k] - w}) for k, n in enumerate((10, 30, 50, 10))]
    proxy = Target(target, batches=3)
    names = {"proxy_lr_" + name: value for name, value in schedule.items()}
    algorithm = fedlaw(sgd(0.1), proxy=proxy, proxy_lr=0.05, proxy_epochs=epochs, **names)
    server = algorithm.rule(ServerState(w, round=6), algorithm.aggregate(messages))
    p = torch.tensor([0.1, 0.3, 0.5, 0.1], dtype=torch.float64)
    expected, gamma = oracle(theta, p, target, 0.05, epochs, 3, **schedule)
    torch.testing.assert_close(server.w, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(server.extra["gamma"], gamma.detach().view(1), rtol=1e-9, atol=0)
    assert server.round == 7 and proxy.rounds == [7] and len(proxy.seen) == 3 * epochs
    torch.testing.assert_close(proxy.seen[0], p @ theta, rtol=1e-12, atol=1e-12)


def test_learning_lowers_the_proxy_loss_and_can_shrink() -> None:
    """Towards a target inside the hull of the models, scaled down: lambda and gamma find it."""
    theta = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    target = 0.5 * torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64) @ theta
    w = torch.zeros(2, dtype=torch.float64)
    algorithm = fedlaw(sgd(0.1), proxy=Target(target, 20), proxy_lr=0.05, proxy_epochs=40, proxy_lr_decay=1.0)
    aggregate = algorithm.aggregate([Message(k, 1, 1, {"delta": theta[k]}) for k in range(3)])
    after = algorithm.rule(ServerState(w), aggregate)
    torch.testing.assert_close(after.w, target, rtol=0, atol=1e-3)
    assert 0.4 < float(after.extra["gamma"]) < 0.7


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_without_passes_it_is_fedavg(norm: bool) -> None:
    ends = []
    for algorithm in (fedlaw(sgd(0.1), proxy=proxy_of(norm=norm), proxy_epochs=0), fedavg(sgd(0.1))):
        side = digit_side(algorithm, SIZES, model=small_net(norm))
        ends.append(train(side, DebugEngine(side), 2)[0].server)
    torch.testing.assert_close(ends[0].w, ends[1].w, rtol=0, atol=1e-6)
    for name, tensor in ends[1].buffers.items():
        torch.testing.assert_close(ends[0].buffers[name], tensor, rtol=1e-5, atol=1e-6)


def test_statistics_follow_the_learned_weights_and_are_not_shrunk() -> None:
    """Two clients, one of which is already where the proxy wants the model to be."""
    target = torch.tensor([1.0, -1.0], dtype=torch.float64)
    uploads = [
        Message(0, 1, 1, {"delta": target}, buffers={"mean": torch.tensor([0.0]), "count": torch.tensor(10)}),
        Message(1, 3, 1, {"delta": -target}, buffers={"mean": torch.tensor([10.0]), "count": torch.tensor(25)}),
    ]
    algorithm = fedlaw(sgd(0.1), proxy=Target(target, 20), proxy_lr=0.1, proxy_epochs=60, proxy_lr_decay=1.0)
    after = algorithm.rule(ServerState(torch.zeros(2, dtype=torch.float64)), algorithm.aggregate(uploads))
    lam, gamma = float(after.buffers["mean"]) / 10, float(after.extra["gamma"])
    assert lam < 0.25  # from 0.75
    torch.testing.assert_close(after.w, gamma * (1 - 2 * lam) * target, rtol=1e-4, atol=1e-4)
    assert after.buffers["count"] == 25


def test_a_client_without_a_step_weighs_nothing() -> None:
    trained, idle = Message(0, 5, 2, {"delta": torch.ones(2)}), Message(1, 50, 0, {"delta": torch.full((2,), 9.0)})
    stack = side_by_side(by_samples)
    folded = stack([idle, trained])
    assert folded.vectors["delta"].tolist() == [[1.0, 1.0]] and folded.weights == (0.0, 1.0)
    assert folded.notes == ("client 1 took no step and weighs 0",)
    assert side_by_side(uniform)([trained, replace(trained, client=2, num_samples=1)]).weights == (0.5, 0.5)
    for algorithm in (
        fedlaw(sgd(0.1), proxy=Target(torch.zeros(2)), prior=uniform),
        dp_fedlaw(sgd(0.1), proxy=Target(torch.zeros(2)), prior=uniform, protection=UPDATE),
        dp_fedlaw(sgd(0.1), proxy=Target(torch.zeros(2)), prior=uniform, protection=SAMPLE),
    ):
        assert algorithm.aggregate([trained, replace(trained, client=2, num_samples=1)]).weights == (0.5, 0.5)
    server, rule = ServerState(torch.zeros(2)), learn(Target(torch.zeros(2)), lambda epoch: None, 20)
    after = rule(server, stack([idle]))
    assert after.w is server.w and after.round == 1 and not after.extra


ALGORITHMS: dict[str, Algorithm] = {
    "fedlaw": fedlaw(sgd(0.1), proxy=proxy_of(), proxy_epochs=3),
    "dp_fedlaw sample": dp_fedlaw(sgd(0.1), proxy=proxy_of(), proxy_epochs=3, protection=SAMPLE),
    "dp_fedlaw update": dp_fedlaw(sgd(0.1), proxy=proxy_of(), proxy_epochs=3, protection=UPDATE, prior=uniform),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lightning_equals_debug_bit_for_bit(name: str) -> None:
    debug = digest(s := digit_side(ALGORITHMS[name], SIZES), DebugEngine(s))
    fit = digest(s := digit_side(ALGORITHMS[name], SIZES), LightningEngine(s))
    assert fit == debug


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits() -> None:
    expected = digest(s := digit_side(ALGORITHMS["fedlaw"], SIZES), LightningEngine(s))
    engine = WorkerEngine(side := digit_side(ALGORITHMS["fedlaw"], SIZES), 2)
    try:
        assert digest(side, engine) == expected
    finally:
        engine.close()


@pytest.mark.parametrize("level", ["sample", "update"])
def test_without_noise_and_clipping_dp_fedlaw_is_fedlaw(level: str) -> None:
    """At level sample on batches of one example, whose private gradient is the gradient."""
    free = Protection(level, float("inf"), (0.0,) * 4)
    ends = []
    for algorithm in (
        dp_fedlaw(sgd(0.1), proxy=proxy_of(dtype=torch.float64), proxy_epochs=3, protection=free),
        fedlaw(sgd(0.1), proxy=proxy_of(dtype=torch.float64), proxy_epochs=3),
    ):
        side = digit_side(algorithm, (8, 8, 8, 8), batch_size=8, dtype=torch.float64)
        ends.append(train(side, DebugEngine(side), 2)[0].server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["sample", "update"])
def test_clients_release_what_dp_fedavgs_do(level: str) -> None:
    """Learning on the proxy is post-processing: the uploads and their declarations are DP-FedAvg's, bit for bit."""
    shield = {"sample": SAMPLE, "update": UPDATE}[level]
    sent = []
    for algorithm in (
        dp_fedlaw(sgd(0.1), proxy=proxy_of(), protection=shield, prior=uniform),
        dp_fedavg(sgd(0.1), protection=shield, prior=uniform),
    ):
        side = digit_side(algorithm, SIZES)
        sent.append(train(side, DebugEngine(side), 1)[2])
    for ours, theirs in zip(*sent, strict=True):
        assert torch.equal(ours.vectors["delta"], theirs.vectors["delta"])
        assert ours.releases == theirs.releases and not ours.undeclared


# Where the proxy set comes from.


def test_the_proxy_set_is_cut_from_the_training_set_and_balanced() -> None:
    data = load_data(RunConfig().data)
    rest, images, labels = hold_out(data, 0.02, seed=42)
    assert labels.bincount(minlength=10).tolist() == [3] * 10  # 2 % of 1438 over 10 classes
    assert rest.x_test is data.x_test and rest.y_test is data.y_test
    assert len(rest.y_train) + len(labels) == len(data.y_train)

    def counted(*parts: torch.Tensor) -> list:
        return sorted(part.numpy().tobytes() for part in torch.cat(parts).flatten(1))

    assert counted(rest.x_train, images) == counted(data.x_train)  # no image lost, none twice
    again, other = hold_out(data, 0.02, seed=42), hold_out(data, 0.02, seed=43)
    assert torch.equal(again[1], images) and not torch.equal(other[1], images)
    with pytest.raises(ConfigError, match=r"algorithm\.aggregate\.proxy_share=0\.99: 142 of each class, but 0 has"):
        hold_out(data, 0.99, seed=42)


def test_no_client_holds_a_proxy_example() -> None:
    prepared = prepare(load_config(["algorithm=fedlaw", "partition=dirichlet", "fl.rounds=1"]))
    assert prepared.public_examples == 30
    dealt = torch.cat(prepared.partition.indices)
    assert sorted(dealt.tolist()) == list(range(len(prepared.side.store))) and len(dealt) == 1438 - 30
    assert len(prepared.test) == 1797 - 1438
    assert prepare(load_config(["algorithm=fedavg", "fl.rounds=1"])).public_examples == 0


def test_batches_of_the_proxy_follow_from_seed_and_round_alone() -> None:
    proxy = proxy_of(17, batch_size=8, norm=True)
    first, again, other = (proxy.passes(round) for round in (1, 1, 2))
    one, same, two = next(first), next(again), next(other)
    assert [len(batch) for batch in one] == [8, 9]  # the single example left over joins the batch before
    assert sorted(torch.cat(one).tolist()) == list(range(17))
    assert torch.cat(one).tolist() == torch.cat(same).tolist() != torch.cat(two).tolist()
    assert torch.cat(next(first)).tolist() != torch.cat(one).tolist()


def test_the_proxys_gradient_moves_no_statistics() -> None:
    proxy = proxy_of(norm=True)
    before = proxy.objective.buffers()
    proxy.gradient(proxy.objective.initial, next(proxy.passes(1))[0])
    for name, tensor in proxy.objective.buffers().items():
        assert torch.equal(tensor, before[name])


# Configuration.


def test_defaults_are_the_official_codes() -> None:
    learning = load_config(["algorithm=fedlaw"]).algorithm.aggregate
    assert (learning.proxy_lr, learning.proxy_epochs, learning.proxy_batch_size) == (0.005, 20, 128)
    assert (learning.proxy_beta1, learning.proxy_beta2) == (0.5, 0.999)
    assert (learning.proxy_lr_step, learning.proxy_lr_decay, learning.proxy_share) == (20, 0.5, 0.02)
    cifar = load_config(["algorithm=fedlaw", "data=cifar10"])
    assert cifar.algorithm.aggregate.proxy_lr == 0.01
    assert cifar.with_overrides({"data": "digits"}).algorithm.aggregate.proxy_lr == 0.005
    kept = cifar.with_overrides({"algorithm.aggregate.proxy_lr": 0.1}).with_overrides({"data": "digits"})
    assert kept.algorithm.aggregate.proxy_lr == 0.1
    assert RunConfig(**cifar.to_dict()) == cifar
    assert load_config(["algorithm=dp_fedlaw"]).privacy.level == "sample"
    assert load_config(["algorithm=dp_fedlaw", "privacy=update"]).algorithm.aggregate.weighting == "uniform"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=fedlaw", "algorithm.aggregate.proxy_share=1"], "proxy_share=1: needs a number > 0 and < 1"),
        (["algorithm=fedlaw", "algorithm.aggregate.server_lr=1"], "server_lr=1: would be ignored"),
        (["algorithm=fedavg", "algorithm.aggregate.proxy_epochs=3"], "choose algorithm.name=fedlaw or dp_fedlaw"),
        (["algorithm=fedlaw", "partition=file", "partition.path=a.json"], "partition.kind=file: contradicts"),
        (["algorithm=fedlaw", "privacy=sample"], "algorithm.name=fedlaw protects nothing"),
        (["algorithm=dp_fedlaw", "privacy=none"], "without privacy choose algorithm=fedlaw"),
    ],
)
def test_what_contradicts_a_proxy_set_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert words in str(caught.value)


def test_a_private_run_says_that_the_proxy_is_public() -> None:
    config = load_config(
        ["algorithm=dp_fedlaw", "fl.rounds=2", "fl.num_clients=3", "fl.max_local_steps=2", "tracking.enabled=false"]
    )
    assert any("counts as public" in note for note in config.notes)
    result = run(config)
    facts = result.final["privacy"]
    assert result.badge == "PRIVATE" and facts["public_examples"] == 30
    assert "30 examples held out of the training data, counts as public" in facts["warnings"][0]
    assert np.isfinite(result.final["epsilon"])
    assert set(result.rounds[-1].metrics) >= {"server/gamma"}
    ledger = Ledger(unit="sample", delta=1e-5, adjacency="add_remove")
    ledger.record(1, 0, [SAMPLE.gradient_release(0, 0.1, 5, {}, ("delta",))])
    said = statement(ledger, level="sample", clip_norm=1.0, public_examples=30)
    assert "this epsilon does not cover it" in said
    assert "public" not in statement(ledger, level="sample", clip_norm=1.0)
    assert summary(ledger, level="sample", clip_norm=1.0)["public_examples"] == 0
