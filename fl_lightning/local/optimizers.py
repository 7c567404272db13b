"""Optimizers as pairs of functions on flat vectors.

    sgd        y <- y - lr (g + wd y)
    momentum   b <- beta b + g + wd y,   y <- y - lr b                      (b starts at the first gradient)
    adam       m <- b1 m + (1 - b1) g',  v <- b2 v + (1 - b2) g'^2,  g' = g + wd y
               y <- y - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)  (Kingma and Ba 2015, Algorithm 1)

Weight decay is L2: it is added to the gradient at the point where the step is taken, never in a SAM ascent.
The arithmetic is that of torch.optim's single-tensor code, which the tests hold it to.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fl_lightning.records import Vector

OptimizerState = tuple[Vector, ...]


@dataclass(frozen=True)
class LocalOptimizer:
    """`init(y) -> state` and `apply(y, g, state, step) -> (y, state)`; `step` counts from 1."""

    init: Callable[[Vector], OptimizerState]
    apply: Callable[[Vector, Vector, OptimizerState, int], tuple[Vector, OptimizerState]]


def sgd(lr: float, weight_decay: float = 0.0) -> LocalOptimizer:
    """Plain stochastic gradient descent."""

    def apply(y: Vector, g: Vector, state: OptimizerState, step: int) -> tuple[Vector, OptimizerState]:
        return torch.add(y, _decayed(g, y, weight_decay), alpha=-lr), ()

    return LocalOptimizer(lambda y: (), apply)


def momentum(lr: float, beta: float = 0.9, weight_decay: float = 0.0) -> LocalOptimizer:
    """Heavy-ball momentum, undamped."""

    def apply(y: Vector, g: Vector, state: OptimizerState, step: int) -> tuple[Vector, OptimizerState]:
        g = _decayed(g, y, weight_decay)
        buffer = g.clone() if step == 1 else state[0].mul(beta).add_(g)
        return torch.add(y, buffer, alpha=-lr), (buffer,)

    return LocalOptimizer(lambda y: (torch.zeros_like(y),), apply)


def adam(
    lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> LocalOptimizer:
    """Adam with bias correction and L2 weight decay."""

    def init(y: Vector) -> OptimizerState:
        return torch.zeros_like(y), torch.zeros_like(y)

    def apply(y: Vector, g: Vector, state: OptimizerState, step: int) -> tuple[Vector, OptimizerState]:
        g = _decayed(g, y, weight_decay)
        m = torch.lerp(state[0], g, 1 - beta1)
        v = state[1].mul(beta2).addcmul_(g, g, value=1 - beta2)
        root = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(eps)
        return torch.addcdiv(y, m, root, value=-lr / (1 - beta1**step)), (m, v)

    return LocalOptimizer(init, apply)


def _decayed(g: Vector, y: Vector, weight_decay: float) -> Vector:
    return torch.add(g, y, alpha=weight_decay) if weight_decay else g
