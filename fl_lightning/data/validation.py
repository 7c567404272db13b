"""Examples that clients hold out of training, so that settings are chosen by what they have not been fitted to.

Of n_k examples client k holds out floor(share n_k), drawn from the stream (seed, "validation", 0, k): the choice
depends neither on what the examples are nor on other clients, and a larger share holds out all that a smaller one does.
A client with few examples holds out none; none is ever left without one to train on.
"""

from dataclasses import replace
from math import floor

import torch
from torch import Tensor

from fl_lightning.data.partition import Partition, index_sha256
from fl_lightning.errors import ConfigError
from fl_lightning.rng import generator

_ROUNDING = 1e-9
"""0.29 x 100 is 28.999999999999996 in floating point and means 29."""


def number_held(num_samples: int, share: float) -> int:
    """How many of n >= 0 examples a client holds out: floor(share n), fewer than n.

    >>> number_held(100, 0.29), number_held(9, 0.1), number_held(1, 0.9), number_held(0, 0.5)
    (29, 0, 0, 0)
    """
    return min(floor(share * num_samples + _ROUNDING), max(num_samples - 1, 0))


def split_off(partition: Partition, labels: Tensor, share: float, seed: int) -> Partition:
    """The partition of what is trained on, with the examples that each client holds out beside it.

    Its sizes, counts and `sha256` are those of the training lists: what is held out counts for nothing in a run.

    Args:
        partition: what each client holds.
        labels: int64 [n], of the training set.
        share: `data.validation`, 0 <= share < 1; 0 changes nothing.
        seed: the run's seed.

    Raises:
        ConfigError: no client has enough examples to hold one out.
    """
    if not share:
        return partition
    kept: list[Tensor] = []
    held: list[Tensor] = []
    for client, indices in enumerate(partition.indices):
        order = torch.randperm(len(indices), generator=generator(seed, "validation", client=client))
        out = torch.zeros(len(indices), dtype=torch.bool)
        out[order[: number_held(len(indices), share)]] = True
        kept.append(indices[~out])
        held.append(indices[out])
    if not any(map(len, held)):
        raise ConfigError(
            f"data.validation={share:g}: the largest client has {max(map(len, partition.indices))} examples, so none "
            "would be held out; raise it, or lower fl.num_clients"
        )
    classes = len(partition.label_counts)
    return replace(
        partition,
        indices=tuple(kept),
        counts=torch.stack([torch.bincount(labels[part], minlength=classes) for part in kept]),
        sha256=index_sha256([part.numpy() for part in kept]),
        held=tuple(held),
        validation=share,
    )
