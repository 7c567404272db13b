"""What is worth knowing of a partition: how unequal the clients are, as numbers and as a picture.

These figures are read from the raw labels. They describe a simulation and are covered by no epsilon.
K clients, C classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.data.manifest_picture import partition_svg

if TYPE_CHECKING:
    from fl_lightning.data.partition import Partition

FORMAT = 1


def heterogeneity(counts: np.ndarray, label_counts: np.ndarray) -> dict[str, Any]:
    """How far the clients' data are from the whole and from each other.

    With p_k the label distribution of client k and p the one of the whole training set:

    - `label_entropy` [K]: -sum_c p_k(c) ln p_k(c), in nats: 0 for a single class, ln C for all classes alike.
    - `emd` [K]: sum_c |p_k(c) - p(c)|, the "EMD" of Zhao et al. 2018 (Federated Learning with Non-IID Data), that is
      twice the total variation: 0 when alike, below 2.
    - `mean_label_entropy`, `mean_emd`: plain means over clients. `global_label_entropy`: of p.
    - `size_gini`: Gini coefficient of the client sizes: 0 when equal, (K-1)/K when one client has everything.

    A client that has held out all it had has neither entropy nor emd (None), and the means are over the others.

    Args:
        counts: int64 [K, C], at least one sample in all.
        label_counts: int64 [C].
    """
    able = counts.sum(axis=1) > 0
    shares = counts[able] / counts[able].sum(axis=1, keepdims=True)
    whole = label_counts / label_counts.sum()
    entropy = _entropy(shares)
    emd = np.abs(shares - whole).sum(axis=1)
    sizes = np.sort(counts.sum(axis=1)).astype(np.float64)
    ranks = np.arange(1, len(sizes) + 1)
    gini = float(((2 * ranks - len(sizes) - 1) * sizes).sum() / (len(sizes) * sizes.sum()))
    return {
        "label_entropy": _placed(entropy, able),
        "emd": _placed(emd, able),
        "mean_label_entropy": float(entropy.mean()),
        "global_label_entropy": float(_entropy(whole[None])[0]),
        "mean_emd": float(emd.mean()),
        "size_gini": gini,
    }


def manifest(partition: Partition) -> dict[str, Any]:
    """The whole partition for JSON: settings, sha256, sizes, label histograms [K][C], heterogeneity, indices.

    All of it is about what is trained on, but for `validation`: `share`, `sha256`, `sizes`, `num_samples` and `indices`
    of what the clients hold out, None where they hold out nothing.
    """
    counts, label_counts = partition.counts.numpy(), partition.label_counts.numpy()
    sizes = counts.sum(axis=1)
    return {
        "format": FORMAT,
        "kind": partition.kind,
        "parameters": {
            key: value if isinstance(value, int | float) else str(value) for key, value in partition.parameters.items()
        },
        "sha256": partition.sha256,
        "num_clients": partition.num_clients,
        "num_classes": len(label_counts),
        "num_samples": int(label_counts.sum()),
        "num_unused": int(label_counts.sum() - sizes.sum()) - len(partition.held_out),
        "scope": "simulation: read from the raw labels, covered by no epsilon",
        "heterogeneity": heterogeneity(counts, label_counts),
        "sizes": sizes.tolist(),
        "label_histogram": counts.tolist(),
        "indices": [indices.tolist() for indices in partition.indices],
        "validation": _validation(partition),
    }


def _validation(partition: Partition) -> dict[str, Any] | None:
    if not partition.held:
        return None
    from fl_lightning.data.partition import index_sha256

    return {
        "share": partition.validation,
        "sha256": index_sha256([part.numpy() for part in partition.held]),
        "num_samples": len(partition.held_out),
        "sizes": [len(part) for part in partition.held],
        "indices": [part.tolist() for part in partition.held],
    }


def manifest_texts(partition: Partition) -> dict[str, str]:
    """The contents of partition.json and partition.svg."""
    record = manifest(partition)
    return {"partition.json": json.dumps(record, separators=(",", ":")), "partition.svg": partition_svg(record)}


def save_manifest(partition: Partition, folder: str | Path) -> list[Path]:
    """Write partition.json and partition.svg into `folder`, made if absent; returns both paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (texts := manifest_texts(partition)).items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _placed(values: np.ndarray, able: np.ndarray) -> list[float | None]:
    """One value for each client that is `able`, None for the others."""
    left = iter(values.tolist())
    return [next(left) if one else None for one in able]


def _entropy(shares: np.ndarray) -> np.ndarray:
    """Of each row, in nats; 0 ln 0 = 0."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.maximum(0.0, -(shares * logs).sum(axis=1))
