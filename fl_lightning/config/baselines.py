"""`algorithm.*` of the methods that the papers compare: control variates, server optimizers, clipping without noise."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fl_lightning.config.algorithms import Adam, Local, Mean, Momentum, Sgd
from fl_lightning.config.faults import Fault, show
from fl_lightning.config.numbers import Decay, NonNegative, Positive, PositiveOrInfinite, Section

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

EVEN_ALGORITHMS = ("scaffold", "dp_scaffold", "ce_fedavg", "model_clipping")
"""Algorithms whose papers average without weights."""


class Control(Section):
    """What SCAFFOLD adds: a control variate c_i on the client."""

    option: Literal["I", "II"] = Field(
        default="II",
        description="new c_i; I: the gradient at the server's model, one more pass; II: the mean gradient along the "
        "visit, free, with optimizer=sgd only",
    )


class DifferenceClip(Section):
    """What CE-FedAvg adds: the update is clipped before it is sent."""

    clip: PositiveOrInfinite | None = Field(
        default=None,
        description="c, the L2 bound on an update; .inf: none; null: clip_fraction x the mean update norm of an "
        "unclipped run of the same settings, trained first; not private",
    )
    clip_fraction: Positive | None = Field(
        default=None,
        description="c over the mean update norm of the unclipped run, where clip is null; 0.5 if not given",
    )


class ModelClip(Section):
    """What model clipping adds: the trained model is clipped before it is sent."""

    clip: PositiveOrInfinite = Field(
        default=10.0, description="c, the L2 bound on a model's parameters; .inf: none. LeNet-5 starts at about 4.4"
    )


class ControlSgd(Control, Sgd):
    """Control variates over SGD."""


class ControlMomentum(Control, Momentum):
    """Control variates over momentum."""


class ControlAdam(Control, Adam):
    """Control variates over Adam."""


class ClipSgd(DifferenceClip, Sgd):
    """Difference clipping after SGD."""


class ClipMomentum(DifferenceClip, Momentum):
    """Difference clipping after momentum."""


class ClipAdam(DifferenceClip, Adam):
    """Difference clipping after Adam."""


class ModelClipSgd(ModelClip, Sgd):
    """Model clipping after SGD."""


class ModelClipMomentum(ModelClip, Momentum):
    """Model clipping after momentum."""


class ModelClipAdam(ModelClip, Adam):
    """Model clipping after Adam."""


ControlLocal = Annotated[ControlSgd | ControlMomentum | ControlAdam, Field(discriminator="optimizer")]
ClipLocal = Annotated[ClipSgd | ClipMomentum | ClipAdam, Field(discriminator="optimizer")]
ModelClipLocal = Annotated[ModelClipSgd | ModelClipMomentum | ModelClipAdam, Field(discriminator="optimizer")]

_WEIGHTING = "p_k: n_k / sum n_j, or 1/m"


class Weighted(Section):
    """sum_k p_k Delta_k."""

    weighting: Literal["samples", "uniform"] = Field(default="samples", description=_WEIGHTING)


class EvenMean(Section):
    """w <- w + server_lr mean_k Delta_k; SCAFFOLD's mean has no weights."""

    server_lr: Positive = Field(default=1.0, description="server learning rate, eta_g")
    weighting: Literal["uniform"] = Field(default="uniform", description="p_k = 1/m, part of the method")


class ClippedMean(Section):
    """w <- w + server_lr sum_k p_k clip(Delta_k, c)."""

    server_lr: Positive = Field(default=1.0, description="server learning rate, eta_g")
    weighting: Literal["samples", "uniform"] = Field(
        default="uniform", description=_WEIGHTING + "; uniform in the paper"
    )


class ModelMean(Section):
    """w <- sum_k p_k clip(w_k, c)."""

    weighting: Literal["samples", "uniform"] = Field(
        default="uniform", description=_WEIGHTING + "; uniform in the paper"
    )


class Extrapolation(Weighted):
    """w <- w + eta_g Delta, eta_g = max(1, sum_k p_k ||Delta_k||^2 / (2 (||Delta||^2 + eps)))."""

    eps: NonNegative = Field(
        default=1e-3, description="keeps eta_g finite; a squared L2 norm in parameter space, tuned in the paper"
    )


class HeavyBall(Mean):
    """m <- server_momentum m + Delta, then w <- w + server_lr m."""

    server_momentum: Decay = Field(default=0.9, description="beta of the server; 0: FedAvg")


