"""How training samples are dealt to clients. Every kind ends in bounded time and uses no sample twice.

The only randomness is the stream (seed, "partition"), so a seed and the labels fix the partition.
n samples, K clients, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.manifest import manifest
from fl_lightning.data.partition_file import read_partition_file
from fl_lightning.errors import ConfigError
from fl_lightning.rng import numpy_generator

_PARAMETERS = {
    "iid": (),
    "dirichlet": ("alpha", "min_samples"),
    "label_skew": ("dominant_classes", "dominant_count", "other_count"),
    "shards": ("shards_per_client",),
    "file": ("path",),
}
_LARGEST_ALPHA = 1e12  # beyond it the proportions are equal to one part in a million and the gamma draw may overflow


@dataclass(frozen=True, eq=False)
class Partition:
    """Which training samples each client holds."""

    kind: str
    parameters: dict[str, Any]
    """The settings of this kind, by their names in the configuration."""
    indices: tuple[Tensor, ...]
    """Per client: sorted int64 indices into the training set, at least one, no index in two clients."""
    counts: Tensor
    """int64 [K, C]: samples of each class at each client."""
    label_counts: Tensor
    """int64 [C]: samples of each class in the whole training set, dealt or not."""
    sha256: str
    """Over the client sizes and indices as little-endian int64; equal exactly when the partitions are."""
    held: tuple[Tensor, ...] = ()
    """Per client: sorted indices of the examples held out of training, none of them in `indices`; may be empty."""
    validation: float = 0.0
    """The share of the examples that was to be held out."""

    @property
    def num_clients(self) -> int:
        return len(self.indices)

    @property
    def sizes(self) -> Tensor:
        """int64 [K]: samples of each client."""
        return self.counts.sum(dim=1)

    @property
    def held_out(self) -> Tensor:
        """int64: all examples held out of training, client by client."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self.held])

    def manifest(self) -> dict[str, Any]:
        """Everything about the partition that JSON can hold; see `fl_lightning.data.manifest.manifest`."""
        return manifest(self)


def make_partition(labels: Tensor, num_clients: int, config: Any, seed: int, num_classes: int) -> Partition:
    """Deal the training samples to `num_clients` clients.

    Kinds (`config.kind`) and what they read of `config`:

    - `iid`: a random equal split; sizes differ by at most 1. Every sample is used.
    - `dirichlet`: each class is split over the clients in proportions drawn from Dirichlet(alpha); alpha > 0, 0.1 very
      skewed, 100 nearly iid. Clients with fewer than `min_samples` are then filled up, one random sample at a time,
      from whichever client is largest: no draw is ever repeated. Every sample is used.
    - `label_skew`: a client holds `dominant_count` samples of each of its `dominant_classes` classes and `other_count`
      of every other class. Each class is dominant equally often, to within one. Samples left over are not used.
    - `shards`: samples sorted by label are cut into K * `shards_per_client` runs and each client gets that many at
      random (McMahan et al. 2017 with 2 shards). Every sample is used.
    - `file`: the index lists in `path`, see `fl_lightning.data.partition_file`. Nothing is random.

    Args:
        labels: int64 [n], 0..num_classes-1.
        num_clients: K, 1 <= K <= n.
        config: a `partition` variant.
        seed: the run's seed.
        num_classes: C.

    Raises:
        ConfigError: the demand cannot be met by these samples, or the file breaks a rule; nothing is retried.
    """
    y = labels.numpy()
    n = len(y)
    if num_clients > n:
        raise ConfigError(
            f"fl.num_clients={num_clients}: there are only {n} training samples and every client needs one; lower it "
            "or raise data.subset"
        )
    generator = numpy_generator(seed, "partition")
    if config.kind == "iid":
        parts = np.array_split(generator.permutation(n), num_clients)
    elif config.kind == "dirichlet":
        parts = _dirichlet(y, num_clients, config, num_classes, generator)
    elif config.kind == "label_skew":
        parts = _label_skew(y, num_clients, config, num_classes, generator)
    elif config.kind == "shards":
        parts = _shards(y, num_clients, config, generator)
    elif config.kind == "file":
        parts = read_partition_file(config.path, num_clients, n)
    else:
        raise ConfigError(f"partition.kind={config.kind}: no such kind; choose one of {', '.join(_PARAMETERS)}")
    parameters = {key: getattr(config, key) for key in _PARAMETERS[config.kind]}
    return _record(config.kind, parameters, parts, y, num_classes)


def _record(
    kind: str, parameters: dict[str, Any], parts: list[np.ndarray], y: np.ndarray, num_classes: int
) -> Partition:
    ordered = [np.sort(part).astype(np.int64) for part in parts]
    counts = np.stack([np.bincount(y[part], minlength=num_classes) for part in ordered])
    return Partition(
        kind=kind,
        parameters=parameters,
        indices=tuple(torch.from_numpy(part) for part in ordered),
        counts=torch.from_numpy(counts),
        label_counts=torch.from_numpy(np.bincount(y, minlength=num_classes)),
        sha256=index_sha256(ordered),
    )


def index_sha256(parts: Sequence[np.ndarray]) -> str:
    """SHA-256 over the sizes and the indices of the clients' lists, as little-endian int64."""
    digest = hashlib.sha256(np.array([len(part) for part in parts], dtype="<i8").tobytes())
    for part in parts:
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()


