"""The schema of a sweep, and how one is found.

# fl-lightning sweep sweep=rho
space:
  algorithm.local.rho: {grid: [0.01, 0.05, 0.2]}
seeds: [42, 43]
overrides: [algorithm=fedsam, partition=dirichlet]
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from fl_lightning.config.axis import Axis, read_axis
from fl_lightning.config.cluster import RayConfig, SharedFolder, cluster_faults
from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import Fault, InvalidConfig
from fl_lightning.config.index import is_open_key, key_names
from fl_lightning.config.messages import translate, unknown_key
from fl_lightning.config.numbers import Count, Int, Name, NonNegative, Positive, Real, Section, Seed
from fl_lightning.config.objectives import Metric, Mode, objective_faults, objectives_of
from fl_lightning.config.population import population_faults
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.scoring import ON_TEST, ON_VALIDATION, scoring_faults, tunes
from fl_lightning.config.search import budget_faults, search_faults

Retries = Annotated[Int, Field(ge=0, le=100)]


class Resources(Section):
    """What one trial reserves; fractions let trials share a device."""

    cpu: Positive = Field(default=1.0, description="CPU cores per trial")
    gpu: NonNegative = Field(default=0.0, description="GPUs per trial; 0.5: two trials share one")


COSTLESS = ("algorithm.local.", "algorithm.aggregate.", "model.")
"""Beginnings of keys that change what is computed, and nothing of what is released or how it is noised."""


class Selection(Section):
    """How many random trials there are, where choosing the best of them is itself accounted for.

    N. Papernot, T. Steinke, Hyperparameter tuning with Renyi differential privacy, ICLR 2022,
    https://arxiv.org/abs/2110.03620: the number of trials is drawn from a distribution, and the best one's epsilon is
    larger than that of one trial by little. A fixed number of trials has no such bound. The trials must be independent,
    so each draws its hyper-parameters and a seed of its own from the sweep's one seed.
    """

    distribution: Literal["none", "poisson", "geometric", "logarithmic", "negative_binomial"] = Field(
        default="none", description="of the number of trials; none: sweep.num_samples, and tuning is not accounted for"
    )
    mean: Positive | None = Field(default=None, description="expected number of trials")
    eta: Real | None = Field(
        default=None, description="shape of negative_binomial, > -1; 1 is geometric, 0 logarithmic, which have no eta"
    )


class SweepConfig(Section):
    """A sweep: axes, seeds, and what its trials have in common.

    Raises:
        ConfigError: one line that names key, value, rule and remedy.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: Name = Field(default="sweep", description="name of the study")
    space: dict[str, Axis] = Field(default_factory=dict, description="axis by dotted key or group")
    seeds: tuple[Seed, ...] = Field(default=(), description="empty: the base's own seed")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="values by dotted key for one value of the algorithm axis only"
    )
    overrides: tuple[str, ...] = Field(default=(), description="overrides of every trial, as on the command line")
    search: Literal["grid", "random", "optuna"] | None = Field(
        default=None, description="how trials are chosen; null: random if an axis is random, else grid"
    )
    scheduler: Literal["none", "asha", "median", "pbt"] = Field(
        default="none",
        description="asha and median end trials early whose metric falls behind; pbt lets them go on from a better one",
    )
    perturb_every: Count | None = Field(
        default=None, description="pbt: rounds after which members are compared each time; null: a fifth of fl.rounds"
    )
    grace_rounds: Count | None = Field(
        default=None, description="rounds before a scheduler may end a trial, and ASHA's first rung; null: 1"
    )
    num_samples: Count = Field(default=1, description="draws from the random axes for each grid cell")
    equal_budget: bool = Field(
        default=False,
        description="every algorithm of the algorithm axis gets the same number of points, each with every seed; an "
        "axis without meaning for an algorithm is left out of its points",
    )
    selection: Selection = Field(default=Selection(), description="a random number of trials, to account for tuning")
    skip_hopeless: bool = Field(
        default=False, description="leave out private cells whose plan says that noise buries the signal"
    )
    max_concurrent: Count | None = Field(default=None, description="trials at a time; null: what fits")
    max_retries: Retries | None = Field(
        default=None,
        description="retries of a trial whose process crashed or whose node was lost, from its last checkpoint; null: "
        "2 on a cluster of several nodes, else 0",
    )
    resources: Resources = Field(default=Resources(), description="what one trial reserves")
    storage: SharedFolder | None = Field(
        default=None,
        description="folder of the trials' files and checkpoints, seen by every node of a cluster; null: mlruns/sweeps "
        "in the start folder, checkpoints beside a SQLite store or in mlruns/checkpoints",
    )
    ray: RayConfig = Field(default=RayConfig(), description="where the trials run; on the command line ray.KEY")
    metric: Metric = Field(
        default=None,
        description="what makes a trial the best; a list asks for the Pareto front of several; null: "
        "validation_accuracy where all hold out the same share of examples (data.validation), else test_accuracy",
    )
    mode: Mode = Field(
        default=None,
        description="whether more of the metric is better, max, or less, min; null: max of an accuracy, else min",
    )

    def __init__(self, **raw: Any) -> None:
        space = raw.get("space", {})
        if isinstance(space, Mapping):
            axes = {key: item if isinstance(item, Axis) else read_axis(str(key), item) for key, item in space.items()}
            raw = {**raw, "space": axes}
        try:
            super().__init__(**raw)
        except ValidationError as error:
            faults = translate(error, SweepConfig, raw, prefix="sweep.")
            raise InvalidConfig(
                [replace(item, key=re.sub(r"^sweep\.ray\b", "ray", item.key)) for item in faults]
            ) from None
        how = (objective_faults, scoring_faults, search_faults, population_faults, budget_faults)
        checks = (_sweep_faults, *how, cluster_faults, _selection_faults, _settings_faults)
        if faults := [fault for check in checks for fault in check(self)]:
            raise InvalidConfig(faults)

    @property
    def algorithm_axis(self) -> Axis | None:
        """The axis that chooses the algorithm, if there is one."""
        return self.space.get("algorithm") or self.space.get("algorithm.name")

    @property
    def objectives(self) -> tuple[tuple[str, str], ...]:
        """(metric, "max" or "min") of each objective; most sweeps have one."""
        return objectives_of(self, ON_VALIDATION[0] if tunes(self) else ON_TEST[0])


