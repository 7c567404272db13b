"""Ray for the length of a sweep: quiet, on this machine's loopback address, gone afterwards."""

import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fl_lightning import ConfigError, RunConfig
from fl_lightning.config import SweepConfig

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    # Trials write to MLflow; Ray's result.json, progress.csv and event files would repeat it in every trial's folder.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Ctrl-C must end the sweep and mark it KILLED, not begin Tune's own long goodbye.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Trials stay in the start folder. All their paths are absolute anyway.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # A trial that reserves no GPU sees none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # A trial's last report is its outcome, which has no metric by itself.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}
OBJECT_STORE_BYTES = 128 * 1024**2
"""Trials send numbers, not arrays. Ray would reserve a third of the memory."""

LONGEST_TEMPORARY_FOLDER = 36
"""Ray's sockets lie 70 characters deeper, and the system ends a socket's path at 107."""


@contextmanager
def ray_session() -> Iterator[Any]:
    """Starts Ray, or joins the cluster of RAY_ADDRESS or the one this process has joined already; yields the module.

    Only a Ray that was started or joined here is left again. The handlers of SIGTERM and the log level are put back.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("RAY_ADDRESS"):
        # Whatever its name says: Ray then listens on the loopback address only, on every system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.CRITICAL)
    ours = not ray.is_initialized()
    try:
        if ours:
            _start(ray)
        yield ray
    finally:
        if ours:
            ray.shutdown()
        log.setLevel(level)


def _start(ray: Any) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.CRITICAL}
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(address=address, **quiet)
    else:
        if len(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) > LONGEST_TEMPORARY_FOLDER:
            quiet["_temp_dir"] = "/tmp/ray"
        if (python := shlex.quote(sys.executable)) != sys.executable:
            # Ray hands the interpreter's path to a shell as it stands; with a space in it no worker would ever start.
            quiet["runtime_env"] = {"py_executable": python}
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            **quiet,
        )
    if handler is not None:  # Ray has put its own in its place, which would end a sweep without closing it
        signal.signal(signal.SIGTERM, handler)


def check_resources(ray: Any, sweep: SweepConfig, configs: Sequence[RunConfig]) -> list[str]:
    """Refuses trials that could never start; returns notes for the user.

    Raises:
        ConfigError: one trial needs more than all machines have, or a GPU that it does not reserve.
    """
    have = ray.cluster_resources()
    for name, wanted in (("cpu", sweep.resources.cpu), ("gpu", sweep.resources.gpu)):
        there = have.get(name.upper(), 0.0)
        if wanted > there:
            raise ConfigError(
                f"sweep.resources.{name}={wanted:g}: Ray has {there:g} here, so no trial could start; lower it"
            )
    gpus = have.get("GPU", 0.0)
    devices = {config.engine.device for config in configs}
    if sweep.resources.gpu == 0 and "cuda" in devices:
        raise ConfigError(
            "engine.device=cuda with sweep.resources.gpu=0: trials that reserve no GPU see none; set, for example, "
            "sweep.resources.gpu=0.5 for two trials on one GPU"
        )
    if sweep.resources.gpu == 0 and gpus and "auto" in devices:
        return [f"{gpus:g} GPU(s) are idle: trials use the CPU; set sweep.resources.gpu, for example 0.5"]
    return []
