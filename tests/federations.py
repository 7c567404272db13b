"""Small real federations that several tests share."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.analysis.quadratic import ClientNumbers, Quadratic, QuadraticObjective
from fl_lightning.client.visit import ClientSide, Schedule, has_batch_norm
from fl_lightning.data.loading import ImageStore
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.federation import Federation, fit, initial, run_round
from fl_lightning.records import Message, RoundRecord


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    images = torch.tensor((data.images * 255 / 16).round()).to(torch.uint8).unsqueeze(1)
    return images, torch.tensor(data.target)


def small_net(norm: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Conv2d(1, 4, 3, padding=1)]
    if norm:
        layers.append(nn.BatchNorm2d(4))
    return nn.Sequential(*layers, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def digit_side(
    algorithm: Algorithm,
    sizes: Sequence[int],
    *,
    batch_size: int = 16,
    epochs: int = 1,
    max_steps: int | None = None,
    model: nn.Module | None = None,
    seed: int = 42,
    per_sample: str = "opacus",
    dtype: torch.dtype = torch.float32,
) -> ClientSide:
    """Client k holds the next sizes[k] digits."""
    images, labels = digits()
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    shards = [torch.arange(a, b) for a, b in pairwise(starts)]
    network = model if model is not None else small_net()
    objective = ModelObjective(network, dtype=dtype, per_sample=per_sample)
    store = ImageStore(images, labels, [0.3], [0.37], dtype=dtype)
    return ClientSide(
        algorithm, objective, store, shards, Schedule(batch_size, epochs, max_steps), seed, has_batch_norm(network)
    )


def start(side: ClientSide) -> Federation:
    return initial(side.objective.initial, side.objective.buffers())


def train(
    side: ClientSide, engine: object, rounds: int, cohort: Sequence[int] | None = None
) -> tuple[Federation, list[RoundRecord], list[Message]]:
    """Runs `rounds` rounds without evaluation; returns the last state, all records, the last messages."""
    everyone = cohort if cohort is not None else range(len(side.shards))
    steps = list(
        fit(
            start(side),
            rounds=rounds,
            cohort_of=lambda r: everyone,
            algorithm=side.algorithm,
            engine=engine,
            evaluate=lambda server: None,
        )
    )
    federation, _, messages = steps[-1]
    return federation, [record for _, record, _ in steps], messages


def quadratic_round(
    clients: Sequence[Quadratic], algorithm: Algorithm, x: Tensor, local_steps: int, seed: int = 0
) -> tuple[Tensor, list[Message]]:
    """One full-participation round on quadratic clients with `local_steps` gradient steps each; the new model."""
    shards = [torch.tensor([i]) for i in range(len(clients))]
    side = ClientSide(algorithm, QuadraticObjective(clients), ClientNumbers(), shards, Schedule(1, local_steps), seed)
    federation, messages, _ = run_round(initial(x, {}), range(len(clients)), algorithm, DebugEngine(side), ledger=None)
    return federation.server.w, messages


def quadratic_rounds(
    clients: Sequence[Quadratic],
    algorithm: Algorithm,
    x: Tensor,
    local_steps: int | Sequence[int],
    cohorts: Sequence[Sequence[int]],
    seed: int = 0,
) -> list[Federation]:
    """The federation after each round; `local_steps` of all clients, or of each (as many samples as steps, then)."""
    if isinstance(local_steps, int):
        shards, schedule = [torch.tensor([i]) for i in range(len(clients))], Schedule(1, local_steps)
    else:
        shards, schedule = [torch.full((q,), i) for i, q in enumerate(local_steps)], Schedule(1, 1)
    side = ClientSide(algorithm, QuadraticObjective(clients), ClientNumbers(), shards, schedule, seed)
    federations = [initial(x, {})]
    for cohort in cohorts:
        federations.append(run_round(federations[-1], cohort, algorithm, DebugEngine(side), ledger=None)[0])
    return federations[1:]
