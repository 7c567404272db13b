"""Sharpness of a loss surface, exactly and to first order.

S = max_{||e|| <= rho} F(w + e) - F(w)          SAM-ADPFL Eq. 10
S ~ rho ||grad F(w)||                            Eq. 11;  |difference| <= L rho^2 / 2 for an L-smooth F (Prop. 1)
"""

import torch
from torch import Tensor

from fl_lightning.records import Vector


def first_order_sharpness(gradient: Vector, rho: float) -> float:
    """rho ||grad F(w)||_2 (Eq. 11). It is zero at every stationary point, sharp or flat."""
    return rho * float(torch.linalg.vector_norm(gradient))


def quadratic_sharpness(gradient: Vector, hessian: Tensor, rho: float) -> float:
    """max over ||e|| <= rho of g'e + e'He/2, exactly: the trust-region problem by its secular equation.

    Args:
        gradient: g [d].
        hessian: H [d, d], symmetric; may be indefinite.
        rho: radius > 0.
    """
    values, vectors = torch.linalg.eigh(hessian.double())
    g = vectors.T @ gradient.double()
    top = float(values[-1])

    def step(shift: float) -> Tensor:
        return torch.where(g == 0, torch.zeros_like(g), g / (shift - values))

    def gain(e: Tensor) -> float:
        return float(g @ e + 0.5 * (values * e**2).sum())

    floor = max(top, 0.0)
    if top < 0 and float(torch.linalg.vector_norm(step(0.0))) <= rho:
        return gain(step(0.0))  # the maximum lies inside the ball
    low, high = floor, floor + float(torch.linalg.vector_norm(g)) / rho
    tiny = 1e-14 * max(1.0, abs(floor))
    inside = step(floor + tiny)
    if float(torch.linalg.vector_norm(inside)) < rho:
        inside[-1] += (rho**2 - float(inside @ inside)) ** 0.5  # the hard case: complete along the top eigenvector
        return gain(inside)
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float(torch.linalg.vector_norm(step(middle))) > rho else (low, middle)
    return gain(step(0.5 * (low + high)))
