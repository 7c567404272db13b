"""`data.*` and `partition.*`: which images, and who holds them."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.numbers import AbsolutePath, Count, Int, Part, Positive, Section, Share


def default_data_root() -> Path:
    """FL_DATA_ROOT, else `data` in the start folder."""
    return Path(os.environ.get("FL_DATA_ROOT") or "data")


class Data(Section):
    """What every data set has."""

    name: str = Field(description="the data set")
    subset: Share = Field(default=1.0, description="stratified share of the training set to keep")
    validation: Part | None = Field(
        default=None,
        description="share of the clients' examples that are held out of training, to choose settings by; null: none, "
        "in a sweep that tunes 0.1",
    )


class Digits(Data):
    """scikit-learn's 1797 real 8x8 digits, embedded: nothing to download."""

    name: Literal["digits"] = Field(default="digits", description="the data set")


class TorchvisionData(Data):
    """A public set that `fl-lightning data prepare NAME` downloads once."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "emnist_digits"] = Field(description="the data set")
    root: AbsolutePath = Field(
        default_factory=default_data_root, description="folder of downloaded sets; default FL_DATA_ROOT, else ./data"
    )


class ImageFolder(Data):
    """A user's images: train/CLASS/*.png and test/CLASS/*.png."""

    name: Literal["image_folder"] = Field(default="image_folder", description="the data set")
    root: AbsolutePath = Field(description="folder that holds train/ and test/")


class Npz(Data):
    """A user's arrays: x_train, y_train, x_test, y_test."""

    name: Literal["npz"] = Field(default="npz", description="the data set")
    root: AbsolutePath = Field(description="the .npz file, or a folder that holds data.npz")


DataConfig = Annotated[Digits | TorchvisionData | ImageFolder | Npz, Field(discriminator="name")]


class Iid(Section):
    """Equal random shares."""

    kind: Literal["iid"] = Field(default="iid", description="how samples are dealt to clients")


class Dirichlet(Section):
    """For each class, shares of the clients drawn from Dirichlet(alpha)."""

    kind: Literal["dirichlet"] = Field(default="dirichlet", description="how samples are dealt to clients")
    alpha: Positive = Field(default=0.5, description="concentration; 0.1 is extreme skew, 100 nearly IID")
    min_samples: Count = Field(
        default=1, description="every client holds at least so many samples, those of data.validation among them"
    )


class LabelSkew(Section):
    """A few classes dominate each client, the others are rare."""

    kind: Literal["label_skew"] = Field(default="label_skew", description="how samples are dealt to clients")
    dominant_classes: Count = Field(default=2, description="classes that dominate a client")
    dominant_count: Annotated[Int, Field(ge=0)] = Field(default=230, description="samples of each dominant class")
    other_count: Annotated[Int, Field(ge=0)] = Field(default=5, description="samples of each other class")


class Shards(Section):
    """Samples sorted by label, cut in shards, a few shards to each client (McMahan et al. 2017)."""

    kind: Literal["shards"] = Field(default="shards", description="how samples are dealt to clients")
    shards_per_client: Count = Field(default=2, description="shards dealt to each client")


class PartitionFile(Section):
    """A natural split, given as index lists."""

    kind: Literal["file"] = Field(default="file", description="how samples are dealt to clients")
    path: AbsolutePath = Field(description=".json or .npz with one list of training indices per client")


PartitionConfig = Annotated[Iid | Dirichlet | LabelSkew | Shards | PartitionFile, Field(discriminator="kind")]
