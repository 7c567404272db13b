"""CE-FedAvg's clip threshold where none is given: c = fraction x mean ||Delta_i^t|| of an unclipped run.

"Understanding Clipping for Federated Learning" (arXiv 2106.13673, Section 4) takes 0.5 of the mean over clients and
rounds of the update norms of a run without clipping and otherwise identical settings. That run is trained here first:
same seed, data, cohorts, rounds and engine, from the same model; it is neither evaluated nor tracked. The threshold is
computed from raw updates, so whatever depends on it is NOT PRIVATE.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fl_lightning.build import Prepared
from fl_lightning.config.baselines import CeFedAvg
from fl_lightning.errors import FLError
from fl_lightning.federation import Federation, fit
from fl_lightning.uplink.clip_only import clip_difference

DEFAULT_FRACTION = 0.5


def measured(prepared: Prepared, start: Federation) -> tuple[Prepared, Mapping[str, Any] | None]:
    """The run with its threshold measured, and how: threshold, fraction, mean_norm, updates, private, note.

    Args:
        prepared: the run; anything but a ce_fedavg run without a given threshold comes back as it is, with None.
        start: the federation before its first round, from which the unclipped run starts as well.

    Raises:
        FLError: the unclipped run's norms give no threshold (it diverged, or nothing moved).
    """
    settings = prepared.config.algorithm
    if not isinstance(settings, CeFedAvg) or settings.local.clip is not None:
        return prepared, None
    norms = unclipped_norms(prepared, start)
    mean = sum(norms) / len(norms) if norms else 0.0
    if not (math.isfinite(mean) and mean > 0):
        raise FLError(
            f"algorithm.local.clip=null: the mean update norm of the unclipped run is {mean:g}, which gives no "
            "threshold; lower algorithm.local.lr, or set algorithm.local.clip to a number"
        )
    fraction = settings.local.clip_fraction or DEFAULT_FRACTION
    clip = fraction * mean
    note = (
        f"clip threshold {clip:.6g} = {fraction:g} x the mean norm of {len(norms)} updates of an unclipped run; "
        "computed from raw updates: NOT PRIVATE"
    )
    found = {"threshold": clip, "fraction": fraction, "mean_norm": mean, "updates": len(norms), "private": False}
    return _clipped_at(prepared, clip), {**found, "note": note}


def clipped_as(prepared: Prepared, threshold: Mapping[str, Any] | None) -> Prepared:
    """The run at a threshold that was measured before it was interrupted; None changes nothing."""
    return prepared if threshold is None else _clipped_at(prepared, float(threshold["threshold"]))


def unclipped_norms(prepared: Prepared, start: Federation) -> list[float]:
    """||Delta_i^t|| of every visit with at least one step, round by round in cohort order, without clipping."""
    free = _clipped_at(prepared, math.inf)
    engine = free.engine()
    norms: list[float] = []
    try:
        for _, _, messages in fit(
            start,
            rounds=free.config.fl.rounds,
            cohort_of=lambda round: free.cohorts[round - 1],
            algorithm=free.algorithm,
            engine=engine,
            evaluate=lambda server: None,
        ):
            norms += [float(torch.linalg.vector_norm(m.vectors["delta"])) for m in messages if m.steps]
    finally:
        engine.close()
    return norms


def _clipped_at(prepared: Prepared, clip: float) -> Prepared:
    algorithm = replace(prepared.algorithm, uplink=(clip_difference(clip),))
    return replace(prepared, algorithm=algorithm, side=replace(prepared.side, algorithm=algorithm))
