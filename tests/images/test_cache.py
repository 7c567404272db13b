"""H04: the cache and the prefetch command survive crowds, damage and dead networks."""

import logging
import shutil
import socket

import pytest
from image_checks import FILES, check_release, crowd, entries, image_folder, load, present, refusal, tree

from fl_lightning.data import prepare


def test_h04_four_processes_download_and_decode_once(tmp_path, mirror, cache, release):
    from torchvision.datasets import FashionMNIST

    root = tmp_path / "not" / "yet there"
    more = {"mirrors": [mirror.url], "resources": FashionMNIST.resources}
    results = crowd(tmp_path, "fashion_mnist", root, **more)
    assert sorted(mirror.fetched) == sorted(f"/{name}.gz" for name in FILES), "each file is fetched once"
    assert sum(result["decoded"] for result in results) == 1
    assert {result["images"] for result in results} == {300}
    assert len({result["data"] for result in results}) == 1
    assert len(entries(cache)) == 1
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"], "no partial folder"
    check_release(load("fashion_mnist", root), release)


def test_h04_four_processes_decode_a_folder_once(tmp_path, cache, digits):
    root = image_folder(tmp_path / "images", digits)
    results = crowd(tmp_path, "image_folder", root)
    assert sum(result["decoded"] for result in results) == 1
    assert len({result["data"] for result in results}) == 1
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("fault", ["cut", "flip", "delete", "manifest cut", "manifest gone", "other manifest"])
def test_h04_a_damaged_cache_is_found_and_replaced(packed, release, cache, caplog, fault):
    load("fashion_mnist", packed)
    entry = cache / entries(cache)[0]
    sound = tree(entry)
    array, manifest = entry / "x_train.npy", entry / "manifest.json"
    content = array.read_bytes()
    if fault == "cut":
        array.write_bytes(content[:-100])
    elif fault == "flip":
        array.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif fault == "delete":
        array.unlink()
    elif fault == "manifest cut":
        manifest.write_bytes(manifest.read_bytes()[:-100])
    elif fault == "manifest gone":
        manifest.unlink()
    else:
        manifest.write_text("[1, 2]")
    with caplog.at_level(logging.WARNING):
        check_release(load("fashion_mnist", packed), release)
    assert "damaged" in caplog.text
    assert tree(entry) == sound, "the entry is whole again"


def test_h04_what_a_killed_process_left_is_no_obstacle(packed, release, cache):
    load("fashion_mnist", packed)
    name = entries(cache)[0]
    (cache / name).rename(cache / f"{name}.tmp")
    (cache / f"{name}.tmp" / "x_train.npy").write_bytes(b"half")
    check_release(load("fashion_mnist", packed), release)
    assert entries(cache) == [name]


@pytest.mark.parametrize("name", ["fashion_mnist", "mnist", "emnist_digits", "cifar10"])
def test_h04_offline_prepare_leaves_nothing(tmp_path, cache, monkeypatch, name):
    from torchvision import datasets

    closed = "http://127.0.0.1:9/"  # nobody listens on the discard port
    monkeypatch.setattr(datasets.MNIST, "mirrors", [closed])
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [closed])
    monkeypatch.setattr(datasets.EMNIST, "url", closed + "gzip.zip")
    monkeypatch.setattr(datasets.CIFAR10, "url", closed + "cifar-10-python.tar.gz")
    timeout = socket.getdefaulttimeout()
    for root in (tmp_path / "a" / "b c", tmp_path / "there"):
        if root.name == "there":
            root.mkdir()
            (root / "mine.txt").write_text("keep")
        refusal(name, root, f"data.name={name}", root, f"fl-lightning data prepare {name}", "network", call=prepare)
    assert not (tmp_path / "a").exists()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]
    assert entries(cache) == []
    assert socket.getdefaulttimeout() == timeout


def test_h04_a_download_with_wrong_bytes_leaves_nothing(tmp_path, mirror, packed, monkeypatch):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", [mirror.url])
    file = packed / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-100])
    refusal("fashion_mnist", tmp_path / "new", "data.name=fashion_mnist", "could not be downloaded", call=prepare)
    assert not (tmp_path / "new").exists()


def test_prepare_keeps_what_is_there_and_adds_what_is_missing(tmp_path, mirror, packed, release, monkeypatch):
    from torchvision.datasets import FashionMNIST

    monkeypatch.setattr(FashionMNIST, "mirrors", [mirror.url])
    raw = tmp_path / "new" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    kept = raw / f"{FILES[0]}.gz"
    shutil.copy2(packed / "FashionMNIST" / "raw" / kept.name, kept)
    before = kept.stat()
    entry = prepare("fashion_mnist", tmp_path / "new")
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (entry / "manifest.json").is_file()
    check_release(load("fashion_mnist", tmp_path / "new"), release)
    mirror.fetched.clear()
    assert prepare("fashion_mnist", tmp_path / "new") == entry
    assert mirror.fetched == [], "a second prepare needs no network"


def test_a_cache_that_cannot_be_written_is_named(packed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    refusal("fashion_mnist", packed, "FL_CACHE_DIR", tmp_path / "file" / "cache")


@pytest.mark.realdata
def test_h04_four_processes_share_the_real_mnist(real_root, tmp_path, cache):
    present(real_root, "MNIST")
    results = crowd(tmp_path, "mnist", real_root)
    assert sum(result["decoded"] for result in results) == 1
    assert len({result["data"] for result in results}) == 1
    assert {result["images"] for result in results} == {60_000}
    array = cache / entries(cache)[0] / "x_train.npy"
    array.write_bytes(array.read_bytes()[:-100])
    assert len(load("mnist", real_root).x_train) == 60_000
    assert array.stat().st_size == 60_000 * 784 + 128
