"""What a run is called and tagged with: what it is of, and who writes it."""

import getpass
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fl_lightning.tracking.orphans import this_process
from fl_lightning.tracking.values import config_sha256, tags_of

if TYPE_CHECKING:
    from fl_lightning.records import RunResult

PARENT_TAG = "mlflow.parentRunId"
RUN_NAME = "mlflow.runName"
NOTE = "mlflow.note.content"
"""MLflow shows it, as markdown, at the top of a run's page."""


def run_name(config: Mapping[str, Any], flat: Mapping[str, Any]) -> str:
    """For example "fedsam-s42-1a2b": algorithm, seed, start of the configuration's hash."""
    return f"{flat.get('algorithm.name', 'run')}-s{flat.get('seed', '')}-{config_sha256(config)[:4]}"


def automatic_tags(config: Mapping[str, Any], flat: Mapping[str, Any], parent_run_id: str | None) -> dict[str, str]:
    commit = _git_commit()
    return process_tags() | tags_of(
        {
            "algorithm": flat.get("algorithm.name"),
            "seed": flat.get("seed"),
            "engine": flat.get("engine.kind"),
            "config_sha256": config_sha256(config),
            "git_commit": commit,
            "mlflow.source.git.commit": commit,
            "kind": "trial" if parent_run_id else "run",
            PARENT_TAG: parent_run_id,
        }
    )


def process_tags() -> dict[str, str]:
    """Who writes: host and process (see `orphans`), user, version of this package."""
    try:
        package = version("fl-lightning")
    except PackageNotFoundError:
        package = "not installed"
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = "unknown"
    named = {"mlflow.user": user, "mlflow.source.name": "fl-lightning", "mlflow.source.type": "LOCAL"}
    return {**this_process().tags(), **named, "fl_lightning_version": package}


def _git_commit() -> str | None:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def note_of(result: "RunResult") -> str:
    """A run in a few words: its badge, accuracy and epsilon, and how it can be had again."""
    final, last = result.final, len(result.rounds)
    accuracy, epsilon = final.get("test_accuracy"), final.get("epsilon")
    said = [f"**{result.badge}**", f"{last} round{'' if last == 1 else 's'}"]
    said += [] if accuracy is None else [f"test accuracy {accuracy:.4f}"]
    if epsilon is not None:
        facts = final.get("privacy") or {}
        said.append(f"epsilon {epsilon:.4g} (one {facts.get('unit')}, delta {facts.get('delta'):g})")
    lines = [", ".join(said)]
    lines += [f"stopped early: {final['stopped']['reason']}"] if final.get("stopped") else []
    return "\n\n".join([*lines, "Again: `fl-lightning run --config config.yaml`, with the artifact of that name."])
