"""DP-SCAFFOLD. Noble, Bellet, Dieuleveut: Differentially Private Federated Learning on Heterogeneous Data, AISTATS
2022. https://arxiv.org/abs/2111.09278

level "sample", the published method: SCAFFOLD (Option II, see scaffold.py) over DP-SGD's gradient,
    g~_i(y) = (sum_j clip(g_ij(y), C) + N(0, (z C)^2 I)) / (q n_i)       y <- y - eta_l (g~_i(y) - c_i + c)
The update and c_i+ - c_i are both computed from released gradients. Batches are Poisson at rate q, as the ledger
assumes, with the constant denominator q n_i = B; the official code takes a fixed-size subset and, for C, the median of
the batch's raw norms, which is not private. Neither is copied.

level "update": only the protected update leaves, g~_i = clip(y - x, C) + N(0, (z C)^2 I), and the server derives
    c <- c + (|S|/N) mean_S(-c - g~_i/(Q eta_l))                          post-processing: no further release
    c_i <- c_i - c + (x - y)/(Q eta_l)                                    unclipped, for it never leaves the client
Q is public, `fl.max_local_steps`, on both sides: the number of steps taken would tell n_i, which is private here. One Q
for all keeps c = mean_i c_i where nothing is clipped or noised, even if a client stops early, and with it SCAFFOLD's
fixed point; clipping and noise part the two. A bound of infinity and no noise give scaffold.
"""

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.local.controls import control_along_path
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import control_variate
from fl_lightning.server.aggregate import mean, uniform
from fl_lightning.server.controls import derived_change, with_control
from fl_lightning.server.noise import everyone
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_noise import clip_noise


def dp_scaffold(
    optimizer: LocalOptimizer,
    *,
    lr: float,
    num_clients: int,
    protection: Protection,
    max_local_steps: int | None = None,
    server_lr: float = 1.0,
) -> Algorithm:
    """Args: `optimizer` plain SGD of step size `lr`; `max_local_steps` Q, needed at level "update"."""
    p, step = protection, apply(server_lr)
    if p.level == "sample":
        return Algorithm(
            "dp_scaffold",
            LocalSolver(optimizer, (*p.private_gradient(), control_variate())),
            mean(uniform),
            with_control(step, num_clients),
            measures=(control_along_path(lr),),
            derived=("delta", "delta_c"),
            protection=p,
        )
    if max_local_steps is None:
        raise ValueError("dp_scaffold at level update needs max_local_steps, the public Q")
    return Algorithm(
        "dp_scaffold",
        LocalSolver(optimizer, (control_variate(),)),
        mean(everyone),
        with_control(step, num_clients, derived_change(lr, max_local_steps)),
        uplink=(clip_noise(p.clip, p.multipliers, p.adjacency),),
        measures=(control_along_path(lr, max_local_steps, uploaded=False),),
        protection=p,
    )
