"""Privacy loss distributions: golden numbers, the exact Gaussian, Opacus' PRV, every relation, and what is refused."""

import math
from dataclasses import replace

import pytest
from golden_cases import assert_close, cases

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import Ledger, compose, epsilon, gaussian_epsilon_exact
from fl_lightning.privacy.pld import loss_interval, pld_epsilon, prv_epsilon, sampled_kinds
from fl_lightning.records import Release

CASES = [case for case in cases("privacy.json", "accountant") if "sample_rate" in case["inputs"]]
REACH = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}


def gaussian(z: float, count: int = 1, rate: float = 1.0, adjacency: str = "add_remove") -> Release:
    """`z` is noise over the clip bound."""
    sampling = "full" if rate == 1 else "poisson"
    return Release("gaussian", "sample", REACH[adjacency], z, count, sampling, rate, adjacency)


def laplace(e0: float, count: int = 1, adjacency: str = "add_remove") -> Release:
    return Release("laplace", "sample", e0, 1.0, count, adjacency=adjacency)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case: dict) -> None:
    given, expected = case["inputs"], case["expected"]
    run = [gaussian(given["noise_multiplier"], given["steps"], given["sample_rate"])]
    ours = pld_epsilon(run, given["delta"])
    assert_close(ours, expected["dp_accounting_pld"], {"rel": 2e-4})
    assert ours < expected["dp_accounting_rdp_default_orders"]


@pytest.mark.parametrize("adjacency", list(REACH))
@pytest.mark.parametrize(("z", "count"), [(1.0, 1), (8.0, 200), (140.0, 200), (1000.0, 3), (0.3, 40), (0.02, 100)])
def test_never_below_the_exact_gaussian_and_close_to_it(z: float, count: int, adjacency: str) -> None:
    exact = gaussian_epsilon_exact(z / REACH[adjacency], count, 1e-5)
    assert exact * (1 - 1e-9) <= pld_epsilon([gaussian(z, count, adjacency=adjacency)], 1e-5) <= exact * 1.001


def test_libraries_state_the_multiplier_under_replace_one_differently() -> None:
    """dp-accounting's PLD doubles the sensitivity by itself: it must be given twice our multiplier, noise / 2C."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    release = gaussian(8.0, 100, adjacency="replace_one")
    assert release.noise_multiplier == 4.0
    found = {}
    for multiplier in (4.0, 8.0):
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 100)
        found[multiplier] = accountant.get_epsilon(1e-5)
    ours = pld_epsilon([release], 1e-5)
    assert ours == pytest.approx(found[8.0], rel=1e-5)
    assert found[4.0] > 2 * ours  # counted at four times the clip bound


def test_mixed_run_agrees_with_dp_accounting() -> None:
    """Two noise levels, sampled ones, scalars: merged and coarser here, one event after another there."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    run = [gaussian(0.9, 60, 0.02), gaussian(1.4, 30, 0.1), gaussian(6.0, 9), gaussian(11.0, 4), laplace(0.05, 90)]
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    for release in run:
        if release.mechanism == "laplace":
            event = dp_accounting.LaplaceDpEvent(release.noise_multiplier)
        else:
            event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
            if release.sampling == "poisson":
                event = dp_accounting.PoissonSampledDpEvent(release.rate, event)
        accountant.compose(event, release.count)
    ours = pld_epsilon(run, 1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-4)
    assert ours == pld_epsilon([replace(release, adjacency="zero_out") for release in run], 1e-5)
    assert ours <= pld_epsilon(run, 1e-5, interval=10 * loss_interval(run, 1e-5)) <= ours * 1.01
    assert 0.7 * epsilon(compose(run), 1e-5) < ours < epsilon(compose(run), 1e-5)


@pytest.mark.parametrize(
    ("z", "count", "rate"), [(1.1, 1000, 0.01), (0.6, 145, 0.0356), (3.0, 400, 0.1), (9.0, 100, 1)]
)
def test_agrees_with_prv(z: float, count: int, rate: float) -> None:
    """PRV's result is an upper bound within `error`; the two libraries share no code for these distributions."""
    run = [gaussian(z, count, rate)]
    assert 0 <= prv_epsilon(run, 1e-5, error=0.005) - pld_epsilon(run, 1e-5) <= 0.02


