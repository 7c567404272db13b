"""A configuration as MLflow parameters: dotted names, short values, and nothing lost by the shortening."""

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VALUE_LIMIT = 500
"""Longest parameter value, in characters. MLflow's limit was 250, 500 and 6000 by version; 500 suits every store."""

TAG_LIMIT = 5000
"""Longest tag value, in characters; MLflow's limit was 5000 and 8000 by version."""

NAME_LIMIT = 250
"""Longest name of a parameter, metric or tag, in characters."""

PARAMS_FILE = "params.json"
MARK = f"...[whole value in {PARAMS_FILE}]"


@dataclass(frozen=True)
class Params:
    """Parameters ready to send, and their whole form.

    Attributes:
        sent: name -> text, within the limits of the store.
        whole: dotted name -> value, uncut.
        names: sent name -> dotted name, for those that had to be renamed.
    """

    sent: dict[str, str]
    whole: dict[str, Any]
    names: dict[str, str]

    @property
    def cut(self) -> bool:
        """Whether `params.json` is needed to know the parameters."""
        return bool(self.names) or any(text.endswith(MARK) for text in self.sent.values())

    def to_json(self) -> str:
        return json.dumps({"params": self.whole, "names": self.names}, indent=1, default=str)


def params_of(config: Mapping[str, Any]) -> Params:
    """Flattens a nested configuration: `{"algorithm": {"local": {"rho": 0.05}}}` is `algorithm.local.rho = 0.05`."""
    whole = dict(flatten(config))
    sent = {store_name(name): shorten(as_text(value)) for name, value in whole.items()}
    names = {store_name(name): name for name in whole if store_name(name) != name}
    return Params(sent, whole, names)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of dotted name and leaf; a list or an empty mapping is a leaf."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def as_text(value: Any) -> str:
    """A value as a configuration file has it: text as it is, everything else as JSON (`true`, `null`, 0.05)."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shorten(text: str, limit: int = VALUE_LIMIT, mark: str = MARK) -> str:
    """The text, cut to `limit` characters with a visible mark if it is longer."""
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def tags_of(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags within the limits of the store; one that is None is left out, one that is too long ends in dots."""
    return {store_name(key): shorten(str(value), TAG_LIMIT, "...") for key, value in tags.items() if value is not None}


def store_name(name: str) -> str:
    """A name every store takes. One that is too long or has other characters is cut or replaced and gets a hash."""
    clean = re.sub(r"[^/\w.\- ]", "_", name)
    if posixpath.normpath(clean) != clean or clean.startswith(("/", "..")) or clean == ".":
        clean = clean.replace("/", "_").replace(".", "_")
    if clean == name and len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{clean[: NAME_LIMIT - 11]}-{digest}"


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of only dicts, lists, texts, numbers, booleans and None."""
    return json.loads(json.dumps(config, default=str))


def config_sha256(config: Mapping[str, Any]) -> str:
    """Hash of what is run: all of the configuration except `tracking`, which only says where it is written down."""
    content = {key: value for key, value in config.items() if key != "tracking"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + size] for first in range(0, len(items), size))
