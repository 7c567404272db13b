"""Noise that a trusted server adds to the sum of a cohort, and the fixed denominators it needs.

    w <- w + eta_g ( sum_k lambda_k clip(Delta_k, C_k) + N(0, nu^2 I) ),    nu = z max_k lambda_k C_k

Client j enjoys the multiplier nu / (lambda_j C_j) >= z. With lambda_k = 1/m this is z C on the sum. Where cohorts are
secret Poisson samples of rate q the weights are 1/(q K), never one over the number that came: that number is private.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fl_lightning.records import Aggregate, Message, ServerState
from fl_lightning.rng import gaussian, generator
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule


def everyone(messages: Sequence[Message]) -> list[float]:
    """p_k = 1 for every client of the cohort, also for one without data: whether it has any is private."""
    return [1.0] * len(messages)


def for_the_sum(aggregate: Aggregator, expected: float | None = None, noise_cohort: int | None = None) -> Aggregator:
    """`aggregate` with the noise that the server owes it, in `Aggregate.noise`.

    Args:
        aggregate: the weighted sum of clipped uploads, each with its `owed` noise z C_k.
        expected: the fixed denominator of uniform weights, q K; None keeps the weights, which sum to one.
        noise_cohort: scales the noise down to that of a cohort of this size, at least the real one.
    """

    def collect(messages: Sequence[Message]) -> Aggregate:
        folded = aggregate(messages)
        if folded.empty:
            return folded if expected is None else replace(folded, notes=())
        scale = 1.0 if expected is None else len(messages) / expected
        owed = max(w * scale * m.owed for w, m in zip(folded.weights, messages, strict=True))
        cohort = len(messages) if expected is None else expected
        owed *= cohort / max(cohort, noise_cohort or 0)
        vectors = {name: v if scale == 1.0 else v * scale for name, v in folded.vectors.items()}
        return replace(folded, vectors=vectors, weights=tuple(w * scale for w in folded.weights), noise=owed)

    return collect


def of_models(rule: ServerRule) -> ServerRule:
    """`rule` where clients upload their models: what counts is the distance of their mean from the server's model."""

    def distance(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty:
            return rule(server, aggregate)
        vectors = {**aggregate.vectors, "delta": aggregate.vectors["delta"] - server.w}
        return rule(server, replace(aggregate, vectors=vectors))

    return distance


def noised(rule: ServerRule, seed: int, alone: Callable[[ServerState], float] | None = None) -> ServerRule:
    """`rule` after the owed noise was added to "delta".

    Args:
        rule: what the server does with the noised sum.
        seed: the run's.
        alone: the noise of a round to which nobody came, where that must not show; None: such a round changes nothing.
    """

    def noised_rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        if aggregate.empty and alone is not None:
            aggregate = replace(aggregate, vectors={"delta": torch.zeros_like(server.w)}, noise=alone(server))
        if aggregate.noise:
            noise = generator(seed, "central", server.round + 1)
            delta = aggregate.vectors["delta"]
            vectors = {**aggregate.vectors, "delta": delta + gaussian(delta, aggregate.noise, noise)}
            aggregate = replace(aggregate, vectors=vectors, noise=0.0)
        return rule(server, aggregate)

    return noised_rule
