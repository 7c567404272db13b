"""MNIST, Fashion-MNIST, EMNIST digits and CIFAR-10, read through torchvision and kept as uint8 arrays in the cache.

Reading never downloads and never writes under `data.root`: published archives are copied to the cache, checked against
their published md5 and unpacked there. Only `prepare_torchvision_set` uses the network.
"""

import contextlib
import http.client
import io
import os
import pickle
import shlex
import shutil
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.cache import Entry, cache_root, cached, fingerprint, locked, short_hash
from fl_lightning.data.catalogue import KNOWN_SETS, KnownSet, Source
from fl_lightning.errors import DataError

_DAMAGED = (
    *(OSError, RuntimeError, ValueError, AssertionError, EOFError, KeyError, pickle.UnpicklingError),
    *(zlib.error, zipfile.BadZipFile, tarfile.TarError, http.client.HTTPException),
)
"""What torchvision raises on files that are cut short or altered, and on a network that fails."""

_NETWORK_TIMEOUT = 30.0  # seconds without an answer; torchvision sets none and would wait for ever


def read_torchvision_set(name: str, root: Path) -> Entry:
    """x_train, x_test uint8 [N, C, H, W] and y_train, y_test int64 [N] of a known set whose files lie under `root`.

    Raises:
        DataError: files are missing (the message gives the prefetch command) or damaged.
    """
    known, root = KNOWN_SETS[name], root.expanduser().resolve()
    source = _find(known, root)
    if source is None:
        wanted = known.sources[0].files
        raise DataError(
            f"data.name={name}: the {known.title} files are not in data.root={root} (looked for {wanted[0]}"
            f"{f' and {len(wanted) - 1} more' if len(wanted) > 1 else ''}); run once with network access: "
            f"{prepare_command(name, root)}, or set data.root or FL_DATA_ROOT to a folder that has them"
        )
    key = fingerprint(root, [root / file for file in source.files])
    return cached(_entry_name(name, root), key, lambda scratch: _decode(known, root, source, scratch))


def prepare_torchvision_set(name: str, root: Path) -> Path:
    """Download the set into `root` if its files are not there, and decode it into the cache.

    Processes that prepare one set in one folder at the same time wait for each other: one downloads. A download that
    fails leaves nothing under `root`, and no folder that was not there before.

    Returns:
        The cache entry's folder.

    Raises:
        DataError: the download failed, `root` cannot be written, or files found there are damaged.
    """
    known, root = KNOWN_SETS[name], root.expanduser().resolve()
    with locked(f"prepare-{_entry_name(name, root)}"):
        if _find(known, root) is None:
            _download(known, root)
    read_torchvision_set(name, root)
    return cache_root() / _entry_name(name, root)


def prepare_command(name: str, root: Path) -> str:
    """The command line that fetches the set into `root`."""
    return f"fl-lightning data prepare {name} {shlex.quote(f'data.root={root}')}"


def _entry_name(name: str, root: Path) -> str:
    return f"{name}-{short_hash(str(root))}"


def _find(known: KnownSet, root: Path) -> Source | None:
    for source in known.sources:
        if all((root / file).is_file() for file in source.files):
            return source
    return None


def _decode(known: KnownSet, root: Path, source: Source, scratch: Path) -> Entry:
    """Let torchvision read both halves, from `root` or from archives unpacked in `scratch`."""
    for file in source.files:
        if not os.access(root / file, os.R_OK):
            raise DataError(f"data.name={known.name}: {root / file} cannot be read; mend its permissions")
    if source.packed:
        _stage(known, root, source, scratch)
    where = scratch if source.packed else root
    arrays: dict[str, np.ndarray] = {}
    try:
        for part, train in (("train", True), ("test", False)):
            # download=True only unpacks here: the archives are in place and have the md5 that torchvision expects.
            dataset = _open(known, where, train=train, download=source.packed)
            arrays[f"x_{part}"] = _channels_first(known, np.asarray(dataset.data))
            arrays[f"y_{part}"] = np.asarray(dataset.targets, dtype=np.int64)
            _check_part(known, arrays[f"x_{part}"], arrays[f"y_{part}"])
    except _DAMAGED as error:
        if source.packed and getattr(error, "errno", None):
            raise  # the system refused to write the unpacked files: the cache folder is at fault, not the data
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"data.name={known.name}: the files under data.root={root} are damaged ({cause}); delete "
            f"{root / Path(source.files[0]).parent} and run: {prepare_command(known.name, root)}"
        ) from error
    return Entry(arrays, {"classes": list(known.classes)})


def _stage(known: KnownSet, root: Path, source: Source, scratch: Path) -> None:
    """Copy the archives to `scratch`, so that unpacking writes there, and check each against its published md5."""
    from torchvision.datasets.utils import check_integrity

    published = _published_md5(known)
    for file in source.files:
        copy = scratch / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, copy)
        if not check_integrity(copy, published[copy.name]):
            raise DataError(
                f"data.name={known.name}: {root / file} is damaged (its md5 is not the published "
                f"{published[copy.name]}); delete it and run: {prepare_command(known.name, root)}"
            )


def _published_md5(known: KnownSet) -> dict[str, str]:
    from torchvision import datasets

    if known.torchvision == "CIFAR10":
        return {datasets.CIFAR10.filename: datasets.CIFAR10.tgz_md5}
    if known.torchvision == "EMNIST":
        return {"gzip.zip": datasets.EMNIST.md5}
    return dict(getattr(datasets, known.torchvision).resources)


def _open(known: KnownSet, root: Path, *, train: bool, download: bool) -> Any:
    """A torchvision data set; what torchvision prints on the way is kept off the program's output."""
    from torchvision import datasets

    options: dict[str, Any] = {"split": known.split} if known.split else {}
    with contextlib.redirect_stdout(io.StringIO()):
        return getattr(datasets, known.torchvision)(root, train=train, download=download, **options)


def _channels_first(known: KnownSet, pixels: np.ndarray) -> np.ndarray:
    """torchvision's [N, H, W] or [N, H, W, C] as contiguous [N, C, H, W]."""
    if known.torchvision == "EMNIST":
        pixels = pixels.swapaxes(1, 2)  # EMNIST stores its images transposed; this turns the digits upright
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(pixels)


def _check_part(known: KnownSet, x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype != np.uint8 or x.shape[1:] != known.shape or y.shape != (len(x),) or len(x) == 0:
        raise ValueError(f"images {x.dtype} {list(x.shape)} with labels {list(y.shape)}")
    if y.min() < 0 or y.max() >= known.num_classes:
        raise ValueError(f"labels {y.min()}..{y.max()}")


def _download(known: KnownSet, root: Path) -> None:
    """Fetch into a hidden folder beside the target, then rename into place what is not there yet."""
    partial = root / f".{known.name}.partial"
    created = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        with _network_timeout():
            _open(known, partial, train=True, download=True)
        for file in sorted(path for path in partial.rglob("*") if path.is_file()):
            target = root / file.relative_to(partial)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except _DAMAGED as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"data.name={known.name}: {known.title} could not be downloaded to data.root={root} ({cause}); nothing was "
            f"left there; with network access run again: {prepare_command(known.name, root)}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in created:  # innermost first; one that now holds the data is not empty and stays
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def _network_timeout() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
