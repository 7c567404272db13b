"""What a client measures of its loss surface.

L_std = F(y),  L_worst = F(y + e),  e = rho grad F(y)/||grad F(y)||,   G = L_worst - L_std     SAM-ADPFL Eq. 8, 10
S = rho ||grad F(y)||                                                                          Eq. 11
"""

from collections.abc import Sequence
from typing import Literal

import torch

from fl_lightning.local.solver import Batch, Context, Findings, Measure, SolverState
from fl_lightning.local.transforms import ascent
from fl_lightning.records import Vector

GapAt = Literal["local_end", "train_mean", "global_start"]


def losses_over(w: Vector, ctx: Context, batches: Sequence[Batch], rho: float) -> tuple[float, float, float] | None:
    """(L_std, L_worst, S): means over `batches` by examples, each batch with its own ascent; None without examples."""
    std = worst = first_order = 0.0
    examples = 0
    for batch in batches:
        g = ctx.objective.measure_gradient(w, batch)
        n = len(batch[1])
        std += n * float(ctx.objective.loss(w, batch))
        worst += n * float(ctx.objective.loss(w + ascent(rho, g), batch))
        first_order += n * rho * float(torch.linalg.vector_norm(g))
        examples += n
    return (std / examples, worst / examples, first_order / examples) if examples else None


def gap_over(w: Vector, ctx: Context, batches: Sequence[Batch], rho: float) -> float | None:
    """L_worst - L_std of `losses_over`."""
    found = losses_over(w, ctx, batches, rho)
    return None if found is None else found[1] - found[0]


def sharpness_gap(rho: float, at: GapAt = "local_end") -> Measure:
    """The scalar "gap" for Eq. 12, measured where `at` says (see algorithms/sam_afl.py)."""

    def measure(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
        if at == "train_mean":
            seen = [t for t in state.trace[-len(last_epoch) :] if len(t.losses) == 2]
            total = sum(t.examples for t in seen)
            gap = sum(t.examples * float(t.losses[1] - t.losses[0]) for t in seen) / total if total else None
        else:
            gap = gap_over(state.y if at == "local_end" else ctx.anchor, ctx, last_epoch, rho)
        return Findings() if gap is None else Findings(scalars={"gap": gap})

    return measure


def paper_scalars(rho: float) -> Measure:
    """The paper's uploads after local training: "sharpness" S_k, "loss_std", "loss_worst", and S_k raw besides.

    Eq. 13 and 14 use S_k without noise; it therefore travels as "sharpness_raw", which no release covers.
    """

    def measure(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
        found = losses_over(state.y, ctx, last_epoch, rho)
        if found is None:
            return Findings()
        std, worst, first_order = found
        scalars = {"sharpness": first_order, "loss_std": std, "loss_worst": worst, "sharpness_raw": first_order}
        return Findings(scalars=scalars)

    return measure


def private_gap(rho: float, bound: float) -> Measure:
    """(1/n) sum_i clip(l_i(y + e) - l_i(y), 0, bound) over the client's examples, e along the last private direction.

    y and e are computed from released gradients, so one example moves the mean by at most bound / n.
    """

    def measure(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
        assert state.previous is not None, "a measure runs after at least one step"
        worst = state.y + ascent(rho, state.previous)
        rows = [
            ctx.objective.example_losses(worst, batch) - ctx.objective.example_losses(state.y, batch)
            for batch in ctx.examples()
        ]
        # An example whose gap is no number counts as `bound`: left alone, one of n would move the mean by all of it.
        gaps = torch.nan_to_num(torch.cat(rows), nan=bound).clamp(0, bound)
        return Findings(scalars={"gap": float(gaps.mean())})

    return measure
