"""Aggregators: a cohort's messages -> one Aggregate. Messages are folded in cohort order.

    mean         Delta = sum_k lambda_k Delta_k,    lambda_k = p_k / sum_j p_j
    sharpness    lambda_k = p_k exp(-mu G_k) / sum_j p_j exp(-mu G_j),   G = L_worst - L_std      SAM-ADPFL Eq. 12

p_k = n_k, or 1 when the sizes are private. A client that took no step weighs nothing, whatever its size.
Buffers (BatchNorm statistics): floating ones are averaged with the same weights; integers and booleans take the
element-wise maximum, so a batch counter becomes that of the longest-trained client.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.errors import FLError
from fl_lightning.records import Aggregate, Message

Aggregator = Callable[[Sequence[Message]], Aggregate]
PriorWeights = Callable[[Sequence[Message]], list[float]]


def by_samples(messages: Sequence[Message]) -> list[float]:
    """p_k = n_k, 0 for a client that took no step.

    Raises:
        FLError: a client reports a negative number of samples.
    """
    for message in messages:
        if message.num_samples < 0:
            raise FLError(f"client {message.client} reports num_samples={message.num_samples}; it must be >= 0")
    return [float(message.num_samples) if message.steps else 0.0 for message in messages]


def uniform(messages: Sequence[Message]) -> list[float]:
    """p_k = 1, 0 for a client without data or steps."""
    return [1.0 if samples else 0.0 for samples in by_samples(messages)]


def normalised(log_weights: Sequence[float]) -> list[float]:
    """softmax of log weights (log-sum-exp); -inf is weight zero. Empty when no weight is positive."""
    top = max(log_weights, default=-torch.inf)
    if top == -torch.inf:
        return []
    scaled = torch.tensor([value - top for value in log_weights], dtype=torch.float64).exp()
    return (scaled / scaled.sum()).tolist()


def sharpness_weights(
    prior: Sequence[float], gaps: Sequence[float], mu: float, bound: float | None = None
) -> list[float]:
    """lambda of Eq. 12 for prior weights p_k >= 0, sharpness gaps G_k and temperature mu >= 0.

    Invariant to rescaling p and to shifting all gaps. Empty when every prior weight is zero. With `bound`, gaps are
    first clipped to [0, bound], so that no noise on them can lift a weight ratio beyond (p_i/p_j) e^{mu bound}. A gap
    that is not finite (training diverged) weighs nothing.
    """
    gap = torch.tensor(gaps, dtype=torch.float64)
    prior = [p if math.isfinite(g) else 0.0 for p, g in zip(prior, gaps, strict=True)]
    gap = torch.where(torch.isfinite(gap), gap, 0.0)
    if bound is not None:
        gap = gap.clamp(0.0, bound)
    logs = torch.tensor(prior, dtype=torch.float64).log() - mu * gap
    return normalised(logs.tolist())


def mean(prior: PriorWeights = by_samples) -> Aggregator:
    """The weighted mean of the uploads."""

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        weights = torch.tensor(prior(messages), dtype=torch.float64)
        total = float(weights.sum())
        return fold(messages, (weights / total).tolist() if total else [])

    return aggregate


def sharpness(mu: float, prior: PriorWeights = by_samples, bound: float | None = None) -> Aggregator:
    """Sharpness-weighted mean; G_k is a message's scalar "gap", or else its "loss_worst" - "loss_std"."""

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        prior_weights = prior(messages)
        gaps = [gap_of(m) if p else 0.0 for m, p in zip(messages, prior_weights, strict=True)]
        return fold(messages, sharpness_weights(prior_weights, gaps, mu, bound))

    return aggregate


def gap_of(message: Message) -> float:
    """G_k as the client reported it."""
    scalars = message.scalars
    return scalars["gap"] if "gap" in scalars else scalars["loss_worst"] - scalars["loss_std"]


def fold(messages: Sequence[Message], weights: Sequence[float]) -> Aggregate:
    """sum_k lambda_k v_k of every named vector, in the order given; an empty aggregate for no weights."""
    if not weights:
        idle = all(not message.steps for message in messages)
        why = "no client of the cohort trained on any data" if idle else "no client's upload has a weight"
        return Aggregate(vectors={}, weights=(), notes=(f"no update: {why}",))
    counted = [(m, lam) for m, lam in zip(messages, weights, strict=True) if lam > 0]
    pairs = zip(messages, weights, strict=True)
    skipped = tuple(
        f"client {m.client} took no step and weighs 0" for m, lam in pairs if not (m.steps or lam or m.releases)
    )
    vectors = {name: _weighted([(m.vectors[name], lam) for m, lam in counted]) for name in counted[0][0].vectors}
    return Aggregate(vectors, tuple(weights), fold_buffers([(m.buffers, lam) for m, lam in counted]), skipped)


def fold_buffers(parts: Sequence[tuple[Mapping[str, Tensor], float]]) -> dict[str, Tensor]:
    """Buffers of a cohort under the rule above; type and shape of every entry are kept."""
    result: dict[str, Tensor] = {}
    for name, first in parts[0][0].items():
        tensors = [buffers[name] for buffers, _ in parts]
        if first.is_floating_point():
            wide = [(tensor.double(), lam) for tensor, (_, lam) in zip(tensors, parts, strict=True)]
            result[name] = _weighted(wide).to(first.dtype)
        else:
            result[name] = torch.stack(tensors).amax(dim=0)
    return result


def _weighted(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    total = torch.zeros_like(parts[0][0])
    for tensor, weight in parts:
        total.add_(tensor, alpha=weight)
    return total


def aggregate_noise(weights: Sequence[float], clips: Sequence[float], multipliers: Sequence[float]) -> float:
    """Standard deviation per coordinate of sum_k lambda_k N(0, (C_k sigma_k)^2 I).

    Under secure aggregation, where only the sum is seen, client j enjoys the multiplier std / (lambda_j C_j).
    """
    parts = zip(weights, clips, multipliers, strict=True)
    return float(sum((lam * clip * sigma) ** 2 for lam, clip, sigma in parts) ** 0.5)
