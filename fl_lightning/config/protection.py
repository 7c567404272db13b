"""Rules between `privacy.*` and the rest: a composition without a proof is refused by name, never approximated."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.algorithms import DP_ALGORITHMS, SAM_ALGORITHMS
from fl_lightning.config.audited import audit_faults
from fl_lightning.config.faults import Fault
from fl_lightning.config.plugins import OwnAlgorithm
from fl_lightning.config.privacy import ClientPrivacy, Mechanism, SamplePrivacy, UpdatePrivacy

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

NON_PRIVATE = {"sam_adpfl": "sam_afl"}
"""Private algorithm -> its counterpart without privacy, where the name does not tell."""

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


def protection_faults(config: "RunConfig") -> Iterator[Fault]:
    """Every broken rule of `privacy.*`."""
    name, privacy = config.algorithm.name, config.privacy
    if not isinstance(privacy, Mechanism):
        if name in DP_ALGORITHMS:
            yield Fault(
                "privacy.level",
                f"needs sample or update with algorithm.name={name}; "
                f"without privacy choose algorithm={NON_PRIVATE.get(name, name.removeprefix('dp_'))}",
                "none",
            )
        return
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
    yield from _noise(config, privacy)
    yield from audit_faults(config, privacy)
    yield from _literal(privacy)
    if isinstance(privacy, SamplePrivacy):
        yield from _sample(config, privacy)
    elif isinstance(privacy, ClientPrivacy):
        yield from _client(config, privacy)


def protection_notes(config: "RunConfig") -> list[str]:
    """What is allowed but worth a sentence before the run starts."""
    privacy = config.privacy
    if isinstance(privacy, ClientPrivacy) and privacy.noise_cohort_size is not None:
        return [
            f"privacy.noise_cohort_size={privacy.noise_cohort_size}: the noise is that of a larger federation, whose "
            "epsilon is reported; this run itself is NOT PRIVATE"
        ]
    return []


def _noise(config: "RunConfig", privacy: Mechanism) -> Iterator[Fault]:
    if privacy.noise_multiplier == 0 and privacy.target_epsilon is not None:
        yield Fault(
            "privacy.target_epsilon",
            "contradicts privacy.noise_multiplier=0, which spends any budget at once; set one of the two",
            privacy.target_epsilon,
        )
    if privacy.clip_norm == float("inf") and privacy.noise_multiplier != 0:
        yield Fault(
            "privacy.clip_norm",
            "needs a finite number > 0, for the noise is a multiple of it; "
            "to train without clipping set privacy.noise_multiplier=0 as well",
            privacy.clip_norm,
        )
    if privacy.noise_decay_rounds is not None and privacy.noise_decay == 1:
        yield Fault(
            "privacy.noise_decay_rounds",
            "would be ignored with privacy.noise_decay=1, a constant noise; set privacy.noise_decay below 1",
            privacy.noise_decay_rounds,
        )
    if privacy.noise_decay < 1 and getattr(getattr(config.algorithm, "sharpness", None), "noise_rule", "") == (
        "personalised"
    ):
        yield Fault(
            "privacy.noise_decay",
            "needs 1 with algorithm.sharpness.noise_rule=personalised, whose filter knows one sigma_base",
            privacy.noise_decay,
        )


def _literal(privacy: Mechanism) -> Iterator[Fault]:
    """paper mode is one text: nothing of it can be chosen otherwise."""
    if privacy.mode != "paper":
        return
    plain = {"noise_decay": 1.0, "clip_bound": "fixed", "trust_model": "local", "sampling": "full", "audit": False}
    for key, value in plain.items():
        if (found := getattr(privacy, key, value)) != value and not (key == "sampling" and privacy.level == "sample"):
            yield Fault(f"privacy.{key}", "is not in the text of privacy.mode=paper; set privacy.mode=strict", found)
    if privacy.noise_multiplier is not None and privacy.target_epsilon is not None:
        yield Fault(
            "privacy.target_epsilon",
            f"contradicts privacy.noise_multiplier={privacy.noise_multiplier:g} with privacy.mode=paper, whose epsilon "
            "is nominal; set one of the two",
            privacy.target_epsilon,
        )


def _sample(config: "RunConfig", privacy: SamplePrivacy) -> Iterator[Fault]:
    name = config.algorithm.name
    if getattr(config.algorithm.local, "variant", "sam") != "sam":
        yield Fault(
            "algorithm.local.variant",
            "would be ignored with privacy.level=sample, whose ascent follows private gradients; "
            "set algorithm.local.variant=sam",
            "asam",
        )
    if getattr(config.model, "norm", None) == "batch":
        yield Fault(
            "model.norm",
            "needs group with privacy.level=sample: batch statistics mix examples, so no per-example bound holds",
            "batch",
        )
    yield from _proven(privacy)
    if privacy.ascent is not None and name not in SAM_ALGORITHMS:
        yield Fault(
            "privacy.ascent",
            f"would be ignored with algorithm.name={name}, which has no ascent; remove it",
            privacy.ascent,
        )
    if privacy.ascent == "two_release" and privacy.sampling == "without_replacement":
        yield Fault(
            "privacy.ascent",
            "two_release has no proof with privacy.sampling=without_replacement; use previous or per_sample",
            "two_release",
        )
    if privacy.ascent not in (None, "previous") and name == "sam_adpfl":
        yield Fault(
            "privacy.ascent",
            "needs previous with algorithm.name=sam_adpfl: its gap is measured along the last private gradient",
            privacy.ascent,
        )
    if isinstance(config.algorithm, OwnAlgorithm):
        for key, value in {"clip_bound": "fixed", "sampling": "poisson"}.items():
            if (found := getattr(privacy, key)) != value:
                yield Fault(f"privacy.{key}", f"needs {value} with an algorithm of your own", found)


def _proven(privacy: SamplePrivacy | ClientPrivacy) -> Iterator[Fault]:
    if privacy.adjacency in PROVEN[privacy.sampling]:
        return
    fitting = next(sampling for sampling in ("without_replacement", "poisson") if sampling != privacy.sampling)
    yield Fault(
        "privacy.adjacency",
        f"has no proof with privacy.sampling={privacy.sampling}: use adjacency={PROVEN[privacy.sampling][0]}, or "
        f"sampling={fitting} or full",
        privacy.adjacency,
    )


def _client(config: "RunConfig", privacy: ClientPrivacy) -> Iterator[Fault]:
    name, level, trust = config.algorithm.name, privacy.level, privacy.trust_model
    if config.algorithm.aggregate.weighting == "samples":
        yield Fault(
            "algorithm.aggregate.weighting",
            f"needs uniform with privacy.level={level}: the number of a client's samples is private there",
            "samples",
        )
    yield from _proven(privacy)
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
