"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML 2020. https://arxiv.org/abs/1910.06378   (Algorithm 1)

    client i:   y = x;  Q steps  y <- y - eta_l (g_i(y) - c_i + c)                     (line 10)
                Option I   c_i+ = g_i(x)                                               (line 12)
                Option II  c_i+ = c_i - c + (x - y)/(Q eta_l)
                uploads y - x and c_i+ - c_i;  c_i <- c_i+
    server:     x <- x + eta_g mean_S(y - x),    c <- c + (|S|/N) mean_S(c_i+ - c_i)   (lines 16-17)

Q is the number of steps that the client took. Both means are unweighted, as in the paper. c_i belongs to the client
and is kept between its visits; all controls start at zero, so the first round is FedAvg's with equal weights.
Option II is exact for plain SGD alone: under momentum or Adam (x - y)/(Q eta_l) is no gradient. With Option I the
correction is made before the optimizer sees the gradient, and any optimizer may follow.
"""

from typing import Literal

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.controls import control_along_path, control_at_server
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import control_variate
from fl_lightning.server.aggregate import mean, uniform
from fl_lightning.server.controls import with_control
from fl_lightning.server.rules import apply


def scaffold(
    optimizer: LocalOptimizer,
    *,
    lr: float,
    num_clients: int,
    option: Literal["I", "II"] = "II",
    server_lr: float = 1.0,
) -> Algorithm:
    """Args: `lr` eta_l, that of `optimizer`; `num_clients` N; `option` of line 12, "II" with plain SGD only."""
    return Algorithm(
        "scaffold",
        LocalSolver(optimizer, (control_variate(),)),
        mean(uniform),
        with_control(apply(server_lr), num_clients),
        measures=(control_at_server() if option == "I" else control_along_path(lr),),
    )
