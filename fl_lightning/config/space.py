"""From a sweep to its cells: every finite value and both ends of every range are validated before any trial starts."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    grids = [axis for axis in sweep.space.values() if not axis.is_random]
    drawn = tuple(axis for axis in sweep.space.values() if axis.is_random)
    count = math.prod(len(axis.values) for axis in sweep.space.values() if axis.is_structural or not axis.is_random)
    if count > MAX_VARIANTS:
        raise ConfigError(
            f"sweep.space: has {count} combinations of its finite axes, more than {MAX_VARIANTS}; split the sweep"
        )
    cells: list[Cell] = []
    for chosen in _combinations(grids):
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
        """Validates one point of the space."""
        axis = self.sweep.algorithm_axis
        settings = self.sweep.settings.get(str(values[axis.key]), {}) if axis else {}
        groups = {key: value for key, value in values.items() if key in TAG_OF_SECTION}
        others = {**settings, **{key: value for key, value in values.items() if key not in groups}}
        try:
            if isinstance(self.base, RunConfig):
                return self.base.with_overrides({**groups, **others})
            return self._draft(groups).build(others, "in the sweep")
        except InvalidConfig as error:
            ignored = axis is not None and "would be ignored with" in error.faults[0].rule
            hint = f"; for some algorithms only: sweep.settings.NAME.{error.faults[0].key}=VALUE" if ignored else ""
            raise ConfigError(f"{_place(values, error)}: {error}{hint}") from None

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
