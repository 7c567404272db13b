"""From a sweep to its cells: every finite value and both ends of every range are validated before any trial starts."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.config.axis import Axis
from fl_lightning.config.compose import Draft, draft
from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import InvalidConfig, show
from fl_lightning.config.index import value_at
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.scoring import holding_out, settled
from fl_lightning.config.sweep import SweepConfig
from fl_lightning.errors import ConfigError

MAX_VARIANTS = 10_000
"""Combinations of options that are validated one by one; more are refused rather than waited for."""


@dataclass(frozen=True)
class Cell:
    """One combination of the grids with one seed: a trial, or `num_samples` trials if axes are random.

    Attributes:
        values: value by grid axis, as validated (numbers as numbers, paths absolute, options by name).
        seed: the trial's seed.
        config: the whole configuration; random axes stand at their first value or lower end.
        random: the axes left to draw, to be turned into the search library's samplers. `randint` includes both ends.
        variants: the configuration by the texts of the random axes that choose which other keys there are.
    """

    values: Mapping[str, Any]
    seed: int
    config: RunConfig
    random: tuple[Axis, ...] = ()
    variants: Mapping[tuple[str, ...], RunConfig] = field(default_factory=dict, repr=False)

    def configure(self, drawn: Mapping[str, Any]) -> RunConfig:
        """The configuration of a trial for which the random axes came out as `drawn`; needs no files and no Hydra.

        Raises:
            ConfigError: a drawn value does not fit.
        """
        options = tuple(show(drawn[axis.key]) for axis in self.random if axis.is_structural)
        numbers = {axis.key: drawn[axis.key] for axis in self.random if not axis.is_structural}
        return self.variants[options].with_overrides(numbers)


def validate_space(
    base: RunConfig | Sequence[str],
    sweep: SweepConfig,
    *,
    config_file: Path | str | None = None,
    config_dir: Path | str | None = None,
) -> list[Cell]:
    """All cells of a sweep, each validated.

    A cell is what `fl-lightning run` would compose from `base` and the cell's values. Random axes are checked at each
    of their values (both ends of a range), the others standing at their first, and once with all at their last.

    Args:
        base: overrides as `load_sweep` returns them, or a finished configuration.
        sweep: the sweep.
        config_file: as in `load_config`; with overrides only.
        config_dir: as in `load_config`; with overrides only.

    Raises:
        ConfigError: naming the axis, the value and the cell.
    """
    source = _Source(base, config_file, config_dir, sweep)
    count = math.prod(len(axis.values) for axis in sweep.space.values() if axis.is_structural or not axis.is_random)
    if count > MAX_VARIANTS:
        raise ConfigError(
            f"sweep.space: has {count} combinations of its finite axes, more than {MAX_VARIANTS}; split the sweep"
        )
    cells: list[Cell] = []
    shares = _shares(source, sweep) if sweep.equal_budget else [list(sweep.space.values())]
    for axes in shares:
        cells += _cells(source, sweep, axes)
    return cells


def _cells(source: "_Source", sweep: SweepConfig, axes: Sequence[Axis]) -> list[Cell]:
    """The cells of these axes: their grids crossed, each with every seed; the others are left to draw."""
    cells: list[Cell] = []
    drawn = tuple(axis for axis in axes if axis.is_random)
    for chosen in _combinations([axis for axis in axes if not axis.is_random]):
        variants: dict[tuple[str, ...], RunConfig] = {}
        for options in _combinations([axis for axis in drawn if axis.is_structural]):
            for point in _probes([axis for axis in drawn if not axis.is_structural]):
                config = holding_out(source.build({**chosen, **options, **point}), sweep)
                variants.setdefault(tuple(show(value) for value in options.values()), config)
        first = next(iter(variants.values()))
        values = {
            key: value if key in TAG_OF_SECTION else value_at(first.to_dict(), key) for key, value in chosen.items()
        }
        for seed in sweep.seeds or (first.seed,):
            seeded = {options: config.with_overrides({"seed": seed}) for options, config in variants.items()}
            cells.append(Cell(values, seed, next(iter(seeded.values())), drawn, seeded))
    settled(sweep, [config for cell in cells for config in cell.variants.values()])
    return cells


def _shares(source: "_Source", sweep: SweepConfig) -> list[list[Axis]]:
    """For each algorithm the axes that have a meaning for it, its own value for a grid of one; equal numbers of points.

    Raises:
        ConfigError: an axis without meaning for all, or algorithms that would get unequal numbers of points.
    """
    own = sweep.algorithm_axis
    assert own is not None, "the schema asks for the axis"
    shares: dict[str, list[Axis]] = {}
    for value in own.values:
        one = replace(own, values=(value,))
        shares[show(value)] = [one if axis is own else axis for axis in _fitting(source, sweep, one)]
    names = ", ".join(shares)
    for key in sweep.space:
        if not any(axis.key == key for axes in shares.values() for axis in axes):
            raise ConfigError(f"sweep.space.{key}: has no meaning for {names}; correct or remove it")
    points = {name: _points(axes) for name, axes in shares.items()}
    if not any(axis.is_random for axis in sweep.space.values()):
        if len(set(points.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in points.items())
            raise ConfigError(
                f"sweep.equal_budget=true: the grids give the algorithms unequal numbers of settings ({told}); make "
                "the axes random (choice, uniform, loguniform) and set sweep.num_samples, or use sweep.settings.NAME "
                "for what only one algorithm has"
            )
    elif few := next((name for name, count in points.items() if count is not None and count < sweep.num_samples), None):
        own_keys = ", ".join(axis.key for axis in shares[few] if axis.key != own.key)
        has = (
            f"{points[few]} different points, of {own_keys}"
            if own_keys
            else "one point, for no axis has a meaning for it"
        )
        raise ConfigError(
            f"sweep.equal_budget=true with sweep.num_samples={sweep.num_samples}: {few} has only {has}; widen its "
            f"axes, lower sweep.num_samples, or take {few} out"
        )
    return list(shares.values())


def _fitting(source: "_Source", sweep: SweepConfig, own: Axis) -> list[Axis]:
    """The sweep's axes that have a meaning for the algorithm that `own` holds alone, whatever the other options."""

    def ignored(axis: Axis, options: Mapping[str, Any]) -> bool:
        try:
            source.compose({**options, own.key: own.values[0], axis.key: axis.values[0]})
        except InvalidConfig as error:
            return any(fault.key == axis.key and "would be ignored with" in fault.rule for fault in error.faults)
        return False

    structural = [axis for axis in sweep.space.values() if axis.is_structural and axis.key != own.key]
    fitting = []
    for axis in sweep.space.values():
        others = [other for other in structural if other is not axis]
        if axis.key == own.key or not all(ignored(axis, options) for options in _combinations(others)):
            fitting.append(axis)
    return fitting


