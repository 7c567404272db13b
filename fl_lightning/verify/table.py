"""Rows of a verification: a statement, the largest difference found, and whether that is within its tolerance."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

MATTERS = 1e-6
"""Least difference, in the same unit, that a setting must make where the statement does not hold."""


@dataclass(frozen=True)
class Found:
    """What a check measured.

    Attributes:
        difference: largest absolute difference between what must be equal.
        contrast: the same difference with a setting changed so that they must differ; None where there is none. It
            guards against a statement that holds because the setting is not connected to anything.
    """

    difference: float
    contrast: float | None = None


@dataclass(frozen=True)
class Check:
    """One statement to be tested.

    Attributes:
        name: parts joined by "/", the first being the algorithm; each part selects on the command line.
        compares: the statement, in words.
        measure: runs the real code.
        tolerance: the largest difference allowed; 0 means bit for bit.
    """

    name: str
    compares: str
    measure: Callable[[], Found]
    tolerance: float = 1e-12


@dataclass(frozen=True)
class Row:
    """A check's outcome; `difference` is None when the check could not run, and `fault` then says why."""

    name: str
    compares: str
    difference: float | None
    tolerance: float
    contrast: float | None
    passed: bool
    fault: str | None
    seconds: float


def judge(check: Check) -> Row:
    """Runs a check. Whatever goes wrong in it fails the row, with the error's text; it never raises."""
    start = perf_counter()
    try:
        found = check.measure()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(check.name, check.compares, None, check.tolerance, None, False, text, perf_counter() - start)
    fault = None
    if not found.difference <= check.tolerance:  # also where it is NaN
        fault = "differs"
    elif found.contrast is not None and not found.contrast > MATTERS:
        fault = f"the setting that should matter changes nothing: {found.contrast:.1e}"
    seconds = perf_counter() - start
    passed = fault is None
    return Row(check.name, check.compares, found.difference, check.tolerance, found.contrast, passed, fault, seconds)


def judged(checks: Sequence[Check]) -> Iterator[Row]:
    """The rows one by one, as their checks end. They run on one thread, as `run` does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for check in checks:
            yield judge(check)
    finally:
        torch.set_num_threads(threads)


def chosen(checks: Sequence[Check], name: str | None) -> list[Check]:
    """The checks called `name`, or with it as one of their parts; all of them without a name."""
    return [check for check in checks if name in (None, check.name) or name in check.name.split("/")]


def line(row: Row, width: int) -> str:
    """One row as text; `width` is that of the longest name."""
    number = "-" if row.difference is None else f"{row.difference:.1e}"
    word = "pass" if row.passed else "FAIL"
    text = f"{word}  {row.name:<{width}}  {number:>7}  {row.tolerance:>5.0e}  {row.compares}"
    return text if row.fault is None else f"{text}  [{row.fault}]"


def heading(width: int) -> str:
    """Above the rows."""
    return f"{'':4}  {'':<{width}}  {'differ':>7}  {'limit':>5}"


def closing(rows: Sequence[Row]) -> str:
    """The last line."""
    failed = [row.name for row in rows if not row.passed]
    seconds = sum(row.seconds for row in rows)
    if failed:
        return f"{len(failed)} of {len(rows)} rows FAIL in {seconds:.0f} s: {', '.join(failed)}"
    return f"all {len(rows)} rows pass in {seconds:.0f} s"


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as plain values for JSON, which has neither NaN nor infinity: such a difference is written as text."""
    plain = [{key: _finite(value) for key, value in asdict(row).items()} for row in rows]
    return {"passed": all(row.passed for row in rows), "rows": plain}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
