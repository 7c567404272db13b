"""The machine during a run: use of processor, memory and GPU, as metrics `system/*` under MLflow's own names.

A thread reads the figures and does nothing else; the run sends them with its next round. So a store that hangs cannot
hold the thread up, and the thread cannot hold training up. MLflow's own monitor sends from its thread, and waits for
the store without limit when it is to end.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("fl_lightning.tracking")

INTERVAL_KEY = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"
INTERVAL = 10.0
"""Seconds between two readings, the first one after as long; a shorter run has none. INTERVAL_KEY changes it."""

JOIN_SECONDS = 2.0


class SystemMonitor:
    """Reads the figures until `stop`. The thread is a daemon: it ends with the process, whatever ends that."""

    def __init__(self, since: float | None = None) -> None:
        """Starts reading; without the package psutil only the GPU is read.

        Args:
            since: seconds since the epoch at which the run began; a reading's step is the whole seconds from there on,
                so that a run which is resumed goes on counting.
        """
        self._since = time.time() if since is None else since
        self._read: deque[tuple[str, float, int, int]] = deque()
        self._stop = threading.Event()
        self._sources = [source for source in (_machine(), _gpus) if source is not None]
        self._thread = threading.Thread(target=self._watch, name="fl-lightning-system-metrics", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[str, float, int, int]]:
        """What was read since the last call, as (name, value, milliseconds since the epoch, step)."""
        return [self._read.popleft() for _ in range(len(self._read))]

    def stop(self) -> None:
        """Ends the thread; waits for it 2 s at most. Calling it again does nothing."""
        self._stop.set()
        self._thread.join(JOIN_SECONDS)

    def _watch(self) -> None:
        while not self._stop.wait(_interval()):
            now = time.time()
            for source in self._sources:
                try:
                    found = source()
                except Exception as error:  # a driver's or a container's peculiarity: the run matters more
                    log.debug("tracking: no system metrics: %s", error)
                    continue
                stamp, step = int(now * 1000), int(now - self._since)
                self._read.extend((f"system/{name}", value, stamp, step) for name, value in found.items())


def _interval() -> float:
    try:
        seconds = float(os.environ.get(INTERVAL_KEY, INTERVAL))
    except ValueError:
        return INTERVAL
    return seconds if seconds > 0 else INTERVAL


def _machine() -> Callable[[], dict[str, float]] | None:
    """Reads the machine's processors and memory and this process's share; percentages of one core for the process."""
    try:
        import psutil
    except ImportError:
        log.debug("tracking: no system metrics of processor and memory without the package psutil")
        return None
    process = psutil.Process()
    psutil.cpu_percent(), process.cpu_percent()  # the first call has no time to compare with, and gives 0

    def read() -> dict[str, float]:
        memory = psutil.virtual_memory()
        return {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
            "system_memory_usage_percentage": round(memory.used / memory.total * 100, 1),
            "process_cpu_utilization_percentage": process.cpu_percent(),
            "process_memory_usage_megabytes": round(process.memory_info().rss / 1e6, 1),
        }

    return read


def _gpus() -> dict[str, float]:
    """Memory of the GPUs that training has begun to use, and their load where the package nvidia-ml-py is there."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        if not torch.cuda.memory_reserved(number):
            continue
        free, total = torch.cuda.mem_get_info(number)
        found[f"gpu_{number}_memory_usage_megabytes"] = round((total - free) / 1e6, 1)
        found[f"gpu_{number}_memory_usage_percentage"] = round((total - free) / total * 100, 1)
        try:
            found[f"gpu_{number}_utilization_percentage"] = float(torch.cuda.utilization(number))
        except Exception:  # no nvidia-ml-py, or a part of a GPU, which has no load of its own
            continue
    return found
