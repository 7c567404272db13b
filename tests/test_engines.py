"""Engines agree bit for bit; visits, steps and buffers are counted as they happened."""

import pytest
import torch
from federations import digit_side, digits, small_net, train
from torch import nn

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.dp_fedsam import dp_fedsam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedprox import fedprox
from fl_lightning.algorithms.fedsam import fedsam
from fl_lightning.algorithms.sam_afl import sam_afl
from fl_lightning.client.visit import plan
from fl_lightning.engine.debug import DebugEngine, VisitError
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.engine.workers import WorkerEngine, deal
from fl_lightning.errors import FLError
from fl_lightning.local.optimizers import adam, momentum, sgd
from fl_lightning.records import Message, ServerState, weights_sha256
from fl_lightning.server.rules import apply
from fl_lightning.vector import ParamLayout

SIZES = (20, 7, 33, 50)
SAMPLE = Protection("sample", 1.0, (1.0, 1.1, 0.9, 1.2))
UPDATE = Protection("update", 0.5, (0.1,) * 4, "replace_one")
ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": fedavg(sgd(0.1)),
    "fedavg adam": fedavg(adam(0.01, weight_decay=1e-4)),
    "fedprox": fedprox(momentum(0.05), prox_mu=0.1),
    "fedsam": fedsam(sgd(0.1), rho=0.05),
    "fedsam asam": fedsam(sgd(0.1), rho=0.5, variant="asam"),
    "sam_afl": sam_afl(sgd(0.1), rho=0.05, mu=10.0, gamma=0.99),
    "sam_afl train_mean": sam_afl(sgd(0.1), rho=0.05, mu=10.0, gap_at="train_mean"),
    "sam_afl global_start": sam_afl(sgd(0.1), rho=0.05, mu=10.0, gap_at="global_start"),
    "dp_fedavg sample": dp_fedavg(sgd(0.1), protection=SAMPLE),
    "dp_fedavg update": dp_fedavg(sgd(0.1), protection=UPDATE),
    "dp_fedsam sample": dp_fedsam(adam(0.01), rho=0.05, protection=SAMPLE),
    "dp_fedsam update": dp_fedsam(sgd(0.1), rho=0.05, protection=UPDATE),
}


def digest(side: object, engine: object, rounds: int = 2) -> tuple[str, list[int]]:
    federation, _, messages = train(side, engine, rounds)
    return weights_sha256(federation.server.w, federation.server.buffers), [m.steps for m in messages]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_lightning_equals_debug_bit_for_bit(name: str) -> None:
    debug, loop_steps = digest(s := digit_side(ALGORITHMS[name], SIZES, epochs=2), DebugEngine(s))
    fit, fit_steps = digest(s := digit_side(ALGORITHMS[name], SIZES, epochs=2), LightningEngine(s))
    assert fit == debug
    assert fit_steps == loop_steps == [4, 2, 6, 8]


def test_batch_norm_model_equals_debug_too() -> None:
    hashes = set()
    for engine in (DebugEngine, LightningEngine):
        side = digit_side(fedsam(sgd(0.1), rho=0.05), SIZES, model=small_net(norm=True))
        hashes.add(digest(side, engine(side))[0])
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("name", "workers"), [pytest.param("sam_afl", 4, marks=pytest.mark.slow), ("dp_fedsam sample", 2)]
)
def test_any_number_of_workers_gives_the_same_bits(name: str, workers: int) -> None:
    expected = digest(s := digit_side(ALGORITHMS[name], SIZES), LightningEngine(s))
    side = digit_side(ALGORITHMS[name], SIZES)
    engine = WorkerEngine(side, workers)
    try:
        assert digest(side, engine) == expected
    finally:
        engine.close()


def test_another_seed_gives_other_bits() -> None:
    hashes = {digest(s := digit_side(fedavg(sgd(0.1)), SIZES, seed=seed), DebugEngine(s))[0] for seed in (1, 2)}
    assert len(hashes) == 2


def test_deal_gives_every_position_once_and_balances() -> None:
    shares = deal([100, 1, 1, 50, 50], 2)
    assert sorted(p for share in shares for p in share) == [0, 1, 2, 3, 4]
    assert sorted(sum([100, 1, 1, 50, 50][p] for p in share) for share in shares) == [101, 101]
    assert deal([5], 4) == [[0]]


