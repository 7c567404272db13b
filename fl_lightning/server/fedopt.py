"""Server optimizers: the mean update Delta as a pseudo-gradient (Reddi et al. 2021, Algorithm 2; Hsu et al. 2019).

    heavy_ball   m <- beta m + Delta                 w <- w + eta m
    adam         m <- beta1 m + (1 - beta1) Delta    w <- w + eta m/(sqrt(v) + tau)
                 v <- beta2 v + (1 - beta2) Delta^2

Moments are kept in `ServerState.extra`; m starts at 0 and v at tau^2. Neither is bias-corrected, as in the paper.
"""

from dataclasses import replace

import torch

from fl_lightning.records import Aggregate, ServerState, Vector
from fl_lightning.server.rules import ServerRule, apply


def heavy_ball(server_lr: float = 1.0, beta: float = 0.9) -> ServerRule:
    """SGD with momentum beta in [0, 1) on the server; beta = 0 is `apply(server_lr)`."""
    step = apply(server_lr)

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty:
            return step(server, aggregate)
        m = _moment(server, "m", 0.0).mul(beta).add_(aggregate.vectors["delta"])
        moved = step(server, replace(aggregate, vectors={"delta": m}))
        return replace(moved, extra={**moved.extra, "m": m})

    return rule


def adam(server_lr: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> ServerRule:
    """Adam on the server; tau > 0, the degree of adaptivity, keeps a step below server_lr |m|/tau."""
    step = apply(server_lr)

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty:
            return step(server, aggregate)
        delta = aggregate.vectors["delta"]
        m = _moment(server, "m", 0.0).mul(beta1).add_(delta, alpha=1 - beta1)
        v = _moment(server, "v", tau**2).mul(beta2).addcmul_(delta, delta, value=1 - beta2)
        moved = step(server, replace(aggregate, vectors={"delta": m / (v.sqrt() + tau)}))
        return replace(moved, extra={**moved.extra, "m": m, "v": v})

    return rule


def _moment(server: ServerState, name: str, start: float) -> Vector:
    kept = server.extra.get(name)
    return torch.full_like(server.w, start) if kept is None else kept