class ServerAdam(Weighted):
    """Adam on the server, without bias correction."""

    server_lr: Positive = Field(
        default=0.01, description="server learning rate, about the largest move of one weight in a round"
    )
    server_beta1: Decay = Field(default=0.9, description="decay of the server's first moment")
    server_beta2: Decay = Field(default=0.99, description="decay of the server's second moment")
    tau: Positive = Field(default=1e-3, description="added to the root of the second moment; large: no adaptivity")


class Scaffold(Section):
    """Control variates against client drift (Karimireddy et al. 2020)."""

    name: Literal["scaffold"] = Field(default="scaffold", description="the algorithm")
    local: ControlLocal = Field(default=ControlSgd(), description="training on the client")
    aggregate: EvenMean = Field(default=EvenMean(), description="aggregation on the server")


class DpScaffold(Section):
    """SCAFFOLD with differential privacy at `privacy.level` (Noble et al. 2022 at level sample)."""

    name: Literal["dp_scaffold"] = Field(default="dp_scaffold", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: EvenMean = Field(default=EvenMean(), description="aggregation on the server")


class FedNova(Section):
    """FedAvg with updates normalised by the steps that made them (Wang et al. 2020)."""

    name: Literal["fednova"] = Field(default="fednova", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")


class FedExp(Section):
    """FedAvg with an extrapolated server step (Jhunjhunwala et al. 2023)."""

    name: Literal["fedexp"] = Field(default="fedexp", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: Extrapolation = Field(default=Extrapolation(), description="aggregation on the server")


class FedAvgM(Section):
    """FedAvg with momentum on the server (Hsu et al. 2019)."""

    name: Literal["fedavgm"] = Field(default="fedavgm", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: HeavyBall = Field(default=HeavyBall(), description="aggregation on the server")


class FedAdam(Section):
    """FedAvg with Adam on the server (Reddi et al. 2021)."""

    name: Literal["fedadam"] = Field(default="fedadam", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: ServerAdam = Field(default=ServerAdam(), description="aggregation on the server")


class CeFedAvg(Section):
    """FedAvg with clipped updates and no noise (Zhang et al. 2022)."""

    name: Literal["ce_fedavg"] = Field(default="ce_fedavg", description="the algorithm")
    local: ClipLocal = Field(default=ClipSgd(), description="training on the client")
    aggregate: ClippedMean = Field(default=ClippedMean(), description="aggregation on the server")


class ModelClipping(Section):
    """The mean of clipped models, without noise (Zhang et al. 2022, Claim 2.1)."""

    name: Literal["model_clipping"] = Field(default="model_clipping", description="the algorithm")
    local: ModelClipLocal = Field(default=ModelClipSgd(), description="training on the client")
    aggregate: ModelMean = Field(default=ModelMean(), description="aggregation on the server")


def baseline_faults(config: "RunConfig") -> Iterator[Fault]:
    """Settings of these methods that contradict each other, or would be ignored."""
    algorithm, chosen = config.algorithm, config.algorithm.local.optimizer
    if isinstance(algorithm, Scaffold) and algorithm.local.option == "II" and chosen != "sgd":
        yield Fault(
            "algorithm.local.optimizer",
            "needs sgd with algorithm.local.option=II: (x - y)/(Q lr) is a mean gradient under plain SGD only; "
            "set algorithm.local.option=I",
            chosen,
        )
    if isinstance(algorithm, DpScaffold):
        if chosen != "sgd":
            yield Fault(
                "algorithm.local.optimizer",
                "needs sgd with algorithm.name=dp_scaffold, whose control (x - y)/(Q lr) is a mean gradient under "
                "plain SGD only, and whose option I would cost a further release; set algorithm.local.optimizer=sgd",
                chosen,
            )
        if config.privacy.level == "update" and config.fl.max_local_steps is None:
            yield Fault(
                "fl.max_local_steps",
                "is required with algorithm.name=dp_scaffold and privacy.level=update: the steps a client really takes "
                "would tell its private n_k; set fl.max_local_steps=Q",
                None,
            )
    if isinstance(algorithm, FedNova) and chosen == "adam":
        yield Fault(
            "algorithm.local.optimizer",
            "needs sgd or momentum with algorithm.name=fednova: Adam's steps are no fixed weighting of gradients; "
            "set algorithm.local.optimizer=momentum",
            chosen,
        )
    if isinstance(algorithm, CeFedAvg):
        clip, fraction = algorithm.local.clip, algorithm.local.clip_fraction
        if clip is not None and fraction is not None:
            yield Fault(
                "algorithm.local.clip_fraction",
                f"would be ignored with algorithm.local.clip={show(clip)}; set one of the two",
                fraction,
            )
