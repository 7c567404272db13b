"""Changing a raw configuration: which values it truly sets, choosing another option of a group, setting one key.

The rule for choosing another option is the same on the command line, over a file and in a sweep: the option's preset
takes the section's place, then whatever was set otherwise than by default is set again; the schema refuses what has no
meaning under the new option. Defaults are not carried along, for they belong to the old option.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fl_lightning.config.algorithms import SAM_ALGORITHMS
from fl_lightning.config.defaults import TAG_OF_SECTION, complete, default_level, default_weighting, expanded
from fl_lightning.config.faults import Fault, InvalidConfig
from fl_lightning.config.index import Key, section_models, variant
from fl_lightning.config.numbers import to_float, to_path
from fl_lightning.config.presets import load_preset
from fl_lightning.config.privacy import DEFAULT_TARGET_EPSILON
from fl_lightning.config.proxy import default_proxy_lr
from fl_lightning.plugins.loading import is_reference


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def without_defaults(root: type[BaseModel], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values `raw` sets otherwise than by default, and the names of its variants.

    Faulty and unknown values stay, so that validation still finds them.
    """
    whole = complete(raw)
    algorithm, privacy = whole["algorithm"], whole["privacy"]
    pruned = _prune(root, expanded(raw))
    if not isinstance(algorithm, Mapping) or not isinstance(privacy, Mapping):
        return pruned
    level, aggregate = privacy.get("level"), algorithm.get("aggregate")
    if isinstance(aggregate, Mapping):
        drop(pruned, "algorithm.aggregate.weighting")
        if aggregate.get("weighting") != default_weighting(level, algorithm.get("name")):
            pruned = set_at(pruned, "algorithm.aggregate.weighting", aggregate["weighting"])
    data = whole["data"]["name"] if isinstance(whole["data"], Mapping) else None
    if isinstance(aggregate, Mapping) and aggregate.get("proxy_lr") == default_proxy_lr(data):
        drop(pruned, "algorithm.aggregate.proxy_lr")
    if level == default_level(algorithm.get("name")):
        drop(pruned, "privacy.level")
    if privacy.get("noise_multiplier") is None and privacy.get("target_epsilon") == DEFAULT_TARGET_EPSILON:
        drop(pruned, "privacy.target_epsilon")
    if level == "sample" and algorithm.get("name") in SAM_ALGORITHMS and privacy.get("ascent") == "previous":
        drop(pruned, "privacy.ascent")
    if algorithm.get("name") == "sam_adpfl":
        if algorithm.get("sharpness", {}).get("statistics") == ("lagged" if level == "sample" else "current"):
            drop(pruned, "algorithm.sharpness.statistics")
        if privacy.get("mode") == "paper" and privacy.get("adjacency") == "zero_out":
            drop(pruned, "privacy.adjacency")
    return pruned


def _prune(model: type[BaseModel], raw: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        field = model.model_fields.get(name)
        if field is None:
            kept[name] = value
        elif not section_models(field):
            if not _is_default(Key(name, field, ()), value):
                kept[name] = value
        elif isinstance(value, Mapping) and (chosen := variant(field, value)):
            tag = TAG_OF_SECTION.get(name) or field.discriminator
            inner = _prune(chosen, value)
            if isinstance(tag, str) and tag in value:
                inner = {tag: value[tag], **inner}
            if inner:
                kept[name] = inner
        else:
            kept[name] = value
    return kept


def _is_default(key: Key, value: Any) -> bool:
    """Whether a value says no more than the schema does, however it is written."""
    default = key.default
    if value is None or default is None or isinstance(default, bool):
        return value is default
    try:
        if isinstance(default, int | float):
            return to_float(value) == default
        return to_path(value) == to_path(default) if key.is_path else value == default
    except ValueError:
        return False


def drop(raw: dict[str, Any], dotted: str) -> None:
    """Removes a dotted key from nested dicts, in place, if it is there."""
    *parents, last = dotted.split(".")
    for part in parents:
        raw = raw.get(part, {})
        if not isinstance(raw, dict):
            return
    raw.pop(last, None)


def set_at(raw: Mapping[str, Any], dotted: str, value: Any) -> dict[str, Any]:
    """A copy of nested mappings with the value at a dotted key replaced, or laid over if it is a mapping itself."""
    first, _, rest = dotted.partition(".")
    old = raw.get(first)
    if rest:
        if isinstance(old, str) and first in TAG_OF_SECTION:
            old = {TAG_OF_SECTION[first]: old}
        value = set_at(old if isinstance(old, Mapping) else {}, rest, value)
    elif isinstance(value, Mapping) and isinstance(old, Mapping):
        value = merged(old, value)
    return {**raw, first: value}


def choose(raw: Mapping[str, Any], group: str, preset: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` (without defaults) with another option of a group: its preset under what `raw` sets there."""
    old = raw.get(group)
    carried = (
        {key: value for key, value in old.items() if key != TAG_OF_SECTION[group]} if isinstance(old, Mapping) else {}
    )
    return {**raw, group: merged(preset, carried)}


def apply_changes(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` (without defaults) with options chosen first and dotted keys set afterwards.

    Raises:
        ConfigError: a group without such an option.
    """
    result = dict(raw)
    groups = [key for key in overrides if key in TAG_OF_SECTION]
    for group in groups:
        option = overrides[group]
        if is_reference(option):
            option = {TAG_OF_SECTION[group]: option}
        elif isinstance(option, str):
            option = load_preset(group, option)
        elif not isinstance(option, Mapping):
            raise InvalidConfig([Fault(group, "needs the name of an option", option)])
        result = choose(result, group, option)
    for key, value in overrides.items():
        if key not in groups:
            result = set_at(result, key, value)
    return result
