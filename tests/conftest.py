"""Shared test settings: one thread, real data where FL_DATA_ROOT points to it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = os.environ.get("FL_DATA_ROOT")
    if root and os.path.isdir(os.path.join(root, "FashionMNIST")):
        return
    reason = "FL_DATA_ROOT does not point to a folder with MNIST and FashionMNIST"
    for item in items:
        if "realdata" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
