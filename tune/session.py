"""Ray for the length of a sweep: its own, on the loopback address and gone afterwards, or a cluster that goes on."""

import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fl_lightning import ConfigError, RunConfig
from fl_lightning.config import SweepConfig
from tune.joining import Cluster, check_answers, find_cluster, refused, same_cluster, use_token

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


FOR_WORKERS = ("RAY_CHDIR_TO_TRIAL_DIR", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "FL_CACHE_DIR")
"""What workers of a Ray of our own inherit, and those of a cluster must be told."""


@contextmanager
def ray_session(address: str | None = None) -> Iterator[Any]:
    """Starts Ray, or joins a cluster or the Ray that this process has joined already; yields the module.

    Only a Ray that was started here ends here; a cluster that was joined goes on. The handlers of SIGTERM and the log
    level are put back.

    Args:
        address: `ray.address`; None: RAY_ADDRESS, else a Ray of our own.

    Raises:
        ConfigError: no cluster where one was asked for, or it cannot be joined.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cluster = find_cluster(address)
    if cluster is not None:
        check_answers(cluster)
        use_token()
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # times a second: what answers may be no Ray at all
    else:
        # Whatever its name says: Ray then listens on the loopback address only, on every system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.CRITICAL)
    ours = not ray.is_initialized()
    try:
        if ours:
            _start(ray, cluster)
        elif cluster is not None and not same_cluster(ray, cluster):
            raise ConfigError(
                f"{cluster.given}: this process is in another Ray already; leave it with ray.shutdown() before"
            )
        with _briefly(ray):
            yield ray
    finally:
        if ours:
            ray.shutdown()
        log.setLevel(level)


@contextmanager
def _briefly(ray: Any) -> Iterator[None]:
    """Ray's own words on a lost node or process, one line of each on standard error.

    It would print them to standard output, and with a lost node the last twenty lines of its log.
    """
    place, name, said = ray._private.worker, "print_to_stdstream", set[str]()
    if not hasattr(place, name):
        yield
        return

    def say(data: Mapping[str, Any], **ignored: Any) -> None:
        for text in data.get("lines", ()):
            line = " ".join(text.split("Possible reasons")[0].split(". ")[0].split())[:200]
            if line not in said:
                said.add(line)
                print(f"ray: {line}", file=sys.stderr, flush=True)

    before = getattr(place, name)
    setattr(place, name, say)
    try:
        yield
    finally:
        setattr(place, name, before)


def _start(ray: Any, cluster: Cluster | None) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main else None
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.CRITICAL}
    # Ray hands the interpreter's path to a shell as it stands; with a space in it no worker would ever start.
    python = shlex.quote(sys.executable)
    spaced = {"py_executable": python} if python != sys.executable else {}
    if cluster is not None:
        passed = {name: os.environ[name] for name in FOR_WORKERS if name in os.environ}
        quiet["runtime_env"] = {"env_vars": passed, **spaced}
        try:
            ray.init(address=cluster.address, **quiet)
        except Exception as error:  # whatever Ray has against it: it is the user's to mend
            raise refused(cluster, error) from error
    else:
        if len(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) > LONGEST_TEMPORARY_FOLDER:
            quiet["_temp_dir"] = "/tmp/ray"
        if spaced:
            quiet["runtime_env"] = spaced
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
        ConfigError: one trial needs more than any one machine has, or a GPU that it does not reserve.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    here = "Ray has" if len(nodes) == 1 else f"of {len(nodes)} nodes none has more than"
    needed = {"CPU": sweep.resources.cpu, "GPU": sweep.resources.gpu}
    for kind, wanted in needed.items():
        there = max(node.get(kind, 0.0) for node in nodes)
        if wanted > there:
            raise ConfigError(
                f"sweep.resources.{kind.lower()}={wanted:g}: {here} {there:g} here, so no trial could start; lower it"
            )
    if not any(has_room(node, sweep) for node in nodes):
        raise ConfigError(
            f"sweep.resources.gpu={sweep.resources.gpu:g}: no node has so many GPUs and {sweep.resources.cpu:g} CPUs "
            "as well; lower sweep.resources.cpu"
        )
    gpus = ray.cluster_resources().get("GPU", 0.0)
    devices = {config.engine.device for config in configs}
    if sweep.resources.gpu == 0 and "cuda" in devices:
        raise ConfigError(
            "engine.device=cuda with sweep.resources.gpu=0: trials that reserve no GPU see none; set, for example, "
            "sweep.resources.gpu=0.5 for two trials on one GPU"
        )
    if sweep.resources.gpu == 0 and gpus and "auto" in devices:
        return [f"{gpus:g} GPU(s) are idle: trials use the CPU; set sweep.resources.gpu, for example 0.5"]
    return []


def has_room(resources: Mapping[str, float], sweep: SweepConfig) -> bool:
    """Whether a node with these resources could run a trial."""
    return resources.get("CPU", 0.0) >= sweep.resources.cpu and resources.get("GPU", 0.0) >= sweep.resources.gpu
