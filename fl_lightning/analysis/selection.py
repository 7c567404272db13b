"""What choosing the best of a sweep's trials costs in privacy, where their number was drawn at random.

N. Papernot, T. Steinke, Hyperparameter tuning with Renyi differential privacy, ICLR 2022,
https://arxiv.org/abs/2110.03620: one trial, its hyper-parameters drawn inside, costs a curve; the best of a random
number of such trials costs a slightly larger one. The curve of one trial is rebuilt here from the ledgers that the
trials kept, as the pointwise maximum over clients and trials, which bounds every one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.analysis.trials import Trial
from fl_lightning.privacy.accountants import Array, curve

UNACCOUNTED = (
    "Tuning is not accounted for: choosing among trials costs privacy that no epsilon here counts; with random axes "
    "and sweep.selection.distribution it is counted."
)

PROMISE = ("unit", "delta", "adjacency")


def worst_curve(ledgers: Sequence[Mapping[str, Any]]) -> Array:
    """The pointwise largest RDP curve [A] of any client in any of these ledgers (`Ledger.to_dict`)."""
    curves = [client for ledger in ledgers for client in client_curves(ledger).values()]
    return np.max(curves, axis=0) if curves else np.zeros_like(curve("gaussian", 1.0))


def client_curves(ledger: Mapping[str, Any]) -> dict[str, Array]:
    """Client -> its RDP curve [A], from the segments and counts of a stored ledger."""
    found: dict[str, Array] = {}
    for segment in ledger["segments"]:
        one = curve(segment["mechanism"], segment["noise_multiplier"], segment["sampling"], segment["rate"])
        for client, count in segment["counts"].items():
            found[client] = found.get(client, 0.0) + count * one
    return found


def best_private(trials: Sequence[Trial], metric: str, mode: str) -> Trial | None:
    """The finished trial with a finite epsilon that has the best final value of the metric."""
    measured = [
        (value, trial)
        for trial in trials
        if trial.privacy and trial.final.get("epsilon") is not None and (value := trial.measured(metric)) is not None
    ]
    return (max if mode == "max" else min)(measured, key=lambda item: item[0])[1] if measured else None


def selection_cost(
    settings: Mapping[str, Any],
    trials: Sequence[Trial],
    ledger_of: Callable[[Trial], Mapping[str, Any] | None],
    *,
    metric: str,
    mode: str,
) -> dict[str, Any] | None:
    """What the best private trial costs by itself and as the best of all, as JSON; None where no trial is private.

    Args:
        settings: `distribution`, `mean` and `eta` of `sweep.selection`.
        trials: of the sweep.
        ledger_of: the stored ledger of a trial, None where there is none.
        metric: what makes a trial the best.
        mode: "max" or "min".

    Returns:
        `distribution`, `mean`, `eta`, `trials` (how many were drawn), `trial_id`, `run_id`, `metric`, `value`,
        `epsilon`, `epsilon_with_selection` (None where it is not known), `delta`, `unit`, and `words`.
    """
    best = best_private(trials, metric, mode)
    if best is None or best.privacy is None:
        return None
    distribution = settings.get("distribution", "none")
    found = {
        "distribution": distribution,
        "mean": settings.get("mean"),
        "eta": settings.get("eta"),
        "trials": len(trials),
        "trial_id": best.trial_id,
        "run_id": best.run_id,
        "metric": metric,
        "value": best.measured(metric),
        "epsilon": best.final["epsilon"],
        "epsilon_with_selection": None,
        "delta": best.privacy["delta"],
        "unit": best.privacy["unit"],
    }
    if distribution == "none":
        return {**found, "words": UNACCOUNTED}
    ledgers = [ledger_of(trial) for trial in trials if trial.finished]
    if reason := _no_bound(trials, ledgers):
        return {**found, "words": f"{UNACCOUNTED.partition(';')[0]}: {reason}."}
    from fl_lightning.privacy.selection import selection_epsilon

    whole = selection_epsilon(
        worst_curve([ledger for ledger in ledgers if ledger]),
        best.privacy["delta"],
        distribution=distribution,
        mean=settings["mean"],
        eta=settings.get("eta"),
    )
    found["epsilon_with_selection"] = float(whole) if np.isfinite(whole) else None
    return {**found, "words": _words(found)}


def _no_bound(trials: Sequence[Trial], ledgers: Sequence[Mapping[str, Any] | None]) -> str:
    """Why the trials' curves do not bound the selection; empty where they do."""
    finished = [trial for trial in trials if trial.finished]
    if not all(trial.privacy for trial in finished):
        return "some of the trials protect nothing"
    if len({tuple((trial.privacy or {})[key] for key in PROMISE) for trial in finished}) > 1:
        return "the trials differ in unit, delta or adjacency"
    if not all(ledgers):
        return "the ledger of a trial is not in the tracking store"
    return ""


def _words(found: Mapping[str, Any]) -> str:
    whole = found["epsilon_with_selection"]
    shape = f" with eta {found['eta']:g}" if found["eta"] is not None else ""
    drawn = f"{found['distribution']}{shape}, mean {found['mean']:g}: {found['trials']}"
    spent = "has no finite bound" if whole is None else f"costs epsilon {_upward(whole)}"
    return (
        f"The number of trials was drawn ({drawn}), so choosing the best of them is accounted for: "
        f"{found['trial_id']} by itself costs epsilon {_upward(found['epsilon'])}, chosen as the best it {spent} "
        f"(per {found['unit']}, delta {found['delta']:g}), for whoever sees that trial alone."
    )


def _upward(value: float) -> str:
    return f"{np.ceil(value * 1000 - 1e-9) / 1000:.3f}"
