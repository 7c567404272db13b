"""`algorithm.*` of FedLAW, which learns its aggregation weights on a proxy set held out from the training data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from fl_lightning.config.algorithms import Local, Sgd
from fl_lightning.config.faults import Fault
from fl_lightning.config.numbers import Count, Decay, Positive, Section

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

PROXY_ALGORITHMS = ("fedlaw", "dp_fedlaw")
"""Algorithms whose server learns on held-out training examples."""


def default_proxy_lr(data: Any) -> float:
    """The official code's learning rate of x and y for a data set."""
    return 0.01 if data == "cifar10" else 0.005


class LearnedWeights(Section):
    """w <- gamma sum_k lambda_k w_k, lambda = softmax(x), gamma = exp(y); x and y learned on the proxy set by Adam."""

    weighting: Literal["samples", "uniform"] = Field(
        default="samples",
        description="where the weights start, x0 = log p: n_k / sum n_j, or 1/m; default uniform at "
        "privacy.level=update, where n_k is private",
    )
    proxy_share: Annotated[Positive, Field(lt=1)] = Field(
        default=0.02, description="share of the training set held out as proxy set, the same number of every class"
    )
    proxy_epochs: Count = Field(default=20, description="passes over the proxy set in each round")
    proxy_batch_size: Count = Field(default=128, description="proxy examples in a minibatch; the last may be short")
    proxy_lr: Positive | None = Field(
        default=None, description="learning rate of x and y; null: 0.01 with data=cifar10, else 0.005"
    )
    proxy_beta1: Decay = Field(default=0.5, description="decay of Adam's first moment for x and y")
    proxy_beta2: Decay = Field(default=0.999, description="decay of Adam's second moment for x and y")
    proxy_lr_step: Count = Field(default=20, description="the learning rate is lowered after every so many passes")
    proxy_lr_decay: Annotated[Positive, Field(le=1)] = Field(
        default=0.5, description="factor by which it is lowered; 1: never"
    )


class FedLaw(Section):
    """FedAvg with weights and shrinkage learned on a proxy set (Li et al. 2023)."""

    name: Literal["fedlaw"] = Field(default="fedlaw", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: LearnedWeights = Field(default=LearnedWeights(), description="aggregation on the server")


class DpFedLaw(Section):
    """FedLAW with differential privacy at `privacy.level`; the proxy set counts as public."""

    name: Literal["dp_fedlaw"] = Field(default="dp_fedlaw", description="the algorithm")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: LearnedWeights = Field(default=LearnedWeights(), description="aggregation on the server")


def proxy_faults(config: "RunConfig") -> Iterator[Fault]:
    """Settings that contradict a proxy set."""
    if config.algorithm.name in PROXY_ALGORITHMS and config.partition.kind == "file":
        yield Fault(
            "partition.kind",
            f"contradicts algorithm.name={config.algorithm.name}, whose proxy set is cut from the training set first: "
            "the file's indices would mean other samples; choose another partition",
            "file",
        )


def proxy_notes(config: "RunConfig") -> Iterator[str]:
    """What a user of a proxy set should know."""
    if config.algorithm.name == "dp_fedlaw":
        yield (
            f"algorithm.name=dp_fedlaw: the proxy set, {config.algorithm.aggregate.proxy_share:.3g} of the training "
            "set, counts as public; no epsilon covers it"
        )
