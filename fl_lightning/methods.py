"""Algorithms by name: each builder's parameters are the settings of the same name."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.ce_fedavg import ce_fedavg
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.dp_fedlaw import dp_fedlaw
from fl_lightning.algorithms.dp_fedsam import dp_fedsam
from fl_lightning.algorithms.dp_scaffold import dp_scaffold
from fl_lightning.algorithms.fedadam import fedadam
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.fedavgm import fedavgm
from fl_lightning.algorithms.fedexp import fedexp
from fl_lightning.algorithms.fedlaw import fedlaw
from fl_lightning.algorithms.fednova import fednova
from fl_lightning.algorithms.fedprox import fedprox
from fl_lightning.algorithms.fedsam import fedsam
from fl_lightning.algorithms.model_clipping import model_clipping
from fl_lightning.algorithms.moon import moon
from fl_lightning.algorithms.sam_adpfl import Sharpness, sam_adpfl
from fl_lightning.algorithms.sam_afl import sam_afl
from fl_lightning.algorithms.scaffold import scaffold
from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.plugins import OwnAlgorithm
from fl_lightning.config.privacy import ClientPrivacy, NoPrivacy
from fl_lightning.local.optimizers import LocalOptimizer, adam, momentum, sgd
from fl_lightning.plugins.making import own_algorithm
from fl_lightning.server.aggregate import PriorWeights, by_samples, uniform
from fl_lightning.server.noise import everyone
from fl_lightning.shield import Noise
from fl_lightning.uplink.bounds import SharpnessBounds


def optimizer(local: Any) -> LocalOptimizer:
    """The client's optimizer."""
    if local.optimizer == "adam":
        return adam(local.lr, local.beta1, local.beta2, weight_decay=local.weight_decay)
    if local.optimizer == "momentum":
        return momentum(local.lr, local.momentum, local.weight_decay)
    return sgd(local.lr, local.weight_decay)


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedsam": fedsam,
    "sam_afl": sam_afl,
    "sam_adpfl": sam_adpfl,
    "dp_fedavg": dp_fedavg,
    "dp_fedsam": dp_fedsam,
    "scaffold": scaffold,
    "dp_scaffold": dp_scaffold,
    "fednova": fednova,
    "fedexp": fedexp,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "ce_fedavg": ce_fedavg,
    "model_clipping": model_clipping,
    "fedlaw": fedlaw,
    "dp_fedlaw": dp_fedlaw,
    "moon": moon,
}


def build_algorithm(
    config: RunConfig, shield: Protection, *, noise: Noise, visits: Sequence[Sequence[int]], **more: Any
) -> Algorithm:
    """The algorithm named by `algorithm.name`.

    Args:
        config: the run's configuration.
        shield: noise and bounds as the algorithm takes them.
        noise: all that was solved ahead.
        visits: the rounds in which each client takes part.
        more: further parameters that an algorithm may ask for by name.
    """
    local, server = config.algorithm.local, config.algorithm.aggregate
    offered: dict[str, Any] = {
        "momentum": 0.0,
        "num_clients": config.fl.num_clients,
        "max_local_steps": config.fl.max_local_steps,
        **dict(local),
        **dict(server),
        **more,
        "optimizer": optimizer(local),
        "prior": prior(config),
        "protection": shield,
        "visits": visits,
    }
    if isinstance(config.algorithm, SamAdpfl):
        offered["sharp"] = sharpness_of(config.algorithm, config, noise)
    if isinstance(config.algorithm, OwnAlgorithm):
        return own_algorithm(config.algorithm, offered, shield)
    builder = ALGORITHMS[config.algorithm.name]
    return builder(**{name: offered[name] for name in signature(builder).parameters})


def prior(config: RunConfig) -> PriorWeights:
    """p_k. Where whole clients are protected all of a cohort count, for whether one holds data is private."""
    privacy = config.privacy
    if isinstance(privacy, ClientPrivacy) and privacy.mode == "strict":
        return everyone
    return {"samples": by_samples, "uniform": uniform}[config.algorithm.aggregate.weighting]


def sharpness_of(algorithm: SamAdpfl, config: RunConfig, noise: Noise) -> Sharpness:
    """SAM-ADPFL's settings with the defaults that depend on others."""
    settings, privacy = algorithm.sharpness, config.privacy
    assert not isinstance(privacy, NoPrivacy), "the schema refuses sam_adpfl without a level"
    base = privacy.clip_norm
    bounds = SharpnessBounds(
        clip_base=base,
        clip_alpha=settings.clip_alpha,
        clip_min=settings.clip_min_ratio * base,
        clip_max=(settings.clip_max_ratio or 4.0) * base,
        noise_rule=settings.noise_rule,
        xi=settings.xi or 1e-4,
        factor_max=settings.factor_max or 4.0,
        strict=privacy.mode == "strict",
    )
    return Sharpness(
        bounds=bounds,
        bound=settings.bound,
        floor=settings.floor_ratio * settings.bound,
        loss_bound=settings.loss_bound or 5.0,
        multiplier=noise.scalar_multiplier,
        epsilon=noise.scalar_epsilon,
        at=algorithm.aggregate.gap_at,
        lagged=settings.statistics == "lagged",
    )
