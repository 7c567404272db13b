"""DP-FedLAW: FedLAW's server (fedlaw.py) on top of DP-FedAvg's clients (dp_fedavg.py).

No publication defines it; this is the reading under which SAM-ADPFL's comparison is private:
    client k:   level "sample": every local step is a private gradient;
                level "update": FedAvg's local training, then clip(Delta_k, C) + N(0, (z C)^2 I)
    server:     w^{t+1} = gamma sum_k lambda_k (w^t + upload_k), (x, y) learned on the proxy set as in FedLAW

The server computes from released values and the proxy set alone, so learning costs the clients nothing: it is
post-processing. The proxy set itself counts as PUBLIC. It is held out of the training data and no epsilon covers it;
the privacy statement of a run says so, and how many examples it holds. At level "update" the n_k are private, so the
weights start from p_k = 1/m.
Without noise and clipping this is fedlaw.
"""

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.fedlaw import learned
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, by_samples
from fl_lightning.server.learned import Proxy, side_by_side
from fl_lightning.uplink.clip_noise import clip_noise


def dp_fedlaw(
    optimizer: LocalOptimizer,
    *,
    protection: Protection,
    proxy: Proxy,
    proxy_lr: float = 0.005,
    proxy_epochs: int = 20,
    proxy_beta1: float = 0.5,
    proxy_beta2: float = 0.999,
    proxy_lr_step: int = 20,
    proxy_lr_decay: float = 0.5,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: as in `dp_fedavg` and `fedlaw`."""
    p, stack = protection, side_by_side(prior)
    rule = learned(proxy, proxy_lr, proxy_epochs, (proxy_beta1, proxy_beta2), step=proxy_lr_step, decay=proxy_lr_decay)
    if p.level == "sample":
        solver = LocalSolver(optimizer, p.private_gradient())
        return Algorithm("dp_fedlaw", solver, stack, rule, protection=p)
    uplink = (clip_noise(p.clip, p.multipliers, p.adjacency),)
    return Algorithm("dp_fedlaw", LocalSolver(optimizer), stack, rule, uplink, protection=p)
