"""DP-FedAvg, at the level of one example or of one client.

level "sample": Abadi et al., Deep Learning with Differential Privacy, CCS 2016 (https://arxiv.org/abs/1607.00133),
run by each client by itself:
    each step:  Poisson batch at rate q = B/n_k;  y <- y - eta (sum_i clip(g_i(y), C) + N(0, (z C)^2 I)) / (q n_k)
    upload:     Delta_k = y - w, computed from released gradients alone
level "update": Geyer, Klein, Nabi, Differentially Private Federated Learning: A Client Level Perspective, 2017
(https://arxiv.org/abs/1712.07557) with a fixed bound, and noise on each upload (SAM-ADPFL Eq. 15):
    client k:   FedAvg's local training;  upload clip(Delta_k, C) + N(0, (z C)^2 I)
server:         w <- w + eta_g sum_k p_k upload_k.   At level "update" the n_k are private, so p_k = 1/m.
"""

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_noise import clip_noise


def dp_fedavg(
    optimizer: LocalOptimizer,
    *,
    protection: Protection,
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `protection` with level "sample" or "update"; the others as in `fedavg`."""
    p = protection
    if p.level == "sample":
        solver = LocalSolver(optimizer, p.private_gradient())
        return Algorithm("dp_fedavg", solver, mean(prior), apply(server_lr), protection=p)
    uplink = (clip_noise(p.clip, p.multipliers, p.adjacency),)
    return Algorithm("dp_fedavg", LocalSolver(optimizer), mean(prior), apply(server_lr), uplink, protection=p)
