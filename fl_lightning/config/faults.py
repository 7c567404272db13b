"""Faults in words: key, value, rule, remedy, and where the value came from."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from fl_lightning.errors import ConfigError


class Missing(Enum):
    """Stands for "no value to show"; an Enum keeps its identity when an error crosses a process border."""

    VALUE = "missing"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `rule` says what is needed and, where there is one, the remedy."""

    key: str
    rule: str
    value: Any = Missing.VALUE
    source: str | None = None

    def __str__(self) -> str:
        shown = self.key if self.value is Missing.VALUE else f"{self.key}={show(self.value)}"
        return f"{shown}: {self.rule}" + (f" (set {self.source})" if self.source else "")


class InvalidConfig(ConfigError):
    """A ConfigError that also carries its faults one by one."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(tuple(faults))
        self.faults = tuple(faults)

    def __str__(self) -> str:
        first, *others = self.faults
        if not others:
            return str(first)
        return f"{first}; and {len(others)} more: {', '.join(dict.fromkeys(fault.key for fault in others))}"

    def with_sources(self, sources: Mapping[str, str]) -> "InvalidConfig":
        """The same faults, each with the place its value was written, found by its key or the nearest section."""
        return InvalidConfig([replace(item, source=item.source or _source(item.key, sources)) for item in self.faults])


def _source(key: str, sources: Mapping[str, str]) -> str | None:
    while key:
        if key in sources:
            return sources[key]
        key = key.rpartition(".")[0]
    return None


def show(value: Any) -> str:
    """A value as a user would type it, on one line, cut at 80 characters."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, float) and math.isinf(value):
        text = ".inf" if value > 0 else "-.inf"
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like a mistyped word, by its whole name or by its last part; None if nothing is near."""
    names = list(options)
    if near := difflib.get_close_matches(word, names, n=1, cutoff=0.7):
        return near[0]
    by_last_part = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = difflib.get_close_matches(word.rpartition(".")[2], by_last_part, n=1, cutoff=0.7)
    return by_last_part[near[0]] if near else None


def no_such_option(key: str, value: Any, options: Iterable[str]) -> Fault:
    """`algorithm=fedavgg: no such option; did you mean fedavg? (options: ...)`."""
    names = list(options)
    near = nearest(str(value), names)
    hint = f"; did you mean {near}?" if near else ""
    return Fault(key, f"no such option{hint} (options: {', '.join(names)})", value)
