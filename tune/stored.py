"""What a sweep keeps with its parent run so that it can be resumed: what was asked for, and every trial drawn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning import RunConfig
from fl_lightning.analysis.report import SWEEP_FILE, Sweep
from fl_lightning.analysis.trials import setting_of
from fl_lightning.config import Axis, Cell, SweepConfig
from fl_lightning.tracking import Study, log_text, no_plan, read_folder, read_json
from tune.space import ID, Plan, Sampled

PLAN_FILE = "plan.json"
TRIALS_FOLDER = "trials"
"""The artifact folder of the trials that were not known at the start: a model of the metric chose them on the way."""


@dataclass(frozen=True)
class Kept:
    """A sweep as it is read back: what was asked for, the cells, and the trials that were drawn, in order."""

    info: Sweep
    sweep: SweepConfig
    cells: tuple[Cell, ...]
    listed: tuple[Sampled, ...]


def keep_plan(study: Study, info: Sweep, sweep: SweepConfig, plan: Plan, listed: Sequence[Sampled]) -> None:
    """Stores a sweep with its parent run before its first trial starts.

    Raises:
        TrackingError: the store cannot be used.
    """
    content = {
        "sweep": sweep_to_dict(sweep),
        **cells_to_dict(plan.cells),
        "trials": [_told(plan, sampled) for sampled in listed],
    }
    log_text(study.uri, study.run_id, info.to_json(), SWEEP_FILE)
    log_text(study.uri, study.run_id, json.dumps(content, indent=1), PLAN_FILE)


def keep_trial(study: Study, plan: Plan, sampled: Sampled) -> None:
    """Stores one more trial, before it starts.

    Raises:
        TrackingError: the store cannot be used.
    """
    text = json.dumps(_told(plan, sampled), indent=1)
    log_text(study.uri, study.run_id, text, f"{TRIALS_FOLDER}/{sampled[ID]}.json")


def read_plan(uri: str, parent_run_id: str, sweep_id: str) -> Kept:
    """A sweep from its parent run.

    Raises:
        CheckpointError: it was killed before it was stored, or is of an older version.
        TrackingError: the store cannot be used.
    """
    described = read_json(uri, parent_run_id, SWEEP_FILE)
    content = read_json(uri, parent_run_id, PLAN_FILE)
    if described is None or content is None:
        raise no_plan(uri, sweep_id)
    known: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in described.items()}
    sweep = SweepConfig(**content["sweep"])
    more = read_folder(uri, parent_run_id, TRIALS_FOLDER).values()
    listed = sorted([*content["trials"], *more], key=lambda told: (len(told[ID]), told[ID]))
    cells = cells_from_dict(content, [axis for axis in sweep.space.values() if axis.is_random])
    return Kept(Sweep(**known), sweep, cells, tuple(told["sampled"] for told in listed))


def _told(plan: Plan, sampled: Sampled) -> dict[str, Any]:
    """A trial for the file: what is needed to run it again, and its values for a reader."""
    point = plan.point(sampled)
    return {ID: sampled[ID], "params": dict(point.params), "seed": point.seed, "sampled": dict(sampled)}


def sweep_to_dict(sweep: SweepConfig) -> dict[str, Any]:
    """A sweep as its file would have it; `SweepConfig(**content)` reads it."""
    space = {key: {axis.kind: list(axis.values)} for key, axis in sweep.space.items()}
    return {**sweep.model_dump(mode="json", exclude={"space"}), "space": space}


def cells_to_dict(cells: Sequence[Cell]) -> dict[str, Any]:
    """Cells as plain values, those that differ in the seed only written once."""
    places: dict[str, int] = {}
    settings: list[dict[str, Any]] = []
    for cell in cells:
        if (setting := setting_of(cell.values)) not in places:
            places[setting] = len(settings)
            variants = [
                {"options": list(options), "config": config.to_dict()} for options, config in cell.variants.items()
            ]
            random = [axis.key for axis in cell.random]
            settings.append({"values": dict(cell.values), "random": random, "variants": variants})
    return {"settings": settings, "cells": [[places[setting_of(cell.values)], cell.seed] for cell in cells]}


def cells_from_dict(content: Mapping[str, Any], random: Sequence[Axis]) -> tuple[Cell, ...]:
    """The cells of `cells_to_dict`; `random` are the sweep's axes that are drawn."""
    variants = [
        {tuple(variant["options"]): RunConfig(**variant["config"]) for variant in setting["variants"]}
        for setting in content["settings"]
    ]
    cells = []
    for place, seed in content["cells"]:
        seeded = {options: config.with_overrides({"seed": seed}) for options, config in variants[place].items()}
        setting = content["settings"][place]
        own = tuple(axis for axis in random if axis.key in setting["random"])
        cells.append(Cell(setting["values"], seed, next(iter(seeded.values())), own, seeded))
    return tuple(cells)
