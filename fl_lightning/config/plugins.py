"""A user's own algorithm, data set or model in the schema: `algorithm.name=FILE.py:FUNCTION` and its parameters.

The function's signature is the schema of `algorithm.parameters.*` (`data.parameters.*`, `model.parameters.*`): each
parameter needs a type, its default is the key's default, and what its section offers anyway is passed by name and is no
parameter. Messages are those of the shipped keys.
"""

import typing
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fl_lightning.config.algorithms import Local, Mean, Sgd
from fl_lightning.config.faults import Fault
from fl_lightning.config.numbers import AbsolutePath, Int, Part, Real, Section, Share, Text
from fl_lightning.errors import ConfigError
from fl_lightning.plugins.loading import FORM, PluginError, file_sha256, is_reference, load, split, to_reference

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig

FAULT = "plugin"
"""The type of a pydantic error whose message is already in the user's words."""


@dataclass(frozen=True)
class Words:
    """Says in words what a field needs, where its type does not."""

    text: str


Reference = Annotated[str, Words(FORM)]


class OwnFunction(Section):
    """A section that a user's function takes the place of.

    `parameters`, a field of every subclass, holds plain values, complete with the function's defaults, so that a
    configuration can be saved and sent to another process without the function.
    """

    tag: ClassVar[str]
    offers: ClassVar[tuple[str, ...]]
    """What the function may ask for by name beside its own parameters."""
    if TYPE_CHECKING:
        parameters: dict[str, Any]

    @field_validator("name", "kind", mode="before", check_fields=False)
    @classmethod
    def _usable(cls, value: Any) -> str:
        try:
            reference = to_reference(value)
            parameters_model(reference, cls.offers)
        except PluginError as error:
            raise PydanticCustomError(FAULT, str(error)) from error
        return reference

    @field_validator("parameters", mode="before", check_fields=False)
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> dict[str, Any]:
        reference = info.data.get(cls.tag)
        if reference is None:
            return {}  # the reference itself is at fault, and that is told
        return parameters_model(reference, cls.offers).model_validate(value).model_dump(mode="json")

    @property
    def reference(self) -> str:
        return getattr(self, self.tag)

    @property
    def wants(self) -> frozenset[str]:
        """The names of all parameters of the function."""
        return frozenset(signature(load(self.reference)).parameters)

    @property
    def arguments(self) -> dict[str, Any]:
        """The function's own parameters with their typed values.

        Raises:
            ConfigError: the function has changed since this configuration was made.
        """
        try:
            model = parameters_model(self.reference, self.offers).model_validate(self.parameters)
        except (PluginError, ValidationError) as error:
            raise ConfigError(f"{self.reference}: has changed since the configuration was made: {error}") from error
        return {name: getattr(model, name) for name in type(model).model_fields}


_PARAMETERS = Annotated[dict[str, Any], Words("a mapping of the function's own parameters")]


class OwnAlgorithm(OwnFunction):
    """A function that returns an fl_lightning.Algorithm; see docs/add-an-algorithm.md."""

    tag: ClassVar[str] = "name"
    offers: ClassVar[tuple[str, ...]] = (
        "optimizer", "lr", "server_lr", "prior", "protection", "num_clients", "max_local_steps",
    )  # fmt: skip

    name: Reference = Field(description="the algorithm: a function in a file of yours")
    local: Local = Field(default=Sgd(), description="training on the client")
    aggregate: Mean = Field(default=Mean(), description="aggregation on the server")
    parameters: _PARAMETERS = Field(default_factory=dict, description="parameters of your function")


class OwnData(OwnFunction):
    """A function that returns an fl_lightning.data.ImageData."""

    tag: ClassVar[str] = "name"
    offers: ClassVar[tuple[str, ...]] = ()

    name: Reference = Field(description="the data set: a function in a file of yours")
    subset: Share = Field(default=1.0, description="stratified share of the training set to keep")
    validation: Part | None = Field(
        default=None,
        description="share of the clients' examples that are held out of training, to choose settings by; null: none, "
        "in a sweep that tunes 0.1",
    )
    parameters: _PARAMETERS = Field(default_factory=dict, description="parameters of your function")


class OwnModel(OwnFunction):
    """A function that returns a torch.nn.Module."""

    tag: ClassVar[str] = "kind"
    offers: ClassVar[tuple[str, ...]] = ("channels", "height", "width", "num_classes", "generator")

    kind: Reference = Field(description="the network: a function in a file of yours")
    parameters: _PARAMETERS = Field(default_factory=dict, description="parameters of your function")


@dataclass(frozen=True)
class Open:
    """Marks a section of shipped variants as one that a user's own function may take the place of."""

    model: type[OwnFunction]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        shipped = handler(source)

        def validate(value: Any, shipped_variants: Callable[[Any], Any]) -> Any:
            tag = value.get(self.model.tag) if isinstance(value, Mapping) else getattr(value, self.model.tag, None)
            return self.model.model_validate(value) if is_reference(tag) else shipped_variants(value)

        def serialise(value: Any, shipped_variants: Callable[[Any], Any], info: Any) -> Any:
            return value.model_dump(mode=info.mode) if isinstance(value, self.model) else shipped_variants(value)

        written = core_schema.wrap_serializer_function_ser_schema(serialise, info_arg=True, schema=shipped)
        return core_schema.no_info_wrap_validator_function(validate, shipped, serialization=written)

    def typed(self, reference: Any) -> type[BaseModel]:
        """The section's class with the function's own parameters as fields; without them where they cannot be read."""
        try:
            parameters = parameters_model(to_reference(reference), self.model.offers)
        except PluginError:
            return self.model
        return _typed(self.model, parameters)


