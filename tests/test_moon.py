"""MOON: the contrastive gradient by hand and by autograd, the client's own last model, and what it falls back to."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from federations import digit_side, digits, small_net, start, train
from test_engines import SIZES, digest
from torch import nn

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.moon import moon
from fl_lightning.config import load_config
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.engine.workers import WorkerEngine
from fl_lightning.errors import ConfigError, FLError
from fl_lightning.federation import run_round
from fl_lightning.local.contrast import contrast, keep_local_model, model_contrast
from fl_lightning.local.optimizers import adam, sgd
from fl_lightning.local.solver import Context, LocalSolver
from fl_lightning.models import build_model
from fl_lightning.rng import generator
from fl_lightning.server.aggregate import uniform

OPTIMIZER = sgd(0.1)


def network(kind: str = "vgg_like", norm: str = "group", seed: int = 1) -> nn.Module:
    return build_model(kind, 1, 8, 8, 10, generator(seed, "model"), norm)


def moon_side(algorithm, model: nn.Module | None = None, sizes=SIZES, **options):
    return digit_side(algorithm, sizes, model=model or network(), **options)


def context(objective: ModelObjective, anchor: torch.Tensor, **state: torch.Tensor) -> Context:
    return Context(0, anchor, objective, torch.Generator(), 1.0, state=state)


def test_the_loss_by_hand() -> None:
    """One example: cos = 1 with the server's, 0 with its own earlier one; then the reverse; two of them average."""
    z, same, across = (torch.tensor([[a, b]], dtype=torch.float64) for a, b in ((2.0, 0.0), (5.0, 0.0), (0.0, 3.0)))
    right = -math.log(math.exp(2) / (math.exp(2) + 1))
    wrong = -math.log(1 / (math.exp(2) + 1))
    assert float(contrast(z, same, across, 0.5)) == pytest.approx(right, rel=1e-12)
    assert float(contrast(z, across, same, 0.5)) == pytest.approx(wrong, rel=1e-12)
    both = contrast(torch.cat([z, z]), torch.cat([same, across]), torch.cat([across, same]), 0.5)
    assert float(both) == pytest.approx((right + wrong) / 2, rel=1e-12)
    assert float(contrast(z, same, same, 0.5)) == pytest.approx(math.log(2), rel=1e-12)


def test_the_loss_is_the_official_codes_cross_entropy() -> None:
    z, z_glob, z_prev = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    cosine = nn.CosineSimilarity(dim=-1)
    logits = torch.stack([cosine(z, z_glob), cosine(z, z_prev)], dim=1) / 0.3
    expected = F.cross_entropy(logits, torch.zeros(7, dtype=torch.int64))
    torch.testing.assert_close(contrast(z, z_glob, z_prev, 0.3), expected)


