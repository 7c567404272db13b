"""Private training is private in fact: noise, bounds, empty batches, one accountant (cases H06, H07, H08, H09)."""

import math

import pytest
import torch
from federations import digit_side, digits, small_net, train
from torch import nn

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.dp_fedsam import dp_fedsam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.client.visit import ClientSide, Schedule
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.errors import PrivacyError
from fl_lightning.local.optimizers import sgd
from fl_lightning.local.solver import Context, LocalSolver
from fl_lightning.local.transforms import private, sam
from fl_lightning.uplink.clip_noise import clip_noise
from fl_lightning.vector import ParamLayout


def protected(sam_on: bool, multiplier: float, clip: float = 1.0, lr: float = 0.1, cap: int | None = None, k: int = 1):
    shield = Protection("sample", clip, (multiplier,) * k, physical_batch_size=cap)
    if sam_on:
        return dp_fedsam(sgd(lr), rho=0.05, protection=shield)
    return dp_fedavg(sgd(lr), protection=shield)


# Case H06: Poisson sampling draws empty batches.


@pytest.mark.parametrize("sam_on", [False, True], ids=["plain", "sam"])
@pytest.mark.parametrize("cap", [None, 1], ids=["whole", "capped"])
def test_empty_batches_are_steps_like_any_other(sam_on: bool, cap: int | None) -> None:
    algorithm = protected(sam_on, multiplier=1.0, lr=1e-3, cap=cap)
    side = digit_side(algorithm, (40,), batch_size=2, epochs=10)
    _, records, messages = train(side, LightningEngine(side), 1)
    message = messages[0]
    assert message.steps == 200
    (release,) = message.releases
    assert (release.count, release.rate, release.noise_multiplier) == (200, 0.05, 1.0)
    assert math.isfinite(records[0].train_loss)
    assert torch.isfinite(message.vectors["delta"]).all()


def test_an_empty_draw_is_noise_alone_and_has_no_loss() -> None:
    objective = ModelObjective(small_net())
    x = objective.initial
    ctx = Context(0, x, objective, torch.Generator().manual_seed(3), 2.0)
    solver = LocalSolver(sgd(0.1), (private(1.0, (1.5,)),))
    empty = torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)
    state = solver.step(solver.init(x), empty, ctx)
    assert ctx.spent == [1]
    assert state.train_loss is None
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) * 1.5 / 2.0
    torch.testing.assert_close(state.y, x - 0.1 * noise)


def test_integer_inputs_with_empty_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 3))

    class Tokens:
        def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.stack([indices % 20, (indices * 7) % 20, (indices * 3) % 20], dim=1), indices % 3

    algorithm = protected(False, multiplier=1.0)
    side = ClientSide(algorithm, ModelObjective(model), Tokens(), [torch.arange(40)], Schedule(2, 3), 1)
    _, _, messages = train(side, LightningEngine(side), 1)
    assert messages[0].steps == 60
    assert torch.isfinite(messages[0].vectors["delta"]).all()


@pytest.mark.parametrize("cap", [1, 3, 7, 64])
def test_a_physical_batch_cap_changes_rounding_alone(cap: int) -> None:
    ends = []
    for rows in (None, cap):
        side = digit_side(protected(True, 0.5, cap=rows), (60,), batch_size=20, dtype=torch.float64)
        ends.append(train(side, DebugEngine(side), 1)[0].server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["lenet5", "vgg_like", "alexnet"])
