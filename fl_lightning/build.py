"""From a validated configuration to the objects that run it. Everything that can be refused is refused here."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.dp_fedsam import dp_fedsam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedprox import fedprox
from fl_lightning.algorithms.fedsam import fedsam
from fl_lightning.algorithms.sam_afl import sam_afl
from fl_lightning.client.visit import ClientSide, Schedule, check_trainable, has_batch_norm
from fl_lightning.config import RunConfig
from fl_lightning.config.privacy import NoPrivacy
from fl_lightning.data.datasets import ImageData, load_data
from fl_lightning.data.loading import ImageStore, planned_steps, poisson_rate
from fl_lightning.data.partition import Partition, make_partition
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.errors import ConfigError
from fl_lightning.federation import Engine, sample_cohort
from fl_lightning.local.optimizers import LocalOptimizer, adam, momentum, sgd
from fl_lightning.models import build_model, check_fit
from fl_lightning.privacy.calibrate import calibrate_many, calibrate_noise
from fl_lightning.records import Release, ServerState
from fl_lightning.rng import generator
from fl_lightning.server.aggregate import by_samples, uniform
from fl_lightning.uplink.clip_noise import SENSITIVITY

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    config: RunConfig
    data: ImageData
    objective: ModelObjective
    partition: Partition
    algorithm: Algorithm
    side: ClientSide
    test: ImageStore
    cohorts: tuple[tuple[int, ...], ...]

    def evaluate(self, server: ServerState) -> tuple[float, float] | None:
        """(loss, accuracy) on the whole test set; None when it is empty."""
        positions = torch.arange(len(self.test)).split(EVALUATION_BATCH)
        return self.objective.evaluate(server.w, server.buffers, [self.test.batch(p) for p in positions])

    def engine(self) -> Engine:
        """A new engine of the configured kind."""
        if self.config.engine.kind == "debug":
            from fl_lightning.engine.debug import DebugEngine

            return DebugEngine(self.side)
        if self.config.engine.workers > 1:
            from fl_lightning.engine.workers import WorkerEngine

            return WorkerEngine(self.side, self.config.engine.workers)
        from fl_lightning.engine.lightning import LightningEngine

        return LightningEngine(self.side)


def prepare(config: RunConfig) -> Prepared:
    """Loads the data, deals it out, solves the noise and builds the model.

    Raises:
        ConfigError: the parts do not fit each other.
        DataError: the data set cannot be read.
        PrivacyError: the demanded epsilon cannot be met.
    """
    data = load_data(config.data)
    check_fit(config.model.kind, *data.shape)
    fl = config.fl
    partition = make_partition(data.y_train, fl.num_clients, config.partition, config.seed, data.num_classes)
    sizes = [len(shard) for shard in partition.indices]
    cohorts = planned_cohorts(config)
    algorithm = build_algorithm(config, protection(config, sizes, cohorts))
    device = device_of(config.engine.device, config.engine.workers)
    dtype = torch.float64 if config.engine.precision == "fp64" else torch.float32
    model = build_model(config.model.kind, *data.shape, data.num_classes, generator(config.seed, "model"))
    objective = ModelObjective(model, device, dtype, autocast=config.engine.precision == "bf16")
    side = ClientSide(
        algorithm=algorithm,
        objective=objective,
        store=ImageStore(data.x_train, data.y_train, data.mean, data.std, dtype, device),
        shards=partition.indices,
        schedule=Schedule(fl.batch_size, fl.local_epochs, fl.max_local_steps),
        seed=config.seed,
        batch_norm=has_batch_norm(model),
    )
    check_trainable(side, dict(enumerate(sizes)))
    test = ImageStore(data.x_test, data.y_test, data.mean, data.std, dtype, device)
    return Prepared(config, data, objective, partition, algorithm, side, test, cohorts)


def device_of(name: str, workers: int) -> torch.device:
    """The device `auto`, `cpu` or `cuda` stands for here.

    Raises:
        ConfigError: a GPU is asked for and there is none, or it is asked to serve several processes.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device=cuda: no CUDA GPU is visible; use engine.device=auto or cpu")
    if name == "cuda" and workers > 1:
        raise ConfigError(
            f"engine.workers={workers} with engine.device=cuda: worker processes are CPU workers; use engine.workers=1"
        )
    return torch.device("cuda" if name != "cpu" and workers == 1 and torch.cuda.is_available() else "cpu")


