"""A population whose members learn from each other: Ray Tune's population-based training, round by round.

M. Jaderberg et al., Population based training of neural networks, 2017, https://arxiv.org/abs/1711.09846. Every
`sweep.perturb_every` rounds all members wait for each other. Each of the worst quarter then takes over the federation
of one of the best quarter (exploit) with that one's settings, changed a little or drawn anew (explore). Which one, and
what is drawn, follows from the seed, the round and the member alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray.tune.experiment import Trial as RayTrial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from fl_lightning.config import Axis, SweepConfig
from fl_lightning.rng import numpy_generator
from tune.space import DRAWN, ID, LINEAGE, TRIAL, Plan, sampled_of

FACTORS = (0.8, 1.2)
"""What a number is multiplied by; of a list the neighbours are taken."""

RESAMPLED = 0.25
"""How often a value is drawn anew instead."""


def explore(values: Mapping[str, Any], axes: Sequence[Axis], generator: np.random.Generator) -> dict[str, Any]:
    """New values near those of a better member, within the axes' own ranges.

    Args:
        values: of that member, by key.
        axes: where values come from.
        generator: the stream of this member at this round.
    """
    found: dict[str, Any] = {}
    value: float
    for axis in axes:
        anew, upward, share = generator.random() < RESAMPLED, bool(generator.random() < 0.5), generator.random()
        old = values[axis.key]
        if axis.kind == "choice":
            here, last = axis.values.index(old), len(axis.values) - 1
            near = min(max(here + (1 if upward else -1), 0), last)
            found[axis.key] = axis.values[int(share * (last + 1)) if anew else near]
            continue
        low, high = axis.values
        if not anew:
            value = min(max(old * FACTORS[upward], low), high)
        elif axis.kind == "loguniform":
            value = float(np.exp(np.log(low) + share * (np.log(high) - np.log(low))))
        else:
            value = low + share * (high - low)
        found[axis.key] = round(value) if axis.kind == "randint" else float(value)
    return found


class Members(BasicVariantGenerator):  # type: ignore[misc]
    """All members, from the start. It says that more may come, so Ray Tune keeps the processes of those that wait."""

    def is_finished(self) -> bool:
        return bool(super().is_finished() and not self._live_trials)


class Population(PopulationBasedTraining):  # type: ignore[misc]
    """Ray Tune's own scheduler in its synchronous form, with draws that can be repeated.

    Members that fail or end early are not waited for. In a resumed sweep nobody is compared before all have come as far
    as the farthest: what was decided there is decided again, from the same numbers.
    """

    def __init__(self, sweep: SweepConfig, plan: Plan, start: int, say: Callable[[str], None]) -> None:
        """Args:
        sweep: names the metric.
        plan: knows the seed, the axes and the rounds between comparisons.
        start: the round of the farthest member of a resumed sweep; 0 at the start.
        say: prints a line for each federation that is taken over.
        """
        [(metric, mode)] = sweep.objectives
        self.every, self.cell, self.say = plan.perturb_every, plan.cells[0], say
        super().__init__(
            time_attr="round",
            metric=metric,
            mode=mode,
            perturbation_interval=self.every,
            burn_in_period=start,
            custom_explore_fn=lambda config: config,  # `_get_new_config` below explores
            log_config=False,
            require_attrs=False,  # the report of a trial's outcome has no metric
            synch=True,
        )

    def on_trial_result(self, controller: Any, trial: RayTrial, result: dict[str, Any]) -> str:
        round = result.get("round", 0)
        if round % self.every or round >= self.cell.config.fl.rounds:
            return str(TrialScheduler.CONTINUE)
        return str(super().on_trial_result(controller, trial, result))

    def choose_trial_to_run(self, controller: Any) -> RayTrial | None:
        chosen = super().choose_trial_to_run(controller)
        live = [trial for trial in controller.get_trials() if not trial.is_finished()]
        if chosen is None and live and all(trial.status == RayTrial.PAUSED for trial in live):
            self._compare(controller, live)  # the one that they waited for has ended
            chosen = super().choose_trial_to_run(controller)
        return chosen

    def _compare(self, controller: Any, live: Sequence[RayTrial]) -> None:
        lower, upper = self._quantiles()
        others = [trial for trial in live if trial not in (*lower, *upper)]
        for trial in [*upper, *others, *lower]:
            self._trial_state[trial].last_perturbation_time = int(self._next_perturbation_sync)
            self._checkpoint_or_exploit(trial, controller, upper, lower)
        self._next_perturbation_sync += self._perturbation_interval

    def _checkpoint_or_exploit(
        self, trial: RayTrial, controller: Any, upper: list[RayTrial], lower: list[RayTrial]
    ) -> None:
        """Ray's own choice among the donors is left no freedom."""
        if trial in lower:
            now = self._trial_state[trial].last_train_time
            able = [donor for donor in upper if self._trial_state[donor].last_train_time == now]
            if not able:
                return
            upper = [able[int(self._generator(trial, "donor").integers(len(able)))]]
        super()._checkpoint_or_exploit(trial, controller, upper, lower)

    def _get_new_config(self, trial: RayTrial, trial_to_clone: RayTrial) -> tuple[dict[str, Any], dict[str, Any]]:
        mine, theirs = sampled_of(trial.config), sampled_of(trial_to_clone.config)
        new = explore(theirs[DRAWN], self.cell.random, self._generator(trial, "explore"))
        round = self._trial_state[trial].last_train_time
        step = {"round": round, "donor": theirs[ID], "old": dict(mine[DRAWN]), "new": new}
        changes = ", ".join(f"{key} {mine[DRAWN][key]:.4g} -> {value:.4g}" for key, value in new.items())
        self.say(f"{mine[ID]} goes on from {theirs[ID]} after round {round}: {changes}")
        sampled = {**mine, DRAWN: new, LINEAGE: [*mine.get(LINEAGE, ()), step]}
        return {**trial.config, TRIAL: json.dumps(sampled)}, {}

    def _generator(self, trial: RayTrial, purpose: str) -> np.random.Generator:
        member = int(sampled_of(trial.config)[ID][1:])
        return numpy_generator(self.cell.seed, f"pbt/{purpose}", self._trial_state[trial].last_train_time, member)
