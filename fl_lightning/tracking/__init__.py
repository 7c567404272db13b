"""Tracking on MLflow. Every MLflow name of the product lives in this package; MLflow is imported when first used."""

from fl_lightning.tracking.facts import RUN_NAME
from fl_lightning.tracking.lifetime import held_back, tracked
from fl_lightning.tracking.location import resolve_uri, run_page, shown, sqlite_path, ui_command, ui_environment
from fl_lightning.tracking.orphans import mark_orphans
from fl_lightning.tracking.resumed import (
    close_lost,
    last_attempt,
    no_plan,
    read_folder,
    read_json,
    reopen_study,
    settle,
)
from fl_lightning.tracking.run import RunTracker
from fl_lightning.tracking.shared import artifact_folder
from fl_lightning.tracking.store import connect, ensure_experiment
from fl_lightning.tracking.study import (
    ChildRun,
    Study,
    children,
    close_parent,
    describe,
    find_parent,
    log_artifact_file,
    log_metrics,
    log_text,
    open_study,
    read_runs,
)

__all__ = [
    "RUN_NAME",
    "ChildRun",
    "RunTracker",
    "Study",
    "artifact_folder",
    "children",
    "close_lost",
    "close_parent",
    "connect",
    "describe",
    "ensure_experiment",
    "find_parent",
    "held_back",
    "last_attempt",
    "log_artifact_file",
    "log_metrics",
    "log_text",
    "mark_orphans",
    "no_plan",
    "open_study",
    "read_folder",
    "read_json",
    "read_runs",
    "reopen_study",
    "resolve_uri",
    "run_page",
    "settle",
    "shown",
    "sqlite_path",
    "tracked",
    "ui_command",
    "ui_environment",
]
