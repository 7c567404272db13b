"""What does not fit together in how a sweep chooses its trials and ends them early."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault
from fl_lightning.config.scoring import ON_TEST, ON_VALIDATION

if TYPE_CHECKING:
    from fl_lightning.config.sweep import SweepConfig

BY_ROUND = ON_VALIDATION
"""The metrics that a scheduler can follow."""


def search_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of `sweep.search`, `sweep.scheduler` and `sweep.grace_rounds`, given the axes and the other settings."""
    random = [key for key, axis in sweep.space.items() if axis.is_random]
    grid = [key for key in sweep.space if key not in random]
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
    if sweep.metric not in (None, *BY_ROUND, *ON_TEST):  # of the test set `scoring` has the word
        rule = f"needs a sweep.metric that is known in every round, {' or '.join(BY_ROUND)}, found {sweep.metric}"
        yield Fault("sweep.scheduler", rule, sweep.scheduler)
    if counted:
        rule = "contradicts sweep.selection: a trial that is ended because of others has no such account"
        yield Fault("sweep.scheduler", rule, sweep.scheduler)
