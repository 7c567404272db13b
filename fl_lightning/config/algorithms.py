"""`algorithm.*`: what a client's local training and the server's aggregation are, one class per paper."""

from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.numbers import Decay, NonNegative, Positive, Section, Share

SAM_ALGORITHMS = ("fedsam", "sam_afl", "sam_adpfl", "dp_fedsam")
DP_ALGORITHMS = ("dp_fedavg", "dp_fedsam", "sam_adpfl", "dp_scaffold", "dp_fedlaw")


class Sgd(Section):
    """Plain stochastic gradient descent: y <- y - lr (g + weight_decay y)."""

    optimizer: Literal["sgd"] = Field(
        default="sgd", description="local optimizer; its state starts anew at every visit"
    )
    lr: Positive = Field(default=0.1, description="learning rate of the client")
    weight_decay: NonNegative = Field(default=0.0, description="L2 penalty, added to the gradient")


class Momentum(Section):
    """SGD with heavy-ball momentum."""

    optimizer: Literal["momentum"] = Field(
        default="momentum", description="local optimizer; its state starts anew at a visit"
    )
    lr: Positive = Field(default=0.1, description="learning rate of the client")
    weight_decay: NonNegative = Field(default=0.0, description="L2 penalty, added to the gradient")
    momentum: Decay = Field(default=0.9, description="heavy-ball momentum")


class Adam(Section):
    """Adam with L2 weight decay in the gradient (torch.optim.Adam's meaning, not AdamW's)."""

    optimizer: Literal["adam"] = Field(
        default="adam", description="local optimizer; its state starts anew at every visit"
    )
    lr: Positive = Field(default=0.1, description="learning rate of the client; 0.001 to 0.01 suits Adam")
    weight_decay: NonNegative = Field(default=0.0, description="L2 penalty, added to the gradient")
    beta1: Decay = Field(default=0.9, description="decay of Adam's first moment")
    beta2: Decay = Field(default=0.999, description="decay of Adam's second moment")


class Sharpness(Section):
    """What SAM adds: the gradient is taken at the worst point of a ball (Foret et al. 2021)."""

    rho: NonNegative = Field(default=0.05, description="radius of SAM's ascent, L2 in parameter space")
    variant: Literal["sam", "asam"] = Field(
        default="sam", description="sam: a ball; asam: scaled by each parameter's size"
    )


class Proximity(Section):
    """What FedProx adds: prox_mu/2 ||y - w||^2 in the client's loss (Li et al. 2020)."""

    prox_mu: NonNegative = Field(default=0.01, description="weight of FedProx's proximal term")


class SamSgd(Sharpness, Sgd):
    """SAM over SGD."""


class SamMomentum(Sharpness, Momentum):
    """SAM over momentum."""


class SamAdam(Sharpness, Adam):
    """SAM over Adam."""


class ProxSgd(Proximity, Sgd):
    """The proximal term over SGD."""


class ProxMomentum(Proximity, Momentum):
    """The proximal term over momentum."""


class ProxAdam(Proximity, Adam):
    """The proximal term over Adam."""


Local = Annotated[Sgd | Momentum | Adam, Field(discriminator="optimizer")]
SamLocal = Annotated[SamSgd | SamMomentum | SamAdam, Field(discriminator="optimizer")]
ProxLocal = Annotated[ProxSgd | ProxMomentum | ProxAdam, Field(discriminator="optimizer")]


class Mean(Section):
    """w <- w + server_lr sum_k p_k Delta_k."""

    server_lr: Positive = Field(default=1.0, description="server learning rate, eta_g")
    weighting: Literal["samples", "uniform"] = Field(
        default="samples",
        description="p_k: n_k / sum n_j, or 1/m; default uniform at privacy.level=update, where n_k is private",
    )


class SharpnessWeights(Mean):
    """lambda_k ~ p_k exp(-mu gap_k), then w <- gamma (w + server_lr sum_k lambda_k Delta_k)."""

    mu: NonNegative = Field(default=10.0, description="how much a sharp client loses weight; 0: p_k alone")
    gamma: Share = Field(default=1.0, description="shrinkage of the global model; 1: none")
    gap_at: Literal["local_end", "train_mean", "global_start"] = Field(
        default="local_end", description="where the sharpness gap is measured"
    )


class FedAvg(Section):
    """Federated averaging (McMahan et al. 2017)."""

    name: Literal["fedavg"] = Field(default="fedavg", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")


class FedProx(Section):
    """FedAvg with a proximal term on the client (Li et al. 2020)."""

    name: Literal["fedprox"] = Field(default="fedprox", description="the algorithm")
    local: ProxLocal = Field(default=ProxSgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")


class FedSam(Section):
    """FedAvg with SAM on the client (Qu et al. 2022)."""

    name: Literal["fedsam"] = Field(default="fedsam", description="the algorithm")
    local: SamLocal = Field(default=SamSgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")


class SamAfl(Section):
    """SAM on the client and sharpness-aware weights on the server (SAM-ADPFL's phase 1)."""

    name: Literal["sam_afl"] = Field(default="sam_afl", description="the algorithm")
    local: SamLocal = Field(default=SamSgd(), description="training on the client")
    aggregate: SharpnessWeights = Field(default=SharpnessWeights(), description="aggregation on the server")


class DpFedAvg(Section):
    """FedAvg with differential privacy at `privacy.level`."""

    name: Literal["dp_fedavg"] = Field(default="dp_fedavg", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")


class DpFedSam(Section):
    """FedSAM with differential privacy at `privacy.level` (Shi et al. 2023)."""

    name: Literal["dp_fedsam"] = Field(default="dp_fedsam", description="the algorithm")
    local: SamLocal = Field(default=SamSgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")
