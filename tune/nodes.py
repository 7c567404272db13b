"""Before a sweep starts on a cluster: what its nodes must share or have alike, checked on each and refused in words."""

import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning import ConfigError, RunConfig
from fl_lightning.config import Cell, SweepConfig, needed_paths
from fl_lightning.config.cluster import RETRIES_OF_A_CLUSTER
from fl_lightning.tracking import artifact_folder, shown, sqlite_path
from tune.joining import find_cluster
from tune.looking import PACKAGES, looker
from tune.session import check_resources, has_room

PATIENCE = 120.0
"""How long a node may take to start a worker and look, in seconds; a busy one needs some ten."""

CHECKPOINTS, SWEEPS = "checkpoints", "sweeps"


def sweeps_folder(sweep: SweepConfig) -> Path:
    """Where a sweep's folder with its trials' folders lies."""
    return sweep.storage or Path.cwd() / "mlruns" / SWEEPS


def checkpoints_folder(sweep: SweepConfig, uri: str | None) -> Path | None:
    """Where trials keep their checkpoints, one folder per run; None: nowhere, for nothing is tracked.

    In `sweep.storage`, else beside a SQLite store, which all nodes must see as well, else under the start folder.
    """
    if uri is None:
        return None
    database = sqlite_path(uri)
    if sweep.storage is None and database is not None:
        return database.parent / CHECKPOINTS
    return (sweep.storage or Path.cwd() / "mlruns") / CHECKPOINTS


def with_retries(ray: Any, sweep: SweepConfig) -> SweepConfig:
    """The sweep with its number of retries decided: unless it says so itself, several nodes are worth some."""
    if sweep.max_retries is not None:
        return sweep
    several = sum(node["Alive"] for node in ray.nodes()) > 1
    return sweep.model_copy(update={"max_retries": RETRIES_OF_A_CLUSTER if several else 0})


def admitted(ray: Any, sweep: SweepConfig, cells: Sequence[Cell], uri: str | None) -> list[str]:
    """`check_resources` and `check_nodes` for the cells of a sweep; returns their notes for the user."""
    configs = [config for cell in cells for config in (cell.config, *cell.variants.values())]
    notes = check_resources(ray, sweep, configs)
    with tokens({"sweep.storage": sweeps_folder(sweep)}):  # this machine can write it
        pass
    return [*notes, *check_nodes(ray, sweep, configs, uri, find_cluster(sweep.ray.address) is not None)]


def check_nodes(ray: Any, sweep: SweepConfig, configs: Sequence[RunConfig], uri: str | None, joined: bool) -> list[str]:
    """Refuses a cluster on which trials would fail or would not be the same everywhere; returns notes for the user.

    Every node that has room for a trial runs a small task that looks for the folders, files, versions and the tracking
    store. A Ray of our own on this machine alone needs no such look. A node that comes later is not looked at.

    Args:
        ray: the module, in a session.
        sweep: the sweep.
        configs: one configuration of each kind that trials have.
        uri: the tracking store; None without tracking.
        joined: whether the Ray is a cluster that was joined.

    Raises:
        ConfigError: what is missing or differs, and on which node.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if not joined and len(alive) == 1:
        return []
    nodes = [node for node in alive if has_room(node["Resources"], sweep)]
    folders = {"sweep.storage": sweeps_folder(sweep)}
    opened = None
    if uri is not None:
        if (database := sqlite_path(uri)) is not None:
            folders["tracking.uri"] = database.parent
        else:
            opened = uri  # a SQLite file would be made by the first who opens it
        kept = {
            "tracking.experiment": artifact_folder(uri, configs[0].tracking.experiment),
            CHECKPOINTS: checkpoints_folder(sweep, uri),
        }
        for key, folder in kept.items():
            if folder is not None and not any(folder.is_relative_to(other) for other in folders.values()):
                folders[key] = folder
    with tokens(folders) as placed:
        paths = {key: [str(path) for path in found] for key, found in needed_paths(configs).items()}
        request = {"tokens": placed, "paths": paths, "uri": opened, "packages": PACKAGES}
        answers = _answers(ray, nodes, request)
        here = looker()({**request, "uri": None, "paths": {}})
    faults = [*_lost(answers), *differences(here, answers), *unshared(folders, answers), *missing(answers, uri)]
    if faults:
        more = f"; and {len(faults) - 1} more: {'; '.join(faults[1:])}" if len(faults) > 1 else ""
        raise ConfigError(faults[0] + more)
    return _notes(uri, {node["NodeManagerHostname"] for node in nodes})


def _answers(ray: Any, nodes: Sequence[Mapping[str, Any]], request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(looker())
    asked = {}
    for node in nodes:
        name = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[name] = task.options(scheduling_strategy=strategy).remote(dict(request))
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=PATIENCE)
    answers: dict[str, dict[str, Any]] = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference) if reference in ready else {"lost": f"no answer in {PATIENCE:g} s"}
        except Exception as error:  # whatever keeps a task from running there
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            answers[name] = {"lost": lines[-1].strip()[:300]}
    return answers


def _lost(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, answer in answers.items():
        if "lost" in answer:
            yield f"node {name}: runs no task ({answer['lost']}); mend it, or take it out of the cluster"


def differences(here: Mapping[str, Any], answers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Nodes on which this package is missing or other code would run than here."""
    for name, there in answers.items():
        if "lost" in there:
            continue
        if there["code"] is None:
            yield f"node {name}: fl_lightning is not installed there; install {here['versions'][PACKAGES[0]]}"
            continue
        if there["python"] != here["python"]:
            yield f"node {name}: has Python {there['python']}, here is {here['python']}; use the same"
        for package, version in here["versions"].items():
            found = there["versions"][package]
            # A driver without a GPU may have a build of torch without one: 2.14.1+cpu and 2.14.1+cu128.
            if (found or "").partition("+")[0] != (version or "").partition("+")[0]:
                yield f"node {name}: has {package} {found or 'not at all'}, here is {version}; install the same"
        if there["code"] != here["code"]:
            commits = f"commit {there['commit'] or 'unknown'} there, {here['commit'] or 'unknown'} here"
            yield f"node {name}: its fl_lightning is other code ({commits}); install the same"
    builds = {there["versions"]["torch"] for there in answers.values() if there.get("code")}
    if len({(build or "").partition("+")[0] for build in builds}) == 1 < len(builds):
        found = ", ".join(sorted(map(str, builds)))
        yield f"torch: nodes have different builds ({found}), and results would differ; install one on all"


