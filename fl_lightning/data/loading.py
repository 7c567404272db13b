"""Batches by indexing: which examples a client sees, step by step. No loader processes, no copies of the data.

The plan of a visit is a pure function of (seed, round, client), so any engine and any worker sees the same batches.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Sampling = Literal["shuffled", "poisson", "without_replacement", "full"]
"""How a client's examples enter its steps. The last three are what an accountant knows."""


def shuffled_epoch(num_samples: int, batch_size: int, rng: torch.Generator, merge_single: bool = False) -> list[Tensor]:
    """One pass over 0..n-1 in random order; the last batch may be short and is never dropped.

    Args:
        num_samples: n >= 0.
        batch_size: B >= 1; larger than n gives one batch of n.
        rng: the stream to draw the order from.
        merge_single: a last batch of one example joins the batch before it, as BatchNorm cannot train on one.
    """
    batches = list(torch.randperm(num_samples, generator=rng).split(batch_size)) if num_samples else []
    if merge_single and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def poisson_rate(num_samples: int, batch_size: int) -> float:
    """q = min(1, B/n): the probability with which each example enters a step. Never above 1."""
    return min(1.0, batch_size / num_samples)


def poisson_epoch(num_samples: int, batch_size: int, rng: torch.Generator) -> list[Tensor]:
    """ceil(n/B) Poisson batches: every example enters each by itself at rate q. None is redrawn, even if empty."""
    if not num_samples:
        return []
    rate = poisson_rate(num_samples, batch_size)
    steps = steps_per_epoch(num_samples, batch_size)
    return [(torch.rand(num_samples, generator=rng) < rate).nonzero().flatten() for _ in range(steps)]


def drawn_epoch(num_samples: int, batch_size: int, rng: torch.Generator) -> list[Tensor]:
    """ceil(n/B) batches of exactly min(B, n) examples, each drawn anew without replacement."""
    if not num_samples:
        return []
    steps = steps_per_epoch(num_samples, batch_size)
    return [torch.randperm(num_samples, generator=rng)[:batch_size] for _ in range(steps)]


def steps_per_epoch(num_samples: int, batch_size: int, sampling: Sampling = "poisson") -> int:
    """The steps of one local epoch: ceil(n/B), or 1 where every step takes all examples."""
    return -(-num_samples // batch_size) if sampling != "full" else min(1, num_samples)


def visit_plan(
    num_samples: int,
    batch_size: int,
    epochs: int,
    rng: torch.Generator,
    *,
    sampling: Sampling = "shuffled",
    max_steps: int | None = None,
    merge_single: bool = False,
) -> tuple[list[Tensor], int]:
    """All batches of one visit, and how many of them belong to the last epoch.

    Returns:
        The batches as positions among the client's examples, and the length of the last (perhaps cut) epoch.
    """
    batches: list[Tensor] = []
    last = 0
    for _ in range(epochs):
        if sampling == "shuffled":
            epoch = shuffled_epoch(num_samples, batch_size, rng, merge_single)
        elif sampling == "poisson":
            epoch = poisson_epoch(num_samples, batch_size, rng)
        elif sampling == "without_replacement":
            epoch = drawn_epoch(num_samples, batch_size, rng)
        else:
            epoch = [torch.arange(num_samples)] if num_samples else []
        if max_steps is not None:
            epoch = epoch[: max_steps - len(batches)]
        if not epoch:
            break
        batches += epoch
        last = len(epoch)
    return batches, last


def sampled_share(num_samples: int, batch_size: int, sampling: Sampling) -> float:
    """q, the share of a client's examples in a step, in expectation: min(1, B/n), or 1 under "full"."""
    return 1.0 if sampling == "full" else poisson_rate(num_samples, batch_size)


def planned_steps(
    num_samples: int, batch_size: int, epochs: int, max_steps: int | None, sampling: Sampling = "poisson"
) -> int:
    """How many steps `visit_plan` will take for a client of n examples under a private sampling."""
    steps = epochs * steps_per_epoch(num_samples, batch_size, sampling)
    return steps if max_steps is None else min(steps, max_steps)


class ImageStore:
    """uint8 images kept in memory; batches are gathered and normalised on the fly.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        mean: per channel, in units of pixel/255.
        std: per channel, in the same units, > 0.
        dtype: floating type of the batches.
        device: where the images and the batches live.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.images = images.to(device)
        self.labels = labels.to(device)
        shape = (1, len(mean), 1, 1)
        centre = torch.tensor(mean, dtype=torch.float64, device=device).view(shape)
        spread = torch.tensor(std, dtype=torch.float64, device=device).view(shape)
        self._scale = (1.0 / (255.0 * spread)).to(dtype)
        self._shift = (-centre / spread).to(dtype)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) for the given examples: x = (pixel/255 - mean)/std, [B, C, H, W]; y int64 [B]."""
        indices = indices.to(self.labels.device)
        x = self.images[indices].to(self._scale.dtype)
        return x.mul_(self._scale).add_(self._shift), self.labels[indices]
