"""What a client computes: a pure solver that an engine may loop, hand to Lightning or ship to another process.

    state  = solver.init(x)
    for each batch:   d = solver.direction(state, batch, ctx);   state = solver.advance(state, d)
    y      = state.y

The engine supplies the gradient (`Objective`); the transforms turn it into a direction; the optimizer steps along it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.local.optimizers import LocalOptimizer, OptimizerState
from fl_lightning.records import ClientState, Vector

Batch = tuple[Tensor, Tensor]
"""Inputs [B, ...] and labels [B]; B may be 0 under Poisson sampling."""

GradFn = Callable[[Vector, Batch], Vector]
"""(w, xi) -> grad F(w; xi), the gradient of the mean loss over the batch, [d]."""


class Objective(Protocol):
    """A client's loss F as the engine offers it."""

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        """grad F(w; xi), [d]; notes the loss for `take_losses`. Buffers move only in the first pass of a step."""
        ...

    def per_sample_gradients(self, w: Vector, batch: Batch) -> Tensor:
        """The gradient of each example's loss, [B, d]; [0, d] for an empty batch."""
        ...

    def per_sample_ascent_gradients(self, w: Vector, batch: Batch, rho: float) -> Tensor:
        """g_i(w + rho g_i(w)/||g_i(w)||) of each example, every one at its own ascended point, [B, d]."""
        ...

    def loss(self, w: Vector, batch: Batch) -> Tensor:
        """F(w; xi), without gradient and without touching buffers."""
        ...

    def measure_gradient(self, w: Vector, batch: Batch) -> Vector:
        """grad F(w; xi) for a measurement: nothing is noted and no buffer moves."""
        ...

    def example_losses(self, w: Vector, batch: Batch) -> Tensor:
        """Each example's loss at w, [B], without gradient and without touching buffers."""
        ...

    def begin_step(self) -> None:
        """Marks the start of a step: the next pass is its first."""
        ...

    def take_losses(self) -> tuple[Tensor, ...]:
        """The mean loss of each pass of this step, in order; empty for an empty batch."""
        ...


@dataclass(frozen=True)
class Context:
    """What a transform may look at.

    Attributes:
        client: the client's number.
        anchor: x, the server's model at the start of the visit.
        objective: the client's loss.
        noise: generator of the client's privacy noise in this round.
        expected_batch: the constant denominator of a private mean gradient, q n_k.
        previous: the last direction this visit took, None in its first step.
        server: the server's own vectors (control variates and the like).
        state: the client's own vectors.
        examples: all the client's examples, in batches.
        terms: what server and client agreed on before the visit ("clip", "noise_factor"), public numbers.
        spent: how often `private` released a gradient so far in this visit; the DP guard reads it.
    """

    client: int
    anchor: Vector
    objective: Objective
    noise: torch.Generator
    expected_batch: float
    previous: Vector | None = None
    server: Mapping[str, Vector] = field(default_factory=dict)
    state: ClientState = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    examples: Callable[[], list[Batch]] = list
    spent: list[int] = field(default_factory=lambda: [0])


GradTransform = Callable[[GradFn, Context], GradFn]


@dataclass(frozen=True)
class StepTrace:
    """One step's examples and the mean loss of each of its passes (0-d tensors, left on their device)."""

    examples: int
    losses: tuple[Tensor, ...]


@dataclass(frozen=True)
class SolverState:
    """Where a client's training stands: the iterate y, the optimizer's moments and what each step saw."""

    y: Vector
    optimizer: OptimizerState
    previous: Vector | None = None
    steps: int = 0
    trace: tuple[StepTrace, ...] = ()

    @property
    def train_loss(self) -> float | None:
        """Mean first-pass loss over all examples seen; None when every batch was empty."""
        seen = [(t.examples, t.losses[0]) for t in self.trace if t.examples and t.losses]
        total = sum(examples for examples, _ in seen)
        return sum(n * float(loss) for n, loss in seen) / total if total else None


@dataclass(frozen=True)
class LocalSolver:
    """An optimizer under a chain of gradient transforms; the first transform is the innermost."""

    optimizer: LocalOptimizer
    transforms: tuple[GradTransform, ...] = ()

    def init(self, x: Vector) -> SolverState:
        return SolverState(y=x.clone(), optimizer=self.optimizer.init(x))

    def direction(self, state: SolverState, batch: Batch, ctx: Context) -> Vector:
        """The transformed gradient at y, [d]."""
        ctx = replace(ctx, previous=state.previous)
        grad: GradFn = ctx.objective.gradient
        for transform in self.transforms:
            grad = transform(grad, ctx)
        ctx.objective.begin_step()
        return grad(state.y, batch)

    def advance(self, state: SolverState, direction: Vector, trace: StepTrace) -> SolverState:
        """One optimizer step along `direction`."""
        step = state.steps + 1
        y, moments = self.optimizer.apply(state.y, direction, state.optimizer, step)
        return SolverState(y, moments, direction, step, (*state.trace, trace))

    def step(self, state: SolverState, batch: Batch, ctx: Context) -> SolverState:
        """`direction` then `advance`."""
        direction = self.direction(state, batch, ctx)
        return self.advance(state, direction, trace_of(batch, ctx))


def trace_of(batch: Batch, ctx: Context) -> StepTrace:
    """What the step that just ran saw."""
    return StepTrace(int(batch[1].shape[0]), ctx.objective.take_losses())


@dataclass(frozen=True)
class Findings:
    """What a client reports beside its update.

    Attributes:
        scalars: named numbers that it uploads.
        vectors: named vectors [d] that it uploads.
        state: what it keeps until its next visit; it never leaves the client.
    """

    scalars: Mapping[str, float] = field(default_factory=dict)
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    state: ClientState = field(default_factory=dict)


Measure = Callable[[SolverState, Context, list[Batch]], Findings]
"""(state at the end, ctx, the batches of the last epoch) -> findings. Called only after at least one step."""
