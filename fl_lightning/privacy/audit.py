"""How much privacy a run can have had at most: a lower bound on epsilon from guessing which canaries took part.

Each of m canaries enters the run by a fair coin of its own. Whoever sees only what the run released ranks the canaries
by a score and guesses r of them: the top half in, the bottom half out. Let V be the number of right guesses. The scores
may be anything computed from the released values; r must not depend on the coins.

(1) Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023, https://arxiv.org/abs/2305.08846,
    Theorem 5.2. If the run is (e, d)-DP for one canary in or out, then with W ~ Binomial(r, 1 / (1 + exp(-e)))
        P[V >= v]  <=  P[W >= v] + 2 m d max_{1 <= i <= v} P[v - i <= W < v] / i
(2) Mahloujifar, Melis, Chaudhuri: Auditing f-Differential Privacy in One Run, ICML 2025,
    https://arxiv.org/abs/2410.22235. A ledger claims more than one pair: its Renyi curve R gives an e(d) for every d,
    so P(A | in) <= h(P(A | out)) and the reverse for every event A, with the concave h(x) = min over d of
    exp(e) x + d and 1 - exp(-e) (1 - d - x). Take a random canary j and the event "j is guessed, and at least c - 1 of
    the others rightly". Its parts with a right and with a wrong guess of j differ by j's coin alone, so for every c,
        sum_{i >= c} (i/m) P[V = i]  <=  h( sum_{i >= c - 1} ((r - i)/m) P[V = i] )
    P[V >= v] = t together with all of these may ask for more than the whole probability: then t is refuted. The least
    they ask for is found from c = v down, putting each time as little mass as the inequality needs at c - 1: mass at a
    higher i would add more to the left and less to the right of every inequality that follows.

    epsilon_lower        epsilon at delta of the curve c R, for the largest c that (2) refutes: what a run of the
                         claimed kind spends at least, noise smaller by sqrt(c). c >= 1: the claim itself is refuted
    epsilon_lower_any    by (1) at delta alone: whatever the run's curve looks like, and smaller

Several r share the error probability evenly. Beside the bounds stands the point estimate of Andrew et al., One-shot
Empirical Privacy Estimation for Federated Learning, ICLR 2024, https://arxiv.org/abs/2302.03098: the scores of canaries
in and out are taken for two Gaussians, whose exact epsilon at delta is the estimate. It is no bound: by chance it lies
above or below.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import check_delta, epsilon, gaussian_epsilon_exact

Array = NDArray[np.float64]

CONFIDENCE = 0.95
SHARES = (1.0, 0.5, 0.25)
"""Shares of the canaries that are guessed; the others are abstained from."""

METHOD = "one-run audit of the claimed privacy curve by canary guesses (arXiv 2410.22235)"
DELTAS = (0.5, 0.4, 0.25, 0.15, *(10.0 ** (-x / 4) for x in range(3, 41)))
"""The d at which a claimed curve is read, 0.5 to 1e-10."""

RESOLUTION, MOST = 0.02, 40.0  # the grid of epsilons tried, and its end
LEAST_SCALE, MOST_SCALE = 1e-4, 1e4  # multiples of the claimed curve that are tried


@dataclass(frozen=True)
class AuditResult:
    """What the audit of one run found.

    Attributes:
        epsilon_lower: lower bound on the run's epsilon at `delta` if its curve is a multiple of the claimed one.
        epsilon_lower_any: lower bound without that condition.
        epsilon_claimed: what the ledger says; infinite without noise.
        epsilon_estimate: point estimate from two fitted Gaussians, None where it cannot be formed; it refutes nothing.
        epsilon_ceiling: what epsilon_lower would be, every guess being right.
        refuted: whether the claim itself is refuted: the run released more than it says.
        confidence: of each bound: it is too large with probability at most 1 - `confidence`.
        delta: at which all epsilons are stated.
        canaries: m, all canaries.
        included: canaries whose coin came up in.
        guessed: canaries guessed in the way that gave the bound.
        correct: guesses that were right.
        method: how the bound is proven.
    """

    epsilon_lower: float
    epsilon_lower_any: float
    epsilon_claimed: float
    epsilon_estimate: float | None
    epsilon_ceiling: float
    refuted: bool
    confidence: float
    delta: float
    canaries: int
    included: int
    guessed: int
    correct: int
    method: str = METHOD

    @property
    def note(self) -> str | None:
        """What a reader should know of an audit that could not have failed."""
        if self.epsilon_ceiling > self.epsilon_claimed:
            return None
        return (
            f"{self.canaries} canaries can show at most epsilon = {self.epsilon_ceiling:.3g}, not above the claimed "
            f"{self.epsilon_claimed:.3g}: this audit cannot fail; raise privacy.audit_canaries"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite epsilon is None."""
        found = {key: None if value == math.inf else value for key, value in asdict(self).items()}
        return found | {"note": self.note}

    def check(self) -> None:
        """Refuse a run whose claim is refuted.

        Raises:
            PrivacyError: with both numbers.
        """
        if self.refuted:
            raise PrivacyError(
                f"privacy.audit: the run released more than it claims: epsilon is at least {self.epsilon_lower:.4g} "
                f"(confidence {self.confidence:g}: {self.correct} of {self.guessed} guesses about {self.canaries} "
                f"canaries are right), and {self.epsilon_claimed:.4g} is claimed at delta={self.delta:g}; its clipping "
                "or its noise is broken: do not publish the model, and mend the mechanism"
            )


