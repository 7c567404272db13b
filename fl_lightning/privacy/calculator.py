"""Epsilon from noise, and noise from epsilon, for one repeated Gaussian release: the command line's calculators.

The noise multiplier here is z = noise std / C, C the clip bound, at every adjacency. Replacing a unit can move a
clipped vector from +C u to -C u: at replace_one the sensitivity is 2C, and the accountants count z / 2.
"""

import math
from collections.abc import Callable
from typing import Any

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import check_delta, compose, epsilon, gaussian_epsilon_exact
from fl_lightning.privacy.calibrate import SMALLEST, calibrate_noise
from fl_lightning.privacy.ledger import finite_or_none
from fl_lightning.records import REACH, Release

SAMPLINGS = ("full", "poisson", "without_replacement")
ACCOUNTANTS = ("rdp", "pld", "all")

CLOSE, AIM, SEARCHES = 0.96, 0.98, 20
"""A search with PLD, which is slow, aims at the second share of the target and ends at the first, or after so many."""


def steps_release(multiplier: float, steps: int, rate: float, sampling: str | None, adjacency: str) -> Release:
    """The release that is counted: `steps` Gaussian releases of noise z C each.

    Args:
        multiplier: z >= 0, noise std / C.
        steps: how many.
        rate: the share of the units in each; above 1 counts as 1 (CASES H22).
        sampling: None takes "full" at rate 1; below it what the adjacency has a proof for, without_replacement at
            replace_one and poisson otherwise.
        adjacency: the neighbouring relation.

    Raises:
        PrivacyError: an adjacency that is not known, a rate that is not positive or that `sampling` would ignore.
    """
    if adjacency not in REACH:
        raise PrivacyError(f"adjacency={adjacency}: not known; use one of {', '.join(REACH)}")
    if sampling is not None and sampling not in SAMPLINGS:
        raise PrivacyError(f"sampling={sampling}: not known; use one of {', '.join(SAMPLINGS)}")
    if not rate > 0:
        raise PrivacyError(f"rate={rate:g}: must be above 0, the share of the units in one step")
    if 0 < multiplier < SMALLEST:
        raise PrivacyError(
            f"noise multiplier {multiplier:g}: is too small to protect anything; use at least {SMALLEST:g}"
        )
    rate = min(1.0, rate)
    if sampling == "full" and rate < 1:
        raise PrivacyError(f"rate={rate:g}: would be ignored with sampling=full; leave one of the two out")
    if rate == 1:
        sampling = "full"
    elif sampling is None:
        sampling = "without_replacement" if adjacency == "replace_one" else "poisson"
    return Release(
        mechanism="gaussian",
        unit="sample",
        sensitivity=REACH[adjacency],
        noise=multiplier,
        count=steps,
        sampling=sampling,  # type: ignore[arg-type]
        rate=rate,
        adjacency=adjacency,
    )


def spent(
    multiplier: float,
    steps: int,
    *,
    delta: float,
    rate: float = 1.0,
    sampling: str | None = None,
    adjacency: str = "add_remove",
    accountant: str = "rdp",
) -> dict[str, Any]:
    """What `steps` releases with noise multiplier z cost, as JSON.

    Returns:
        `epsilon` (by `accountant`; by RDP, the ledger's, for "all"; None if infinite, and `infinite` says so), `delta`,
        `noise_multiplier`, `accountant_multiplier` (noise over sensitivity), `steps`, `rate`, `sampling`, `adjacency`,
        `accountant`, and `readings`: `rdp`, `pld`, `exact` (of full participation, which no accountant can be below),
        None where it was not asked for or is not known.

    Raises:
        PrivacyError: what has no meaning or no proof.
    """
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"accountant={accountant}: not known; use one of {', '.join(ACCOUNTANTS)}")
    check_delta(delta)
    release = steps_release(multiplier, steps, rate, sampling, adjacency)
    readings = {"rdp": epsilon(compose([release]), delta)}
    if accountant in ("pld", "all"):
        from fl_lightning.privacy.pld import pld_epsilon

        try:
            readings["pld"] = pld_epsilon([release], delta)
        except PrivacyError:
            if accountant == "pld":
                raise  # with "all", a reading that is not known is left out
    if release.sampling == "full":
        readings["exact"] = gaussian_epsilon_exact(release.noise_multiplier, steps, delta)
    chosen = readings["pld" if accountant == "pld" else "rdp"]
    return {
        "epsilon": finite_or_none(chosen),
        "infinite": math.isinf(chosen),
        "delta": delta,
        "noise_multiplier": multiplier,
        "accountant_multiplier": release.noise_multiplier,
        "steps": steps,
        "rate": release.rate,
        "sampling": release.sampling,
        "adjacency": adjacency,
        "accountant": accountant,
        "readings": {
            name: None if (value := readings.get(name)) is None else finite_or_none(value)
            for name in ("rdp", "pld", "exact")
        },
    }


def needed(
    target_epsilon: float,
    steps: int,
    *,
    delta: float,
    rate: float = 1.0,
    sampling: str | None = None,
    adjacency: str = "add_remove",
    accountant: str = "rdp",
) -> dict[str, Any]:
    """The smallest noise multiplier that keeps `steps` releases within a budget, as JSON.

    By RDP, the ledger's accountant, for "rdp" and "all"; by PLD for "pld".

    Returns:
        `target_epsilon`, and all that `spent` says of the multiplier found.

    Raises:
        PrivacyError: a target that is not positive, or one that cannot be met.
    """

    def at(z: float) -> list[Release]:
        return [steps_release(z, steps, rate, sampling, adjacency)]

    def reading(z: float) -> dict[str, Any]:
        return spent(z, steps, delta=delta, rate=rate, sampling=sampling, adjacency=adjacency, accountant=accountant)

    multiplier = calibrate_noise(at, target_epsilon, delta)
    if accountant == "pld":
        multiplier = _lowered(lambda z: reading(z)["epsilon"] or math.inf, multiplier, target_epsilon)
    return {"target_epsilon": target_epsilon, **reading(multiplier)}


def _lowered(epsilon_of: Callable[[float], float], enough: float, target: float) -> float:
    """A smaller multiplier that a tighter accountant still finds within the target, and close to it.

    Epsilon falls about as a power of the multiplier, so the line through two points in logarithms meets the target
    soon; the search stops within CLOSE of it.
    """
    value = epsilon_of(enough)
    if value > target:
        raise PrivacyError(f"target_epsilon={target:g}: PLD needs more noise than RDP's {enough:.5g}; raise the target")
    high, low = (math.log(enough), value), (math.log(enough), value)
    while low[1] <= target:  # a bracket: epsilon grows at least as fast as the multiplier falls
        if low[1] >= CLOSE * target:
            return math.exp(low[0])
        high, below = low, low[0] + math.log(low[1] / target)
        low = below, epsilon_of(math.exp(below))
    for _ in range(SEARCHES):
        if high[1] >= CLOSE * target:
            break
        aim = math.log(AIM * target)
        slope = (math.log(low[1]) - math.log(high[1])) / (low[0] - high[0])
        z = float(f"{math.exp(high[0] + (aim - math.log(high[1])) / slope):.4e}")
        here = math.log(z), epsilon_of(z)
        high, low = (here, low) if here[1] <= target else (high, here)
    return float(f"{math.exp(high[0]):.12g}")
