"""Small real federations for the identities: scikit-learn's digits at fp64 through the code that `run` uses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.build import Prepared, prepare
from fl_lightning.clip_threshold import measured
from fl_lightning.config import RunConfig
from fl_lightning.federation import fit, initial
from fl_lightning.records import Message, Vector

Settings = Mapping[str, Any]
"""Values by dotted key, as on the command line: {"algorithm.name": "fedsam", "algorithm.local.rho": 0.1}."""

SMALL: Settings = {
    "seed": 7,
    "data.name": "digits",
    "data.subset": 0.08,
    "partition.kind": "dirichlet",
    "partition.alpha": 1.0,
    "partition.min_samples": 6,
    "fl.num_clients": 4,
    "fl.clients_per_round": 3,
    "fl.rounds": 2,
    "fl.batch_size": 8,
    "fl.max_local_steps": 3,
    "engine.device": "cpu",
    "engine.precision": "fp64",
    "tracking.enabled": False,
}
"""Clients of different sizes and step counts, of which some stay away in a round."""

ENGINES = ("debug", "lightning")


def config_of(*settings: Settings) -> RunConfig:
    """The small federation with settings laid over it, the last winning.

    Raises:
        ConfigError: as from any configuration.
    """
    whole: dict[str, Any] = {}
    for dotted, value in {key: value for each in (SMALL, *settings) for key, value in each.items()}.items():
        *parents, last = dotted.split(".")
        section = whole
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return RunConfig(**whole)


def trained(prepared: Prepared) -> tuple[list[Vector], list[list[Message]]]:
    """The global model before the first round and after each, and the messages of each round.

    Training moves the prepared model's own weights, so a prepared run is trained once.
    """
    start = initial(prepared.objective.initial, prepared.objective.buffers())
    prepared, _ = measured(prepared, start)
    engine = prepared.engine()
    models, messages = [start.server.w], []
    try:
        for federation, _, sent in fit(
            start,
            rounds=prepared.config.fl.rounds,
            cohort_of=lambda round: prepared.cohorts[round - 1],
            algorithm=prepared.algorithm,
            engine=engine,
            evaluate=lambda server: None,
        ):
            models.append(federation.server.w)
            messages.append(sent)
    finally:
        engine.close()
    return models, messages


def models_of(*settings: Settings, change: Callable[[Prepared], Prepared] | None = None) -> list[Vector]:
    """The models of the small federation under settings; `change` may put other parts into the prepared run."""
    prepared = prepare(config_of(*settings))
    return trained(prepared if change is None else change(prepared))[0]


def with_algorithm(prepared: Prepared, algorithm: Algorithm) -> Prepared:
    """The same data, clients and model under another algorithm."""
    return replace(prepared, algorithm=algorithm, side=replace(prepared.side, algorithm=algorithm))


def largest(left: list[Vector], right: list[Vector]) -> float:
    """The largest difference of any weight after any round; NaN if either holds one.

    Raises:
        ValueError: the models never moved, so that there is nothing to compare.
    """
    if torch.equal(left[0], left[-1]):
        raise ValueError("nothing was trained: the model is the same after the last round as before the first")
    return worst([float((a - b).abs().max()) for a, b in zip(left, right, strict=True)])


def worst(differences: Sequence[float]) -> float:
    """The largest difference; NaN if one is."""
    return float(torch.tensor(differences, dtype=torch.float64).max())
