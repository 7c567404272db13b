"""FedExP. Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.
https://arxiv.org/abs/2301.09604   (Algorithm 1)

    client i:   FedAvg's local training
    server:     Delta = sum_i p_i Delta_i,    eta_g = max(1, sum_i p_i ||Delta_i||^2 / (2 (||Delta||^2 + eps)))
                w <- w + eta_g Delta

The paper's p_i are 1/M (algorithm.aggregate.weighting=uniform). It evaluates the mean of the last two iterates, because
the last one oscillates; here w itself is evaluated, as for every other method. Clients that agree give eta_g = 1, that
is FedAvg.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.records import Aggregate, Message, ServerState
from fl_lightning.server.aggregate import Aggregator, PriorWeights, by_samples, mean
from fl_lightning.server.rules import ServerRule, apply


def mean_and_square(prior: PriorWeights) -> Aggregator:
    """The mean update, and beside it "mean_square" = sum_i p_i ||Delta_i||^2, a 0-d vector."""
    plain = mean(prior)

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        folded = plain(messages)
        if folded.empty:
            return folded
        squares = torch.stack([m.vectors["delta"].square().sum() for m in messages])
        mean_square = torch.tensor(folded.weights, dtype=squares.dtype) @ squares
        return replace(folded, vectors={**folded.vectors, "mean_square": mean_square})

    return aggregate


def extrapolate(eps: float) -> ServerRule:
    """w <- w + eta_g Delta with the eta_g >= 1 of this round."""

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        eta_g = 1.0
        if not aggregate.empty:
            square = torch.linalg.vector_norm(aggregate.vectors["delta"]) ** 2
            eta_g = max(1.0, float(aggregate.vectors["mean_square"] / (2 * (square + eps))))
        return apply(eta_g)(server, aggregate)

    return rule


def fedexp(optimizer: LocalOptimizer, *, eps: float = 1e-3, prior: PriorWeights = by_samples) -> Algorithm:
    """Args: `eps` >= 0 keeps eta_g finite where the updates cancel; the others as in `fedavg`."""
    return Algorithm("fedexp", LocalSolver(optimizer), mean_and_square(prior), extrapolate(eps))
