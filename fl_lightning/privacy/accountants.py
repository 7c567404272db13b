"""What a release costs: Renyi differential privacy (RDP) curves, and their conversion to (epsilon, delta).

RDP: I. Mironov, Renyi differential privacy, CSF 2017, https://arxiv.org/abs/1702.07476. A mechanism has the curve R
when its outputs on any two neighbours have Renyi divergence of order a at most R(a); curves of adaptively composed
releases add (Proposition 1). One release with noise multiplier z = noise / sensitivity costs

    Gaussian, all units in it      R(a) = a / (2 z^2)                                            (Corollary 3)
    Gaussian, Poisson sampled      `sampled_gaussian`                                            (Mironov et al. 2019)
    Gaussian, fixed-size batches   `sampled_gaussian`                                               (Wang et al. 2019)
    Laplace, e0 = 1 / z            R(a) = ln[ a/(2a-1) e^{(a-1) e0} + (a-1)/(2a-1) e^{-a e0} ] / (a-1)   (Proposition 6)

A Gaussian or Laplace release of all units holds under the neighbouring relation its sensitivity is stated for. Poisson
sampling is proved for add/remove and zero-out, where the two neighbours' batches are N(0, z^2) and its mixture with
N(1, z^2); sampling without replacement for replace-one, where the number of units is public. Any other pair is refused
by name. Amplification by sampling holds only while nobody who sees the release knows who was drawn.

Shapes: A orders, K curves. Natural logarithms throughout.
"""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.sampled_gaussian import fixed_size_gaussian_rdp, sampled_gaussian_rdp
from fl_lightning.records import Release

Array = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *(float(x) for x in range(11, 64)),
    *(float(round(2 ** (x / 8))) for x in range(48, 97)),
)
"""Opacus' and dp-accounting's default orders 1.1 to 63, then eight per octave to 4096.

The best order is near 1 + 2 ln(1/delta) / epsilon: orders that stop at 63 make any epsilon below about 0.35 loose.
"""

ADJACENCIES = ("add_remove", "zero_out", "replace_one")

PROVED = {
    "full": ADJACENCIES,
    "poisson": ("add_remove", "zero_out"),
    "without_replacement": ("replace_one",),
}
"""Sampling -> the neighbouring relations under which its amplification has a proof."""

REMEDY = {
    "poisson": "use adjacency=add_remove or zero_out, or sampling=without_replacement or full",
    "without_replacement": "use adjacency=replace_one, or sampling=poisson or full",
}


def check_release(release: Release) -> None:
    """Refuse a release that cannot be accounted for.

    Raises:
        PrivacyError: an unknown mechanism, sampling or adjacency; a negative or undefined noise, sensitivity or count;
            a pair without a proof (sampling with Laplace noise, Poisson sampling under replace-one, sampling without
            replacement under add/remove or zero-out).
    """
    known = {"mechanism": ("gaussian", "laplace"), "sampling": tuple(PROVED), "adjacency": ADJACENCIES}
    for key, values in known.items():
        value = getattr(release, key)
        if value not in values:
            raise PrivacyError(f"release.{key}={value!r} has no accountant: use one of {', '.join(values)}")
    if not release.sensitivity > 0:
        raise PrivacyError(
            f"release.sensitivity={release.sensitivity} must be above 0 (declare no release for what no data enters)"
        )
    if not 0 <= release.noise < math.inf:
        raise PrivacyError(f"release.noise={release.noise} must be finite and at least 0 (0 means no privacy)")
    if not release.count >= 0 or release.count % 1:
        raise PrivacyError(f"release.count={release.count} must be a whole number of at least 0")
    if release.sampling == "full":
        if release.rate != 1:
            raise PrivacyError(
                f"release.rate={release.rate} with sampling=full: the rate must be 1, or sampling poisson "
                "or without_replacement"
            )
        return
    if not release.rate > 0:
        raise PrivacyError(f"release.rate={release.rate} must be above 0: the share of the units in one batch")
    if release.adjacency not in PROVED[release.sampling]:
        raise PrivacyError(
            f"release.sampling={release.sampling} with adjacency={release.adjacency} has no proof here: "
            f"{REMEDY[release.sampling]}"
        )
    if release.mechanism != "gaussian":
        raise PrivacyError(
            f"release.sampling={release.sampling} with mechanism={release.mechanism} has no proof here: use gaussian, "
            "or sampling=full"
        )


def rdp(release: Release, orders: tuple[float, ...] = ORDERS) -> Array:
    """RDP curve [A] of ONE such release (its `count` is not applied); infinite where there is no noise.

    A sampling rate of 1 or more means that every unit is in every batch: it is accounted as sampling "full".

    Raises:
        PrivacyError: as `check_release`.
    """
    check_release(release)
    return curve(release.mechanism, release.noise_multiplier, release.sampling, release.rate, orders)