def test_ledger_counts_are_what_the_releases_were() -> None:
    for adjacency, rate in (("zero_out", 0.1), ("add_remove", 0.1), ("replace_one", 1.0)):
        run = [gaussian(2.0, 20, rate, adjacency), laplace(0.02, 40, adjacency)]
        ledger = Ledger(unit="sample", delta=1e-5, adjacency=adjacency)
        ledger.record(1, 0, run)
        ledger.record(2, 0, run)
        twice = [replace(release, count=2 * release.count) for release in run]
        assert pld_epsilon(ledger.counts_of(0), 1e-5, adjacency) == pytest.approx(pld_epsilon(twice, 1e-5), rel=1e-9)
        assert sampled_kinds(ledger.counts_of(0)) == int(rate < 1)


def test_equal_releases_under_different_names_add() -> None:
    """Two scalars or two sampled vectors of one noise are segments of their own, and both are counted."""
    for kind in (laplace(0.05, 40), gaussian(0.9, 30, 0.05)):
        apart = [replace(kind, covers=("a",)), replace(kind, covers=("b",))]
        ledger = Ledger(unit="sample", delta=1e-5, adjacency="add_remove")
        ledger.record(1, 0, apart)
        whole = pld_epsilon([replace(kind, count=2 * kind.count)], 1e-5)
        assert pld_epsilon(apart, 1e-5) == pld_epsilon(ledger.counts_of(0), 1e-5) == whole


def test_ends() -> None:
    for count in (pld_epsilon, prv_epsilon):
        assert count([], 1e-5) == count({}, 1e-5) == 0.0
        assert count([gaussian(0.0, count=0)], 1e-5) == 0.0
        assert count([gaussian(0.0), gaussian(3.0, 2, 0.1)], 1e-5) == math.inf
        assert count([gaussian(0.0, 1, 0.1)], 1e-5) == math.inf
        with pytest.raises(PrivacyError, match=r"privacy\.delta"):
            count([gaussian(1.0)], 0.0)
        batch_above_n = Release("gaussian", "sample", 1.0, 2.0, 5, "poisson", 1.6)
        assert count([batch_above_n], 1e-5) == count([gaussian(2.0, 5)], 1e-5)
    assert pld_epsilon([laplace(0.5)], 1e-9) == pytest.approx(0.5, rel=1e-3)  # pure epsilon, at any delta
    assert pld_epsilon([gaussian(1e6)], 1e-5) == 0.0


def test_pairs_without_a_distribution_are_refused_by_name() -> None:
    drawn = replace(gaussian(2.0, 1, 0.1, "zero_out"), sampling="without_replacement", adjacency="replace_one")
    ledger = Ledger(unit="sample", delta=1e-5, adjacency="replace_one")
    ledger.record(1, 0, [drawn])
    for count, name in ((pld_epsilon, "PLD"), (prv_epsilon, "PRV")):
        words = (
            f"sampling=without_replacement and adjacency=replace_one has no {name} accountant: use the accountant rdp"
        )
        with pytest.raises(PrivacyError, match=words):
            count([drawn], 1e-5)
        with pytest.raises(PrivacyError, match=words):
            count(ledger.counts_of(0), 1e-5, "replace_one")
        with pytest.raises(PrivacyError, match="sampling=poisson with adjacency=replace_one has no proof"):
            count([gaussian(1.0, 1, 0.1, "replace_one")], 1e-5)
        with pytest.raises(PrivacyError, match="neighbouring relations do not add"):
            count([gaussian(1.0), gaussian(1.0, adjacency="zero_out")], 1e-5)
        with pytest.raises(PrivacyError, match="adjacency=add_remove cannot be counted under zero_out"):
            count([gaussian(1.0)], 1e-5, "zero_out")
        with pytest.raises(PrivacyError, match="adjacency='swap' is not known"):
            count([gaussian(1.0)], 1e-5, "swap")
    poisson = Ledger(unit="sample", delta=1e-5, adjacency="add_remove")
    poisson.record(1, 0, [gaussian(1.0, 1, 0.1)])
    with pytest.raises(PrivacyError, match="sampling=poisson and adjacency=replace_one has no PLD"):
        pld_epsilon(poisson.counts_of(0), 1e-5, "replace_one")
    with pytest.raises(PrivacyError, match="mechanism=laplace has no PRV accountant"):
        prv_epsilon([laplace(0.1)], 1e-5)
    with pytest.raises(PrivacyError, match="PRV accountant cannot count"):
        prv_epsilon([gaussian(0.1, 100)], 1e-5)
