"""`algorithm.*` of SAM-ADPFL: every reading that its text leaves open is a setting here, none is chosen in silence."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fl_lightning.config.algorithms import Adam, Momentum, Sgd, SharpnessWeights
from fl_lightning.config.faults import Fault
from fl_lightning.config.numbers import NonNegative, Positive, Section, Share

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig


class Radius(Section):
    """SAM's ball, one norm over all parameters (Eq. 8)."""

    rho: NonNegative = Field(default=0.05, description="radius of SAM's ascent, L2 in parameter space")


class RadiusSgd(Radius, Sgd):
    """SAM over SGD."""


class RadiusMomentum(Radius, Momentum):
    """SAM over momentum."""


class RadiusAdam(Radius, Adam):
    """SAM over Adam, the paper's choice; moments start anew at every visit."""


class SharpnessSettings(Section):
    """How sharpness is measured, released and turned into bounds and noise (Eq. 10-14)."""

    clip_alpha: NonNegative = Field(default=0.5, description="Eq. 13: how far C_k follows sharpness; 0: fixed bound")
    clip_min_ratio: Share = Field(default=0.1, description="C_min / C_base; C_base is privacy.clip_norm")
    clip_max_ratio: Annotated[Positive, Field(ge=1)] | None = Field(
        default=None, description="C_max / C_base, strict mode; 4 when not given"
    )
    noise_rule: Literal["paper", "constant", "personalised"] = Field(
        default="paper",
        description="Eq. 14; constant: sigma_base for all; personalised: S_k/Sbar kept within budget by a Renyi filter",
    )
    xi: Positive | None = Field(default=None, description="smoothing of Eq. 14, noise_rule=paper; 1e-4 when not given")
    factor_max: Annotated[Positive, Field(ge=1)] | None = Field(
        default=None, description="r_max, cap of sigma_k / sigma_base where the noise adapts; 4 when not given"
    )
    bound: Positive = Field(default=0.5, description="B_S: the gap (paper: S_k) is clipped to [0, B_S]")
    floor_ratio: Share = Field(default=1e-3, description="S_lo / B_S: a released gap is put back to at least S_lo")
    loss_bound: Positive | None = Field(default=None, description="B_L, paper mode; 5 when not given")
    scalar_share: Annotated[Positive, Field(lt=1)] = Field(
        default=0.05, description="eps_scalars / epsilon: the part of the budget that the scalars may spend"
    )
    statistics: Literal["current", "lagged"] | None = Field(
        default=None, description="Eq. 13-14 from this round's releases, or each client's last; level sample: lagged"
    )


class AdaptiveWeights(SharpnessWeights):
    """Eq. 12 and the server's step; `gap_at` applies to level update in strict mode."""


class SamAdpfl(Section):
    """SAM clients, sharpness-weighted aggregation, sharpness-adaptive clipping and noise (Shan et al.)."""

    name: Literal["sam_adpfl"] = Field(default="sam_adpfl", description="the algorithm")
    local: Annotated[RadiusSgd | RadiusMomentum | RadiusAdam, Field(discriminator="optimizer")] = Field(
        default=RadiusSgd(), description="training on the client"
    )
    aggregate: AdaptiveWeights = Field(default=AdaptiveWeights(), description="aggregation on the server")
    sharpness: SharpnessSettings = Field(default=SharpnessSettings(), description="sharpness, bounds and noise")


def adaptive_faults(config: "RunConfig") -> Iterator[Fault]:
    """Settings of SAM-ADPFL that contradict its level or mode, or would be ignored there."""
    if not isinstance(config.algorithm, SamAdpfl) or config.privacy.level == "none":
        return
    sharp, level, mode = config.algorithm.sharpness, config.privacy.level, config.privacy.mode
    paper, adapts = mode == "paper", sharp.noise_rule != "constant"
    if paper and level != "update":
        yield Fault("privacy.mode", "needs privacy.level=update: the text protects updates", "paper")
    if sharp.noise_rule == "personalised" and (paper or level == "sample"):
        where = "privacy.mode=paper" if paper else "privacy.level=sample"
        yield Fault(
            "algorithm.sharpness.noise_rule", f"has no proof with {where}; choose constant or paper", "personalised"
        )
    if level == "sample" and sharp.statistics == "current":
        yield Fault(
            "algorithm.sharpness.statistics",
            "needs lagged with privacy.level=sample: bounds are used before this round's gap is known",
            "current",
        )
    if paper and sharp.statistics == "lagged":
        yield Fault(
            "algorithm.sharpness.statistics", "needs current with privacy.mode=paper, whose text says so", "lagged"
        )
    if level == "sample" and config.algorithm.aggregate.gap_at != "local_end":
        yield Fault(
            "algorithm.aggregate.gap_at",
            "needs local_end with privacy.level=sample: elsewhere the gap would depend on unreleased gradients",
            config.algorithm.aggregate.gap_at,
        )
    ignored = {
        "clip_max_ratio": paper,
        "xi": sharp.noise_rule != "paper",
        "factor_max": paper or not adapts,
        "loss_bound": not paper,
    }
    for key, useless in ignored.items():
        if useless and getattr(sharp, key) is not None:
            yield Fault(
                f"algorithm.sharpness.{key}",
                f"would be ignored with privacy.mode={mode} and noise_rule={sharp.noise_rule}; remove it",
                getattr(sharp, key),
            )
