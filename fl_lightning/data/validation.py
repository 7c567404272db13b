"""Examples that clients hold out of training, so that settings are chosen by what they have not been fitted to.

A coin of its own decides for each example: with probability `share` its client holds it out. The coins follow from the
seed and the example's position in the data set alone. So a neighbouring data set, with one example more, has at most
one example more to train on; a fixed number per client would let one example decide over others, and the sensitivity of
an epsilon per example would no longer be that of one example. And a larger share holds out all that a smaller one does.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.data.partition import Partition, index_sha256
from fl_lightning.errors import ConfigError
from fl_lightning.rng import generator


def expected_left(num_samples: int, share: float) -> int:
    """How many of n >= 0 examples are trained on, on average, as a whole number.

    >>> expected_left(100, 0.29), expected_left(9, 0.1), expected_left(0, 0.5)
    (71, 8, 0)
    """
    return round(num_samples * (1 - share))


def split_off(partition: Partition, labels: Tensor, share: float, seed: int) -> Partition:
    """The partition of what is trained on, with the examples that each client holds out beside it.

    Its sizes, counts and `sha256` are those of the training lists: what is held out counts for nothing in a run. A
    client with few examples may hold out none, or all.

    Args:
        partition: what each client holds.
        labels: int64 [n], of the training set.
        share: `data.validation`, 0 <= share < 1; 0 changes nothing.
        seed: the run's seed.

    Raises:
        ConfigError: no example is held out, or none is left.
    """
    if not share:
        return partition
    coins = torch.rand(len(labels), generator=generator(seed, "validation"), dtype=torch.float64) < share
    kept = [indices[~coins[indices]] for indices in partition.indices]
    held = [indices[coins[indices]] for indices in partition.indices]
    for parts, what, remedy in ((held, "held out", "raise it"), (kept, "left to train on", "lower it")):
        if not any(map(len, parts)):
            total = sum(map(len, partition.indices))
            raise ConfigError(f"data.validation={share:g}: of {total} examples none is {what}; {remedy}")
    classes = len(partition.label_counts)
    return replace(
        partition,
        indices=tuple(kept),
        counts=torch.stack([torch.bincount(labels[part], minlength=classes) for part in kept]),
        sha256=index_sha256([part.numpy() for part in kept]),
        held=tuple(held),
        validation=share,
    )
