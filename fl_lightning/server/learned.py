"""Learning aggregation weights and shrinkage on examples that the server itself may look at.

w        = gamma sum_k lambda_k w_k,    lambda = softmax(x),  gamma = exp(y),   w_k = w^t + Delta_k
dL/dx_k  = gamma lambda_k <Delta_k - sum_j lambda_j Delta_j, G>,      G = grad L(w)
dL/dy    = <w, G>
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from fl_lightning.records import Aggregate, Message, ServerState, Vector
from fl_lightning.server.aggregate import Aggregator, PriorWeights, by_samples, fold, fold_buffers
from fl_lightning.server.rules import ServerRule

GAMMA = "gamma"
"""Where the server keeps the shrinkage it learned last, [1]."""


class Proxy(Protocol):
    """Public examples on the server, with their loss L."""

    def gradient(self, w: Vector, batch: Any) -> Vector:
        """grad L(w; batch), [d], on w's device."""
        ...

    def passes(self, round: int) -> Iterator[Sequence[Any]]:
        """Endless passes over all examples as batches, each in a new order from the round's own stream."""
        ...


@dataclass(frozen=True)
class Mixture:
    """x [m] and y [] as a model: `lam` on the simplex, `gamma` > 0, `w` [d]."""

    lam: Tensor
    gamma: Tensor
    w: Vector

    @classmethod
    def of(cls, x: Tensor, y: Tensor, start: Vector, deltas: Tensor) -> "Mixture":
        """The model that x and y mean, for the server's model w^t [d] and the uploads Delta_k [m, d]."""
        lam, gamma = torch.softmax(x, dim=0), y.exp()
        return cls(lam, gamma, (start + lam.to(deltas.dtype) @ deltas) * float(gamma))

    def gradients(self, deltas: Tensor, g: Vector) -> tuple[Tensor, Tensor]:
        """dL/dx [m] and dL/dy [] by the chain rule, from g = grad L(w)."""
        along = (deltas @ g).to(self.lam.dtype)
        return self.gamma * self.lam * (along - self.lam @ along), (self.w @ g).to(self.lam.dtype)


class Optimizer(Protocol):
    """`local.optimizers.LocalOptimizer` as this file uses it."""

    @property
    def init(self) -> Callable[[Vector], tuple[Vector, ...]]: ...

    @property
    def apply(self) -> Callable[[Vector, Vector, tuple[Vector, ...], int], tuple[Vector, tuple[Vector, ...]]]: ...


def side_by_side(prior: PriorWeights = by_samples) -> Aggregator:
    """Every upload that counts as a row: "delta" [m, d] and buffers [m, ...], with the prior weights p_k."""

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        weights = prior(messages)
        total = sum(weights)
        folded = fold(messages, [p / total for p in weights] if total else [])
        if folded.empty:
            return folded
        counted = [message for message, p in zip(messages, weights, strict=True) if p > 0]
        deltas = torch.stack([message.vectors["delta"] for message in counted])
        buffers = {name: torch.stack([m.buffers[name] for m in counted]) for name in folded.buffers}
        return replace(folded, vectors={**folded.vectors, "delta": deltas}, buffers=buffers)

    return aggregate


def learn(proxy: Proxy, optimizer: Callable[[int], Optimizer], epochs: int) -> ServerRule:
    """Minimises L over x and y from x = log p, y = 0, then takes the mixture they mean as the new model.

    Buffers are averaged with the learned lambda (they are not shrunk).

    Args:
        proxy: the server's own examples.
        optimizer: the optimizer of (x, y) in a pass, counted from 0; all share one state.
        epochs: passes over the proxy examples, >= 0; without any, this is the mean with weights p.
    """

    def rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty:
            return replace(server, round=server.round + 1)
        deltas, p = aggregate.vectors["delta"], [weight for weight in aggregate.weights if weight > 0]
        z = torch.cat([torch.tensor(p, dtype=torch.float64).log(), torch.zeros(1, dtype=torch.float64)])
        state, step = optimizer(0).init(z), 0
        for epoch, batches in enumerate(islice(proxy.passes(server.round + 1), epochs)):
            for batch in batches:
                step += 1
                mixture = Mixture.of(z[:-1], z[-1], server.w, deltas)
                along_x, along_y = mixture.gradients(deltas, proxy.gradient(mixture.w, batch))
                z, state = optimizer(epoch).apply(z, torch.cat([along_x, along_y.view(1)]), state, step)
        mixture = Mixture.of(z[:-1], z[-1], server.w, deltas)
        rows = [{name: tensor[k] for name, tensor in aggregate.buffers.items()} for k in range(len(p))]
        buffers = fold_buffers(list(zip(rows, mixture.lam.tolist(), strict=True))) if aggregate.buffers else {}
        return replace(
            server,
            w=mixture.w,
            buffers=buffers or server.buffers,
            round=server.round + 1,
            extra={**server.extra, GAMMA: mixture.gamma.view(1)},
        )

    return rule
