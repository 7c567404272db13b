"""What a client's visit costs in gradients."""

from typing import Any

from torch import Tensor

from fl_lightning.local.solver import Batch, Objective
from fl_lightning.records import Vector


class Counted:
    """An objective that counts the example gradients it is asked for; everything else goes to the objective itself.

    A pass over a batch of B examples counts B, so SAM's step counts 2 B, a private step as much as an open one, and
    gradients that only measure something are counted as well.

    Attributes:
        gradients: how many so far.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.gradients = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        self.gradients += len(batch[1])
        return self._objective.gradient(w, batch)

    def measure_gradient(self, w: Vector, batch: Batch) -> Vector:
        self.gradients += len(batch[1])
        return self._objective.measure_gradient(w, batch)

    def representation_gradient(self, w: Vector, batch: Batch, loss: Any) -> Vector:
        self.gradients += len(batch[1])
        found: Vector = self.__getattr__("representation_gradient")(w, batch, loss)
        return found

    def per_sample_gradients(self, w: Vector, batch: Batch) -> Tensor:
        self.gradients += len(batch[1])
        return self._objective.per_sample_gradients(w, batch)

    def per_sample_ascent_gradients(self, w: Vector, batch: Batch, rho: float) -> Tensor:
        self.gradients += 2 * len(batch[1])
        return self._objective.per_sample_ascent_gradients(w, batch, rho)
