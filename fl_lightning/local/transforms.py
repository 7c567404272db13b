"""Gradient transforms: (grad_fn, context) -> grad_fn. A client-side method is a chain of them.

    sam(rho)       g(w + rho g/||g||; xi),  g = g(w; xi)                     Foret et al. 2021, Eq. 2-3; paper Eq. 8-9
    asam(rho)      g(w + rho T^2 g/||T g||; xi),  T = |w| + eta              Kwon et al. 2021, Eq. 8-9
    prox(mu)       g(w; xi) + mu (w - x)                                     Li et al. 2020, FedProx
    control_variate()      g(w; xi) - c_i + c                                Karimireddy et al. 2020, SCAFFOLD
    private(C, z)  (sum_i clip(g_i(w), C) + N(0, (z C)^2 I)) / (q n)         Abadi et al. 2016, Algorithm 1
    ascend_previous(rho)   g(w + rho p/||p||; xi),  p = the previous private direction     Park et al. 2023, DP-SAT

SAM under a clipped step is private only if the ascent direction is itself private: `ascend_previous` takes it from a
gradient that has been released already, so it costs nothing.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.local.solver import Batch, Context, GradFn, GradTransform
from fl_lightning.records import Vector
from fl_lightning.rng import gaussian

TINY = 1e-12
"""Keeps e = rho g / (||g|| + TINY) at zero for a zero gradient."""

HUGE = 1e18
"""A norm that is no longer clipped but counts as not finite."""


def ascent(rho: float, g: Vector) -> Vector:
    """e = rho g / ||g||_2 over the whole vector (paper Eq. 8); zero where g is zero."""
    return g * (rho / (torch.linalg.vector_norm(g) + TINY))


def sam(rho: float) -> GradTransform:
    """Sharpness-aware minimization with radius `rho` >= 0 in parameter space. Two gradients a step."""

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        def ascend_then_grad(w: Vector, batch: Batch) -> Vector:
            return grad(w + ascent(rho, grad(w, batch)), batch)

        return ascend_then_grad

    return transform


def asam(rho: float, eta: float = 0.01) -> GradTransform:
    """Adaptive SAM: the ball is measured in units of |w| + eta, which makes it invariant to rescaled layers."""

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        def ascend_then_grad(w: Vector, batch: Batch) -> Vector:
            scale = w.abs() + eta
            scaled = scale * grad(w, batch)
            return grad(w + scale * ascent(rho, scaled), batch)

        return ascend_then_grad

    return transform


def sharpness_aware(rho: float, variant: Literal["sam", "asam"]) -> GradTransform:
    """`sam(rho)` or `asam(rho)`."""
    return {"sam": sam, "asam": asam}[variant](rho)


def prox(mu: float) -> GradTransform:
    """The gradient of mu/2 ||w - x||^2 added; x is the server's model at the start of the visit."""

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        return lambda w, batch: torch.add(grad(w, batch), w - ctx.anchor, alpha=mu)

    return transform


def ascend_previous(rho: float) -> GradTransform:
    """SAM whose ascent follows the last private direction; the first step of a visit ascends nowhere."""

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        def ascend_then_grad(w: Vector, batch: Batch) -> Vector:
            return grad(w if ctx.previous is None else w + ascent(rho, ctx.previous), batch)

        return ascend_then_grad

    return transform


def clipped_sum(gradients: Tensor, clip: float, layers: Sequence[slice] = ()) -> Vector:
    """sum_i g_i min(1, clip/||g_i||) over the rows of [B, d]; the zero vector for no rows.

    With `layers`, slices that part the d coordinates, each layer l of a row is clipped to clip / sqrt(len(layers)) by
    itself, so that the whole row still has norm at most `clip`. A row of norm above 1e18, or with a value that is not
    finite, counts as zero: no 32-bit factor could clip it, and it would show through any noise.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)  # 32 bits would lose some of 10^7 squares
    finite = norms < HUGE  # also False for what is no number
    if not finite.all() and clip < float("inf"):
        gradients = torch.where(finite.unsqueeze(1), gradients, 0.0)
        norms = torch.where(finite, norms, 0.0)
    if layers:
        return torch.cat([clipped_sum(gradients[:, part], clip / len(layers) ** 0.5) for part in layers])
    return (clip / norms).clamp_max(1.0).to(gradients.dtype) @ gradients


def control_variate() -> GradTransform:
    """g(w; xi) - c_i + c with the client's control variate c_i and the server's c; absent ones are zero."""

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        c, c_i = ctx.server.get("c"), ctx.state.get("c_i")

        def corrected(w: Vector, batch: Batch) -> Vector:
            g = grad(w, batch)
            g = g if c_i is None else g - c_i
            return g if c is None else g + c

        return corrected

    return transform


def private(
    clip: float,
    multipliers: Sequence[float],
    physical_batch_size: int | None = None,
    layers: Sequence[slice] = (),
    ascent_radius: float | None = None,
) -> GradTransform:
    """DP-SGD's gradient: each example clipped, Gaussian noise on the sum, a constant denominator.

    An empty Poisson batch is released like any other: noise alone.

    Args:
        clip: C > 0, the L2 bound of one example's gradient.
        multipliers: z_k = noise std / C of each client k.
        physical_batch_size: most rows of [B, d] held at once; a larger batch is summed in parts.
        layers: clip each of these parts of the vector to C / sqrt(parts) by itself.
        ascent_radius: rho, where each example's gradient is taken at its own w + rho g_i/||g_i||: one example then
            moves nothing but its own clipped row.

    Where the round's terms name a "clip" or a "noise_factor" >= 1, they take the place of C and multiply z_k; a
    "schedule" is a factor of z_k known before the run, which the ledger counts.
    """

    def transform(grad: GradFn, ctx: Context) -> GradFn:
        def rows(w: Vector, part: Batch) -> Tensor:
            if ascent_radius is None:
                return ctx.objective.per_sample_gradients(w, part)
            return ctx.objective.per_sample_ascent_gradients(w, part, ascent_radius)

        def private_gradient(w: Vector, batch: Batch) -> Vector:
            inputs, labels = batch
            most = physical_batch_size or max(1, len(labels))
            total = torch.zeros_like(w)
            bound, z = ctx.terms.get("clip", clip), multipliers[ctx.client] * ctx.terms.get("schedule", 1.0)
            std = z * ctx.terms.get("noise_factor", 1.0) * bound if z else 0.0
            for start in range(0, len(labels), most):
                part = inputs[start : start + most], labels[start : start + most]
                total += clipped_sum(rows(w, part), bound, layers)
            ctx.spent[0] += 1
            if std:
                total += gaussian(w, std, ctx.noise)
            return total / ctx.expected_batch

        return private_gradient

    return transform
