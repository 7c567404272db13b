"""How a run ends (H19): FINISHED, FAILED, KILLED or found later as an orphan; real processes and real signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_lightning.tracking import (
    RunTracker,
    children,
    close_parent,
    connect,
    ensure_experiment,
    mark_orphans,
    open_study,
    resolve_uri,
    tracked,
)
from fl_lightning.tracking.orphans import ORPHAN_MESSAGE, ProcessMark, is_gone, this_process

ROOT = Path(__file__).parents[1]
CONFIG = {"seed": 7, "algorithm": {"name": "fedavg"}}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return resolve_uri(f"{tmp_path_factory.mktemp('endings')}/mlruns")


def run_of(uri: str, run_id: str | None):
    assert run_id is not None
    return connect(uri).get_run(run_id)


# --- how a run ends (H19) --------------------------------------------------------------------------------------------

LOOP = """
import sys, time
from fl_lightning.tracking import RunTracker, tracked

uri, ending, parent = sys.argv[1:]
tracker = RunTracker(uri)
with tracked(tracker):
    tracker.start({"seed": 7}, experiment="endings", parent_run_id=parent or None)
    for step in range(1, 10_000):
        tracker.log_metrics({"accuracy": step / 10_000}, step=step)
        if step == 2:
            print(tracker.run_id, flush=True)
            if ending == "raise":
                raise ValueError("loss is\\nnot finite")
        time.sleep(0.01)
"""


def start_loop(uri: str, ending: str = "", parent: str = "", code: str = LOOP) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, uri, ending, parent],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    run_id = process.stdout.readline().strip()
    assert run_id, process.stderr.read()
    return process, run_id


def end(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("number", "status", "code", "tag"),
    [
        (None, "FAILED", 1, "ValueError: loss is not finite"),
        (signal.SIGINT, "KILLED", -signal.SIGINT, "KeyboardInterrupt"),
        (signal.SIGTERM, "KILLED", 143, "Terminated: the process was asked to end (SIGTERM)"),
    ],
)
def test_a_run_that_raises_is_failed_and_one_that_is_stopped_is_killed(store, number, status, code, tag):
    process, run_id = start_loop(store, "" if number else "raise")
    if number:
        process.send_signal(number)
    returned, errors = end(process)
    assert returned == code, errors
    run = run_of(store, run_id)
    assert (run.info.status, run.data.tags["error"]) == (status, tag)
    assert run.info.end_time is not None and run.data.metrics["accuracy"] > 0
    report = Path(run.info.artifact_uri) / "error.txt"
    assert report.exists() == (status == "FAILED")
    if status == "FAILED":
        assert "Traceback" in report.read_text() and "ValueError: loss is\nnot finite" in report.read_text()


def test_after_sigkill_the_next_start_marks_the_orphan_and_only_it(store):
    killed, killed_id = start_loop(store)
    alive, alive_id = start_loop(store)
    try:
        assert run_of(store, killed_id).info.status == "RUNNING"
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie in the process table
        tracker = RunTracker(store)
        with tracked(tracker):
            tracker.start(CONFIG, experiment="endings")
            assert run_of(store, tracker.run_id).info.status == "RUNNING"
        orphan = run_of(store, killed_id)
        assert (orphan.info.status, orphan.data.tags["error"]) == ("FAILED", ORPHAN_MESSAGE)
        assert run_of(store, alive_id).info.status == "RUNNING"
    finally:
        killed.wait()
        alive.terminate()
        assert end(alive)[0] == 143
    assert run_of(store, alive_id).info.status == "KILLED"


def test_orphans_are_judged_by_host_boot_namespace_and_start_time(store):
    me = this_process()
    boot, namespace, start = me.start.split("/")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    marks = {
        "this process": (me, False),
        "a number used again": (ProcessMark(me.host, me.pid, f"{boot}/{namespace}/1"), True),
        "before the last boot": (ProcessMark(me.host, me.pid, f"0/{namespace}/{start}"), True),
        "another container": (ProcessMark(me.host, gone.pid, f"{boot}/pid:[1]/1"), False),
        "another host": (ProcessMark("elsewhere", gone.pid, me.start), False),
        "ended": (ProcessMark(me.host, gone.pid, f"{boot}/{namespace}/1"), True),
        "no mark": (None, False),
    }
    client, experiment = connect(store), ensure_experiment(store, "marks")
    runs = {
        name: client.create_run(experiment, tags=mark.tags() if mark else {}).info.run_id
        for name, (mark, _) in marks.items()
    }
    closed_id = client.create_run(experiment, tags=marks["ended"][0].tags()).info.run_id
    client.set_terminated(closed_id, "FINISHED")
    assert all(mark is None or is_gone(mark) == expected for mark, expected in marks.values())
    assert sorted(mark_orphans(client, experiment)) == sorted(runs[name] for name, (_, gone_) in marks.items() if gone_)
    status = {name: client.get_run(run_id).info.status for name, run_id in runs.items()}
    assert status == {name: "FAILED" if expected else "RUNNING" for name, (_, expected) in marks.items()}
    assert client.get_run(closed_id).info.status == "FINISHED"


# --- sweeps (H19) ----------------------------------------------------------------------------------------------------


def trial(uri: str, parent: str, error: BaseException | None = None, **tags: str) -> str:
    tracker = RunTracker(uri)
    try:
        with tracked(tracker):
            tracker.start(CONFIG, experiment="sweep endings", parent_run_id=parent, tags=tags)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert tracker.run_id is not None
    return tracker.run_id


def test_the_parent_reflects_its_trials(store):
    with tracked(open_study(store, "sweep endings", "good")) as good:
        trial(store, good.run_id)
        trial(store, good.run_id, ValueError("first attempt"), trial_id="t1")
        trial(store, good.run_id, trial_id="t1")
    with tracked(open_study(store, "sweep endings", "bad")) as bad:
        failed = trial(store, bad.run_id, ValueError("clip"))
        stopped = trial(store, bad.run_id, KeyboardInterrupt())
        trial(store, bad.run_id)
    assert run_of(store, good.run_id).info.status == "FINISHED"
    assert run_of(store, bad.run_id).info.status == "FAILED"
    assert (run_of(store, failed).info.status, run_of(store, stopped).info.status) == ("FAILED", "KILLED")
    assert close_parent(store, bad.run_id, failed=False) == run_of(store, bad.run_id).info.status == "FINISHED"


def test_a_trial_whose_worker_was_killed_is_failed_by_the_end_of_the_sweep(store):
    with tracked(open_study(store, "endings", "worker")) as study:
        worker, run_id = start_loop(store, parent=study.run_id)
        worker.kill()
        worker.wait()
        assert run_of(store, run_id).info.status == "RUNNING"
    assert run_of(store, run_id).info.status == run_of(store, study.run_id).info.status == "FAILED"


SWEEP = """
import sys, time
from fl_lightning.tracking import RunTracker, open_study, tracked

uri = sys.argv[1]
with tracked(open_study(uri, "endings", "interrupted")) as study:
    trial = RunTracker(uri)  # as in a worker that the driver cannot reach any more
    trial.start({"seed": 1}, experiment="endings", parent_run_id=study.run_id)
    print(study.run_id, flush=True)
    time.sleep(60)
"""


def test_a_sweep_that_is_terminated_is_killed_with_its_open_trials(store):
    driver, study_id = start_loop(store, code=SWEEP)
    driver.terminate()
    assert end(driver)[0] == 143
    (child,) = children(store, study_id)
    assert (run_of(store, study_id).info.status, child.status) == ("KILLED", "KILLED")