def _sweep_faults(sweep: SweepConfig) -> Iterator[Fault]:
    if len(set(sweep.seeds)) < len(sweep.seeds):
        yield Fault("sweep.seeds", "lists a seed twice; the trials would be the same", list(sweep.seeds))
    if sweep.num_samples > 1 and not any(axis.is_random for axis in sweep.space.values()):
        yield Fault(
            "sweep.num_samples",
            "would repeat the same trials, for no axis is random; list more sweep.seeds instead",
            sweep.num_samples,
        )
    for section, tag in TAG_OF_SECTION.items():
        if section in sweep.space and f"{section}.{tag}" in sweep.space:
            yield Fault(f"sweep.space.{section}.{tag}", f"contradicts sweep.space.{section}; keep one of the two")


def _selection_faults(sweep: SweepConfig) -> Iterator[Fault]:
    chosen, at = sweep.selection, "sweep.selection"
    if sweep.skip_hopeless and any(axis.is_random for axis in sweep.space.values()):
        yield Fault("sweep.skip_hopeless", "needs an axis of kind grid only: what is drawn later has no plan yet", True)
    for key in ("mean", "eta"):
        wanted = chosen.distribution != "none" if key == "mean" else chosen.distribution == "negative_binomial"
        value = getattr(chosen, key)
        if value is not None and not wanted:
            yield Fault(f"{at}.{key}", f"would be ignored with distribution={chosen.distribution}; remove it", value)
        if value is None and wanted:
            yield Fault(f"{at}.{key}", f"is needed with distribution={chosen.distribution}; set it, for example to 10")
    if chosen.distribution == "none":
        return
    if chosen.mean is not None and chosen.mean <= 1 and chosen.distribution != "poisson":
        yield Fault(f"{at}.mean", f"needs a number > 1 with distribution={chosen.distribution}", chosen.mean)
    if chosen.eta is not None and chosen.eta <= -1:
        yield Fault(f"{at}.eta", "needs a number > -1", chosen.eta)
    if sweep.num_samples > 1:
        yield Fault("sweep.num_samples", f"would be ignored: {at} draws the number of trials", sweep.num_samples)
    if grid := next((key for key, axis in sweep.space.items() if not axis.is_random), None):
        yield Fault(
            f"{at}.distribution",
            f"needs random axes only, for each trial must be drawn alike; make sweep.space.{grid} a choice",
            chosen.distribution,
        )
    elif not sweep.space:
        yield Fault(f"{at}.distribution", "needs a random axis to draw from", chosen.distribution)
    for key in sweep.space:
        if not key.startswith(COSTLESS) or key == "algorithm.aggregate.proxy_share":
            yield Fault(
                f"{at}.distribution",
                f"needs axes that leave the releases as they are ({', '.join(COSTLESS)}...), for the bound is over all "
                f"that could be drawn; take sweep.space.{key} out",
                chosen.distribution,
            )
    if len(sweep.seeds) > 1:
        yield Fault(
            f"{at}.distribution", f"needs one seed, found {len(sweep.seeds)} in sweep.seeds", chosen.distribution
        )


def _settings_faults(sweep: SweepConfig) -> Iterator[Fault]:
    axis = sweep.algorithm_axis
    for algorithm, values in sweep.settings.items():
        at = f"sweep.settings.{algorithm}"
        if axis is None:
            yield Fault(at, "would be ignored: no axis of the sweep chooses the algorithm; put it in sweep.overrides")
        elif algorithm not in axis.values:
            names = ", ".join(map(str, axis.values))
            yield Fault(
                at, f"would be ignored: the sweep's algorithms are {names}; correct or remove it (sweep.settings={{}})"
            )
        for key in values:
            if key in sweep.space:
                yield Fault(f"{at}.{key}", "contradicts the sweep's axis of the same key; remove one")
            elif key == "seed":
                yield Fault(f"{at}.seed", "contradicts sweep.seeds; remove it")
            elif key not in key_names(RunConfig) and not is_open_key(RunConfig, key):
                yield Fault(f"{at}.{key}", unknown_key(RunConfig, key, {}).rule)
