"""All algorithms of the schema as one union, told apart by `algorithm.name`."""

from typing import Annotated

from pydantic import Field

from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.algorithms import DpFedAvg, DpFedSam, FedAvg, FedProx, FedSam, SamAfl
from fl_lightning.config.baselines import (
    CeFedAvg,
    DpScaffold,
    FedAdam,
    FedAvgM,
    FedExp,
    FedNova,
    ModelClipping,
    Scaffold,
)
from fl_lightning.config.contrast import Moon
from fl_lightning.config.proxy import DpFedLaw, FedLaw

AlgorithmConfig = Annotated[
    FedAvg
    | FedProx
    | FedSam
    | SamAfl
    | SamAdpfl
    | DpFedAvg
    | DpFedSam
    | Scaffold
    | DpScaffold
    | FedNova
    | FedExp
    | FedAvgM
    | FedAdam
    | CeFedAvg
    | ModelClipping
    | FedLaw
    | DpFedLaw
    | Moon,
    Field(discriminator="name"),
]
