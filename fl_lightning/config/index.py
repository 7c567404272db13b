"""The schema seen from outside: every dotted key, under which variants it has a meaning, and what it needs."""

import types
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fl_lightning.config.plugins import Open, Words
from fl_lightning.plugins.loading import FORM, is_reference


@dataclass(frozen=True)
class Key:
    """One setting.

    Attributes:
        name: dotted, for example `algorithm.local.rho`.
        field: pydantic's record of it: type, bounds, default, description.
        conditions: pairs (dotted key, variants) that must hold for the setting to have a meaning.
    """

    name: str
    field: FieldInfo
    conditions: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def default(self) -> Any:
        """The schema's default; PydanticUndefined where the user must choose."""
        return self.field.get_default(call_default_factory=True)

    @property
    def has_default(self) -> bool:
        """Whether the user may leave the setting out."""
        return self.default is not PydanticUndefined

    @property
    def is_text(self) -> bool:
        """Whether the value is free text or a path, to be taken from a command line letter by letter."""
        kinds = set(_leaf_types(self.field.annotation))
        return bool(kinds & {str, Path})

    @property
    def is_path(self) -> bool:
        """Whether the value is a path."""
        return Path in set(_leaf_types(self.field.annotation))


def section_models(field: FieldInfo) -> tuple[type[BaseModel], ...]:
    """The classes a field's section may have; empty for a plain value."""
    options = get_args(field.annotation) if get_origin(field.annotation) in (Union, types.UnionType) else ()
    candidates = (*(options or (field.annotation,)), *(mark.model for mark in _open(field)))
    return tuple(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))


def _open(field: FieldInfo) -> tuple[Open, ...]:
    """The mark of a section that a user's own function may take the place of; empty for other fields."""
    return tuple(mark for mark in field.metadata if isinstance(mark, Open))


def tags_of(model: type[BaseModel], discriminator: str) -> tuple[str, ...]:
    """The names by which a variant is chosen; FORM stands for any of a user's own functions."""
    annotation = model.model_fields[discriminator].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else (FORM,)


def chosen_by(names: Container[str], tag: Any) -> bool:
    """Whether a variant's name or a reference to a user's function is among `names`."""
    return (FORM if is_reference(tag) else tag) in names


def is_open_key(root: type[BaseModel], name: str) -> bool:
    """Whether a dotted name leads into the parameters of a user's own function, which the schema does not list."""
    section, _, rest = name.partition(".parameters.")
    return bool(rest) and f"{section}.parameters" in key_names(root)


def tags(field: FieldInfo) -> list[str]:
    """All names by which a field's variants are chosen."""
    assert isinstance(field.discriminator, str)
    return [tag for model in section_models(field) for tag in tags_of(model, field.discriminator)]


def variant(field: FieldInfo, raw: Any) -> type[BaseModel] | None:
    """The class that a raw section means; the first one when it does not say, None when it names no variant."""
    models = section_models(field)
    if not isinstance(field.discriminator, str):
        return models[0] if models else None
    tag = raw.get(field.discriminator) if isinstance(raw, Mapping) else None
    if tag is None:
        return models[0]
    if is_reference(tag):
        return next((mark.typed(tag) for mark in _open(field)), None)
    return next((model for model in models if tag in tags_of(model, field.discriminator)), None)


def field_at(root: type[BaseModel], raw: Any, path: tuple[str, ...]) -> FieldInfo | None:
    """The field a path leads to under the variants that `raw` has chosen; None if it has no meaning there."""
    model: type[BaseModel] | None = root
    for position, part in enumerate(path):
        if model is None or part not in model.model_fields:
            return None
        field = model.model_fields[part]
        if position == len(path) - 1:
            return field
        raw = raw.get(part) if isinstance(raw, Mapping) else None
        model = variant(field, raw)
    return None


def value_at(raw: Any, dotted: str) -> Any:
    """The value at a dotted key of nested mappings; None if there is none."""
    for part in dotted.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return None
        raw = raw[part]
    return raw


@cache
def all_keys(root: type[BaseModel]) -> tuple[Key, ...]:
    """Every setting under every combination of variants, in the schema's order."""
    return tuple(_walk(root, "", ()))


@cache
def key_names(root: type[BaseModel]) -> tuple[str, ...]:
    """The distinct dotted names of `all_keys`."""
    return tuple(dict.fromkeys(key.name for key in all_keys(root)))


def is_section(root: type[BaseModel], name: str) -> bool:
    """Whether a dotted name leads to a section, not to a value."""
    return any(key.startswith(name + ".") for key in key_names(root))


def _walk(model: type[BaseModel], prefix: str, conditions: tuple[tuple[str, tuple[str, ...]], ...]) -> Iterator[Key]:
    for part, field in model.model_fields.items():
        name = prefix + part
        models = section_models(field)
        if not models:
            yield Key(name, field, conditions)
        for option in models:
            held = conditions
            if isinstance(field.discriminator, str):
                held = (*conditions, (f"{name}.{field.discriminator}", tags_of(option, field.discriminator)))
            yield from _walk(option, name + ".", held)


def describe(field: FieldInfo) -> str:
    """What a value must be, in words: `a number > 0`, `a whole number >= 1`, `one of sgd, momentum, adam`."""
    kinds = set(_leaf_types(field.annotation))
    options = literals(field)
    words = [word for kind, word in _WORDS.items() if kind in kinds]
    if options:
        words = [str(options[0]) if len(options) == 1 else "one of " + ", ".join(map(str, options))]
    rules = list(_metadata(field))
    words = [rule.text for rule in rules if isinstance(rule, Words)] or words
    bounds = [f"{sign} {_plain(getattr(rule, at))}" for rule in rules for at, sign in _BOUNDS if hasattr(rule, at)]
    if any(getattr(rule, "min_length", None) for rule in rules):
        bounds.append("that is not empty")
    return " ".join([*words, " and ".join(bounds)]).strip() + (", or null" if type(None) in kinds else "")


def literals(field: FieldInfo) -> tuple[Any, ...]:
    """The values a field of fixed options may take; empty for other fields."""
    kinds = [kind for kind in _leaf_types(field.annotation) if get_origin(kind) is Literal]
    return tuple(option for kind in kinds for option in get_args(kind))


def _plain(bound: float) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def _leaf_types(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _leaf_types(option)
    elif origin is Annotated:
        yield from _leaf_types(get_args(annotation)[0])
    else:
        yield annotation


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    for option in get_args(field.annotation):
        if get_origin(option) is Annotated:
            for item in get_args(option)[1:]:
                yield from item.metadata if isinstance(item, FieldInfo) else [item]
