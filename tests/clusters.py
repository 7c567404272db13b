"""A real Ray cluster of two nodes on this machine: two raylets with working folders of their own."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 180.0
"""Seconds for what takes ten on a machine with nothing else to do."""


@dataclass
class Nodes:
    """The cluster: its address, the environment of programs that use it, and each node's first process by its name.

    Attributes:
        folder: short, for sockets lie under it; each node works in a folder of its own in it.
        port: of the head node.
        environment: for `ray start` and for the driver; it names a token and leaves it to them to show it.
        processes: `head` and `second`, each the leader of a process group.
    """

    folder: Path
    port: int
    environment: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, name: str, *options: str, **more: str) -> None:
        """Starts a node of one CPU and waits until it says that it runs."""
        place, log = self.folder / name, self.folder / f"{name}.log"
        place.mkdir(exist_ok=True)
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
        command += ["--num-cpus=1", "--object-store-memory=100000000", *options]
        with open(log, "wb") as output:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=place,
                env={**self.environment, **more},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        wait_for(lambda: b"Ray runtime started" in log.read_bytes(), lambda: log.read_text(errors="replace"))

    def start_second(self, **more: str) -> None:
        """Adds the second node, or adds it again if it has ended; it has a GPU that is only a number."""
        if "second" in self.processes and self.processes["second"].poll() is None:
            return
        self.start("second", f"--address={self.address}", "--num-gpus=1", RAY_AUTH_MODE="token", **more)

    def raylet(self, name: str) -> int:
        """The process number of a node's raylet, whose end is the end of the node."""
        for pid in descendants(self.processes[name].pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(b"raylet"):
                    return pid
        raise AssertionError(f"the node {name} has no raylet")

    def kill(self, name: str) -> None:
        """SIGKILL for a node's raylet; its workers end by themselves."""
        os.kill(self.raylet(name), signal.SIGKILL)
        process = self.processes[name]
        wait_for(lambda: process.poll() is not None, lambda: f"the node {name} goes on")

    def stop(self) -> None:
        """Ends every process that was started, whatever state it is in."""
        pids = [pid for process in self.processes.values() for pid in descendants(process.pid)]
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        wait_for(lambda: not any(map(_lives, pids)), lambda: f"these do not end: {[p for p in pids if _lives(p)]}")
        shutil.rmtree(self.folder, ignore_errors=True)


def _end_with_parent() -> None:
    """Has the system send SIGTERM when the tests are killed; `ray start --block` then ends what it has started."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """The cluster for the length of the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    token = folder / "token"
    token.write_text(os.urandom(32).hex())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = Nodes(folder, port, environment)
    try:
        soon = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
        nodes.start("head", "--head", f"--port={port}", "--include-dashboard=false", **soon)
        nodes.start_second()
        yield nodes
    finally:
        nodes.stop()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def wait_for(reached: Callable[[], Any], why_not: Callable[[], str]) -> Any:
    """Waits until something is true and returns it."""
    deadline = time.monotonic() + PATIENCE
    while not (found := reached()):
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.1)
    return found


def sweep_process(folder: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """`fl-lightning sweep` from a folder, as a process of its own."""
    command = [sys.executable, "-m", "fl_lightning.cli", "sweep", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def swept(folder: Path, environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a whole sweep."""
    process = sweep_process(folder, environment, *arguments)
    try:
        out, err = process.communicate(timeout=2 * PATIENCE)
    finally:
        process.kill()
    return process.returncode, out, err


def under_way(database: Path) -> dict[int, int]:
    """The last round of each trial that is running, by its process."""
    query = (
        "SELECT t.value, max(m.step) FROM runs r JOIN tags t USING (run_uuid) JOIN metrics m USING (run_uuid) "
        "WHERE r.status = 'RUNNING' AND t.key = 'pid' AND m.key = 'seconds' GROUP BY r.run_uuid"
    )
    try:
        with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return {int(pid): int(step) for pid, step in connection.execute(query)}
    except sqlite3.OperationalError:  # it is not there yet, or its tables are being made
        return {}


def hashes(file: Path) -> dict[str, Any]:
    """What must not depend on where a sweep ran: its trials' weights and its table without clocks."""
    result = json.loads(file.read_text())
    trials = [(trial["trial_id"], trial["status"], trial["final"].get("weights_sha256")) for trial in result["trials"]]
    table = [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in result["table"]]
    return {"trials": trials, "table": table, "status": result["status"]}
