"""MNIST, Fashion-MNIST, EMNIST digits and CIFAR-10: every form in which their files may lie, and damage."""

import hashlib
import json
import pickle
import shutil
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_checks import check_release, load, present, refusal, tree

from fl_lightning.data import KNOWN_SETS


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_unpacked_files_are_read(tmp_path, release, no_network, name, folder):
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    for file, content in release.files.items():
        (raw / file).write_bytes(content)
    before = tree(tmp_path)
    data = load(name, tmp_path)
    check_release(data, release)
    assert before.items() <= tree(tmp_path).items()
    assert (data.mean, data.std, data.classes) == (
        KNOWN_SETS[name].mean,
        KNOWN_SETS[name].std,
        KNOWN_SETS[name].classes,
    )


def test_emnist_digits_are_turned_upright(tmp_path, release, no_network):
    """EMNIST stores images transposed: a file with transposed images gives upright ones."""
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for file, content in release.files.items():
        if "images" in file:
            images = np.frombuffer(content, np.uint8, offset=16).reshape(-1, 28, 28)
            content = content[:16] + images.transpose(0, 2, 1).tobytes()
        (raw / f"emnist-digits-{file.replace('t10k', 'test')}").write_bytes(content)
    check_release(load("emnist_digits", tmp_path), release)


def test_archives_are_unpacked_in_the_cache_only(packed, release, no_network, cache, monkeypatch):
    before = tree(packed)
    check_release(load("fashion_mnist", packed), release)
    assert tree(packed) == before, "the user's folder is left as it was"
    entry = next(path for path in cache.iterdir() if path.is_dir())
    assert sorted(path.name for path in entry.iterdir()) == [
        "manifest.json",
        "x_test.npy",
        "x_train.npy",
        "y_test.npy",
        "y_train.npy",
    ]
    stored = np.load(entry / "x_train.npy")
    assert stored.dtype == np.uint8
    manifest = json.loads((entry / "manifest.json").read_text())
    assert manifest["arrays"]["x_train"]["sha256"] == hashlib.sha256((entry / "x_train.npy").read_bytes()).hexdigest()


def test_a_relative_root_gives_the_same_entry(packed, cache, monkeypatch):
    load("fashion_mnist", packed)
    monkeypatch.chdir(packed)
    load("fashion_mnist", ".")
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_damaged_archive_is_named(packed, cache):
    file = packed / "FashionMNIST" / "raw" / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-100])
    refusal("fashion_mnist", packed, "data.name=fashion_mnist", file, "md5", "fl-lightning data prepare fashion_mnist")
    assert not [path for path in cache.iterdir() if path.is_dir()], "no part of an entry stays behind"


def test_damaged_unpacked_files_are_refused(tmp_path, release):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file, content in release.files.items():
        (raw / file).write_bytes(content[:-100] if file == "t10k-images-idx3-ubyte" else content)
    refusal("mnist", tmp_path, "data.name=mnist", raw, "damaged", "fl-lightning data prepare mnist")
    (raw / "t10k-images-idx3-ubyte").write_bytes(release.files["t10k-images-idx3-ubyte"])
    (raw / "t10k-labels-idx1-ubyte").write_bytes(release.files["train-labels-idx1-ubyte"])
    refusal("mnist", tmp_path, "damaged", "labels [300]")


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A root with CIFAR-10's batches, 20 real photo patches each, whose md5 torchvision now expects; and the pixels."""
    from sklearn.datasets import load_sample_images
    from torchvision.datasets import CIFAR10

    photo = load_sample_images().images[0]  # [427, 640, 3]
    patches = [photo[r : r + 32, c : c + 32] for r in range(0, 384, 32) for c in range(0, 320, 32)]
    x = np.stack(patches).transpose(0, 3, 1, 2)  # [120, 3, 32, 32]
    root = tmp_path / "cifar"
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)

    def publish(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    batches = []
    for i in range(6):
        name = f"data_batch_{i + 1}" if i < 5 else "test_batch"
        content = {"data": x[20 * i : 20 * i + 20].reshape(20, 3072), "labels": [j % 10 for j in range(20)]}
        batches.append([name, publish(name, content)])
    monkeypatch.setattr(CIFAR10, "train_list", batches[:5])
    monkeypatch.setattr(CIFAR10, "test_list", batches[5:])
    md5 = publish("batches.meta", {"label_names": list(KNOWN_SETS["cifar10"].classes)})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5})
    return SimpleNamespace(root=root, x=torch.from_numpy(np.ascontiguousarray(x)))


def test_cifar10_is_read_from_batches_and_from_the_archive(cifar, tmp_path, no_network, monkeypatch):
    from torchvision.datasets import CIFAR10

    archive = tmp_path / "packed" / CIFAR10.filename
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar.root / "cifar-10-batches-py", "cifar-10-batches-py")
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    for root in (cifar.root, archive.parent):
        before = tree(root)
        data = load("cifar10", root)
        assert torch.equal(data.x_train, cifar.x[:100])
        assert torch.equal(data.x_test, cifar.x[100:])
        assert data.y_train[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert data.shape == (3, 32, 32)
        assert len(data.mean) == len(data.std) == 3
        assert tree(root) == before


def test_a_changed_cifar_batch_is_refused(cifar):
    batch = cifar.root / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes()[:-1] + b"!")
    refusal("cifar10", cifar.root, "data.name=cifar10", "damaged", "fl-lightning data prepare cifar10")


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist_digits", "cifar10"])
def test_missing_files_name_the_set_the_folder_and_the_command(tmp_path, name, no_network, cache):
    for root in (tmp_path / "no where", tmp_path / "empty"):
        if root.name == "empty":
            root.mkdir()
        refusal(name, root, f"data.name={name}", root, f"fl-lightning data prepare {name}", "FL_DATA_ROOT")
    assert not (tmp_path / "no where").exists()
    assert not any((tmp_path / "empty").iterdir())


def test_a_cached_copy_does_not_hide_a_wrong_root(packed):
    load("fashion_mnist", packed)
    shutil.rmtree(packed / "FashionMNIST")
    refusal("fashion_mnist", packed, packed, "fl-lightning data prepare fashion_mnist")


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "folder", "train_counts", "first_labels"),
    [
        (
            "mnist",
            "MNIST",
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [5, 0, 4, 1, 9, 2, 1, 3, 1, 4],
        ),
        ("fashion_mnist", "FashionMNIST", [6000] * 10, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_real_grey_sets(real_root, tmp_path, cache, no_network, name, folder, train_counts, first_labels):
    present(real_root, folder)
    before = {path: path.stat().st_mtime_ns for path in (real_root / folder).rglob("*")}
    data = load(name, real_root)
    assert {path: path.stat().st_mtime_ns for path in (real_root / folder).rglob("*")} == before
    assert data.x_train.shape == (60_000, 1, 28, 28)
    assert data.x_test.shape == (10_000, 1, 28, 28)
    assert data.y_train.bincount().tolist() == train_counts
    assert data.y_train[:10].tolist() == first_labels
    pixels = data.x_train.double() / 255
    assert pixels.mean().item() == pytest.approx(data.mean[0], abs=1e-4)
    assert pixels.std().item() == pytest.approx(data.std[0], abs=1e-4)
    assert load(name, real_root, subset=0.1).y_train.bincount().sum() == 6000
