"""The default data set, and stratified shares of a training set."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_checks import refusal

from fl_lightning.data import load_data, prepare
from fl_lightning.data.datasets import stratified_share
from fl_lightning.errors import DataError


def test_digits_are_scikit_learns_split_in_five(digits):
    from sklearn.datasets import load_digits

    bunch = load_digits()
    assert digits.x_train.shape == (1438, 1, 8, 8)
    assert digits.x_test.shape == (359, 1, 8, 8)
    assert digits.x_train.dtype == torch.uint8
    assert digits.y_train.dtype == torch.int64
    x = torch.cat([digits.x_train, digits.x_test]).flatten(1).numpy()
    y = torch.cat([digits.y_train, digits.y_test]).numpy()
    expected = sorted(
        (*np.rint(image.ravel() * 255 / 16).astype(int), label)
        for image, label in zip(bunch.images, bunch.target, strict=True)
    )
    assert sorted((*row, label) for row, label in zip(x.astype(int), y, strict=True)) == expected
    assert x.max() == 255
    for label in range(10):
        assert abs((digits.y_test == label).sum().item() - 0.2 * (y == label).sum()) < 1
    assert (digits.shape, digits.num_classes, digits.classes) == ((1, 8, 8), 10, tuple("0123456789"))


def test_digits_constants_are_those_of_the_images(digits):
    pixels = digits.x_train / 255
    assert pixels.mean().item() == pytest.approx(digits.mean[0], abs=1e-3)
    assert pixels.std().item() == pytest.approx(digits.std[0], abs=1e-3)


def test_subset_is_a_stratified_share_of_the_training_set(digits):
    share = load_data(SimpleNamespace(name="digits", subset=0.1))
    assert len(share.y_train) == 144  # round(143.8)
    assert torch.equal(share.x_test, digits.x_test)
    for label in range(10):
        assert abs((share.y_train == label).sum().item() - 0.1 * (digits.y_train == label).sum().item()) < 1
    whole = [row.tobytes() for row in digits.x_train.numpy()]
    places = [whole.index(row.tobytes()) for row in share.x_train.numpy()]
    assert places == sorted(places), "the images keep their order"
    assert torch.equal(share.y_train, digits.y_train[places])
    assert len(set(places)) == 144
    larger = {row.tobytes() for row in load_data(SimpleNamespace(name="digits", subset=0.5)).x_train.numpy()}
    assert all(row.tobytes() in larger for row in share.x_train.numpy()), "shares are nested"


def test_shares_by_hand():
    """0.25 of 10, 5, 1: quotas 2.5, 1.25, 0.25, round(4) = 4 samples: 2, 1, 0, the odd one to 2.5; and one for 0.25."""
    labels = np.array([0] * 10 + [1] * 5 + [2])
    kept = labels[stratified_share(labels, 0.25, np.random.default_rng(1))]
    assert np.bincount(kept).tolist() == [3, 1, 1]
    assert np.array_equal(stratified_share(labels, 1.0, np.random.default_rng(1)), np.arange(16))
    assert np.bincount(labels[stratified_share(labels, 1e-9, np.random.default_rng(1))]).tolist() == [1, 1, 1]
    assert stratified_share(np.array([0, 0, 2, 2]), 0.5, np.random.default_rng(1)).size == 2, "a class that is absent"


@pytest.mark.parametrize("subset", [0.0, -0.1, 1.5, float("nan")])
def test_shares_outside_0_1_are_refused(subset):
    with pytest.raises(DataError, match=r"data.subset=.*\(0, 1\]"):
        load_data(SimpleNamespace(name="digits", subset=subset))


def test_unknown_names_are_refused():
    refusal("imagenet", ".", "data.name=imagenet", "digits, mnist")
    refusal("imagenet", ".", "data.name=imagenet", "mnist", call=prepare)
    refusal("digits", ".", "scikit-learn", call=prepare)
    refusal("npz", ".", "read in place", call=prepare)
