"""Decoded arrays on disk: checksummed, written whole or not at all, made once however many processes ask.

An entry is a folder of .npy files with a manifest.json that holds the sha256 of each file and the key of the source it
was made from. Readers take no lock: a file that is missing, cut short or altered fails its checksum, and only then is
the entry's lock taken and the entry made anew. The cache lies in FL_CACHE_DIR, else in ~/.cache/fl_lightning.
"""

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import DataError

FORMAT = 1
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Entry:
    """Arrays by name, and small facts about them that JSON can hold."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


def cache_root() -> Path:
    """FL_CACHE_DIR if set, else ~/.cache/fl_lightning; it may not exist yet."""
    configured = os.environ.get("FL_CACHE_DIR")
    return Path(configured).expanduser().absolute() if configured else Path.home() / ".cache" / "fl_lightning"


def short_hash(text: str) -> str:
    """Twelve hex digits, for folder names."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def fingerprint(root: Path, files: list[Path]) -> str:
    """A key that changes when a source file is added, removed or written: sha256 over (path, size, mtime) of each.

    Args:
        root: the folder the files lie in; paths enter the key relative to it.
        files: in a fixed order.
    """
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        line = f"{file.relative_to(root).as_posix()}|{status.st_size}|{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the inter-process lock `name` of the cache folder; the system frees it when a process dies.

    Raises:
        DataError: the cache folder cannot be written.
    """
    from filelock import FileLock

    path = cache_root() / f"{name}.lock"
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise _unusable(error) from error
    try:
        yield
    finally:
        lock.release()


def cached(name: str, source: str, build: Callable[[Path], Entry]) -> Entry:
    """The entry `name` made from `source`, built now if it is absent, stale or damaged.

    Args:
        name: folder name inside the cache.
        source: key of the source files; an entry with another key is replaced.
        build: decodes the source; is given a scratch folder that is removed afterwards.

    Raises:
        DataError: the cache folder cannot be written, or `build` raised it; no part of an entry stays behind.
    """
    folder = cache_root() / name
    found, _ = _read(folder, source)
    if found is not None:
        return found
    with locked(name):
        found, fault = _read(folder, source)  # another process may have made it while this one waited
        if found is not None:
            return found
        if fault:
            _LOG.warning("cache entry %s is damaged (%s): decoding again", folder, fault)
        _LOG.info("decoding %s", name)
        try:
            return _write(folder, source, build)
        except OSError as error:
            raise _unusable(error) from error


def _read(folder: Path, source: str) -> tuple[Entry | None, str]:
    """The entry, or None with what is wrong with it; absence and another source are no fault ("")."""
    try:
        text = (folder / "manifest.json").read_text(encoding="utf-8")
    except OSError:
        return None, "manifest.json is missing" if folder.exists() else ""
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT or manifest["source"] != source:
            return None, ""
        arrays = {}
        for key, record in manifest["arrays"].items():
            content = (folder / record["file"]).read_bytes()
            if hashlib.sha256(content).hexdigest() != record["sha256"]:
                return None, f"{record['file']} does not match its sha256"
            arrays[key] = np.load(io.BytesIO(content), allow_pickle=False)
        return Entry(arrays, manifest["facts"]), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{type(error).__name__}: {error}"


def _write(folder: Path, source: str, build: Callable[[Path], Entry]) -> Entry:
    """Build into a temporary folder and rename it into place. The caller holds the entry's lock."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    try:
        scratch = temporary / "scratch"
        scratch.mkdir(parents=True)
        entry = build(scratch)
        shutil.rmtree(scratch)
        records = {}
        for key, array in entry.arrays.items():
            file = temporary / f"{key}.npy"
            np.save(file, array, allow_pickle=False)
            with file.open("rb") as stream:
                records[key] = {"file": file.name, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        manifest = {"format": FORMAT, "source": source, "arrays": records, "facts": entry.facts}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
        return entry
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unusable(error: OSError) -> DataError:
    return DataError(
        f"the cache folder {cache_root()} cannot be used ({error}); make room in it, or set FL_CACHE_DIR to a folder "
        "you may write"
    )
