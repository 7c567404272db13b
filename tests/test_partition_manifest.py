"""What is told of a partition: numbers by hand, the file and the picture."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fl_lightning.data import load_data, make_partition, save_manifest
from fl_lightning.data.manifest import heterogeneity


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
    from PIL import Image

    data = load_data(SimpleNamespace(name="digits", subset=1.0))
    config = SimpleNamespace(kind="dirichlet", alpha=0.1, min_samples=1)
    partition = make_partition(data.y_train, clients, config, 1, 10)
    text, picture = save_manifest(partition, tmp_path / "new" / "folder")
    assert [text.name, picture.name] == ["partition.json", "partition.png"]
    record = json.loads(text.read_text())
    assert record == partition.manifest()
    assert record["kind"] == "dirichlet"
    assert record["parameters"] == {"alpha": 0.1, "min_samples": 1}
    assert record["sha256"] == partition.sha256
    assert sorted(index for part in record["indices"] for index in part) == list(range(1438))
    assert record["label_histogram"] == partition.counts.tolist()
    assert record["sizes"] == [sum(row) for row in record["label_histogram"]]
    assert len(record["heterogeneity"]["emd"]) == clients
    with Image.open(picture) as image:
        image.load()
        assert min(image.size) > 400
        assert len(image.convert("RGB").getcolors(maxcolors=10**6)) > 20, "the picture is blank"


def test_pictures_use_no_global_plotting_state(tmp_path):
    code = (
        "import sys, torch; from types import SimpleNamespace as S; from fl_lightning.data import *; "
        f"save_manifest(make_partition(torch.arange(9) % 3, 3, S(kind='iid'), 1, 3), {str(tmp_path)!r}); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "partition.png").stat().st_size > 1000
