"""Model clipping, the alternative that the clipping paper rules out. Zhang, Chen, Hong, Wu, Yi: Understanding Clipping
for Federated Learning, ICML 2022. https://arxiv.org/abs/2106.13673   (Section 2, Claim 2.1)

    client i:   FedAvg's local training to x_i^{t,Q};   upload clip(x_i^{t,Q}, c)
    server:     x^{t+1} = (1/|P_t|) sum_i clip(x_i^{t,Q}, c)

The bound is on the model, not on its change: a client whose optimum lies far outside the ball of radius c pulls the
average off, and no step size mends it (Claim 2.1: x_inf = lambda c/(3 - 2 lambda), x* = (k - 1) c/3 for k > 4).
c = infinity is FedAvg.
"""

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import Batch, Context, Findings, LocalSolver, SolverState
from fl_lightning.server.aggregate import PriorWeights, mean, uniform
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_only import clip_model


def trained_model(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
    """x_i^{t,Q} for the uplink, which clips it and sends its difference to x^t."""
    return Findings(vectors={"model": state.y})


def model_clipping(optimizer: LocalOptimizer, *, clip: float, prior: PriorWeights = uniform) -> Algorithm:
    """Args: `clip` c > 0 in parameter space, infinite for none; the others as in `fedavg`."""
    return Algorithm(
        "model_clipping",
        LocalSolver(optimizer),
        mean(prior),
        apply(),
        (clip_model(clip),),
        measures=(trained_model,),
    )
