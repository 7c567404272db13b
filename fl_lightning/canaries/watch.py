"""What an audit gathers while a run trains: which canaries are in, and a score of each from released values alone."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.canaries.directions import Directions, directions
from fl_lightning.privacy import ORDERS, Ledger
from fl_lightning.privacy.audit import AuditResult, audit
from fl_lightning.records import Vector
from fl_lightning.rng import generator

BALANCE = 0.25
"""Averages over the two signs count alike where the weight of one is at least this share of the other's."""


@dataclass
class Watch:
    """The audit of one run; lives as long as it.

    A canary that is in contributes +c s C v_j (s > 1), c = +-1 being a public sign that alternates from release to
    release. One that is out contributes nothing, or the opposite where the neighbouring relation replaces a unit. With
    x = c <released sum, v_j> / C, noise of std z C, and small q / z, the log likelihood ratio of in and out is

        sum over releases of  q x / z^2  (- q^2 / (2 z^2) where out means nothing)

    The score is that, but for two things. z is not the declared one but ||released sum|| / (C sqrt(d)), the spread of
    its products with random directions, so a release that something else dominates counts little. And x is averaged
    over the releases of either sign apart, and the two averages count alike, unless one has next to no weight. Noise
    that repeats from release to release then cancels, so it shows as well as noise that is too small.

    Attributes:
        directions: v_1..v_m.
        coins: which canaries are in [m].
        opposite: whether out means the opposite contribution instead of none.
        delta: of the run's guarantee.
        clients: K, all clients of the federation.
        sums: sum of w x over the releases with c = +1 and c = -1, with w = q / z^2 as above, [2, m].
        weights: sum of w, [2, m].
        offsets: sum of q^2 / (2 z^2) where out means nothing, [m].
    """

    directions: Directions
    coins: Tensor
    opposite: bool
    delta: float
    clients: int
    sums: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        m = self.directions.count
        self.sums, self.weights = torch.zeros(2, m, dtype=torch.float64), torch.zeros(2, m, dtype=torch.float64)
        self.offsets = torch.zeros(m, dtype=torch.float64)

    @property
    def canaries(self) -> int:
        return self.directions.count

    def factor(self, canary: int) -> float:
        """+1 in, 0 or -1 out."""
        return 1.0 if self.coins[canary] else -float(self.opposite)

    @property
    def scores(self) -> Tensor:
        """One number per canary [m], larger the more it looks included; 0 for one that was in no release."""
        total = self.weights.sum(0)
        pooled = self.sums.sum(0) / total.clamp_min(1e-300)
        balanced = (self.sums / self.weights.clamp_min(1e-300)).mean(0)
        even = self.weights.amin(0) >= BALANCE * self.weights.amax(0)
        return torch.where(even, balanced, pooled) * total - self.offsets

    def see(self, released: Vector, which: Tensor, sign: float, unit: float, rate: float) -> None:
        """Adds one release to the scores of the canaries `which` (int64); one that is zero or not finite tells nothing.

        Args:
            released: the released vector [d].
            which: the canaries that might be in it.
            sign: c.
            unit: what C is in this release: C for a sum, C over the denominator for a mean.
            rate: q, the probability with which each of them entered it.
        """
        flat = released.detach().cpu().double() / unit
        spread = float(torch.linalg.vector_norm(flat)) / len(flat) ** 0.5
        if not 0 < spread < math.inf:
            return
        weight, row = rate / spread**2, int(sign < 0)
        self.sums[row, which] += weight * sign * self.directions.project(flat)[which]
        self.weights[row, which] += weight
        self.offsets[which] += 0.0 if self.opposite else rate * weight / 2

    def verdict(self, ledger: Ledger) -> AuditResult:
        """What the scores say of a run with this account; its claim is, order by order, the largest of any client."""
        claimed = np.zeros(len(ORDERS))
        for client in range(self.clients):
            spent = [count * segment.curve() for segment, count in ledger.counts_of(client).items()]
            claimed = np.maximum(claimed, np.sum(spent, axis=0)) if spent else claimed
        return audit(self.scores.numpy(), self.coins.numpy(), claimed, self.delta)


def begin(canaries: int, dimension: int, seed: int, shield: Protection, clients: int) -> Watch:
    """An audit with `canaries` canaries in R^`dimension` of a run of `clients` clients.

    Directions and coins come from the run's seed.

    Raises:
        PrivacyError: more canaries than parameters.
    """
    found = directions(canaries, dimension, generator(seed, "audit directions"))
    coins = torch.rand(canaries, generator=generator(seed, "audit coins")) < 0.5
    return Watch(found, coins, shield.adjacency == "replace_one", shield.delta, clients)
