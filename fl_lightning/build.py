"""From a validated configuration to the objects that run it. Everything that can be refused is refused here."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.client.visit import ClientSide, Schedule, check_trainable, has_batch_norm
from fl_lightning.config import RunConfig
from fl_lightning.config.contrast import Moon
from fl_lightning.config.models import ResNet18
from fl_lightning.config.plugins import OwnData, OwnModel
from fl_lightning.config.privacy import ClientPrivacy, NoPrivacy
from fl_lightning.config.proxy import LearnedWeights
from fl_lightning.data.datasets import ImageData, load_data
from fl_lightning.data.loading import ImageStore
from fl_lightning.data.partition import Partition, make_partition
from fl_lightning.data.proxy import ProxySet, hold_out
from fl_lightning.data.validation import split_off
from fl_lightning.engine.apart import check_apart
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.errors import ConfigError
from fl_lightning.federation import Engine, poisson_cohort, sample_cohort
from fl_lightning.mechanism import protected
from fl_lightning.methods import build_algorithm
from fl_lightning.models import build_model
from fl_lightning.plugins.loading import ship_by_value
from fl_lightning.plugins.making import own_data, own_model
from fl_lightning.records import ServerState
from fl_lightning.releases import ReleasePlan
from fl_lightning.rng import generator
from fl_lightning.shield import Noise, protection, solve_noise, visits_of
from fl_lightning.vector import ParamLayout

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
    noise: Noise
    public_examples: int = 0
    """Examples the server itself holds, which no epsilon covers."""
    releases: ReleasePlan | None = None
    """What the clients are going to release, None without a level of privacy."""

    def evaluate(self, server: ServerState) -> tuple[float, float] | None:
        """(loss, accuracy) on the whole test set; None when it is empty."""
        positions = torch.arange(len(self.test)).split(EVALUATION_BATCH)
        return self.objective.evaluate(server.w, server.buffers, [self.test.batch(p) for p in positions])

    def validate(self, server: ServerState) -> tuple[float, float] | None:
        """(loss, accuracy) on all examples that the clients hold out; None where they hold out none."""
        positions = self.partition.held_out.split(EVALUATION_BATCH) if self.partition.held else ()
        return self.objective.evaluate(server.w, server.buffers, [self.side.store.batch(p) for p in positions])

    def engine(self) -> Engine:
        """A new engine of the configured kind."""
        if self.config.engine.kind == "debug":
            from fl_lightning.engine.debug import DebugEngine

            return DebugEngine(self.side)
        if self.config.engine.workers > 1:
            from fl_lightning.engine.workers import WorkerEngine

            ship_by_value()
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
    fl = config.fl
    data = data_of(config)
    model = network(config, data.shape, data.num_classes)
    data, held = held_out(config, data)
    partition = dealt(config, data)
    cohorts = planned_cohorts(config)
    visits = visits_of(cohorts, fl.num_clients)
    shards = partition.indices
    if getattr(config.privacy, "audit", False):
        from fl_lightning.canaries import with_canaries

        shards = with_canaries(config, partition.indices, visits, len(data.y_train))
    sizes = [len(shard) for shard in shards]
    noise = solve_noise(config, sizes, visits)
    device = device_of(config.engine.device, config.engine.workers)
    dtype = torch.float64 if config.engine.precision == "fp64" else torch.float32
    objective = ModelObjective(model, device, dtype, autocast=config.engine.precision == "bf16")
    batch_norm = has_batch_norm(model)
    proxy = None
    learning = config.algorithm.aggregate
    if held is not None and isinstance(learning, LearnedWeights):
        store = ImageStore(*held, data.mean, data.std, dtype, device)
        proxy = ProxySet(objective, store, learning.proxy_batch_size, config.seed, batch_norm)
    if isinstance(config.model, OwnModel) and config.privacy.level == "sample":
        check_apart(objective, data.shape, data.num_classes, config.seed)
    shield = protection(config, noise, layers_of(objective.layout))
    algorithm = build_algorithm(config, shield, noise=noise, visits=visits, proxy=proxy)
    releases = None if isinstance(config.privacy, NoPrivacy) else ReleasePlan(config, sizes, visits)
    if releases is not None:
        algorithm = protected(algorithm, config, releases)
    side = ClientSide(
        algorithm=algorithm,
        objective=objective,
        store=ImageStore(data.x_train, data.y_train, data.mean, data.std, dtype, device),
        shards=shards,
        schedule=Schedule(fl.batch_size, fl.local_epochs, fl.max_local_steps),
        seed=config.seed,
        batch_norm=batch_norm,
        keep_raw=fl.clipping_lab,
    )
    check_trainable(side, dict(enumerate(sizes)))
    test = ImageStore(data.x_test, data.y_test, data.mean, data.std, dtype, device)
    public = 0 if proxy is None else len(proxy)
    return Prepared(config, data, objective, partition, algorithm, side, test, cohorts, noise, public, releases)


def layers_of(layout: ParamLayout) -> tuple[slice, ...]:
    """The parts of the vector that belong to one layer each: weight and bias of a layer are one part."""
    parts: list[slice] = []
    names: list[str] = []
    for slot in layout.slots:
        layer, end = slot.name.rpartition(".")[0], slot.offset + slot.size
        if names and names[-1] == layer:
            parts[-1] = slice(parts[-1].start, end)
        else:
            parts.append(slice(slot.offset, end))
            names.append(layer)
    return tuple(parts)


def data_of(config: RunConfig) -> ImageData:
    """The data set of `data.name`."""
    return own_data(config.data) if isinstance(config.data, OwnData) else load_data(config.data)


def network(config: RunConfig, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The network of `model.kind` for images of `shape` [C, H, W], freshly initialised.

    Raises:
        ConfigError: it does not fit the images or the algorithm.
    """
    weights = generator(config.seed, "model")
    if isinstance(config.model, OwnModel):
        model = own_model(config.model, shape, num_classes, weights)
    else:
        norm = config.model.norm if isinstance(config.model, ResNet18) else "group"
        model = build_model(config.model.kind, *shape, num_classes, weights, norm)
    if isinstance(config.algorithm, Moon) and not callable(getattr(model, "features", None)):
        raise ConfigError(
            f"model.kind={config.model.kind}: algorithm.name=moon contrasts representations, and the network has no "
            "method features(images) that gives them, [B, h]; add it"
        )
    return model


