r"""Renyi differential privacy of one subsampled Gaussian release, to the accuracy of the floats it is made of.

Poisson sampling: I. Mironov, K. Talwar, L. Zhang: Renyi differential privacy of the sampled Gaussian mechanism, 2019,
https://arxiv.org/abs/1908.10530 (Theorems 4 and 5, Section 3.3). For neighbours under add/remove, sampling rate q,
noise multiplier z and order a > 1:

    R(a) = ln A(a) / (a - 1),     A(a) = E_{x ~ N(0, z^2)} [ (1 + y(x))^a ],     y(x) = q (e^{(2x - 1) / (2 z^2)} - 1).

Two ways to A(a) - 1, both sums of non-negative terms, so that nothing cancels when A is close to 1:

    a integer:     sum_{j=2}^{a} C(a, j) (1-q)^{a-j} q^j (e^{(j^2 - j) / (2 z^2)} - 1)            (Section 3.3, minus 1)
    any a:         E [ (1 + y)^a - 1 - a y ],                                                      because E[y] = 0.

Departure from the libraries, which sum A itself: they lose the small A - 1 to cancellation (large z, small q), and
their series for fractional orders converges slowly or not at all below order 2 (dp-accounting drops such orders);
Opacus' binomials overflow above order 1029. Here a fractional order is the trapezoidal rule on the whole line, which
converges geometrically for this integrand, and all orders are computed at once: about 1 ms a curve, not 10 to 250 ms.

Fixed-size batches without replacement, neighbours that replace one unit: Y.-X. Wang, B. Balle, S. P. Kasiviswanathan,
Subsampled Renyi differential privacy and analytical moments accountant, AISTATS 2019,
https://arxiv.org/abs/1808.00087. With the likelihood ratio L = N(1, z^2) / N(0, z^2), for whole orders a >= 2:

    A(a) <= 1 + sum_{j=2}^{a} C(a, j) q^j min( 4 sqrt(B_{2 floor(j/2)} B_{2 ceil(j/2)}), 2 e^{(j^2 - j) / (2 z^2)} )
    B_l = E_{N(0, z^2)} [ (L - 1)^l ]                          (Theorems 9 and 27; B_l is the l-th forward difference)

and for orders between, ln A by linear interpolation (Corollary 10). This is a bound, unlike the formula for Poisson
sampling, and above the unsampled curve where q is near 1; since a mixture diverges no more than its worst part, the
smaller of the two is taken. Departure from dp-accounting: the differences B_l, of size z^-l, come from the same
trapezoidal rule and not from subtractions that lose every digit at large z; and orders above 256 keep the first half of
the minimum. A curve takes 2 ms (70 ms for a new
multiplier between 10 and 30), not 1.5 s.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HALF_WIDTH = 12.0  # of a Gaussian bump, in standard deviations: what lies outside is below e^-64 of what lies inside
SMALLEST_MULTIPLIER = 5e-3  # below it (epsilon above 20000) the convexity bound replaces the quadrature
LARGEST_MULTIPLIER = 1e9  # more noise than that is accounted for as that: R is below 1e-14 already
ORDERS_PER_BLOCK = 10


def sampled_gaussian_rdp(rate: float, multiplier: float, orders: tuple[float, ...]) -> Array:
    """RDP [A] of one release at each of the A `orders` (all > 1), for 0 < `rate` < 1 and `multiplier` > 0."""
    if multiplier < SMALLEST_MULTIPLIER:
        return _convexity_bound(rate, multiplier, np.array(orders))
    multiplier = min(multiplier, LARGEST_MULTIPLIER)
    log_excess = np.empty(len(orders))  # ln(A - 1)
    whole = np.array([float(order).is_integer() for order in orders])
    order_array = np.array(orders, dtype=np.float64)
    if whole.any():
        log_excess[whole] = _integer_orders(rate, multiplier, tuple(int(a) for a in order_array[whole]))
    fractional = np.flatnonzero(~whole)
    # few orders at a time: the integrand's bump for order a sits at a / z, and a block needs all its bumps in one grid
    size = len(fractional) if multiplier > 0.3 else ORDERS_PER_BLOCK
    for start in range(0, len(fractional), max(size, 1)):
        block = fractional[start : start + size]
        log_excess[block] = _any_orders(rate, multiplier, order_array[block])
    return np.logaddexp(0.0, log_excess) / (order_array - 1.0)


@lru_cache(maxsize=16)
def _binomials(orders: tuple[int, ...]) -> tuple[NDArray[np.int64], Array, NDArray[np.int64], NDArray[np.int64]]:
    """For j = 2..a of every order a, laid end to end: j, ln C(a, j), a; and where each order starts."""
    from scipy.special import gammaln

    lengths = np.array(orders) - 1
    j = np.concatenate([np.arange(2, order + 1) for order in orders])
    a = np.repeat(np.array(orders), lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return j, gammaln(a + 1.0) - gammaln(j + 1.0) - gammaln(a - j + 1.0), a, starts


def _integer_orders(rate: float, multiplier: float, orders: tuple[int, ...]) -> Array:
    """ln(A - 1) by the binomial sum of Section 3.3."""
    j, log_binomial, a, starts = _binomials(orders)
    t = (j * (j - 1.0)) / (2.0 * multiplier**2)
    log_expm1 = t + np.log(-np.expm1(-t))  # ln(e^t - 1) without overflow
    terms = log_binomial + (a - j) * math.log1p(-rate) + j * math.log(rate) + log_expm1
    top = np.maximum.reduceat(terms, starts)
    lengths = np.diff(np.append(starts, len(terms)))
    return top + np.log(np.add.reduceat(np.exp(terms - np.repeat(top, lengths)), starts))


def _any_orders(rate: float, multiplier: float, orders: Array) -> Array:
    """ln(A - 1) by the trapezoidal rule in u = x / z; orders [A], nodes [U].

    (1 + y)^a - 1 - a y is at most a constant times (y^2 + |y|^a), so the integrand has at most three bumps: at u = 0,
    at 2 / z and at a / z. Its nearest singularities lie at |Im u| = pi z: a step of z / 2 errs by e^{-4 pi^2}, and the
    Gaussian itself by e^{-2 pi^2 / step^2}.
    """
    step = min(multiplier / 2.0, 0.5)
    centres = [(0.0, 0.0), (2.0 / multiplier, 2.0 / multiplier), (orders.min() / multiplier, orders.max() / multiplier)]
    nodes = [
        np.arange(math.floor((low - HALF_WIDTH) / step), math.ceil((high + HALF_WIDTH) / step) + 1)
        for low, high in centres
    ]
    u = np.unique(np.concatenate(nodes)) * step
    x = u / multiplier - 0.5 / multiplier**2
    log_one_plus_y = np.logaddexp(math.log1p(-rate), math.log(rate) + x)
    y = rate * np.expm1(np.minimum(x, 700.0))  # used only where it is small; the cap keeps it finite
    log_terms = _log_bernoulli(y, log_one_plus_y, orders[:, None]) - u**2 / 2.0
    top = log_terms.max(axis=1)
    scale = math.log(step) - 0.5 * math.log(2.0 * math.pi)
    return top + np.log(np.exp(log_terms - top[:, None]).sum(axis=1)) + scale


def _log_bernoulli(y: Array, log_one_plus_y: Array, a: Array) -> Array:
    """ln((1 + y)^a - 1 - a y) >= -inf (Bernoulli's inequality); a Taylor series where |y| is small. Shape [A, U]."""
    small = np.abs(y) < 1e-2
    result = np.empty(np.broadcast_shapes(a.shape, y.shape))
    near, far = y[small], log_one_plus_y[~small]
    series = np.zeros((a.shape[0], near.size))
    for k in range(12, 1, -1):  # y^2 [ C(a,2) + C(a,3) y + ... ] by Horner, C(a,k+1) / C(a,k) = (a - k) / (k + 1)
        series = 1.0 + series * near * (a - k) / (k + 1)
    with np.errstate(divide="ignore"):
        result[:, small] = np.log(a * (a - 1) / 2.0) + np.log(series) + 2.0 * np.log(np.abs(near))
    tangent = (a - (a - 1.0) * np.exp(-far)) * np.exp((1.0 - a) * far)  # (1 + a y) / (1 + y)^a, below 1
    result[:, ~small] = a * far + np.log1p(-tangent)
    return result


def fixed_size_gaussian_rdp(rate: float, multiplier: float, orders: tuple[float, ...]) -> Array:
    """RDP [A] of one release without replacement at each of the A `orders` (all > 1), 0 < `rate` < 1, `multiplier` > 0.

    `rate` is the batch's share of the units, m / n; `multiplier` is noise over the sensitivity under replace-one, 2C.
    """
    a = np.array(orders, dtype=np.float64)
    with np.errstate(over="ignore"):
        unsampled = a / (2.0 * multiplier) / multiplier
    if multiplier < SMALLEST_MULTIPLIER:
        return unsampled
    below, above = np.maximum(np.floor(a), 1.0), np.ceil(a)
    whole = tuple(int(order) for order in np.unique(np.concatenate([below, above])) if order >= 2)
    log_terms = _fixed_size_terms(min(multiplier, LARGEST_MULTIPLIER), whole[-1])
    j, log_binomial, _, starts = _binomials(whole)
    terms = log_binomial + j * math.log(rate) + log_terms[j]
    top = np.maximum.reduceat(terms, starts)
    lengths = np.diff(np.append(starts, len(terms)))
    log_excess = top + np.log(np.add.reduceat(np.exp(terms - np.repeat(top, lengths)), starts))
    log_a = dict(zip((1, *whole), (0.0, *np.logaddexp(0.0, log_excess)), strict=True))
    low, high = np.array([log_a[x] for x in below]), np.array([log_a[x] for x in above])
    return np.minimum((low + (a - below) * (high - low)) / (a - 1.0), unsampled)


@lru_cache(maxsize=64)
def _fixed_size_terms(multiplier: float, largest: int) -> Array:
    """ln of the minimum in Theorem 27 for j = 0..`largest` (the first two are not used), without C(a, j) q^j."""
    j = np.arange(largest + 1)
    whole_ratio = math.log(2.0) + j * (j - 1.0) / (2.0 * multiplier**2)
    # once j e^{-j / z^2} is below ln 2 the first half of the minimum is the larger one: (1 - 1/L)^j > 1/2 at the bump
    needed = largest if multiplier > 30 else int(multiplier**2 * 10) + 8
    even = np.arange(2, min(needed, largest) + 2, 2)
    log_b = np.full(largest + 3, np.inf)
    log_b[even] = _log_even_moments(multiplier, even)
    ratio_less_one = math.log(4.0) + 0.5 * (log_b[j // 2 * 2] + log_b[(j + 1) // 2 * 2])
    return np.minimum(ratio_less_one, whole_ratio)


def _log_even_moments(multiplier: float, powers: NDArray[np.int64]) -> Array:
    """ln E[(L - 1)^l] for every even l of `powers`, by the trapezoidal rule in u = x / z (an entire integrand).

    The integrand's bumps lie within sqrt(l) of 0 where L is near 1, and between there and l / z where it is not.
    """
    reach = math.sqrt(powers[-1])
    step = min(multiplier / 2.0, 0.5)
    low, high = -(reach + HALF_WIDTH) / step, (max(reach, powers[-1] / multiplier) + HALF_WIDTH) / step
    u = np.arange(math.floor(low), math.ceil(high) + 1) * step
    x = u / multiplier - 0.5 / multiplier**2
    with np.errstate(divide="ignore"):
        log_distance = np.where(x > 30, x, np.log(np.abs(np.expm1(np.minimum(x, 30.0)))))
    log_terms = powers[:, None] * log_distance - u**2 / 2.0
    top = log_terms.max(axis=1)
    scale = math.log(step) - 0.5 * math.log(2.0 * math.pi)
    return top + np.log(np.exp(log_terms - top[:, None]).sum(axis=1)) + scale


def _convexity_bound(rate: float, multiplier: float, orders: Array) -> Array:
    """An upper bound on R: (1 - q + q e^x)^a <= 1 - q + q e^{ax} (convex), so A <= 1 - q + q e^{(a^2-a)/(2 z^2)}."""
    with np.errstate(over="ignore", divide="ignore"):
        exponent = orders * (orders - 1.0) / (2.0 * multiplier) / multiplier
    return np.logaddexp(math.log1p(-rate), math.log(rate) + exponent) / (orders - 1.0)
