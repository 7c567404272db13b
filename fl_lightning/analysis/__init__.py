"""From recorded runs to statistics over seeds, tables, figures and a report."""

from fl_lightning.analysis.report import make_report
from fl_lightning.analysis.statistics import confidence_interval, curve, mean, sample_sd
from fl_lightning.analysis.tables import settings_markdown, settings_table, to_csv
from fl_lightning.analysis.trials import Trial

__all__ = [
    "Trial",
    "confidence_interval",
    "curve",
    "make_report",
    "mean",
    "sample_sd",
    "settings_markdown",
    "settings_table",
    "to_csv",
]
