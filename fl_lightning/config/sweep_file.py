"""Reading a sweep: the file that is named, then what the command line changes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.config.cluster import RayConfig
from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import Fault, InvalidConfig
from fl_lightning.config.index import all_keys, key_names
from fl_lightning.config.messages import unknown_key
from fl_lightning.config.numbers import to_path
from fl_lightning.config.overrides import parse_overrides, parse_value
from fl_lightning.config.presets import options, preset_file, read_yaml, user_folder
from fl_lightning.config.schema import RunConfig
from fl_lightning.config.sweep import SweepConfig
from fl_lightning.errors import ConfigError


def load_sweep(arguments: Sequence[str], *, config_dir: Path | str | None = None) -> tuple[SweepConfig, list[str]]:
    """Reads the arguments of `fl-lightning sweep`.

    `sweep=NAME` takes conf/sweep/NAME.yaml (or the user's), `sweep=path/to/file.yaml` a file from the start folder,
    `sweep.KEY=value` changes a field of it, `ray.KEY=value` says where it runs. Everything else overrides the run that
    all trials start from.

    Returns:
        The sweep, and the overrides of the run: the file's own, then the command line's.

    Raises:
        ConfigError: no such sweep, a fault in it, or an override that the sweep's own axes or seeds would replace.
    """
    own_presets = user_folder(config_dir) if config_dir is not None else None
    base = [item for item in arguments if not item.startswith(("sweep=", "sweep.", "ray."))]
    names = [item.removeprefix("sweep=") for item in arguments if item.startswith("sweep=")]
    changes = [item.removeprefix("sweep.") for item in arguments if item.startswith(("sweep.", "ray."))]
    raw: dict[str, Any] = {}
    if names:
        file = _sweep_file(names[-1], own_presets)
        content = read_yaml(file)
        if not content and not changes:
            raise ConfigError(f"{file}: is empty, so the sweep would vary nothing; see `fl-lightning sweep --help`")
        raw = {"name": file.stem, **content}
    elif not any(item.startswith("space.") for item in changes):
        raise ConfigError(
            f"sweep: name one, sweep=NAME or sweep=FILE.yaml (options: {', '.join(options('sweep', own_presets))})"
        )
    for change in changes:
        _apply(raw, change)
    sweep = SweepConfig(**raw)
    overrides = [*sweep.overrides, *base]
    parse_overrides(RunConfig, overrides, own_presets)
    _refuse_replaced(sweep, overrides)
    return sweep, overrides


def load_ray(arguments: Sequence[str]) -> RayConfig | None:
    """The `ray.KEY=value` of a command line alone; None where there is none.

    Raises:
        ConfigError: no such key, or a fault in it.
    """
    raw: dict[str, Any] = {}
    for argument in arguments:
        _apply(raw, argument)
    return SweepConfig(**raw).ray if raw else None


def _sweep_file(name: str, own_presets: Path | None) -> Path:
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return to_path(name)
    return preset_file("sweep", name, own_presets)


def _apply(raw: dict[str, Any], change: str) -> None:
    """Sets `KEY=value` in a raw sweep; the dots after `space.` and after `settings.ALGORITHM.` belong to one key."""
    key, equals, text = change.partition("=")
    path = key.split(".", maxsplit={"space": 1, "settings": 2}.get(key.partition(".")[0], -1))
    prefix = "" if path[0] == "ray" else "sweep."
    if not equals or not all(path):
        raise ConfigError(
            f"{prefix}{change}: needs the form {prefix or 'ray.'}KEY=value, for example sweep.seeds=[42,43]"
        )
    if path[0] not in ("space", "settings") and key not in key_names(SweepConfig):
        raise InvalidConfig([Fault(prefix + key, unknown_key(SweepConfig, key, {}, prefix=prefix).rule)])
    listed = key == "metric" and text.startswith("[")
    literal = not listed and any(item.is_text for item in all_keys(SweepConfig) if item.name == key)
    place = raw
    for part in path[:-1]:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise InvalidConfig([Fault(prefix + part, "needs to be a mapping", place)])
    place[path[-1]] = parse_value(prefix + key, text, literal=literal)


def _refuse_replaced(sweep: SweepConfig, overrides: Sequence[str]) -> None:
    tags = {f"{section}.{tag}": section for section, tag in TAG_OF_SECTION.items()}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        same = {key, tags.get(key, key), *(tag for tag, section in tags.items() if section == key)}
        if axis := next((name for name in sweep.space if name in same), None):
            raise InvalidConfig(
                [Fault(key, f"would be ignored: the sweep varies {axis}; remove one of the two", value)]
            )
        if key == "seed" and sweep.seeds:
            raise InvalidConfig([Fault(key, f"would be ignored: set sweep.seeds=[{value}]", value)])
