"""The schema as text: one entry per key, for `fl-lightning config --keys`."""

from collections.abc import Iterator, Sequence

from fl_lightning.config.faults import InvalidConfig, show
from fl_lightning.config.index import Key, all_keys, describe, key_names
from fl_lightning.config.messages import unknown_key
from fl_lightning.config.schema import RunConfig


def list_keys(beginnings: Sequence[str] = ()) -> Iterator[str]:
    """Lines with each key's name, what it needs, its default, and under which variants it has a meaning.

    Raises:
        ConfigError: no key begins with one of `beginnings`.
    """
    for beginning in beginnings:
        if not any(name.startswith(beginning) for name in key_names(RunConfig)):
            raise InvalidConfig([unknown_key(RunConfig, beginning, {})])
    for name in key_names(RunConfig):
        if not beginnings or name.startswith(tuple(beginnings)):
            yield from _entry([key for key in all_keys(RunConfig) if key.name == name])


def _entry(variants: Sequence[Key]) -> Iterator[str]:
    key = variants[0]
    needs = list(dict.fromkeys(describe(item.field) for item in variants))
    facts = [" | ".join(needs)]
    if key.has_default and len(needs) == 1:
        facts.append(f"default {show(key.default)}")
    if only := _conditions(variants):
        facts.append("only with " + " and ".join(only))
    yield key.name
    yield "    " + "; ".join(facts)
    yield f"    {key.field.description}"


def _conditions(variants: Sequence[Key]) -> list[str]:
    """The choices that give a key its meaning; a choice of which every option has the key is none."""
    users = _options(variants)
    every = _options(all_keys(RunConfig))
    return [f"{at}={'|'.join(names)}" for at, names in users.items() if len(names) < len(every[at])]


def _options(keys: Sequence[Key]) -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = {}
    for key in keys:
        for at, names in key.conditions:
            found.setdefault(at, {}).update(dict.fromkeys(names))
    return found
