"""Which models there are, which images each one fits, and how it is made: the size rules here need no torch."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Literal

from fl_lightning.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

_SMALLEST = {
    "lenet5": (4, "2 max-pools"),
    "vgg_like": (8, "3 max-pools"),
    "alexnet": (15, "strided convolution and 3 max-pools"),
    "resnet18": (1, "convolutions"),
}
"""The smallest height and width of each model's images, and what needs them: each max-pool halves, rounding down."""

MODEL_KINDS = tuple(_SMALLEST)


def check_fit(kind: str, channels: int, height: int, width: int) -> None:
    """Refuse, before torch is loaded, a model that cannot take images of this shape.

    All models take any number of channels (the first convolution is made for it), so only size can be wrong.

    Args:
        kind: `model.kind`, one of MODEL_KINDS.
        channels: of one image; 1 grey, 3 RGB.
        height: of one image, in pixels.
        width: of one image, in pixels.

    Raises:
        ConfigError: `kind` is unknown, or the images are too small: nothing would be left of them.
    """
    if kind not in _SMALLEST:
        near = difflib.get_close_matches(str(kind), MODEL_KINDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(MODEL_KINDS)}"
        raise ConfigError(f"model.kind={kind}: there is no such model; {hint}")
    if channels < 1:
        raise ConfigError(f"model.kind={kind}: images need at least 1 channel, the data set has {channels}")
    smallest, layers = _SMALLEST[kind]
    if min(height, width) < smallest:
        others = [name for name, (least, _) in _SMALLEST.items() if min(height, width) >= least]
        remedy = f"choose model.kind={others[0]} or larger images" if others else "choose larger images"
        raise ConfigError(
            f"model.kind={kind}: its {layers} need images of at least {smallest}x{smallest} pixels, "
            f"the data set has {height}x{width} with {channels} channel(s); {remedy}"
        )


def build_model(
    kind: str,
    channels: int,
    height: int,
    width: int,
    num_classes: int,
    generator: torch.Generator,
    norm: Literal["group", "batch"] = "group",
) -> nn.Module:
    """A freshly initialised model on the CPU, in float32; the global random state is neither read nor moved.

    Every model has `features(images)`, its penultimate representation [B, h].

    Args:
        kind: `model.kind`, one of MODEL_KINDS.
        channels: of one image.
        height: of one image, in pixels.
        width: of one image, in pixels.
        num_classes: logits per image, at least 1.
        generator: a CPU generator; the only source of the initial weights.
        norm: normalisation layers of resnet18; the other models have none.

    Raises:
        ConfigError: the images do not fit the model (see `check_fit`), or num_classes < 1.
    """
    check_fit(kind, channels, height, width)
    if num_classes < 1:
        raise ConfigError(f"model.kind={kind}: the data set has {num_classes} classes, at least 1 is needed")
    import torch

    from fl_lightning.models.alexnet import AlexNet
    from fl_lightning.models.initialise import initialise
    from fl_lightning.models.lenet5 import LeNet5
    from fl_lightning.models.resnet18 import ResNet18
    from fl_lightning.models.vgg_like import VGGLike

    # Built without storage, so that the layers' own initialisation draws nothing from the global generator.
    with torch.device("meta"):
        model: nn.Module
        if kind == "resnet18":
            model = ResNet18(channels, num_classes, norm)
        else:
            network = {"lenet5": LeNet5, "vgg_like": VGGLike, "alexnet": AlexNet}[kind]
            model = network(channels, height, width, num_classes)
    model = model.to_empty(device="cpu").to(torch.float32)
    initialise(model, generator)
    return model
