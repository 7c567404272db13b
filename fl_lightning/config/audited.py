"""Rules for `privacy.audit`: what canaries can stand in for, and what they cannot."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault
from fl_lightning.config.privacy import ClientPrivacy, Mechanism

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

FEWEST = 16
"""Canaries below which every guess may be right and nothing is shown."""


def audit_faults(config: "RunConfig", privacy: Mechanism) -> Iterator[Fault]:
    """Every broken rule of `privacy.audit` and `privacy.audit_canaries`."""
    if not privacy.audit:
        if privacy.audit_canaries is not None:
            yield Fault(
                "privacy.audit_canaries", "would be ignored with privacy.audit=false; set it", privacy.audit_canaries
            )
        return
    if privacy.audit_canaries is not None and privacy.audit_canaries < FEWEST:
        yield Fault(
            "privacy.audit_canaries", f"needs at least {FEWEST}: fewer can show nothing", privacy.audit_canaries
        )
    if privacy.noise_multiplier == 0:
        yield Fault("privacy.audit", "needs noise: with privacy.noise_multiplier=0 no epsilon is claimed", True)
    if config.engine.workers > 1:
        yield Fault("privacy.audit", "needs engine.workers=1: canaries are watched inside the training process", True)
    if isinstance(privacy, ClientPrivacy):
        yield from _clients(config, privacy)


def _clients(config: "RunConfig", privacy: ClientPrivacy) -> Iterator[Fault]:
    trust = privacy.trust_model
    if privacy.noise_cohort_size is not None:
        yield Fault(
            "privacy.audit", "has nothing to hold a run to that is NOT PRIVATE; remove privacy.noise_cohort_size", True
        )
    if privacy.sampling == "without_replacement":
        yield Fault(
            "privacy.audit",
            "needs privacy.sampling=full or poisson: canaries beside a cohort of fixed size would change its rate",
            True,
        )
    if trust != "local" and getattr(privacy, "clip_bound", "fixed") == "quantile":
        yield Fault(
            "privacy.audit",
            f"needs privacy.clip_bound=fixed or per_layer with privacy.trust_model={trust}: canaries would move a "
            "bound that follows the updates",
            True,
        )
    if trust != "local" and config.algorithm.name == "dp_scaffold":
        yield Fault(
            "privacy.audit",
            f"needs privacy.trust_model=local with algorithm.name=dp_scaffold; with {trust} canaries would count as "
            "clients of the control variate",
            True,
        )
