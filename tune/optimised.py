"""Trials chosen by a model of what the trials before them have measured: Optuna's TPE, on Ray Tune."""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from ray.tune.search import Searcher

from fl_lightning.analysis.statistics import mean
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig
from fl_lightning.config.scoring import the_metric
from tune.space import DRAWN, POINT, TRIAL, Plan, Sampled, plain, sampler, trials_of


class Optimiser(Searcher):  # type: ignore[misc]
    """Asks Optuna for points, runs each with every seed, and tells it the mean of the metric over the seeds.

    What was measured before the sweep was resumed is told at the start. The first points are random ones from the first
    seed; a resumed sweep draws on from a seed of its own, so that it repeats none.
    """

    def __init__(
        self,
        plan: Plan,
        sweep: SweepConfig,
        listed: Sequence[Sampled],
        done: Sequence[Trial],
        keep: Callable[[Sampled], None],
        read: Callable[[Sampled, dict[str, Any]], Trial],
    ) -> None:
        """Args:
        plan: its cells are the seeds.
        sweep: the sweep.
        listed: trials drawn before, still to run.
        done: trials drawn before that have ended.
        keep: stores a trial before it starts.
        read: a trial's record from its last report to Ray Tune.
        """
        super().__init__(metric=sweep.metric, mode=sweep.mode)
        self.plan, self.sweep, self.keep, self.read = plan, sweep, keep, read
        self.queue = deque(listed)
        self.running: dict[str, Sampled] = {}
        self.points: dict[int, dict[str, Any]] = {sampled[POINT]: dict(sampled[DRAWN]) for sampled in listed}
        self.ended: dict[int, list[Trial]] = defaultdict(list)
        for trial in done:
            point = int(trial.trial_id[1:]) // len(plan.cells)
            self.points[point] = dict(trial.params)
            self.ended[point].append(trial)
        self.before = len(self.points)
        self.optuna = _optuna(plan, sweep, self.before)
        for point in self.ended:
            self._tell(point)

    def suggest(self, trial_id: str) -> Any:
        if not self.queue and len(self.points) < self.sweep.num_samples:
            self._draw(len(self.points))
        if not self.queue:
            return str(Searcher.FINISHED)
        self.running[trial_id] = self.queue.popleft()
        return {TRIAL: json.dumps(self.running[trial_id])}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: Optuna is told of whole trials."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        sampled = self.running.pop(trial_id)
        self.ended[sampled[POINT]].append(self.read(sampled, result or {}))
        self._tell(sampled[POINT])

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: a sweep is resumed from its tracking store."""

    def restore(self, checkpoint_path: str) -> None:
        """As `save`."""

    def _draw(self, point: int) -> None:
        values = {key: plain(value) for key, value in self.optuna.suggest(_name(point)).items()}
        self.points[point] = values
        trials = trials_of(point, values, len(self.plan.cells))
        for sampled in trials:
            self.keep(sampled)
        self.queue.extend(trials)

    def _tell(self, point: int) -> None:
        """Once all seeds of a point have ended: their mean, or a failure where none has measured the metric."""
        trials = self.ended[point]
        if len(trials) < len(self.plan.cells):
            return
        centre = mean([value for trial in trials if (value := trial.measured(the_metric(self.sweep))) is not None])
        if point >= self.before:
            told = None if centre is None else {self.sweep.metric: centre}
            self.optuna.on_trial_complete(_name(point), told, error=centre is None)
        elif centre is not None:
            self.optuna.add_evaluated_point(self.points[point], centre)


def _name(point: int) -> str:
    return f"p{point}"


def _optuna(plan: Plan, sweep: SweepConfig, before: int) -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = OptunaSearch.convert_search_space({axis.key: sampler(axis) for axis in plan.cells[0].random})
    seed = (plan.cells[0].seed + before) % 2**32
    return OptunaSearch(space=space, metric=sweep.metric, mode=sweep.mode, seed=seed)
