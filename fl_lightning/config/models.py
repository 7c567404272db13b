"""`model.*`: which network the clients train."""

from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.numbers import Section


class PlainModel(Section):
    """A network without normalisation layers and without settings."""

    kind: Literal["lenet5", "vgg_like", "alexnet"] = Field(
        default="lenet5", description="the network; it adapts to the images' size"
    )


class ResNet18(Section):
    """ResNet-18 with the stem for small images (He et al. 2016)."""

    kind: Literal["resnet18"] = Field(default="resnet18", description="the network; it adapts to the images' size")
    norm: Literal["group", "batch"] = Field(
        default="group",
        description="normalisation; batch mixes the examples of a batch, so privacy.level=sample refuses it",
    )


ModelConfig = Annotated[PlainModel | ResNet18, Field(discriminator="kind")]
