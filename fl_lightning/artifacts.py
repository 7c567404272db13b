"""What a run leaves beside its metrics: partition manifest, privacy account and statement, clipping laboratory."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.analysis.norms import ClippingLab
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.privacy import NoPrivacy
from fl_lightning.privacy import Ledger, statement
from fl_lightning.privacy.readings import PaperReading, reading_series, to_csv, to_markdown
from fl_lightning.tracking import RunTracker

if TYPE_CHECKING:
    from fl_lightning.build import Prepared

SERIES_POINTS = 3
"""Rounds at which PLD is computed for the run's artifact, the first and the last among them; each may take a second."""


def terms(prepared: "Prepared") -> dict[str, Any]:
    """What `privacy.statement` and `privacy.summary` want to know beside the ledger."""
    privacy, shield = prepared.config.privacy, prepared.algorithm.protection
    return {
        "level": privacy.level,
        "clip_norm": shield.clip,
        "clip_bound": getattr(privacy, "clip_bound", "fixed"),
        "trust_model": getattr(privacy, "trust_model", "local"),
        "sizes": {client: len(shard) for client, shard in enumerate(prepared.partition.indices)},
        "public_examples": prepared.public_examples,
        "cohorts": (prepared.config.fl.cohort_size, getattr(privacy, "noise_cohort_size", None)),
    }


def span(multipliers: Sequence[float]) -> dict[str, float]:
    """The smallest and the largest."""
    return {"min": min(multipliers), "max": max(multipliers)}


def keep_manifest(prepared: "Prepared", tracker: RunTracker) -> None:
    """Stores how the data were dealt out: indices, hash, histograms, plot."""
    from fl_lightning.data.manifest import save_manifest

    with tempfile.TemporaryDirectory() as folder:
        for path in save_manifest(prepared.partition, Path(folder)):
            tracker.log_artifact_file(path, "partition")


def keep_norms(lab: ClippingLab, tracker: RunTracker) -> None:
    """Stores the clipping laboratory's table and picture."""
    tracker.log_text(lab.to_csv(), "clipping/norms.csv")
    with tempfile.TemporaryDirectory() as folder:
        tracker.log_artifact_file(lab.draw(Path(folder) / "norms.png"), "clipping")


def paper_of(prepared: "Prepared") -> PaperReading | None:
    """How the paper's own formula reads the run; None where it is not the paper's algorithm."""
    config = prepared.config
    literal = not isinstance(config.privacy, NoPrivacy) and config.privacy.mode == "paper"
    return PaperReading(raw_noise=literal) if isinstance(config.algorithm, SamAdpfl) else None


def keep_account(prepared: "Prepared", ledger: Ledger, rows: Sequence[dict[str, Any]], tracker: RunTracker) -> None:
    """Stores the ledger, its readings `rows`, and the privacy statement as a text and as a tag."""
    tracker.log_text(json.dumps(ledger.to_dict(), indent=1), "privacy/ledger.json")
    series = reading_series(ledger, paper=paper_of(prepared), most=SERIES_POINTS)
    tracker.log_text(json.dumps({"rows": rows, "series": series}, indent=1), "privacy/readings.json")
    tracker.log_text(to_markdown(rows), "privacy/readings.md")
    tracker.log_text(to_csv(rows), "privacy/readings.csv")
    words = statement(ledger, **terms(prepared))
    tracker.log_text(words + "\n", "privacy/statement.txt")
    tracker.set_tags({"privacy_statement": words})
