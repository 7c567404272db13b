"""Filling in what a raw configuration leaves open, before it is validated.

Some defaults depend on another section (the level of privacy on the algorithm, the weighting on the level), and a
section may be given in short by the name of its variant. Faulty values pass through untouched: the schema names them.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fl_lightning.config.algorithms import DP_ALGORITHMS, SAM_ALGORITHMS
from fl_lightning.config.baselines import EVEN_ALGORITHMS
from fl_lightning.config.privacy import DEFAULT_TARGET_EPSILON
from fl_lightning.config.proxy import PROXY_ALGORITHMS, default_proxy_lr

TAG_OF_SECTION = {
    "algorithm": "name",
    "data": "name",
    "partition": "kind",
    "model": "kind",
    "privacy": "level",
    "engine": "kind",
}
"""The key that names a section's variant."""

_DEFAULT_TAG = {
    "algorithm": "fedavg",
    "data": "digits",
    "partition": "iid",
    "model": "lenet5",
    "engine": "lightning",
}


def expanded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` in plain mappings, with `data: mnist` written out as `data: {name: mnist}`."""
    result: dict[str, Any] = {}
    for key, value in raw.items():
        if key in TAG_OF_SECTION and isinstance(value, str):
            value = {TAG_OF_SECTION[key]: value}
        result[key] = _copy(value)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def default_level(algorithm: Any) -> str:
    """The level of privacy an algorithm has when none is asked for."""
    return "sample" if algorithm in DP_ALGORITHMS else "none"


def default_weighting(level: Any, algorithm: Any) -> str:
    """Uniform where the number of a client's samples is itself private, or where the paper's mean has no weights."""
    return "uniform" if level in ("update", "model") or algorithm in EVEN_ALGORITHMS else "samples"


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with every section present, every variant named, and the defaults that depend on other sections."""
    whole = expanded(raw)
    for section in ("data", "partition", "model", "fl", "algorithm", "privacy", "engine", "tracking"):
        if whole.get(section) is None:
            whole[section] = {}
    for section, option in _DEFAULT_TAG.items():
        _fill(whole[section], TAG_OF_SECTION[section], option)
    algorithm, privacy = whole["algorithm"], whole["privacy"]
    name = algorithm["name"] if isinstance(algorithm, dict) else None
    _fill(privacy, "level", default_level(name))
    level = privacy["level"] if isinstance(privacy, dict) else None
    if isinstance(algorithm, dict):
        _fill(algorithm, "local", {})
        _fill(algorithm, "aggregate", {})
        _fill(algorithm["local"], "optimizer", "sgd")
        _fill(algorithm["aggregate"], "weighting", default_weighting(level, name))
        if name in PROXY_ALGORITHMS and isinstance(whole["data"], dict):
            _fill(algorithm["aggregate"], "proxy_lr", default_proxy_lr(whole["data"]["name"]))
    if isinstance(privacy, dict) and level in ("sample", "update", "model"):
        if privacy.get("noise_multiplier") is None:
            _fill(privacy, "target_epsilon", DEFAULT_TARGET_EPSILON)
        if name == "sam_adpfl" and privacy.get("mode") == "paper":
            _fill(privacy, "adjacency", "zero_out")  # the text's sensitivity is C
        if name == "sam_adpfl" and isinstance(algorithm, dict):
            _fill(algorithm, "sharpness", {})
            _fill(algorithm["sharpness"], "statistics", "lagged" if level == "sample" else "current")
        if level == "sample" and name in SAM_ALGORITHMS:
            _fill(privacy, "ascent", "previous")
        if level == "sample" and privacy.get("sampling") == "without_replacement":
            _fill(privacy, "adjacency", "replace_one")
        if level in ("update", "model") and privacy.get("sampling") == "poisson":
            _fill(privacy, "adjacency", "add_remove")
        if level == "update" and privacy.get("clip_bound") == "quantile":
            _fill(privacy, "quantile", {})
    return whole


def _fill(section: Any, key: str, value: Any) -> None:
    """Sets a key that is absent or null, if the section is a mapping at all."""
    if isinstance(section, dict) and section.get(key) is None:
        section[key] = value
