"""The records that pass between server, clients, engine and ledger. All are frozen; state is passed, never hidden."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isinf
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Vector = Tensor
"""A model as one flat tensor [d]."""

REACH = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}
"""How far one unit moves a sum of vectors clipped to C, in units of C: replaced data can turn +C u into -C u."""


@dataclass(frozen=True)
class Release:
    """What one client let out in one round, as the ledger accounts it.

    Attributes:
        mechanism: "gaussian" or "laplace".
        unit: what is protected: one "sample" of the client, or the whole "client".
        sensitivity: L2 (Gaussian) or L1 (Laplace) sensitivity of one release under `adjacency`, after weighting.
        noise: standard deviation (Gaussian) or scale (Laplace) of the noise on one release, in the same unit.
        counted_noise: the noise the ledger counts, at most `noise`; None counts `noise` itself. A theorem that bounds
            a noise chosen during the run by a constant counts that constant.
        count: how many such releases were made.
        sampling: how the protected units entered each release: all of them ("full") or each by itself with
            probability `rate` ("poisson"), or a share `rate` of them, drawn anew for each ("without_replacement").
        rate: the sampling rate q in (0, 1]; 1 when sampling is "full".
        adjacency: the neighbouring relation the sensitivity is stated for.
        covers: names of the upload's fields that are this release or computed from it alone (post-processing).
    """

    mechanism: Literal["gaussian", "laplace"]
    unit: Literal["sample", "client"]
    sensitivity: float
    noise: float
    count: int = 1
    sampling: Literal["full", "poisson", "without_replacement"] = "full"
    rate: float = 1.0
    adjacency: str = "add_remove"
    covers: tuple[str, ...] = ()
    counted_noise: float | None = None

    @property
    def noise_multiplier(self) -> float:
        """Counted noise over sensitivity, the only number an accountant needs of the two."""
        return (self.noise if self.counted_noise is None else self.counted_noise) / self.sensitivity


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round: the model, its buffers, and an algorithm's own vectors."""

    w: Vector
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
    extra: Mapping[str, Vector] = field(default_factory=dict)


ClientState = Mapping[str, Vector]
"""What a client keeps between its visits (control variates); it belongs to the client and never leaves it."""


@dataclass(frozen=True)
class Message:
    """One client's upload, after its uplink.

    `vectors` and `scalars` cross the wire and must each be covered by a release, or the run is not private.
    `num_samples` and `steps` are public at level sample; where whole clients are protected they are the simulator's,
    and no server reads them. `oracle` and `oracle_vectors` hold diagnostics that only a simulator can see; they are
    never aggregated. The vectors, "update" as it was before the uplink and "clipped" before noise, are kept only where
    `ClientSide.keep_raw` asks for them. `owed` is the noise that the declared release counts on and that the server has
    yet to add, as a standard deviation on this upload by itself; 0 where the client has added it.
    """

    client: int
    num_samples: int
    steps: int
    vectors: Mapping[str, Vector]
    scalars: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    releases: tuple[Release, ...] = ()
    state: ClientState = field(default_factory=dict)
    oracle: Mapping[str, float] = field(default_factory=dict)
    oracle_vectors: Mapping[str, Vector] = field(default_factory=dict)
    owed: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of what crosses the wire: every entry of vectors and buffers at its own width, 4 for each scalar."""
        tensors = [*self.vectors.values(), *self.buffers.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 4 * len(self.scalars)

    @property
    def undeclared(self) -> tuple[str, ...]:
        """Fields of the upload that no release covers."""
        covered = {name for release in self.releases for name in release.covers}
        sent = [*self.vectors, *self.scalars, *(["buffers"] if self.buffers else [])]
        return tuple(name for name in sent if name not in covered)


@dataclass(frozen=True)
class Aggregate:
    """A cohort's messages folded into one; `weights` are normalised and in cohort order.

    `vectors` is empty when no client counted (all weights zero): the round then changes nothing. `noise` is the
    standard deviation of the noise that the server has yet to add to "delta".
    """

    vectors: Mapping[str, Vector]
    weights: tuple[float, ...]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    noise: float = 0.0

    @property
    def empty(self) -> bool:
        return not self.vectors


@dataclass(frozen=True)
class RoundRecord:
    """What is reported of one round (numbered from 1). A metric that was not measured is None, never 0 or NaN."""

    round: int
    cohort: tuple[int, ...]
    train_loss: float | None
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    epsilon: float | None = None
    updated: bool = True
    notes: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    validation_accuracy: float | None = None


@dataclass(frozen=True)
class RunResult:
    """A finished run, as `fl-lightning run --output` writes it."""

    run_id: str | None
    status: str
    badge: str
    config: dict[str, Any]
    partition_sha256: str
    rounds: tuple[RoundRecord, ...]
    final: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values. An infinite epsilon is None, in every round as at the end, beside `final.privacy.infinite`."""
        whole = asdict(self)
        for record in whole["rounds"]:
            if record["epsilon"] is not None and isinf(record["epsilon"]):
                record["epsilon"] = None
        return whole


class StopEarly(Exception):
    """Raised by an observer in `on_round`: the run shall end after this round, with the result that it then has.

    Attributes:
        reason: in words, for `final.stopped`.
        by: who wishes it, for example "scheduler".
    """

    def __init__(self, reason: str, by: str) -> None:
        super().__init__(reason)
        self.reason, self.by = reason, by


class Observer(Protocol):
    """Something that watches a run: progress display, tracking, Ray Tune. It may end one, see `StopEarly`."""

    def on_start(self, info: Mapping[str, Any]) -> None: ...

    def on_round(self, record: RoundRecord) -> None: ...

    def on_end(self, result: RunResult) -> None: ...


def weights_sha256(w: Vector, buffers: Mapping[str, Tensor]) -> str:
    """SHA-256 over the bytes of the parameter vector and of every buffer, by name order."""
    import hashlib

    digest = hashlib.sha256(w.detach().cpu().contiguous().numpy().tobytes())
    for name in sorted(buffers):
        digest.update(name.encode())
        digest.update(torch.as_tensor(buffers[name]).detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
