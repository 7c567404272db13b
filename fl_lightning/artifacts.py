"""What a run leaves beside its metrics: data sets, partition, privacy account, clipping laboratory, final model."""

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.analysis.norms import ClippingLab
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.plugins import OwnModel
from fl_lightning.config.privacy import NoPrivacy
from fl_lightning.final_model import final_model
from fl_lightning.plugins.loading import split
from fl_lightning.privacy import Ledger, statement
from fl_lightning.privacy.audit import AuditResult
from fl_lightning.privacy.readings import PaperReading, reading_series, to_csv, to_markdown
from fl_lightning.records import RunResult, ServerState
from fl_lightning.tracking import RunTracker
from fl_lightning.tracking.inputs import DataInput, content_sha256
from fl_lightning.tracking.model import WEIGHTS_FILE, FinalModel, model_files, weights_file
from fl_lightning.tracking.outbox import File

if TYPE_CHECKING:
    from fl_lightning.build import Prepared

NOT_PRIVATE = "NOT PRIVATE"
"""The badge of a run that guarantees nothing."""

SERIES_POINTS = 3
"""Rounds at which PLD is computed for the run's artifact, the first and the last among them; each may take a second."""

EXAMPLES = 3
"""Test images stored with the final model."""


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
        "validated": bool(prepared.partition.held),
        "cohorts": (prepared.config.fl.cohort_size, getattr(privacy, "noise_cohort_size", None)),
    }


def undeclared_warning(names: Iterable[str]) -> list[str]:
    """What an epsilon does not cover, if a client sent anything that no release declares."""
    sent = ", ".join(sorted(names))
    return [f"NOT PRIVATE: {sent} left the clients undeclared and unprotected; this epsilon does not cover it"] * bool(
        sent
    )


def span(multipliers: Sequence[float]) -> dict[str, float]:
    """The smallest and the largest."""
    return {"min": min(multipliers), "max": max(multipliers)}


def keep_data(prepared: "Prepared", tracker: RunTracker) -> None:
    """Stores how the data were dealt out (indices, hash, histograms, plot) and which data sets the run has.

    What clients hold out of training is a data set by itself, and no part of the one that is trained on.
    """
    from fl_lightning.data.manifest import manifest_texts

    for name, text in manifest_texts(prepared.partition).items():
        tracker.log_text(text, f"partition/{name}")
    data, section = prepared.data, prepared.config.data
    root = getattr(section, "root", None)
    reference = getattr(section, "reference", None)
    clients = {"clients": len(prepared.partition.indices), "partition_sha256": prepared.partition.sha256}
    x, y, held = data.x_train, data.y_train, torch.zeros(len(data.y_train), dtype=torch.bool)
    held[prepared.partition.held_out] = True
    parts = {"training": (x[~held], y[~held]), "validation": (x[held], y[held])} if held.any() else {"training": (x, y)}
    for context, (x, y) in {**parts, "test": (data.x_test, data.y_test)}.items():
        more = {} if context == "test" else clients
        tracker.log_item(
            DataInput(
                name=data.name,
                context=context,
                sha256=content_sha256(x.numpy(), y.numpy()),
                source=str(root or reference or f"fl_lightning data.name={data.name}"),
                folder=root is not None,
                features=("uint8", (-1, *data.shape)),
                targets=("int64", (-1,)),
                profile={"examples": len(y), "shape": data.shape, "classes": data.num_classes, **more},
            )
        )


def keep_model(prepared: "Prepared", server: ServerState, result: RunResult, tracker: RunTracker) -> None:
    """Stores the final model with a few normalised test images as its example; nothing with tracking.log_model=false.

    A user's own model that cannot be stored as a whole leaves its weights alone, and the tag `model_note` says why.
    """
    if not prepared.config.tracking.log_model or tracker.experiment_id is None:
        return
    section, shape, kind = prepared.config.model, prepared.data.shape, str(server.w.dtype).removeprefix("torch.")
    example = prepared.test.batch(torch.arange(min(EXAMPLES, len(prepared.test))))[0].cpu()
    if not len(example):
        example = torch.zeros(1, *shape, dtype=server.w.dtype)
    try:
        model = final_model(prepared, server)
        files = model_files(model, example, split(section.kind)[0].parent if isinstance(section, OwnModel) else None)
    except Exception as error:  # whatever a user's own code may raise: the run and its weights are worth more
        note = f"only the weights are stored, as model/{WEIGHTS_FILE}: {type(error).__name__}: {error}"
        tracker.set_tags({"model_note": note})
        objective = prepared.objective
        state = {**objective.model.state_dict(), **objective.layout.state_dict(server.w, server.buffers)}
        tracker.log_item(File(Path(WEIGHTS_FILE), "model", {WEIGHTS_FILE: weights_file(state)}))
        return
    tracker.log_item(
        FinalModel(
            experiment_id=tracker.experiment_id,
            files=files,
            inputs=(kind, (-1, *shape)),
            outputs=(kind, (-1, prepared.data.num_classes)),
            tags={"weights_sha256": result.final["weights_sha256"], "badge": result.badge},
            step=len(result.rounds),
        )
    )


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


def audited(result: RunResult, found: AuditResult, tracker: RunTracker | None) -> RunResult:
    """The result with its audit, which is kept even where it refutes the run.

    Raises:
        PrivacyError: the run released more than it claims.
    """
    if tracker is not None:
        tracker.log_metrics({"privacy/epsilon_lower": found.epsilon_lower}, step=len(result.rounds))
        tracker.log_text(json.dumps(found.to_dict(), indent=1), "privacy/audit.json")
        tracker.set_tags({"badge": NOT_PRIVATE if found.refuted else result.badge})
    found.check()
    return replace(result, final={**result.final, "privacy": {**result.final["privacy"], "audit": found.to_dict()}})
