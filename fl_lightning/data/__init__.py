"""Data sets, and how they are dealt to clients. Importing this package loads nothing; names load when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.data.catalogue import KNOWN_SETS, KnownSet
    from fl_lightning.data.datasets import ImageData, load_data, prepare
    from fl_lightning.data.manifest import save_manifest
    from fl_lightning.data.partition import Partition, make_partition

__all__ = [
    "KNOWN_SETS",
    "ImageData",
    "KnownSet",
    "Partition",
    "load_data",
    "make_partition",
    "prepare",
    "save_manifest",
]

_HOME = {
    "KNOWN_SETS": "catalogue",
    "KnownSet": "catalogue",
    "ImageData": "datasets",
    "load_data": "datasets",
    "prepare": "datasets",
    "save_manifest": "manifest",
    "Partition": "partition",
    "make_partition": "partition",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
