"""FedAvg whose clients bound every gradient, to copy and change.

fl-lightning run algorithm=examples/my_fedavg.py:my_fedavg algorithm.parameters.max_norm=0.5

client k:   y = w;  for each local batch xi:  y <- y - eta clip(g_k(y; xi), max_norm);   Delta_k = y - w
server:     w <- w + eta_g sum_k p_k Delta_k
"""

from typing import Annotated

import torch
from pydantic import Field

from fl_lightning import Algorithm
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.server.aggregate import PriorWeights, mean
from fl_lightning.server.rules import apply


def bounded(max_norm):
    """A gradient transform: g min(1, max_norm/||g||), over all parameters at once."""

    def transform(grad, ctx):
        def bounded_gradient(w, batch):
            g = grad(w, batch)
            return g * (max_norm / torch.linalg.vector_norm(g)).clamp(max=1.0)

        return bounded_gradient

    return transform


def my_fedavg(
    optimizer: LocalOptimizer,  # algorithm.local.*
    server_lr: float,  # algorithm.aggregate.server_lr
    prior: PriorWeights,  # algorithm.aggregate.weighting
    max_norm: Annotated[float, Field(gt=0)] = 1.0,  # algorithm.parameters.max_norm
) -> Algorithm:
    return Algorithm("my_fedavg", LocalSolver(optimizer, (bounded(max_norm),)), mean(prior), apply(server_lr))
