"""Canary examples: the audit of level "sample", inside the run that trains.

m canaries are dealt round-robin to the clients that hold data and take part. A canary is an index of its client's shard
like any other: the sampler draws it, its gradient row STRENGTH C v_j (a zero row if it is out) passes the real clipping
and noise, and the denominators count it in or out alike, so n_k is public. A transform right after `private` reads each
released gradient; what follows it is post-processing and need not be watched.

Canaries cost utility: they take part in place of data, m of n + m examples, and each pulls into a direction of its own.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.canaries.watch import Watch
from fl_lightning.client.visit import ClientSide, Store, VisitObjective
from fl_lightning.local.solver import Batch, Context, GradFn, GradTransform
from fl_lightning.records import Vector

STRENGTH = 10.0
"""Norm of a canary's gradient in units of C. Unclipped it would stand out, and yet not wreck the model at once."""


def dealt(shards: Sequence[Tensor], visits: Sequence[Sequence[int]], canaries: int, first: int) -> list[Tensor]:
    """The shards with canary indices `first`, `first` + 1, ... appended, in turn to every client that trains.

    Nothing is dealt where no client trains.
    """
    able = [k for k, shard in enumerate(shards) if len(shard) and visits[k]]
    more: dict[int, list[int]] = {}
    for j in range(canaries if able else 0):
        more.setdefault(able[j % len(able)], []).append(first + j)
    return [torch.cat([shard, shard.new_tensor(more[k])]) if k in more else shard for k, shard in enumerate(shards)]


@dataclass(frozen=True)
class CanaryStore:
    """A store whose indices `first` + j are canary j: a blank example with label `classes` + j."""

    store: Store
    first: int
    classes: int

    def batch(self, indices: Tensor) -> Batch:
        inputs, labels = self.store.batch(torch.where(indices < self.first, indices, 0))
        canary = (indices >= self.first).to(labels.device)
        blank = canary.view(-1, *[1] * (inputs.dim() - 1))
        numbers = (indices - self.first + self.classes).to(labels.device, labels.dtype)
        return inputs.masked_fill(blank, 0.0), torch.where(canary, numbers, labels)


@dataclass
class SampleAudit:
    """The watch over a run's private gradients.

    Attributes:
        watch: directions, coins and scores.
        clip: C of the run.
        sizes: n_k of each client, canaries included.
        owned: canaries of each client, int64.
        sign: c of the release under way.
        visits: how many visits each client has begun.
    """

    watch: Watch
    clip: float
    sizes: Sequence[int]
    owned: Sequence[Tensor]
    sign: float = 1.0
    visits: Counter[int] = field(default_factory=Counter)

    def row_factor(self, canary: int) -> float:
        """What v_j is multiplied with in the canary's gradient."""
        return self.sign * self.watch.factor(canary) * STRENGTH * self.clip

    def spy(self) -> GradTransform:
        """The transform that stands right after `private` and scores each released gradient."""

        def transform(grad: GradFn, ctx: Context) -> GradFn:
            def watched(w: Vector, batch: Batch) -> Vector:
                self.visits[ctx.client] += not ctx.spent[0]
                self.sign = 1.0 if (ctx.spent[0] + self.visits[ctx.client]) % 2 else -1.0
                released = grad(w, batch)
                self._see(released, ctx)
                return released

            return watched

        return transform

    def _see(self, released: Vector, ctx: Context) -> None:
        which = self.owned[ctx.client]
        if not len(which):
            return
        rate = ctx.expected_batch / self.sizes[ctx.client]
        unit = ctx.terms.get("clip", self.clip) / ctx.expected_batch
        self.watch.see(released, which, self.sign, unit, rate)


class CanaryObjective:
    """An objective whose canary examples have the gradients the audit gives them, and no loss."""

    def __init__(self, inner: VisitObjective, audit: SampleAudit, classes: int) -> None:
        self.inner, self.audit, self.classes = inner, audit, classes

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def buffers(self) -> dict[str, Tensor]:
        return self.inner.buffers()

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        self.inner.set_buffers(buffers)

    def begin_step(self) -> None:
        self.inner.begin_step()

    def take_losses(self) -> tuple[Tensor, ...]:
        return self.inner.take_losses()

    def per_sample_gradients(self, w: Vector, batch: Batch) -> Tensor:
        real, canary = self._split(batch)
        return self._with_canaries(self.inner.per_sample_gradients(w, real), w, batch, canary)

    def per_sample_ascent_gradients(self, w: Vector, batch: Batch, rho: float) -> Tensor:
        real, canary = self._split(batch)
        return self._with_canaries(self.inner.per_sample_ascent_gradients(w, real, rho), w, batch, canary)

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        return self.inner.gradient(w, self._split(batch)[0])

    def measure_gradient(self, w: Vector, batch: Batch) -> Vector:
        return self.inner.measure_gradient(w, self._split(batch)[0])

    def loss(self, w: Vector, batch: Batch) -> Tensor:
        return self.inner.loss(w, self._split(batch)[0])

    def example_losses(self, w: Vector, batch: Batch) -> Tensor:
        real, canary = self._split(batch)
        losses = w.new_zeros(len(canary))
        if len(real[1]):
            losses[~canary] = self.inner.example_losses(w, real).to(losses)
        return losses

    def _split(self, batch: Batch) -> tuple[Batch, Tensor]:
        inputs, labels = batch
        canary = labels >= self.classes
        return (inputs[~canary], labels[~canary]), canary

    def _with_canaries(self, rows: Tensor, w: Vector, batch: Batch, canary: Tensor) -> Tensor:
        if not canary.any():
            return rows
        which = (batch[1][canary] - self.classes).tolist()
        factors = [self.audit.row_factor(j) for j in which]
        whole = w.new_empty((len(canary), len(w)))
        whole[~canary] = rows
        whole[canary] = self.audit.watch.directions.rows(which, factors, w)
        return whole


def armed(side: ClientSide, watch: Watch, first: int, classes: int) -> tuple[ClientSide, SampleAudit]:
    """The client side with its canaries at work, and their audit.

    Args:
        side: shards already hold the canaries' indices, from `first` on.
        watch: a new watch.
        first: the number of examples in the store.
        classes: the number of classes.
    """
    owned = [shard[shard >= first] - first for shard in side.shards]
    audit = SampleAudit(watch, side.algorithm.protection.clip, [len(shard) for shard in side.shards], owned)
    armed = replace(
        side,
        algorithm=watched(side.algorithm, audit),
        objective=CanaryObjective(side.objective, audit, classes),
        store=CanaryStore(side.store, first, classes),
    )
    return armed, audit


def watched(algorithm: Algorithm, audit: SampleAudit) -> Algorithm:
    """The algorithm with the audit's transform right after its first, which is the private one."""
    first, *rest = algorithm.solver.transforms
    return replace(algorithm, solver=replace(algorithm.solver, transforms=(first, audit.spy(), *rest)))
