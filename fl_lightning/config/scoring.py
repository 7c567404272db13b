"""What the trials of a sweep are compared by, and on whose examples.

Settings are chosen by examples that the clients hold out of training; the test set is looked at once the choice is
made. A sweep tunes if its trials are drawn, or ended because of others. A plain grid compares a few settings and may do
so on the test set. So does a sweep that accounts for tuning (`sweep.selection`): its bound is for a score that is
public or follows from what was released, which a score on the clients' own held-out examples is not.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault, InvalidConfig, Missing, show
from fl_lightning.config.schema import RunConfig

if TYPE_CHECKING:
    from fl_lightning.config.sweep import SweepConfig

SHARE = 0.1
"""`data.validation` in a sweep that tunes, where it is not set."""

ON_TEST = ("test_accuracy", "test_loss")
ON_VALIDATION = ("validation_accuracy", "validation_loss")

PRIVATE_SCORE = (
    "contradicts sweep.selection, whose bound is for a score that is public or follows from what was released: this "
    "one is measured on the clients' own examples"
)


def metrics_of(metric: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names in `sweep.metric`; none where it is still to be settled."""
    return () if metric is None else (metric,) if isinstance(metric, str) else tuple(metric)


def scored_on(metric: str | Sequence[str] | None) -> str | None:
    """`test` or `validation`: the examples on which a sweep's best trial is named; None for a metric of neither."""
    names = metrics_of(metric)
    if any(name in ON_TEST for name in names):
        return "test"
    return "validation" if any(name in ON_VALIDATION for name in names) else None


def counted(sweep: "SweepConfig") -> bool:
    """Whether choosing among the trials is accounted for."""
    return sweep.selection.distribution != "none"


def tunes(sweep: "SweepConfig") -> bool:
    """Whether trials are drawn or ended by what others have measured, and that without an account of it."""
    drawn = sweep.search in ("random", "optuna") or any(axis.is_random for axis in sweep.space.values())
    return not counted(sweep) and (drawn or sweep.scheduler != "none")


def scoring_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Metrics that a sweep of this kind must not be decided by."""
    at = "sweep.metric"
    for name in metrics_of(sweep.metric):
        if tunes(sweep) and name in ON_TEST:
            instead = name.replace("test", "validation")
            yield Fault(
                at,
                "would tune on the test set, and its best value would then promise too much; use sweep.metric="
                f"{instead}, which is measured on what clients hold out of training (data.validation)",
                name,
            )
        if counted(sweep) and (name in ON_VALIDATION or name.startswith("oracle/")):
            yield Fault(at, f"{PRIVATE_SCORE}; use test_accuracy: the test set counts as public", name)
    if tunes(sweep) and "data.validation" in sweep.space:
        yield Fault("sweep.space.data.validation", "would score trials on different examples; give all the same share")


def holding_out(config: RunConfig, sweep: "SweepConfig") -> RunConfig:
    """A trial's configuration with the share of examples that the sweep needs held out, where it sets none itself.

    Raises:
        ConfigError: it holds out none, or some, where that cannot be.
    """
    share = config.data.validation
    if counted(sweep) and share:
        raise _fault(f"{PRIVATE_SCORE}; remove it: trials are scored on the test set, which counts as public", share)
    if tunes(sweep) and share == 0:
        rule = "leaves a sweep that tunes nothing but the test set to choose by"
        raise _fault(f"{rule}; raise it, or remove it for {SHARE:g}", share)
    return config.with_overrides({"data.validation": SHARE}) if tunes(sweep) and share is None else config


def settled(sweep: "SweepConfig", configs: Sequence[RunConfig]) -> "SweepConfig":
    """The sweep with its metric: as set, else by what all trials hold out, else on the test set.

    Args:
        sweep: the sweep.
        configs: of all its cells.

    Raises:
        ConfigError: trials would be scored on different examples, or on none.
    """
    shares = list(dict.fromkeys(config.data.validation or 0.0 for config in configs))
    alike = len(shares) == 1 and shares[0] > 0
    validated = scored_on(sweep.metric) == "validation"
    if (validated or tunes(sweep)) and not alike:
        if shares == [0.0]:
            name = next((name for name in metrics_of(sweep.metric) if name in ON_VALIDATION), None)
            rule = f"needs examples that clients hold out of training; set data.validation={SHARE:g}, for example"
            raise InvalidConfig([Fault("sweep.metric", rule, name)])
        found = ", ".join(map(show, shares))
        rule = f"differs among the trials ({found}), which would be scored on different examples; give all the same"
        raise _fault(rule if tunes(sweep) else f"{rule}, or set sweep.metric=test_accuracy", Missing.VALUE)
    if sweep.metric is not None:
        return sweep
    return sweep.model_copy(update={"metric": "validation_accuracy" if alike else "test_accuracy"})


def _fault(rule: str, value: object) -> InvalidConfig:
    return InvalidConfig([Fault("data.validation", rule, value)])