def p_value(canaries: int, guessed: int, correct: int, epsilon: float, delta: float) -> float:
    """The right side of (1): the most probable that `correct` or more right guesses can be, in [0, 1].

    Args:
        canaries: m >= 1.
        guessed: r in 0..m, fixed ahead.
        correct: v in 0..r.
        epsilon: at least 0.
        delta: in [0, 1].
    """
    from scipy.stats import binom

    if correct == 0:
        return 1.0
    right = 1.0 / (1.0 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guessed, right))
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guessed, right))  # P[v - i <= W < v], i = 1..v
    steepest = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2.0 * canaries * delta * steepest)


@dataclass(frozen=True)
class Pairs:
    """(epsilon, delta) pairs [P], all of which a run claims to keep: its trade-off between right and wrong guesses."""

    epsilon: Array
    delta: Array

    def least(self, right: float) -> float:
        """The smallest x with h(x) >= `right`, see (2)."""
        first = (right - self.delta) * np.exp(-self.epsilon)
        second = 1.0 - self.delta - np.exp(np.minimum(self.epsilon, 700.0)) * (1.0 - right)
        return max(float(first.max(initial=0.0)), float(second.max(initial=0.0)))


def pairs_of(rdp_curve: Array) -> Pairs:
    """What a Renyi curve [A] claims at DELTAS; deltas without a finite epsilon are left out."""
    found = [(epsilon(rdp_curve, d), d) for d in DELTAS]
    finite = [(e, d) for e, d in found if math.isfinite(e)]
    return Pairs(np.array([e for e, _ in finite]), np.array([d for _, d in finite]))


def improbable(pairs: Pairs, canaries: int, guessed: int, correct: int, level: float) -> bool:
    """Whether `correct` or more right guesses have a probability below `level` in a run that keeps `pairs`, by (2)."""
    right, wrong = level * correct / canaries, level * (guessed - correct) / canaries
    for c in range(correct, 0, -1):
        more = pairs.least(right) - wrong
        if more > 0:
            right, wrong = right + more * (c - 1) / (guessed - c + 1), wrong + more
        if (right + wrong) * canaries > guessed:
            return True
    return False


def guess(scores: Array, included: NDArray[np.bool_], guessed: int) -> int:
    """Right guesses when the `guessed` // 2 lowest of `scores` [m] are called out and as many (or one more) highest in.

    Ties are broken by position, which is independent of the coins.
    """
    order = np.argsort(scores, kind="stable")
    low = guessed // 2
    high = guessed - low
    return int((~included[order[:low]]).sum() + included[order[len(order) - high :]].sum())


