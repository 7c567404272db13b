"""`ray.*` and what else of a sweep says where it runs; nothing here enters a trial's configuration or its hash."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from fl_lightning.config.defaults import TAG_OF_SECTION
from fl_lightning.config.faults import Fault
from fl_lightning.config.index import all_keys, value_at
from fl_lightning.config.numbers import Section, Text, to_path
from fl_lightning.config.plugins import FAULT
from fl_lightning.plugins.loading import is_reference, split

if TYPE_CHECKING:
    from fl_lightning.config.schema import RunConfig
    from fl_lightning.config.sweep import SweepConfig

RETRIES_OF_A_CLUSTER = 2
"""`sweep.max_retries` where a sweep has several nodes and does not say."""


def to_address(value: Any) -> str:
    """Reads `auto` or host:port; refuses anything else."""
    text = str(value).strip()
    if text.startswith("ray://"):
        raise PydanticCustomError(
            FAULT,
            "needs a sweep that is started on a node of the cluster, not through Ray Client: give `auto` there, or "
            "submit the command with `ray job submit`",
        )
    port = re.fullmatch(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", text)
    if text != "auto" and (port is None or not 0 < int(port[1]) < 65536):
        raise PydanticCustomError(FAULT, "needs auto, or host:port as `ray start --head` prints it")
    return text


def to_shared_folder(value: Any) -> Path:
    """Reads a folder; refuses the address of an object store."""
    if isinstance(value, str) and "://" in value:
        raise PydanticCustomError(
            FAULT,
            "needs a folder that every node has mounted: checkpoints are moved into place, which object stores "
            "cannot do; mount the bucket's file system, or use a network folder",
        )
    return to_path(value)


Address = Annotated[Text, BeforeValidator(to_address)]
SharedFolder = Annotated[Path, BeforeValidator(to_shared_folder)]


class RayConfig(Section):
    """Which Ray runs the trials: `ray.*` on the command line of a sweep, the section `ray` of its file."""

    address: Address | None = Field(
        default=None,
        description="the Ray cluster to join, host:port, or auto: the one of this machine; null: RAY_ADDRESS, else a "
        "Ray of the sweep's own on this machine alone",
    )


def cluster_faults(sweep: "SweepConfig") -> Iterator[Fault]:
    """Faults of what a trial reserves that no machine could mend."""
    gpu = sweep.resources.gpu
    if gpu > 1 and not gpu.is_integer():
        yield Fault("sweep.resources.gpu", "needs a fraction below 1, or a whole number of GPUs", gpu)


def needed_paths(configs: Iterable["RunConfig"]) -> dict[str, list[Path]]:
    """The files and folders that runs read, by the key that names them, as far as they can be known without reading."""
    found: dict[str, dict[Path, None]] = {}
    for config in configs:
        for key, path in _paths(config):
            found.setdefault(key, {})[path] = None
    return {key: list(paths) for key, paths in found.items()}


def _paths(config: "RunConfig") -> Iterator[tuple[str, Path]]:
    from fl_lightning.config.schema import RunConfig
    from fl_lightning.data.places import source_files

    raw = config.to_dict()
    paths = {key.name for key in all_keys(RunConfig) if key.is_path}
    if (root := value_at(raw, "data.root")) is not None:
        for path in source_files(raw["data"]["name"], Path(root)):
            yield "data.root", path
    for name in sorted(paths - {"data.root"}):
        if (value := value_at(raw, name)) is not None:
            yield name, Path(value)
    for section, tag in TAG_OF_SECTION.items():
        if is_reference(value := value_at(raw, f"{section}.{tag}")):
            yield f"{section}.{tag}", split(value)[0]
