"""The preset files: where they are, which options a group has, and what one says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.config.faults import Fault, InvalidConfig, no_such_option
from fl_lightning.errors import ConfigError

GROUPS = ("algorithm", "data", "partition", "model", "privacy", "engine", "experiment")
"""The groups a run may choose from; `sweep` is a group of its own."""


def preset_folder() -> Path:
    """The shipped `conf` folder: inside the package once installed, beside it in a checkout.

    Raises:
        ConfigError: neither exists, that is, the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"conf/config.yaml: not found beside {package}; reinstall fl-lightning")


def user_folder(folder: Path | str) -> Path:
    """A user's own folder of groups, made absolute.

    Raises:
        ConfigError: it is no folder, or one of its presets has a shipped preset's name and would be ignored.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(
            f"--config-dir={folder}: no such folder; give one that holds groups such as algorithm/NAME.yaml"
        )
    for group in (*GROUPS, "sweep"):
        for file in sorted(path.glob(f"{group}/*.yaml")):
            if (preset_folder() / group / file.name).exists():
                raise ConfigError(f"{file}: would be ignored, {group}={file.stem} is a shipped preset; rename the file")
    return path


def options(group: str, config_dir: Path | None = None) -> list[str]:
    """The names a group offers, shipped ones first."""
    folders = [preset_folder(), *([config_dir] if config_dir else [])]
    return [file.stem for folder in folders for file in sorted((folder / group).glob("*.yaml"))]


def preset_file(group: str, name: str, config_dir: Path | None = None) -> Path:
    """The file of one option.

    Raises:
        ConfigError: `group=name: no such option; did you mean ...? (options: ...)`.
    """
    for folder in (preset_folder(), *([config_dir] if config_dir else [])):
        if (file := folder / group / f"{name}.yaml").is_file() and "/" not in name:
            return file
    raise InvalidConfig([no_such_option(group, name, options(group, config_dir))])


def load_preset(group: str, name: str) -> dict[str, Any]:
    """What a shipped option sets, relative to its group."""
    return read_yaml(preset_file(group, name))


def read_yaml(file: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping (or nothing), with `1e-3` as a number and `${...}` left as it is.

    Raises:
        ConfigError: the file is absent, unreadable, no YAML, or holds something else.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}; check the path") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{file}: a YAML alias in it contains itself; write the value out") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: needs a mapping of keys to values, found a {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise InvalidConfig([Fault(str(key), "needs to be text", source=str(file))])
    return dict(content)
