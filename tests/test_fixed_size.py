"""Fixed-size batches without replacement: golden numbers, exact arithmetic, dp-accounting, the ends of the range."""

import logging
import math
import time
from decimal import Decimal, localcontext

import numpy as np
import pytest
from golden_cases import assert_close, cases

from fl_lightning.privacy import ORDERS, calibrate_noise, compose, epsilon, rdp
from fl_lightning.privacy.accountants import curve
from fl_lightning.privacy.sampled_gaussian import fixed_size_gaussian_rdp
from fl_lightning.records import Release

LOW_ORDERS = tuple(order for order in ORDERS if order <= 64)


def drawn(z: float, rate: float, count: int = 1) -> Release:
    """`z` is noise over the clip bound; a replaced unit moves the sum by twice the bound."""
    return Release(
        "gaussian", "sample", 2.0, z, count, sampling="without_replacement", rate=rate, adjacency="replace_one"
    )


def dp_accounting_curve(rate: float, z: float, orders: tuple[float, ...]) -> np.ndarray:
    """Their curve, or the unsampled one where that is smaller; `z` is noise over sensitivity."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1, rate, dp_accounting.GaussianDpEvent(z)))
    return np.minimum(accountant.rdp, np.array(orders) / (2 * z * z))


def exact_curve(rate: float, z: float, order: int) -> float:
    """Theorem 27 at a whole order by its forward differences, written out in 700 digits."""
    with localcontext() as context:
        context.prec = 700
        q, per_pair = Decimal(rate), 1 / (2 * Decimal(z) ** 2)
        moment = [(k * (k - 1) * per_pair).exp() for k in range(order + 2)]  # E[L^k]
        b = [sum((-1) ** (j - k) * math.comb(j, k) * moment[k] for k in range(j + 1)) for j in range(order + 2)]
        total = Decimal(1)
        for j in range(2, order + 1):
            near = 4 * (b[j // 2 * 2] * b[(j + 1) // 2 * 2]).sqrt()
            total += math.comb(order, j) * q**j * min(near, 2 * moment[j])
        return float(min(total.ln() / (order - 1), order * per_pair))


WOR = [case for case in cases("privacy.json", "accountant") if case["id"].startswith("accountant_wor/")]


@pytest.mark.parametrize("case", WOR, ids=lambda case: case["id"])
def test_golden(case: dict) -> None:
    """DP-FedSAM's cohorts counted as they are drawn: noise 0.95 C is a multiplier of 0.475 under replace-one."""
    given = case["inputs"]
    run = drawn(2 * given["noise_multiplier_wrt_2C"], given["m"] / given["N"], given["T"])
    ours = epsilon(compose([run]), given["delta"])
    assert_close(ours, case["expected"], case["tol"])
    assert ours <= case["expected"] * (1 + 1e-9)


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0, 12.0, 29.0, 31.0, 500.0, 1e6])
@pytest.mark.parametrize("rate", [0.01, 0.4])
def test_agrees_with_exact_arithmetic(z: float, rate: float) -> None:
    for order in (2, 3, 7, 24, 70):
        assert_close(fixed_size_gaussian_rdp(rate, z, (float(order),))[0], exact_curve(rate, z, order), {"rel": 1e-10})


@pytest.mark.parametrize("z", [0.05, 0.475, 0.95, 2.0, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.1])
def test_agrees_with_dp_accounting(z: float, rate: float) -> None:
    """Fractional orders too. From z = 4 on their differences begin to lose digits, first at the high orders."""
    orders = LOW_ORDERS if z < 4 else tuple(order for order in LOW_ORDERS if order <= 32)
    assert np.allclose(fixed_size_gaussian_rdp(rate, z, orders), dp_accounting_curve(rate, z, orders), rtol=1e-9)


@pytest.mark.parametrize(("z", "rate"), [(0.5, 0.1), (10.0, 0.3), (100.0, 0.02), (1000.0, 0.3)])
def test_never_above_dp_accounting(z: float, rate: float) -> None:
    orders = (*LOW_ORDERS, 128.0, 256.0, 512.0)
    ours, theirs = fixed_size_gaussian_rdp(rate, z, orders), dp_accounting_curve(rate, z, orders)
    assert (ours <= theirs * (1 + 1e-8)).all()


@pytest.mark.parametrize("z", [1e-3, 0.02, 0.7, 3.0, 50.0, 1e5, 1e300])
@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.6, 1 - 1e-9])
def test_curve_has_the_shape_of_renyi_divergence(z: float, rate: float) -> None:
    """R rises with the order and lies between 0 and the unsampled curve, which it reaches at a rate of one."""
    found, unsampled = rdp(drawn(z, rate)), rdp(drawn(z, 1.0))
    assert np.isfinite(found).all() and (found >= 0).all()
    assert (np.diff(found) >= -1e-11 * found[1:]).all()
    assert (found <= unsampled).all()
    assert (found <= rdp(drawn(z, min(1.0, rate * 1.5))) * (1 + 1e-12)).all()


def test_rate_of_one_and_more_is_all_units() -> None:
    unsampled = Release("gaussian", "sample", 2.0, 1.1, adjacency="replace_one")
    for rate in (1.0, 1.6):
        assert np.array_equal(rdp(drawn(1.1, rate)), rdp(unsampled))
    assert np.isinf(rdp(drawn(0.0, 0.1))).all()


def test_a_secret_batch_costs_less_than_all_units_and_calibration_is_quick() -> None:
    curve.cache_clear()
    began = time.process_time()
    rate, steps = 64 / 1797, 145
    z = calibrate_noise(lambda z: [drawn(z, rate, steps)], 3.0, 1e-4)
    assert time.process_time() - began < 5
    assert 2.85 <= epsilon(compose([drawn(z, rate, steps)]), 1e-4) <= 3.0
    assert z < 0.3 * calibrate_noise(lambda z: [drawn(z, 1.0, steps)], 3.0, 1e-4)