# Case H02: batches larger than a client; a client without data.


@pytest.mark.parametrize("engine", [DebugEngine, LightningEngine])
def test_short_clients_train_on_short_batches(engine: type) -> None:
    side = digit_side(fedavg(sgd(0.1)), (7, 32, 100, 0), batch_size=32)
    _, records, messages = train(side, engine(side), 1)
    assert [m.steps for m in messages] == [1, 1, 4, 0]
    assert [len(b) for b in plan(side, _visit(0))[0]] == [7]
    assert all(float(m.vectors["delta"].norm()) > 0 for m in messages[:3])
    assert "client 3 took no step and weighs 0" in records[0].notes


def _visit(client: int) -> object:
    from fl_lightning.client.visit import Visit

    return Visit(1, client)


# Case H03: a leftover batch of one example with BatchNorm.


@pytest.mark.parametrize("engine", [DebugEngine, LightningEngine])
def test_a_single_left_over_joins_the_batch_before(engine: type) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    side = digit_side(fedavg(sgd(0.1)), (33, 20), model=flat)
    _, _, messages = train(side, engine(side), 1)
    assert [len(b) for b in plan(side, _visit(0))[0]] == [16, 17]
    assert [m.steps for m in messages] == [2, 2]


@pytest.mark.parametrize("engine", [DebugEngine, LightningEngine])
def test_one_example_under_batch_norm_is_refused_in_words(engine: type) -> None:
    side = digit_side(fedavg(sgd(0.1)), (33, 1), model=small_net(norm=True))
    with pytest.raises(FLError, match="client 1 holds 1 example and the model has BatchNorm"):
        train(side, engine(side), 1)


def test_one_example_without_batch_norm_trains() -> None:
    side = digit_side(fedavg(sgd(0.1)), (1,))
    _, _, messages = train(side, LightningEngine(side), 1)
    assert messages[0].steps == 1


# Case H10: one SAM batch is one step.


@pytest.mark.parametrize("algorithm", [fedavg(sgd(0.1)), fedsam(sgd(0.1), rho=0.05)], ids=["plain", "sam"])
@pytest.mark.parametrize(("max_steps", "expected"), [(None, 12), (5, 5)])
def test_steps_are_batches(algorithm: Algorithm, max_steps: int | None, expected: int) -> None:
    import lightning.pytorch as pl

    seen: list[int] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
            seen.append(trainer.global_step)

    side = digit_side(algorithm, (64,), epochs=3, max_steps=max_steps)
    _, _, messages = train(side, LightningEngine(side, [Watch()]), 1)
    assert messages[0].steps == expected
    assert seen == list(range(1, expected + 1))  # Lightning's own counter, one per batch


# Case H11: Trainer options that manual optimization would ignore are refused by name.


