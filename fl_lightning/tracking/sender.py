"""The thread that writes to the store, so that training neither waits for it nor fails with it.

What a run says goes into a queue, is gathered for a moment and sent as few requests: a round of a small federation
takes less time than a request. The training thread takes no lock, so Ctrl-C at any moment leaves none behind.
"""

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Literal

from fl_lightning.tracking.lifetime import held_back
from fl_lightning.tracking.outbox import FIRST_PAUSE, Item, Lane, merged

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("fl_lightning.tracking")

GATHER_SECONDS = 2.0
"""How long what is said waits for more, unless it is asked for at once."""

LEAVE_SECONDS = 20.0
"""How long the end of a run waits for a request that hangs, before what is left goes into a file."""

LaneName = Literal["values", "files"]
_NOW, _END = object(), object()


class Sender:
    """Two lanes with a thread behind them. The thread is a daemon: it ends with the process, whatever ends that.

    Attributes:
        lanes: "values" and "files"; the thread's own until `stop` has returned True.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.lanes: dict[LaneName, Lane] = {"values": Lane(client, run_id), "files": Lane(client, run_id)}
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._gathered: list[tuple[LaneName, Item]] = []
        self._thread: threading.Thread | None = None

    def put(self, lane: LaneName, *items: Item) -> None:
        """Takes items to be sent soon; from now on they need nothing that may go away."""
        for item in items:
            item.held()
            self._queue.put((lane, item))
        if self._thread is None:
            with held_back():  # Ctrl-C in the middle of a thread's start would leave it running and unknown
                self._thread = threading.Thread(target=self._work, name="fl-lightning-tracking", daemon=True)
                self._thread.start()

    def now(self) -> None:
        """Lets what was put be sent without waiting for more; returns at once."""
        self._queue.put(_NOW)

    def drain(self, seconds: float) -> bool:
        """Waits until an attempt was made to send everything; False if that takes longer."""
        if not self._started():
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(seconds)

    def stop(self, seconds: float = LEAVE_SECONDS) -> bool:
        """Ends the thread and puts what it had not begun to send into the lanes, which are the caller's from now on.

        False if it hangs in a request: the lanes may then be looked at, and nothing else.
        """
        if self._thread is not None and self._started():
            self._queue.put(_END)
            self._thread.join(seconds)
        while not self._queue.empty():
            self._take(self._queue.get())
        self._sort()
        return self._thread is None or not self._thread.is_alive()

    def _started(self) -> bool:
        """Whether there is a thread; Ctrl-C may have come between its making and its start."""
        return self._thread is not None and self._thread.ident is not None

    def _work(self) -> None:
        gathered_since: float | None = None
        while True:
            try:
                taken = self._queue.get(timeout=self._patience(gathered_since))
            except queue.Empty:
                taken = _NOW
            if self._take(taken):
                gathered_since = gathered_since or time.monotonic()
                continue
            if taken is _END:
                return
            self._sort()
            gathered_since = None
            for lane in self.lanes.values():
                self._send(lane)
            if isinstance(taken, threading.Event):
                taken.set()

    def _send(self, lane: Lane) -> None:
        """Nothing that goes wrong here ends the thread, such as an import that Ctrl-C has left half done.

        What waits is tried again, at the latest by the end of the run.
        """
        try:
            lane.put()
        except Exception as error:
            log.debug("tracking: a fault while sending", exc_info=error)
            lane.not_before = time.monotonic() + FIRST_PAUSE

    def _take(self, taken: object) -> bool:
        if isinstance(taken, tuple):
            self._gathered.append(taken)
        return isinstance(taken, tuple)

    def _sort(self) -> None:
        for name, lane in self.lanes.items():
            lane.pending.extend(merged([item for place, item in self._gathered if place == name]))
        self._gathered.clear()

    def _patience(self, gathered_since: float | None) -> float | None:
        """Seconds until something is to be sent by itself; None: never."""
        now = time.monotonic()
        waits = [lane.not_before - now for lane in self.lanes.values() if lane.pending]
        if gathered_since is not None:
            waits.append(gathered_since + GATHER_SECONDS - now)
        return max(0.0, min(waits)) if waits else None
