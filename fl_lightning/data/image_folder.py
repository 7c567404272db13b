"""A user's own images: `root/train/<class>/...` and `root/test/<class>/...`, decoded once into the cache."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fl_lightning.data.cache import Entry, cache_root, cached, fingerprint, short_hash
from fl_lightning.errors import DataError

_EXTENSIONS = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_LOG = logging.getLogger(__name__)


def read_image_folder(root: Path) -> Entry:
    """x_train, x_test uint8 [N, C, H, W], y_train, y_test int64 [N] and the class names of the folder `root`.

    Classes are the folder names in alphabetical order, which train/ and test/ must share. Within a class the images
    are ordered by path. Grey images have 1 channel, RGB and palette images 3; all must have one size and one channel
    count. Hidden files and folders are skipped; other files that are no images are skipped with a warning. The decoded
    arrays are kept in the cache and made again when a file's path, size or time of writing changes.

    Raises:
        DataError: the layout is wrong, or a file cannot be decoded or has another shape; the message names it.
    """
    root = root.expanduser().resolve()
    try:
        classes, train, test = _scan(root)
        key = fingerprint(root, [file for file, _ in (*train, *test)])
    except OSError as error:
        raise DataError(f"data.root={root}: the folder cannot be read ({error}); mend its permissions") from error
    return cached(_entry_name(root), key, lambda _: _decode(root, classes, train, test))


def prepare_image_folder(root: Path) -> Path:
    """Decode the folder now; returns the cache entry's folder. Raises DataError as `read_image_folder`."""
    read_image_folder(root)
    return cache_root() / _entry_name(root.expanduser().resolve())


def _entry_name(root: Path) -> str:
    return f"image_folder-{short_hash(str(root))}"


def _scan(root: Path) -> tuple[list[str], list[tuple[Path, int]], list[tuple[Path, int]]]:
    """The class names, and (file, label) of the training and of the test images."""
    found: dict[str, list[str]] = {}
    for part in ("train", "test"):
        folder = root / part
        if not folder.is_dir():
            raise DataError(
                f"data.root={root}: an image folder needs train/ and test/, each with one folder of images per class; "
                f"{folder} is not there"
            )
        found[part] = sorted(child.name for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
        if not found[part]:
            raise DataError(f"data.root={root}: {folder} has no class folders; put the images of each class in one")
    if found["train"] != found["test"]:
        alone = sorted(set(found["train"]) ^ set(found["test"]))
        part = "train" if alone[0] in found["train"] else "test"
        raise DataError(
            f"data.root={root}: train/ and test/ must have the same classes; {len(alone)} are in one of them only, "
            f"for example {alone[0]!r} in {part}/"
        )
    classes = found["train"]
    if len(classes) < 2:
        raise DataError(f"data.root={root}: there is one class only ({classes[0]!r}); at least 2 are needed")
    return classes, _labelled(root / "train", classes), _labelled(root / "test", classes)


def _labelled(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    pairs: list[tuple[Path, int]] = []
    skipped = [file for file in folder.iterdir() if file.is_file() and file.name[0] != "."]
    for label, name in enumerate(classes):
        images = 0
        for file in _walk(folder / name):
            if file.suffix.lower() in _EXTENSIONS:
                pairs.append((file, label))
                images += 1
            else:
                skipped.append(file)
        if not images:
            known = " ".join(sorted(_EXTENSIONS))
            raise DataError(
                f"data.root={folder.parent}: {folder / name} holds no image ({known}); add some, or remove it"
            )
    if skipped:
        _LOG.warning("%s: skipped %d file(s) that are no images of a class, first %s", folder, len(skipped), skipped[0])
    return pairs


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (Path(where, name) for name in sorted(files) if name[0] != ".")


def _decode(root: Path, classes: list[str], train: list[tuple[Path, int]], test: list[tuple[Path, int]]) -> Entry:
    first = train[0][0]
    shape = _pixels(root, first).shape
    arrays: dict[str, np.ndarray] = {}
    for part, pairs in (("train", train), ("test", test)):
        try:
            x = np.empty((len(pairs), *shape), dtype=np.uint8)
        except MemoryError as error:
            size = len(pairs) * float(np.prod(shape)) / 2**30
            raise DataError(
                f"data.root={root}: {part}/ needs {size:.1f} GiB of memory; use fewer or smaller images"
            ) from error
        for i, (file, _) in enumerate(pairs):
            pixels = _pixels(root, file)
            if pixels.shape != shape:
                raise DataError(
                    f"data.root={root}: {file} is {_in_words(pixels.shape)} but {first} is {_in_words(shape)}; all "
                    "images must have one size and channel count: resize or convert them first"
                )
            x[i] = pixels
        arrays[f"x_{part}"] = x
        arrays[f"y_{part}"] = np.array([label for _, label in pairs], dtype=np.int64)
    return Entry(arrays, {"classes": classes})


def _pixels(root: Path, file: Path) -> np.ndarray:
    """One image, uint8 [C, H, W] with C = 1 or 3."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            mode = {"1": "L", "P": "RGB"}.get(image.mode, image.mode)
            if mode not in ("L", "RGB") or "transparency" in image.info:
                what = "transparent pixels" if "transparency" in image.info else f"pixels of mode {image.mode}"
                raise DataError(
                    f"data.root={root}: {file} has {what}; only opaque 8-bit grey (L) and RGB images are read: convert "
                    "it first, so that nothing is dropped unseen"
                )
            pixels = np.asarray(image.convert(mode))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"data.root={root}: {file} cannot be decoded ({error}); replace or remove it") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _in_words(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{height}x{width} pixels with {channels} channel{'s' if channels > 1 else ''}"
