"""A validated sweep as Ray Tune's search space, and a trial's point in it as a configuration."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning import RunConfig
from fl_lightning.analysis.trials import setting_of
from fl_lightning.config import Axis, Cell

CELL, DRAWN, SEED, ID, EARLIER, POINT, LINEAGE = "cell", "drawn", "seed", "id", "earlier", "point", "lineage"
"""The keys of a trial as it is drawn: the cell's position, the random axes' values by dotted key, where trials must be
independent of each other the trial's own seed, its id, in a resumed sweep the run that it goes on with, the number of
the point that an optimiser chose, and what a member of a population has taken over: `round`, `donor`, `old` and `new`
values of each time."""

TRIAL = "trial"
"""The one key of a Ray Tune trial's configuration: the trial as it is drawn, as JSON text."""

Sampled = Mapping[str, Any]
"""A trial as it is drawn: plain values by the keys above."""

LARGEST_SEED = 2**31 - 1
"""Of the seeds that trials draw for themselves; NumPy's generator behind Ray takes no larger bound everywhere."""


@dataclass(frozen=True)
class Plan:
    """All trials of a sweep, ready to be sent to the workers.

    Attributes:
        sweep_id: the sweep's short name.
        axes: the swept keys in the order of the sweep's file.
        cells: grid times seeds, the seed changing fastest; random axes are still to be drawn.
        tracking: values of `tracking.*` that every trial gets, resolved by the driver, so that a worker's folder and
            environment do not matter.
        parent_run_id: the sweep's own run in MLflow; None without tracking.
        own_seeds: every trial draws a seed of its own, as a choice among them that is accounted for demands.
        retried: a trial may be a second attempt, after a crash of its process, and looks for its first.
        perturb_every: after how many rounds each time the members of a population are compared; 0 without one.
        stops: the actor that knows which trials shall end early; None without a scheduler.
        start: the start folder; workers of a cluster go there where their machine has it.
        checkpoints: gets a folder of checkpoints for every run; None: what a run alone would use.
    """

    sweep_id: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    tracking: Mapping[str, Any]
    parent_run_id: str | None = None
    own_seeds: bool = False
    retried: bool = False
    perturb_every: int = 0
    stops: Any = None
    start: Path | None = None
    checkpoints: Path | None = None

    def point(self, sampled: Sampled) -> "Point":
        """The trial that was drawn as `sampled`.

        Raises:
            ConfigError: a drawn value does not fit.
        """
        cell: Cell = self.cells[sampled[CELL]]
        drawn = {key: plain(value) for key, value in sampled.get(DRAWN, {}).items()}
        values = {**cell.values, **drawn}
        seed = int(sampled.get(SEED, cell.seed))
        config = cell.configure(drawn).with_overrides({**self.tracking, "seed": seed})
        return Point({key: values[key] for key in self.axes if key in values}, seed, config)

    def setting(self, sampled: Sampled) -> str:
        """What a trial is compared under; a member of a population, whose values change, is one of its own."""
        return setting_of({"member": sampled[ID]} if self.perturb_every else self.point(sampled).params)


@dataclass(frozen=True)
class Point:
    """One trial: its swept values, its seed, its whole configuration."""

    params: Mapping[str, Any]
    seed: int
    config: RunConfig


def plain(value: Any) -> Any:
    """A NumPy scalar as Python's own."""
    return value.item() if hasattr(value, "item") else value


def sampled_of(config: Mapping[str, Any]) -> Sampled:
    """The trial that a Ray Tune trial's configuration stands for."""
    return json.loads(config[TRIAL])


def draw(plan: Plan, samples: int) -> list[Sampled]:
    """All trials of a sweep whose axes are drawn blindly: a grid over the cells, with a value of each random axis.

    The random axes are drawn once per sample and then held over all cells, so settings and seeds are compared at the
    same points. The draws follow from the first seed alone: the same sweep again has the same trials.

    Args:
        plan: the sweep.
        samples: how often the random axes are drawn.
    """
    if not plan.cells:
        return []
    from ray.tune.search.variant_generator import generate_variants

    # NumPy's generator behind Ray takes 32 bits.
    generator = np.random.default_rng(plan.cells[0].seed % 2**32)
    listed: list[Sampled] = []
    for _ in range(samples):
        for _, spec in generate_variants({"config": _space(plan)}, constant_grid_search=True, random_state=generator):
            drawn = spec["config"]
            fitting = {axis.key for axis in plan.cells[drawn[CELL]].random}
            values = {key: plain(value) for key, value in drawn.get(DRAWN, {}).items() if key in fitting}
            own = {SEED: int(drawn[SEED])} if SEED in drawn else {}
            listed.append({ID: trial_id(len(listed)), CELL: drawn[CELL], DRAWN: values, **own})
    return listed


def trial_id(number: int) -> str:
    """`t003`: short enough for every file system, unique within the sweep."""
    return f"t{number:03d}"


def studies_of(cells: Sequence[Cell]) -> int:
    """How many settings of the grids there are, each a study of its own for an optimiser: seeds change fastest."""
    return len(dict.fromkeys(setting_of(cell.values) for cell in cells))


def trials_of(point: int, values: dict[str, Any], cells: Sequence[Cell]) -> list[Sampled]:
    """A point's trials, one for each seed; ids follow from the point's number. Studies are asked in turn."""
    studies = studies_of(cells)
    seeds, first = len(cells) // studies, len(cells) // studies * (point % studies)
    return [
        {ID: trial_id(point * seeds + seed), CELL: first + seed, DRAWN: values, POINT: point} for seed in range(seeds)
    ]


def completed(listed: Sequence[Sampled], cells: Sequence[Cell]) -> list[Sampled]:
    """The trials drawn so far, with those that the sweep was killed before it could store."""
    points = {sampled[POINT]: dict(sampled[DRAWN]) for sampled in listed}
    return [sampled for point in sorted(points) for sampled in trials_of(point, points[point], cells)]


def _space(plan: Plan) -> dict[str, Any]:
    """Ray Tune's search space: a grid over the cells and a sampler for each random axis."""
    from ray import tune

    random = {axis.key: axis for cell in plan.cells for axis in cell.random}
    space: dict[str, Any] = {CELL: tune.grid_search(list(range(len(plan.cells))))}
    if random:
        space[DRAWN] = {key: sampler(random[key]) for key in plan.axes if key in random}
    if plan.own_seeds:
        space[SEED] = tune.randint(0, LARGEST_SEED)
    return space


def sampler(axis: Axis) -> Any:
    """Ray Tune's sampler of a random axis. `randint` includes both ends, which Ray's own does not."""
    from ray import tune

    if axis.kind == "choice":
        return tune.choice(list(axis.values))
    low, high = axis.values
    if axis.kind == "randint":
        return tune.randint(low, high + 1)
    return {"uniform": tune.uniform, "loguniform": tune.loguniform}[axis.kind](low, high)