def held_out(config: RunConfig, data: ImageData) -> tuple[ImageData, tuple[torch.Tensor, torch.Tensor] | None]:
    """The data that clients may hold, and the images and labels of the server's proxy set, if it needs one."""
    learning = config.algorithm.aggregate
    if not isinstance(learning, LearnedWeights):
        return data, None
    rest, images, labels = hold_out(data, learning.proxy_share, config.seed)
    return rest, (images, labels)


def dealt(config: RunConfig, data: ImageData) -> Partition:
    """What each client trains on, and what it holds out of that.

    Raises:
        ConfigError: the data do not suffice for what is asked.
    """
    labels = data.y_train
    whole = make_partition(labels, config.fl.num_clients, config.partition, config.seed, data.num_classes)
    return split_off(whole, labels, config.data.validation or 0.0, config.seed)


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
    poisson = isinstance(config.privacy, ClientPrivacy) and config.privacy.sampling == "poisson"
    draw = poisson_cohort if poisson else sample_cohort
    return tuple(draw(config.seed, r + 1, fl.num_clients, fl.cohort_size) for r in range(fl.rounds))


def read_schedule(path: Path, num_clients: int, rounds: int) -> tuple[tuple[int, ...], ...]:
    """Client lists per round from a JSON file: a list of `rounds` lists of clients 0..K-1, none of them empty.

    Raises:
        ConfigError: naming the file, the round and the rule.
    """
    key = f"fl.cohort_schedule={path}"
    try:
        lists = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: cannot be read as JSON: {error}") from error
    if not isinstance(lists, list) or len(lists) != rounds:
        count = len(lists) if isinstance(lists, list) else type(lists).__name__
        raise ConfigError(f"{key}: needs a list of fl.rounds={rounds} client lists, found {count}; make the two equal")
    for number, cohort in enumerate(lists[:rounds], start=1):
        sound = isinstance(cohort, list) and all(type(c) is int and 0 <= c < num_clients for c in cohort)
        if not sound or not cohort or len(set(cohort)) != len(cohort):
            raise ConfigError(
                f"{key}: round {number} is {cohort}; it must list different clients between 0 and {num_clients - 1}, "
                "at least one"
            )
    return tuple(tuple(cohort) for cohort in lists[:rounds])
