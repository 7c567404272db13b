"""What does not fit together in how a sweep chooses its trials and ends them early."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.scoring import ON_TEST, ON_VALIDATION, metrics_of
from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.config.sweep import SweepConfig

BY_ROUND = ON_VALIDATION
"""The metrics that a scheduler can follow."""


def search_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of `sweep.search`, `sweep.scheduler` and `sweep.grace_rounds`, given the axes and the other settings."""
    random = [key for key, axis in sweep.space.items() if axis.is_random]
    grid = [key for key in sweep.space if key not in random]
    if sweep.equal_budget and sweep.algorithm_axis is not None:
        grid = [key for key in grid if key != sweep.algorithm_axis.key]
    at, counted = "sweep.search", sweep.selection.distribution != "none"
    if sweep.search == "grid" and random:
        yield Fault(at, f"contradicts sweep.space.{random[0]}, which is drawn; list its values as a grid", "grid")
    if sweep.search in ("random", "optuna") and not random:
        yield Fault(at, "needs an axis to draw from: choice, uniform, loguniform or randint", sweep.search)
    if sweep.search == "optuna":
        if grid:
            yield Fault(at, f"needs random axes only; make sweep.space.{grid[0]} a choice", "optuna")
        if sweep.num_samples == 1 and not counted:
            yield Fault(at, "needs sweep.num_samples > 1: how many points it shall try with each seed", "optuna")
        if counted:
            yield Fault(at, "contradicts sweep.selection: a trial that depends on others has no such account", "optuna")
    if sweep.scheduler == "none":
        if sweep.grace_rounds is not None:
            yield Fault(
                "sweep.grace_rounds", "would be ignored with scheduler=none; set sweep.scheduler", sweep.grace_rounds
            )
        return
    metrics = metrics_of(sweep.metric)  # of the test set `scoring` has the word
    if len(metrics) == 1 and metrics[0] not in (*BY_ROUND, *ON_TEST):
        rule = f"needs a sweep.metric that is known in every round, {' or '.join(BY_ROUND)}, found {metrics[0]}"
        yield Fault("sweep.scheduler", rule, sweep.scheduler)
    if counted:
        rule = "contradicts sweep.selection: a trial that is ended because of others has no such account"
        yield Fault("sweep.scheduler", rule, sweep.scheduler)


def check_scheduler(sweep: "SweepConfig", config: RunConfig) -> None:
    """Refuses a scheduler that could never end a trial.

    Args:
        sweep: a valid sweep.
        config: of its trials.

    Raises:
        ConfigError: no round from the first that counts to the last but one is measured.
    """
    if sweep.scheduler not in ("asha", "median"):
        return
    rounds, every, grace = config.fl.rounds, config.fl.eval_every, sweep.grace_rounds or 1
    first = -(-grace // every) * every
    if first >= rounds:
        raise ConfigError(
            f"sweep.scheduler={sweep.scheduler}: would be ignored: with sweep.grace_rounds={grace} and "
            f"fl.eval_every={every} no round before the last of fl.rounds={rounds} is compared; lower one of the two, "
            "or remove the scheduler"
        )


def budget_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of `sweep.equal_budget`, given the axes and the other settings."""
    if not sweep.equal_budget:
        return
    at, axis = "sweep.equal_budget", sweep.algorithm_axis
    if axis is None:
        yield Fault(at, "would be ignored: no axis of the sweep chooses the algorithm; add one, or remove it", True)
        return
    if axis.is_random:
        rule = f"needs every algorithm, not one drawn for each trial; make sweep.space.{axis.key} a grid"
        yield Fault(at, rule, True)
        return
    grid = [key for key, other in sweep.space.items() if not other.is_random and key != axis.key]
    if grid and any(other.is_random for other in sweep.space.values()):
        rule = f"gives each algorithm sweep.num_samples points, so make sweep.space.{grid[0]} a choice, or all a grid"
        yield Fault(at, rule, True)
    if sweep.scheduler == "pbt":
        yield Fault(at, "contradicts sweep.scheduler=pbt, whose members all have one algorithm; take one out", True)
    if sweep.skip_hopeless:
        yield Fault(at, "contradicts sweep.skip_hopeless, which leaves points out; take one of the two out", True)
