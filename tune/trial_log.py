"""What a trial has said in its worker: its rounds, what libraries printed, warnings. Kept if the trial fails."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from typing import Any

LOG_FILE = "log.txt"
LONGEST = 64_000
"""Characters that are kept, the last ones: Ray Tune and the tracking store are sent them with the failure."""


class TrialLog:
    """The last words of a trial, in memory."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        with self._lock:
            self._parts.append(text)
            self._length += len(text)
            if self._length > 2 * LONGEST:
                kept = "".join(self._parts)[-LONGEST:]
                self._parts, self._length = [kept], len(kept)

    def say(self, line: str) -> None:
        """One line."""
        self.write(f"{line}\n")

    def text(self) -> str:
        """What is kept; says so where the beginning is not."""
        with self._lock:
            whole = "".join(self._parts)
        return whole if len(whole) <= LONGEST else f"[the beginning is left out]\n{whole[-LONGEST:]}"


class _Tee(TextIOBase):
    """A stream that goes on saying what it said, and tells the log as well."""

    def __init__(self, stream: Any, log: TrialLog) -> None:
        self.stream, self.log = stream, log

    def write(self, text: str) -> int:
        self.log.write(text)
        return int(self.stream.write(text) or len(text))

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:  # such as isatty, fileno and encoding, which libraries ask for
        return getattr(self.stream, name)


class _Handler(logging.Handler):
    def __init__(self, log: TrialLog) -> None:
        super().__init__(logging.WARNING)
        self.log = log
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.log.say(self.format(record))


@contextmanager
def listening() -> Iterator[TrialLog]:
    """Hears what this process prints and logs for the length of the block; all goes where it went before as well."""
    log = TrialLog()
    handler, root = _Handler(log), logging.getLogger()
    root.addHandler(handler)
    try:
        with redirect_stdout(_Tee(sys.stdout, log)), redirect_stderr(_Tee(sys.stderr, log)):
            yield log
    finally:
        root.removeHandler(handler)
