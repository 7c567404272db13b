"""FedAvgM. Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. https://arxiv.org/abs/1909.06335;  the server of Reddi et al. 2021 with SGD and momentum.

    client i:   FedAvg's local training
    server:     m <- beta m + sum_i p_i Delta_i,    w <- w + eta_g m

Undamped, as in the paper. beta = 0 is FedAvg.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.fedopt import heavy_ball


def fedavgm(
    optimizer: LocalOptimizer,
    *,
    server_momentum: float = 0.9,
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `server_momentum` beta in [0, 1), the paper tries 0 to 0.997; the others as in `fedavg`."""
    return Algorithm("fedavgm", LocalSolver(optimizer), mean(prior), heavy_ball(server_lr, server_momentum))
