"""Rules of `privacy.*` where whole clients are protected: trust models, secret cohorts, clip bounds."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault
from fl_lightning.config.plugins import OwnAlgorithm
from fl_lightning.config.privacy import ClientPrivacy, SamplePrivacy, UpdatePrivacy

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

SUMMED = ("dp_fedavg", "dp_fedsam", "dp_scaffold", "sam_adpfl")
"""Algorithms whose server needs no more than the weighted sum of the uploads."""

PLAIN = ("dp_fedavg", "dp_fedsam")
"""Algorithms that are FedAvg but for the client's gradient, so that any clip bound and any clipped vector fits them."""

PROVEN = {
    "poisson": ("add_remove", "zero_out"),
    "without_replacement": ("replace_one",),
    "full": ("add_remove", "zero_out", "replace_one"),
}
"""Sampling -> neighbouring relations for which an accountant proves amplification."""


def proven(privacy: SamplePrivacy | ClientPrivacy) -> Iterator[Fault]:
    """Whether the sampling and the neighbouring relation have a proof together."""
    if privacy.adjacency in PROVEN[privacy.sampling]:
        return
    fitting = next(sampling for sampling in ("without_replacement", "poisson") if sampling != privacy.sampling)
    yield Fault(
        "privacy.adjacency",
        f"has no proof with privacy.sampling={privacy.sampling}: use adjacency={PROVEN[privacy.sampling][0]}, or "
        f"sampling={fitting} or full",
        privacy.adjacency,
    )


def client_faults(config: "RunConfig", privacy: ClientPrivacy) -> Iterator[Fault]:
    """Every broken rule of the levels that protect whole clients."""
    name, level, trust = config.algorithm.name, privacy.level, privacy.trust_model
    if config.algorithm.aggregate.weighting == "samples":
        yield Fault(
            "algorithm.aggregate.weighting",
            f"needs uniform with privacy.level={level}: the number of a client's samples is private there",
            "samples",
        )
    yield from proven(privacy)
    if level == "model" and name not in PLAIN:
        yield Fault("privacy.level", f"model is for algorithm={' or '.join(PLAIN)}; use update with {name}", "model")
    if level == "model" and privacy.sampling == "poisson":
        yield Fault(
            "privacy.sampling",
            "needs full or without_replacement with privacy.level=model: a mean of models needs their number",
            "poisson",
        )
    if trust != "local" and name not in SUMMED:
        yield Fault(
            "privacy.trust_model",
            f"needs local with algorithm.name={name}, whose server uses each upload by itself",
            trust,
        )
    if trust == "distributed" and name == "sam_adpfl":
        yield Fault(
            "privacy.trust_model",
            "needs local or central with algorithm.name=sam_adpfl: equal shares of noise need equal weights",
            trust,
        )
    if privacy.sampling != "full":
        yield from _secret(config, privacy)
    if privacy.noise_cohort_size is not None:
        if trust == "local":
            yield Fault(
                "privacy.noise_cohort_size",
                "needs privacy.trust_model=central or distributed: the noise of a local upload knows no cohort",
                privacy.noise_cohort_size,
            )
        if privacy.noise_cohort_size < config.fl.cohort_size:
            yield Fault(
                "privacy.noise_cohort_size",
                f"needs at least the cohort, fl.clients_per_round={config.fl.cohort_size}",
                privacy.noise_cohort_size,
            )
    yield from _bound(config, privacy)


def _secret(config: "RunConfig", privacy: ClientPrivacy) -> Iterator[Fault]:
    """Amplification by sampling clients holds only where nobody learns who took part."""
    value, name, trust = privacy.sampling, config.algorithm.name, privacy.trust_model
    if trust == "local":
        yield Fault(
            "privacy.sampling",
            "needs full with privacy.trust_model=local: the server sees who takes part, so nothing is amplified; "
            "or privacy.trust_model=central",
            value,
        )
    if trust == "distributed" and value == "poisson":
        yield Fault(
            "privacy.sampling",
            "needs without_replacement or full with privacy.trust_model=distributed: a small cohort's shares would "
            "not add up to the noise",
            value,
        )
    if name == "sam_adpfl":
        yield Fault(
            "privacy.sampling",
            "needs full with algorithm.name=sam_adpfl: its scalars show who took part",
            value,
        )
    if name == "dp_scaffold":
        yield Fault(
            "privacy.sampling",
            "needs full with algorithm.name=dp_scaffold, whose clients remember their visits",
            value,
        )
    if config.fl.cohort_schedule is not None:
        yield Fault(
            "privacy.sampling",
            "needs full with fl.cohort_schedule: listed cohorts are no secret",
            value,
        )


def _bound(config: "RunConfig", privacy: ClientPrivacy) -> Iterator[Fault]:
    if not isinstance(privacy, UpdatePrivacy):
        if isinstance(config.algorithm, OwnAlgorithm):
            yield Fault("privacy.level", "needs sample or update with an algorithm of your own", privacy.level)
        return
    if privacy.quantile is not None and privacy.clip_bound != "quantile":
        yield Fault("privacy.quantile", f"would be ignored with privacy.clip_bound={privacy.clip_bound}; remove it")
    if privacy.clip_bound == "quantile" and config.algorithm.name not in PLAIN:
        yield Fault(
            "privacy.clip_bound", f"quantile is for algorithm={' or '.join(PLAIN)}; use fixed or per_layer", "quantile"
        )
    if privacy.clip_bound != "fixed" and isinstance(config.algorithm, OwnAlgorithm):
        yield Fault("privacy.clip_bound", "needs fixed with an algorithm of your own", privacy.clip_bound)