def parameters_model(reference: str, offers: Collection[str]) -> type[Section]:
    """The function's own parameters as a section.

    Raises:
        PluginError: the function cannot be loaded, or has a parameter that no key could set.
    """
    return _parameters_of(load(reference), split(reference)[1], tuple(offers))


@lru_cache(maxsize=256)
def _typed(model: type[OwnFunction], parameters: type[Section]) -> type[BaseModel]:
    fields: dict[str, Any] = {"parameters": (parameters, Field(description="parameters of your function"))}
    return create_model(model.__name__, __base__=model, **fields)


@lru_cache(maxsize=256)
def _parameters_of(function: Callable[..., Any], name: str, offers: tuple[str, ...]) -> type[Section]:
    try:
        target: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        hints = typing.get_type_hints(target, include_extras=True)
    except Exception as error:
        raise PluginError(f"the types of {name} cannot be read: {type(error).__name__}: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in signature(function).parameters.values():
        if parameter.name not in offers:
            default = ... if parameter.default is Parameter.empty else parameter.default
            description = f"parameter of {name}"
            fields[parameter.name] = (_type_of(parameter, hints, name), Field(default, description=description))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a parameter may be called copy or json
        return create_model("Parameters", __base__=_Parameters, **fields)


class _Parameters(Section):
    model_config = ConfigDict(protected_namespaces=())


def _type_of(parameter: Parameter, hints: Mapping[str, Any], function: str) -> Any:
    where = f"parameter {parameter.name} of {function}"
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        raise PluginError(f"{function} takes *{parameter.name}; name every parameter, so that a misspelt key is found")
    if parameter.kind is Parameter.POSITIONAL_ONLY or parameter.name.startswith("_"):
        raise PluginError(f"{where} cannot be set by name; rename it, or remove the / after it")
    if parameter.name not in hints:
        raise PluginError(f"{where} has no type; write {parameter.name}: float, for example")
    kind = _setting(hints[parameter.name])
    if kind is None:
        raise PluginError(
            f"{where} has a type that no key can have; use float, int, bool, str, pathlib.Path, a Literal, or one of "
            "these or None"
        )
    return kind


_SETTINGS = {float: Real, int: Int, bool: bool, str: Text, Path: AbsolutePath, NoneType: NoneType}


def _setting(hint: Any) -> Any:
    """The schema's type for a Python type; None if it has none."""
    origin = get_origin(hint)
    if origin is Literal:
        return hint
    if origin in (Union, UnionType):
        options = [_setting(option) for option in get_args(hint)]
        return None if None in options else Union[tuple(options)]  # noqa: UP007
    if origin is Annotated:
        base, *rules = get_args(hint)
        converted = any(isinstance(rule, BeforeValidator | AfterValidator) for rule in rules)
        inner = base if converted and base in _SETTINGS else _setting(base)
        return None if inner is None else Annotated[(inner, *rules)]
    return _SETTINGS.get(hint)


def plugin_faults(config: "RunConfig") -> Iterator[Fault]:
    """Settings that an own algorithm's function does not ask for, and would therefore ignore."""
    algorithm = config.algorithm
    if not isinstance(algorithm, OwnAlgorithm):
        return
    function, wants = split(algorithm.name)[1], algorithm.wants
    idle: dict[str, Any] = {}
    if "server_lr" not in wants:
        idle["aggregate.server_lr"] = "server_lr", algorithm.aggregate.server_lr, 1.0
    if "prior" not in wants:
        usual = "uniform" if config.privacy.level == "update" else "samples"
        idle["aggregate.weighting"] = "prior", algorithm.aggregate.weighting, usual
    if "optimizer" not in wants:
        usual_local = dict(Sgd())
        for key, value in algorithm.local:
            if key != "lr" or "lr" not in wants:
                idle[f"local.{key}"] = "optimizer", value, usual_local.get(key)
    for key, (name, value, usual) in idle.items():
        if value != usual:
            yield Fault(f"algorithm.{key}", f"would be ignored: {function} takes no parameter {name}; remove it", value)
    if config.privacy.level != "none" and "protection" not in wants:
        yield Fault(
            "privacy.level",
            f"{function} takes no parameter protection, so it would protect nothing; add it, or set privacy.level=none",
            config.privacy.level,
        )


def computed_by(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration's plain values with the content of every own file in place of its path."""
    result = dict(plain)
    for section, tag in (("algorithm", "name"), ("data", "name"), ("model", "kind")):
        reference = plain[section][tag]
        if is_reference(reference):
            content = f"{file_sha256(reference)}:{split(reference)[1]}"
            result[section] = {**plain[section], tag: content}
    return result