@lru_cache(maxsize=8192)
def curve(
    mechanism: str,
    multiplier: float,
    sampling: str = "full",
    rate: float = 1.0,
    orders: tuple[float, ...] = ORDERS,
) -> Array:
    """The memo behind `rdp`: the RDP curve [A] (read-only) by noise multiplier, sampling and its rate alone."""
    a = np.array(orders, dtype=np.float64)
    if multiplier == 0:
        result = np.full(len(a), np.inf)
    elif mechanism == "laplace":
        result = np.array([_laplace_rdp(1.0 / multiplier, order) for order in orders])
    elif sampling == "full" or rate >= 1:
        with np.errstate(over="ignore"):
            result = a / (2.0 * multiplier) / multiplier
    elif sampling == "without_replacement":
        result = fixed_size_gaussian_rdp(rate, multiplier, orders)
    else:
        result = sampled_gaussian_rdp(rate, multiplier, orders)
    result.flags.writeable = False
    return result


def _laplace_rdp(e0: float, a: float) -> float:
    """Mironov 2017, Proposition 6, for order a > 1 and pure epsilon e0 > 0."""
    if (a - 1) * e0 >= 1:
        return e0 + math.log1p((a - 1) / (2 * a - 1) * math.expm1((1 - 2 * a) * e0)) / (a - 1)
    # the terms of first order in e0 cancel exactly, so leave them out instead of subtracting them
    excess = (a * _exp_minus_tangent((a - 1) * e0) + (a - 1) * _exp_minus_tangent(-a * e0)) / (2 * a - 1)
    return math.log1p(excess) / (a - 1)


def _exp_minus_tangent(x: float) -> float:
    """e^x - 1 - x."""
    if abs(x) > 0.5:
        return math.expm1(x) - x
    return math.fsum(x**k / math.factorial(k) for k in range(2, 18))


def compose(releases: Iterable[Release], orders: tuple[float, ...] = ORDERS) -> Array:
    """RDP curve [A] of all `releases` together, each `count` times (Mironov 2017, Proposition 1)."""
    total = np.zeros(len(orders))
    for release in releases:
        cost = rdp(release, orders)
        if release.count:
            total = total + release.count * cost
    return total


def epsilon(rdp_curve: Array, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """The smallest epsilon that the curve [A] proves at `delta`; 0 for no cost, infinite where there is no noise.

    Improved conversion (Balle et al. 2020, https://arxiv.org/abs/1905.09982, Theorem 21; Canonne, Kamath and Steinke
    2020, https://arxiv.org/abs/2004.00010, Proposition 12; also in Opacus and dp-accounting):

        epsilon = min over a of  R(a) + ln(1 - 1/a) - ln(delta a) / (a - 1),  and at least 0;

    and 0 already when some R(a) <= -ln(1 - delta^2), since total variation <= sqrt(1 - e^{-KL}) and KL <= R(a)
    (Bretagnolle and Huber; also in dp-accounting).

    Raises:
        PrivacyError: `delta` is not in (0, 1).
    """
    return float(epsilons(np.asarray(rdp_curve)[None, :], delta, orders)[0])


def epsilons(rdp_curves: Array, delta: float, orders: tuple[float, ...] = ORDERS) -> Array:
    """`epsilon` of every row of `rdp_curves` [K, A]: shape [K]."""
    check_delta(delta)
    a = np.array(orders, dtype=np.float64)
    offset = np.log1p(-1.0 / a) - np.log(delta * a) / (a - 1.0)
    best = np.maximum((rdp_curves + offset).min(axis=1), 0.0)
    return np.where(rdp_curves.min(axis=1) <= -math.log1p(-(delta**2)), 0.0, best)


def check_delta(delta: float) -> None:
    """Refuse a delta outside (0, 1) with a PrivacyError."""
    if not 0 < delta < 1:
        raise PrivacyError(f"privacy.delta={delta} must be above 0 and below 1; below 1/n for n protected units")


def gaussian_delta_exact(multiplier: float, count: int, epsilon: float) -> float:
    """The exact delta at `epsilon` >= 0 of `count` Gaussian releases of all units, noise multiplier z > 0 each.

    Balle and Wang 2018, https://arxiv.org/abs/1805.06530, Theorem 8, with mu = sqrt(count) / z:

        delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
    """
    if count == 0:
        return 0.0
    return math.exp(_log_delta(math.sqrt(count) / multiplier, epsilon))


def gaussian_epsilon_exact(multiplier: float, count: int, delta: float) -> float:
    """The exact epsilon at `delta` of `count` Gaussian releases of all units: the root of `gaussian_delta_exact`.

    No accountant can report less, and the RDP value is above it by 5 to 15 percent; infinite without noise.

    Raises:
        PrivacyError: `delta` is not in (0, 1), or `multiplier` or `count` is negative.
    """
    from scipy.optimize import brentq

    check_delta(delta)
    if not (multiplier >= 0 and count >= 0):
        raise PrivacyError(f"noise multiplier {multiplier} and count {count} must both be at least 0")
    if count == 0:
        return 0.0
    if multiplier == 0:
        return math.inf
    mu = math.sqrt(count) / multiplier
    if _log_delta(mu, 0.0) <= math.log(delta):
        return 0.0
    above = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1.0  # by RDP with the basic conversion
    root = brentq(lambda eps: _log_delta(mu, eps) - math.log(delta), 0.0, above, xtol=1e-14, rtol=1e-14, maxiter=500)
    return float(root)


def _log_delta(mu: float, epsilon: float) -> float:
    """ln of Balle and Wang's delta; the difference is taken in logs, where neither term under- or overflows."""
    from scipy.special import log_ndtr

    first, second = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(first + np.log(-np.expm1(min(second - first, -1e-300))))
