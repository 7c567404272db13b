"""Can a private run learn at all? The size of its noise against the size of its signal, before any training.

One dial says it (ALGORITHMS, finding F1 and section B): R = the norm of all noise that T rounds add to the model, over
the largest distance that clipped contributions can carry it,

    R = sqrt(d sum_t s_t^2) / sum_t D_t,

s_t the standard deviation of the noise on one coordinate of round t's aggregate, D_t the most that round can move the
model, both in units of C (and of the learning rate, at level sample). C and the learning rate cancel. With the noise
of Eq. 16, sigma = sqrt(T/2) / kappa, kappa = sqrt(L + epsilon) - sqrt(L), L = ln(1/delta), T cancels as well:

    local     R = sqrt(d) / (kappa sqrt(2 K))          each of K clients protects its own upload
    central   R = sqrt(d) / (kappa sqrt(2) m)          the noise is on the sum of m uploads, all clients take part
    sample    R ~ sqrt(d) / (kappa sqrt(2 K) n)        DP-SGD on n examples in each of K clients

R is a heuristic, not an impossibility proof: later rounds can correct what earlier noise has spoilt. Measured on the
digits, 0.3 is nearly harmless, 1 costs a third of the accuracy, 3 two thirds, and 10 leaves chance.

Shapes: d parameters, K clients, m of them in a cohort, n examples of a client, T rounds.
"""

import math
from collections.abc import Sequence

HARMLESS, HEAVY, CHANCE = 0.3, 1.0, 10.0
"""Bounds of R between the verdicts."""

VERDICTS = {
    "nearly harmless": "the noise is small against what can be learnt",
    "costly": "expect to lose accuracy to the noise, the more the nearer R is to 1",
    "heavy loss": "the noise is as large as everything that can be learnt, or larger; expect to lose most accuracy",
    "hopeless": "the noise buries the signal; expect the accuracy of guessing",
    "no noise": "nothing is protected",
}
"""Verdict -> what to expect."""


def kappa(epsilon: float, delta: float) -> float:
    """sqrt(L + epsilon) - sqrt(L), L = ln(1/delta): what a budget is worth."""
    L = math.log(1 / delta)
    return epsilon / (math.sqrt(L + epsilon) + math.sqrt(L))  # the same without the subtraction's rounding


def upload_noise(d: int, multiplier: float) -> float:
    """Norm of the noise on one upload, in units of the clip bound: sqrt(d) z. The signal's norm is at most 1."""
    return math.sqrt(d) * multiplier


def mean_noise(d: int, multiplier: float, cohort: int) -> float:
    """Norm of the noise on the mean of m uploads that each protect themselves, in units of C: sqrt(d/m) z."""
    return math.sqrt(d / cohort) * multiplier


def local_dial(d: int, epsilon: float, delta: float, clients: int) -> float:
    """R of K clients that each protect their own upload, by Eq. 16; the same for every T, C and cohort size."""
    return math.sqrt(d / (2 * clients)) / kappa(epsilon, delta)


def central_dial(d: int, epsilon: float, delta: float, cohort: int) -> float:
    """R where the noise is on the sum of m uploads and all clients take part, by Eq. 16."""
    return math.sqrt(d / 2) / (kappa(epsilon, delta) * cohort)


def sample_dial(d: int, epsilon: float, delta: float, clients: int, examples: int) -> float:
    """R of DP-SGD on n examples in each of K clients, as if Poisson sampling at rate q divided the noise by 1/q."""
    return local_dial(d, epsilon, delta, clients) / examples


def dial(d: int, noises: Sequence[float], reaches: Sequence[float]) -> float:
    """R itself, from what is really added: sqrt(d sum_t s_t^2) / sum_t D_t.

    Args:
        d: number of parameters.
        noises: s_t >= 0, std of the noise on one coordinate of each round's aggregate, in units of C.
        reaches: D_t >= 0, the most each round can move the model, in units of C.

    Returns:
        R; infinite where there is noise and nothing can move, 0 where there is no noise.
    """
    noise, reach = math.sqrt(d * math.fsum(s * s for s in noises)), math.fsum(reaches)
    return noise / reach if reach else (math.inf if noise else 0.0)


def visit_noise(multiplier: float, steps: int, batch_size: float) -> tuple[float, float]:
    """(s, D) of one visit of N steps of DP-SGD in units of C lr: noise z sqrt(N)/B per coordinate, N steps of length 1.

    `batch_size` is the expected one, B = q n, by which the noisy sum is divided.
    """
    return multiplier * math.sqrt(steps) / batch_size, float(steps)


def aggregate_noise(parts: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """(s, D) of the weighted sum of a cohort's uploads, each with noise of its own: sqrt(sum (l_k s_k)^2), sum l_k D_k.

    Args:
        parts: (s_k, D_k) of each upload.
        weights: l_k of each.
    """
    noise = math.sqrt(math.fsum((w * s) ** 2 for w, (s, _) in zip(weights, parts, strict=True)))
    return noise, math.fsum(w * reach for w, (_, reach) in zip(weights, parts, strict=True))


def smallest_clients(ratio: float, clients: int, wanted: float) -> float:
    """The K at which R falls to `wanted`, each client taking part as often as now: K (R / wanted)^2."""
    return clients * (ratio / wanted) ** 2


def smallest_cohort(ratio: float, cohort: int, wanted: float) -> float:
    """The m at which R falls to `wanted` where the noise is on the sum, the federation growing alike: m R / wanted."""
    return cohort * ratio / wanted


def verdict(ratio: float) -> str:
    """One of VERDICTS for a dial R: nearly harmless up to 0.3, costly to 1, heavy loss below 10, then hopeless."""
    if ratio <= 0:
        return "no noise"
    if ratio <= HARMLESS:
        return "nearly harmless"
    if ratio <= HEAVY:
        return "costly"
    return "heavy loss" if ratio < CHANCE else "hopeless"