def _dirichlet(
    y: np.ndarray, num_clients: int, config: Any, num_classes: int, generator: np.random.Generator
) -> list[np.ndarray]:
    if num_clients * config.min_samples > len(y):
        raise ConfigError(
            f"partition.min_samples={config.min_samples}: {num_clients} clients x {config.min_samples} = "
            f"{num_clients * config.min_samples} samples, but there are {len(y)}; lower partition.min_samples or "
            "fl.num_clients, or raise data.subset"
        )
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        members = generator.permutation(np.flatnonzero(y == label))
        bounds = np.floor(np.cumsum(_proportions(config.alpha, num_clients, generator)) * len(members) + 0.5)
        for client, piece in enumerate(np.split(members, bounds[:-1].astype(np.int64))):
            pieces[client].append(piece)
    dealt = [generator.permutation(np.concatenate(piece)).tolist() for piece in pieces]
    _fill_up(dealt, config.min_samples)
    return [np.array(part, dtype=np.int64) for part in dealt]


def _proportions(alpha: float, num_clients: int, generator: np.random.Generator) -> np.ndarray:
    """One draw of Dirichlet(alpha, ..., alpha), float64 [K], safe for every alpha > 0.

    Gamma(alpha) draws underflow to 0/0 for small alpha, so they are made in logarithms:
    log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha.
    """
    alpha = min(alpha, _LARGEST_ALPHA)
    gamma = np.log(generator.gamma(alpha + 1.0, size=num_clients))
    log_uniform = np.log1p(-generator.random(num_clients))
    with np.errstate(over="ignore"):
        logits = gamma + log_uniform / alpha
    top = np.argmax(log_uniform) if np.isneginf(logits).all() else np.argmax(logits)
    if np.isneginf(logits[top]):  # alpha below 1e-300: all the mass is on one client
        return np.eye(num_clients)[top]
    weights = np.exp(logits - logits[top])
    return weights / weights.sum()


def _fill_up(dealt: list[list[int]], min_samples: int) -> None:
    """Move samples, one at a time, from the largest client to the smallest until all have `min_samples`.

    Takes at most K * min_samples moves: while a client is short, the largest has more than the minimum (the caller
    checked K * min_samples <= n), so no client is ever pushed below it. A list is in random order, so what a client
    gives away has its own mix of labels and what it keeps is as skewed as before.
    """
    sizes = np.array([len(part) for part in dealt])
    while sizes.min() < min_samples:
        poorest, richest = int(sizes.argmin()), int(sizes.argmax())
        dealt[poorest].append(dealt[richest].pop())
        sizes[poorest] += 1
        sizes[richest] -= 1


def _label_skew(
    y: np.ndarray, num_clients: int, config: Any, num_classes: int, generator: np.random.Generator
) -> list[np.ndarray]:
    width, many, few = config.dominant_classes, config.dominant_count, config.other_count
    if width > num_classes:
        raise ConfigError(f"partition.dominant_classes={width}: the data set has {num_classes} classes; lower it")
    if width * many + (num_classes - width) * few < 1:
        raise ConfigError(
            f"partition.dominant_count={many} and partition.other_count={few} leave every client without "
            "samples; raise one"
        )
    stock = np.bincount(y, minlength=num_classes)
    # How often each class is dominant. The larger classes take the odd turns, so whether it fits depends on the labels
    # alone and not on the seed.
    turns = np.full(num_classes, num_clients * width // num_classes)
    turns[np.argsort(-stock, kind="stable")[: num_clients * width % num_classes]] += 1
    need = turns * many + (num_clients - turns) * few
    if (need > stock).any():
        label = int(np.argmax(need - stock))
        raise ConfigError(
            f"partition.kind=label_skew: class {label} has {stock[label]} training samples but {need[label]} are "
            f"needed ({turns[label]} clients x dominant_count {many} + {num_clients - turns[label]} x "
            f"other_count {few}); lower a count or fl.num_clients, or raise data.subset"
        )
    shuffled = [generator.permutation(np.flatnonzero(y == label)) for label in range(num_classes)]
    used, parts = np.zeros(num_classes, dtype=np.int64), []
    for _ in range(num_clients):
        # The classes with most turns left, ties at random: turns differ by at most one, so this never runs out.
        dominant = np.lexsort((generator.random(num_classes), -turns))[:width]
        turns[dominant] -= 1
        take = np.full(num_classes, few)
        take[dominant] = many
        parts.append(np.concatenate([shuffled[c][used[c] : used[c] + take[c]] for c in range(num_classes)]))
        used += take
    return parts


def _shards(y: np.ndarray, num_clients: int, config: Any, generator: np.random.Generator) -> list[np.ndarray]:
    total = num_clients * config.shards_per_client
    if total > len(y):
        raise ConfigError(
            f"partition.shards_per_client={config.shards_per_client}: {num_clients} clients x "
            f"{config.shards_per_client} = {total} shards, but there are {len(y)} samples; lower it or fl.num_clients"
        )
    shuffled = generator.permutation(len(y))
    shards = np.array_split(shuffled[np.argsort(y[shuffled], kind="stable")], total)
    hands = generator.permutation(total).reshape(num_clients, config.shards_per_client)
    return [np.concatenate([shards[shard] for shard in hand]) for hand in hands]
