"""Pydantic's errors, and keys it does not know, in the user's words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fl_lightning.config.faults import Fault, Missing, nearest, no_such_option, show
from fl_lightning.config.index import (
    Key,
    all_keys,
    chosen_by,
    describe,
    field_at,
    key_names,
    literals,
    section_models,
    tags,
    value_at,
    variant,
)
from fl_lightning.config.numbers import LARGEST, LONGEST, to_float
from fl_lightning.config.plugins import FAULT
from fl_lightning.plugins.loading import is_reference

_CLIPPING = (
    "not offered: Lightning's own clipping does nothing under manual optimization; "
    "for private clipping set privacy.clip_norm with algorithm=dp_fedavg or dp_fedsam"
)
_CONSTANT_LR = "not offered: the learning rate is constant within and across rounds; set algorithm.local.lr"
REFUSED = {
    "gradient_clip_val": _CLIPPING,
    "gradient_clip_algorithm": _CLIPPING,
    "accumulate_grad_batches": "not offered: gradient accumulation does nothing under manual optimization; "
    "raise fl.batch_size, or cap memory with privacy.physical_batch_size",
    "lr_schedule": _CONSTANT_LR,
    "lr_scheduler": _CONSTANT_LR,
    "max_steps": "not offered under this name; set fl.max_local_steps",
    "max_epochs": "not offered under this name; set fl.local_epochs and fl.rounds",
    "drop_last": "not offered: a short last batch is always trained on; lower fl.batch_size",
    "min_available": "not offered: every simulated client is available; set fl.clients_per_round",
}
"""Settings of other tools that people look for, by their last part, and what to use instead."""


def unknown_key(
    root: type[BaseModel], key: str, raw: Mapping[str, Any], value: Any = Missing.VALUE, prefix: str = ""
) -> Fault:
    """Why a key is not accepted: refused by name, without meaning under the chosen variants, or a typing error.

    `prefix` goes before the key that is suggested instead.
    """
    if reason := REFUSED.get(key.rpartition(".")[2]):
        return Fault(key, reason)
    elsewhere = [item for item in all_keys(root) if item.name == key]
    if elsewhere:
        return Fault(key, _ignored(elsewhere, raw), value)
    sections = {name.rpartition(".")[0] for name in key_names(root)} - {""}
    near = nearest(key, [*key_names(root), *_own_keys(root, key, raw), *sorted(sections)])
    return Fault(
        key,
        f"no such key; did you mean {prefix}{near}?" if near else "no such key; `fl-lightning config --keys` lists all",
    )


def _own_keys(root: type[BaseModel], key: str, raw: Mapping[str, Any]) -> list[str]:
    """The dotted keys beside `key` under the variants that `raw` has chosen, a user's own function among them."""
    parent = key.rpartition(".")[0]
    field = field_at(root, raw, tuple(parent.split("."))) if parent else None
    model = variant(field, value_at(raw, parent)) if field else None
    return [f"{parent}.{name}" for name in model.model_fields] if model else []


def _ignored(elsewhere: Sequence[Key], raw: Mapping[str, Any]) -> str:
    """Names the variant that makes a key meaningless, and those that use it."""
    unmet = [
        [(at, names) for at, names in item.conditions if not chosen_by(names, value_at(raw, at))] for item in elsewhere
    ]
    fewest = min(len(conditions) for conditions in unmet)
    users: dict[str, dict[str, None]] = {}
    for conditions in unmet:
        if len(conditions) == fewest:
            for at, names in conditions:
                users.setdefault(at, {}).update(dict.fromkeys(names))
    now = " and ".join(f"{at}={show(value_at(raw, at))}" for at in users)
    used_by = " and ".join(f"{at}={' or '.join(names)}" for at, names in users.items())
    return f"would be ignored with {now}; remove it, or choose {used_by}"


def translate(error: ValidationError, root: type[BaseModel], raw: Mapping[str, Any], prefix: str = "") -> list[Fault]:
    """Pydantic's errors as faults, in the user's keys; `prefix` goes before every key."""
    faults = [_fault(detail, root, raw, prefix) for detail in error.errors(include_url=False)]
    return [replace(fault, key=prefix + fault.key) for fault in faults]


def _user_path(root: type[BaseModel], raw: Any, location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The path a user wrote: pydantic's location without the variants' names that it inserts."""
    path: list[str] = []
    model: type[BaseModel] | None = root
    parts = list(location)
    while parts:
        part = str(parts.pop(0))
        path.append(part)
        raw = raw.get(part) if isinstance(raw, Mapping) else None
        field = model.model_fields.get(part) if model else None
        model = variant(field, raw) if field else None
        tag = raw.get(field.discriminator) if field and isinstance(raw, Mapping) else None
        if field is not None and isinstance(field.discriminator, str) and parts and not is_reference(tag):
            parts.pop(0)
    return tuple(path)


def _fault(detail: Any, root: type[BaseModel], raw: Mapping[str, Any], prefix: str) -> Fault:
    path = _user_path(root, raw, detail["loc"])
    key, kind, value = ".".join(path), detail["type"], detail["input"]
    field = field_at(root, raw, path)
    if kind == "extra_forbidden":
        return unknown_key(root, key, raw, Missing.VALUE if isinstance(value, Mapping) else value, prefix)
    if kind == FAULT:
        return Fault(key, detail["msg"], value)
    if kind == "tuple_type":
        return Fault(key, "needs a list, such as [1, 2]", value)
    if field is None:
        return Fault(key, detail["msg"].lower().removeprefix("value error, "), value)
    if kind == "union_tag_invalid" and isinstance(field.discriminator, str):
        return no_such_option(f"{key}.{field.discriminator}", value[field.discriminator], tags(field))
    if kind == "missing":
        return Fault(key, f"is required{_because(root, key, raw)}; set {key}=VALUE")
    if kind == "literal_error":
        return no_such_option(key, value, map(str, literals(field)))
    if section_models(field):
        options = f", or one of {', '.join(tags(field))}" if len(path) == 1 and field.discriminator else ""
        return Fault(key, f"needs a mapping of its settings{options}", value)
    return Fault(key, f"needs {_needs(field, value)}", value)


def _needs(field: FieldInfo, value: Any) -> str:
    try:
        size = abs(to_float(value))
    except ValueError:
        size = 0.0
    words = describe(field)
    if math.isinf(size):
        return words.replace("a number", "a finite number", 1)
    if "a whole number" in words:
        return f"{words}, at most {LONGEST}" if size > LONGEST and "<" not in words else words
    return f"{words}, at most {LARGEST:g}" if size > LARGEST else words


def _because(root: type[BaseModel], key: str, raw: Mapping[str, Any]) -> str:
    """Under which variant a key is required."""
    item = next((item for item in all_keys(root) if item.name == key), None)
    at = item.conditions[-1][0] if item and item.conditions else None
    return f" with {at}={show(value_at(raw, at))}" if at else ""
