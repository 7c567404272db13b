"""Where a run stands, on disk: everything its continuation needs, and nothing that could run code when it is read.

A folder holds the last two files `round-NNNNNN.pt` and `latest.json`, which names both with their SHA-256. A file
is written beside its place, flushed and moved there, so a crash leaves the one before; it is read `weights_only`.
Every random stream is keyed by (seed, purpose, round, client), so there is no generator to store.
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.analysis.norms import ClippingLab, UpdateNorm
from fl_lightning.errors import CheckpointError
from fl_lightning.federation import Federation
from fl_lightning.privacy import Ledger
from fl_lightning.records import RoundRecord, ServerState

if TYPE_CHECKING:
    from filelock import FileLock

log = logging.getLogger("fl_lightning.checkpoint")

VERSION = 1
KEPT = 2
LATEST = "latest.json"


@dataclass
class Progress:
    """A run under way.

    Attributes:
        federation: server and clients after the last round.
        ledger: what has been released so far; None without a level of privacy.
        records: one per round.
        undeclared: fields of uploads that no release covered.
        lab: the clipping laboratory's findings, if it is on.
        threshold: a measured clip threshold, if the algorithm has one.
    """

    federation: Federation
    ledger: Ledger | None = None
    records: list[RoundRecord] = field(default_factory=list)
    undeclared: set[str] = field(default_factory=set)
    lab: ClippingLab | None = None
    threshold: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Stored:
    """A checkpoint as read: `ledger` is the state for `Ledger.load_state_dict`."""

    config: dict[str, Any]
    partition_sha256: str
    progress: Progress
    ledger: dict[str, Any] | None


def exclusive(folder: Path) -> "FileLock":
    """The right to go on from this folder, held until released, or until the process ends.

    Raises:
        CheckpointError: another process has it.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(f"{folder}: another process is resuming this run; wait for it, or end it") from None
    return lock


def save(folder: Path, progress: Progress, config: Mapping[str, Any], partition_sha256: str) -> Path:
    """Writes the state after the last round and drops all but the last two files; returns the new one."""
    server = progress.federation.server
    content = {
        "version": VERSION,
        "round": server.round,
        "w": server.w.detach().cpu(),
        "buffers": dict(server.buffers),
        "extra": dict(server.extra),
        "clients": {client: dict(state) for client, state in progress.federation.clients.items()},
        "rest": json.dumps(
            {
                "config": config,
                "partition_sha256": partition_sha256,
                "ledger": None if progress.ledger is None else progress.ledger.state_dict(),
                "records": [asdict(record) for record in progress.records],
                "undeclared": sorted(progress.undeclared),
                "norms": None if progress.lab is None else [asdict(norm) for norm in progress.lab.norms],
                "lab_rounds": None if progress.lab is None else list(progress.lab.rounds.items()),
                "threshold": progress.threshold,
            }
        ),
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"round-{server.round:06d}.pt"
    _write(file, data)
    entry = {"file": file.name, "sha256": hashlib.sha256(data).hexdigest(), "round": server.round}
    before = [old for old in _entries(folder) if old["file"] != file.name][: KEPT - 1]
    _write(folder / LATEST, json.dumps({"version": VERSION, "files": [entry, *before]}).encode())
    for old in sorted(folder.glob("round-*.pt"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return file


def load(folder: Path) -> Stored:
    """Reads the newest checkpoint of a folder that is whole; a warning names one that is not.

    Raises:
        CheckpointError: there is none, all are damaged, or another version wrote them.
    """
    faults: list[str] = []
    for entry in _entries(folder, strict=True):
        file = folder / entry["file"]
        try:
            data = file.read_bytes()
        except OSError as error:
            faults.append(f"{file} cannot be read ({error.strerror})")
            continue
        if hashlib.sha256(data).hexdigest() == entry["sha256"]:
            for fault in faults:
                log.warning("%s; the run goes on from the checkpoint before it, %s", fault, file.name)
            return _stored(data)
        faults.append(f"the SHA-256 of {file} is not the one written: it is damaged")
    raise CheckpointError(f"{folder}: no checkpoint can be used: {'; '.join(faults)}; start the run anew")


def _entries(folder: Path, strict: bool = False) -> list[dict[str, Any]]:
    """The files that `latest.json` names, newest first; without `strict` none where it cannot be read."""
    try:
        latest = json.loads((folder / LATEST).read_text())
        if latest["version"] == VERSION:
            return list(latest["files"])
    except FileNotFoundError:
        if not strict:
            return []
        raise CheckpointError(f"{folder}: holds no checkpoint; start the run anew") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not strict:
            return []
        raise CheckpointError(f"{folder / LATEST}: cannot be read: {error}; start the run anew") from None
    if not strict:
        return []
    raise CheckpointError(f"{folder}: version {latest['version']}, this program reads {VERSION}; resume with its own")


def _stored(data: bytes) -> Stored:
    content = torch.load(io.BytesIO(data), weights_only=True)
    rest = json.loads(content["rest"])
    lab = None
    if rest["norms"] is not None:
        lab = ClippingLab([UpdateNorm(**norm) for norm in rest["norms"]], dict(rest["lab_rounds"]))
    server = ServerState(content["w"], content["buffers"], content["round"], content["extra"])
    progress = Progress(
        Federation(server, content["clients"]),
        records=[_record(entry) for entry in rest["records"]],
        undeclared=set(rest["undeclared"]),
        lab=lab,
        threshold=rest["threshold"],
    )
    return Stored(rest["config"], rest["partition_sha256"], progress, rest["ledger"])


def _record(entry: dict[str, Any]) -> RoundRecord:
    return RoundRecord(**{**entry, "cohort": tuple(entry["cohort"]), "notes": tuple(entry["notes"])})


def _write(file: Path, data: bytes) -> None:
    part = file.with_name(f".{file.name}.part")
    with open(part, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, file)
