"""Which Ray cluster a sweep joins, if any: from `ray.address` and RAY_ADDRESS to an address that answers."""

import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning import ConfigError

ENVIRONMENT_KEY = "RAY_ADDRESS"
LEFT_BY_RAY = "ray_current_cluster"
"""The file in Ray's temporary folder in which `ray start` leaves the address of the cluster."""

PATIENCE = 5.0
"""How long the head node may take to accept a connection, in seconds."""

SETTINGS = b"\x04"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00" + SETTINGS + b"\x00" * 5

OWN = "ray.address=null runs the sweep on this machine"


@dataclass(frozen=True)
class Cluster:
    """A cluster to join: host:port, and the setting that named it, for messages."""

    address: str
    given: str


def find_cluster(asked: str | None) -> Cluster | None:
    """The cluster that a sweep shall join; None: it gets a Ray of its own.

    `auto` is RAY_ADDRESS, else the cluster of the last `ray start` on this machine. It never means another program's
    own Ray, which it could be taken for by its process.

    Args:
        asked: `ray.address`.

    Raises:
        ConfigError: `ray.address` and RAY_ADDRESS contradict each other, or `auto` finds no cluster.
    """
    present = os.environ.get(ENVIRONMENT_KEY, "").strip()
    if asked is None or (asked == "auto" and present not in ("", "auto", "local")):
        if present in ("", "local"):
            return None
        given = f"{ENVIRONMENT_KEY}={present}"
        return Cluster(_left_by_ray(given) if present == "auto" else _checked(present), given)
    given = f"ray.address={asked}"
    if present not in ("", "auto", asked):
        raise ConfigError(f"{given}: contradicts {ENVIRONMENT_KEY}={present} in the environment; remove one of the two")
    return Cluster(_left_by_ray(given) if asked == "auto" else asked, given)


def _checked(address: str) -> str:
    from fl_lightning.config import SweepConfig

    try:
        return str(SweepConfig(ray={"address": address}).ray.address)
    except ConfigError as error:
        raise ConfigError(str(error).replace("ray.address=", f"{ENVIRONMENT_KEY}=", 1)) from None


def _left_by_ray(given: str) -> str:
    file = ray_folder() / LEFT_BY_RAY
    try:
        return file.read_text().strip()
    except OSError:
        raise ConfigError(
            f"{given}: no Ray cluster was started on this machine ({file} is not there); start one with `ray start "
            f"--head`, or join one with `ray start --address=HOST:PORT`, or give ray.address=HOST:PORT; {OWN}"
        ) from None


def ray_folder() -> Path:
    """Ray's temporary folder, by Ray's own rule."""
    names = ("RAY_TMPDIR", "TMPDIR") if sys.platform == "linux" else ("RAY_TMPDIR",)
    found = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return Path(found or (tempfile.gettempdir() if sys.platform == "win32" else "/tmp")) / "ray"


def check_answers(cluster: Cluster) -> None:
    """Refuses an address at which no head node answers, before Ray tries it for minutes.

    Ray speaks gRPC, whose servers greet with a SETTINGS frame of HTTP/2 (RFC 9113, section 3.4).

    Raises:
        ConfigError: nothing answers.
    """
    match = re.fullmatch(r"\[?([^\]]+?)\]?:(\d+)", cluster.address)
    host, port = (match[1], int(match[2])) if match else (cluster.address, 0)
    secured = os.environ.get("RAY_USE_TLS", "0") not in ("0", "")
    try:
        with socket.create_connection((host, port), timeout=PATIENCE) as connection:
            connection.sendall(PREFACE)
            greeting = connection.recv(9)
        if not secured and greeting[3:4] != SETTINGS:
            raise OSError(None, "what answers there is no Ray cluster")
    except OSError as error:
        raise ConfigError(
            f"{cluster.given}: no Ray cluster answers at {cluster.address} ({error.strerror or error}); check with "
            f"`ray status --address {cluster.address}`; {OWN}"
        ) from None


def use_token() -> None:
    """Shows the cluster this user's token, if there is one.

    `ray start` demands a token as soon as one exists (a local Ray has made it once), yet a program that joins sends
    none unless it is told to.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not named and not (Path.home() / ".ray" / "auth_token").is_file():
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:  # it has read its settings already
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")


def refused(cluster: Cluster, error: Exception) -> ConfigError:
    """Ray's refusal to let this process join, in one line."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    text = " ".join(str(root).split())
    if "AuthToken" in text or "uthentication token" in text:
        text = (
            "it demands an authentication token that this user does not have; put the head node's ~/.ray/auth_token in "
            "the same place here, or set RAY_AUTH_TOKEN"
        )
    return ConfigError(f"{cluster.given}: Ray cannot join the cluster at {cluster.address}: {text[-400:]}")


def same_cluster(ray: Any, cluster: Cluster) -> bool:
    """Whether the cluster that this process has joined already is the one that is asked for."""
    now = str(ray.get_runtime_context().gcs_address)
    return now == cluster.address or _numeric(now) == _numeric(cluster.address)


def _numeric(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    try:
        return socket.gethostbyname(host), port
    except OSError:
        return host, port
