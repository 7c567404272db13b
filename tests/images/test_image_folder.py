"""A user's own folder of images."""

import logging
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from image_checks import entries, image_folder, load, present, refusal
from PIL import Image

from fl_lightning.data import KNOWN_SETS, prepare


def test_image_folder_is_read_in_alphabetical_order(tmp_path, digits):
    data = load("image_folder", image_folder(tmp_path / "own", digits))
    assert data.classes == ("nine", "one", "two")
    assert data.y_train.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert data.y_test.tolist() == [0] * 2 + [1] * 2 + [2] * 2
    expected = torch.cat([digits.x_train[digits.y_train == number][:6] for number in (9, 1, 2)])
    assert torch.equal(data.x_train, expected)
    assert (data.mean, data.std) == ((0.5,), (0.25,)), "fixed, not measured on private images"


def test_image_folder_reads_colour_palette_and_nested_files(tmp_path):
    from sklearn.datasets import load_sample_images

    photo = Image.fromarray(load_sample_images().images[1]).resize((40, 30))
    for part in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / part / name / "deeper").mkdir(parents=True)
            photo.save(tmp_path / part / name / "deeper" / "x.png")
            photo.quantize(16).save(tmp_path / part / name / "deeper" / "y.PNG")
            photo.save(tmp_path / part / name / "z.JPG", quality=90)
            (tmp_path / part / name / ".DS_Store").write_bytes(b"?")
        (tmp_path / part / ".hidden").mkdir()
    data = load("image_folder", tmp_path)
    assert data.x_train.shape == (6, 3, 30, 40)
    rgb = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
    flat = torch.from_numpy(np.array(photo.quantize(16).convert("RGB"))).permute(2, 0, 1)
    order = data.x_train[:3].float()  # z.JPG lies above deeper/: files of a folder come before those of its folders
    assert torch.equal(order[1], rgb.float())
    assert torch.equal(order[2], flat.float())
    assert (order[0] - rgb).abs().mean() < 10


def test_image_folder_notices_every_change(tmp_path, digits, cache):
    root = image_folder(tmp_path / "own", digits)
    first = load("image_folder", root)
    Image.fromarray(255 - first.x_train[0, 0].numpy()).save(root / "train" / "nine" / "000.png")
    os.utime(root / "train" / "nine" / "000.png", ns=(1, 1))
    assert torch.equal(load("image_folder", root).x_train[0], 255 - first.x_train[0])
    (root / "train" / "two" / "005.png").unlink()
    assert len(load("image_folder", root).y_train) == 17
    assert len(entries(cache)) == 1, "the old entry is replaced"


def test_image_folder_can_be_prepared(tmp_path, digits, caplog):
    root = image_folder(tmp_path / "own", digits)
    assert (prepare("image_folder", root) / "manifest.json").is_file()
    with caplog.at_level(logging.INFO):
        load("image_folder", root)
    assert "decoding" not in caplog.text


def test_image_folder_skips_other_files_aloud(tmp_path, digits, caplog):
    root = image_folder(tmp_path / "own", digits)
    (root / "train" / "one" / "notes.txt").write_text("a note")
    with caplog.at_level(logging.WARNING):
        assert len(load("image_folder", root).y_train) == 18
    assert "notes.txt" in caplog.text


def spoil(root, what):
    """Break the folder in one way; returns what the message must name."""
    file = root / "test" / "two" / "001.png"
    if what == "size":
        Image.new("L", (8, 9)).save(file)
        return [file, "9x8", "8x8"]
    if what == "channels":
        Image.new("RGB", (8, 8)).save(file)
        return [file, "3 channels", "1 channel"]
    if what == "alpha":
        Image.new("RGBA", (8, 8)).save(file)
        return [file, "RGBA"]
    if what == "palette alpha":
        Image.new("P", (8, 8)).save(file, transparency=0)
        return [file, "transparent"]
    if what == "sixteen bit":
        Image.fromarray(np.full((8, 8), 1000, np.uint16)).save(file)
        return [file, "I;16"]
    if what == "cut":
        file.write_bytes(file.read_bytes()[:-30])
        return [file, "cannot be decoded"]
    if what == "no image":
        file.write_bytes(b"hello")
        return [file, "cannot be decoded"]
    if what == "class missing":
        shutil.rmtree(root / "test" / "two")
        return ["'two' in train/", "same classes"]
    if what == "class added":
        shutil.copytree(root / "test" / "two", root / "test" / "three")
        return ["'three' in test/", "same classes"]
    if what == "class empty":
        shutil.rmtree(root / "train" / "two")
        (root / "train" / "two").mkdir()
        return [root / "train" / "two", "holds no image"]
    if what == "no test":
        shutil.rmtree(root / "test")
        return [root / "test", "train/ and test/"]
    if what == "no classes":
        shutil.rmtree(root / "train")
        (root / "train").mkdir()
        return [root / "train", "no class folders"]
    for name in ("nine", "two"):
        shutil.rmtree(root / "train" / name)
        shutil.rmtree(root / "test" / name)
    return ["one class only", "'one'"]


@pytest.mark.parametrize(
    "what",
    [
        *("size", "channels", "alpha", "palette alpha", "sixteen bit", "cut", "no image"),
        *("class missing", "class added", "class empty", "no test", "no classes", "one class"),
    ],
)
def test_bad_image_folders_are_refused_in_words(tmp_path, digits, cache, what):
    root = image_folder(tmp_path / "own", digits)
    words = spoil(root, what)
    refusal("image_folder", root, f"data.root={root}", *words)
    assert not cache.exists() or entries(cache) == [], "no part of an entry stays behind"


def test_an_absent_image_folder_is_refused(tmp_path):
    refusal("image_folder", tmp_path / "none", tmp_path / "none", "train/")


@pytest.mark.realdata
def test_cifar10_photographs_are_read_as_an_image_folder(real_root, tmp_path):
    """The first 20 JPEG files of each class of both parts, unpacked from the archive."""
    archive = present(real_root, "cifar10-images.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and int(Path(member.name).stem) < 20:
                tar.extract(member, tmp_path, filter="data")
    data = load("image_folder", tmp_path / "cifar10")
    assert data.classes == KNOWN_SETS["cifar10"].classes
    assert data.x_train.shape == data.x_test.shape == (200, 3, 32, 32)
    assert data.y_train.bincount().tolist() == [20] * 10
    with Image.open(tmp_path / "cifar10" / "train" / "airplane" / "0007.jpg") as image:
        assert torch.equal(data.x_train[7].permute(1, 2, 0), torch.from_numpy(np.array(image)))
