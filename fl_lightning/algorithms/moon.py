"""MOON. Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021. https://arxiv.org/abs/2103.16257

    client k:   y = w;  for each local batch:  y <- y - eta grad [ l_sup(y) + mu l_con(y) ];    Delta_k = y - w
                l_con = -log [ exp(cos(z, z_glob)/tau) / (exp(cos(z, z_glob)/tau) + exp(cos(z, z_prev)/tau)) ]
                z = R_y(x),  z_glob = R_w(x),  z_prev = R_{w_k}(x);   w_k is the model of its last visit, which it keeps
    server:     as in FedAvg

tau = 0.5. The paper tunes mu over 0.1, 1, 5, 10 and finds 5 best on CIFAR-10, 1 on CIFAR-100 and Tiny-ImageNet.
Two readings of ours: R is the network without its last layer, as it stands. The paper adds a projection head (two
layers, 256 outputs) to every network it compares; here the networks stay those of the other algorithms. Under
BatchNorm all three representations use the batch's statistics; the official code gives w and w_k running statistics.
mu = 0, and every client's first visit, are fedavg.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.contrast import keep_local_model, model_contrast
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply


def moon(
    optimizer: LocalOptimizer,
    *,
    mu: float,
    temperature: float = 0.5,
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `mu` >= 0 the weight of l_con, `temperature` tau > 0; the others as in `fedavg`."""
    solver = LocalSolver(optimizer, (model_contrast(mu, temperature),))
    return Algorithm("moon", solver, mean(prior), apply(server_lr), measures=(keep_local_model,))
