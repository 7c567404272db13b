"""How much noise a run needs: from `privacy.noise_multiplier`, or solved for `privacy.target_epsilon`.

Everything a client will release is known ahead: its rounds come from the seed or a schedule, its steps from the
schedule of local training. The noise is solved for that whole list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.privacy import NoPrivacy, SamplePrivacy
from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import calibrate_noise, compose, epsilon
from fl_lightning.privacy.paper import eq16_epsilon, eq16_sigma
from fl_lightning.records import Release
from fl_lightning.releases import ReleasePlan


@dataclass(frozen=True)
class Noise:
    """The solved noise of a run.

    Attributes:
        multipliers: z_k = noise std / C of each client.
        scalar_multiplier: noise over sensitivity of one released scalar per visit, 0 where none is released.
        scalar_epsilon: eps_scalars of a round in the paper's literal mode.
        nominal_epsilon: what the paper's formula claims, None outside that mode.
    """

    multipliers: tuple[float, ...]
    scalar_multiplier: float = 0.0
    scalar_epsilon: float = 0.0
    nominal_epsilon: float | None = None

    @property
    def scalar(self) -> float:
        """What `ReleasePlan.visit` takes of the two."""
        return self.scalar_multiplier or self.scalar_epsilon


def visits_of(cohorts: Sequence[Sequence[int]], num_clients: int) -> list[list[int]]:
    """The rounds (from 1) in which each client takes part."""
    return [[r for r, cohort in enumerate(cohorts, start=1) if client in cohort] for client in range(num_clients)]


def solve_noise(config: RunConfig, sizes: Sequence[int], visits: Sequence[Sequence[int]]) -> Noise:
    """The noise of every client. At level "sample" each client's multiplier is solved for its own rate and steps, so
    that all spend the same epsilon; at level "update" and "model" one serves all, that of the client who pays most.

    Raises:
        PrivacyError: the target cannot be met.
    """
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return Noise(())
    share = config.algorithm.sharpness.scalar_share if isinstance(config.algorithm, SamAdpfl) else 0.0
    if privacy.mode == "paper":
        return _paper_noise(config, share)
    plan = ReleasePlan(config, sizes, visits)
    most = max(1, *(len(plan.accounted(k)) for k in range(len(sizes))))
    given, target = privacy.noise_multiplier, privacy.target_epsilon or 0.0  # the schema sets at least one of the two
    scalar = 0.0
    if share:
        scalar = (
            given * sqrt((1 - share) / share)
            if given is not None
            else _scalar_noise(most, share * target, privacy.delta)
        )
    if given is not None:
        return Noise((float(given),) * len(sizes), scalar)
    solved: dict[tuple[object, ...], float] = {}
    guess = 1.0
    for client in _by_cost(plan):
        profile = plan.profile(client)
        if profile not in solved and plan.total(client, 1.0):
            listed = partial(plan.total, client, scalar=scalar)
            if privacy.level != "sample" and solved and _spent(listed(guess), privacy.delta) <= target:
                solved[profile] = guess  # one multiplier for all: that of a client who pays more is enough
                continue
            guess = solved[profile] = calibrate_noise(listed, target, privacy.delta, start=guess)
    if not solved:
        raise PrivacyError("no client of any cohort holds data or takes part, so there is no noise to solve for")
    if privacy.level != "sample":
        return Noise((max(solved.values()),) * len(sizes), scalar)
    return Noise(tuple(solved.get(plan.profile(k), max(solved.values())) for k in range(len(sizes))), scalar)


def _by_cost(plan: ReleasePlan) -> list[int]:
    """Clients in an order in which neighbours need similar noise, those who pay for most rounds first."""
    return sorted(range(len(plan.sizes)), key=lambda k: (-len(plan.accounted(k)), plan.rate(k), plan.sizes[k]))


def _spent(releases: Sequence[Release], delta: float) -> float:
    return epsilon(compose(releases), delta)


def protection(config: RunConfig, noise: Noise, layers: Sequence[slice] = ()) -> Protection:
    """The noise as the algorithm takes it; `layers` are the parts of the vector that belong to one layer each."""
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return Protection()
    return Protection(
        level=privacy.level,
        clip=privacy.clip_norm,
        multipliers=noise.multipliers,
        adjacency=privacy.adjacency,
        delta=privacy.delta,
        physical_batch_size=getattr(privacy, "physical_batch_size", None),
        sampling=privacy.sampling if isinstance(privacy, SamplePrivacy) else "poisson",
        layers=tuple(layers) if privacy.clip_bound == "per_layer" else (),
        ascent=getattr(privacy, "ascent", None) or "previous",
        trust=getattr(privacy, "trust_model", "local"),
    )


def _paper_noise(config: RunConfig, share: float) -> Noise:
    """Eq. 16 solved or evaluated literally: T releases at sensitivity C, the scalars counted once."""
    privacy, rounds = config.privacy, config.fl.rounds
    assert not isinstance(privacy, NoPrivacy)
    if privacy.noise_multiplier is not None:
        sigma = float(privacy.noise_multiplier)
        scalars = share / (1 - share) * eq16_epsilon(sigma, rounds, privacy.delta) if sigma else 1.0
    else:
        target = privacy.target_epsilon or 0.0
        scalars = share * target
        sigma = eq16_sigma(target - scalars, rounds, privacy.delta)
    nominal = eq16_epsilon(sigma, rounds, privacy.delta, scalars) if sigma else None
    return Noise((sigma,) * config.fl.num_clients, 0.0, scalars, nominal)


def _scalar_noise(count: int, epsilon: float, delta: float) -> float:
    """The multiplier at which `count` scalars by themselves spend `epsilon`."""
    return calibrate_noise(lambda t: [Release("gaussian", "client", 1.0, t, count=count)], epsilon, delta)
