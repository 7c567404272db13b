"""Which process writes a run, and closing the runs whose process is gone.

A process that is killed outright (SIGKILL, power loss, out of memory) cannot close its run. Every run therefore carries
the tags `host`, `pid` and `process_start`; the next start on the same host looks at what is still RUNNING. A process
number alone proves nothing, since numbers are reused, so the start time must agree as well.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

ORPHAN_MESSAGE = "process ended without closing the run"


@dataclass(frozen=True)
class ProcessMark:
    """A process for good: no other one, on any machine at any time, has the same mark.

    Attributes:
        host: the machine's name and a part of its machine id where it has one.
        pid: the process number.
        start: boot of the machine, process namespace (containers number their processes alone), start time.
    """

    host: str
    pid: int
    start: str

    def tags(self) -> dict[str, str]:
        return {"host": self.host, "pid": str(self.pid), "process_start": self.start}


def this_process() -> ProcessMark:
    """The mark of the current process."""
    return ProcessMark(_host(), os.getpid(), f"{_boot()}/{_namespace()}/{_start_time(os.getpid())}")


def is_gone(mark: ProcessMark) -> bool:
    """Whether the process has certainly ended; False for another host and wherever this cannot be known."""
    if mark.host != _host() or mark.start.count("/") != 2:
        return False
    boot, namespace, start = mark.start.split("/")
    if boot != _boot():
        return True
    if namespace != _namespace() or start == "unknown":
        return False
    return _start_time(mark.pid) != start


def mark_orphans(client: "MlflowClient", experiment_id: str) -> list[str]:
    """Sets RUNNING runs of this host whose process is gone to FAILED, with the tag `error`; returns their ids.

    Runs of other hosts and of live processes are never touched.
    """
    closed = []
    for run in search(client, [experiment_id], f"attributes.status = 'RUNNING' and tags.host = '{_host()}'"):
        tags = run.data.tags
        if tags.get("pid", "").isdigit() and "process_start" in tags:
            mark = ProcessMark(tags["host"], int(tags["pid"]), tags["process_start"])
            # Asked again now that its process is gone for certain: it may have closed the run in the meantime.
            if is_gone(mark) and client.get_run(run.info.run_id).info.status == "RUNNING":
                client.set_tag(run.info.run_id, "error", ORPHAN_MESSAGE)
                client.set_terminated(run.info.run_id, "FAILED")
                closed.append(run.info.run_id)
    return closed


def search(client: "MlflowClient", experiment_ids: list[str], condition: str) -> Iterator[Any]:
    """All runs that meet an MLflow search condition, oldest first, page by page."""
    token = None
    while True:
        page = client.search_runs(
            experiment_ids, condition, max_results=1000, order_by=["attributes.start_time ASC"], page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _host() -> str:
    name = platform.node().replace("'", "") or "unknown"
    identity = _read("/etc/machine-id")
    return f"{name}-{identity[:8]}" if identity else name


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id") or "-"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "-"


def _start_time(pid: int) -> str:
    """Start time in the system's own terms; "none" when there is no such process, "unknown" when it cannot be told."""
    if sys.platform == "linux":
        # pid (name) state ppid ...; the name may hold blanks and brackets. Field 22 is the start in clock ticks.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else "none"
    if sys.platform == "darwin":
        found = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10
        )
        state, _, start = found.stdout.strip().partition(" ")
        return start.strip() if start and not state.startswith("Z") else "none"
    return "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
