"""How much noise a run needs: from `privacy.noise_multiplier`, or solved for `privacy.target_epsilon`.

Everything a client will release is known ahead: its rounds come from the seed or a schedule, its steps from the
schedule of local training. The noise is solved for that whole list.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from fl_lightning.algorithms.algorithm import Protection
from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.privacy import NoPrivacy
from fl_lightning.data.loading import planned_steps, poisson_rate
from fl_lightning.privacy import calibrate_many, calibrate_noise
from fl_lightning.privacy.paper import eq16_epsilon, eq16_sigma
from fl_lightning.records import Release
from fl_lightning.uplink.clip_noise import SENSITIVITY


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


def visits_of(cohorts: Sequence[Sequence[int]], num_clients: int) -> list[list[int]]:
    """The rounds (from 1) in which each client takes part."""
    return [[r for r, cohort in enumerate(cohorts, start=1) if client in cohort] for client in range(num_clients)]


def solve_noise(config: RunConfig, sizes: Sequence[int], visits: Sequence[Sequence[int]]) -> Noise:
    """The noise of every client. At level "sample" each client's multiplier is solved for its own rate and steps, so
    that all spend the same epsilon; at level "update" one serves all, that of the client who takes part most often.

    Raises:
        PrivacyError: the target cannot be met.
    """
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return Noise(())
    most = max(1, *map(len, visits))
    share = config.algorithm.sharpness.scalar_share if isinstance(config.algorithm, SamAdpfl) else 0.0
    if privacy.mode == "paper":
        return _paper_noise(config, share)
    given, target = privacy.noise_multiplier, privacy.target_epsilon or 0.0  # the schema sets one of the two
    scalar = 0.0
    if share:
        scalar = (
            given * sqrt((1 - share) / share)
            if given is not None
            else _scalar_noise(most, share * target, privacy.delta)
        )
    if given is not None:
        return Noise((float(given),) * len(sizes), scalar)
    if privacy.level == "update":
        reach, adjacency = SENSITIVITY[privacy.adjacency], privacy.adjacency

        def releases(z: float) -> list[Release]:
            update = Release("gaussian", "client", reach, z, count=most, adjacency=adjacency)
            return [update, *_scalars(scalar, most, "client", adjacency)]

        return Noise((calibrate_noise(releases, target, privacy.delta),) * len(sizes), scalar)
    fl = config.fl
    plans = [
        (
            poisson_rate(n, fl.batch_size),
            max(1, len(v)) * planned_steps(n, fl.batch_size, fl.local_epochs, fl.max_local_steps),
        )
        for n, v in zip(sizes, visits, strict=True)
    ]
    if not share:
        return Noise(tuple(calibrate_many(plans, target, privacy.delta)))
    solved: dict[tuple[float, int, int], float] = {}
    for (rate, steps), rounds in zip(plans, visits, strict=True):
        key = rate, steps, max(1, len(rounds))
        if key not in solved:

            def sampled(z: float, key: tuple[float, int, int] = key) -> list[Release]:
                steps = Release("gaussian", "sample", 1.0, z, count=key[1], sampling="poisson", rate=key[0])
                return [steps, *_scalars(scalar, key[2], "sample", "add_remove")]

            solved[key] = calibrate_noise(sampled, target, privacy.delta)
    return Noise(
        tuple(solved[rate, steps, max(1, len(v))] for (rate, steps), v in zip(plans, visits, strict=True)), scalar
    )


def protection(config: RunConfig, noise: Noise) -> Protection:
    """The noise as the algorithm takes it."""
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


def _scalars(multiplier: float, count: int, unit: Literal["sample", "client"], adjacency: str) -> list[Release]:
    return [Release("gaussian", unit, 1.0, multiplier, count=count, adjacency=adjacency)] if multiplier else []


def _scalar_noise(count: int, epsilon: float, delta: float) -> float:
    """The multiplier at which `count` scalars by themselves spend `epsilon`."""
    return calibrate_noise(lambda t: [Release("gaussian", "client", 1.0, t, count=count)], epsilon, delta)
