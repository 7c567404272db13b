"""Quadratic clients: federations whose every number is known in closed form.

    f_i(w) = w' A_i w / 2 - b_i' w + c_i,   grad f_i(w) = A_i w - b_i

They run through the same solvers, uplinks, aggregators and engines as networks do. A client's data set is one entry,
its own number; a batch names the client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.local.solver import Batch
from fl_lightning.records import Vector


@dataclass(frozen=True)
class Quadratic:
    """A [d, d] symmetric, b [d], c scalar."""

    A: Tensor
    b: Tensor
    c: float = 0.0

    def value(self, w: Vector) -> Tensor:
        return 0.5 * w @ self.A @ w - self.b @ w + self.c

    def gradient(self, w: Vector) -> Vector:
        return self.A @ w - self.b


class QuadraticObjective:
    """The losses of all clients as one objective; satisfies `client.visit.VisitObjective`."""

    device = torch.device("cpu")

    def __init__(self, clients: Sequence[Quadratic]) -> None:
        self.clients = list(clients)
        self._losses: list[Tensor] = []

    def _client(self, batch: Batch) -> Quadratic:
        return self.clients[int(batch[0][0])]

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        self._losses.append(self._client(batch).value(w))
        return self._client(batch).gradient(w)

    def measure_gradient(self, w: Vector, batch: Batch) -> Vector:
        return self._client(batch).gradient(w)

    def per_sample_gradients(self, w: Vector, batch: Batch) -> Tensor:
        if len(batch[1]) == 0:
            return w.new_zeros((0, len(w)))
        self._losses.append(self._client(batch).value(w))
        return torch.stack([self.clients[int(i)].gradient(w) for i in batch[0]])

    def loss(self, w: Vector, batch: Batch) -> Tensor:
        return self._client(batch).value(w)

    def example_losses(self, w: Vector, batch: Batch) -> Tensor:
        return torch.stack([self.clients[int(i)].value(w) for i in batch[0]])

    def begin_step(self) -> None:
        self._losses = []

    def take_losses(self) -> tuple[Tensor, ...]:
        losses, self._losses = tuple(self._losses), []
        return losses

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """A quadratic has no buffers."""


class ClientNumbers:
    """The store of quadratic clients: example i is the number i."""

    def batch(self, indices: Tensor) -> Batch:
        return indices, indices
