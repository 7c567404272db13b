"""What a sweep makes its trials better at: the metrics, which way each is better, and what does not fit together."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from fl_lightning.config.faults import Fault, nearest
from fl_lightning.config.plugins import FAULT, Words

if TYPE_CHECKING:
    from fl_lightning.config.sweep import SweepConfig

Way = Literal["max", "min"]

DIRECTIONS: dict[str, Way] = {
    "test_accuracy": "max",
    "test_loss": "min",
    "validation_accuracy": "max",
    "validation_loss": "min",
    "oracle/train_loss": "min",
    "epsilon": "min",
    "seconds": "min",
    "gradients": "min",
    "upload_bytes": "min",
}
"""Every metric that a trial can be judged by, and which way it is better. Costs are sums over the rounds."""


def read_metric(value: Any) -> Any:
    """One metric by name, or a tuple of several; null stays null."""
    return _one_or_several(value, tuple(DIRECTIONS), "a metric, or a list of metrics such as [test_accuracy, epsilon]")


def read_mode(value: Any) -> Any:
    """`max` or `min`, or a tuple of them; null stays null."""
    return _one_or_several(value, ("max", "min"), "max or min, or a list of them such as [max, min]")


def _one_or_several(value: Any, options: Sequence[str], needs: str) -> Any:
    given = [value] if isinstance(value, str) else value
    if value is None:
        return None
    if not isinstance(given, list | tuple) or not given:
        raise PydanticCustomError(FAULT, f"needs {needs}")
    for item in given:
        if not isinstance(item, str) or item not in options:
            near = nearest(item, options) if isinstance(item, str) else None
            which = "" if isinstance(value, str) else f": {item}"
            said = f"no such option{which}" + (f"; did you mean {near}?" if near else "")
            said += f" (options: {', '.join(options)})"
            raise PydanticCustomError(FAULT, said)
    return given[0] if len(given) == 1 else tuple(given)


Metric = Annotated[
    str | tuple[str, ...] | None,
    BeforeValidator(read_metric),
    Words(f"one or a list of {', '.join(DIRECTIONS)}"),
]
Mode = Annotated[Way | tuple[Way, ...] | None, BeforeValidator(read_mode), Words("max or min, or a list of them")]


def objectives_of(sweep: "SweepConfig", default: str = "test_accuracy") -> tuple[tuple[str, Way], ...]:
    """(metric, "max" or "min") of each objective, in the order given.

    Args:
        sweep: a valid sweep.
        default: the metric where none is named.
    """
    metrics = sweep.metric or default
    names = (metrics,) if isinstance(metrics, str) else metrics
    if sweep.mode is None:
        return tuple((name, DIRECTIONS[name]) for name in names)
    ways = (sweep.mode,) if isinstance(sweep.mode, str) else sweep.mode
    return tuple(zip(names, ways, strict=True))


def objective_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of `sweep.metric` and `sweep.mode`, given the other settings."""
    metric, mode = sweep.metric, sweep.mode
    count = len(metric) if isinstance(metric, tuple) else 1
    if mode is not None and (ways := len(mode) if isinstance(mode, tuple) else 1) != count:
        shown = list(mode) if isinstance(mode, tuple) else mode
        rule = f"has {_count(ways, 'entry', 'entries')} for {_count(count, 'metric', 'metrics')}; give one for each, in"
        yield Fault("sweep.mode", f"{rule} their order, or null: the natural way of each", shown)
    if not isinstance(metric, tuple):
        return
    named = list(metric)
    if twice := next((name for name in named if named.count(name) > 1), None):
        yield Fault("sweep.metric", f"lists {twice} twice; name each objective once", named)
    if sweep.scheduler != "none":
        rule = f"contradicts sweep.scheduler={sweep.scheduler}, which follows one metric; name one, or take none"
        yield Fault("sweep.metric", rule, named)
    if sweep.selection.distribution != "none":
        rule = "contradicts sweep.selection, which accounts for the choice of one trial and not of a front; name one"
        yield Fault("sweep.metric", rule, named)


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
