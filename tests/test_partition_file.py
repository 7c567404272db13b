"""A natural split from a file: read as given, or refused in words."""

import hashlib
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.data import make_partition
from fl_lightning.errors import ConfigError


def file(path):
    return SimpleNamespace(kind="file", path=str(path))


def test_a_natural_split_is_read_as_given(tmp_path):
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    lists = [[4, 0], [2], [5, 3]]  # index 1 belongs to nobody
    (tmp_path / "split.json").write_text(json.dumps(lists))
    np.savez(tmp_path / "split.npz", *[np.array(part, dtype=np.uint16) for part in lists])
    partitions = [
        make_partition(labels, 3, file(tmp_path / f"split.{form}"), seed, 2) for form, seed in (("json", 1), ("npz", 2))
    ]
    for partition in partitions:
        assert [indices.tolist() for indices in partition.indices] == [[0, 4], [2], [3, 5]]
        assert partition.counts.tolist() == [[1, 1], [1, 0], [1, 1]]
        assert partition.label_counts.tolist() == [3, 3]
        assert partition.manifest()["num_unused"] == 1
    canonical = struct.pack("<3q", 2, 1, 2) + struct.pack("<5q", 0, 4, 2, 3, 5)
    assert partitions[0].sha256 == partitions[1].sha256 == hashlib.sha256(canonical).hexdigest()


def test_npz_order_is_the_clients_order(tmp_path):
    """Twelve arrays: arr_10 comes after arr_9, not after arr_1."""
    np.savez(tmp_path / "split.npz", *[np.array([11 - client]) for client in range(12)])
    partition = make_partition(torch.zeros(12, dtype=torch.int64), 12, file(tmp_path / "split.npz"), 1, 1)
    assert [indices.item() for indices in partition.indices] == list(range(11, -1, -1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[0, 1], [2, 6]]", ["client 1", "index 6", "0..5"]),
        ("[[0, -1], [2]]", ["client 0", "index -1"]),
        ("[[0, 1], [2, 1]]", ["index 1", "twice", "client 0", "client 1"]),
        ("[[0, 0], [2]]", ["index 0", "twice"]),
        ("[[0, 1.0], [2]]", ["client 0", "1.0", "whole numbers"]),
        ("[[0, true], [2]]", ["client 0", "true", "whole numbers"]),
        ('[["0"], [2]]', ["client 0", "whole numbers"]),
        ("[[0], [18446744073709551616]]", ["client 1", "18446744073709551616"]),
        ("[[0], []]", ["client 1", "at least one"]),
        ("[[0], [1], [2]]", ["3 index lists", "fl.num_clients=2"]),
        ("[0, 1]", ["list of index lists"]),
        ('{"a": [0]}', ["list of index lists"]),
        ("[[0], [1]", ["no readable JSON"]),
        ("", ["no readable JSON"]),
    ],
)
def test_bad_json_is_refused_in_words(tmp_path, content, words):
    path = tmp_path / "split.json"
    path.write_text(content)
    refuse(path, words)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ([np.array([0.0, 1.0]), np.array([2])], ["client 0", "float64"]),
        ([np.array([0.0, np.nan]), np.array([2])], ["client 0", "float64"]),
        ([np.array([[0, 1]]), np.array([2])], ["client 0", "[1, 2]"]),
        ([np.array([0]), np.array([], dtype=int)], ["client 1", "at least one"]),
        ([np.array([0]), np.array([2**64 - 1], dtype=np.uint64)], ["client 1", str(2**64 - 1)]),
        ([np.array([0]), np.array([{}], dtype=object)], ["plain arrays"]),
        ([np.array(3), np.array([2])], ["client 0", "shape []"]),
    ],
)
def test_bad_npz_is_refused_in_words(tmp_path, arrays, words):
    path = tmp_path / "split.npz"
    np.savez(path, *arrays)
    refuse(path, words)


def test_unreadable_split_files_are_refused(tmp_path):
    refuse(tmp_path / "none.json", ["no such file"])
    (tmp_path / "split.txt").write_text("[[0], [1]]")
    refuse(tmp_path / "split.txt", [".json", ".npz"])
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 cut short")
    refuse(tmp_path / "broken.npz", ["no readable .npz"])
    with (tmp_path / "single.npz").open("wb") as stream:
        np.save(stream, np.array([1, 2]))
    refuse(tmp_path / "single.npz", ["single array"])


def refuse(path, words):
    with pytest.raises(ConfigError) as caught:
        make_partition(torch.arange(6) % 2, 2, file(path), 1, 2)
    message = str(caught.value)
    assert all(word in message for word in ["partition.path=", path.name, *words]), message
    assert "\n" not in message
