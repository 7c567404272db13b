"""Trials chosen by a model of what the trials before them have measured: Optuna's TPE, on Ray Tune.

With several objectives it is Optuna's multi-objective TPE (Y. Ozaki et al., Multiobjective tree-structured Parzen
estimator for computationally expensive optimization problems, GECCO 2020), which its sampler becomes by itself.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from ray.tune.search import Searcher

from fl_lightning.analysis.pareto import achieved
from fl_lightning.analysis.trials import Trial
from fl_lightning.config import Cell, SweepConfig
from tune.space import DRAWN, POINT, TRIAL, Plan, Sampled, plain, sampler, studies_of, trials_of


class Optimiser(Searcher):  # type: ignore[misc]
    """Asks Optuna for points, runs each with every seed, and tells it each objective over the seeds.

    With `sweep.equal_budget` every algorithm has a study of its own, and they are asked in turn. What was measured
    before the sweep was resumed is told at the start. The first points are random ones from the first seed; a resumed
    sweep draws on from a seed of its own, so that it repeats none.
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
        plan: its cells are the algorithms of an equal budget, if there is one, times the seeds.
        sweep: the sweep.
        listed: trials drawn before, still to run.
        done: trials drawn before that have ended.
        keep: stores a trial before it starts.
        read: a trial's record from its last report to Ray Tune.
        """
        metric, mode = sweep.objectives[0]
        super().__init__(metric=metric, mode=mode)
        self.plan, self.sweep, self.keep, self.read = plan, sweep, keep, read
        self.queue = deque(listed)
        self.running: dict[str, Sampled] = {}
        self.points: dict[int, dict[str, Any]] = {sampled[POINT]: dict(sampled[DRAWN]) for sampled in listed}
        self.ended: dict[int, list[Trial]] = defaultdict(list)
        self.count = studies_of(plan.cells)
        self.seeds = len(plan.cells) // self.count
        for trial in done:
            point = int(trial.trial_id[1:]) // self.seeds
            random = {axis.key for axis in self._first(point).random}
            self.points[point] = {key: value for key, value in trial.params.items() if key in random}
            self.ended[point].append(trial)
        self.before = set(self.points)
        self.studies = [
            _optuna(self._first(study), sweep, sum(point % self.count == study for point in self.before))
            for study in range(self.count)
        ]
        for point in sorted(self.ended):
            self._tell(point)

    def suggest(self, trial_id: str) -> Any:
        if not self.queue and len(self.points) < self.sweep.num_samples * self.count:
            self._draw(next(point for point in range(len(self.points) + 1) if point not in self.points))
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

    def _first(self, point: int) -> Cell:
        """The point's cell with the first seed."""
        return self.plan.cells[point % self.count * self.seeds]

    def _draw(self, point: int) -> None:
        suggested = self.studies[point % self.count].suggest(_name(point))
        values = {key: plain(value) for key, value in suggested.items()}
        self.points[point] = values
        trials = trials_of(point, values, self.plan.cells)
        for sampled in trials:
            self.keep(sampled)
        self.queue.extend(trials)

    def _tell(self, point: int) -> None:
        """Once all seeds of a point have ended: its objectives over them, or a failure where one was not measured."""
        trials, study = self.ended[point], self.studies[point % self.count]
        if len(trials) < self.seeds:
            return
        names = [metric for metric, _ in self.sweep.objectives]
        values = [achieved(trials, name) for name in names]
        missing = any(value is None for value in values)
        if point not in self.before:
            told = None if missing else dict(zip(names, values, strict=True))
            study.on_trial_complete(_name(point), told, error=missing)
        elif not missing:
            _add(study, self.points[point], values)


def _name(point: int) -> str:
    return f"p{point}"


def _add(study: Any, point: dict[str, Any], values: Sequence[Any]) -> None:
    """Tells of a point of an earlier process; Ray's own way of doing so knows one objective only."""
    import optuna

    distributions, told = study._space, {"value": values[0]} if len(values) == 1 else {"values": list(values)}
    study._ot_study.add_trial(optuna.trial.create_trial(params=point, distributions=distributions, **told))


def _optuna(cell: Cell, sweep: SweepConfig, before: int) -> Any:
    """Ray Tune's searcher of a study that knows of `before` points already."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = OptunaSearch.convert_search_space({axis.key: sampler(axis) for axis in cell.random})
    seed = (cell.seed + before) % 2**32
    metrics, modes = ([*items] for items in zip(*sweep.objectives, strict=True))
    if len(metrics) == 1:
        return OptunaSearch(space=space, metric=metrics[0], mode=modes[0], seed=seed)
    return OptunaSearch(space=space, metric=metrics, mode=modes, seed=seed)
