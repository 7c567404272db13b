"""Checks the GPU path in a few minutes with torch, lightning, numpy and torchvision alone (no Ray, MLflow, Opacus).

    python benchmarks/gpu_check.py [--device cuda]

With `--device cpu` the same path runs on the CPU, which the tests do. Prints one line per check and exits 1 on a fault.
"""

import argparse
import sys
from time import perf_counter

import torch

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedsam import dp_fedsam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.sam_afl import sam_afl
from fl_lightning.client.visit import ClientSide, Schedule, Visit
from fl_lightning.data.loading import ImageStore
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.local.optimizers import sgd
from fl_lightning.models import build_model
from fl_lightning.records import Message, ServerState
from fl_lightning.rng import generator

CLIENTS, SAMPLES = 4, 64


def side_of(
    algorithm: Algorithm, kind: str, shape: tuple[int, int, int], device: str, bf16: bool = False
) -> ClientSide:
    count = CLIENTS * SAMPLES
    images = torch.randint(0, 256, (count, *shape), generator=generator(1, "images"), dtype=torch.uint8)
    labels = torch.randint(0, 10, (count,), generator=generator(1, "labels"))
    store = ImageStore(images, labels, [0.5] * shape[0], [0.25] * shape[0], device=device)
    model = build_model(kind, *shape, 10, generator(1, "model"))
    objective = ModelObjective(model, device, autocast=bf16, per_sample="vmap")
    return ClientSide(algorithm, objective, store, list(torch.arange(count).split(SAMPLES)), Schedule(32, 2), 1)


def deltas(side: ClientSide, engine: type) -> torch.Tensor:
    server = ServerState(side.objective.initial)
    messages: list[Message] = list(engine(side).run(server, [Visit(1, client) for client in range(CLIENTS)]))
    return torch.stack([message.vectors["delta"] for message in messages])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA GPU is visible; run with --device cpu to check the path itself")
        return 2
    torch.set_num_threads(1)
    shield = Protection("sample", 1.0, (1.0,) * CLIENTS)
    algorithms = {
        "fedavg": fedavg(sgd(0.05)),
        "sam_afl": sam_afl(sgd(0.05), rho=0.05, mu=10.0),
        "dp_fedsam": dp_fedsam(sgd(0.05), rho=0.05, protection=shield),
    }
    faults = 0
    for kind, shape in (("lenet5", (1, 28, 28)), ("vgg_like", (3, 32, 32))):
        for name, algorithm in algorithms.items():
            reference = deltas(side_of(algorithm, kind, shape, "cpu"), DebugEngine)
            start = perf_counter()
            got = deltas(side_of(algorithm, kind, shape, device), LightningEngine)
            seconds = perf_counter() - start
            difference = float((got - reference).norm() / reference.norm())
            sound = difference < (1e-6 if device == "cpu" else 2e-2)
            faults += not sound
            print(f"{'ok  ' if sound else 'FAIL'} {kind:8} {name:9} {device} vs cpu: {difference:.1e}  {seconds:.2f} s")
    rough = deltas(side_of(algorithms["fedavg"], "lenet5", (1, 28, 28), device, bf16=True), LightningEngine)
    sound = bool(torch.isfinite(rough).all()) and float(rough.norm()) > 0
    faults += not sound
    print(f"{'ok  ' if sound else 'FAIL'} lenet5   fedavg    {device} bf16 trains")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
