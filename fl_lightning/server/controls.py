"""SCAFFOLD's control variate on the server (Karimireddy et al. 2020, Algorithm 1, line 17).

    c <- c + (|S|/N) mean_S(c_i+ - c_i)

The change comes with the uploads ("delta_c"), or is derived from the mean update alone, since under plain SGD
    c_i+ - c_i = -c - Delta_i/(Q eta_l)
whatever c_i is: a protected update then gives a control update as post-processing, at no further cost.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from fl_lightning.records import Aggregate, ServerState, Vector
from fl_lightning.server.rules import ServerRule

ControlChange = Callable[[ServerState, Aggregate], Vector]
"""mean_S(c_i+ - c_i), [d]."""


def control(server: ServerState) -> Vector:
    """c, zero before the first round."""
    c = server.extra.get("c")
    return torch.zeros_like(server.w) if c is None else c


def uploaded_change(server: ServerState, aggregate: Aggregate) -> Vector:
    """As the clients sent it."""
    return aggregate.vectors["delta_c"]


def derived_change(lr: float, local_steps: int) -> ControlChange:
    """From the mean of the protected updates; `lr` is eta_l, `local_steps` the public Q >= 1 of every client."""

    def change(server: ServerState, aggregate: Aggregate) -> Vector:
        return -control(server) - aggregate.vectors["delta"] / (local_steps * lr)

    return change


def with_control(step: ServerRule, num_clients: int, change: ControlChange = uploaded_change) -> ServerRule:
    """`step` for the model, and the move of c beside it; N = `num_clients`. An empty aggregate leaves c as it is."""

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        moved = step(server, aggregate)
        if aggregate.empty:
            return moved
        visited = sum(weight > 0 for weight in aggregate.weights)
        c = torch.add(control(server), change(server, aggregate), alpha=visited / num_clients)
        return replace(moved, extra={**moved.extra, "c": c})

    return rule
