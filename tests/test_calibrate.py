"""Calibration: within budget, close to it, quick, the same from any start, and refused in words without an answer."""

import math
import time

import pytest
from golden_cases import cases

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import Ledger, calibrate_many, calibrate_noise, compose, epsilon
from fl_lightning.privacy.accountants import curve
from fl_lightning.records import Release

N, BATCH, STEPS, DELTA = 1797, 64, 5 * math.ceil(1797 / 64), 1e-4


def sgd(z: float) -> list[Release]:
    return [Release("gaussian", "sample", 1.0, z, count=STEPS, sampling="poisson", rate=BATCH / N)]


@pytest.mark.parametrize("target", [0.1, 0.5, 1, 3, 8, 50, 500])
def test_target_is_met_from_below(target: float) -> None:
    """CASES H23."""
    curve.cache_clear()
    began = time.process_time()
    z = calibrate_noise(sgd, target, DELTA)
    assert time.process_time() - began < 5
    spent = epsilon(compose(sgd(z)), DELTA)
    assert 0.999 * target <= spent <= target
    assert epsilon(compose(sgd(z * 0.9997)), DELTA) > target  # and it is the smallest


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
def test_target_without_meaning_is_refused(target: float) -> None:
    with pytest.raises(PrivacyError, match=r"privacy\.target_epsilon=.* must be above 0 and finite"):
        calibrate_noise(sgd, target, DELTA)
    with pytest.raises(PrivacyError, match=r"privacy\.target_epsilon"):
        calibrate_many([(0.1, 10)], target, DELTA)


def test_start_changes_nothing() -> None:
    assert len({calibrate_noise(sgd, 3, DELTA, start=start) for start in (1e-3, 0.97, 0.98, 1.0, 1e4)}) == 1


@pytest.mark.parametrize("case", cases("privacy.json", "sigma_base"), ids=lambda case: case["id"])
def test_full_batch_golden(case: dict) -> None:
    """Above the exact Gaussian, below Eq. 16, and within 0.3 % of the best order of the RDP accountant."""
    given, expected = case["inputs"], case["expected"]

    def uploads(z: float) -> list[Release]:
        return [Release("gaussian", "client", 2.0, 2.0 * z, count=given["T"], adjacency="replace_one")]

    z = calibrate_noise(uploads, given["eps_model"], given["delta"])
    assert expected["sigma_exact"] < z < expected["sigma_eq16"]
    assert expected["sigma_rdp_improved"] * (1 - 1e-6) <= z <= expected["sigma_rdp_improved"] * 1.003


def test_whole_list_is_counted() -> None:
    """Two noised vectors and three fixed scalars a round cost more than one vector; all of it is in the target."""

    def everything(z: float) -> list[Release]:
        scalars = Release("laplace", "client", 1.0, 30.0, count=3 * 20, covers=("losses",))
        return [Release("gaussian", "client", 1.0, z, count=2 * 20), scalars]

    def vector_alone(z: float) -> list[Release]:
        return [Release("gaussian", "client", 1.0, z, count=20)]

    z = calibrate_noise(everything, 4.0, 1e-5)
    assert 3.8 <= epsilon(compose(everything(z)), 1e-5) <= 4.0
    assert z > 1.4 * calibrate_noise(vector_alone, 4.0, 1e-5)


def test_unreachable_targets_are_refused() -> None:
    def with_loud_scalars(z: float) -> list[Release]:
        return [*sgd(z), Release("laplace", "sample", 1.0, 1.0, count=20)]

    with pytest.raises(PrivacyError, match=r"out of reach .* still cost 1\d\.\d+; raise the target"):
        calibrate_noise(with_loud_scalars, 1.0, DELTA)
    assert calibrate_noise(with_loud_scalars, 40.0, DELTA) > 0
    with pytest.raises(PrivacyError, match="cannot be met within 5 percent"):
        calibrate_noise(sgd, 1e-6, DELTA)
    with pytest.raises(PrivacyError, match="needs no noise"):
        calibrate_noise(sgd, 1e15, DELTA)
    with pytest.raises(PrivacyError, match="needs no noise"):
        calibrate_noise(lambda z: [], 1.0, DELTA)
    with pytest.raises(PrivacyError, match=r"privacy\.delta"):
        calibrate_noise(sgd, 1.0, 0.0)


def test_many_clients_each_at_its_own_rate() -> None:
    curve.cache_clear()
    sizes = [20, 46, 46, 130, 221, 900]
    plans = [(32 / n, 10 * math.ceil(n / 32)) for n in sizes]
    found = calibrate_many(plans, 8.0, 1e-5)
    assert found[1] == found[2]
    for n, z, (rate, steps) in zip(sizes, found, plans, strict=True):
        run = [Release("gaussian", "sample", 1.0, z, count=steps, sampling="poisson", rate=rate)]
        assert 7.9 <= epsilon(compose(run), 1e-5) <= 8.0, n
        alone = calibrate_noise(lambda z, run=run: [Release(**{**vars(run[0]), "noise": z})], 8.0, 1e-5)
        assert z == alone  # no client's noise depends on the other clients
    assert found[-1] < found[0]  # a small share of the data in each batch needs less noise
    with pytest.raises(PrivacyError, match="0 private steps"):
        calibrate_many([(0.1, 10), (0.1, 0)], 8.0, 1e-5)


def test_a_hundred_clients_are_quick() -> None:
    curve.cache_clear()
    plans = [(32 / n, 10 * math.ceil(n / 32)) for n in range(40, 840, 8)]
    began = time.process_time()
    assert len(set(calibrate_many(plans, 8.0, 1e-5))) > 90
    assert time.process_time() - began < 10


def test_margin_for_rounding_is_kept() -> None:
    """A target that 0.9 spends to the last bit is met by the next multiplier: z C / C may be a bit below z."""
    assert calibrate_noise(sgd, epsilon(compose(sgd(0.9)), DELTA), DELTA) == 0.90001


@pytest.mark.parametrize("clip", [0.1, 0.3, 1e-3, 7.0, 1 / 3])
def test_the_run_itself_stays_within_the_target(clip: float) -> None:
    """noise = z C, sensitivity = C: dividing them again may lose a bit, and the ledger must still not exceed."""
    for target in (0.7, 1.1, 2.3):
        z = calibrate_noise(sgd, target, DELTA)
        ledger = Ledger(unit="sample", delta=DELTA, adjacency="add_remove")
        for round in range(1, 6):
            step = Release(
                "gaussian",
                "sample",
                clip,
                z * clip,
                count=STEPS // 5,
                sampling="poisson",
                rate=BATCH / N,
                covers=("w",),
            )
            ledger.record(round, 0, [step])
        assert 0.95 * target <= ledger.epsilon() <= target
