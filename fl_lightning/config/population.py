"""What does not fit together in a population: `sweep.scheduler=pbt`, whose members change their settings on the way."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fl_lightning.config.faults import Fault
from fl_lightning.config.schema import RunConfig
from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    from fl_lightning.config.sweep import SweepConfig

_LOCAL = ("lr", "weight_decay", "momentum", "beta1", "beta2", "prox_mu", "rho", "mu", "temperature")
_SERVER = ("server_lr", "server_momentum", "server_beta1", "server_beta2", "tau", "mu", "gamma", "eps")
MUTABLE = (*(f"algorithm.local.{name}" for name in _LOCAL), *(f"algorithm.aggregate.{name}" for name in _SERVER))
"""The keys that may change between two rounds: numbers of the solver and of the server's step. They change nothing of
what is released or how it is noised, so the account of privacy goes on, nor the shape of any state."""

SHARE_OF_ROUNDS = 5
"""Members are compared after each fifth of their rounds, where nothing else is said."""


def population_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of `sweep.scheduler=pbt` and `sweep.perturb_every`, given the other settings."""
    if sweep.scheduler != "pbt":
        if sweep.perturb_every is not None:
            rule = f"would be ignored with scheduler={sweep.scheduler}; set sweep.scheduler=pbt"
            yield Fault("sweep.perturb_every", rule, sweep.perturb_every)
        return
    at = "sweep.scheduler"
    if sweep.grace_rounds is not None:
        yield Fault(
            "sweep.grace_rounds", "would be ignored with scheduler=pbt; set sweep.perturb_every", sweep.grace_rounds
        )
    for key, axis in sweep.space.items():
        if key not in MUTABLE:
            rule = f"needs axes that may change between two rounds ({', '.join(MUTABLE)}); take sweep.space.{key} out"
            yield Fault(at, rule, "pbt")
        elif not axis.is_random:
            yield Fault(at, f"needs random axes, to draw new values from; make sweep.space.{key} a choice", "pbt")
    if not sweep.space:
        yield Fault(at, "needs an axis to draw from, such as algorithm.local.lr: {loguniform: [0.01, 1]}", "pbt")
    if sweep.num_samples < 2:
        yield Fault("sweep.num_samples", "needs a population with scheduler=pbt: 2 or more members", sweep.num_samples)
    if len(sweep.seeds) > 1:
        rule = "needs one seed with scheduler=pbt, for members take each other's federations over; run one sweep a seed"
        yield Fault("sweep.seeds", rule, list(sweep.seeds))
    if sweep.max_concurrent is not None:
        rule = "contradicts sweep.scheduler=pbt, whose members wait for each other; raise sweep.resources.cpu instead"
        yield Fault("sweep.max_concurrent", rule, sweep.max_concurrent)
    if sweep.search == "optuna":
        yield Fault("sweep.search", "contradicts sweep.scheduler=pbt, which draws the values itself", "optuna")


def perturb_every(sweep: "SweepConfig", config: RunConfig) -> int:
    """After how many rounds each time the members of a population are compared.

    Args:
        sweep: a valid sweep with `scheduler=pbt`.
        config: of its trials.

    Raises:
        ConfigError: members that cannot be compared, or cannot go on from each other.
    """
    rounds, measured = config.fl.rounds, config.fl.eval_every
    every = sweep.perturb_every or max(1, rounds // SHARE_OF_ROUNDS // measured) * measured
    at = f"sweep.perturb_every={every}"
    if every >= rounds:
        raise ConfigError(
            f"{at}: the members would never be compared in fl.rounds={rounds}; lower it, or raise fl.rounds"
        )
    if every % measured:
        raise ConfigError(
            f"{at}: is no multiple of fl.eval_every={measured}, so the metric would not be known; make it one"
        )
    if (kept := config.fl.checkpoint_every) is not None and every % kept:
        raise ConfigError(f"{at}: is no multiple of fl.checkpoint_every={kept}; make it one, or remove that")
    if not config.tracking.enabled:
        raise ConfigError("sweep.scheduler=pbt: needs tracking.enabled=true, for members go on from stored checkpoints")
    if getattr(config.privacy, "audit", False):
        raise ConfigError("sweep.scheduler=pbt: contradicts privacy.audit, whose runs keep no checkpoints; remove it")
    return every
