"""Tracking on MLflow. Every MLflow name of the product lives in this package; MLflow is imported when first used."""

from fl_lightning.tracking.lifetime import tracked
from fl_lightning.tracking.location import resolve_uri, run_page, ui_command, ui_environment
from fl_lightning.tracking.orphans import mark_orphans
from fl_lightning.tracking.run import RunTracker
from fl_lightning.tracking.store import connect, ensure_experiment
from fl_lightning.tracking.study import (
    ChildRun,
    Study,
    children,
    close_parent,
    find_parent,
    log_artifact_file,
    log_metrics,
    log_text,
    open_study,
    read_runs,
)

__all__ = [
    "ChildRun",
    "RunTracker",
    "Study",
    "children",
    "close_parent",
    "connect",
    "ensure_experiment",
    "find_parent",
    "log_artifact_file",
    "log_metrics",
    "log_text",
    "mark_orphans",
    "open_study",
    "read_runs",
    "resolve_uri",
    "run_page",
    "tracked",
    "ui_command",
    "ui_environment",
]
