"""`key=value` arguments in Hydra's grammar, read against the schema so that the messages are ours."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import Fault, InvalidConfig
from fl_lightning.config.index import all_keys, is_open_key, is_section, key_names
from fl_lightning.config.messages import unknown_key
from fl_lightning.config.presets import GROUPS, options, preset_file
from fl_lightning.errors import ConfigError
from fl_lightning.plugins.loading import is_reference


@dataclass
class Overrides:
    """What a command line asks for.

    Attributes:
        groups: option by group, `{"algorithm": "fedsam"}`.
        removed: dotted keys (`~key`) whose value in a preset, a file or an earlier argument is to be forgotten.
        values: value by dotted key, in the order given; the last one of a key counts.
    """

    groups: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


_KEY = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


def parse_overrides(root: type[BaseModel], arguments: Iterable[str], config_dir: Path | None = None) -> Overrides:
    """Reads overrides; nothing is composed yet.

    `GROUP=OPTION` chooses a preset, `GROUP=FILE.py:FUNCTION` a user's own function, `dotted.key=value` sets a value,
    `~dotted.key` returns to the default. Hydra's `+` and `++` are allowed and mean the same as nothing, since the
    schema knows all keys. Keys that hold text or a path take the rest of the argument as it is (only quotes around all
    of it are removed), so paths need no escapes.

    Raises:
        ConfigError: no `key=value`, no such key, no such option, or a value Hydra's grammar cannot read.
    """
    found = Overrides()
    for argument in arguments:
        if argument.startswith("~") and (argument[1:] in key_names(root) or is_open_key(root, argument[1:])):
            found.removed.append(argument[1:])
            found.values.pop(argument[1:], None)
            continue
        match = _KEY.fullmatch(argument)
        if not match:
            group = next((group for group in GROUPS if argument in options(group, config_dir)), None)
            example = f"did you mean {group}={argument}?" if group else "for example algorithm=fedsam or fl.rounds=5"
            raise ConfigError(f"{argument}: needs the form key=value; {example}")
        key, text = match[2], match[3]
        if key in TAG_OF_SECTION and is_reference(_unquoted(text)):
            key = f"{key}.{TAG_OF_SECTION[key]}"
        if key in GROUPS and not text.startswith("{"):
            found.groups[key] = _option(key, text, config_dir)
            continue
        if key not in key_names(root) and not is_section(root, key) and not is_open_key(root, key):
            raise InvalidConfig([unknown_key(root, key, {})])
        found.values[key] = parse_value(key, text, literal=_is_literal(root, key, text))
    return found


def _is_text(root: type[BaseModel], key: str) -> bool:
    return any(item.is_text for item in all_keys(root) if item.name == key)


def _is_literal(root: type[BaseModel], key: str, text: str) -> bool:
    """Whether `text` is to be taken letter by letter; the name of a variant is, where it names a user's function."""
    names_variant = key in [f"{section}.{tag}" for section, tag in TAG_OF_SECTION.items()]
    return is_reference(_unquoted(text)) if names_variant else _is_text(root, key)


def _option(group: str, text: str, config_dir: Path | None) -> str:
    name = _unquoted(text)
    if "," in name:
        raise InvalidConfig([_several(group, name)])
    preset_file(group, name, config_dir)
    return name


def _several(key: str, text: str) -> Fault:
    return Fault(key, "needs one value; to compare several use `fl-lightning sweep`", text)


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def parse_value(key: str, text: str, *, literal: bool = False) -> Any:
    """The value that `text` means in Hydra's grammar; `null` is None; with `literal`, the text itself.

    Raises:
        ConfigError: the text does not follow the grammar, or lists several values.
    """
    if literal:
        return None if text == "null" else _unquoted(text)
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={text}")
    except HydraException:
        raise InvalidConfig([Fault(key, f"cannot be read; put the value in quotes: \"{key}='...'\"", text)]) from None
    if parsed.is_sweep_override():
        raise InvalidConfig([_several(key, text)])
    return parsed.value()
