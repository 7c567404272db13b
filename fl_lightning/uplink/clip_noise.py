"""Clipping with Gaussian noise: the client-level uplink, wherever the noise is added.

    g~ = clip(Delta, C) + N(0, (z C)^2 I),    clip(v, C) = v min(1, C/||v||_2)        SAM-ADPFL Eq. 15

One norm over the flat vector: clipping each tensor to C by itself would have sensitivity C sqrt(#tensors). Per layer,
each of L parts is clipped to C / sqrt(L), which keeps the whole within C.

    upload   each client adds N(0, (z C)^2 I): nobody need be trusted
    sum      no noise here; a trusted server adds N(0, (z C)^2 I) to the sum of the cohort     (`server/noise.py`)
    share    each of m clients adds N(0, (z C)^2 / m I): the same sum; an upload is protected while hidden in it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import torch

from fl_lightning.records import REACH, Message, Release, Vector
from fl_lightning.rng import gaussian
from fl_lightning.uplink.stage import Terms, UplinkStage

Where = Literal["upload", "sum", "share"]

COHORT = "cohort"
"""Name of the term that tells a client how many uploads the round has."""


def clip(v: Vector, bound: float, layers: Sequence[slice] = ()) -> Vector:
    """v min(1, bound/||v||_2), or each of `layers` to bound / sqrt(layers); the zero vector stays zero.

    `bound` may be infinite (no clipping). A vector with a value that is not finite has no norm to bound; it becomes the
    zero vector, or it would show through any noise.
    """
    norm = torch.linalg.vector_norm(v, dtype=torch.float64)  # in 32 bits the norm of 10^7 values is 2 % too small
    if not torch.isfinite(norm) and bound < float("inf"):
        return torch.zeros_like(v)
    if layers:
        return torch.cat([clip(v[part], bound / sqrt(len(layers))) for part in layers])
    return v if norm <= bound else (v / norm).to(v.dtype) * bound  # bound / norm could be too small a number


def beside_raw(message: Message, clipped: Vector) -> Mapping[str, Vector]:
    """The oracle's vectors with the clipped update among them, if the raw one is kept."""
    return {**message.oracle_vectors, "clipped": clipped} if message.oracle_vectors else {}


@dataclass(frozen=True)
class QuantileBit:
    """Whether an update lay within the bound, released so that the bound can follow (Andrew et al. 2021).

    1[||Delta|| <= C] - 1/2 moves by 1/2 at most where the clipped update moves by C (a client added, removed, zeroed).
    So the pair costs as much as one Gaussian of multiplier z when the update has z_D = (z^-2 - (2 sigma_b)^-2)^-1/2.

    Attributes:
        noise: sigma_b > z/2, the standard deviation of the noise on the sum of the bits (on each bit where noise stands
            on each upload).
    """

    noise: float

    def update_multiplier(self, z: float) -> float:
        """z_D, what is left for the update."""
        return 0.0 if z == 0 else (z**-2 - (2 * self.noise) ** -2) ** -0.5


BIT = "below"
"""Name of the scalar that carries the bit."""


def clip_noise(
    clip_norm: float,
    multipliers: Sequence[float],
    adjacency: str,
    covers: tuple[str, ...] = ("delta",),
    *,
    where: Where = "upload",
    sampling: Literal["full", "poisson", "without_replacement"] = "full",
    rate: float = 1.0,
    layers: Sequence[slice] = (),
    of_model: bool = False,
    bit: QuantileBit | None = None,
    noise_cohort: int | None = None,
) -> UplinkStage:
    """Clips the update "delta" to C and adds, or leaves to others, Gaussian noise of std z_k C.

    Where the round's terms name a "clip" or a "noise_factor" r >= 1, they take the place of C and multiply z_k; the
    ledger counts z_k all the same, which bounds what r >= 1 costs (SAM-ADPFL, Theorem S1). Under "count_realised" r may
    lie below 1 and the noise itself is counted. A "schedule" is a factor of z_k known before the run, and counted.

    Args:
        clip_norm: C > 0; may be infinite where no noise is asked for.
        multipliers: z_k of each client.
        adjacency: the neighbouring relation, which sets the sensitivity C or 2C.
        covers: fields of the upload that are this release or computed from it.
        where: who adds the noise.
        sampling: how clients enter a round, as the ledger counts it; "full" counts each visit by itself.
        rate: the share of the clients in a round.
        layers: parts of the vector to clip one by one.
        of_model: clip the trained model, in the message as "model", and upload that under the name "delta".
        bit: releases whether the norm lay within C as well, at no further cost.
        noise_cohort: with "share", the cohort whose noise the mean shall have, at least the real one.
    """

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        vectors = dict(message.vectors)
        delta = vectors["delta"]
        subject = vectors.pop("model", delta) if of_model else delta
        bound, factor = terms.get("clip", clip_norm), terms.get("noise_factor", 1.0)
        z = multipliers[message.client] * terms.get("schedule", 1.0)
        floor = z * bound if z else 0.0  # 0 x inf: no noise
        added = bit.update_multiplier(z) * bound if bit and z else factor * floor
        clipped = clip(subject, bound, layers)
        share = _share(where, terms, noise_cohort)
        std = share * added
        vectors["delta"] = clipped + (gaussian(delta, std, noise) if std else 0.0)
        norm = float(torch.linalg.vector_norm(subject, dtype=torch.float64))
        covered, scalars = covers, message.scalars
        if bit is not None:
            # A client without data has no norm: 1/2 is as far from the one answer as from the other.
            inside = float(norm <= bound) - 0.5 if message.steps else 0.0
            spread = share * bit.noise if z else 0.0
            draw = float(torch.randn((), generator=noise, dtype=torch.float64))
            scalars, covered = {**scalars, BIT: inside + spread * draw}, (*covered, BIT)
        if terms.get("count_realised"):  # the server keeps the client's budget by the noise it was told to add
            scalars, covered = {**scalars, "noise_factor": factor}, (*covered, "noise_factor")
        total = floor if bit else factor * floor
        release = Release(
            mechanism="gaussian",
            unit="client",
            sensitivity=REACH[adjacency] * bound,
            noise=total,
            counted_noise=total if terms.get("count_realised") else min(total, floor),
            sampling=sampling,
            rate=rate,
            adjacency=adjacency,
            covers=covered,
        )
        seen = {"update_norm": float(torch.linalg.vector_norm(delta)), "clipped": float(norm > bound), "clip": bound}
        return replace(
            message,
            vectors=vectors,
            scalars=scalars,
            releases=(*message.releases, release),
            oracle={**message.oracle, **seen},
            oracle_vectors=beside_raw(message, delta + (clipped - subject) if of_model else clipped),
            owed=added if where == "sum" else 0.0,
        )

    return UplinkStage(encode)


def _share(where: Where, terms: Terms, noise_cohort: int | None) -> float:
    """The part of z C that one client adds: the mean of m such uploads has the noise of m, or of `noise_cohort`."""
    if where == "upload":
        return 1.0
    if where == "sum":
        return 0.0
    cohort = terms[COHORT]
    return sqrt(cohort) / max(cohort, noise_cohort or 0)
