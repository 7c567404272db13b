"""One call, `load_data`, from a data configuration to uint8 tensors in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.cache import Entry
from fl_lightning.data.catalogue import KNOWN_SETS, USER_MEAN, USER_STD
from fl_lightning.data.image_folder import prepare_image_folder, read_image_folder
from fl_lightning.data.npz_file import read_npz
from fl_lightning.data.torchvision_sets import prepare_torchvision_set, read_torchvision_set
from fl_lightning.errors import DataError
from fl_lightning.rng import numpy_generator

_DIGITS_TEST_SHARE = 0.2
_FIXED_SEED = 0  # splits and shares belong to the data set, so that runs with different seeds see the same images


class DataConfig(Protocol):
    """What is read of a `data` variant; every variant but digits also has `root`."""

    @property
    def name(self) -> str: ...

    @property
    def subset(self) -> float: ...


@dataclass(frozen=True, eq=False)
class ImageData:
    """A classification data set in memory. N images, C channels, H x W pixels.

    Pixels stay uint8; a batch is normalised when it is drawn: (pixel / 255 - mean) / std, per channel.
    """

    name: str
    x_train: Tensor
    """uint8 [N, C, H, W], contiguous."""
    y_train: Tensor
    """int64 [N], 0..num_classes-1."""
    x_test: Tensor
    y_test: Tensor
    num_classes: int
    mean: tuple[float, ...]
    """Per channel, in units of pixel / 255. A published constant, or 0.5 for a user's data: never computed from it."""
    std: tuple[float, ...]
    """Likewise; 0.25 for a user's data."""
    classes: tuple[str, ...]
    """The class names, in label order."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        _, channels, height, width = self.x_train.shape
        return channels, height, width


def load_data(config: DataConfig) -> ImageData:
    """Read the data set that `config` names; nothing is ever downloaded here.

    `subset` takes a stratified share of the **training** images: round(subset * N) in all, split over the classes in
    proportion, at least one of each. The choice depends on nothing but the labels (a larger share contains a smaller
    one, up to rounding), and the images keep their order. The test set stays whole, so that accuracies of different
    shares compare.

    The normalisation constants of a user's own data are fixed (mean 0.5, std 0.25) and not measured: statistics of
    private images would be a release that no epsilon covers.

    Args:
        config: `name` and `subset` in (0, 1]; `root`, except for digits.

    Raises:
        DataError: the files are missing, damaged or of the wrong form; the message names them and the remedy.
    """
    entry, known = _read(config), KNOWN_SETS.get(config.name)
    channels = entry.arrays["x_train"].shape[1]
    whole = ImageData(
        name=config.name,
        x_train=torch.from_numpy(entry.arrays["x_train"]),
        y_train=torch.from_numpy(entry.arrays["y_train"]),
        x_test=torch.from_numpy(entry.arrays["x_test"]),
        y_test=torch.from_numpy(entry.arrays["y_test"]),
        num_classes=len(entry.facts["classes"]),
        mean=known.mean if known else (USER_MEAN,) * channels,
        std=known.std if known else (USER_STD,) * channels,
        classes=tuple(entry.facts["classes"]),
    )
    return keep_share(whole, config.subset)


def keep_share(data: ImageData, share: float) -> ImageData:
    """The data set with a stratified share of its training images, as `load_data` describes it.

    Raises:
        DataError: the share is not in (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise DataError(f"data.subset={share}: must be in (0, 1], the share of the training images to keep")
    if share == 1.0:
        return data
    kept = torch.from_numpy(stratified_share(data.y_train.numpy(), share, numpy_generator(_FIXED_SEED, "subset")))
    return replace(data, x_train=data.x_train[kept], y_train=data.y_train[kept])


def prepare(name: str, root: str | Path) -> Path:
    """Make a data set ready for runs without network: download it if need be, check it and decode it into the cache.

    Args:
        name: mnist, fashion_mnist, emnist_digits or cifar10 (downloaded to `root` when absent), or image_folder.
        root: where the files are or shall be; becomes `data.root`.

    Returns:
        The folder of the cache entry.

    Raises:
        DataError: the set has nothing to prepare, or its files could not be fetched or read; a failed download leaves
            nothing behind.
    """
    if name == "image_folder":
        return prepare_image_folder(Path(root))
    known = KNOWN_SETS.get(name)
    if known is not None and known.torchvision:
        return prepare_torchvision_set(name, Path(root))
    names = ", ".join([*(key for key, value in KNOWN_SETS.items() if value.torchvision), "image_folder"])
    why = {"digits": "comes with scikit-learn and needs no files", "npz": "is read in place"}.get(name)
    raise DataError(f"data.name={name} {why or 'is no data set that is known'}; those to prepare are {names}")


def stratified_share(labels: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Sorted indices of round(share * N) samples, each class in proportion and none that occurs left out.

    Largest remainders decide who gets the odd sample. Classes without a whole sample get one, so the total may exceed
    round(share * N) by at most the number of classes.

    Args:
        labels: int64 [N], from 0.
        share: in (0, 1].
        generator: decides which samples of a class are taken; the draws do not depend on `share`.
    """
    counts = np.bincount(labels)
    quota = share * counts
    take = np.floor(quota).astype(np.int64)
    odd = round(share * len(labels)) - int(take.sum())
    take[np.argsort(take - quota, kind="stable")[: max(odd, 0)]] += 1
    take = np.minimum(np.maximum(take, 1), counts)
    chosen = [generator.permutation(np.flatnonzero(labels == label))[: take[label]] for label in range(len(counts))]
    return np.sort(np.concatenate(chosen))


def _read(config: Any) -> Entry:
    if config.name == "digits":
        return _read_digits()
    if config.name == "image_folder":
        return read_image_folder(Path(config.root))
    if config.name == "npz":
        return read_npz(Path(config.root))
    if config.name in KNOWN_SETS:
        return read_torchvision_set(config.name, Path(config.root))
    raise DataError(f"data.name={config.name}: no such data set; choose {', '.join(KNOWN_SETS)}, image_folder or npz")


def _read_digits() -> Entry:
    """scikit-learn's 1797 real 8x8 digits (levels 0..16 as 0..255), a fixed stratified fifth of them for testing."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    y = bunch.target.astype(np.int64)
    test = stratified_share(y, _DIGITS_TEST_SHARE, numpy_generator(_FIXED_SEED, "digits-test"))
    train = np.setdiff1d(np.arange(len(y)), test)
    arrays = {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}
    return Entry(arrays, {"classes": list(KNOWN_SETS["digits"].classes)})
