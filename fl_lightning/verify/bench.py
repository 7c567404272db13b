"""What the reference algorithms of `by_hand` and `by_hand_private` stand on: clients with batches, losses and streams.

Shared with the code under test are only what both must start from: the model, the plan of batches and the named random
streams. Gradients are autograd's, of the model called with other weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.build import Prepared
from fl_lightning.client.visit import Visit, plan
from fl_lightning.records import Vector
from fl_lightning.rng import generator

Batch = tuple[Tensor, Tensor]
Direction = Callable[["Client", Vector, Batch], Vector]
"""(client, y, xi) -> what y moves against."""


class _Features(nn.Module):
    """A network's representations as a module, so that they can be called with other weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net.features(images)


class Bench:
    """A prepared run's data, model and streams, without its algorithm. `start` is the model before the first round."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.config = prepared, prepared.config
        self.local, self.server = prepared.config.algorithm.local, prepared.config.algorithm.aggregate
        self.layout, self.model = prepared.objective.layout, prepared.objective.model
        self.start = prepared.objective.initial
        self.sizes = [len(shard) for shard in prepared.side.shards]

    def logits(self, w: Vector, images: Tensor) -> Tensor:
        return functional_call(self.model, self.layout.views(w), (images,))

    def features(self, w: Vector, images: Tensor) -> Tensor:
        views = {f"net.{name}": view for name, view in self.layout.views(w).items()}
        return functional_call(_Features(self.model), views, (images,))

    def loss(self, w: Vector, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(w, batch[0]), batch[1])

    def grad(self, w: Vector, batch: Batch, loss: Callable[[Vector, Batch], Tensor] | None = None) -> Vector:
        w = w.detach().clone().requires_grad_()
        return torch.autograd.grad((loss or self.loss)(w, batch), w)[0]

    def ascended(self, w: Vector, g: Vector, rho: float) -> Vector:
        """w + rho g/||g||."""
        return w + rho * g / g.norm() if rho and g.norm() > 0 else w

    def noise(self, purpose: str, round: int, client: int) -> torch.Generator:
        return generator(self.config.seed, purpose, round, client)

    def normal(self, like: Vector, rng: torch.Generator) -> Vector:
        return torch.randn(like.shape, generator=rng, dtype=like.dtype)

    def clients(self, round: int) -> "list[Client]":
        return [Client(self, round, k) for k in self.prepared.cohorts[round - 1]]

    @property
    def shares(self) -> "Callable[[Sequence[Client]], list[float]]":
        """p_k of a cohort: n_k / sum n_j, or 1/m where `weighting` says so."""
        if self.server.weighting == "uniform":
            return lambda cohort: [1 / len(cohort)] * len(cohort)
        return lambda cohort: [c.n / sum(other.n for other in cohort) for c in cohort]

    @property
    def z(self) -> Sequence[float]:
        """Noise multipliers of the clients."""
        return self.prepared.noise.multipliers


@dataclass
class Client:
    """One client in one round."""

    bench: Bench
    round: int
    k: int
    batches: list[Batch] = field(init=False)
    last: list[Batch] = field(init=False)

    def __post_init__(self) -> None:
        side = self.bench.prepared.side
        indices, last = plan(side, Visit(self.round, self.k))
        self.batches = [side.store.batch(each) for each in indices]
        self.last = self.batches[len(self.batches) - last :]
        self.n, self.Q = self.bench.sizes[self.k], len(indices)
        self.rng = self.bench.noise("noise", self.round, self.k)

    def train(self, x: Vector, direction: Direction) -> Vector:
        """y after Q steps y <- y - eta_l direction(y)."""
        y = x.clone()
        for batch in self.batches:
            y = y - self.bench.local.lr * direction(self, y, batch)
        return y

    def everything(self) -> Batch:
        """All its examples at once."""
        side = self.bench.prepared.side
        return side.store.batch(side.shards[self.k])

    def protected(self, delta: Vector, clip: float, z: float) -> Vector:
        """clip(Delta, C) + N(0, (z C)^2 I)."""
        rng = self.bench.noise("uplink", self.round, self.k)
        return delta * min(1.0, clip / float(delta.norm())) + z * clip * self.bench.normal(delta, rng)
