"""Shared test settings: one thread, real data where FL_DATA_ROOT points to it."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import pytest
import torch

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Started in the background of a shell: the processes that the tests interrupt would ignore Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = os.environ.get("FL_DATA_ROOT")
    if root and os.path.isdir(os.path.join(root, "FashionMNIST")):
        return
    reason = "FL_DATA_ROOT does not point to a folder with MNIST and FashionMNIST"
    for item in items:
        if "realdata" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
