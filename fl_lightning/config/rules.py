"""Rules that join two settings, and what a user should be told of a valid configuration."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fl_lightning.config.adaptive import adaptive_faults
from fl_lightning.config.baselines import baseline_faults
from fl_lightning.config.faults import Fault
from fl_lightning.config.plugins import OwnModel, plugin_faults
from fl_lightning.config.protection import protection_faults, protection_notes
from fl_lightning.config.proxy import proxy_faults, proxy_notes
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.errors import ConfigError
from fl_lightning.models import check_fit

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig


def broken_rules(config: "RunConfig") -> list[Fault]:
    """Every rule between settings that `config` breaks; each value by itself is already within its bounds."""
    return [
        *_cohort(config),
        *_checkpoints(config),
        *_partition(config),
        *_engine(config),
        *protection_faults(config),
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
    if getattr(config.model, "norm", None) == "batch" and config.privacy.level in ("update", "model"):
        found.append(
            "model.norm=batch: BatchNorm statistics leave the clients unprotected, so the run is NOT PRIVATE; "
            "model.norm=group has none"
        )
    return (*found, *protection_notes(config), *proxy_notes(config))


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


def _checkpoints(config: "RunConfig") -> Iterator[Fault]:
    every = config.fl.checkpoint_every
    if every is not None and not config.tracking.enabled:
        yield Fault(
            "fl.checkpoint_every", "would be ignored with tracking.enabled=false: a run without an id has none", every
        )
    if every is not None and getattr(config.privacy, "audit", False):
        yield Fault(
            "fl.checkpoint_every", "would be ignored with privacy.audit=true: an audited run cannot be resumed", every
        )


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
