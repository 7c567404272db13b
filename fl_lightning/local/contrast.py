"""The model-contrastive term, which keeps a client's representations near the server's and off its own earlier ones.

    l_con = -log [ exp(cos(z, z_glob)/tau) / (exp(cos(z, z_glob)/tau) + exp(cos(z, z_prev)/tau)) ]     MOON, Eq. 3

z, z_glob, z_prev [B, h]: representations of a batch under the model in training, the server's model at the start of the
visit, and the client's own model at the end of its last visit; the mean over the batch is taken.
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.local.solver import Batch, Context, Findings, GradFn, GradTransform, Objective, SolverState
from fl_lightning.records import Vector

PREVIOUS = "previous"
"""The name of the client's last local model in its own state."""


class RepresentationObjective(Objective, Protocol):
    """A loss whose model exposes what it computes before its last layer."""

    def representations(self, w: Vector, batch: Batch) -> Tensor:
        """z [B, h] at w, without gradient and without touching buffers."""
        ...

    def representation_gradient(self, w: Vector, batch: Batch, loss: Callable[[Tensor], Tensor]) -> Vector:
        """The gradient of loss(z) in w, [d]; nothing is noted and no buffer moves."""
        ...


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """l_con, the mean over the batch; a cross-entropy over two similarities whose right answer is the first."""
    positive, negative = F.cosine_similarity(z, z_glob, dim=1), F.cosine_similarity(z, z_prev, dim=1)
    return F.softplus((negative - positive) / temperature).mean()


def model_contrast(mu: float, temperature: float) -> GradTransform:
    """g(w; xi) + mu grad l_con(w; xi).

    A client that has no earlier model yet takes the server's for it: z_prev = z_glob makes l_con constant, so its first
    visit is plain training.
    """

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        previous = ctx.state.get(PREVIOUS)
        if mu == 0.0 or previous is None:
            return grad
        objective = cast(RepresentationObjective, ctx.objective)

        def contrasted(w: Vector, batch: Batch) -> Vector:
            g = grad(w, batch)
            z_glob = objective.representations(ctx.anchor, batch)
            z_prev = objective.representations(previous, batch)
            pull = objective.representation_gradient(w, batch, lambda z: contrast(z, z_glob, z_prev, temperature))
            return torch.add(g, pull, alpha=mu)

        return contrasted

    return transform


def keep_local_model(state: SolverState, ctx: Context, last_epoch: list[Batch]) -> Findings:
    """A measure that reports nothing and keeps y for the client's next visit."""
    return Findings(state={PREVIOUS: state.y})
