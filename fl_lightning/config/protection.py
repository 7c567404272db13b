"""Rules between `privacy.*` and the rest: a composition without a proof is refused by name, never approximated."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.algorithms import DP_ALGORITHMS, SAM_ALGORITHMS
from fl_lightning.config.audited import audit_faults
from fl_lightning.config.client_level import client_faults, proven
from fl_lightning.config.faults import Fault
from fl_lightning.config.plugins import OwnAlgorithm
from fl_lightning.config.privacy import ClientPrivacy, Mechanism, SamplePrivacy

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

NON_PRIVATE = {"sam_adpfl": "sam_afl"}
"""Private algorithm -> its counterpart without privacy, where the name does not tell."""


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
        yield from client_faults(config, privacy)


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
    if privacy.noise_multiplier is not None and privacy.target_epsilon is not None and _personalised(config):
        yield Fault(
            "privacy.target_epsilon",
            "would be ignored with algorithm.sharpness.noise_rule=personalised and privacy.noise_multiplier, whose "
            "filter keeps to what that multiplier costs; set one of the two",
            privacy.target_epsilon,
        )
    if privacy.noise_decay_rounds is not None and privacy.noise_decay_rounds >= config.fl.rounds > 1:
        yield Fault(
            "privacy.noise_decay_rounds",
            f"needs less than fl.rounds={config.fl.rounds}, or the noise never falls; lower it",
            privacy.noise_decay_rounds,
        )
    if privacy.noise_multiplier == 0:
        yield from _nothing_to_scale(privacy)
    if privacy.noise_decay_rounds is not None and privacy.noise_decay == 1:
        yield Fault(
            "privacy.noise_decay_rounds",
            "would be ignored with privacy.noise_decay=1, a constant noise; set privacy.noise_decay below 1",
            privacy.noise_decay_rounds,
        )
    if privacy.noise_decay < 1 and _personalised(config):
        yield Fault(
            "privacy.noise_decay",
            "needs 1 with algorithm.sharpness.noise_rule=personalised, whose filter knows one sigma_base",
            privacy.noise_decay,
        )


def _personalised(config: "RunConfig") -> bool:
    return getattr(getattr(config.algorithm, "sharpness", None), "noise_rule", None) == "personalised"


def _nothing_to_scale(privacy: Mechanism) -> Iterator[Fault]:
    """Settings of a noise that is not there."""
    quantile = getattr(privacy, "quantile", None)
    settings = {
        "noise_decay": privacy.noise_decay if privacy.noise_decay < 1 else None,
        "noise_cohort_size": getattr(privacy, "noise_cohort_size", None),
        "quantile.bit_noise": None if quantile is None else quantile.bit_noise,
    }
    for key, value in settings.items():
        if value is not None:
            yield Fault(f"privacy.{key}", "would be ignored with privacy.noise_multiplier=0; remove it", value)


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
    yield from proven(privacy)
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
    if privacy.ascent == "two_release" and getattr(config.algorithm.local, "rho", 1.0) == 0:
        yield Fault(
            "privacy.ascent",
            "two_release would pay for an ascent of algorithm.local.rho=0, which goes nowhere; use previous",
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
