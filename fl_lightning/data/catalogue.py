"""What is known of each shipped data set before it is read: no torch, no numpy, no file access.

Mean and std are per channel, in units of pixel / 255, and are the figures published for the training images. They are
constants: statistics computed from a federation's own data would be a release that no privacy ledger covers.
"""

from dataclasses import dataclass

_IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Source:
    """One form in which a data set may lie under `data.root`: relative paths, all of which must be there."""

    files: tuple[str, ...]
    packed: bool
    """Archives as published, checked against their published md5 and unpacked in the cache folder."""


@dataclass(frozen=True)
class KnownSet:
    """A public data set: its shape and constants, and for torchvision's sets where the files lie."""

    name: str
    title: str
    shape: tuple[int, int, int]
    """(channels, height, width) of one image."""
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    torchvision: str = ""
    """The class in torchvision.datasets; empty for a set that needs no files."""
    split: str = ""
    sources: tuple[Source, ...] = ()
    """In order of preference."""
    train: int = 0
    """How many training images it has."""

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def _idx_sources(folder: str) -> tuple[Source, ...]:
    # Archives first: their md5 is published, the unpacked files carry no checksum.
    return (
        Source(tuple(f"{folder}/raw/{file}.gz" for file in _IDX_FILES), packed=True),
        Source(tuple(f"{folder}/raw/{file}" for file in _IDX_FILES), packed=False),
    )


_EMNIST_FILES = tuple(f"emnist-digits-{file.replace('t10k', 'test')}" for file in _IDX_FILES)
_CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")

_SETS = (
    KnownSet("digits", "scikit-learn digits", (1, 8, 8), _DIGITS, (0.3053,), (0.3760,), train=1438),
    KnownSet(
        "mnist",
        "MNIST",
        (1, 28, 28),
        _DIGITS,
        (0.1307,),
        (0.3081,),
        torchvision="MNIST",
        sources=_idx_sources("MNIST"),
        train=60_000,
    ),
    KnownSet(
        "fashion_mnist",
        "Fashion-MNIST",
        (1, 28, 28),
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        (0.2860,),
        (0.3530,),
        torchvision="FashionMNIST",
        sources=_idx_sources("FashionMNIST"),
        train=60_000,
    ),
    KnownSet(
        "emnist_digits",
        "EMNIST digits",
        (1, 28, 28),
        _DIGITS,
        (0.173,),
        (0.332,),
        torchvision="EMNIST",
        split="digits",
        # Unpacked files first: the archive holds all six EMNIST splits and takes gigabytes to unpack.
        sources=(
            Source(tuple(f"EMNIST/raw/{file}" for file in _EMNIST_FILES), packed=False),
            Source(("EMNIST/raw/gzip.zip",), packed=True),
        ),
        train=240_000,
    ),
    KnownSet(
        "cifar10",
        "CIFAR-10",
        (3, 32, 32),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
        torchvision="CIFAR10",
        # Unpacked batches first: torchvision checks the md5 of each one.
        sources=(
            Source(tuple(f"cifar-10-batches-py/{batch}" for batch in _CIFAR_BATCHES), packed=False),
            Source(("cifar-10-python.tar.gz",), packed=True),
        ),
        train=50_000,
    ),
)

KNOWN_SETS: dict[str, KnownSet] = {known.name: known for known in _SETS}
"""By `data.name`. `image_folder` and `npz` are the user's own data and are not here."""

USER_MEAN, USER_STD = 0.5, 0.25
"""Normalisation of a user's own images, the same for every channel: maps pixels to [-2, 2] and looks at no datum."""
