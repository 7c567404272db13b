"""What a trial has said in its worker is heard, bounded, and goes where it went before."""

import logging
import sys
import warnings

import pytest

from tune.trial_log import LONGEST, TrialLog, listening


def test_prints_warnings_and_loggers_are_heard_and_still_said(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as log:
        print("a line")
        print("a fault", file=sys.stderr)
        logging.getLogger("some.package").warning("look %s", "here")
        logging.getLogger("some.package").debug("never mind")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest, **more: print(f"warned: {message}", file=sys.stderr)  # type: ignore[assignment]
            warnings.warn("mind this", stacklevel=1)
        log.say("round 1")
    print("afterwards")
    text = log.text()
    for said in ("a line\n", "a fault\n", "WARNING some.package: look here\n", "warned: mind this\n", "round 1\n"):
        assert said in text
    assert "never mind" not in text and "afterwards" not in text
    shown = capsys.readouterr()
    assert "a line\n" in shown.out and "a fault\n" in shown.err and "afterwards" in shown.out


def test_only_the_end_of_a_long_log_is_kept() -> None:
    log = TrialLog()
    for number in range(40_000):
        log.say(f"line {number}")
    text = log.text()
    assert text.startswith("[the beginning is left out]\n") and text.endswith("line 39999\n")
    assert len(text) <= LONGEST + 30 and log._length <= 2 * LONGEST
    short = TrialLog()
    short.say("all of it")
    assert short.text() == "all of it\n"
