"""What an algorithm is: a frozen record of parts. An ablation is a different record."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.local.solver import LocalSolver, Measure
from fl_lightning.records import Release
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule
from fl_lightning.uplink.stage import UplinkStage


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

    def gradient_release(self, client: int, rate: float, steps: int) -> Release:
        """What `steps` private gradients at Poisson rate `rate` let out; the trained model is computed from them."""
        return Release(
            mechanism="gaussian",
            unit="sample",
            sensitivity=self.clip,
            noise=self.multipliers[client] * self.clip if self.multipliers[client] else 0.0,
            count=steps,
            sampling="poisson",
            rate=rate,
            adjacency=self.adjacency,
            covers=("delta",),
        )


@dataclass(frozen=True)
class Algorithm:
    """Client side (solver, measures, uplink) and server side (aggregator, rule) of one federated method."""

    name: str
    solver: LocalSolver
    aggregate: Aggregator
    rule: ServerRule
    uplink: tuple[UplinkStage, ...] = ()
    measures: tuple[Measure, ...] = ()
    protection: Protection = field(default_factory=Protection)
