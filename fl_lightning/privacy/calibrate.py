"""How much noise a budget asks for: the smallest noise multiplier whose whole release list stays within epsilon.

Multipliers are searched on the grid of five significant digits (0.97223, 21.118), which is 0.01 % fine or finer, so the
answer is one number, whatever the search began with. It is on the safe side, epsilon(answer) <= target, by the very
accountant that the ledger uses. Epsilon falls as the multiplier grows, so a bracket and a root search suffice.
"""

import math
from collections.abc import Callable, Sequence

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import check_delta, compose, epsilon
from fl_lightning.records import Release

CLOSENESS = 0.95  # the answer spends at least this share of the target
MARGIN = 1e-9  # kept of epsilon, relative: noise / sensitivity may round below the multiplier it was made from
SMALLEST, LARGEST = 1e-6, 1e9  # multipliers searched
PER_DECADE = 90_000  # numbers of five significant digits

Point = tuple[int, float]
"""A place on the grid, and ln(epsilon / target) there: above 0 where the multiplier is too small."""


def calibrate_noise(
    releases_for: Callable[[float], Sequence[Release]], target_epsilon: float, delta: float, start: float = 1.0
) -> float:
    """The smallest noise multiplier z for which everything in `releases_for(z)` costs at most `target_epsilon`.

    Args:
        releases_for: the whole list of what one client lets out in a run, if its noise multiplier were z.
        target_epsilon: the budget, above 0 and finite.
        delta: in (0, 1).
        start: where the search begins. A good guess makes it faster and changes nothing else.

    Returns:
        z with 0.95 * target <= epsilon(z) <= target.

    Raises:
        PrivacyError: a target that is not positive and finite; one that no multiplier reaches because other releases of
            the list, or the orders of the accountant, cost more; or one so large that no noise is needed.

    Example:
        >>> steps = lambda z: [Release("gaussian", "sample", 1.0, z, count=145, sampling="poisson", rate=64 / 1797)]
        >>> calibrate_noise(steps, target_epsilon=3.0, delta=1e-4)
        0.97223
    """
    if not 0 < target_epsilon < math.inf:
        raise PrivacyError(
            f"privacy.target_epsilon={target_epsilon} must be above 0 and finite (usual values are 0.5 to 10); "
            "to train without a target set privacy.noise_multiplier"
        )
    check_delta(delta)

    def at(k: int) -> Point:
        spent = epsilon(compose(releases_for(_multiplier(k))), delta)
        return k, math.log(max(spent, 1e-300) / target_epsilon / (1 - MARGIN))

    low, high = _bracket(at, _index(start), target_epsilon, delta)
    low, high = _narrow(at, low, high)
    if high[1] < math.log(CLOSENESS):
        spent = target_epsilon * math.exp(low[1])
        raise PrivacyError(
            f"privacy.target_epsilon={target_epsilon} cannot be met within 5 percent at privacy.delta={delta}: the "
            f"smallest epsilon above 0 that the accountant proves is {spent:.3g}; raise the target to that"
        )
    return _multiplier(high[0])


def calibrate_many(plans: Sequence[tuple[float, int]], target_epsilon: float, delta: float) -> list[float]:
    """Noise multipliers of sample-level DP-SGD for many clients, each with its own sampling rate and number of steps.

    Args:
        plans: one (rate, steps) per client: rate = batch size / samples of the client, counted as 1 when above it;
            steps = all its steps in the run. Equal plans are solved once; each different one takes about 10 ms.
        target_epsilon: the budget of every client.
        delta: in (0, 1).

    Returns:
        One noise multiplier per plan, in the order given.

    Raises:
        PrivacyError: as `calibrate_noise`; or a plan without steps.
    """
    plans = [(min(float(rate), 1.0), int(steps)) for rate, steps in plans]
    solved: dict[tuple[float, int], float] = {}
    guess = 1.0
    for rate, steps in sorted(set(plans)):  # neighbours need similar noise
        if steps < 1:
            raise PrivacyError(
                f"a client with {steps} private steps has no noise to solve for: leave it out of the plans"
            )

        def releases_for(z: float, rate: float = rate, steps: int = steps) -> list[Release]:
            return [Release("gaussian", "sample", 1.0, z, count=steps, sampling="poisson", rate=rate)]

        guess = solved[rate, steps] = calibrate_noise(releases_for, target_epsilon, delta, start=guess)
    return [solved[plan] for plan in plans]


def _multiplier(k: int) -> float:
    """The k-th number of five significant digits; k = 0 is 1.0000."""
    exponent, digits = divmod(k, PER_DECADE)
    return float(f"{digits + 10_000}e{exponent - 4}")


def _index(z: float) -> int:
    """The k of the number nearest to z."""
    mantissa, exponent = f"{z:.4e}".split("e")
    return int(exponent) * PER_DECADE + round(float(mantissa) * 10_000) - 10_000


def _bracket(at: Callable[[int], Point], start: int, target: float, delta: float) -> tuple[Point, Point]:
    """Two points, the first over the target and the second within it, by steps that grow from 10 % to a decade."""
    here = at(start)
    reach = math.log(1.1)
    while True:
        z = _multiplier(here[0]) * math.exp(math.copysign(reach, here[1]))
        if z > LARGEST:
            raise PrivacyError(
                f"privacy.target_epsilon={target} is out of reach at privacy.delta={delta}: with unlimited noise the "
                f"releases still cost {target * math.exp(here[1]):.4g}; raise the target, or the noise of the releases "
                "that do not follow the noise multiplier"
            )
        if z < SMALLEST:
            raise PrivacyError(
                f"privacy.target_epsilon={target} needs no noise: nothing is released that could cost as much; lower "
                "the target, or set privacy.noise_multiplier"
            )
        there = at(_index(z))
        if here[1] > 0 >= there[1]:
            return here, there
        if there[1] > 0 >= here[1]:
            return there, here
        here, reach = there, min(2 * reach, math.log(10))


def _narrow(at: Callable[[int], Point], low: Point, high: Point) -> tuple[Point, Point]:
    """The two neighbours on the grid with the target between them: secants in logs, every third step a bisection."""
    evaluations = 0
    while high[0] - low[0] > 1:
        evaluations += 1
        log_low, log_high = math.log(_multiplier(low[0])), math.log(_multiplier(high[0]))
        k = _index(math.exp(log_low + (log_high - log_low) * low[1] / (low[1] - high[1])))
        if evaluations % 3 == 0:
            k = (low[0] + high[0]) // 2
        here = at(min(max(k, low[0] + 1), high[0] - 1))
        low, high = (here, high) if here[1] > 0 else (low, here)
    return low, high
