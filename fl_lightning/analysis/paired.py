"""Tests over seeds in pairs: does one setting beat another on the same seeds and the same partitions?

The rule, fixed before any number is seen:

    fewer than 3 pairs   no p-value at all
    3 to 9 pairs         the paired t test. With n pairs no signed-rank test has a p-value below 2 / 2^n: 0.25 for 3
                         pairs, 0.0625 for 5, so it could never find anything where seeds are few
    10 pairs or more     Wilcoxon's signed-rank test, which supposes no normal distribution

Effect size: Cohen's d_z = mean of the differences / their sample standard deviation. `seeds_needed` asks how many pairs
a two-sided paired t test would take to find such an effect with probability 0.8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fl_lightning.analysis.statistics import mean, sample_sd

FEWEST = 3
"""Pairs from which there is a p-value."""
SIGNED_RANKS_FROM = 10
LEVEL, POWER = 0.05, 0.8
MOST_SEEDS = 9999
ROUNDING = 1e-12
"""A spread below this share of the values is rounding, not spread."""

NEEDS_MORE = "needs more seeds"
EQUAL = "equal for every seed"
CONSTANT = "the same difference for every seed"
NOT_FINITE = "a value is not finite"


@dataclass(frozen=True)
class Paired:
    """What n pairs say of `first - second`.

    Attributes:
        n: how many pairs.
        difference: mean of the differences; None of no pair.
        test: "t" or "wilcoxon"; None where none was made.
        p: two-sided, of this comparison alone.
        p_holm: p after Holm's correction for all comparisons of one table; None until `holm`.
        effect: Cohen's d_z; None where there is no spread to measure it by.
        needed: pairs for power 0.8; None where it cannot be told or is above 9999.
        words: why there is no p-value; empty where there is one.
    """

    n: int
    difference: float | None
    test: Literal["t", "wilcoxon"] | None = None
    p: float | None = None
    p_holm: float | None = None
    effect: float | None = None
    needed: int | None = None
    words: str = ""


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Compares two settings pair by pair, by the module's rule.

    Args:
        first: one value per seed.
        second: the other setting's, in the order of the same seeds.

    Raises:
        ValueError: they differ in length.

    >>> paired([0.5, 0.6], [0.4, 0.4]).words
    'needs more seeds'
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need equally many values, not {len(first)} and {len(second)}")
    values = [*first, *second]
    if not all(map(math.isfinite, values)):
        return Paired(len(first), None, words=NOT_FINITE)
    differences = [a - b for a, b in zip(first, second, strict=True)]
    centre, spread = mean(differences), sample_sd(differences)
    if len(differences) < FEWEST or centre is None or spread is None:
        return Paired(len(differences), centre, words=NEEDS_MORE)
    if spread <= ROUNDING * max(map(abs, values)):
        words = EQUAL if abs(centre) <= ROUNDING * max(map(abs, values)) else CONSTANT
        return Paired(len(differences), centre, words=words)
    from scipy import stats

    if len(differences) < SIGNED_RANKS_FROM:
        test: Literal["t", "wilcoxon"] = "t"
        p = float(stats.ttest_rel(first, second).pvalue)
    else:
        test, p = "wilcoxon", float(stats.wilcoxon(_cleaned(differences, values)).pvalue)
    return Paired(len(differences), centre, test=test, p=p, effect=centre / spread)


def _cleaned(differences: Sequence[float], values: Sequence[float]) -> list[float]:
    """Differences in which rounding makes no ranks: 0.3 - 0.2 and 0.2 - 0.1 are tied."""
    digits = 12 - math.ceil(math.log10(max(map(abs, values))))
    return [round(difference, digits) for difference in differences]


def holm(found: Sequence[Paired]) -> list[Paired]:
    """Corrects the p-values of one table's comparisons (Holm 1979) and says how many seeds each would need.

    The i-th smallest of m p-values becomes max over j <= i of (m - j + 1) p_(j), at most 1. `needed` is at the level
    0.05 / m, the strictest of the procedure.

    >>> one = Paired(3, 0.1, p=0.01, effect=2.0)
    >>> [round(item.p_holm, 3) for item in holm([one, replace(one, p=0.04), replace(one, p=0.03)])]
    [0.03, 0.06, 0.06]
    """
    tested = sorted((item.p, place) for place, item in enumerate(found) if item.p is not None)
    corrected, largest = list(found), 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        effect = found[place].effect
        needed = None if effect is None else seeds_needed(effect, LEVEL / len(tested))
        corrected[place] = replace(found[place], p_holm=largest, needed=needed)
    return corrected


def seeds_needed(effect: float, level: float = LEVEL, power: float = POWER) -> int | None:
    """The fewest pairs, at least 3, for which a two-sided paired t test finds an effect d_z with probability `power`.

    P(|T| > t_{1 - level/2, n-1}) with T noncentral t of n - 1 degrees of freedom and noncentrality |d_z| sqrt(n).

    Returns:
        None above 9999, and for an effect of 0.

    >>> seeds_needed(1.0), seeds_needed(0.5)
    (10, 34)
    """
    if effect == 0 or _power(effect, MOST_SEEDS, level) < power:
        return None
    low, high = FEWEST - 1, MOST_SEEDS  # power(low) < wanted <= power(high), taking 2 pairs for too few
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(effect, middle, level) >= power else (middle, high)
    return high


def _power(effect: float, n: int, level: float) -> float:
    from scipy import stats

    bound, shift = float(stats.t.ppf(1 - level / 2, n - 1)), abs(effect) * math.sqrt(n)
    if shift > bound + 38:
        return 1.0  # the noncentral distribution's own numbers give out far beyond
    # The lower tail as the upper one of its mirror image: scipy's cdf is not a number this far out.
    return float(stats.nct.sf(bound, n - 1, shift) + stats.nct.sf(bound, n - 1, -shift))
