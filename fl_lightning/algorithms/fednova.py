"""FedNova. Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization, NeurIPS 2020. https://arxiv.org/abs/2007.07481

    client i:   tau_i local steps;  Delta_i = y - x = -eta G_i a_i, where a_i weighs the gradients G_i along the way
    server:     d_i = Delta_i/||a_i||_1,    tau_eff = sum_i p_i ||a_i||_1
                x <- x + eta_g tau_eff sum_i p_i d_i

SGD: ||a_i||_1 = tau_i.  Heavy-ball momentum rho: a_i = [1 - rho^tau_i, ..., 1 - rho]/(1 - rho), so
||a_i||_1 = (tau_i - rho (1 - rho^tau_i)/(1 - rho))/(1 - rho).  Adam's steps are no fixed weighting of gradients: it has
no a_i. Weight decay counts as part of the loss. Clients of equal step counts make FedAvg.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.records import Aggregate, Message
from fl_lightning.server.aggregate import Aggregator, PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply


def path_length(steps: int, momentum: float = 0.0) -> float:
    """||a_i||_1 of `steps` >= 1 steps."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


def normalised_mean(prior: PriorWeights, length: Callable[[int], float]) -> Aggregator:
    """tau_eff sum_i p_i Delta_i/||a_i||_1; buffers are averaged by p_i as everywhere."""

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        p = prior(messages)
        lengths = [length(m.steps) if weight else 1.0 for m, weight in zip(messages, p, strict=True)]
        tau_eff = sum(weight * a for weight, a in zip(p, lengths, strict=True)) / (sum(p) or 1.0)
        scaled = [
            replace(m, vectors={**m.vectors, "delta": m.vectors["delta"] * (tau_eff / a)})
            for m, a in zip(messages, lengths, strict=True)
        ]
        return mean(prior)(scaled)

    return aggregate


def fednova(
    optimizer: LocalOptimizer, *, momentum: float = 0.0, server_lr: float = 1.0, prior: PriorWeights = by_samples
) -> Algorithm:
    """Args: `momentum` rho in [0, 1), that of `optimizer`, 0 for plain SGD; the others as in `fedavg`."""
    aggregate = normalised_mean(prior, lambda steps: path_length(steps, momentum))
    return Algorithm("fednova", LocalSolver(optimizer), aggregate, apply(server_lr))
