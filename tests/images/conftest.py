"""Small releases of torchvision's sets, made from scikit-learn's real digits in the published file formats.

torchvision's own tables of md5 sums and mirrors are pointed at them; its code reads, checks and downloads them.
"""

import gzip
import hashlib
import http.server
import os
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_checks import FILES

from fl_lightning.data import load_data


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own; it does not exist yet."""
    folder = tmp_path / "the cache"
    monkeypatch.setenv("FL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def digits():
    return load_data(SimpleNamespace(name="digits", subset=1.0))


@pytest.fixture(scope="module")
def release(digits):
    """300 + 100 digits as 28x28 images (each pixel 3x3, a border of 2): idx bytes by published name, and pixels."""
    large = np.pad(
        np.kron(torch.cat([digits.x_train, digits.x_test])[:400, 0].numpy(), np.ones((3, 3), np.uint8)),
        [(0, 0), (2, 2), (2, 2)],
    )
    labels = torch.cat([digits.y_train, digits.y_test])[:400].numpy()
    files = {}
    for part, where in (("train", slice(0, 300)), ("t10k", slice(300, 400))):
        x, y = large[where], labels[where]
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">4i", 0x803, len(x), 28, 28) + x.tobytes()
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">2i", 0x801, len(y)) + y.astype(np.uint8).tobytes()
    return SimpleNamespace(files=files, x=torch.from_numpy(large)[:, None], y=torch.from_numpy(labels))


@pytest.fixture
def packed(tmp_path, release, monkeypatch):
    """A root with Fashion-MNIST's four .gz files, published with the md5 that torchvision now expects."""
    from torchvision.datasets import FashionMNIST

    root = tmp_path / "data sets"
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in release.files.items():
        (raw / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    table = [(f"{name}.gz", hashlib.md5((raw / f"{name}.gz").read_bytes()).hexdigest()) for name in FILES]
    monkeypatch.setattr(FashionMNIST, "resources", table)
    return root


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("reading a data set opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def mirror(packed):
    """A web server with the small Fashion-MNIST release; `fetched` lists what was downloaded from it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(packed / "FashionMNIST" / "raw"))

        def do_GET(self):
            if self.headers["Method"] != "HEAD":  # torchvision's look for redirects, which it closes at once
                server.fetched.append(self.path)
                time.sleep(0.1)  # so that a second download would overlap
            super().do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.fetched = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def real_root():
    """For tests marked realdata, which are skipped without FL_DATA_ROOT."""
    return Path(os.environ["FL_DATA_ROOT"])
