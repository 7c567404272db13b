"""From presets, a file and overrides to one validated configuration.

Order, the later wins: the schema's defaults, conf/config.yaml and its groups, `experiment=`, `--config FILE`, the
options of groups named on the command line, `key=value`. Hydra composes the presets once, here, at the entry; nothing
after this knows Hydra.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.config.changes import choose, drop, merged, set_at, without_defaults
from fl_lightning.config.defaults import TAG_OF_SECTION, expanded
from fl_lightning.config.faults import InvalidConfig
from fl_lightning.config.federation import Federation
from fl_lightning.config.numbers import to_path
from fl_lightning.config.overrides import parse_overrides
from fl_lightning.config.presets import preset_file, preset_folder, read_yaml, user_folder
from fl_lightning.config.schema import RunConfig
from fl_lightning.errors import ConfigError


@dataclass(frozen=True)
class Draft:
    """A composed configuration before it is validated, and where each of its values was set."""

    raw: dict[str, Any]
    sources: dict[str, str]

    def build(self, values: Mapping[str, Any] | None = None, source: str = "in the call") -> RunConfig:
        """Validates the draft with some dotted keys changed.

        Raises:
            ConfigError: naming key, value, rule, remedy and where the value was set.
        """
        raw, sources = self.raw, {**self.sources, **dict.fromkeys(values or {}, source)}
        for key, value in (values or {}).items():
            raw = set_at(raw, key, value)
        try:
            return RunConfig(**_interpolated(raw))
        except InvalidConfig as error:
            raise error.with_sources(sources) from None


def load_config(
    overrides: Sequence[str], *, config_file: Path | str | None = None, config_dir: Path | str | None = None
) -> RunConfig:
    """Composes and validates a configuration. Relative paths start at the current folder.

    Args:
        overrides: `group=option` and `dotted.key=value`, as on the command line.
        config_file: a YAML file with a full or partial configuration, for example what `fl-lightning config` printed.
        config_dir: a folder with the user's own groups, for example `algorithm/mine.yaml`.

    Raises:
        ConfigError: naming key, value, rule, remedy and where the value was set.
    """
    return draft(overrides, config_file=config_file, config_dir=config_dir).build()


def draft(
    overrides: Sequence[str],
    *,
    config_file: Path | str | None = None,
    config_dir: Path | str | None = None,
    source: str = "on the command line",
) -> Draft:
    """As `load_config`, without the last step: a part that is required may still be missing.

    `source` says in messages where the overrides were set.
    """
    own_presets = user_folder(config_dir) if config_dir is not None else None
    asked = parse_overrides(RunConfig, overrides, own_presets)
    raw, sources = _compose_presets(asked.groups, own_presets)
    groups = [group for group in asked.groups if group in TAG_OF_SECTION]
    if config_file is not None:
        file = to_path(config_file)
        saved = _read_saved(file)
        sources.update({key: f"in {file}" for key in _leaves(saved)})
        presets, raw = raw, without_defaults(RunConfig, merged(raw, saved))
        for group in groups:
            raw = choose(raw, group, presets[group])
    sources.update({f"{group}.{TAG_OF_SECTION[group]}": source for group in groups})
    for key in asked.removed:
        drop(raw, key)
    for key, value in asked.values.items():
        raw = set_at(raw, key, value)
        sources[key] = source
    return Draft(raw, sources)


def _compose_presets(groups: Mapping[str, str], own_presets: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What Hydra composes from the chosen options, and for each key the file that sets it."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    arguments = [f"{group}={option}" for group, option in groups.items()]
    if own_presets is not None:
        quoted = str(own_presets).replace("\\", "\\\\").replace("'", "\\'")
        arguments.append(f"hydra.searchpath=['file://{quoted}']")
    try:
        with initialize_config_dir(config_dir=str(preset_folder()), version_base="1.3"):
            composed = compose("config", overrides=arguments, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        chosen = " ".join(arguments) or "the default presets"
        raise ConfigError(f"{chosen}: cannot be composed: {' '.join(str(error).split())}") from None
    choices = {group: option for group, option in composed.hydra.runtime.choices.items() if "/" not in group}
    content = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(content, dict)
    del content["hydra"]
    return expanded({str(key): value for key, value in content.items()}), dict(_preset_sources(choices, own_presets))


def _preset_sources(choices: Mapping[str, Any], own_presets: Path | None) -> Iterator[tuple[str, str]]:
    """Dotted keys with the preset file that sets them; `experiment` comes last, as its values win."""
    for group, option in sorted(choices.items(), key=lambda item: item[0] == "experiment"):
        if isinstance(option, str) and (group in TAG_OF_SECTION or group == "experiment"):
            file = preset_file(group, option, own_presets)
            content = read_yaml(file)
            for key in _leaves(content if group == "experiment" else {group: content}):
                yield key, f"in {file}"


def _read_saved(file: Path) -> dict[str, Any]:
    saved = read_yaml(file)
    for key in saved:
        if "." in key:
            first, _, rest = key.partition(".")
            raise ConfigError(f"{file}: {key} needs to be nested: {first}: {{{rest}: ...}}")
    return expanded(saved)


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _interpolated(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with every `${key}` replaced; it may name any value that is set, and seed and fl.* by their defaults."""
    if not any("${" in text for text in _texts(raw)):
        return dict(raw)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    defaults = {"seed": RunConfig.model_fields["seed"].default, "fl": Federation().model_dump(mode="json")}
    whole = OmegaConf.create(merged(defaults, raw))
    try:
        resolved = OmegaConf.to_container(whole, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'an interpolation'}: {str(error).splitlines()[0]}; set that key"
        ) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in _only(resolved, raw).items()}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)


def _only(resolved: Mapping[Any, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `resolved` at the keys of `raw`."""
    return {
        key: _only(resolved[key], value) if isinstance(value, Mapping) else resolved[key] for key, value in raw.items()
    }
