"""`algorithm.*` of MOON, which keeps a client's representations close to the server's."""

from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.algorithms import Adam, Mean, Momentum, Sgd
from fl_lightning.config.numbers import NonNegative, Positive, Section


class Contrast(Section):
    """What MOON adds: the model-contrastive term of the client's loss."""

    mu: NonNegative = Field(
        default=1.0, description="weight of the contrastive term; the paper tunes it over 0.1, 1, 5, 10; 0: FedAvg"
    )
    temperature: Positive = Field(default=0.5, description="tau, divides the cosine similarities; 0.5 in the paper")


class MoonSgd(Contrast, Sgd):
    """The contrastive term over SGD."""


class MoonMomentum(Contrast, Momentum):
    """The contrastive term over momentum."""


class MoonAdam(Contrast, Adam):
    """The contrastive term over Adam."""


class Moon(Section):
    """Model-contrastive federated learning (Li, He, Song 2021)."""

    name: Literal["moon"] = Field(default="moon", description="the algorithm")
    local: Annotated[MoonSgd | MoonMomentum | MoonAdam, Field(discriminator="optimizer")] = Field(
        default=MoonSgd(), description="training on the client"
    )
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")
