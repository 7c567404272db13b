"""CE-FedAvg, clipping-enabled FedAvg. Zhang, Chen, Hong, Wu, Yi: Understanding Clipping for Federated Learning:
Convergence and Client-Level Differential Privacy, ICML 2022. https://arxiv.org/abs/2106.13673   (Algorithm 2)

    client i:   x_i^{t,0} = x^t;  q = 0..Q-1:  x_i^{t,q+1} = x_i^{t,q} - eta_l g_i^{t,q}
                Delta_i^t = x_i^{t,Q} - x_i^{t,0}
                upload clip(Delta_i^t, c),   clip(v, c) = v min(1, c/||v||)           (Eq. 3, 4)
    server:     x^{t+1} = x^t + eta_g (1/|P_t|) sum_i clip(Delta_i^t, c)

c is given, or c = 0.5 mean ||Delta_i^t|| over clients and rounds of an unclipped run with identical settings, as in the
paper's experiments (`clip_threshold.py`). Such a c is computed from raw norms. Clipping without noise is NOT PRIVATE in
either case; with noise on each upload it is dp_fedavg at level "update" (Algorithm 3). c = infinity is FedAvg.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, mean, uniform
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_only import clip_difference


def ce_fedavg(
    optimizer: LocalOptimizer, *, clip: float | None, server_lr: float = 1.0, prior: PriorWeights = uniform
) -> Algorithm:
    """Args: `clip` c > 0, infinite for none, None until measured; eta_l is `optimizer`'s, `server_lr` eta_g."""
    return Algorithm("ce_fedavg", LocalSolver(optimizer), mean(prior), apply(server_lr), (clip_difference(clip),))
