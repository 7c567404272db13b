"""What it costs to release only the best of several private runs, where their number is drawn at random.

N. Papernot, T. Steinke: Hyperparameter tuning with Renyi differential privacy, ICLR 2022,
https://arxiv.org/abs/2110.03620. K is drawn, K runs are made that are independent and alike (each draws its own
hyper-parameters), and the one with the best score is released; nobody learns K or the other runs. If one run has the
RDP curve R, the whole has, at every order a > 1,

    truncated negative binomial, shape eta > -1 and stop 0 < g < 1                                          (Theorem 2)
        R'(a) = R(a) + (1 + eta) min over b of [ (1 - 1/b) R(b) + ln(1/g) / b ] + ln(E K) / (a - 1)
        P(K = k) proportional to (1 - g)^k prod_{l=0}^{k-1} (l + eta) / (l + 1),  k >= 1
        E K = eta (1/g - 1) / (1 - g^eta);    eta = 1 geometric, eta = 0 logarithmic: E K = (1/g - 1) / ln(1/g)

    Poisson with mean mu                                                                                    (Theorem 6)
        R'(a) = ln( e^{-mu} + mu e^{(a-1) (R(a) + mu d)} ) / (a - 1)
        d: one run is (ln(1 + 1/(a-1)), d)-differentially private.

Departure from Theorem 6, which has no e^{-mu}: with that probability no run is made. The answer "nothing" is an outcome
like any other, and without its part the bound would fall below zero for mu < 1. Both results are then lowered to the
least value at any higher order, since Renyi divergence does not fall with the order.
"""

import math

import numpy as np

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import ORDERS, Array, epsilon

ETA = {"geometric": 1.0, "logarithmic": 0.0}
"""Distribution -> its shape, where it has but one."""

DISTRIBUTIONS = ("poisson", *ETA, "negative_binomial")


def selection_curve(
    base_curve: Array,
    distribution: str,
    mean: float,
    orders: tuple[float, ...] = ORDERS,
    eta: float | None = None,
) -> Array:
    """RDP curve [A] of the best of a random number of runs.

    Args:
        base_curve: RDP curve [A] of one run, the choice of its hyper-parameters included: for hyper-parameters drawn
            from a public distribution, the pointwise largest curve of any of them will do.
        distribution: of the number of runs: "poisson", "geometric", "logarithmic" or "negative_binomial".
        mean: of the number of runs: at least 1, or above 0 for "poisson", which may draw 0.
        orders: the A orders, each above 1, rising.
        eta: shape of "negative_binomial", above -1.

    Raises:
        PrivacyError: an unknown distribution, a mean or a shape out of range.
    """
    shape = _shape(distribution, mean, eta)
    a, base = np.array(orders, dtype=np.float64), np.asarray(base_curve, dtype=np.float64)
    if base.shape != a.shape:
        raise PrivacyError(f"a curve of shape {base.shape} does not belong to {len(a)} orders")
    if shape is None:
        with np.errstate(over="ignore", invalid="ignore"):
            exponent = np.where(np.isinf(base), np.inf, (a - 1.0) * (base + mean * _hockey_stick(base, a)))
            found = np.logaddexp(-mean, math.log(mean) + exponent) / (a - 1.0)
    elif mean == 1:
        return base.copy()  # exactly one run
    else:
        stop = _log_inverse_stop(shape, mean)
        extra = (1.0 + shape) * np.min((1.0 - 1.0 / a) * base + stop / a)
        found = base + extra + math.log(mean) / (a - 1.0)
    lowered: Array = np.minimum.accumulate(found[::-1])[::-1]
    return lowered


def selection_epsilon(
    base_curve: Array,
    delta: float,
    *,
    distribution: str,
    mean: float,
    eta: float | None = None,
    orders: tuple[float, ...] = ORDERS,
) -> float:
    """Epsilon at `delta` of the best of a random number of runs; arguments and errors as `selection_curve`.

    Example:
        >>> from fl_lightning.privacy import epsilon, rdp
        >>> from fl_lightning.records import Release
        >>> one = rdp(Release("gaussian", "sample", 1.0, 4.0))
        >>> round(epsilon(one, 1e-5), 2), round(selection_epsilon(one, 1e-5, distribution="geometric", mean=20), 2)
        (1.01, 2.39)
    """
    return epsilon(selection_curve(base_curve, distribution, mean, orders, eta), delta, orders)


