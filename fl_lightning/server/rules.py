"""Server rules: (server, aggregate) -> server.

apply    w <- gamma (w + eta_g Delta)         gamma = 1: FedAvg;  gamma <= 1: shrinkage, SAM-ADPFL 4.1
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from fl_lightning.records import Aggregate, ServerState

ServerRule = Callable[[ServerState, Aggregate], ServerState]


def apply(server_lr: float = 1.0, gamma: float = 1.0) -> ServerRule:
    """Adds the aggregated update, then shrinks. An empty aggregate changes nothing but the round number."""

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty:
            return replace(server, round=server.round + 1)
        w = torch.add(server.w, aggregate.vectors["delta"], alpha=server_lr)
        w = w if gamma == 1.0 else w * gamma
        return replace(server, w=w, buffers=aggregate.buffers or server.buffers, round=server.round + 1)

    return rule
