"""DP-FedSAM. Shi, Liu, Wei, Shen, Wang, Tao: Make Landscape Flatter in Differentially Private Federated Learning,
CVPR 2023. https://arxiv.org/abs/2303.11242

level "update", the published definition: FedSAM's local training; upload clip(Delta_k, C) + N(0, (z C)^2 I), one norm
over the whole vector. The official code clips each tensor by itself and draws its cohorts from a public seed; neither
is copied. The noise stands on each upload, so the server need not be trusted.
level "sample": DP-SGD's step (see dp_fedavg.py) with SAM's ascent along the previous private direction p (Park et al.,
Differentially Private Sharpness-Aware Training, ICML 2023, https://arxiv.org/abs/2306.05651):
    y <- y - eta (sum_i clip(g_i(y + rho p/||p||), C) + N(0, (z C)^2 I)) / (q n_k)
An ascent along the raw batch gradient would let one example move every clipped gradient: that is not private.
rho = 0 is dp_fedavg.
"""

from typing import Literal

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import sharpness_aware
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_noise import clip_noise


def dp_fedsam(
    optimizer: LocalOptimizer,
    *,
    rho: float,
    protection: Protection,
    variant: Literal["sam", "asam"] = "sam",
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: as in `fedsam` and `dp_fedavg`."""
    p = protection
    if p.level == "sample":
        chain = p.private_gradient(rho)
        return Algorithm("dp_fedsam", LocalSolver(optimizer, chain), mean(prior), apply(server_lr), protection=p)
    solver = LocalSolver(optimizer, (sharpness_aware(rho, variant),))
    uplink = (clip_noise(p.clip, p.multipliers, p.adjacency),)
    return Algorithm("dp_fedsam", solver, mean(prior), apply(server_lr), uplink, protection=p)
