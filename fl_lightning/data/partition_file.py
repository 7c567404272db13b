"""A user's own split: index lists from a .json or .npz file, checked before use."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import ConfigError


def read_partition_file(path: str | Path, num_clients: int, num_samples: int) -> list[np.ndarray]:
    """The clients' indices into the training set, int64, one array per client.

    A .json file is a list of K lists of integers. A .npz file holds K one-dimensional integer arrays, under any names;
    their order in the file is the clients' order (as `np.savez(path, *lists)` writes them). Samples that no list names
    are left out. Indices count the training samples in the data set's own order.

    Args:
        path: `partition.path`.
        num_clients: K, which the number of lists must equal.
        num_samples: n; indices are 0..n-1.

    Raises:
        ConfigError: the file is missing or unreadable, a list is empty or not of integers, an index is out of range or
            named twice, or the number of lists is not K.
    """
    file = Path(path).expanduser()
    where = f"partition.path={file}"
    if not file.is_file():
        raise ConfigError(
            f"{where}: there is no such file; give a .json list of index lists, or an .npz of index arrays"
        )
    if file.suffix not in (".json", ".npz"):
        raise ConfigError(f"{where}: the name must end in .json (a list of index lists) or .npz (one array per client)")
    lists = _read_json(file, where) if file.suffix == ".json" else _read_npz(file, where)
    if len(lists) != num_clients:
        raise ConfigError(f"{where}: has {len(lists)} index lists but fl.num_clients={num_clients}; make them equal")
    parts = [_checked(part, client, num_samples, where) for client, part in enumerate(lists)]
    owners = np.repeat(np.arange(num_clients), [len(part) for part in parts])
    everything = np.concatenate(parts)
    order = np.argsort(everything, kind="stable")
    twice = np.flatnonzero(np.diff(everything[order]) == 0)
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        raise ConfigError(
            f"{where}: index {everything[first]} is named twice (client {owners[first]} and client {owners[second]}); "
            "each sample belongs to at most one client, once"
        )
    return parts


def _read_json(file: Path, where: str) -> list[Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is no readable JSON ({error})") from error
    if not isinstance(content, list) or not all(isinstance(part, list) for part in content):
        raise ConfigError(f"{where}: must be a list of index lists, one per client, like [[0, 2], [1, 3]]")
    for client, part in enumerate(content):
        wrong = next((value for value in part if type(value) is not int), None)
        if wrong is not None:
            raise ConfigError(f"{where}: client {client} has {json.dumps(wrong)[:40]}; indices are whole numbers")
    return content


def _read_npz(file: Path, where: str) -> list[np.ndarray]:
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ConfigError(f"{where}: this is a single array; save one array per client with np.savez(path, *lists)")
        with loaded as archive:
            return [archive[key] for key in archive.files]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{where}: this is no readable .npz of plain arrays ({error})") from error


def _checked(part: Any, client: int, num_samples: int, where: str) -> np.ndarray:
    shape = part.shape if isinstance(part, np.ndarray) else (len(part),)
    if len(shape) != 1 or shape[0] == 0:
        raise ConfigError(
            f"{where}: client {client} has indices of shape {list(shape)}; give one row of them, at least one long"
        )
    if isinstance(part, np.ndarray):
        if not np.issubdtype(part.dtype, np.integer):
            raise ConfigError(f"{where}: client {client} has values of type {part.dtype}; indices are whole numbers")
        low, high = int(part.min()), int(part.max())
    else:
        low, high = min(part), max(part)
    if low < 0 or high >= num_samples:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"{where}: client {client} has the index {wrong}; the {num_samples} training samples are numbered "
            f"0..{num_samples - 1}"
        )
    return np.asarray(part, dtype=np.int64)
