"""What is told of a partition: numbers by hand, the file and the picture."""

import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.data import load_data, make_partition, save_manifest
from fl_lightning.data.manifest import heterogeneity

SVG = {"svg": "http://www.w3.org/2000/svg"}


def test_heterogeneity_by_hand():
    """p = (3/4, 1/4). Client 0: (1, 0): |1 - 3/4| + |0 - 1/4| = 1/2, entropy 0. Client 1: (2/3, 1/3): 1/6."""
    numbers = heterogeneity(np.array([[1, 0], [2, 1]]), np.array([3, 1]))
    assert numbers["emd"] == pytest.approx([1 / 2, 1 / 6])
    assert numbers["mean_emd"] == pytest.approx(1 / 3)
    thirds = math.log(3) - 2 / 3 * math.log(2)
    assert numbers["label_entropy"] == pytest.approx([0, thirds])
    assert numbers["mean_label_entropy"] == pytest.approx(thirds / 2)
    assert numbers["global_label_entropy"] == pytest.approx(math.log(4) - 0.75 * math.log(3))
    assert numbers["size_gini"] == pytest.approx(0.25)  # (|1-1| + |1-3| + |3-1| + |3-3|) / (2 * 2^2 * 2)


def test_gini_is_the_mean_difference_of_sizes():
    sizes = np.array([5, 1, 9, 9, 40])
    expected = np.abs(sizes[:, None] - sizes).sum() / (2 * len(sizes) ** 2 * sizes.mean())
    assert heterogeneity(sizes[:, None], np.array([64]))["size_gini"] == pytest.approx(expected)


@pytest.mark.parametrize("clients", [1, 3, 200])
def test_manifest_is_written_with_a_picture(tmp_path, clients):
    data = load_data(SimpleNamespace(name="digits", subset=1.0))
    config = SimpleNamespace(kind="dirichlet", alpha=0.1, min_samples=1)
    partition = make_partition(data.y_train, clients, config, 1, 10)
    text, picture = save_manifest(partition, tmp_path / "new" / "folder")
    assert [text.name, picture.name] == ["partition.json", "partition.svg"]
    record = json.loads(text.read_text())
    assert record == partition.manifest()
    assert record["kind"] == "dirichlet"
    assert record["parameters"] == {"alpha": 0.1, "min_samples": 1}
    assert record["sha256"] == partition.sha256
    assert sorted(index for part in record["indices"] for index in part) == list(range(1438))
    assert record["label_histogram"] == partition.counts.tolist()
    assert record["sizes"] == [sum(row) for row in record["label_histogram"]]
    assert len(record["heterogeneity"]["emd"]) == clients
    root = ElementTree.parse(picture).getroot()
    (cells,) = root.findall("svg:g", SVG)
    squares = sum(path.attrib["d"].count("h1v1h-1z") for path in cells.findall("svg:path", SVG))
    assert squares == int((partition.counts > 0).sum()), "a square for each class that a client has"
    said = [text.text for text in root.findall("svg:text", SVG)]
    assert f"dirichlet (alpha=0.1, min_samples=1): {clients} clients, 1438 samples" in said
    assert {"client", "class", "samples (dashed: mean)"} <= set(said)
    if clients <= 20:
        assert sum(text in {str(n) for n in partition.counts.flatten().tolist() if n} for text in said) >= squares


def test_the_picture_needs_no_plotting_library(tmp_path):
    """A run draws it at its start; matplotlib would take longer than a small federation."""
    code = (
        "import sys, torch; from types import SimpleNamespace as S; from fl_lightning.data import *; "
        f"save_manifest(make_partition(torch.arange(9) % 3, 3, S(kind='iid'), 1, 3), {str(tmp_path)!r}); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "partition.svg").stat().st_size > 1000
