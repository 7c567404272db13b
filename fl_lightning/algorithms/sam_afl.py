"""SAM-AFL, the non-private phase of SAM-ADPFL: A Geometry-Aware Adaptive Framework for Privacy-Preserving Federated
Learning Systems (Shan et al.).

    client k:   FedSAM's local training (Eq. 8-9);  G_k = L_worst,k - L_std,k  (Eq. 10),  uploads Delta_k, G_k
    server:     lambda_k = p_k exp(-mu G_k) / sum_j p_j exp(-mu G_j)           (Eq. 12)
                w <- gamma (w + eta_g sum_k lambda_k Delta_k)

The text does not say where the two losses are taken. `gap_at`: "local_end" (default) after local training, as the
mean over the last epoch's batches; "train_mean" the gap SAM saw along its last epoch, for free; "global_start" at w.
mu = 0 and gamma = 1 is FedSAM. The gap is raw: the run is not private.
"""

from typing import Literal

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.measures import GapAt, sharpness_gap
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import sharpness_aware
from fl_lightning.server.aggregate import PriorWeights, by_samples, sharpness
from fl_lightning.server.rules import apply


def sam_afl(
    optimizer: LocalOptimizer,
    *,
    rho: float,
    mu: float,
    gamma: float = 1.0,
    gap_at: GapAt = "local_end",
    variant: Literal["sam", "asam"] = "sam",
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `mu` >= 0 the sharpness temperature, `gamma` in (0, 1] the shrinkage; the others as in `fedsam`."""
    ascend = sharpness_aware(rho, variant)
    return Algorithm(
        "sam_afl",
        LocalSolver(optimizer, (ascend,)),
        sharpness(mu, prior),
        apply(server_lr, gamma),
        measures=(sharpness_gap(rho, gap_at),),
    )
