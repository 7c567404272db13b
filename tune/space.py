"""A validated sweep as Ray Tune's search space, and a trial's point in it as a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning import RunConfig
from fl_lightning.config import Axis, Cell, SweepConfig

CELL, DRAWN, SEED = "cell", "drawn", "seed"
"""The keys of a Ray Tune trial's configuration: the cell's position, the random axes' values by dotted key, and where
trials must be independent of each other, the trial's own seed."""

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
    """

    sweep_id: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    tracking: Mapping[str, Any]
    parent_run_id: str | None = None
    own_seeds: bool = False

    def point(self, sampled: Mapping[str, Any]) -> "Point":
        """The trial for which Ray Tune chose `sampled`.

        Raises:
            ConfigError: a drawn value does not fit.
        """
        cell: Cell = self.cells[sampled[CELL]]
        drawn = {key: _plain(value) for key, value in sampled.get(DRAWN, {}).items()}
        values = {**cell.values, **drawn}
        seed = int(sampled.get(SEED, cell.seed))
        config = cell.configure(drawn).with_overrides({**self.tracking, "seed": seed})
        return Point({key: values[key] for key in self.axes}, seed, config)


@dataclass(frozen=True)
class Point:
    """One trial: its swept values, its seed, its whole configuration."""

    params: Mapping[str, Any]
    seed: int
    config: RunConfig


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's own."""
    return value.item() if hasattr(value, "item") else value


def param_space(plan: Plan) -> dict[str, Any]:
    """Ray Tune's search space: a grid over the cells and a sampler for each random axis."""
    from ray import tune

    random = plan.cells[0].random
    space: dict[str, Any] = {CELL: tune.grid_search(list(range(len(plan.cells))))}
    if random:
        space[DRAWN] = {axis.key: sampler(axis) for axis in random}
    if plan.own_seeds:
        space[SEED] = tune.randint(0, LARGEST_SEED)
    return space


def search(sweep: SweepConfig, plan: Plan) -> Any:
    """Ray Tune's own search over that space.

    The random axes are drawn once per sample and then held over all cells, so settings and seeds are compared at the
    same points. The draws follow from the first seed alone: the same sweep again has the same trials.
    """
    from ray.tune.search.basic_variant import BasicVariantGenerator

    # NumPy's generator behind Ray takes 32 bits.
    state = plan.cells[0].seed % 2**32
    return BasicVariantGenerator(
        constant_grid_search=True, random_state=state, max_concurrent=sweep.max_concurrent or 0
    )


def sampler(axis: Axis) -> Any:
    """Ray Tune's sampler of a random axis. `randint` includes both ends, which Ray's own does not."""
    from ray import tune

    if axis.kind == "choice":
        return tune.choice(list(axis.values))
    low, high = axis.values
    if axis.kind == "randint":
        return tune.randint(low, high + 1)
    return {"uniform": tune.uniform, "loguniform": tune.loguniform}[axis.kind](low, high)