def test_shipped_models_give_the_gradients_of_their_examples(kind: str) -> None:
    """Opacus' hooks against autograd, example by example: with two convolutions a wrong memory layout shows."""
    from fl_lightning.models import build_model

    shape = (1, 28, 28) if kind == "lenet5" else (3, 32, 32)
    rng = torch.Generator().manual_seed(1)
    batch = torch.randn(3, *shape, generator=rng, dtype=torch.float64), torch.tensor([1, 4, 7])
    objective = ModelObjective(build_model(kind, *shape, 10, rng), dtype=torch.float64)
    rows = objective.per_sample_gradients(objective.initial, batch)
    plain = ModelObjective(build_model(kind, *shape, 10, rng), dtype=torch.float64)
    for i in range(3):
        single = plain.gradient(objective.initial, (batch[0][i : i + 1], batch[1][i : i + 1]))
        torch.testing.assert_close(rows[i], single, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cap", [None, 1, 7])
def test_the_training_loss_does_not_depend_on_the_physical_batch(cap: int | None) -> None:
    side = digit_side(protected(False, 0.0, cap=cap), (40,), batch_size=40, max_steps=1, dtype=torch.float64)
    _, records, _ = train(side, DebugEngine(side), 1)
    plain = digit_side(fedavg(sgd(0.1)), (40,), batch_size=40, max_steps=1, dtype=torch.float64)
    assert records[0].train_loss == pytest.approx(train(plain, DebugEngine(plain), 1)[1][0].train_loss, rel=1e-12)


def test_opacus_and_vmap_agree_on_every_example() -> None:
    images, labels = digits()
    batch = images[:17].double() / 255, labels[:17]
    model = small_net().double()
    hooks, oracle = ModelObjective(model, per_sample="opacus"), None
    rows = hooks.per_sample_gradients(hooks.initial, batch)
    oracle = ModelObjective(small_net().double(), per_sample="vmap")
    torch.testing.assert_close(rows, oracle.per_sample_gradients(hooks.initial, batch), rtol=1e-10, atol=1e-12)
    one = ModelObjective(small_net().double())
    for i in (0, 16):
        single = one.gradient(hooks.initial, (batch[0][i : i + 1], batch[1][i : i + 1]))
        torch.testing.assert_close(rows[i], single, rtol=1e-10, atol=1e-12)


# Case H07: no layer is replaced behind the optimizer's back; BatchNorm is refused before training.


@pytest.mark.parametrize("engine", [DebugEngine, LightningEngine])
def test_batch_norm_under_sample_privacy_is_refused(engine: type) -> None:
    side = digit_side(protected(False, 1.0), (40,), model=small_net(norm=True))
    with pytest.raises(PrivacyError, match="BatchNorm"):
        train(side, engine(side), 1)


def test_every_trainable_parameter_moves() -> None:
    side = digit_side(protected(False, 1.0), (40,), max_steps=1)
    federation, _, _ = train(side, LightningEngine(side), 1)
    layout: ParamLayout = side.objective.layout
    assert {slot.name for slot in layout.slots} == {n for n, p in small_net().named_parameters() if p.requires_grad}
    before, after = layout.views(ModelObjective(small_net()).initial), layout.views(federation.server.w)
    assert all((before[name] != after[name]).any() for name in before)


# Case H08: the noise and the bound act.


def accuracy_after(multiplier: float, clip: float, sam_on: bool, rounds: int = 3) -> float:
    side = digit_side(protected(sam_on, multiplier, clip, lr=0.5), (400,), batch_size=40, epochs=2)
    federation, _, _ = train(side, LightningEngine(side), rounds)
    images, labels = digits()
    test = (images[1000:].float() / 255 - 0.3) / 0.37, labels[1000:]
    return side.objective.evaluate(federation.server.w, {}, [test])[1]


@pytest.mark.parametrize("sam_on", [False, True], ids=["plain", "sam"])
def test_huge_noise_destroys_learning_and_none_does_not(sam_on: bool) -> None:
    assert accuracy_after(1000.0, 1.0, sam_on) < 0.2
    assert accuracy_after(0.0, 1.0, sam_on) > 0.6


@pytest.mark.parametrize("sam_on", [False, True], ids=["plain", "sam"])
def test_a_tiny_bound_barely_moves_the_weights(sam_on: bool) -> None:
    side = digit_side(protected(sam_on, 0.0, clip=1e-6), (60,), batch_size=20, epochs=2)
    _, _, messages = train(side, LightningEngine(side), 1)
    # A Poisson batch may be larger than expected; each example moves the mean by at most C / (q n).
    most = 0.1 * 1e-6 * messages[0].steps * 2
    assert 0 < float(messages[0].vectors["delta"].norm()) <= most


@pytest.mark.parametrize("sam_on", [False, True], ids=["plain", "sam"])
def test_noise_has_the_declared_standard_deviation(sam_on: bool) -> None:
    steps, lr, multiplier, clip = 8, 0.1, 2.0, 1e-3
    side = digit_side(protected(sam_on, multiplier, clip, lr=lr), (60,), batch_size=20, epochs=4, max_steps=steps)
    _, _, messages = train(side, LightningEngine(side), 1)
    quiet_side = digit_side(protected(sam_on, 0.0, clip, lr=lr), (60,), batch_size=20, epochs=4, max_steps=steps)
    _, _, quiet = train(quiet_side, LightningEngine(quiet_side), 1)
    noise = messages[0].vectors["delta"] - quiet[0].vectors["delta"]
    declared = messages[0].releases[0].noise / 20 * lr * math.sqrt(steps)
    assert float(noise.std()) == pytest.approx(declared, rel=0.05)


def test_an_update_is_clipped_noised_and_declared() -> None:
    shield = Protection("update", 0.01, (3.0, 3.0), "replace_one")
    side = digit_side(dp_fedavg(sgd(0.1), protection=shield), (60, 60))
    _, _, messages = train(side, LightningEngine(side), 1)
    for message in messages:
        (release,) = message.releases
        assert (release.unit, release.sensitivity, release.noise) == ("client", 0.02, 0.03)
        assert release.noise_multiplier == 1.5  # replacing a client moves the clipped update by up to 2C
        assert float(message.vectors["delta"].std()) == pytest.approx(0.03, rel=0.05)
        assert message.undeclared == ()
    assert not torch.equal(messages[0].vectors["delta"], messages[1].vectors["delta"])


# Case H09: wrapped once, plain names, one accountant for all rounds.


def test_five_rounds_of_three_clients_wrap_once() -> None:
    side = digit_side(protected(True, 1.0, k=3), (30, 30, 30))
    federation, _, messages = train(side, LightningEngine(side), 5)
    names = set(side.objective.layout.state_dict(federation.server.w, federation.server.buffers))
    assert names == set(small_net().state_dict())
    assert [m.releases[0].count for m in messages] == [2, 2, 2]


# The guard: SAM behind a clipped step on raw gradients is not private and is never stepped along.


@pytest.mark.parametrize("engine", [DebugEngine, LightningEngine])
def test_a_step_that_was_not_privatised_is_refused(engine: type) -> None:
    good = protected(True, 1.0)
    from dataclasses import replace

    bad = replace(good, solver=LocalSolver(sgd(0.1), ()))
    side = digit_side(bad, (40,))
    with pytest.raises(PrivacyError, match="follows 0 private gradients"):
        train(side, engine(side), 1)
    twice = replace(good, solver=LocalSolver(sgd(0.1), (private(1.0, (1.0,)), sam(0.05))))
    side = digit_side(twice, (40,))
    with pytest.raises(PrivacyError, match="follows 2 private gradients"):
        train(side, engine(side), 1)


def test_naive_sam_would_break_the_sensitivity_the_shipped_one_keeps() -> None:
    """Golden dp_sam/naive_sensitivity: one added example moves a batch-level ascent and with it every gradient."""
    common = torch.tensor([0.1] * 32 + [-0.1] * 31, dtype=torch.float64)

    class Points:
        def per_sample_gradients(self, w: torch.Tensor, batch: tuple) -> torch.Tensor:
            return w - batch[0].unsqueeze(1)

        def gradient(self, w: torch.Tensor, batch: tuple) -> torch.Tensor:
            return self.per_sample_gradients(w, batch).mean(dim=0)

        def begin_step(self) -> None: ...

        def take_losses(self) -> tuple:
            return ()

    w, extra = torch.zeros(1, dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64)
    sums = {"naive": [], "shipped": []}
    for x in (common, torch.cat([common, extra])):
        batch = x, torch.zeros(len(x))
        points = Points()
        e = 0.05 * torch.sign(points.gradient(w, batch))
        sums["naive"].append(float((w + e - x.unsqueeze(1)).clamp(-1, 1).sum()))
        ctx = Context(0, w, points, torch.Generator(), 1.0, previous=torch.ones(1, dtype=torch.float64))
        algorithm = protected(True, 0.0)
        grad = points.gradient
        for transform in algorithm.solver.transforms:
            grad = transform(grad, ctx)
        sums["shipped"].append(float(grad(w, batch)))
    assert sums["naive"] == pytest.approx([-3.25, 3.4], abs=1e-12)
    assert abs(sums["shipped"][1] - sums["shipped"][0]) <= 1.0


def test_infinite_bound_without_noise_is_the_plain_update() -> None:
    from fl_lightning.records import Message

    message = Message(0, 5, 1, {"delta": torch.tensor([3.0, 4.0])})
    sent = clip_noise(math.inf, (0.0,), "zero_out").encode(message, torch.Generator(), {})
    assert torch.equal(sent.vectors["delta"], message.vectors["delta"])
    assert sent.releases[0].noise == 0.0
