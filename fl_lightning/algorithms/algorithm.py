"""What an algorithm is: a frozen record of parts. An ablation is a different record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.local.solver import GradTransform, LocalSolver, Measure
from fl_lightning.local.transforms import ascend_previous, private, sam
from fl_lightning.records import REACH, Message, Release, ServerState
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule
from fl_lightning.uplink.stage import Terms, UplinkStage


@dataclass(frozen=True)
class Protection:
    """How a run protects its clients' data, solved before the first round.

    Attributes:
        level: "none", "sample" (one example of a client), "update" or "model" (a whole client).
        clip: C > 0, the L2 bound of one example's gradient (sample), of one update or of one model.
        multipliers: z_k = noise std / C for each client k.
        adjacency: the neighbouring relation of the ledger.
        delta: the delta at which epsilon is reported.
        physical_batch_size: most per-sample gradients held at once, None for all.
        sampling: how examples enter a step at level "sample".
        layers: parts of the vector that are clipped one by one, to C / sqrt(parts) each; none: one norm over all.
        ascent: where SAM's direction comes from at level "sample".
        trust: who adds the noise where whole clients are protected.
    """

    level: Literal["none", "sample", "update", "model"] = "none"
    clip: float = 1.0
    multipliers: Sequence[float] = ()
    adjacency: str = "add_remove"
    delta: float = 1e-5
    physical_batch_size: int | None = None
    sampling: Literal["poisson", "without_replacement", "full"] = "poisson"
    layers: tuple[slice, ...] = ()
    ascent: Literal["previous", "per_sample", "two_release"] = "previous"
    trust: Literal["local", "central", "distributed"] = "local"

    @property
    def unit(self) -> Literal["sample", "client"]:
        return "client" if self.level in ("update", "model") else "sample"

    @property
    def releases_per_step(self) -> int:
        """How many private gradients a step of level "sample" follows."""
        return 2 if self.ascent == "two_release" else 1

    def private_gradient(self, rho: float | None = None) -> tuple[GradTransform, ...]:
        """The chain of a client's private gradient, with SAM's ascent of radius `rho` where one is given."""
        own = rho if self.ascent == "per_sample" else None
        step = private(self.clip, self.multipliers, self.physical_batch_size, self.layers, own)
        if rho is None or self.ascent == "per_sample":
            return (step,)
        return (step, sam(rho) if self.ascent == "two_release" else ascend_previous(rho))

    def gradient_release(
        self, client: int, rate: float, steps: int, terms: Terms, covers: tuple[str, ...] = ("delta",)
    ) -> Release:
        """What `steps` private gradients at sampling rate `rate` let out; `covers` is computed from them alone.

        Two gradients of one batch are one release of both: an example moves the pair by sqrt(2) C, and counting them
        as two sampled releases would suppose two batches.
        """
        bound, z = terms.get("clip", self.clip), self.multipliers[client] * terms.get("schedule", 1.0)
        floor = z * bound if z else 0.0  # 0 x inf: no noise
        full = self.sampling == "full" or (rate >= 1 and self.sampling == "without_replacement")
        return Release(
            mechanism="gaussian",
            unit="sample",
            sensitivity=bound * REACH[self.adjacency] * self.releases_per_step**0.5,
            noise=floor * terms.get("noise_factor", 1.0),
            counted_noise=floor,
            count=steps,
            sampling="full" if full else self.sampling,
            rate=1.0 if full else rate,
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
