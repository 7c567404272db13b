"""A user's own arrays."""

import io

import numpy as np
import pytest
import torch
from image_checks import load, refusal


@pytest.fixture
def own(digits):
    """Twelve and six digits as a user would save them: uint8 [N, H, W], labels int64 0, 1, 2."""
    pick = [
        torch.cat([(y == k).nonzero()[:n, 0] for k in range(3)]) for y, n in ((digits.y_train, 4), (digits.y_test, 2))
    ]
    return {
        "x_train": digits.x_train[pick[0], 0].numpy(),
        "y_train": digits.y_train[pick[0]].numpy(),
        "x_test": digits.x_test[pick[1], 0].numpy(),
        "y_test": digits.y_test[pick[1]].numpy(),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_read_from_a_file_and_from_a_folder(tmp_path, own, save):
    save(tmp_path / "data.npz", **own)
    for root in (tmp_path / "data.npz", tmp_path):
        data = load("npz", root)
        assert torch.equal(data.x_train[:, 0], torch.from_numpy(own["x_train"]))
        assert torch.equal(data.y_test, torch.from_numpy(own["y_test"]))
        assert (data.shape, data.num_classes, data.classes) == ((1, 8, 8), 3, ("0", "1", "2"))
        assert (data.mean, data.std) == ((0.5,), (0.25,))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_pixels_are_rounded_to_255_levels(tmp_path, own, dtype):
    """x / 255 comes back exactly; 0.5 * 255 = 127.5 goes to the even 128, 0.001 to 0.255 -> 0, 0.003 to 0.765 -> 1."""
    exact = {key: (value / 255).astype(dtype) if key[0] == "x" else value for key, value in own.items()}
    np.savez(tmp_path / "data.npz", **exact)
    data = load("npz", tmp_path)
    assert torch.equal(data.x_train[:, 0], torch.from_numpy(own["x_train"]))
    exact["x_train"] = np.zeros((12, 8, 8), dtype)
    exact["x_train"][0, 0, :4] = [0.5, 1.0, 0.001, 0.003]
    np.savez(tmp_path / "data.npz", **exact)
    assert load("npz", tmp_path).x_train[0, 0, 0, :4].tolist() == [128, 255, 0, 1]


def test_channels_first_and_last_are_told_apart(tmp_path, own):
    colour = {
        key: np.stack([value, value // 2, value // 3], axis=1) if key[0] == "x" else value for key, value in own.items()
    }
    last = {key: value.transpose(0, 2, 3, 1) if key[0] == "x" else value for key, value in colour.items()}
    np.savez(tmp_path / "first.npz", **colour)
    np.savez(tmp_path / "last.npz", **last)
    first, second = load("npz", tmp_path / "first.npz"), load("npz", tmp_path / "last.npz")
    assert first.shape == second.shape == (3, 8, 8)
    assert torch.equal(first.x_train, torch.from_numpy(colour["x_train"]))
    assert torch.equal(first.x_train, second.x_train)
    assert second.x_train.is_contiguous()
    assert first.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x_train": lambda x: x.astype(np.float32)}, ["x_train", "255", "[0, 1]", "divide by 255"]),
        ({"x_train": lambda x: -(x / 255)}, ["x_train", "-1", "[0, 1]"]),
        ({"x_test": lambda x: np.where(x > 200, np.nan, 0.0)}, ["x_test", "NaN"]),
        ({"x_test": lambda x: np.where(x > 200, np.inf, 0.0)}, ["x_test", "NaN or infinite"]),
        ({"x_train": lambda x: x.astype(np.int64)}, ["x_train", "int64", "uint8"]),
        ({"x_train": lambda x: x > 100}, ["x_train", "bool"]),
        ({"x_train": lambda x: x.astype(complex)}, ["x_train", "complex"]),
        ({"x_train": lambda x: x.reshape(12, 64)}, ["x_train", "[12, 64]", "[N, H, W]"]),
        ({"x_train": lambda x: x[:0], "y_train": lambda y: y[:0]}, ["x_train", "[0, 8, 8]"]),
        (
            {"x_train": lambda x: np.zeros((12, 3, 32, 3), np.uint8)},
            ["x_train", "[12, 3, 32, 3]", "ambiguous", "either"],
        ),
        ({"x_train": lambda x: np.zeros((12, 8, 8, 8), np.uint8)}, ["x_train", "ambiguous", "neither"]),
        ({"x_test": lambda x: x[:, :7]}, ["x_train", "[1, 8, 8]", "[1, 7, 8]"]),
        ({"x_train": lambda x: x[:-1]}, ["11 images", "12 labels"]),
        ({"y_test": lambda y: y[:-1]}, ["6 images", "5 labels"]),
        ({"y_test": lambda y: y[:0]}, ["y_test", "empty"]),
        ({"y_train": lambda y: y[:, None]}, ["y_train", "[12, 1]", "shape [N]"]),
        ({"y_train": lambda y: np.eye(3)[y]}, ["y_train", "[12, 3]"]),
        ({"y_train": lambda y: y.astype(float)}, ["y_train", "float64", "integers"]),
        ({"y_train": lambda y: y - 1}, ["y_train", "label -1", "0..C-1"]),
        ({"y_train": lambda y: y.astype(np.uint64) + 2**63}, ["y_train", str(2**63), "0..C-1"]),
        ({"y_train": lambda y: y + 1}, ["y_train", "up to 3", "none is 0", "0..2"]),
        ({"y_train": lambda y: y * 2}, ["y_train", "up to 4", "none is 1"]),
        ({"y_train": lambda y: y * 0, "y_test": lambda y: y * 0}, ["one class only"]),
        ({"y_test": lambda y: y + 1}, ["y_test", "label 3", "0..2"]),
        ({"y_test": lambda y: np.array([str(label) for label in y], dtype=object)}, ["plain arrays"]),
    ],
)
def test_bad_arrays_are_refused_in_words(tmp_path, own, changes, words):
    path = tmp_path / "own.npz"
    np.savez(path, **{key: changes.get(key, lambda array: array)(value) for key, value in own.items()})
    refusal("npz", path, path, *words)


def test_unreadable_npz_files_are_refused(tmp_path, own):
    path = tmp_path / "own.npz"
    refusal("npz", path, path, "not there")
    refusal("npz", tmp_path, tmp_path / "data.npz", "not there")
    np.savez(path, x_train=own["x_train"], labels=own["y_train"])
    refusal("npz", path, path, "y_train, x_test, y_test missing", "found x_train, labels")
    np.savez(path, **own)
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    refusal("npz", path, path, "cannot be read")
    path.write_bytes(content[:400] + bytes([content[400] ^ 255]) + content[401:])
    refusal("npz", path, path, "cannot be read")
    path.write_bytes(b"text")
    refusal("npz", path, path, "cannot be read")
    path.write_bytes(b"")
    refusal("npz", path, path, "cannot be read")
    with io.BytesIO() as stream:
        np.save(stream, own["x_train"])
        path.write_bytes(stream.getvalue())
    refusal("npz", path, path, "single array")
