"""What an algorithm is: a frozen record of parts. An ablation is a different record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.local.solver import LocalSolver, Measure
from fl_lightning.records import Message, Release, ServerState
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule
from fl_lightning.uplink.stage import Terms, UplinkStage


@dataclass(frozen=True)
class Protection:
    """How a run protects its clients' data, solved before the first round.

    Attributes:
        level: "none", "sample" (one example of a client) or "update" (a whole client).
        clip: C > 0, the L2 bound of one example's gradient (sample) or of one update (update).
        multipliers: z_k = noise std / C for each client k.
        adjacency: the neighbouring relation of the ledger.
        delta: the delta at which epsilon is reported.
        physical_batch_size: most per-sample gradients held at once, None for all.
    """

    level: Literal["none", "sample", "update"] = "none"
    clip: float = 1.0
    multipliers: Sequence[float] = ()
    adjacency: str = "add_remove"
    delta: float = 1e-5
    physical_batch_size: int | None = None

    @property
    def unit(self) -> Literal["sample", "client"]:
        return "client" if self.level == "update" else "sample"

    def gradient_release(self, client: int, rate: float, steps: int, terms: Terms, covers: tuple[str, ...]) -> Release:
        """What `steps` private gradients at Poisson rate `rate` let out; `covers` is computed from them alone."""
        bound, multiplier = terms.get("clip", self.clip), self.multipliers[client]
        floor = multiplier * bound if multiplier else 0.0  # 0 x inf: no noise
        return Release(
            mechanism="gaussian",
            unit="sample",
            sensitivity=bound,
            noise=floor * terms.get("noise_factor", 1.0),
            counted_noise=floor,
            count=steps,
            sampling="poisson",
            rate=rate,
            adjacency=self.adjacency,
            covers=covers,
        )


@dataclass(frozen=True)
class Algorithm:
    """Client side (solver, measures, uplink) and server side (aggregator, rule) of one federated method.

    Attributes:
        name: as in the configuration.
        solver: the client's training.
        aggregate: messages -> aggregate.
        rule: (server, aggregate) -> server.
        uplink: stages that clip and noise the upload inside the client.
        measures: what a client finds out beside its update.
        announcements: stages that protect those findings before server and clients agree on terms.
        before: terms of a round known ahead of it, from released values of earlier rounds.
        agree: terms made of this round's announcements; the uplink then runs after all clients have announced.
        protection: noise and bounds of the run.
        derived: fields of the upload that are computed from private gradients or the protected update alone.
    """

    name: str
    solver: LocalSolver
    aggregate: Aggregator
    rule: ServerRule
    uplink: tuple[UplinkStage, ...] = ()
    measures: tuple[Measure, ...] = ()
    announcements: tuple[UplinkStage, ...] = ()
    before: Callable[[ServerState, Sequence[int]], Mapping[int, Terms]] | None = None
    agree: Callable[[ServerState, Sequence[Message]], Mapping[int, Terms]] | None = None
    derived: tuple[str, ...] = ("delta",)
    protection: Protection = field(default_factory=Protection)
