"""Scalars that leave a client: clipped to a known interval, noised, declared.

s = clip(v, 0, B) + N(0, (tau B)^2)              one bounded scalar; its interval has length B, so D_1 = B
s = clip(v, 0, B) + Lap(3 B / eps_scalars)       the paper's three scalars, each with a third of eps_scalars
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from fl_lightning.records import Message, Release
from fl_lightning.uplink.stage import Terms, UplinkStage


def gaussian_scalar(
    name: str, bound: float, multiplier: float, *, unit: Literal["sample", "client"], adjacency: str
) -> UplinkStage:
    """Releases scalar `name` with Gaussian noise of std `multiplier` times its sensitivity.

    At unit "client" the value is clipped to [0, bound] here and its sensitivity is `bound`; a client that has none
    sends noise around 0, for whether it could measure one is private. At unit "sample" it is a
    mean over n_k examples of values in [0, bound], so its sensitivity is bound / n_k for the public n_k.
    """

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        if name not in message.scalars and unit == "sample":
            return message
        sensitivity = bound if unit == "client" else bound / message.num_samples
        std = multiplier * sensitivity
        value = clipped(message.scalars.get(name, 0.0), bound) + std * _normal(noise)
        release = Release("gaussian", unit, sensitivity, std, adjacency=adjacency, covers=(name,))
        return replace(message, scalars={**message.scalars, name: value}, releases=(*message.releases, release))

    return UplinkStage(encode)


def laplace_scalars(bounds: Mapping[str, float], epsilon: float, *, adjacency: str) -> UplinkStage:
    """The paper's scalars: each clipped to [0, B] and given Lap(n B / epsilon) for n scalars, once per round."""

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        scalars, releases = dict(message.scalars), list(message.releases)
        for name, bound in bounds.items():
            if name not in scalars:
                continue
            scale = laplace_scale(bound, epsilon, len(bounds))
            scalars[name] = clipped(scalars[name], bound) + _laplace(scale, noise)
            releases.append(Release("laplace", "client", bound, scale, adjacency=adjacency, covers=(name,)))
        return replace(message, scalars=scalars, releases=tuple(releases))

    return UplinkStage(encode)


def clipped(value: float, bound: float) -> float:
    """`value` in [0, bound]; one that is not a number counts as `bound`, or it would show through any noise."""
    return bound if math.isnan(value) else min(max(value, 0.0), bound)


def laplace_scale(bound: float, epsilon: float, count: int = 3) -> float:
    """b = B / (eps_scalars / count): the scale of each of `count` scalars that share eps_scalars evenly."""
    return bound / (epsilon / count)


def _normal(noise: torch.Generator) -> float:
    return float(torch.randn((), generator=noise, dtype=torch.float64))


def _laplace(scale: float, noise: torch.Generator) -> float:
    uniform = float(torch.rand((), generator=noise, dtype=torch.float64)) - 0.5
    return -scale * math.copysign(math.log1p(-2 * abs(uniform)), uniform)
