"""The end of a run, whatever ends it: FINISHED, FAILED (an exception) or KILLED (Ctrl-C, SIGTERM, SIGHUP)."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

REPEATED = 1.0
"""Seconds within which a second signal is the first one again: a key that is held down, a group that is told twice."""

PATIENCE = 3.0
"""Seconds of closing a run after which Ctrl-C leaves it as it is."""


class Closable(Protocol):
    """A `RunTracker` or a `Study`."""

    def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None: ...


Tracked = TypeVar("Tracked", bound=Closable | None)


class _Terminated(SystemExit):
    """A signal as an exception: `except Exception` does not stop it, and the exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)

    def __str__(self) -> str:
        return f"the process was asked to end ({signal.Signals(int(str(self.code)) - 128).name})"


@dataclass
class _Stop:
    """What was asked for by signals: the first one's number and when it came, and whether the run is being closed."""

    number: int | None = None
    since: float = 0.0
    closing: bool = False

    @property
    def asked(self) -> bool:
        return self.number is not None

    def exception(self) -> BaseException:
        assert self.number is not None
        return KeyboardInterrupt() if self.number == signal.SIGINT else _Terminated(self.number)


@contextmanager
def tracked(tracker: Tracked) -> Iterator[Tracked]:
    """Closes the tracked run at the end of the `with` block with the right status, and lets the exception pass on.

    In the main thread SIGINT, SIGTERM and SIGHUP are turned into an exception inside the block, so the run ends KILLED
    and the process exits with 128 + the signal's number. They do not disturb the closing; only Ctrl-C does, after 3 s.
    A handler that was there before is called first and is put back afterwards; an ignored signal stays ignored. None
    (tracking is off) changes nothing.
    """
    if tracker is None:
        yield tracker
        return
    stop = _Stop()
    with _handled(lambda number, previous, frame: _on_signal(stop, number, previous, frame)):
        try:
            # Python drops an exception that a signal's handler raises inside a destructor: look again each round.
            if hasattr(tracker, "on_each_round"):
                tracker.on_each_round = lambda: _end_if_asked(stop)
            yield tracker
        except BaseException as error:
            stop.closing = True
            interruption = _interruption(error) or (stop.exception() if stop.asked else None)
            tracker.finish("FAILED" if interruption is None else "KILLED", interruption or error)
            if isinstance(error, SystemExit) and isinstance(interruption, KeyboardInterrupt):
                raise interruption from error  # a trainer makes an exit code of Ctrl-C
            if isinstance(error, SystemExit) and isinstance(interruption, _Terminated):
                error.code = interruption.code
            raise
        stop.closing = True
        tracker.finish("FINISHED")
        if stop.asked:
            raise stop.exception()


@contextmanager
def held_back() -> Iterator[None]:
    """Lets signals wait until the end of the block, for what must not be left half done; Ctrl-C for 3 s at most."""
    seen: list[tuple[int, Any, float]] = []

    def note(number: int, previous: Any, frame: FrameType | None) -> None:
        seen.append((number, previous, time.monotonic()))
        if number == signal.SIGINT and seen[-1][2] - seen[0][2] > PATIENCE:
            raise KeyboardInterrupt

    with _handled(note):
        yield
    if seen:
        number, previous, _ = seen[0]
        if callable(previous):
            previous(number, None)
        stop = _Stop(number)
        raise stop.exception()


def _on_signal(stop: _Stop, number: int, previous: Any, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not stop.asked:
        stop.number, stop.since = number, now
        if not stop.closing:
            if callable(previous):
                previous(number, frame)
            raise stop.exception()
    elif stop.closing:
        if number == signal.SIGINT and now - stop.since > PATIENCE:
            raise KeyboardInterrupt
    elif now - stop.since > REPEATED:
        raise stop.exception()


def _end_if_asked(stop: _Stop) -> None:
    if stop.asked and not stop.closing:
        raise stop.exception()


@contextmanager
def _handled(handler: Callable[[int, Any, FrameType | None], None]) -> Iterator[None]:
    """Installs `handler(number, previous handler, frame)` in the main thread, and puts back what was there before.

    A signal that is ignored, or handled by C code, which could not be put back, is left alone.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if in_main}
    ours = {number: previous for number, previous in before.items() if previous not in (signal.SIG_IGN, None)}
    try:
        for number in ours:
            signal.signal(number, lambda number, frame: handler(number, ours[number], frame))
        yield
    finally:
        for number, previous in ours.items():
            signal.signal(number, previous)


def _interruption(error: BaseException) -> BaseException | None:
    """Ctrl-C (also where a trainer made `sys.exit(1)` of it), a signal or a closed generator; None for a failure."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt | GeneratorExit | _Terminated):
        found = found.__context__ if isinstance(found, SystemExit) else None
    return found
