"""How often a sweep draws its random axes: a number that was asked for, or one drawn so that tuning can be paid for."""

from collections.abc import Sequence
from typing import Any

from fl_lightning import ConfigError, RunConfig
from fl_lightning.config import Cell, SweepConfig
from fl_lightning.rng import numpy_generator


def number_of_samples(base: RunConfig, sweep: SweepConfig, cells: Sequence[Cell]) -> int:
    """How often the random axes are drawn: as often as asked for, or a random number of times.

    Raises:
        ConfigError: a random number without the store that would keep the ledgers for its account.
    """
    if sweep.selection.distribution == "none":
        return sweep.num_samples
    if not base.tracking.enabled:
        raise ConfigError(
            f"sweep.selection.distribution={sweep.selection.distribution}: needs tracking.enabled=true, for it is "
            "accounted for by the ledgers that the tracking store keeps"
        )
    _check_alike(base, sweep)
    from fl_lightning.privacy.selection import draw_trials

    chosen = sweep.selection
    assert chosen.mean is not None, "the schema asks for the mean wherever there is a distribution"
    return draw_trials(chosen.distribution, chosen.mean, chosen.eta, numpy_generator(cells[0].seed, "selection"))


def budget_of(sweep: SweepConfig, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Algorithm -> `points` and `axes` (the keys tuned for it), where all get the same number; else empty."""
    axis = sweep.algorithm_axis
    if not sweep.equal_budget or axis is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        name = str(cell.values[axis.key])
        keys = [key for key in sweep.space if key in cell.values or key in {own.key for own in cell.random}]
        own = found.setdefault(name, {"points": 0, "axes": [key for key in keys if key != axis.key]})
        own["points"] += sweep.num_samples * (cell.seed == cells[0].seed)
    return found


def check_objectives(sweep: SweepConfig, cells: Sequence[Cell]) -> None:
    """Refuses objectives that no trial could measure.

    Raises:
        ConfigError: epsilon, where nothing is private.
    """
    if all(metric != "epsilon" for metric, _ in sweep.objectives):
        return
    configs = [config for cell in cells for config in cell.variants.values()] or [cell.config for cell in cells]
    if all(config.privacy.level == "none" for config in configs):
        raise ConfigError(
            "sweep.metric=epsilon: no trial is private, so none has one; take it out, or set privacy.level"
        )


def _check_alike(base: RunConfig, sweep: SweepConfig) -> None:
    """Each trial draws a seed of its own; what it releases must not follow from that seed."""
    at = f"sweep.selection.distribution={sweep.selection.distribution}"
    if base.partition.kind not in ("iid", "file") and base.privacy.level == "sample":
        raise ConfigError(
            f"{at}: partition.kind={base.partition.kind} gives clients other sizes, and so other costs, at every seed; "
            "use iid or file"
        )
    secret = base.privacy.level != "sample" and getattr(base.privacy, "sampling", "full") != "full"
    if base.fl.cohort_size < base.fl.num_clients and base.fl.cohort_schedule is None and not secret:
        raise ConfigError(
            f"{at}: cohorts of {base.fl.cohort_size} of {base.fl.num_clients} clients are drawn anew at every seed, "
            "and with them who pays how often; let all take part, or keep cohorts secret (privacy.sampling)"
        )
