"""A proxy set: class-balanced training examples that the server keeps and no client holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.data.datasets import ImageData
from fl_lightning.data.loading import ImageStore, shuffled_epoch
from fl_lightning.errors import ConfigError
from fl_lightning.rng import generator

_KEY = "algorithm.aggregate.proxy_share"


def hold_out(data: ImageData, share: float, seed: int) -> tuple[ImageData, Tensor, Tensor]:
    """Takes max(1, round(share N / C)) training examples of each of the C classes away.

    The choice follows from the stream (seed, "proxy") alone. The test set is not touched.

    Returns:
        The data set without them, their images uint8 [M, C, H, W], their labels int64 [M], in the order of the set.

    Raises:
        ConfigError: a class has too few examples, so that none of it would be left to train on.
    """
    labels = data.y_train
    each = max(1, round(share * len(labels) / data.num_classes))
    rng = generator(seed, "proxy")
    chosen = []
    for label in range(data.num_classes):
        members = (labels == label).nonzero().flatten()
        if len(members) <= each:
            raise ConfigError(
                f"{_KEY}={share:g}: {each} of each class, but {data.classes[label]} has {len(members)} training "
                "examples and some must be left to train on; lower it or raise data.subset"
            )
        chosen.append(members[torch.randperm(len(members), generator=rng)[:each]])
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[torch.cat(chosen)] = True
    rest = replace(data, x_train=data.x_train[~held].contiguous(), y_train=labels[~held])
    return rest, data.x_train[held].contiguous(), labels[held]


class Loss(Protocol):
    """A loss on a device, as `engine.objective.ModelObjective` is one."""

    @property
    def device(self) -> torch.device: ...

    def measure_gradient(self, w: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class ProxySet:
    """The held-out examples with their loss; satisfies `server.learned.Proxy`.

    Attributes:
        objective: the loss; nothing of it moves here.
        store: the examples.
        batch_size: examples in a batch, at least 1.
        seed: the run's seed; a round's order is the stream (seed, "proxy", round).
        merge_single: a last batch of one example joins the one before, as BatchNorm needs two.
    """

    objective: Loss
    store: ImageStore
    batch_size: int
    seed: int
    merge_single: bool = False

    def __len__(self) -> int:
        return len(self.store)

    def gradient(self, w: Tensor, batch: Tensor) -> Tensor:
        """grad L(w) of the mean cross-entropy over the examples numbered in `batch`, [d]."""
        return self.objective.measure_gradient(w.to(self.objective.device), self.store.batch(batch)).to(w.device)

    def passes(self, round: int) -> Iterator[Sequence[Tensor]]:
        """Endless passes over all examples, each in a new order."""
        rng = generator(self.seed, "proxy", round)
        while True:
            yield shuffled_epoch(len(self.store), self.batch_size, rng, self.merge_single)
