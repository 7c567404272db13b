"""What a run will release, known before it starts: who takes part, how many steps each takes, how each is noised.

Rounds come from the seed or a schedule, steps from the schedule of local training, so the whole list is a function of
the noise multiplier alone. Calibration solves it, the ledger of a run repeats it, the budget stops at it, and
`fl-lightning privacy plan` prints it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.privacy import ClientPrivacy, Mechanism, SamplePrivacy
from fl_lightning.data.loading import planned_steps, sampled_share
from fl_lightning.records import REACH, Release
from fl_lightning.uplink.clip_noise import BIT
from fl_lightning.uplink.scalars import laplace_scale

if TYPE_CHECKING:
    pass

DERIVED = {"dp_scaffold": ("delta", "delta_c")}
"""Algorithm -> fields that its clients compute from private gradients, where that is more than the update."""


@dataclass(frozen=True)
class ReleasePlan:
    """Every client's releases, visit by visit, for noise multipliers yet to be chosen.

    Attributes:
        config: a configuration with a level of privacy.
        sizes: n_k of each client.
        visits: the rounds (from 1) in which each client takes part. Under secret cohorts every round counts for all.
    """

    config: RunConfig
    sizes: Sequence[int]
    visits: Sequence[Sequence[int]]

    @property
    def privacy(self) -> Mechanism:
        assert isinstance(self.config.privacy, Mechanism), "there is nothing to plan without a level of privacy"
        return self.config.privacy

    @property
    def adjacency(self) -> str:
        """The neighbouring relation."""
        return self.privacy.adjacency

    @property
    def secret(self) -> bool:
        """Whether cohorts are secret, so that every client pays for every round."""
        return isinstance(self.privacy, ClientPrivacy) and self.privacy.sampling != "full"

    def schedule(self, round: int) -> float:
        """The factor of the noise multiplier in `round`, 1 at the start."""
        privacy, rounds = self.privacy, self.config.fl.rounds
        every = privacy.noise_decay_rounds or max(1, ceil(rounds / 10))
        return float(privacy.noise_decay ** ((round - 1) // every))

    def steps(self, client: int) -> int:
        """The steps of one visit of the client at level sample."""
        fl, privacy = self.config.fl, self.privacy
        assert isinstance(privacy, SamplePrivacy)
        return planned_steps(self.sizes[client], fl.batch_size, fl.local_epochs, fl.max_local_steps, privacy.sampling)

    def rate(self, client: int) -> float:
        """The share of a client's examples in a step, or of the clients in a secret cohort."""
        privacy, fl = self.privacy, self.config.fl
        if isinstance(privacy, SamplePrivacy):
            n = self.sizes[client]
            return sampled_share(n, fl.batch_size, privacy.sampling) if n else 1.0
        return min(1.0, fl.cohort_size / fl.num_clients)

    def accounted(self, client: int) -> Sequence[int]:
        """The rounds that cost the client something."""
        return range(1, self.config.fl.rounds + 1) if self.secret else self.visits[client]

    def visit(self, client: int, round: int, z: float, scalar: float = 0.0, steps: int | None = None) -> list[Release]:
        """What one visit releases at noise multiplier z and scalar multiplier `scalar`.

        Args:
            client: the client.
            round: its round, for the schedule of the noise.
            z: noise / C.
            scalar: noise / sensitivity of SAM-ADPFL's scalar; in paper mode eps_scalars of a round.
            steps: how many steps it takes, at level sample; None: as planned.
        """
        privacy = self.privacy
        if isinstance(privacy, SamplePrivacy):
            steps = self.steps(client) if steps is None else steps
            if not steps:
                return []
            terms = {"schedule": self.schedule(round)} if privacy.noise_decay < 1 else {}
            shield = replace(self._shield, multipliers={client: z})  # type: ignore[arg-type]
            covers = DERIVED.get(self.config.algorithm.name, ("delta",))
            found = [shield.gradient_release(client, self.rate(client), steps, terms, covers)]
            return [*found, *self._gap(client, scalar, "sample")] if scalar else found
        return [*self._announced(client, scalar), self._upload(round, z)]

    def total(self, client: int, z: float, scalar: float = 0.0) -> list[Release]:
        """All that the client releases in the run, equal releases counted together."""
        stages: dict[float, list[int]] = {}
        for round in self.accounted(client):
            stages.setdefault(self.schedule(round), []).append(round)
        return [
            replace(release, count=release.count * len(rounds))
            for rounds in stages.values()
            for release in self.visit(client, rounds[0], z, scalar)
        ]

    def profile(self, client: int) -> tuple[object, ...]:
        """Clients of one profile release the same list at every z."""
        stages = tuple(sorted(self.schedule(r) for r in self.accounted(client)))
        size = (self.rate(client), self.steps(client), self.sizes[client]) if self._sampled else ()
        return (*size, len(stages), stages if self.privacy.noise_decay < 1 else None)

    @property
    def _sampled(self) -> bool:
        return isinstance(self.privacy, SamplePrivacy)

    @cached_property
    def _shield(self) -> Protection:
        privacy = self.privacy
        assert isinstance(privacy, SamplePrivacy)
        return Protection(
            level="sample",
            clip=privacy.clip_norm,
            adjacency=privacy.adjacency,
            delta=privacy.delta,
            sampling=privacy.sampling,
            ascent=privacy.ascent or "previous",
        )

    def _upload(self, round: int, z: float) -> Release:
        privacy = self.privacy
        assert isinstance(privacy, ClientPrivacy)
        bit = getattr(privacy, "clip_bound", "fixed") == "quantile"
        factor = z * self.schedule(round)
        return Release(
            "gaussian",
            "client",
            REACH[privacy.adjacency] * privacy.clip_norm,
            factor * privacy.clip_norm if factor else 0.0,
            sampling=privacy.sampling,
            rate=self.rate(0) if self.secret else 1.0,
            adjacency=privacy.adjacency,
            covers=("delta", BIT) if bit else ("delta",),
        )

    def _announced(self, client: int, scalar: float) -> list[Release]:
        if not isinstance(self.config.algorithm, SamAdpfl) or not scalar:
            return []
        if self.privacy.mode == "strict":
            return self._gap(client, scalar, "client")
        sharp = self.config.algorithm.sharpness
        limits = {"sharpness": sharp.bound, "loss_std": sharp.loss_bound or 5.0, "loss_worst": sharp.loss_bound or 5.0}
        adjacency = self.adjacency
        return [
            Release("laplace", "client", b, laplace_scale(b, scalar), adjacency=adjacency, covers=(name,))
            for name, b in limits.items()
        ]

    def _gap(self, client: int, scalar: float, unit: str) -> list[Release]:
        assert isinstance(self.config.algorithm, SamAdpfl)
        bound, adjacency = self.config.algorithm.sharpness.bound, self.adjacency
        sensitivity = bound if unit == "client" else bound / self.sizes[client]
        noise = scalar * sensitivity
        return [Release("gaussian", unit, sensitivity, noise, adjacency=adjacency, covers=("gap",))]  # type: ignore[arg-type]
