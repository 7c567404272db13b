"""FedSAM. Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.
https://arxiv.org/abs/2206.02618

    client k:   y = w;  e = rho g_k(y; xi)/||g_k(y; xi)||;  y <- y - eta g_k(y + e; xi);   Delta_k = y - w
    server:     as FedAvg

One norm over all parameters; the ascent uses the data gradient alone (no weight decay). rho = 0 is FedAvg.
"""

from typing import Literal

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import sharpness_aware
from fl_lightning.server.aggregate import PriorWeights, by_samples, mean
from fl_lightning.server.rules import apply


def fedsam(
    optimizer: LocalOptimizer,
    *,
    rho: float,
    variant: Literal["sam", "asam"] = "sam",
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `rho` >= 0 the radius (0.05 recommended), `variant` "asam" for the scale-invariant ball."""
    ascend = sharpness_aware(rho, variant)
    return Algorithm("fedsam", LocalSolver(optimizer, (ascend,)), mean(prior), apply(server_lr))