@pytest.mark.parametrize("kind", ["lenet5", "vgg_like"])
def test_the_direction_is_the_gradient_of_the_whole_loss(kind: str) -> None:
    """Against one backward pass through three separate networks, as the paper writes it."""
    images, labels = digits()
    batch = images[:9].double() / 255, labels[:9]
    y, w, w_k = (network(kind, seed=seed).double() for seed in (1, 2, 3))
    total = F.cross_entropy(y(batch[0]), batch[1])
    total = total + 2.5 * contrast(
        y.features(batch[0]), w.features(batch[0]).detach(), w_k.features(batch[0]).detach(), 0.5
    )
    total.backward()
    expected = {name: parameter.grad for name, parameter in y.named_parameters()}

    objective = ModelObjective(copy.deepcopy(y))
    vectors = [ModelObjective(copy.deepcopy(net)).initial for net in (y, w, w_k)]
    solver = moon(OPTIMIZER, mu=2.5, temperature=0.5).solver
    direction = solver.direction(solver.init(vectors[0]), batch, context(objective, vectors[1], previous=vectors[2]))
    for name, view in objective.layout.views(direction).items():
        torch.testing.assert_close(view, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    assert len(objective.take_losses()) == 1  # only the supervised pass is noted as the step's loss


def test_a_step_moves_towards_the_server_and_off_the_last_model() -> None:
    """Finite steps along the contrastive part alone: nearer z_glob than z_prev, compared with no step."""
    images, labels = digits()
    batch = images[:32].double() / 255, labels[:32]
    y, w, w_k = (ModelObjective(network(seed=seed).double()).initial for seed in (1, 2, 3))
    objective = ModelObjective(network().double())
    ctx = context(objective, w, previous=w_k)
    transform = model_contrast(1.0, 0.5)(lambda point, batch: torch.zeros_like(point), ctx)

    def lead(point: torch.Tensor) -> float:
        z, z_glob, z_prev = (objective.representations(v, batch) for v in (point, w, w_k))
        return float((F.cosine_similarity(z, z_glob) - F.cosine_similarity(z, z_prev)).mean())

    assert lead(y - 0.1 * transform(y, batch)) > lead(y) + 1e-4


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_other_passes_move_no_statistics_and_count_no_loss(norm: str) -> None:
    """BatchNorm's running statistics move once a step, in the supervised pass."""
    ends = []
    images, labels = digits()
    batch = images[:6].float() / 255, labels[:6]
    for mu in (0.0, 1.0):
        objective = ModelObjective(network("resnet18", norm))
        ctx = context(objective, objective.initial, previous=ModelObjective(network("resnet18", norm, seed=2)).initial)
        solver = LocalSolver(OPTIMIZER, (model_contrast(mu, 0.5),))
        direction = solver.direction(solver.init(objective.initial), batch, ctx)
        assert len(objective.take_losses()) == 1
        ends.append((direction, objective.buffers()))
    assert not torch.equal(ends[0][0], ends[1][0])
    for name, tensor in ends[0][1].items():
        assert torch.equal(tensor, ends[1][1][name]), name


@pytest.mark.parametrize("optimizer", [OPTIMIZER, adam(0.01)], ids=["sgd", "adam"])
def test_lightning_equals_debug_bit_for_bit(optimizer) -> None:
    algorithm = moon(optimizer, mu=5.0)
    debug = digest(s := moon_side(algorithm), DebugEngine(s), rounds=3)
    fit = digest(s := moon_side(algorithm), LightningEngine(s), rounds=3)
    plain = digest(s := moon_side(fedavg(optimizer)), DebugEngine(s), rounds=3)
    assert fit == debug
    assert plain[0] != debug[0]


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits() -> None:
    """The client's last model travels with the visit, so it does not matter where that runs."""
    expected = digest(s := moon_side(moon(OPTIMIZER, mu=5.0)), LightningEngine(s))
    engine = WorkerEngine(side := moon_side(moon(OPTIMIZER, mu=5.0)), 2)
    try:
        assert digest(side, engine) == expected
    finally:
        engine.close()


def test_mu_zero_and_the_first_visit_are_fedavg_bit_for_bit() -> None:
    plain = [digest(s := moon_side(fedavg(OPTIMIZER)), DebugEngine(s), rounds)[0] for rounds in (1, 2)]
    zero = digest(s := moon_side(moon(OPTIMIZER, mu=0.0)), DebugEngine(s), 2)[0]
    options = {"server_lr": 0.7, "prior": uniform}
    ends = [
        digest(s := moon_side(a), DebugEngine(s), 1)
        for a in (moon(OPTIMIZER, mu=1.0, **options), fedavg(OPTIMIZER, **options))
    ]
    assert ends[0] == ends[1]
    first, second = (digest(s := moon_side(moon(OPTIMIZER, mu=5.0)), DebugEngine(s), rounds)[0] for rounds in (1, 2))
    assert zero == plain[1] and first == plain[0] and second != plain[1]


def test_the_first_visits_term_is_constant() -> None:
    """z_prev = z_glob, which an absent earlier model stands for, pulls nowhere."""
    objective = ModelObjective(network().double())
    images, labels = digits()
    batch = images[:8].double() / 255, labels[:8]
    w = ModelObjective(network(seed=2).double()).initial
    z = objective.representations(w, batch)
    pull = objective.representation_gradient(objective.initial, batch, lambda own: contrast(own, z, z, 0.5))
    assert float(pull.abs().max()) < 1e-12


def test_a_client_keeps_its_own_last_model_and_sends_nothing_more() -> None:
    """Through rounds in which it does not take part; the model kept is the one it uploaded the difference of."""
    side = moon_side(moon(OPTIMIZER, mu=1.0))
    engine, before = DebugEngine(side), start(side)
    after, messages, _ = run_round(before, (0, 2), side.algorithm, engine, None)
    assert set(after.clients) == {0, 2}
    for message in messages:
        assert set(message.vectors) == {"delta"} and not message.scalars
        kept = after.clients[message.client]["previous"]
        torch.testing.assert_close(kept, before.server.w + message.vectors["delta"])
    later, _, _ = run_round(after, (1, 2), side.algorithm, engine, None)
    assert torch.equal(later.clients[0]["previous"], after.clients[0]["previous"])
    assert not torch.equal(later.clients[2]["previous"], after.clients[2]["previous"])
    assert keep_local_model.__module__ == "fl_lightning.local.contrast"


def test_a_network_without_features_is_refused_in_words() -> None:
    side = digit_side(moon(OPTIMIZER, mu=1.0), SIZES, model=small_net())
    with pytest.raises(FLError, match=r"Sequential has no method features\(images\)"):
        train(side, DebugEngine(side), 2)


def test_configuration_and_a_run() -> None:
    config = load_config(["algorithm=moon", "fl.rounds=3", "fl.num_clients=3", "tracking.enabled=false"])
    assert (config.algorithm.local.mu, config.algorithm.local.temperature) == (1.0, 0.5)
    assert RunConfig(**config.to_dict()) == config
    result = run(config)
    assert result.final["weights_sha256"] != run(config.with_overrides({"algorithm": "fedavg"})).final["weights_sha256"]
    for key, value, words in (
        ("algorithm.local.temperature", 0, "needs a number > 0"),
        ("algorithm.local.mu", -1, "needs a number >= 0"),
        ("privacy.level", "sample", "algorithm.name=moon protects nothing"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(["algorithm=moon", f"{key}={value}"])
        assert words in str(caught.value)
