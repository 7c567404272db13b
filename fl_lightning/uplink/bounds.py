"""Clip bounds and noise levels from the clients' sharpness: plain functions of released values, so they cost nothing.

    C_k     = max(C_min, C_base (1 + alpha (S_k - Sbar)/Sbar)),  Sbar = mean_j S_j         SAM-ADPFL Eq. 13
    sigma_k = sigma_base S_k / (min_j S_j + xi)                                            Eq. 14

`strict` caps C_k by C_max and keeps sigma_k between sigma_base and r_max sigma_base: Eq. 14 as printed puts the
flattest client below sigma_base, where Theorem 1 no longer holds. `paper` takes both equations literally.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fl_lightning.uplink.stage import Terms

NoiseRule = Literal["paper", "constant", "personalised"]


@dataclass(frozen=True)
class SharpnessBounds:
    """Parameters of Eq. 13 and 14.

    Attributes:
        clip_base: C_base > 0.
        clip_alpha: alpha >= 0, how far bounds follow sharpness; 0 is a fixed bound.
        clip_min: C_min in (0, C_base].
        clip_max: C_max >= C_base; ignored by the literal reading.
        noise_rule: "paper" Eq. 14; "constant" sigma_base for all (never more noise at the same epsilon, Proposition N);
            "personalised" sigma_base S_k / Sbar, which may lie below sigma_base, so each client keeps to its budget
            by a Renyi filter (`server/sharpness.py`).
        xi: smoothing of Eq. 14, > 0.
        factor_max: r_max >= 1, cap of sigma_k / sigma_base.
        strict: the proven reading.
    """

    clip_base: float
    clip_alpha: float = 0.5
    clip_min: float = 0.1
    clip_max: float = 4.0
    noise_rule: NoiseRule = "constant"
    xi: float = 1e-4
    factor_max: float = 4.0
    strict: bool = True

    def clips(self, sharpness: Sequence[float]) -> list[float]:
        """C_k of every client of a round (Eq. 13)."""
        mean = sum(sharpness) / len(sharpness)
        if mean == 0:  # all equally flat
            return [self.clip_base] * len(sharpness)
        bounds = [max(self.clip_min, self.clip_base * (1 + self.clip_alpha * (s - mean) / mean)) for s in sharpness]
        return [min(bound, self.clip_max) for bound in bounds] if self.strict else bounds

    def factors(self, sharpness: Sequence[float]) -> list[float]:
        """sigma_k / sigma_base of every client of a round (Eq. 14)."""
        if self.noise_rule == "constant":
            return [1.0] * len(sharpness)
        if self.noise_rule == "personalised":
            mean = sum(sharpness) / len(sharpness) or 1.0
            return [min(max(s / mean, 1 / self.factor_max), self.factor_max) for s in sharpness]
        smallest = min(sharpness) + self.xi
        ratios = [s / smallest for s in sharpness]
        return [min(max(ratio, 1.0), self.factor_max) for ratio in ratios] if self.strict else ratios

    def terms(self, clients: Sequence[int], sharpness: Sequence[float]) -> dict[int, Terms]:
        """What each client of a round is told: its "clip" C_k and "noise_factor" sigma_k / sigma_base.

        A sharpness that is not finite (training diverged) counts as the largest of the round.
        """
        largest = max((s for s in sharpness if math.isfinite(s)), default=1.0)
        sharpness = [s if math.isfinite(s) else largest for s in sharpness]
        pairs = zip(clients, self.clips(sharpness), self.factors(sharpness), strict=True)
        return {client: {"clip": clip, "noise_factor": factor} for client, clip, factor in pairs}


def bounded(values: Sequence[float], low: float, high: float) -> list[float]:
    """Noised sharpness values put back into [S_lo, B_S]: post-processing that keeps Eq. 12-14 from exploding."""
    return [min(max(value, low), high) for value in values]
