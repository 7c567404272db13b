"""The accounting formulas that papers print, kept for comparison; the ledger never uses them.

Eq. 6    sigma >= (D/eps) sqrt(2 ln(1.25/delta))                       proved for eps <= 1 only
Eq. 16   eps = min_q [ T q/(2 sigma^2) + ln(1/delta)/(q - 1) ] + eps_scalars
             = T/(2 sigma^2) + sqrt(2 T L)/sigma + eps_scalars,  L = ln(1/delta), q* = 1 + sigma sqrt(2 L/T)
         sigma = sqrt(T/2) / (sqrt(L + eps) - sqrt(L))
"""

import math


def classical_sigma(sensitivity: float, epsilon: float, delta: float) -> float:
    """The classical Gaussian mechanism's noise, SAM-ADPFL Eq. 6. Above epsilon = 1 the true delta can be larger."""
    return sensitivity / epsilon * math.sqrt(2 * math.log(1.25 / delta))


def eq16_epsilon(sigma: float, rounds: int, delta: float, epsilon_scalars: float = 0.0) -> float:
    """SAM-ADPFL Eq. 16 at its minimum over q: sensitivity C, T releases, the scalars counted once."""
    L = math.log(1 / delta)
    return rounds / (2 * sigma**2) + math.sqrt(2 * rounds * L) / sigma + epsilon_scalars


def eq16_sigma(epsilon: float, rounds: int, delta: float) -> float:
    """The sigma_base at which Eq. 16 without scalars gives `epsilon`."""
    L = math.log(1 / delta)
    return math.sqrt(rounds / 2) / (math.sqrt(L + epsilon) - math.sqrt(L))


def scaled_noise_divergence(dimension: int, std_ratio: float, order: float) -> float:
    """D_a(N(0, r^2 I_d) || N(0, I_d)): what a noise level that depends on private data gives away by itself.

    d [ -ln r + ln(1/(a + (1 - a) r^2)) / (2 (a - 1)) ], infinite where a + (1 - a) r^2 <= 0. Theorem 1 leaves it out.
    """
    mixed = order + (1 - order) * std_ratio**2
    if mixed <= 0:
        return math.inf
    return dimension * (-math.log(std_ratio) - math.log(mixed) / (2 * (order - 1)))