def _points(axes: Sequence[Axis]) -> int | None:
    """How many different points there are; None: as many as one likes."""
    return math.prod(len(axis.values) for axis in axes) if all(axis.is_finite for axis in axes) else None


def _combinations(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def _probes(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """The first value of every axis; each other value with the rest at their first; all at their last."""
    first = {axis.key: axis.values[0] for axis in axes}
    yield first
    for axis in axes:
        for value in axis.values[1:]:
            yield {**first, axis.key: value}
    if len(axes) > 1:
        yield {axis.key: axis.values[-1] for axis in axes}


@dataclass
class _Source:
    """Builds cells; presets are composed once for each combination of groups."""

    base: RunConfig | Sequence[str]
    config_file: Path | str | None
    config_dir: Path | str | None
    sweep: SweepConfig
    drafts: dict[tuple[str, ...], Draft] = field(default_factory=dict)

    def build(self, values: Mapping[str, Any]) -> RunConfig:
        """Validates one point of the space.

        Raises:
            ConfigError: naming the axis, the value and the cell.
        """
        axis = self.sweep.algorithm_axis
        try:
            return self.compose(values)
        except InvalidConfig as error:
            ignored = axis is not None and "would be ignored with" in error.faults[0].rule
            hint = f"; for some algorithms only: sweep.settings.NAME.{error.faults[0].key}=VALUE" if ignored else ""
            raise ConfigError(f"{_place(values, error)}: {error}{hint}") from None

    def compose(self, values: Mapping[str, Any]) -> RunConfig:
        """The configuration of one point of the space.

        Raises:
            InvalidConfig: in the words of a single run.
        """
        axis = self.sweep.algorithm_axis
        settings = self.sweep.settings.get(str(values[axis.key]), {}) if axis else {}
        groups = {key: value for key, value in values.items() if key in TAG_OF_SECTION}
        others = {**settings, **{key: value for key, value in values.items() if key not in groups}}
        if isinstance(self.base, RunConfig):
            return self.base.with_overrides({**groups, **others})
        return self._draft(groups).build(others, "in the sweep")

    def _draft(self, groups: Mapping[str, Any]) -> Draft:
        arguments = tuple(f"{group}={option}" for group, option in groups.items())
        if arguments not in self.drafts:
            assert not isinstance(self.base, RunConfig)
            self.drafts[arguments] = draft(
                [*self.base, *arguments],
                config_file=self.config_file,
                config_dir=self.config_dir,
                source="in the sweep's overrides",
            )
        return self.drafts[arguments]


def _place(values: Mapping[str, Any], error: InvalidConfig) -> str:
    """The axis at fault, if it is one, its value, and the cell."""
    cell = " ".join(f"{key}={show(value)}" for key, value in values.items())
    keys = [fault.key for fault in error.faults]
    axis = next((axis for axis in values for key in keys if key == axis or key.startswith(axis + ".")), None)
    if axis is None:
        return f"sweep cell [{cell}]" if cell else "sweep"
    return f"sweep axis {axis}, value {show(values[axis])}, cell [{cell}]"
