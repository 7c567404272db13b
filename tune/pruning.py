"""Ending trials that fall behind, round by round: the rules, and how a trial hears of it.

A trial that is stopped ends by itself after the round it was stopped in, as a finished run with its own result: its
ledger holds what it has released, and its MLflow run is closed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray.tune.schedulers import FIFOScheduler

from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig
from tune.space import ID, Plan, sampled_of

REDUCTION = 4
"""ASHA: of the trials at a rung, one in so many goes on, and the next rung lies so many times as far."""

FEWEST_OTHERS = 3
"""The median of fewer trials ends none."""

Curve = Mapping[int, float]
"""Round -> metric, as far as it was measured."""


def asha(own: Curve, others: Sequence[Curve], *, grace: int, rounds: int, sign: float) -> bool:
    """Whether asynchronous successive halving ends a trial at its last measured round.

    L. Li et al., A system for massively parallel hyperparameter tuning, MLSys 2020,
    https://arxiv.org/abs/1810.05934. Rungs lie at `grace * REDUCTION**k` rounds below `rounds`. A trial that reaches
    one is compared with those that were there before; it ends unless it is among the best 1 in `REDUCTION`. Where the
    metric was not measured at a rung, the first round measured after it counts.

    Args:
        own: the trial's curve so far.
        others: the other trials' curves so far.
        grace: the first rung, in rounds.
        rounds: rounds of a whole run; nothing is gained by ending it there.
        sign: 1 if more of the metric is better, else -1.
    """
    now, rung = max(own), grace
    ends = False
    while rung <= now and rung < rounds:
        if min(round for round in own if round >= rung) == now:
            there = [sign * curve[min(later)] for curve in others if (later := [r for r in curve if r >= rung])]
            ends = bool(there) and sign * own[now] < float(np.nanpercentile(there, 100 * (1 - 1 / REDUCTION)))
        rung *= REDUCTION
    return ends


def median(own: Curve, others: Sequence[Curve], *, grace: int, rounds: int, sign: float) -> bool:
    """Whether the median rule ends a trial at its last measured round. Arguments as in `asha`.

    D. Golovin et al., Google Vizier: a service for black-box optimization, KDD 2017, section 3.2.1: it ends if its best
    value so far is worse than the median, over the other trials that have come as far, of their means up to here.
    """
    now = max(own)
    if now < grace or now >= rounds:
        return False
    means = [
        np.mean([sign * value for round, value in curve.items() if grace <= round <= now] or [np.nan])
        for curve in others
        if curve and max(curve) >= now
    ]
    means = [mean for mean in means if np.isfinite(mean)]
    return len(means) >= FEWEST_OTHERS and max(sign * value for value in own.values()) < float(np.median(means))


RULES: dict[str, Callable[..., bool]] = {"asha": asha, "median": median}


class Stops:
    """An actor of Ray that knows which trials shall end; the driver writes and the workers read."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def add(self, trial_id: str, reason: str) -> None:
        self.reasons[trial_id] = reason

    def reason(self, trial_id: str) -> str | None:
        return self.reasons.get(trial_id)


class Pruner(FIFOScheduler):  # type: ignore[misc]
    """Ray Tune's scheduler of a sweep: trials start in order, and a rule ends those that fall behind.

    A trial is compared with those of its own seed, which have its partition and its held-out examples.

    It never ends a trial over its head: what `stop` is told reaches the trial before its next round. With
    `sweep.equal_budget` a trial is compared with those of its own algorithm, so that none is tuned at another's cost.
    """

    def __init__(self, sweep: SweepConfig, plan: Plan, stop: Callable[[str, str], None]) -> None:
        """Args:
        sweep: names the rule, the metric and the rounds of grace.
        plan: knows how many rounds a whole run of each trial has.
        stop: is told the id of a trial that shall end, and the reason.
        """
        super().__init__()
        self.rule, self.name = RULES[sweep.scheduler], sweep.scheduler
        [(self.key, way)] = sweep.objectives
        self.sign = 1.0 if way == "max" else -1.0
        self.grace = sweep.grace_rounds or 1
        self.plan, self.stop = plan, stop
        self.apart = sweep.algorithm_axis.key if sweep.equal_budget and sweep.algorithm_axis else ""
        self.group: dict[str, Any] = {}
        self.rounds: dict[str, int] = {}
        self.curves: dict[str, dict[int, float]] = {}

    def remember(self, trials: Sequence[Trial]) -> None:
        """Takes over the curves of trials that ended before the sweep was resumed."""
        for trial in trials:
            self.curves[trial.trial_id] = dict(trial.history.get(self.key, ()))
            self.group[trial.trial_id] = (trial.seed, trial.params.get(self.apart))

    def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> str:
        sampled = sampled_of(trial.config)
        trial_id = str(sampled[ID])
        if trial_id not in self.rounds:
            point = self.plan.point(sampled)
            self.rounds[trial_id] = point.config.fl.rounds
            self.group[trial_id] = (point.seed, point.params.get(self.apart))
        if self.key in result and "round" in result:
            curve = self.curves.setdefault(trial_id, {})
            curve[result["round"]] = float(result[self.key])
            alike = [name for name in self.curves if self.group[name] == self.group[trial_id] and name != trial_id]
            others = [self.curves[name] for name in alike if self.curves[name]]
            if self.rule(curve, others, grace=self.grace, rounds=self.rounds[trial_id], sign=self.sign):
                self.stop(trial_id, f"sweep.scheduler={self.name}: its {self.key} falls behind the other trials'")
        return str(FIFOScheduler.CONTINUE)
