"""Field types: numbers that are numbers however they were written, and paths that mean the start folder.

YAML 1.1 reads `1e-3` as text and `1e3` as a float; a command line gives text; Ray Tune samples NumPy scalars. All of
them arrive here as plain `int` and `float`. True and false are no numbers, and NaN is never one.
"""

import math
import numbers
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_INFINITIES = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf}


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values never change after they were validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, ser_json_inf_nan="constants")


def to_float(value: Any) -> float:
    """Reads a number; raises ValueError for anything else, for true/false and for NaN."""
    if isinstance(value, str):
        text = value.strip().lower()
        try:
            number = _INFINITIES[text] if text in _INFINITIES else float(text)
        except ValueError:
            raise ValueError("needs a number") from None
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        raise ValueError("needs a number")
    if math.isnan(number):
        raise ValueError("needs a number")
    return number


def to_int(value: Any) -> int:
    """Reads a whole number (`1e3` is one, `16.5` is not); raises ValueError for anything else."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)
    try:
        number = to_float(value)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError("needs a whole number")
    return int(number)


def to_text(value: Any) -> Any:
    """Lets a name made of digits only (`tracking.experiment=2026`) be text; leaves the rest to pydantic."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def to_path(value: Any) -> Path:
    """Makes a path absolute: `~` is the home folder, a relative path starts at the folder the program started in."""
    value = to_text(value)
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError("needs a path")
    return Path(os.path.abspath(Path(value).expanduser()))


def to_tracking_uri(value: Any) -> Any:
    """Makes the path of a SQLite address, or a plain path, absolute; leaves the addresses of servers alone."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("needs an address")
    sqlite = re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^?:][^?]*)(.*)", value)
    if sqlite:
        return f"{sqlite[1]}{to_path(sqlite[2])}{sqlite[3]}"
    is_path = ":" not in value and not value.startswith("databricks")
    return str(to_path(value)) if is_path else value


LARGEST = 1e30
"""The largest magnitude of a setting, which a 32-bit number can still hold."""


def _finite(value: float) -> float:
    if math.isinf(value):
        raise ValueError("needs a finite number")
    if abs(value) > LARGEST:
        raise ValueError(f"needs a number of at most {LARGEST:g}")
    return value


LONGEST = 2**31 - 1
"""The largest count: what a 32-bit index can hold."""


def _countable(value: int) -> int:
    if value > LONGEST:
        raise ValueError(f"needs a whole number of at most {LONGEST}")
    return value


Int = Annotated[int, BeforeValidator(to_int)]
Count = Annotated[Int, AfterValidator(_countable), Field(ge=1)]
Seed = Annotated[Int, Field(ge=0, le=2**63 - 1)]

Real = Annotated[float, BeforeValidator(to_float), AfterValidator(_finite)]
Positive = Annotated[Real, Field(gt=0)]
NonNegative = Annotated[Real, Field(ge=0)]
Share = Annotated[Real, Field(gt=0, le=1)]
Part = Annotated[Real, Field(ge=0, lt=1)]
"""A share that leaves something."""
Decay = Annotated[Real, Field(ge=0, lt=1)]
"""A factor below 1, so that the past fades."""
PositiveOrInfinite = Annotated[float, BeforeValidator(to_float), Field(gt=0)]

Text = Annotated[str, BeforeValidator(to_text)]
Name = Annotated[Text, Field(min_length=1)]
AbsolutePath = Annotated[Path, BeforeValidator(to_path)]
TrackingUri = Annotated[str, BeforeValidator(to_tracking_uri)]
