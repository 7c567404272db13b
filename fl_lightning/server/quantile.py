"""A clip bound that follows a quantile of the update norms. Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private
Learning with Adaptive Clipping, NeurIPS 2021. https://arxiv.org/abs/1905.03871

    b   = clamp01( 1/2 + (sum_k (1[||Delta_k|| <= C] - 1/2) + N(0, sigma_b^2)) / m )      share of updates within C
    C  <- C exp(-eta_C (b - gamma))

The bits are released with the updates and paid for by `uplink.clip_noise.QuantileBit`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fl_lightning.records import Aggregate, Message, ServerState
from fl_lightning.rng import generator
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule

BOUND, BITS = "clip", "below"


@dataclass(frozen=True)
class QuantileRule:
    """How C moves.

    Attributes:
        start: C of the first round, > 0.
        target: gamma in (0, 1).
        lr: eta_C > 0.
        expected: m, the fixed number of bits in a round (q K under Poisson sampling).
        owed: std of the noise that the server adds to the sum of the bits, 0 where clients have added theirs.
        seed: the run's.
    """

    start: float
    target: float
    lr: float
    expected: float
    owed: float
    seed: int

    def bound(self, server: ServerState) -> float:
        """C of the coming round."""
        return float(server.extra[BOUND]) if BOUND in server.extra else self.start

    def terms(self, server: ServerState, cohort: Sequence[int]) -> Mapping[int, Mapping[str, float]]:
        """What the clients of a round are told."""
        return {client: {"clip": self.bound(server)} for client in cohort}

    def collect(self, aggregate: Aggregator) -> Aggregator:
        """`aggregate` with the sum of the bits among its vectors."""

        def collecting(messages: Sequence[Message]) -> Aggregate:
            folded = aggregate(messages)
            bits = torch.tensor(sum(m.scalars[BITS] for m in messages), dtype=torch.float64)
            return folded if folded.empty else replace(folded, vectors={**folded.vectors, BITS: bits})

        return collecting

    def follow(self, rule: ServerRule) -> ServerRule:
        """`rule`, then C moves; a round to which nobody came moves it as well, by the noise alone."""

        def following(server: ServerState, aggregate: Aggregate) -> ServerState:
            draw = torch.randn((), generator=generator(self.seed, "quantile", server.round + 1), dtype=torch.float64)
            total = float(aggregate.vectors.get(BITS, 0.0)) + self.owed * float(draw)
            within = min(max(0.5 + total / self.expected, 0.0), 1.0)
            moved = self.bound(server) * math.exp(-self.lr * (within - self.target))
            after = rule(server, aggregate)
            return replace(after, extra={**after.extra, BOUND: torch.tensor(moved, dtype=torch.float64)})

        return following