def draw_trials(
    distribution: str, mean: float, eta: float | None = None, seed: int | np.random.Generator | None = None
) -> int:
    """A number of runs from the distribution; 0 is possible for "poisson" alone.

    The bound holds only while the number stays unknown and no run is added or left out for what it found.

    Args:
        distribution: as in `selection_curve`.
        mean: as there.
        eta: as there.
        seed: a seed or a generator of NumPy; None draws from the system's entropy.

    Raises:
        PrivacyError: as `selection_curve`.
    """
    shape = _shape(distribution, mean, eta)
    source = np.random.default_rng(seed)
    if shape is None:
        return int(source.poisson(mean))
    left = float(source.random())
    if mean == 1:
        return 1
    stop = _log_inverse_stop(shape, mean)
    # P(K = 1) = (1 - g) eta / (g^-eta - 1), and P(K = k + 1) / P(K = k) = (1 - g) (k + eta) / (k + 1)
    log_going_on = math.log(-math.expm1(-stop))
    k, log_p = 1, log_going_on - _log_rise(-shape, stop)
    while left >= math.exp(log_p) and (log_p > -42 or k < mean):
        left -= math.exp(log_p)
        log_p += log_going_on + math.log((k + shape) / (k + 1))
        k += 1
    return k


def _shape(distribution: str, mean: float, eta: float | None) -> float | None:
    """eta of the truncated negative binomial, None for Poisson; refuses what has no meaning."""
    if distribution not in DISTRIBUTIONS:
        raise PrivacyError(
            f"selection.distribution={distribution!r} has no bound: use one of {', '.join(DISTRIBUTIONS)}"
        )
    if distribution == "poisson":
        if not 0 < mean < math.inf:
            raise PrivacyError(f"selection.mean={mean} must be above 0 and finite with distribution=poisson")
    elif not 1 <= mean < math.inf:
        raise PrivacyError(f"selection.mean={mean} must be at least 1 and finite with distribution={distribution}")
    if distribution != "negative_binomial":
        if eta is not None and eta != ETA.get(distribution):
            raise PrivacyError(f"selection.eta={eta} has no use with distribution={distribution}: leave it out")
        return ETA.get(distribution)
    if eta is None or not -1 < eta < math.inf:
        raise PrivacyError(f"selection.eta={eta} must be above -1 and finite with distribution=negative_binomial")
    return float(eta)


def _log_mean(eta: float, stop: float) -> float:
    """ln E K at g = e^-stop: E K = (e^stop - 1) eta / (1 - e^{-eta stop})."""
    return _log_rise(-1.0, stop) - _log_rise(eta, stop)


def _log_rise(c: float, x: float) -> float:
    """ln[(1 - e^{-c x}) / c] for x > 0, and ln x where c is 0, without overflow."""
    size = abs(c) * x
    if size < 1e-300:
        return math.log(x)
    return math.log(-math.expm1(-size) / abs(c)) + (size if c < 0 else 0.0)


def _log_inverse_stop(eta: float, mean: float) -> float:
    """ln(1/g) of the truncated negative binomial with this mean above 1, rounded up."""
    from scipy.optimize import brentq

    low, high, wanted = 1e-12, 1.0, math.log(mean)
    if _log_mean(eta, low) >= wanted:
        return low
    while _log_mean(eta, high) < wanted:
        high *= 2.0
    root = brentq(lambda stop: _log_mean(eta, stop) - wanted, low, high, xtol=1e-14, rtol=1e-14, maxiter=500)
    return float(root) * (1 + 1e-12)


def _hockey_stick(base: Array, a: Array) -> Array:
    """d [A] for which the curve proves (ln(1 + 1/(a-1)), d)-differential privacy, at every order a.

    By the same conversions as `accountants.epsilon`, solved for delta, each at its best order.
    """
    wanted = np.log1p(1.0 / (a - 1.0))
    with np.errstate(over="ignore"):
        log_delta = (a - 1.0) * (base - wanted[:, None] + np.log1p(-1.0 / a)) - np.log(a)
    total_variation = math.sqrt(-math.expm1(-float(base.min())))
    found: Array = np.minimum(np.exp(np.minimum(log_delta.min(axis=1), 0.0)), total_variation)
    return found
