"""The SIGTERM handler of `tracked`: it composes with other handlers, with threads and with Lightning's."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fl_lightning.tracking import connect, resolve_uri, tracked

ROOT = Path(__file__).parents[1]


class Recorder:
    """Stands where a tracker does and keeps how it was closed."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, str | None]] = []

    def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
        self.closed.append((status, type(error).__name__ if error else None))


def test_an_earlier_handler_is_called_and_put_back():
    seen: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        mine, recorder = signal.getsignal(signal.SIGTERM), Recorder()
        with pytest.raises(SystemExit) as caught, tracked(recorder):
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == 143 and seen == [signal.SIGTERM]
        assert recorder.closed == [("KILLED", "_Terminated")]
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with tracked(recorder):
            os.kill(os.getpid(), signal.SIGTERM)
        assert recorder.closed[1:] == [("FINISHED", None)]
    finally:
        signal.signal(signal.SIGTERM, original)


def test_a_second_sigterm_does_not_disturb_the_closing():
    class Slow(Recorder):
        def finish(self, status: str = "FINISHED", error: BaseException | None = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().finish(status, error)

    recorder = Slow()
    with pytest.raises(SystemExit), tracked(recorder):
        os.kill(os.getpid(), signal.SIGTERM)
    assert recorder.closed == [("KILLED", "_Terminated")]
    recorder = Slow()
    with pytest.raises(SystemExit), tracked(recorder):  # the signal comes while a good run is being closed
        pass
    assert recorder.closed == [("FINISHED", None)]


def test_a_signal_that_was_dropped_ends_the_run_at_the_next_round():
    class Rounds(Recorder):
        def on_each_round(self) -> None:
            raise AssertionError("`tracked` did not put its own look in place")

    recorder = Rounds()
    with pytest.raises(SystemExit) as ended, tracked(recorder):  # noqa: PT012
        with contextlib.suppress(BaseException):  # as a destructor would
            os.kill(os.getpid(), signal.SIGTERM)
        recorder.on_each_round()
        pytest.fail("the run went on")
    assert ended.value.code == 143
    assert recorder.closed == [("KILLED", "_Terminated")]


def test_other_threads_install_no_handler_and_no_tracker_is_no_tracking():
    before, recorder, inside = signal.getsignal(signal.SIGTERM), Recorder(), []

    def work() -> None:
        with tracked(recorder):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before] and recorder.closed == [("FINISHED", None)]
    with tracked(None) as nothing:
        assert nothing is None and signal.getsignal(signal.SIGTERM) == before


TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning as L
import torch
from fl_lightning.tracking import RunTracker, tracked

class Module(L.LightningModule):
    def training_step(self, batch, index):
        if index == 2:
            print(tracker.run_id, flush=True)
        return torch.nn.functional.mse_loss(self.layer(batch), batch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

torch.set_num_threads(1)
module = Module()
module.layer = torch.nn.Linear(4, 4)
tracker = RunTracker(sys.argv[1])
with tracked(tracker):
    tracker.start({"seed": 7}, experiment="trainer")
    data = torch.utils.data.DataLoader(torch.zeros(100_000, 4), batch_size=1)
    L.Trainer(
        max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_signals_during_a_lightning_fit_are_killed_too(tmp_path, number, code):
    """Lightning puts its own handlers around ours and turns Ctrl-C into sys.exit(1)."""
    store = resolve_uri(start=tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, store],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert connect(store).get_run(run_id).info.status == "KILLED"