REMEDIES = {
    "sweep.storage": "set sweep.storage to a folder that all nodes have mounted at the same place",
    "tracking.uri": "set it to an MLflow server, http://HOST:PORT, or to a folder that all nodes have mounted",
    "tracking.experiment": "its runs keep their files there: use a server that serves artifacts, or another experiment",
    CHECKPOINTS: "set sweep.storage to a folder that all nodes have mounted at the same place",
}


def unshared(folders: Mapping[str, Path], answers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Folders that a node does not see, or sees and cannot write."""
    for key, folder in folders.items():
        for kind, words in (("unseen", "do not see"), ("unwritable", "cannot write")):
            names = [name for name, answer in answers.items() if key in answer.get(kind, ())]
            if names and (kind == "unseen" or not any(key in answer.get("unseen", ()) for answer in answers.values())):
                at = f"{key}: " if key != CHECKPOINTS else "sweep.storage: checkpoints: "
                yield f"{at}{_nodes(names, words)} the folder {folder} of this machine; {REMEDIES[key]}"


def missing(answers: Mapping[str, Mapping[str, Any]], uri: str | None) -> Iterator[str]:
    """Files and stores that a node cannot reach."""
    for key in sorted({key for answer in answers.values() for key in answer.get("absent", {})}):
        names = [name for name, answer in answers.items() if key in answer.get("absent", {})]
        gone = answers[names[0]]["absent"][key][0]
        yield f"{key}: {_nodes(names, 'lack')} {gone}; put it there, or use a folder that all nodes have mounted"
    names = [name for name, answer in answers.items() if answer.get("tracking")]
    if names and uri is not None:
        local = re.search(r"[/@](127\.|localhost|\[::1\])", uri)
        hint = "; each node takes that address for itself: name the server's host" if local else ""
        yield f"tracking.uri={shown(uri)}: {_nodes(names, 'do not reach')} it ({answers[names[0]]['tracking']}){hint}"


def _nodes(names: Sequence[str], verb: str) -> str:
    if len(names) == 1:
        singular = {"do not see": "does not see", "do not reach": "does not reach", "lack": "lacks"}.get(verb, verb)
        return f"node {names[0]} {singular}"
    return f"{len(names)} nodes ({names[0]} among them) {verb}"


def _notes(uri: str | None, hosts: set[str]) -> list[str]:
    if uri is None or sqlite_path(uri) is None or len(hosts) < 2:
        return []
    return [f"{len(hosts)} machines write one SQLite file; on a network folder an MLflow server is safer"]


@contextmanager
def tokens(folders: Mapping[str, Path]) -> Iterator[dict[str, tuple[str, str, str]]]:
    """A file in each folder for the length of the block: by setting (folder, name, content). Leaves no new folder.

    Raises:
        ConfigError: this machine cannot write a folder.
    """
    placed: dict[str, tuple[str, str, str]] = {}
    made: list[Path] = []
    try:
        for key, folder in folders.items():
            name, content = f".seen-{secrets.token_hex(8)}", secrets.token_hex(16)
            try:
                for part in reversed([folder, *folder.parents]):
                    if not part.exists():
                        part.mkdir()
                        made.append(part)
                (folder / name).write_text(content, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{key}: the folder {folder} cannot be written here: {error.strerror}") from None
            placed[key] = (str(folder), name, content)
        yield placed
    finally:
        for folder_text, name, _ in placed.values():
            Path(folder_text, name).unlink(missing_ok=True)
        for part in reversed(made):
            if not os.listdir(part):
                part.rmdir()
