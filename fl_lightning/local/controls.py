"""SCAFFOLD's control variates on the client (Karimireddy et al. 2020, Algorithm 1, line 12).

    Option I     c_i+ = g_i(x)                           the client's gradient at the server's model x
    Option II    c_i+ = c_i - c + (x - y)/(Q eta_l)      free; the mean of the gradients seen, under plain SGD only

c_i+ stays with the client; the upload is "delta_c" = c_i+ - c_i. Control variates that were never set are zero.
"""

import torch

from fl_lightning.local.solver import Batch, Context, Findings, Measure, SolverState
from fl_lightning.records import Vector


def control_at_server() -> Measure:
    """Option I: one more pass over all of the client's data, at x. Any optimizer will do."""

    def measure(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
        batches = ctx.examples()
        gradient, examples = torch.zeros_like(ctx.anchor), sum(len(labels) for _, labels in batches)
        for batch in batches:
            gradient.add_(ctx.objective.measure_gradient(ctx.anchor, batch), alpha=len(batch[1]) / examples)
        return _moved(ctx, gradient, uploaded=True)

    return measure


def control_along_path(lr: float, local_steps: int | None = None, uploaded: bool = True) -> Measure:
    """Option II.

    Args:
        lr: eta_l, the step size of the client's plain SGD.
        local_steps: a public Q in place of the number of steps taken.
        uploaded: whether the client sends "delta_c"; where it does not, nothing of c_i ever leaves it.
    """

    def measure(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
        travelled = (ctx.anchor - state.y) / ((local_steps or state.steps) * lr)
        c, c_i = ctx.server.get("c"), ctx.state.get("c_i")
        new = travelled if c is None else travelled - c
        return _moved(ctx, new if c_i is None else new + c_i, uploaded)

    return measure


def _moved(ctx: Context, new: Vector, uploaded: bool) -> Findings:
    old = ctx.state.get("c_i")
    change = {"delta_c": new if old is None else new - old} if uploaded else {}
    return Findings(vectors=change, state={"c_i": new})
