"""Rules that join two settings, and what a user should be told of a valid configuration."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fl_lightning.config.adaptive import adaptive_faults
from fl_lightning.config.algorithms import DP_ALGORITHMS, SAM_ALGORITHMS
from fl_lightning.config.baselines import baseline_faults
from fl_lightning.config.faults import Fault
from fl_lightning.config.plugins import OwnAlgorithm, OwnModel, plugin_faults
from fl_lightning.config.privacy import SamplePrivacy, UpdatePrivacy
from fl_lightning.config.proxy import proxy_faults, proxy_notes
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.errors import ConfigError
from fl_lightning.models import check_fit

NON_PRIVATE = {"sam_adpfl": "sam_afl"}
"""Private algorithm -> its counterpart without privacy, where the name does not tell."""

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig


def broken_rules(config: "RunConfig") -> list[Fault]:
    """Every rule between settings that `config` breaks; each value by itself is already within its bounds."""
    return [
        *_cohort(config),
        *_partition(config),
        *_engine(config),
        *_protection(config),
        *adaptive_faults(config),
        *baseline_faults(config),
        *proxy_faults(config),
        *plugin_faults(config),
        *_model(config),
        *_tracking(config),
    ]


def notes(config: "RunConfig") -> tuple[str, ...]:
    """What is allowed but worth a sentence before the run starts."""
    fl = config.fl
    found = []
    if fl.client_fraction is not None and round(fl.client_fraction * fl.num_clients) < 1:
        found.append(
            f"fl.client_fraction={fl.client_fraction:g} of {fl.num_clients} clients is none: 1 client is sampled"
        )
    if getattr(config.model, "norm", None) == "batch" and config.privacy.level == "update":
        found.append(
            "model.norm=batch: BatchNorm statistics leave the clients unprotected, so the run is NOT PRIVATE; "
            "model.norm=group has none"
        )
    return (*found, *proxy_notes(config))


def _cohort(config: "RunConfig") -> Iterator[Fault]:
    fl = config.fl
    if fl.clients_per_round is not None and fl.clients_per_round > fl.num_clients:
        yield Fault(
            "fl.clients_per_round",
            f"needs at most fl.num_clients={fl.num_clients}; lower it, or raise fl.num_clients",
            fl.clients_per_round,
        )
    if fl.clients_per_round is not None and fl.client_fraction is not None:
        yield Fault(
            "fl.client_fraction",
            f"contradicts fl.clients_per_round={fl.clients_per_round}; set one of the two",
            fl.client_fraction,
        )
    if fl.cohort_schedule is not None:
        for key in ("clients_per_round", "client_fraction"):
            if (value := getattr(fl, key)) is not None:
                yield Fault(f"fl.{key}", "would be ignored: fl.cohort_schedule names the cohorts; remove one", value)


def _partition(config: "RunConfig") -> Iterator[Fault]:
    if config.partition.kind == "file" and config.data.subset < 1:
        yield Fault(
            "data.subset",
            "needs 1 with partition.kind=file, whose indices mean the whole training set; shorten its lists instead",
            config.data.subset,
        )


def _engine(config: "RunConfig") -> Iterator[Fault]:
    engine = config.engine
    if engine.workers > 1 and engine.kind != "lightning":
        yield Fault(
            "engine.workers",
            f"needs 1 with engine.kind={engine.kind}; choose engine=lightning to use more",
            engine.workers,
        )


def _protection(config: "RunConfig") -> Iterator[Fault]:
    name, privacy, weighting = config.algorithm.name, config.privacy, config.algorithm.aggregate.weighting
    if privacy.level == "none":
        if name in DP_ALGORITHMS:
            yield Fault(
                "privacy.level",
                f"needs sample or update with algorithm.name={name}; "
                f"without privacy choose algorithm={NON_PRIVATE.get(name, name.removeprefix('dp_'))}",
                "none",
            )
        return
    assert isinstance(privacy, SamplePrivacy | UpdatePrivacy)
    if name not in DP_ALGORITHMS and not isinstance(config.algorithm, OwnAlgorithm):
        yield Fault(
            "privacy.level",
            f"algorithm.name={name} protects nothing; choose algorithm={' or '.join(DP_ALGORITHMS)}",
            privacy.level,
        )
    if privacy.mode == "paper" and name != "sam_adpfl":
        yield Fault(
            "privacy.mode",
            f"is the literal text of sam_adpfl and no choice of algorithm.name={name}; set privacy.mode=strict",
            "paper",
        )
    if privacy.noise_multiplier is not None and privacy.target_epsilon is not None:
        yield Fault(
            "privacy.target_epsilon",
            f"contradicts privacy.noise_multiplier={privacy.noise_multiplier:g}; set one of the two",
            privacy.target_epsilon,
        )
    if privacy.clip_norm == float("inf") and privacy.noise_multiplier != 0:
        yield Fault(
            "privacy.clip_norm",
            "needs a finite number > 0, for the noise is a multiple of it; "
            "to train without clipping set privacy.noise_multiplier=0 as well",
            privacy.clip_norm,
        )
    if isinstance(privacy, SamplePrivacy):
        if getattr(config.algorithm.local, "variant", "sam") != "sam":
            yield Fault(
                "algorithm.local.variant",
                "would be ignored with privacy.level=sample, whose ascent follows the previous private gradient; "
                "set algorithm.local.variant=sam",
                "asam",
            )
        if getattr(config.model, "norm", None) == "batch":
            yield Fault(
                "model.norm",
                "needs group with privacy.level=sample: batch statistics mix examples, so no per-example bound holds",
                "batch",
            )
        if privacy.adjacency != "add_remove":
            yield Fault(
                "privacy.adjacency",
                "needs add_remove with privacy.level=sample: Poisson batches are accounted for adding or removing one",
                privacy.adjacency,
            )
        if privacy.ascent is not None and name not in SAM_ALGORITHMS:
            yield Fault(
                "privacy.ascent",
                f"would be ignored with algorithm.name={name}, which has no ascent; remove it",
                privacy.ascent,
            )
    elif weighting == "samples":
        yield Fault(
            "algorithm.aggregate.weighting",
            "needs uniform with privacy.level=update: the number of a client's samples is private there",
            weighting,
        )


def _model(config: "RunConfig") -> Iterator[Fault]:
    """Whether the network fits the images; a user's own images are looked at when they are loaded."""
    known = KNOWN_SETS.get(config.data.name)
    if known is None or isinstance(config.model, OwnModel):
        return
    try:
        check_fit(config.model.kind, *known.shape)
    except ConfigError as error:
        reason = str(error).removeprefix(f"model.kind={config.model.kind}: ")
        yield Fault("model.kind", f"does not fit data.name={config.data.name}: {reason}", config.model.kind)


def _tracking(config: "RunConfig") -> Iterator[Fault]:
    if config.tracking.uri is not None and urlsplit(config.tracking.uri).password is not None:
        yield Fault(
            "tracking.uri",
            "holds a password, which would be stored with the run; give the address in MLFLOW_TRACKING_URI instead",
        )