def planned_cohorts(config: RunConfig) -> tuple[tuple[int, ...], ...]:
    """Every round's cohort. It depends on the seed or the schedule file alone, never on data, so it is known ahead.

    Raises:
        ConfigError: the schedule file is absent or lists what cannot be.
    """
    fl = config.fl
    if fl.cohort_schedule is not None:
        return read_schedule(fl.cohort_schedule, fl.num_clients, fl.rounds)
    return tuple(sample_cohort(config.seed, r + 1, fl.num_clients, fl.cohort_size) for r in range(fl.rounds))


def read_schedule(path: Path, num_clients: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """Client lists per round from a JSON file: a list of at least `rounds` lists of clients 0..K-1.

    Raises:
        ConfigError: naming the file, the round and the rule.
    """
    key = f"fl.cohort_schedule={path}"
    try:
        lists = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be read as JSON: {error}") from error
    if not isinstance(lists, list) or len(lists) < rounds:
        count = len(lists) if isinstance(lists, list) else type(lists).__name__
        raise ConfigError(f"{key}: needs a list of fl.rounds={rounds} client lists, found {count}; shorten fl.rounds")
    for number, cohort in enumerate(lists[:rounds], start=1):
        sound = isinstance(cohort, list) and all(type(c) is int and 0 <= c < num_clients for c in cohort)
        if not sound or len(set(cohort)) != len(cohort):
            raise ConfigError(
                f"{key}: round {number} is {cohort}; it must list different clients between 0 and {num_clients - 1}"
            )
    return tuple(tuple(cohort) for cohort in lists[:rounds])


def protection(config: RunConfig, sizes: Sequence[int], cohorts: Sequence[Sequence[int]]) -> Protection:
    """The noise of every client, from `privacy.noise_multiplier` or solved for `privacy.target_epsilon`.

    At level "sample" each client's multiplier is solved for its own rate and number of steps, so that all spend the
    same epsilon. At level "update" one multiplier serves all: that of the client who takes part most often.
    """
    privacy, fl = config.privacy, config.fl
    if isinstance(privacy, NoPrivacy):
        return Protection()
    target = privacy.target_epsilon or 0.0  # read only where no multiplier is given, and then the schema has set it
    visits = [sum(client in cohort for cohort in cohorts) for client in range(fl.num_clients)]
    if privacy.noise_multiplier is not None:
        multipliers = [float(privacy.noise_multiplier)] * fl.num_clients
    elif privacy.level == "sample":
        plans = [
            (
                poisson_rate(n, fl.batch_size),
                max(1, v) * planned_steps(n, fl.batch_size, fl.local_epochs, fl.max_local_steps),
            )
            for n, v in zip(sizes, visits, strict=True)
        ]
        multipliers = calibrate_many(plans, target, privacy.delta)
    else:
        most = max(1, *visits)

        def releases(z: float) -> list[Release]:
            reach = SENSITIVITY[privacy.adjacency]
            return [Release("gaussian", "client", reach, z, count=most, adjacency=privacy.adjacency)]

        multipliers = [calibrate_noise(releases, target, privacy.delta)] * fl.num_clients
    return Protection(
        level=privacy.level,
        clip=privacy.clip_norm,
        multipliers=tuple(multipliers),
        adjacency=privacy.adjacency,
        delta=privacy.delta,
        physical_batch_size=getattr(privacy, "physical_batch_size", None),
    )


def optimizer(local: Any) -> LocalOptimizer:
    """The client's optimizer."""
    if local.optimizer == "adam":
        return adam(local.lr, local.beta1, local.beta2, weight_decay=local.weight_decay)
    if local.optimizer == "momentum":
        return momentum(local.lr, local.momentum, local.weight_decay)
    return sgd(local.lr, local.weight_decay)


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedsam": fedsam,
    "sam_afl": sam_afl,
    "dp_fedavg": dp_fedavg,
    "dp_fedsam": dp_fedsam,
}


def build_algorithm(config: RunConfig, shield: Protection) -> Algorithm:
    """The algorithm named by `algorithm.name`: each of its parameters is the setting of the same name."""
    local, server = config.algorithm.local, config.algorithm.aggregate
    offered: dict[str, Any] = {
        **dict(local),
        **dict(server),
        "optimizer": optimizer(local),
        "prior": {"samples": by_samples, "uniform": uniform}[server.weighting],
        "protection": shield,
    }
    builder = ALGORITHMS[config.algorithm.name]
    return builder(**{name: offered[name] for name in signature(builder).parameters})
