"""What a client measures of its loss surface.

L_std = F(y),  L_worst = F(y + e),  e = rho grad F(y)/||grad F(y)||,   G = L_worst - L_std     SAM-ADPFL Eq. 8, 10
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fl_lightning.local.solver import Context, Measure, SolverState
from fl_lightning.local.transforms import ascent
from fl_lightning.records import Vector

GapAt = Literal["local_end", "train_mean", "global_start"]


def gap_over(w: Vector, ctx: Context, batches: Sequence[Any], rho: float) -> float | None:
    """The mean over `batches`, by examples, of F(w + e; xi) - F(w; xi) with each batch's own ascent e."""
    total, examples = 0.0, 0
    for batch in batches:
        g = ctx.objective.measure_gradient(w, batch)
        n = len(batch[1])
        total += n * float(ctx.objective.loss(w + ascent(rho, g), batch) - ctx.objective.loss(w, batch))
        examples += n
    return total / examples if examples else None


def sharpness_gap(rho: float, at: GapAt = "local_end") -> Measure:
    """The scalar "gap" for Eq. 12, measured where `at` says (see algorithms/sam_afl.py)."""

    def measure(state: SolverState, ctx: Context, last_epoch: list[Any]) -> Mapping[str, float]:
        if at == "train_mean":
            seen = [t for t in state.trace[-len(last_epoch) :] if len(t.losses) == 2]
            total = sum(t.examples for t in seen)
            gap = sum(t.examples * float(t.losses[1] - t.losses[0]) for t in seen) / total if total else None
        else:
            gap = gap_over(state.y if at == "local_end" else ctx.anchor, ctx, last_epoch, rho)
        return {} if gap is None else {"gap": gap}

    return measure
