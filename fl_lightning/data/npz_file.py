"""A user's own arrays: one .npz file with x_train, y_train, x_test and y_test."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from fl_lightning.data.cache import Entry
from fl_lightning.errors import DataError

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_CHANNELS = (1, 2, 3, 4)


def read_npz(root: Path) -> Entry:
    """x_train, x_test uint8 [N, C, H, W] and y_train, y_test int64 [N] of the file `root`, or of `root/data.npz`.

    Pixels of type uint8 are taken as they are. Floating-point pixels must lie in [0, 1] and are stored as
    round(255 x), halves to even, an error of at most 1/510; anything else is refused rather than guessed. Shapes:
    [N, H, W] (grey), [N, H, W, C] or [N, C, H, W] with 1 to 4 channels; where both readings are possible the file is
    refused. Labels are integers 0..C-1, every class being present in y_train. Pickled objects are never loaded.

    Raises:
        DataError: the file is missing or damaged, or an array breaks a rule above; the message names the array.
    """
    root = root.expanduser().resolve()
    path = root / "data.npz" if root.is_dir() else root
    if not path.is_file():
        raise DataError(
            f"data.root={root}: {path} is not there; give an .npz file with {', '.join(_KEYS)}, or a folder "
            "with data.npz"
        )
    arrays = _load(path)
    prepared = {}
    for part in ("train", "test"):
        x, y = f"x_{part}", f"y_{part}"
        prepared[x] = _images(path, x, arrays[x])
        prepared[y] = _labels(path, y, arrays[y])
        if len(prepared[x]) != len(prepared[y]):
            raise DataError(f"{path}: {x} has {len(prepared[x])} images but {y} has {len(prepared[y])} labels")
    shapes = [list(prepared[x].shape[1:]) for x in ("x_train", "x_test")]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"{path}: x_train has images [C, H, W] = {shapes[0]} but x_test has {shapes[1]}; make them agree"
        )
    num_classes = _check_classes(path, prepared["y_train"], prepared["y_test"])
    return Entry(prepared, {"classes": [str(label) for label in range(num_classes)]})


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path}: this is a single array; save with np.savez(path, {', '.join(_KEYS)} as keywords)")
        with loaded as archive:
            missing = [key for key in _KEYS if key not in archive.files]
            if missing:
                raise DataError(
                    f"{path}: {', '.join(missing)} missing (found {', '.join(archive.files) or 'nothing'}); save with "
                    f"np.savez(path, {', '.join(f'{key}=...' for key in _KEYS)})"
                )
            return {key: archive[key] for key in _KEYS}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: this file cannot be read as an .npz of plain arrays ({error}); save it again with np.savez"
        ) from error


def _images(path: Path, key: str, x: np.ndarray) -> np.ndarray:
    """uint8 [N, C, H, W], contiguous."""
    if x.ndim not in (3, 4) or 0 in x.shape:
        raise DataError(
            f"{path}: {key} has shape {list(x.shape)}; images are [N, H, W], [N, H, W, C] or [N, C, H, W], none empty"
        )
    if np.issubdtype(x.dtype, np.floating):
        if not np.isfinite(x).all():
            raise DataError(f"{path}: {key} holds NaN or infinite pixels; remove those images")
        low, high = float(x.min()), float(x.max())
        if low < 0.0 or high > 1.0:
            raise DataError(
                f"{path}: {key} has float pixels from {low:g} to {high:g}; floats must lie in [0, 1]: divide by 255, "
                "or store uint8"
            )
        x = np.rint(x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32) * 255).astype(np.uint8)
    elif x.dtype != np.uint8:
        raise DataError(f"{path}: {key} has pixels of type {x.dtype}; store uint8 0..255, or floats in [0, 1]")
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    first, last = x.shape[1] in _CHANNELS, x.shape[3] in _CHANNELS
    if first == last:
        what = (
            "either axis 1 or axis 3 could be the channels"
            if first
            else "neither axis 1 nor axis 3 has 1 to 4 channels"
        )
        raise DataError(
            f"{path}: {key} has shape {list(x.shape)}, which is ambiguous: {what}; store grey images as [N, H, W], "
            "others with more than 4 pixels a side and 1 to 4 channels"
        )
    return np.ascontiguousarray(x if first else x.transpose(0, 3, 1, 2))


def _labels(path: Path, key: str, y: np.ndarray) -> np.ndarray:
    if y.ndim != 1:
        raise DataError(f"{path}: {key} has shape {list(y.shape)}; labels are one integer per image, shape [N]")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{path}: {key} has labels of type {y.dtype}; store integers 0..C-1")
    if len(y) == 0:
        raise DataError(f"{path}: {key} is empty; labels are one integer per image")
    wrong = next((label for label in (int(y.min()), int(y.max())) if not 0 <= label < 2**31), None)
    if wrong is not None:
        raise DataError(f"{path}: {key} has the label {wrong}; labels are integers 0..C-1")
    return y.astype(np.int64)


def _check_classes(path: Path, y_train: np.ndarray, y_test: np.ndarray) -> int:
    """C, after checking that 0..C-1 all occur in training and nothing else occurs in the test set."""
    present = np.unique(y_train)
    num_classes = len(present)
    if present[-1] != num_classes - 1:
        gap = next(label for label in range(num_classes) if present[label] != label)
        raise DataError(
            f"{path}: y_train has labels up to {present[-1]} but none is {gap}; number the {num_classes} classes "
            f"0..{num_classes - 1} without gaps"
        )
    if num_classes < 2:
        raise DataError(f"{path}: y_train has one class only; at least 2 are needed")
    if y_test.max() >= num_classes:
        raise DataError(
            f"{path}: y_test has the label {y_test.max()} but y_train only 0..{num_classes - 1}; a class that is never "
            "trained cannot be tested"
        )
    return num_classes
