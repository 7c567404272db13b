"""A run before it runs: the budget that stops it, the ledger it will end with, all without training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.errors import ConfigError, PrivacyError
from fl_lightning.privacy.budget import affordable
from fl_lightning.privacy.ledger import Ledger
from fl_lightning.records import Release
from fl_lightning.releases import ReleasePlan

if TYPE_CHECKING:
    from fl_lightning.shield import Noise


@dataclass(frozen=True)
class Budget:
    """Who of a cohort may take part, and for how many steps, without going beyond `target` epsilon.

    Attributes:
        plan: what a visit releases.
        noise: the multipliers of the run.
        target: epsilon of every client, > 0.
    """

    plan: ReleasePlan
    noise: "Noise"
    target: float

    def admit(self, ledger: Ledger, round: int, cohort: Sequence[int]) -> dict[int, int | None] | None:
        """Client -> the steps it may take, None for as many as planned; a client that may take none is left out.

        None where the round may not be. Under secret cohorts every client pays for every round, so it is all or nobody.
        """
        if self.plan.secret:
            payers = range(len(self.plan.sizes))
            return dict.fromkeys(cohort) if all(self._pays(ledger, k, round) for k in payers) else None
        if self.plan.privacy.level != "sample":
            able: dict[int, int | None] = {k: None for k in cohort if self._pays(ledger, k, round)}
        else:
            able = {k: steps for k in cohort if (steps := self._steps(ledger, k, round)) != 0}
        return able or (None if cohort else {})

    def reason(self, rounds: int) -> str:
        """Why the run ended after `rounds` rounds."""
        return (
            f"the privacy budget is spent: round {rounds + 1} would take every client of its cohort beyond "
            f"privacy.target_epsilon={self.target:g}"
        )

    def _pays(self, ledger: Ledger, client: int, round: int) -> bool:
        return ledger.preview(client, self._visit(client, round)) <= self.target

    def _steps(self, ledger: Ledger, client: int, round: int) -> int | None:
        planned = self.plan.steps(client)
        if not planned:
            return None  # a client without data costs nothing and is told so by the engine
        found = affordable(ledger, client, lambda steps: self._visit(client, round, steps), planned, self.target)
        return None if found == planned else found

    def _visit(self, client: int, round: int, steps: int | None = None) -> list[Release]:
        return self.plan.visit(client, round, self.noise.multipliers[client], self.noise.scalar, steps)


def budget_of(plan: ReleasePlan, noise: "Noise") -> Budget | None:
    """The budget a run keeps, None where it has none, or keeps it by a filter of its own (personalised noise)."""
    target = plan.privacy.target_epsilon
    algorithm = plan.config.algorithm
    filtered = isinstance(algorithm, SamAdpfl) and algorithm.sharpness.noise_rule == "personalised"
    return None if target is None or plan.privacy.mode == "paper" or filtered else Budget(plan, noise, target)


def _empty(plan: ReleasePlan) -> Ledger:
    unit = "sample" if plan.privacy.level == "sample" else "client"
    return Ledger(unit=unit, delta=plan.privacy.delta, adjacency=plan.adjacency)


def predicted_ledger(plan: ReleasePlan, noise: "Noise", cohorts: Sequence[Sequence[int]]) -> Ledger:
    """The ledger that a run of this plan ends with; noise that adapts during the run is counted at its bound."""
    ledger = _empty(plan)
    budget = budget_of(plan, noise)
    for round, cohort in enumerate(cohorts, start=1):
        admitted = budget.admit(ledger, round, cohort) if budget else dict.fromkeys(cohort)
        if admitted is None:
            break
        for client in range(len(plan.sizes)) if plan.secret else admitted:
            z, steps = noise.multipliers[client], admitted.get(client)
            ledger.record(round, client, plan.visit(client, round, z, noise.scalar, steps))
    return ledger


@dataclass(frozen=True)
class Foreseen:
    """What can be known of a run before it starts.

    Attributes:
        config: the configuration.
        ledger: the account it will end with.
        noise: the solved multipliers.
        sizes: n_k of each client.
        visits: the rounds in which each client takes part.
        num_parameters: d of the model.
        assumed: the sizes were given, not read off the data.
    """

    config: RunConfig
    ledger: Ledger
    noise: "Noise"
    sizes: list[int]
    visits: list[list[int]]
    num_parameters: int
    assumed: bool = False


def foresee(config: RunConfig, sizes: Sequence[int] | None = None) -> Foreseen:
    """Solves the noise and writes the ledger of a run without training.

    Args:
        config: a configuration with a level of privacy.
        sizes: n_k of each client, to plan for a public data set whose files are not here; None reads the data.

    Raises:
        DataError: the data set cannot be read.
        PrivacyError: the demanded epsilon cannot be met.
        ConfigError: the parts do not fit each other; or `sizes` are given for data that are not public.
    """
    from fl_lightning import build
    from fl_lightning.canaries import audited_sizes
    from fl_lightning.shield import solve_noise, visits_of

    if sizes is None:
        data = build.data_of(config)
        shape, classes = data.shape, data.num_classes
        rest, _ = build.held_out(config, data)
        found = [len(shard) for shard in build.dealt(config, rest).indices]
    else:
        known = KNOWN_SETS.get(config.data.name)
        if known is None:
            raise ConfigError(f"data.name={config.data.name}: sizes can be assumed for public data sets only")
        shape, classes, found = known.shape, known.num_classes, list(sizes)
    model = build.network(config, shape, classes)
    cohorts = build.planned_cohorts(config)
    visits = visits_of(cohorts, config.fl.num_clients)
    found = audited_sizes(config, found, visits)
    noise = solve_noise(config, found, visits)
    plan = ReleasePlan(config, found, visits)
    ledger, budget = predicted_ledger(plan, noise, cohorts), budget_of(plan, noise)
    if budget is not None and budget.admit(_empty(plan), 1, cohorts[0]) is None:
        raise PrivacyError(f"nothing would be trained: {budget.reason(0)}; raise it, or privacy.noise_multiplier")
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Foreseen(config, ledger, noise, found, visits, parameters, assumed=sizes is not None)
