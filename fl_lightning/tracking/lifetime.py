"""The end of a run, whatever ends it: FINISHED, FAILED (an exception) or KILLED (Ctrl-C, SIGTERM)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

EXIT_TERMINATED = 143
"""Exit code of a process that SIGTERM ended, 128 + 15, as shells and schedulers expect it."""


class Closable(Protocol):
    """A `RunTracker` or a `Study`."""

    def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None: ...


Tracked = TypeVar("Tracked", bound=Closable | None)


class _Terminated(SystemExit):
    """SIGTERM as an exception: `except Exception` does not stop it, and unhandled it ends with exit code 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)

    def __str__(self) -> str:
        return "the process was asked to end (SIGTERM)"


@dataclass
class _Stop:
    asked: bool = False
    closing: bool = False


@contextmanager
def tracked(tracker: Tracked) -> Iterator[Tracked]:
    """Closes the tracked run at the end of the `with` block with the right status, and lets the exception pass on.

    In the main thread SIGTERM is turned into an exception inside the block, so the run ends KILLED and the process
    exits with 143. A handler that was there before is called first and is put back afterwards; an ignored SIGTERM stays
    ignored. None (tracking is off) changes nothing.
    """
    if tracker is None:
        yield tracker
        return
    with _sigterm_raises() as stop:
        try:
            # Python drops an exception that a signal's handler raises inside a destructor: look again each round.
            if hasattr(tracker, "on_each_round"):
                tracker.on_each_round = lambda: _end_if_asked(stop)
            yield tracker
        except BaseException as error:
            stop.closing = True
            interruption = _interruption(error)
            killed = stop.asked or interruption is not None
            tracker.finish("KILLED" if killed else "FAILED", interruption or error)
            raise
        stop.closing = True
        tracker.finish("FINISHED")
        if stop.asked:
            raise _Terminated


def _end_if_asked(stop: "_Stop") -> None:
    if stop.asked and not stop.closing:
        raise _Terminated


@contextmanager
def _sigterm_raises() -> Iterator[_Stop]:
    stop = _Stop()
    in_main = threading.current_thread() is threading.main_thread()
    previous: Any = signal.getsignal(signal.SIGTERM) if in_main else signal.SIG_IGN
    if previous in (signal.SIG_IGN, None):  # None: set by C code, which could not be put back
        yield stop
        return

    def handler(number: int, frame: FrameType | None) -> None:
        first, stop.asked = not stop.asked, True
        if first and callable(previous):
            previous(number, frame)
        if not stop.closing:
            raise _Terminated

    signal.signal(signal.SIGTERM, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interruption(error: BaseException) -> BaseException | None:
    """Ctrl-C (also where a trainer turned it into `sys.exit(1)`), SIGTERM or a closed generator; None for a failure."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt | GeneratorExit | _Terminated):
        found = found.__context__ if isinstance(found, SystemExit) else None
    return found
