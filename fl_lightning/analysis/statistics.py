"""Statistics over seeds: the mean, the sample standard deviation, Student's interval, a curve with its band."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One round of a curve over seeds.

    Attributes:
        round: the round's number, from 1.
        mean: mean over the seeds that measured this round.
        sd: their sample standard deviation; None for one seed.
        n: how many seeds measured it.
    """

    round: int
    mean: float
    sd: float | None
    n: int


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing. One value that is not finite makes it not finite, and is not hidden."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)
    return math.fsum(values) / len(values)


def sample_sd(values: Sequence[float]) -> float | None:
    """The sample standard deviation (divisor n - 1); None for fewer than two values.

    >>> round(sample_sd([1.0, 2.0, 4.0]), 6)
    1.527525
    """
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def confidence_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Student's interval for the mean, for normal values; None for fewer than two values.

    With two seeds the factor is 12.7 at 95 %: such an interval says how little two seeds tell.

    Args:
        values: one per seed.
        level: coverage, in (0, 1).

    Raises:
        ValueError: the level is not in (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}: needs a number between 0 and 1, such as 0.95")
    centre, spread = mean(values), sample_sd(values)
    if centre is None or spread is None:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, len(values) - 1)) * spread / math.sqrt(len(values))
    return centre - half, centre + half


def curve(histories: Iterable[Iterable[tuple[int, float]]]) -> list[Point]:
    """Mean and spread per round of several seeds' histories of (round, value); values that are not finite are left out.

    >>> curve([[(1, 0.5), (2, 0.7)], [(1, 0.6)]])[1]
    Point(round=2, mean=0.7, sd=None, n=1)
    """
    by_round: dict[int, list[float]] = {}
    for history in histories:
        for round, value in history:
            if math.isfinite(value):
                by_round.setdefault(round, []).append(value)
    points = []
    for round, values in sorted(by_round.items()):
        points.append(Point(round, math.fsum(values) / len(values), sample_sd(values), len(values)))
    return points
