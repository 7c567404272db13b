"""The clipping laboratory: what a bound does to the updates of each round (`fl.clipping_lab: true`).

"Understanding Clipping for Federated Learning" (arXiv 2106.13673) ties the harm of clipping to how concentrated the
update norms are. Over the m clients of a round that trained, with their bounds c_i and the round's weights lambda_i:

    alpha_i = c_i / max(c_i, ||Delta_i||),  alphabar = (1/m) sum_i alpha_i       so clip(Delta_i, c_i) = alpha_i Delta_i
    alpha_deviation = (1/m) sum_i |alpha_i - alphabar|                               the bias term of Proposition Z
    cosine, norm_ratio between sum_i lambda_i clip(Delta_i, c_i) and sum_i lambda_i Delta_i

alpha_deviation times 2 G^2 is what clipping adds to the bound on the gradient's norm (proved for full-batch clients
under full participation; under minibatches alpha_i is that of the step taken, the paper's, and not its expectation).
It is 0 for equal norms, however small the bound. Everything is computed from raw updates before clipping and noise, in
the simulator's process: `oracle/` values, which no epsilon covers.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from fl_lightning.records import Aggregate, Message, Vector

PREFIX = "oracle/clipping/"
LAB_NOTE = "fl.clipping_lab: oracle/clipping/* and clipping/* come from raw updates; no epsilon covers them"


@dataclass(frozen=True)
class UpdateNorm:
    """One client's update in one round, before clipping and noise.

    Attributes:
        round: from 1.
        client: its number.
        num_samples: n_k.
        steps: local steps it took, at least 1.
        update_norm: ||Delta_i||_2 over the flat vector; at level "sample", of the update made of private gradients.
        bound: c_i on ||Delta_i||, infinite for no clipping; None where updates have no bound.
        clipped: whether the uplink shortened something (in model_clipping: the model); None where nothing is clipped.
        alpha: c_i / max(c_i, ||Delta_i||), 0 for an update that is not finite; None without a bound.
    """

    round: int
    client: int
    num_samples: int
    steps: int
    update_norm: float
    bound: float | None
    clipped: bool | None
    alpha: float | None


@dataclass
class ClippingLab:
    """Gathers a run's norms; `inspect` is the federation's inspection.

    Attributes:
        norms: one entry per client and round, in order.
        rounds: each round's metrics, by their short names.
    """

    norms: list[UpdateNorm] = field(default_factory=list)
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)

    def inspect(self, round: int, messages: Sequence[Message], aggregate: Aggregate) -> Mapping[str, float]:
        """The round's metrics under `oracle/clipping/`; none of a round in which nobody trained."""
        trained = [message for message in messages if message.steps]
        norms = [norm_of(round, message) for message in trained]
        self.norms += norms
        found = spread([norm.update_norm for norm in norms]) | bias(norms)
        weights = dict(zip((m.client for m in messages), aggregate.weights, strict=False))
        found |= distortion([(m, weights.get(m.client, 0.0)) for m in trained])
        self.rounds[round] = found
        return {PREFIX + name: value for name, value in found.items()}

    def to_csv(self) -> str:
        """A line per client and round under the names of `UpdateNorm`; what is None is empty."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [entry.name for entry in fields(UpdateNorm)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(norm) for norm in self.norms)
        return text.getvalue()

    def draw(self, path: Path) -> Path:
        """Writes the picture as a PNG file; returns its path."""
        from fl_lightning.analysis.norms_figure import draw_norms

        return draw_norms(self.norms, self.rounds, path)


def norm_of(round: int, message: Message) -> UpdateNorm:
    """What a message kept by `ClientSide.keep_raw` tells of its client."""
    norm = float(torch.linalg.vector_norm(message.oracle_vectors["update"]))
    bound, shortened = message.oracle.get("clip"), message.oracle.get("clipped")
    factor = None if bound is None else alpha(norm, bound)
    whole = shortened is not None and (bool(shortened) if factor is None else factor < 1)
    clipped = None if shortened is None else whole  # an update that is not finite is clipped to zero
    return UpdateNorm(
        round=round,
        client=message.client,
        num_samples=message.num_samples,
        steps=message.steps,
        update_norm=norm,
        bound=bound,
        clipped=clipped,
        alpha=factor,
    )


def alpha(norm: float, bound: float) -> float:
    """alpha_i = c / max(c, norm) in [0, 1], the factor that clipping multiplies an update by.

    >>> alpha(2.0, 0.5), alpha(0.2, 0.5), alpha(2.0, math.inf)
    (0.25, 1.0, 1.0)
    """
    if bound == math.inf:
        return 1.0
    return bound / max(bound, norm) if math.isfinite(norm) else 0.0


def spread(norms: Sequence[float]) -> dict[str, float]:
    """Quartiles, extremes, mean and population standard deviation of a round's norms."""
    if not norms:
        return {}
    values = torch.tensor(norms, dtype=torch.float64)
    names = ("norm_min", "norm_q1", "norm_median", "norm_q3", "norm_max")
    quartiles = torch.quantile(values, torch.linspace(0, 1, 5, dtype=torch.float64)).tolist()
    moments = {"norm_mean": float(values.mean()), "norm_sd": float(values.std(correction=0))}
    return dict(zip(names, quartiles, strict=True)) | moments


def bias(norms: Sequence[UpdateNorm]) -> dict[str, float]:
    """The clipped fraction and, where updates have bounds, Proposition Z's terms."""
    found = {}
    clipped = [norm.clipped for norm in norms if norm.clipped is not None]
    if clipped:
        found["fraction"] = sum(clipped) / len(clipped)
    alphas = [norm.alpha for norm in norms if norm.alpha is not None]
    if alphas:
        mean = sum(alphas) / len(alphas)
        found["alpha_mean"] = mean
        found["alpha_deviation"] = sum(abs(a - mean) for a in alphas) / len(alphas)
    bounds = [norm.bound for norm in norms if norm.bound is not None and math.isfinite(norm.bound)]
    if bounds:
        found["bound_mean"] = sum(bounds) / len(bounds)
    return found


def distortion(weighted: Sequence[tuple[Message, float]]) -> dict[str, float]:
    """Cosine and ratio of norms between the aggregates of clipped and of raw updates, before noise.

    Empty where nothing is clipped by the algorithm, or an aggregate has no direction.
    """
    kept = [(m.oracle_vectors, weight) for m, weight in weighted if "clipped" in m.oracle_vectors and weight > 0]
    if not kept:
        return {}
    raw = _sum([(vectors["update"], weight) for vectors, weight in kept])
    clipped = _sum([(vectors["clipped"], weight) for vectors, weight in kept])
    long, short = float(torch.linalg.vector_norm(raw)), float(torch.linalg.vector_norm(clipped))
    if long == 0 or short == 0:
        return {}
    return {"cosine": float(raw @ clipped) / (long * short), "norm_ratio": short / long}


def _sum(parts: Sequence[tuple[Vector, float]]) -> Vector:
    total = torch.zeros_like(parts[0][0], dtype=torch.float64)
    for vector, weight in parts:
        total.add_(vector.double(), alpha=weight)
    return total