def audit(
    scores: Sequence[float] | Array,
    included: Sequence[bool] | NDArray[np.bool_],
    rdp_curve: Array,
    delta: float,
    confidence: float = CONFIDENCE,
) -> AuditResult:
    """What the scores of the canaries say of a run that claims `rdp_curve`.

    Args:
        scores: one number per canary [m], larger the more it looks included; one that is no number counts as 0.
        included: the coins [m].
        rdp_curve: the claimed Renyi curve over `accountants.ORDERS` [A]; infinite where there is no noise.
        delta: in (0, 1).
        confidence: in (0, 1).

    Raises:
        PrivacyError: no canary, scores and coins of different number, or a delta outside (0, 1).
    """
    ranked, coins = np.nan_to_num(np.asarray(scores, dtype=np.float64)), np.asarray(included, dtype=bool)
    m, curve = len(coins), np.asarray(rdp_curve, dtype=np.float64)
    if len(ranked) != m or not m:
        raise PrivacyError(f"an audit needs one score per canary and at least one: {len(ranked)} for {m}")
    check_delta(delta)
    counts = [max(1, round(share * m)) for share in SHARES]
    guesses = [(r, guess(ranked, coins, r)) for r in counts]
    level = (1.0 - confidence) / len(counts)
    claimed = pairs_of(curve)
    lower = [curve_bound(m, r, v, curve, delta, level) for r, v in guesses]
    best = max(range(len(counts)), key=lambda i: (lower[i], guesses[i][1] / guesses[i][0]))
    return AuditResult(
        epsilon_lower=lower[best],
        epsilon_lower_any=max(refuted_epsilon(m, r, v, delta, level) for r, v in guesses),
        epsilon_claimed=epsilon(curve, delta),
        epsilon_estimate=gaussian_estimate(ranked[coins], ranked[~coins], delta),
        epsilon_ceiling=max(curve_bound(m, r, r, curve, delta, level) for r in counts),
        refuted=any(improbable(claimed, m, r, v, level) for r, v in guesses),
        confidence=confidence,
        delta=delta,
        canaries=m,
        included=int(coins.sum()),
        guessed=guesses[best][0],
        correct=guesses[best][1],
    )


def refuted_epsilon(canaries: int, guessed: int, correct: int, delta: float, level: float) -> float:
    """The epsilon below which every one is refuted at `level` by so many right guesses; 0 when none is."""

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guessed, correct, epsilon, delta) <= level

    if not refuted(0.0):
        return 0.0
    low = 0.0
    while low < MOST and refuted(low + RESOLUTION):  # the first epsilon that stands, though p need not be monotone
        low += RESOLUTION
    return _bisect(refuted, low, low + RESOLUTION)


def curve_bound(canaries: int, guessed: int, correct: int, rdp_curve: Array, delta: float, level: float) -> float:
    """Epsilon at `delta` of the largest multiple of `rdp_curve` refuted at `level`; 0 for none, or without a curve."""

    def refuted(log_scale: float) -> bool:
        return improbable(pairs_of(math.exp(log_scale) * rdp_curve), canaries, guessed, correct, level)

    low, high = math.log(LEAST_SCALE), math.log(MOST_SCALE)
    if not np.isfinite(rdp_curve).any() or not refuted(low):
        return 0.0
    return epsilon(math.exp(high if refuted(high) else _bisect(refuted, low, high)) * rdp_curve, delta)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The end of the part of [low, high] where `holds`, from a `low` where it does; to 1e-5 of the interval."""
    for _ in range(17):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def gaussian_estimate(inside: Sequence[float] | Array, outside: Sequence[float] | Array, delta: float) -> float | None:
    """Epsilon at `delta` between the Gaussians fitted to the scores of canaries in and out; None for under two each.

    Both are given one common variance: at a delta of 1e-5 two fitted variances would let their own error decide.
    """
    a, b = np.asarray(inside, dtype=np.float64), np.asarray(outside, dtype=np.float64)
    if len(a) < 2 or len(b) < 2:
        return None
    spread = math.sqrt((a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)) / (len(a) + len(b) - 2))
    apart = float(a.mean() - b.mean())
    if not apart > 0:
        return 0.0
    return gaussian_epsilon_exact(spread / apart, 1, delta)
