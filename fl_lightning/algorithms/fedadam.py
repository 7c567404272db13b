"""FedAdam. Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021.
https://arxiv.org/abs/2003.00295   (Algorithm 2, FEDADAM)

    client i:   FedAvg's local training;  Delta = sum_i p_i Delta_i
    server:     m <- beta1 m + (1 - beta1) Delta,    v <- beta2 v + (1 - beta2) Delta^2
                w <- w + eta m/(sqrt(v) + tau)

m = 0 and v = tau^2 before the first round; no bias correction. beta1 = 0.9, beta2 = 0.99, tau = 1e-3 as in the paper,
whose p_i are 1/|S| in the algorithm and by samples in its experiments.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.fedopt import adam


def fedadam(
    optimizer: LocalOptimizer,
    *,
    server_lr: float = 0.01,
    server_beta1: float = 0.9,
    server_beta2: float = 0.99,
    tau: float = 1e-3,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `server_lr` eta > 0, about the largest move of a weight per round; `tau` > 0; the others as in `fedavg`."""
    rule = adam(server_lr, server_beta1, server_beta2, tau)
    return Algorithm("fedadam", LocalSolver(optimizer), mean(prior), rule)
