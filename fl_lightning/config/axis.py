"""One axis of a sweep: a key and the values it may take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import Fault, InvalidConfig, nearest, show
from fl_lightning.config.index import is_open_key, is_section, key_names
from fl_lightning.config.messages import unknown_key
from fl_lightning.config.numbers import to_float, to_int
from fl_lightning.config.schema import RunConfig

KINDS = ("grid", "choice", "uniform", "loguniform", "randint")


@dataclass(frozen=True)
class Axis:
    """A swept key.

    Attributes:
        key: a dotted key, or a group whose options are compared.
        kind: `grid` (every value, crossed with the other grids), `choice` (one of the values at random), or a range:
            `uniform`, `loguniform`, `randint`.
        values: the finite values; for a range its two ends (low, high). `randint` includes both ends.
    """

    key: str
    kind: str
    values: tuple[Any, ...]

    @property
    def is_random(self) -> bool:
        """Whether values are drawn, not enumerated."""
        return self.kind != "grid"

    @property
    def is_finite(self) -> bool:
        return self.kind in ("grid", "choice")

    @property
    def is_structural(self) -> bool:
        """Whether the key chooses which other keys have a meaning: a group, or the name of a variant."""
        tags = {f"{section}.{tag}" for section, tag in TAG_OF_SECTION.items()} | {"algorithm.local.optimizer"}
        return self.key in TAG_OF_SECTION or self.key in tags


def read_axis(key: str, raw: Any) -> Axis:
    """An axis as a sweep file writes it: `{grid: [1, 2]}`.

    Raises:
        ConfigError: the key cannot be swept, or the values are none of the forms above.
    """
    at = f"sweep.space.{key}"
    _check_key(key)
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise _fault(at, f"needs exactly one of {', '.join(KINDS)}, such as {{grid: [1, 2]}}", raw)
    [(kind, values)] = raw.items()
    if kind not in KINDS:
        near = nearest(str(kind), KINDS)
        raise _fault(
            f"{at}.{kind}", f"no such form; {f'did you mean {near}?' if near else 'use one of ' + ', '.join(KINDS)}"
        )
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise _fault(f"{at}.{kind}", "needs a list, such as [1, 2]", values)
    for value in values:
        if not isinstance(value, str | int | float | None):
            raise _fault(f"{at}.{kind}", "needs plain values, no lists or mappings", value)
    axis = Axis(key, kind, tuple(values) if kind in ("grid", "choice") else _ends(f"{at}.{kind}", kind, values))
    if not values:
        raise _fault(f"{at}.{kind}", "needs at least one value")
    if len({show(value) for value in values}) < len(values):
        raise _fault(f"{at}.{kind}", "lists a value twice; the trials would be the same", list(values))
    return axis


def _check_key(key: str) -> None:
    at = f"sweep.space.{key}"
    if key == "seed":
        raise _fault(at, "is no axis; list the seeds in sweep.seeds")
    if key.startswith("tracking."):
        raise _fault(at, "cannot be swept: all trials belong to one study in one store")
    if key in TAG_OF_SECTION or key in key_names(RunConfig) or is_open_key(RunConfig, key):
        return
    if is_section(RunConfig, key):
        raise _fault(at, "is a section; sweep one of its keys")
    fault = unknown_key(RunConfig, key, {})
    raise _fault(at, fault.rule)


def _ends(at: str, kind: str, values: Sequence[Any]) -> tuple[Any, ...]:
    read = to_int if kind == "randint" else to_float
    word = "whole numbers" if kind == "randint" else "numbers"
    try:
        low, high = (read(value) for value in values)
    except ValueError:
        raise _fault(at, f"needs two {word}, [low, high]", list(values)) from None
    if not low < high:
        raise _fault(at, "needs low < high", list(values))
    if kind == "loguniform" and low <= 0:
        raise _fault(at, "needs low > 0; use uniform for a range that reaches 0", list(values))
    return low, high


def _fault(key: str, rule: str, *value: Any) -> InvalidConfig:
    return InvalidConfig([Fault(key, rule, *value)])
