"""How the noise of `privacy.*` is put on an algorithm: each choice is a change of its record, no algorithm knows of it.

trust_model     local: noise on each upload; central: the server's, on the sum; distributed: a share each
sampling        secret cohorts: fixed denominators, and every client pays for every round
clip_bound      one bound, one per layer, or one that follows a quantile of the update norms
level model     the trained model is clipped instead of its change
noise_decay     the noise multiplier falls on a schedule known before the run
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.algorithms.model_clipping import trained_model
from fl_lightning.config import RunConfig
from fl_lightning.config.plugins import OwnAlgorithm
from fl_lightning.config.privacy import ClientPrivacy, Mechanism, UpdatePrivacy
from fl_lightning.errors import PrivacyError
from fl_lightning.records import ServerState
from fl_lightning.releases import ReleasePlan
from fl_lightning.server.noise import for_the_sum, noised, of_models
from fl_lightning.server.quantile import QuantileRule
from fl_lightning.uplink.clip_noise import COHORT, QuantileBit, Where, clip_noise
from fl_lightning.uplink.stage import Terms

PLACE: dict[str, Where] = {"local": "upload", "central": "sum", "distributed": "share"}


def protected(algorithm: Algorithm, config: RunConfig, plan: ReleasePlan) -> Algorithm:
    """`algorithm` under the mechanism of `config.privacy`, which has a level."""
    privacy = config.privacy
    assert isinstance(privacy, Mechanism)
    if isinstance(privacy, ClientPrivacy) and not isinstance(config.algorithm, OwnAlgorithm):
        algorithm = _client_level(algorithm, config, privacy, plan)
    if privacy.noise_decay < 1:
        algorithm = _telling(algorithm, lambda server, cohort: {"schedule": plan.schedule(server.round + 1)})
    return algorithm


def _client_level(algorithm: Algorithm, config: RunConfig, privacy: ClientPrivacy, plan: ReleasePlan) -> Algorithm:
    shield, trust = algorithm.protection, privacy.trust_model
    cohort = float(config.fl.cohort_size)  # under Poisson sampling q K, the number expected
    z = max(shield.multipliers, default=0.0)
    bit = quantile_bit(privacy, cohort, z)
    stage = clip_noise(
        shield.clip,
        shield.multipliers,
        shield.adjacency,
        where=PLACE[trust],
        sampling=privacy.sampling,
        rate=plan.rate(0) if plan.secret else 1.0,
        layers=shield.layers,
        of_model=privacy.level == "model",
        bit=bit,
        noise_cohort=privacy.noise_cohort_size,
    )
    algorithm = replace(algorithm, uplink=(stage,))
    if privacy.level == "model":
        rule_of_models = of_models(algorithm.rule)
        algorithm = replace(algorithm, measures=(*algorithm.measures, trained_model), rule=rule_of_models)
    if trust == "distributed":
        algorithm = _telling(algorithm, lambda server, cohort: {COHORT: float(len(cohort))})
    bound = quantile_rule(config, privacy, cohort, bit)
    rule, aggregate = algorithm.rule, algorithm.aggregate
    if trust == "central":
        expected = cohort if privacy.sampling == "poisson" else None
        scale = 1.0 / max(cohort, privacy.noise_cohort_size or 0)

        def alone(server: ServerState) -> float:
            clip = bound.bound(server) if bound else shield.clip
            now = z * plan.schedule(server.round + 1)
            return (bit.update_multiplier(now) if bit else now) * clip * scale

        rule = noised(rule, config.seed, alone if expected and z else None)
        aggregate = for_the_sum(aggregate, expected, privacy.noise_cohort_size)
    if bound is None:
        return replace(algorithm, rule=rule, aggregate=aggregate)
    told = replace(algorithm, rule=bound.follow(rule), aggregate=bound.collect(aggregate))
    return _telling(told, lambda server, cohort: {"clip": bound.bound(server)})


def quantile_bit(privacy: ClientPrivacy, cohort: float, z: float) -> QuantileBit | None:
    """The bit's noise, None where the bound does not follow a quantile."""
    if not isinstance(privacy, UpdatePrivacy) or privacy.quantile is None:
        return None
    given = privacy.quantile.bit_noise
    if given is not None and given <= z / 2:
        raise PrivacyError(
            f"privacy.quantile.bit_noise={given:g} must be above {z / 2:g}, half the noise multiplier {z:g}: the bits "
            "alone would cost more than updates and bits may together; raise it, or leave it out"
        )
    return QuantileBit(max(cohort / 20, z) if given is None else given)


def quantile_rule(
    config: RunConfig, privacy: ClientPrivacy, cohort: float, bit: QuantileBit | None
) -> QuantileRule | None:
    """How the bound moves, None where it does not follow a quantile."""
    if bit is None or not isinstance(privacy, UpdatePrivacy) or privacy.quantile is None:
        return None
    central = privacy.trust_model == "central" and privacy.noise_multiplier != 0
    owed = bit.noise * cohort / max(cohort, privacy.noise_cohort_size or 0) if central else 0.0
    return QuantileRule(privacy.clip_norm, privacy.quantile.target, privacy.quantile.lr, cohort, owed, config.seed)


Told = Callable[[ServerState, Sequence[int]], Terms]
"""(server, cohort) -> what every client of the cohort is told besides."""


def _telling(algorithm: Algorithm, told: Told) -> Algorithm:
    """`algorithm` whose clients are also told these terms before each visit."""
    inner = algorithm.before

    def before(server: ServerState, cohort: Sequence[int]) -> Mapping[int, Terms]:
        known, more = inner(server, cohort) if inner else {}, told(server, cohort)
        return {client: {**known.get(client, {}), **more} for client in cohort}

    return replace(algorithm, before=before)