def test_trainer_clipping_is_refused_before_training() -> None:
    import lightning.pytorch as pl

    from fl_lightning.client.module import ClientModule

    side = digit_side(fedsam(sgd(0.1), rho=0.05), (20,))
    w = side.objective.initial
    for option in ({"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 4}):
        module = ClientModule(side, ServerState(w), [_visit(0)])
        trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **option)
        with pytest.raises(Exception, match=next(iter(option))):
            trainer.fit(module)
        assert not module.messages


# Case H12: SAM counts a batch once in BatchNorm statistics, at the unperturbed weights.


def test_sam_moves_running_statistics_once() -> None:
    norm = nn.BatchNorm1d(1, momentum=0.1)
    model = nn.Sequential(norm, nn.Linear(1, 2))
    objective = ModelObjective(model)
    from fl_lightning.local.solver import Context, LocalSolver
    from fl_lightning.local.transforms import sam

    x = objective.initial
    ctx = Context(0, x, objective, torch.Generator(), 4.0)
    solver = LocalSolver(sgd(0.1), (sam(0.05),))
    batch = torch.tensor([[0.5], [1.5], [0.0], [2.0]]), torch.tensor([0, 1, 0, 1])
    solver.step(solver.init(x), batch, ctx)
    assert norm.running_mean.item() == pytest.approx(0.1)
    assert norm.num_batches_tracked.item() == 1
    assert norm.momentum == 0.1


def test_zero_radius_is_the_base_optimizer_under_batch_norm() -> None:
    ends = []
    for algorithm in (fedavg(sgd(0.1)), fedsam(sgd(0.1), rho=0.0)):
        side = digit_side(algorithm, SIZES, model=small_net(norm=True))
        ends.append(train(side, DebugEngine(side), 2)[0].server)
    torch.testing.assert_close(ends[0].w, ends[1].w, rtol=0, atol=1e-6)
    for name, tensor in ends[0].buffers.items():
        torch.testing.assert_close(tensor, ends[1].buffers[name], msg=name)


# Case H29 through a whole round: the global model carries everybody's statistics.


def test_global_statistics_are_the_mean_of_the_clients() -> None:
    side = digit_side(fedavg(sgd(1e-9)), (20, 20), model=small_net(norm=True))
    federation, _, messages = train(side, LightningEngine(side), 1)
    mean = (messages[0].buffers["1.running_mean"] + messages[1].buffers["1.running_mean"]) / 2
    torch.testing.assert_close(federation.server.buffers["1.running_mean"], mean)
    assert not torch.equal(messages[0].buffers["1.running_mean"], messages[1].buffers["1.running_mean"])


def test_final_weights_load_strictly_into_a_plain_model() -> None:
    side = digit_side(ALGORITHMS["dp_fedsam sample"], SIZES)
    federation, _, _ = train(side, LightningEngine(side), 2)
    plain = small_net(seed=5)
    layout = ParamLayout.of(plain, channels_last=True)
    plain.load_state_dict(layout.state_dict(federation.server.w, federation.server.buffers), strict=True)
    x = torch.rand(3, 1, 8, 8)
    side.objective.evaluate(federation.server.w, {}, [])
    torch.testing.assert_close(plain(x), side.objective.model(x))


def test_debug_engine_names_the_place_of_a_fault() -> None:
    side = digit_side(fedavg(sgd(0.1)), (20, 20))
    side.store.labels[25] = 99
    with pytest.raises(VisitError, match=r"round 1, client 1, batch \d of 2 \(\d+ examples\): IndexError"):
        train(side, DebugEngine(side), 1)


def test_a_fault_leaves_the_round_before_intact() -> None:
    side = digit_side(fedavg(sgd(0.1)), (20, 20))
    federation, _, _ = train(side, DebugEngine(side), 1)
    before = federation.server.w.clone()
    side.store.labels[25] = 99
    from fl_lightning.federation import run_round

    with pytest.raises(VisitError):
        run_round(federation, (0, 1), side.algorithm, DebugEngine(side), None)
    assert torch.equal(federation.server.w, before)
    assert federation.server.round == 1


def test_fold_is_in_cohort_order_whatever_the_arithmetic_order() -> None:
    rule, uploads = apply(), [Message(k, 1, 1, {"delta": torch.tensor([v])}) for k, v in enumerate([1e8, 1.0, -1e8])]
    aggregate = fedavg(sgd(0.1)).aggregate(uploads)
    third = torch.tensor(0.0).add(torch.tensor(1e8), alpha=1 / 3).add(torch.tensor(1.0), alpha=1 / 3)
    expected = third.add(torch.tensor(-1e8), alpha=1 / 3)
    assert rule(ServerState(torch.zeros(1)), aggregate).w.item() == expected.item()


def test_channels_last_and_plain_layouts_agree() -> None:
    images, labels = digits()
    x, y = images[:16].float() / 255, labels[:16]
    grads = []
    for last in (True, False):
        model = small_net()
        objective = ModelObjective(model)
        if not last:
            objective.layout = ParamLayout.of(model)
            objective._flat = objective.layout.flatten(objective.parameters())
            objective._grad = torch.zeros_like(objective._flat)
            objective.layout.bind(model, objective._flat, objective._grad)
        g = objective.gradient(objective.initial, (x, y))
        grads.append({name: view.clone() for name, view in objective.layout.views(g).items()})
    for name, tensor in grads[0].items():
        torch.testing.assert_close(tensor, grads[1][name], rtol=1e-4, atol=1e-6)
