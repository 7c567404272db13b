"""Epsilon by privacy loss distributions (PLD): tighter than Renyi differential privacy, and slower.

The privacy loss of a release is ln(P(x) / Q(x)) for x drawn from P, where P and Q are what two neighbours make the
release look like; losses of composed releases are sums of independent ones, so their distributions convolve. The
distributions are dp-accounting's (https://arxiv.org/abs/2207.04380), rounded so that every epsilon is an upper bound,
and Opacus' PRV accountant (https://arxiv.org/abs/2106.02848) is the cross-check.

One convention is easily got wrong. Both libraries are given noise over sensitivity, but dp-accounting's PLD doubles the
sensitivity by itself under replace-one, which its Renyi accountant does not do. A `Release` states the sensitivity
under its own neighbouring relation, and what is left then is the same pair N(0, z^2), N(1, z^2) for every relation. So
all events are composed under add/remove here, at the multiplier of the release. Sampling is another matter: only
Poisson sampling under add/remove or zero-out has a distribution here, and any other is refused by name.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import ADJACENCIES, ORDERS, PROVED, check_delta, check_release, curve, epsilon
from fl_lightning.privacy.segments import Segment
from fl_lightning.records import Release

RESOLUTION = 5e-5  # the width of the grid of losses, as a share of epsilon by Renyi differential privacy,
FEW, COARSENING = 4, 10.0  # and that many times wider where there are so many times FEW kinds of release, up to 10
PER_STEP = 0.04  # but no wider than so much of the spread of one sampled release's loss, or rounding adds up over steps
FINEST, FINEST_SHARE, SPREAD_SHARE = 1e-7, 1e-6, 5e-5

Counted = Mapping[Segment, int] | Sequence[Release]
"""Releases with their counts: those of a ledger (`Ledger.counts_of`), or a list that has not been recorded."""

Kind = tuple[str, float, float]
"""Mechanism, noise multiplier and sampling rate (1 without sampling)."""


def pld_epsilon(
    counted: Counted, delta: float, adjacency: str | None = None, *, interval: float | None = None
) -> float:
    """Epsilon of all `counted` releases together, at `delta`: an upper bound, within about 1e-3 of the exact value.

    Args:
        counted: the releases. Unsampled Gaussian ones are first merged into one, which is exact.
        delta: in (0, 1); below 1e-12 the mass that is cut off the distributions may make epsilon infinite.
        adjacency: the neighbouring relation the releases were recorded under; None takes it from a list of releases.
        interval: the width of the grid of losses; None takes `loss_interval`. Wider is quicker and a little larger.

    Returns:
        0.0 for no release, infinity when one had no noise. It takes 0.1 to 2 s, less when kinds of release repeat.

    Raises:
        PrivacyError: sampling without replacement, Poisson sampling under replace-one, or any other release that has no
            accountant.
    """
    check_delta(delta)
    kinds = _kinds(counted, adjacency, "PLD")
    if any(multiplier == 0 for _, multiplier, _ in kinds):
        return math.inf
    if not kinds:
        return 0.0
    interval = interval or _interval(kinds, delta)
    parts = [_composed(kind, n, interval) for kind, n in kinds.items()]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.compose(part)
    return max(float(whole.get_epsilon_for_delta(delta)), 0.0)


def prv_epsilon(counted: Counted, delta: float, adjacency: str | None = None, *, error: float = 0.01) -> float:
    """Epsilon of Gaussian releases, of all units or Poisson sampled, by Opacus' PRV accountant: a cross-check.

    Args:
        counted: the releases, as in `pld_epsilon`.
        delta: in (0, 1).
        adjacency: the neighbouring relation, as in `pld_epsilon`.
        error: how far above the truth, in epsilon, the result may lie; smaller is slower.

    Raises:
        PrivacyError: as `pld_epsilon`; a release that is not Gaussian, or an epsilon too large for Opacus (thousands).
    """
    check_delta(delta)
    kinds = _kinds(counted, adjacency, "PRV")
    for name, multiplier, _ in kinds:
        if name != "gaussian":
            raise PrivacyError(f"a release with mechanism={name} has no PRV accountant: use the accountant pld or rdp")
        if multiplier == 0:
            return math.inf
    if not kinds:
        return 0.0
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(multiplier, rate, n) for (_, multiplier, rate), n in kinds.items()]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # on the orders of a Renyi bound that only sizes the grid
        try:
            return float(accountant.get_epsilon(delta, eps_error=error))
        except (RuntimeError, ValueError) as problem:
            raise PrivacyError(
                f"Opacus' PRV accountant cannot count these releases ({problem}): use the accountant pld or rdp"
            ) from problem


def loss_interval(counted: Counted, delta: float, adjacency: str | None = None) -> float:
    """The width of the grid on which `pld_epsilon` counts these releases: a share of their Renyi epsilon."""
    return _interval(_kinds(counted, adjacency, "PLD"), delta)


def sampled_kinds(counted: Mapping[Segment, int]) -> int:
    """How many different sampled releases there are: what `pld_epsilon` takes most of its time for."""
    return len({(segment.noise_multiplier, segment.rate) for segment in counted if segment.sampling != "full"})


def _interval(kinds: Mapping[Kind, int], delta: float) -> float:
    total, spread = np.zeros(len(ORDERS)), math.inf
    for (mechanism, multiplier, rate), n in kinds.items():
        one = curve(mechanism, multiplier, "full" if rate == 1 else "poisson", rate)
        total += n * one
        if rate < 1 and n > 1:
            spread = min(spread, math.sqrt(2 * float(one[0])))  # its variance is about twice its mean, R(1)
    spent = min(epsilon(total, delta), 1e9)
    share = RESOLUTION * min(max(len(kinds) / FEW, 1.0), COARSENING)
    whole = math.sqrt(2 * min(float(total[0]), 1e12))  # the spread of the whole loss, where epsilon itself is near 0
    width = max(min(share * spent, PER_STEP * spread), FINEST_SHARE * spent, SPREAD_SHARE * whole, FINEST)
    return float(f"{width:.0e}")  # epsilons of one size share a grid, and with it the distributions kept below


def _kinds(counted: Counted, adjacency: str | None, accountant: str) -> dict[Kind, int]:
    """How often each kind of release was made; all unsampled Gaussian ones are one, with the sum of 1 / z^2."""
    if adjacency is not None and adjacency not in ADJACENCIES:
        raise PrivacyError(f"adjacency={adjacency!r} is not known: use one of {', '.join(ADJACENCIES)}")
    kinds: dict[Kind, int] = {}
    inverse = 0.0
    for item, n, relation in _items(counted, adjacency):
        if not n:
            continue
        full = item.sampling == "full" or item.rate >= 1
        if not full and (item.sampling != "poisson" or relation not in (None, *PROVED["poisson"])):
            under = f" and adjacency={relation}" if relation else ""
            raise PrivacyError(
                f"a release with sampling={item.sampling}{under} has no {accountant} accountant: use the accountant "
                "rdp, or sampling=poisson with adjacency=add_remove or zero_out, or sampling=full"
            )
        if full and item.mechanism == "gaussian":
            inverse += math.inf if item.noise_multiplier == 0 else n / item.noise_multiplier / item.noise_multiplier
            continue
        kind = (item.mechanism, item.noise_multiplier, 1.0 if full else item.rate)
        kinds[kind] = kinds.get(kind, 0) + n
    if inverse:
        kinds["gaussian", 1 / math.sqrt(inverse), 1.0] = 1
    return kinds


def _items(counted: Counted, adjacency: str | None) -> list[tuple[Segment | Release, int, str | None]]:
    """Each release or segment with its count and its neighbouring relation."""
    if isinstance(counted, Mapping):
        return [(segment, n, adjacency) for segment, n in counted.items()]
    for release in counted:
        check_release(release)
        if adjacency is not None and release.adjacency != adjacency:
            raise PrivacyError(f"a release with adjacency={release.adjacency} cannot be counted under {adjacency}")
    if len({release.adjacency for release in counted}) > 1:
        raise PrivacyError("releases under different neighbouring relations do not add: count each relation by itself")
    return [(release, int(release.count), release.adjacency) for release in counted]


@lru_cache(maxsize=32)
def _composed(kind: Kind, n: int, interval: float) -> Any:
    """dp-accounting's distribution of `n` such releases on a grid of losses of width `interval`."""
    one = _distribution(kind, interval)
    return one if n == 1 else one.self_compose(n)


@lru_cache(maxsize=64)
def _distribution(kind: Kind, interval: float) -> Any:
    """dp-accounting's distribution of one release."""
    from dp_accounting.pld import privacy_loss_distribution as library

    mechanism, multiplier, rate = kind
    if mechanism == "laplace":
        return library.from_laplace_mechanism(multiplier, value_discretization_interval=interval)
    return library.from_gaussian_mechanism(multiplier, value_discretization_interval=interval, sampling_prob=rate)
