"""What a user's own functions return, checked before anything relies on it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.config.plugins import OwnAlgorithm, OwnData, OwnModel
from fl_lightning.data.datasets import ImageData, keep_share
from fl_lightning.errors import ConfigError, DataError
from fl_lightning.plugins.loading import call, fault_of, split


def own_algorithm(section: OwnAlgorithm, offered: Mapping[str, Any], shield: Protection) -> Algorithm:
    """The algorithm that the function returns.

    Args:
        section: the function and its own parameters.
        offered: everything an algorithm may ask for by name.
        shield: the run's protection, which the returned record has to carry wherever there is any.

    Raises:
        ConfigError: the function fails, returns something else, or drops the protection.
    """
    wanted = {name: offered[name] for name in section.offers if name in section.wants}
    algorithm = call("algorithm.name", section.name, {**wanted, **section.arguments})
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(f"{_at(section)}: returns {_kind(algorithm)}, it needs to return an fl_lightning.Algorithm")
    if shield.level != "none" and algorithm.protection is not shield:
        raise ConfigError(
            f"{_at(section)}: returns an Algorithm without the run's protection, so nothing would be accounted for; "
            "pass protection=protection to it"
        )
    return algorithm


def own_data(section: OwnData) -> ImageData:
    """The data set that the function returns, cut to `data.subset`.

    Raises:
        ConfigError: the function fails or returns something else.
        DataError: the data set breaks a rule of ImageData.
    """
    data = call("data.name", section.name, section.arguments)
    if not isinstance(data, ImageData):
        raise ConfigError(f"{_at(section)}: returns {_kind(data)}, it needs to return an fl_lightning.data.ImageData")
    if fault := _data_fault(data):
        raise DataError(f"{_at(section)}: {fault}")
    return keep_share(data, section.subset)


def own_model(
    section: OwnModel, shape: tuple[int, int, int], num_classes: int, generator: torch.Generator
) -> nn.Module:
    """The network that the function returns, on the CPU in float32.

    PyTorch's global generator is seeded from `generator` for the call and put back afterwards, so that layers which
    initialise themselves follow the run's seed too.

    Args:
        section: the function and its own parameters.
        shape: (channels, height, width) of one image.
        num_classes: logits per image.
        generator: the source of the initial weights.

    Raises:
        ConfigError: the function fails, returns something else, or a network that cannot take these images.
    """
    channels, height, width = shape
    seed = int(torch.randint(2**62, (1,), generator=generator))
    facts = {"channels": channels, "height": height, "width": width, "num_classes": num_classes, "generator": generator}
    wanted = {name: value for name, value in facts.items() if name in section.wants}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = call("model.kind", section.kind, {**wanted, **section.arguments})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{_at(section)}: returns {_kind(model)}, it needs to return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"{_at(section)}: returns a network without trainable parameters")
    model = model.to(device="cpu", dtype=torch.float32)
    images = f"images of {channels}x{height}x{width}"
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(2, *shape))
    except Exception as error:
        raise ConfigError(f"{_at(section)}: cannot take {images}{fault_of(error, split(section.kind)[0])}") from error
    if not isinstance(logits, Tensor) or logits.shape != (2, num_classes):
        found = list(logits.shape) if isinstance(logits, Tensor) else _kind(logits)
        raise ConfigError(
            f"{_at(section)}: for 2 {images} it gives {found}, it needs to give logits [2, {num_classes}]"
        )
    return model.train()


def _at(section: OwnAlgorithm | OwnData | OwnModel) -> str:
    where = {OwnAlgorithm: "algorithm.name", OwnData: "data.name", OwnModel: "model.kind"}[type(section)]
    return f"{where}={section.reference}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _data_fault(data: ImageData) -> str | None:
    """The first rule of ImageData that is broken, in words."""
    for part in ("train", "test"):
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        if not isinstance(x, Tensor) or x.dtype != torch.uint8 or x.dim() != 4 or not x.shape[0]:
            return f"x_{part} is {_described(x)}, it needs to be uint8 [N, C, H, W] with N >= 1"
        if not isinstance(y, Tensor) or y.dtype != torch.int64 or y.dim() != 1 or len(y) != len(x):
            return f"y_{part} is {_described(y)}, it needs to be int64 [{len(x)}], one label per image"
        if int(y.min()) < 0 or int(y.max()) >= data.num_classes:
            return f"y_{part} has labels {int(y.min())} to {int(y.max())}, they need to be 0 to {data.num_classes - 1}"
    if data.x_train.shape[1:] != data.x_test.shape[1:]:
        return f"x_train has images {list(data.x_train.shape[1:])} but x_test {list(data.x_test.shape[1:])}"
    channels = data.x_train.shape[1]
    for name in ("mean", "std"):
        values = getattr(data, name)
        if len(values) != channels or (name == "std" and min(values) <= 0):
            return f"{name} is {tuple(values)}, it needs {channels} numbers, one per channel; those of std above 0"
    if len(data.classes) != data.num_classes or data.num_classes < 2:
        return f"num_classes is {data.num_classes} with {len(data.classes)} names in classes; they need to agree, >= 2"
    return None


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return _kind(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
