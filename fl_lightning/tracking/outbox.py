"""What is still to be sent to the store. Training never stops for tracking: what fails is kept and sent again.

Values (metrics, parameters, tags) and files wait in two lanes, so a full disk for artifacts does not hold up metrics;
`sender` has the thread that sends them.
A lane that failed is left alone for 1 s, then 2, 4, ... 60 s. What the store *refuses* (it answered, and will never
take this) is halved until the culprit is alone; that one is put aside with the cause and everything else arrives.
Sending an item twice does no harm: a metric carries its own time, and MLflow keeps one of equal ones.
"""

import logging
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fl_lightning.tracking.store import one_line
from fl_lightning.tracking.values import chunks

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("fl_lightning.tracking")

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds
FINAL_PAUSES = (0.5, 1.0, 2.0)  # seconds between the attempts at the end of a run
HANG_SECONDS = 10.0
HOLD_LIMIT = 32 * 2**20  # bytes of one file that waits in memory
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}


class Item(Protocol):
    """Something to send, as plain data."""

    def send(self, client: "MlflowClient", run_id: str) -> None: ...

    def halves(self) -> "tuple[Item, ...]": ...

    def record(self) -> dict[str, Any]: ...

    def held(self) -> None:
        """Called before the item waits to be sent: from now on it needs nothing outside this process."""
        return None

    def kept(self) -> dict[str, bytes]:
        """The files by name that `record` cannot tell, to be written down where the item is lost."""
        return {}


@dataclass(frozen=True)
class Values(Item):
    """One request of one kind: metrics as (name, value, milliseconds, step), parameters and tags as (name, text)."""

    kind: Literal["metrics", "params", "tags"]
    entries: Sequence[tuple[Any, ...]]

    def send(self, client: "MlflowClient", run_id: str) -> None:
        client.log_batch(run_id, **{self.kind: self.entities()}, synchronous=True)

    def entities(self) -> list[Any]:
        from mlflow.entities import Metric, Param, RunTag

        entity = {"metrics": Metric, "params": Param, "tags": RunTag}[self.kind]
        return [entity(*entry) for entry in self.entries]

    def halves(self) -> "tuple[Item, ...]":
        middle = len(self.entries) // 2
        return (Values(self.kind, self.entries[:middle]), Values(self.kind, self.entries[middle:])) if middle else ()

    def record(self) -> dict[str, Any]:
        return {self.kind: list(self.entries)}


@dataclass(frozen=True)
class Together(Item):
    """Values of several kinds, at most one of each, in one request."""

    parts: "Mapping[str, Values]"

    def send(self, client: "MlflowClient", run_id: str) -> None:
        client.log_batch(run_id, **{kind: part.entities() for kind, part in self.parts.items()}, synchronous=True)

    def halves(self) -> tuple[Item, ...]:
        return tuple(self.parts.values())

    def record(self) -> dict[str, Any]:
        return {kind: list(part.entries) for kind, part in self.parts.items()}

    def joined(self, item: Values) -> "Together | None":
        """With more values; None where that is more than a request may hold."""
        entries = [*(self.parts[item.kind].entries if item.kind in self.parts else ()), *item.entries]
        rest = sum(len(part.entries) for kind, part in self.parts.items() if kind != item.kind)
        if len(entries) > _most(item.kind) or len(entries) + rest > METRICS_PER_CALL:
            return None
        return Together({**self.parts, item.kind: Values(item.kind, entries)})


@dataclass(frozen=True)
class Text(Item):
    """A text to store as the artifact `path`."""

    text: str
    path: str

    def send(self, client: "MlflowClient", run_id: str) -> None:
        client.log_text(run_id, self.text, self.path)

    def halves(self) -> tuple[Item, ...]:
        return ()

    def record(self) -> dict[str, Any]:
        return {"path": self.path, "text": self.text}


