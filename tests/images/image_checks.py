"""What the tests of the data sets share: reading, refusals, the small release, and crowds of processes."""

import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from fl_lightning.data import load_data
from fl_lightning.errors import DataError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def load(name, root=None, subset=1.0):
    return load_data(SimpleNamespace(name=name, subset=subset, root=str(root)))


def refusal(name, root, *words, call=load):
    """The message of the DataError: one line that has all the words."""
    with pytest.raises(DataError) as caught:
        call(name, root)
    message = str(caught.value)
    assert all(str(word) in message for word in words), message
    assert "\n" not in message
    return message


def tree(root):
    """Every file below root with its content's hash."""
    return {
        path.relative_to(root): hashlib.md5(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()
    }


def check_release(data, release):
    assert torch.equal(data.x_train, release.x[:300])
    assert torch.equal(data.y_train, release.y[:300])
    assert torch.equal(data.x_test, release.x[300:])
    assert torch.equal(data.y_test, release.y[300:])
    assert data.x_train.is_contiguous()


CROWD = """
import hashlib, json, logging, os, sys, time
from pathlib import Path
from fl_lightning.data.image_folder import read_image_folder
from fl_lightning.data.torchvision_sets import prepare_torchvision_set, read_torchvision_set
task = json.loads(sys.argv[1])
if "mirrors" in task:
    from torchvision.datasets import FashionMNIST
    FashionMNIST.mirrors, FashionMNIST.resources = task["mirrors"], task["resources"]
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
log = logging.getLogger("fl_lightning.data.cache")
log.setLevel(logging.INFO)
log.addHandler(handler)
ready = Path(task["ready"])
(ready / str(os.getpid())).touch()
while len(list(ready.iterdir())) < task["processes"]:
    time.sleep(0.005)
name, root = task["name"], Path(task["root"])
if "mirrors" in task:
    prepare_torchvision_set(name, root)
entry = read_image_folder(root) if name == "image_folder" else read_torchvision_set(name, root)
digest = hashlib.sha256(b"".join(entry.arrays[key].tobytes() for key in sorted(entry.arrays))).hexdigest()
images = len(entry.arrays["y_train"])
print(json.dumps({"decoded": sum("decoding" in line for line in lines), "data": digest, "images": images}))
"""


def crowd(tmp_path, name, root, processes=4, **more):
    """Start the processes, let all go at once, and return what each one found."""
    ready = tmp_path / "ready"
    ready.mkdir()
    task = json.dumps({"name": name, "root": str(root), "ready": str(ready), "processes": processes, **more})
    started = [
        subprocess.Popen([sys.executable, "-c", CROWD, task], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        results = []
        for process in started:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            results.append(json.loads(out))
        return results
    finally:
        for process in started:  # when one failed, the others still wait for it
            process.kill()
            process.wait()


def entries(cache):
    """What the cache holds apart from lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def image_folder(root, digits, classes=("nine", "one", "two"), per_class=(6, 2)):
    """Real digits 9, 1, 2 as PNG files in train/CLASS and test/CLASS."""
    numbers = {"nine": 9, "one": 1, "two": 2, "seven": 7}
    for part, count in zip(("train", "test"), per_class, strict=True):
        x, y = (digits.x_train, digits.y_train) if part == "train" else (digits.x_test, digits.y_test)
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for i, pixels in enumerate(x[y == numbers[name]][:count, 0].numpy()):
                Image.fromarray(pixels).save(folder / f"{i:03}.png")
    return root


def present(root, file):
    if not (root / file).exists():
        pytest.skip(f"{file} is not in FL_DATA_ROOT")
    return root / file
