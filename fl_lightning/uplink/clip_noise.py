"""Difference clipping with Gaussian noise: the client-level uplink.

    g~ = clip(Delta, C) + N(0, (z C)^2 I),    clip(v, C) = v min(1, C/||v||_2)        SAM-ADPFL Eq. 15

One norm over the flat vector: clipping each tensor to C by itself would have sensitivity C sqrt(#tensors).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_lightning.local.transforms import gaussian
from fl_lightning.records import Message, Release, Vector
from fl_lightning.uplink.stage import UplinkStage

SENSITIVITY = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}
"""L2 sensitivity of one clipped vector in units of C. Replacing a client's data can turn +C u into -C u."""


def clip(v: Vector, bound: float) -> Vector:
    """v min(1, bound/||v||_2); the zero vector stays zero. `bound` may be infinite (no clipping)."""
    norm = torch.linalg.vector_norm(v)
    return v if norm <= bound else v * (bound / norm)


def clip_noise(bound: float, multipliers: Sequence[float], adjacency: str) -> UplinkStage:
    """Clips the update "delta" to `bound` and adds Gaussian noise of std `multipliers[client] * bound`."""

    def encode(message: Message, noise: torch.Generator) -> Message:
        delta = message.vectors["delta"]
        std = multipliers[message.client] * bound if multipliers[message.client] else 0.0  # 0 x inf: no noise
        noised = clip(delta, bound) + (gaussian(delta, std, noise) if std else 0.0)
        release = Release(
            mechanism="gaussian",
            unit="client",
            sensitivity=SENSITIVITY[adjacency] * bound,
            noise=std,
            adjacency=adjacency,
            covers=("delta",),
        )
        norm = float(torch.linalg.vector_norm(delta))
        return replace(
            message,
            vectors={**message.vectors, "delta": noised},
            releases=(*message.releases, release),
            oracle={**message.oracle, "update_norm": norm, "clipped": float(norm > bound)},
        )

    return UplinkStage(encode)
