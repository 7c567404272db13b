"""The data sets of a run, as MLflow knows them: name, digest, where they come from, what they look like."""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fl_lightning.tracking.outbox import Item

if TYPE_CHECKING:
    from mlflow import MlflowClient

DIGEST_LENGTH = 32
"""Characters of the SHA-256 that are the digest; MLflow takes 36 at most. The profile has all of it."""

PAUSES = (0.02, 0.05, 0.1, 0.2)
"""Seconds between attempts where several runs store the same data set at once."""


@dataclass(frozen=True)
class DataInput(Item):
    """One data set and what it was used for. MLflow keeps one of equal name and digest, however often it is sent.

    Attributes:
        name: of the data set.
        context: "training", "test" or "validation".
        sha256: of the content.
        source: a folder, or a text that names a package or a function.
        folder: whether `source` is a folder.
        features: element type and shape [-1, ...] of the examples.
        targets: likewise of the labels.
        profile: small facts: numbers of examples and classes.
    """

    name: str
    context: str
    sha256: str
    source: str
    folder: bool
    features: tuple[str, tuple[int, ...]]
    targets: tuple[str, tuple[int, ...]]
    profile: Mapping[str, Any]

    def send(self, client: "MlflowClient", run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        origin = {"uri": self.source} if self.folder else {"tags": {"mlflow.source.name": self.source}}
        tensors = {"features": _tensor(*self.features), "targets": _tensor(*self.targets)}
        dataset = Dataset(
            name=self.name,
            digest=self.sha256[:DIGEST_LENGTH],
            source_type="local" if self.folder else "code",
            source=json.dumps(origin),
            schema=json.dumps({"mlflow_tensorspec": tensors}),
            profile=json.dumps({**self.profile, "sha256": self.sha256}),
        )
        given = [DatasetInput(dataset, [InputTag("mlflow.data.context", self.context)])]
        for pause in PAUSES:
            try:
                return client.log_inputs(run_id, given)
            except Exception as error:  # MLflow passes a database's own errors on
                if not any(word in str(error).lower() for word in ("unique", "duplicate")):
                    raise
                time.sleep(pause)  # another run has just stored the same data set: it will be found next time
        client.log_inputs(run_id, given)

    def halves(self) -> tuple[Item, ...]:
        return ()

    def record(self) -> dict[str, Any]:
        return {"dataset": self.name, "context": self.context, "sha256": self.sha256, "profile": dict(self.profile)}


def content_sha256(*parts: Any) -> str:
    """SHA-256 over types, shapes and bytes of NumPy arrays, in order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.data if part.flags.c_contiguous else part.tobytes())
    return digest.hexdigest()


def _tensor(kind: str, shape: tuple[int, ...]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": kind, "shape": list(shape)}}])
