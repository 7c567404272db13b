"""How much the engines cost, as ratios to a hand-written loop in one process on one thread.

    python benchmarks/engines.py [--visits 40] [--repeats 3]

Each figure is the best of the repeats; the loop is plain PyTorch: a module, torch.optim.SGD, one batch after another.
"""

import argparse
from collections.abc import Callable
from time import perf_counter

import torch
from torch.nn import functional as F

from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedsam import fedsam
from fl_lightning.client.visit import ClientSide, Schedule, Visit, plan
from fl_lightning.data.loading import ImageStore
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.local.optimizers import sgd
from fl_lightning.models import build_model
from fl_lightning.records import Message, ServerState
from fl_lightning.rng import generator

SHAPES = {"lenet5": (1, 28, 28), "vgg_like": (3, 32, 32)}


def client_side(kind: str, algorithm: object, visits: int, samples: int) -> ClientSide:
    """Random images of the right shape: speed does not depend on what they show."""
    shape = SHAPES[kind]
    images = torch.randint(0, 256, (visits * samples, *shape), generator=generator(0, "images"), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),), generator=generator(0, "labels"))
    store = ImageStore(images, labels, [0.5] * shape[0], [0.25] * shape[0])
    objective = ModelObjective(build_model(kind, *shape, 10, generator(0, "model")))
    shards = list(torch.arange(len(images)).split(samples))
    return ClientSide(algorithm, objective, store, shards, Schedule(64), 0)


def by_hand(side: ClientSide, visits: list[Visit], kind: str) -> None:
    model = build_model(kind, *SHAPES[kind], 10, generator(0, "model"))
    start = [p.detach().clone() for p in model.parameters()]
    for visit in visits:
        with torch.no_grad():
            for p, s in zip(model.parameters(), start, strict=True):
                p.copy_(s)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for indices in plan(side, visit)[0]:
            x, y = side.store.batch(indices)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def one_round(engine: type, side: ClientSide, server: ServerState, visits: list[Visit]) -> list[Message]:
    return list(engine(side).run(server, visits))


def best(repeats: int, action: Callable[..., object], *arguments: object) -> float:
    times = []
    for _ in range(repeats):
        start = perf_counter()
        action(*arguments)
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':9} {'examples':>8} {'loop s':>8} {'debug':>7} {'lightning':>9} {'lightning, SAM':>15}")
    for kind, samples in (("lenet5", 16), ("lenet5", 256), ("vgg_like", 128)):
        visits = [Visit(1, client) for client in range(arguments.visits if samples < 100 else arguments.visits // 4)]
        plain = client_side(kind, fedavg(sgd(0.1)), len(visits), samples)
        sharp = client_side(kind, fedsam(sgd(0.1), rho=0.05), len(visits), samples)
        server = ServerState(plain.objective.initial)
        loop = best(arguments.repeats, by_hand, plain, visits, kind)
        debug = best(arguments.repeats, one_round, DebugEngine, plain, server, visits)
        fit = best(arguments.repeats, one_round, LightningEngine, plain, server, visits)
        sam = best(arguments.repeats, one_round, LightningEngine, sharp, server, visits)
        print(f"{kind:9} {samples:8} {loop:8.3f} {debug / loop:7.2f} {fit / loop:9.2f} {sam / loop:15.2f}")


if __name__ == "__main__":
    main()
