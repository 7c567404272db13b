"""Partitions: every kind ends, uses no sample twice, keeps its promise exactly or refuses it in words."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fl_lightning.data import load_data, make_partition
from fl_lightning.data.partition import _fill_up, _proportions
from fl_lightning.errors import ConfigError


def dirichlet(alpha=0.5, min_samples=1):
    return SimpleNamespace(kind="dirichlet", alpha=alpha, min_samples=min_samples)


IID = SimpleNamespace(kind="iid")
SHARDS = SimpleNamespace(kind="shards", shards_per_client=2)
SKEW = SimpleNamespace(kind="label_skew", dominant_classes=2, dominant_count=20, other_count=2)


@pytest.fixture(scope="module")
def digits_labels():
    """All 1797 labels of the digits, training and test."""
    data = load_data(SimpleNamespace(name="digits", subset=1.0))
    return torch.cat([data.y_train, data.y_test])


def used(partition):
    return torch.cat(partition.indices)


def check_form(partition, labels):
    """Sorted int64 indices, none twice, no client empty, counts and sizes as the labels say."""
    everything = used(partition)
    assert len(everything.unique()) == len(everything)
    for indices, row in zip(partition.indices, partition.counts, strict=True):
        assert indices.dtype == torch.int64
        assert len(indices) >= 1
        assert (indices.diff() > 0).all()
        assert torch.equal(labels[indices].bincount(minlength=len(row)), row)
    assert torch.equal(partition.sizes, torch.tensor([len(indices) for indices in partition.indices]))


# --- H01 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.1, 0.01])
def test_h01_minimum_is_met_at_once(digits_labels, alpha):
    """1797 samples, K = 50, min 10: a draw-until-it-fits loop met this in 0 of 200 tries."""
    assert len(digits_labels) == 1797
    for seed in range(5):
        start = time.perf_counter()
        partition = make_partition(digits_labels, 50, dirichlet(alpha, 10), seed, 10)
        assert time.perf_counter() - start < 5
        check_form(partition, digits_labels)
        assert partition.sizes.min() >= 10
        assert torch.equal(used(partition).sort().values, torch.arange(1797)), "every sample exactly once"
        again = make_partition(digits_labels, 50, dirichlet(alpha, 10), seed, 10)
        assert again.sha256 == partition.sha256
        assert all(torch.equal(a, b) for a, b in zip(again.indices, partition.indices, strict=True))


def test_h01_impossible_minimum_is_refused_at_once(digits_labels):
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        make_partition(digits_labels, 50, dirichlet(0.1, 40), 1, 10)
    assert time.perf_counter() - start < 1
    assert all(word in str(caught.value) for word in ("partition.min_samples=40", "50", "2000", "1797"))


def test_tightest_possible_minimum_is_met():
    """K * min = n leaves one split of the sizes."""
    labels = torch.arange(1000) % 10
    assert make_partition(labels, 50, dirichlet(0.01, 20), 1, 10).sizes.tolist() == [20] * 50


# --- all kinds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [IID, dirichlet(), SHARDS, SKEW], ids=lambda config: config.kind)
def test_seed_fixes_the_partition(digits_labels, config):
    np.random.seed(1)  # noqa: NPY002 - the global generator must not matter
    first = make_partition(digits_labels, 20, config, 1, 10)
    np.random.seed(2)  # noqa: NPY002
    same = make_partition(digits_labels, 20, config, 1, 10)
    other = make_partition(digits_labels, 20, config, 2, 10)
    check_form(first, digits_labels)
    assert same.sha256 == first.sha256 != other.sha256
    if config is not SKEW:
        assert torch.equal(used(first).sort().values, torch.arange(len(digits_labels)))


@pytest.mark.parametrize("config", [IID, dirichlet(), SHARDS], ids=lambda config: config.kind)
def test_as_many_clients_as_samples_but_not_more(config):
    labels = torch.arange(12) % 3
    if config is not SHARDS:
        assert make_partition(labels, 12, config, 1, 3).sizes.tolist() == [1] * 12
    with pytest.raises(ConfigError, match=r"fl.num_clients=13.* 12 "):
        make_partition(labels, 13, config, 1, 3)
    assert make_partition(labels, 1, config, 1, 3).sizes.tolist() == [12]


def test_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"partition.kind=random.*iid, dirichlet"):
        make_partition(torch.arange(9), 3, SimpleNamespace(kind="random"), 1, 9)


def test_iid_is_equal_and_mixed(digits_labels):
    partition = make_partition(digits_labels, 7, IID, 1, 10)
    assert sorted(partition.sizes.tolist()) == [256] * 2 + [257] * 5  # 7 * 256 + 5 = 1797
    assert partition.manifest()["heterogeneity"]["mean_emd"] < 0.3


# --- dirichlet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6, 0.001, 0.01, 1.0, 1e6, 1e300, 1.7e308])
def test_every_alpha_is_numerically_safe(digits_labels, alpha):
    with np.errstate(all="raise", under="ignore"):
        partition = make_partition(digits_labels, 10, dirichlet(alpha, 1), 1, 10)
    check_form(partition, digits_labels)
    assert len(used(partition)) == 1797
    shares = partition.counts / partition.label_counts
    if alpha <= 0.001:  # a class sits at one client, but for the samples that fill up empty ones
        assert (shares.max(dim=0).values > 0.95).all()
    if alpha >= 1e6:
        assert ((shares - 0.1).abs() < 0.01).all()


@pytest.mark.parametrize("alpha", [0.02, 0.5, 3.0])
def test_proportions_have_the_moments_of_the_dirichlet(alpha):
    """Mean 1/K, variance (1/K)(1 - 1/K)/(K alpha + 1); K = 4, 5,000 draws, tolerance about 5 standard errors."""
    generator = np.random.default_rng(1)
    draws = np.stack([_proportions(alpha, 4, generator) for _ in range(5000)])
    assert np.allclose(draws.sum(axis=1), 1)
    variance = 0.25 * 0.75 / (4 * alpha + 1)
    assert draws.mean(axis=0) == pytest.approx(0.25, abs=5 * math.sqrt(variance / 5000))
    assert draws.var(axis=0) == pytest.approx(variance, rel=0.1)


def test_smaller_alpha_is_more_skewed(digits_labels):
    emd = [
        make_partition(digits_labels, 10, dirichlet(alpha), 1, 10).manifest()["heterogeneity"]["mean_emd"]
        for alpha in (0.05, 0.5, 5, 500)
    ]
    assert emd == sorted(emd, reverse=True)
    assert emd[0] > 1.2
    assert emd[-1] < 0.2


def test_filling_up_moves_one_sample_at_a_time_from_the_largest():
    """By hand: 10, 1, 0 with min 3 -> 9,1,1 -> 8,2,1 -> 7,2,2 -> 6,3,2 -> 5,3,3."""
    dealt = [list(range(10)), [10], []]
    _fill_up(dealt, 3)
    assert dealt == [[0, 1, 2, 3, 4], [10, 8, 6], [9, 7, 5]]


def test_filling_up_spares_those_who_have_enough(digits_labels):
    """The proportions are drawn before any minimum is looked at; only the largest clients give."""
    plain = make_partition(digits_labels, 20, dirichlet(0.1, 1), 1, 10).sizes
    filled = make_partition(digits_labels, 20, dirichlet(0.1, 30), 1, 10).sizes
    givers = filled < plain
    assert filled.min() == 30
    assert filled[plain < 30].tolist() == [30] * int((plain < 30).sum())
    assert plain[givers].min() > plain[~givers & (plain >= 30)].max()


# --- label_skew, shards ----------------------------------------------------------------------------------------------


def skew(dominant_classes, dominant_count, other_count):
    return SimpleNamespace(
        kind="label_skew",
        dominant_classes=dominant_classes,
        dominant_count=dominant_count,
        other_count=other_count,
    )


def test_label_skew_has_exactly_the_given_counts():
    """2 classes of 230 and 8 of 5, 500 per client; each class dominant for 2 * 50 / 10 = 10 clients."""
    labels = torch.arange(25_000) % 10
    for seed in (1, 2):
        partition = make_partition(labels, 50, skew(2, 230, 5), seed, 10)
        check_form(partition, labels)
        assert partition.sizes.tolist() == [500] * 50
        assert ((partition.counts == 230).sum(dim=1) == 2).all()
        assert ((partition.counts == 5).sum(dim=1) == 8).all()
        assert (partition.counts == 230).sum(dim=0).tolist() == [10] * 10
        assert len({tuple(row) for row in (partition.counts == 230).tolist()}) > 5, "pairs vary"


def test_label_skew_uses_the_last_sample_and_refuses_one_less():
    """Each class needs 10 * 230 + 40 * 5 = 2500 samples."""
    enough = torch.arange(25_000) % 10
    assert len(used(make_partition(enough, 50, skew(2, 230, 5), 1, 10))) == 25_000
    with pytest.raises(ConfigError) as caught:
        make_partition(enough[:-1], 50, skew(2, 230, 5), 1, 10)
    assert all(word in str(caught.value) for word in ("class 9", "2499", "2500", "10 clients", "230", "40 x", "5"))


def test_label_skew_gives_odd_turns_to_the_larger_classes():
    """3 clients x 1 dominant class over 2 classes: 2 turns for class 1 (20 samples), 1 for class 0 (12), any seed."""
    labels = torch.tensor([0] * 12 + [1] * 20)
    for seed in range(10):
        partition = make_partition(labels, 3, skew(1, 10, 0), seed, 2)
        assert sorted(partition.counts.tolist()) == [[0, 10], [0, 10], [10, 0]]


@pytest.mark.parametrize("classes", [1, 3, 7, 10])
@pytest.mark.parametrize("clients", [1, 3, 11])
def test_label_skew_turns_never_run_out(classes, clients):
    partition = make_partition(torch.arange(2000) % 10, clients, skew(classes, 7, 1), 3, 10)
    assert ((partition.counts == 7).sum(dim=1) == classes).all()
    turns = (partition.counts == 7).sum(dim=0)
    assert turns.max() - turns.min() <= 1


@pytest.mark.parametrize(
    ("config", "words"),
    [(skew(11, 1, 1), ["dominant_classes=11", "10 classes"]), (skew(2, 0, 0), ["dominant_count=0", "other_count=0"])],
)
def test_label_skew_refusals(config, words):
    with pytest.raises(ConfigError) as caught:
        make_partition(torch.arange(100) % 10, 2, config, 1, 10)
    assert all(word in str(caught.value) for word in words)


def test_shards_hold_one_class_each():
    """200 samples, 10 classes, 10 clients x 2 shards of 10: no shard crosses a class, so no client has more than 2."""
    labels = torch.arange(200) % 10
    partition = make_partition(labels, 10, SHARDS, 1, 10)
    check_form(partition, labels)
    assert partition.sizes.tolist() == [20] * 10
    assert set(partition.counts.unique().tolist()) <= {0, 10, 20}
    assert partition.counts.sum(dim=0).tolist() == [20] * 10


def test_more_shards_than_samples_are_refused():
    config = SimpleNamespace(kind="shards", shards_per_client=5)
    with pytest.raises(ConfigError, match=r"shards_per_client=5: 3 clients x 5 = 15 shards, but there are 14"):
        make_partition(torch.arange(14) % 2, 3, config, 1, 2)
