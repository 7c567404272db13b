"""FedAvg. McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS 2017. https://arxiv.org/abs/1602.05629

    client k:   y = w;  for each local batch xi:  y <- y - eta g_k(y; xi);   Delta_k = y - w
    server:     w <- w + eta_g sum_k p_k Delta_k,    p_k = n_k / sum_j n_j over the cohort
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply


def fedavg(optimizer: LocalOptimizer, *, server_lr: float = 1.0, prior: PriorWeights = by_samples) -> Algorithm:
    """Args: `optimizer` of the clients, `server_lr` eta_g > 0, `prior` the weights p_k before normalising."""
    return Algorithm("fedavg", LocalSolver(optimizer), mean(prior), apply(server_lr))
