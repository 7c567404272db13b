"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
https://arxiv.org/abs/1812.06127

    client k:   y = w;  y <- y - eta (g_k(y; xi) + mu (y - w));   Delta_k = y - w
    server:     as FedAvg

The paper samples clients by n_k and averages uniformly; here cohorts are uniform and the mean is weighted by n_k, as
for every other method, so that methods differ in the local step alone. mu = 0 is FedAvg.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import prox
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply


def fedprox(
    optimizer: LocalOptimizer, *, prox_mu: float, server_lr: float = 1.0, prior: PriorWeights = by_samples
) -> Algorithm:
    """Args: `prox_mu` mu >= 0, the paper tries 0.001 to 1; the others as in `fedavg`."""
    return Algorithm("fedprox", LocalSolver(optimizer, (prox(prox_mu),)), mean(prior), apply(server_lr))