@dataclass
class File(Item):
    """A file or folder to store in the artifact folder `folder` (None: the top).

    Once `held`, the content is in memory and the source may go, as files in temporary folders do; a source of more than
    `HOLD_LIMIT` is sent from its place or not at all.
    """

    source: Path
    folder: str | None
    content: Mapping[str, bytes] | None = None

    def send(self, client: "MlflowClient", run_id: str) -> None:
        if self.content is None:
            client.log_artifact(run_id, str(self.source), self.folder)
            return
        with tempfile.TemporaryDirectory() as place:
            write_files(Path(place), self.content)
            client.log_artifacts(run_id, place, self.folder)

    def halves(self) -> tuple[Item, ...]:
        return ()

    def record(self) -> dict[str, Any]:
        return {"file": str(self.source), "folder": self.folder}

    def held(self) -> None:
        """Reads the source into memory, unless that is done, it is too large, or it cannot be read."""
        if self.content is not None:
            return
        files = [f for f in sorted(self.source.rglob("*")) if f.is_file()] if self.source.is_dir() else [self.source]
        try:
            if sum(file.stat().st_size for file in files) <= HOLD_LIMIT:
                self.content = {file.relative_to(self.source.parent).as_posix(): file.read_bytes() for file in files}
        except OSError:
            return  # the store will name what is wrong with it

    def kept(self) -> dict[str, bytes]:
        return {f"{self.folder}/{name}" if self.folder else name: data for name, data in (self.content or {}).items()}


def write_files(place: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by their names relative to `place`, whose folders are made.

    Raises:
        OSError: a file cannot be written.
    """
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


@dataclass
class Lane:
    """Items in order of arrival, and when to try again."""

    client: "MlflowClient"
    run_id: str
    pending: deque[Item] = field(default_factory=deque)
    refused: list[tuple[Item, str]] = field(default_factory=list)
    cause: str | None = None
    not_before: float = 0.0
    _pause: float = FIRST_PAUSE

    def put(self, *items: Item) -> None:
        """Adds items and tries to send, unless the store failed a moment ago. Never raises an Exception."""
        self.pending.extend(items)
        if time.monotonic() >= self.not_before:
            self._send_all()

    def finish(self) -> None:
        """Tries to send what is left, four times within 4 s; only once if the store hangs instead of answering."""
        for pause in (0.0, *FINAL_PAUSES):
            if not self.pending:
                return
            time.sleep(pause)
            began = time.monotonic()
            self._send_all()
            if time.monotonic() - began > HANG_SECONDS:
                return

    def _send_all(self) -> None:
        while self.pending:
            item = self.pending[0]
            try:
                item.send(self.client, self.run_id)
            except Exception as error:  # any fault of a store, its driver or its server: recorded, never raised
                if not _is_refusal(item, error):
                    self._failed(error)
                    return
                self.pending.popleft()
                self._refuse(item, error)
            else:
                self.pending.popleft()
                self._pause = FIRST_PAUSE

    def _failed(self, error: Exception) -> None:
        if self.cause is None:
            log.warning(
                "tracking: run %s could not be written (%s); training goes on, the values are kept and sent again",
                self.run_id,
                one_line(error),
            )
        self.cause = one_line(error)
        self.not_before = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _refuse(self, item: Item, error: Exception) -> None:
        parts = item.halves()
        if parts:
            self.pending.extendleft(reversed(parts))
            return
        if not self.refused:
            log.warning("tracking: the store refused a value of run %s (%s)", self.run_id, one_line(error))
        self.refused.append((item, one_line(error)))


def requests(kind: Literal["metrics", "params", "tags"], entries: Sequence[tuple[Any, ...]]) -> list[Values]:
    """Requests within MLflow's limits: 1000 metrics, 100 parameters, 100 tags each."""
    return [Values(kind, part) for part in chunks(entries, _most(kind))]


def merged(items: Sequence[Item]) -> list[Item]:
    """The same in fewer requests: neighbouring values are joined within MLflow's limits, and none are divided.

    So a round's metrics stay in one request, and the order of rounds is kept.
    """
    found: list[Item] = []
    for item in items:
        last = found[-1] if found else None
        more = last.joined(item) if isinstance(item, Values) and isinstance(last, Together) else None
        if more is not None:
            found[-1] = more
        else:
            found.append(Together({item.kind: item}) if isinstance(item, Values) else item)
    return found


def _most(kind: str) -> int:
    return METRICS_PER_CALL if kind == "metrics" else PARAMS_PER_CALL


def _is_refusal(item: Item, error: Exception) -> bool:
    from mlflow.exceptions import MlflowException

    if isinstance(item, File) and item.content is None and not item.source.exists():
        return True
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS
