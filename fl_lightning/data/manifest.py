"""What is worth knowing of a partition: how unequal the clients are, as numbers and as a picture.

These figures are read from the raw labels. They describe a simulation and are covered by no epsilon.
K clients, C classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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

    Args:
        counts: int64 [K, C], every row with at least one sample.
        label_counts: int64 [C].
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    whole = label_counts / label_counts.sum()
    entropy = _entropy(shares)
    emd = np.abs(shares - whole).sum(axis=1)
    sizes = np.sort(counts.sum(axis=1)).astype(np.float64)
    ranks = np.arange(1, len(sizes) + 1)
    gini = float(((2 * ranks - len(sizes) - 1) * sizes).sum() / (len(sizes) * sizes.sum()))
    return {
        "label_entropy": entropy.tolist(),
        "emd": emd.tolist(),
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


def save_manifest(partition: Partition, folder: str | Path) -> list[Path]:
    """Write partition.json and partition.png into `folder`, made if absent; returns both paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = manifest(partition)
    text, picture = folder / "partition.json", folder / "partition.png"
    text.write_text(json.dumps(record, separators=(",", ":")), encoding="utf-8")
    _draw(record, picture)
    return [text, picture]


def _entropy(shares: np.ndarray) -> np.ndarray:
    """Of each row, in nats; 0 ln 0 = 0."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.maximum(0.0, -(shares * logs).sum(axis=1))


def _draw(record: dict[str, Any], path: Path) -> None:
    """Client sizes as bars above a map of each client's label mix, one column per client.

    One light-to-dark scale of a single hue carries the value, so the picture reads without colour vision and with any
    number of clients; classes that a client lacks are white, which the scale itself does not reach.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = np.array(record["label_histogram"])
    num_clients, num_classes = counts.shape
    sizes = counts.sum(axis=1)
    shares = np.ma.masked_equal(counts / sizes[:, None], 0.0)
    width = float(np.clip(2.5 + 0.45 * num_clients, 7.0, 12.0))
    height = float(np.clip(2.4 + 0.3 * num_classes, 4.0, 9.0))
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 3), width_ratios=(40, 1))
    mix = figure.add_subplot(grid[1, 0])
    bars = figure.add_subplot(grid[0, 0], sharex=mix)

    scale = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1.0, 256)))
    image = mix.imshow(shares.T, cmap=scale, vmin=0.0, vmax=1.0, aspect="auto", origin="lower", interpolation="nearest")
    for edge in np.arange(num_clients - 1) + 0.5 if num_clients <= 60 else ():
        mix.axvline(edge, color="white", linewidth=1.0)
    if num_clients <= 20 and num_classes <= 20:
        for client, label in np.argwhere(counts > 0):
            shade = "white" if shares[client, label] > 0.5 else "black"
            number = mix.text(
                client, label, str(counts[client, label]), ha="center", va="center", fontsize=7, color=shade
            )
            number.set_in_layout(False)  # it lies inside the axes; measuring a hundred of them takes 0.2 s
    mix.set_xlabel("client")
    mix.set_ylabel("class")
    mix.set_xticks(_ticks(num_clients))
    mix.set_yticks(_ticks(num_classes))
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="share of the client's samples")

    bars.bar(np.arange(num_clients), sizes, width=0.8 if num_clients <= 60 else 1.0, color="#4c566a")
    bars.axhline(sizes.mean(), color="black", linewidth=0.8, linestyle="--")
    bars.set_ylabel("samples\n(dashed: mean)")
    bars.set_ylim(0, sizes.max() * 1.08)
    bars.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    bars.set_xlim(-0.5, num_clients - 0.5)
    bars.tick_params(axis="x", labelbottom=False)
    for side in ("top", "right"):
        bars.spines[side].set_visible(False)

    numbers = record["heterogeneity"]
    settings = ", ".join(f"{key}={value}" for key, value in record["parameters"].items() if key != "path")
    apart = f", held out {record['validation']['num_samples']}" if record["validation"] else ""
    figure.suptitle(
        f"{record['kind']}{f' ({settings})' if settings else ''}: clients {num_clients}, samples {sizes.sum()}{apart}\n"
        f"mean EMD {numbers['mean_emd']:.2f} of 2, mean label entropy {numbers['mean_label_entropy']:.2f} of "
        f"{numbers['global_label_entropy']:.2f} nats, size Gini {numbers['size_gini']:.2f}",
        fontsize=9,
    )
    figure.savefig(path, metadata={"Software": None})


def _ticks(count: int) -> np.ndarray:
    """Whole numbers 0..count-1 at a round step, at most 21 of them."""
    steps = [round_step * 10**power for power in range(10) for round_step in (1, 2, 5)]
    return np.arange(0, count, next(step for step in steps if count <= 21 * step))
