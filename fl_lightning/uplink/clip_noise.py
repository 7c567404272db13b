"""Difference clipping with Gaussian noise: the client-level uplink.

    g~ = clip(Delta, C) + N(0, (z C)^2 I),    clip(v, C) = v min(1, C/||v||_2)        SAM-ADPFL Eq. 15

One norm over the flat vector: clipping each tensor to C by itself would have sensitivity C sqrt(#tensors).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fl_lightning.local.transforms import gaussian
from fl_lightning.records import Message, Release, Vector
from fl_lightning.uplink.stage import Terms, UplinkStage

SENSITIVITY = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}
"""L2 sensitivity of one clipped vector in units of C. Replacing a client's data can turn +C u into -C u."""


def clip(v: Vector, bound: float) -> Vector:
    """v min(1, bound/||v||_2); the zero vector stays zero. `bound` may be infinite (no clipping).

    A vector with a value that is not finite has no norm to bound; it becomes the zero vector, or it would show through
    any noise.
    """
    norm = torch.linalg.vector_norm(v)
    if not torch.isfinite(norm) and bound < float("inf"):
        return torch.zeros_like(v)
    return v if norm <= bound else v * (bound / norm)


def beside_raw(message: Message, clipped: Vector) -> Mapping[str, Vector]:
    """The oracle's vectors with the clipped update among them, if the raw one is kept."""
    return {**message.oracle_vectors, "clipped": clipped} if message.oracle_vectors else {}


def clip_noise(
    clip_norm: float, multipliers: Sequence[float], adjacency: str, covers: tuple[str, ...] = ("delta",)
) -> UplinkStage:
    """Clips the update "delta" to C and adds Gaussian noise of std z_k C.

    Where the round's terms name a "clip" or a "noise_factor" r >= 1, they take the place of C and multiply z_k; the
    ledger counts z_k all the same, which bounds what r >= 1 costs (SAM-ADPFL, Theorem S1). Under "count_realised" r may
    lie below 1 and the noise itself is counted.

    Args:
        clip_norm: C > 0; may be infinite where no noise is asked for.
        multipliers: z_k of each client.
        adjacency: the neighbouring relation, which sets the sensitivity C or 2C.
        covers: fields of the upload that are this release or computed from it.
    """

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        delta = message.vectors["delta"]
        bound, factor = terms.get("clip", clip_norm), terms.get("noise_factor", 1.0)
        floor = multipliers[message.client] * bound if multipliers[message.client] else 0.0  # 0 x inf: no noise
        std = factor * floor
        clipped = clip(delta, bound)
        noised = clipped + (gaussian(delta, std, noise) if std else 0.0)
        release = Release(
            mechanism="gaussian",
            unit="client",
            sensitivity=SENSITIVITY[adjacency] * bound,
            noise=std,
            counted_noise=std if terms.get("count_realised") else min(std, floor),
            adjacency=adjacency,
            covers=covers,
        )
        scalars = message.scalars
        if terms.get("count_realised"):  # the server keeps the client's budget by the noise it was told to add
            scalars = {**scalars, "noise_factor": factor}
            release = replace(release, covers=(*covers, "noise_factor"))
        norm = float(torch.linalg.vector_norm(delta))
        return replace(
            message,
            vectors={**message.vectors, "delta": noised},
            scalars=scalars,
            releases=(*message.releases, release),
            oracle={**message.oracle, "update_norm": norm, "clipped": float(norm > bound), "clip": bound},
            oracle_vectors=beside_raw(message, clipped),
        )

    return UplinkStage(encode)
