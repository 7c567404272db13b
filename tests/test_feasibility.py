"""The dial R and the noise norms: the reference numbers, and the closed forms against real solved noise."""

import math

import numpy as np
import pytest
from golden_cases import assert_close, cases

from fl_lightning.privacy import feasibility as f
from fl_lightning.privacy.calibrate import calibrate_many
from fl_lightning.privacy.paper import eq16_sigma

T = 200


@pytest.mark.parametrize("case", cases("feasibility.json", "feasibility"), ids=lambda case: case["id"])
def test_golden(case: dict) -> None:
    d, eps, delta, K, n = (case["inputs"][key] for key in ("d", "eps", "delta", "K", "n_k"))
    sigma = eq16_sigma(eps, T, delta)
    local, central = f.local_dial(d, eps, delta, K), f.central_dial(d, eps, delta, K)
    found = {
        "sigma_base_T200": sigma,
        "per_client_noise_norm_over_C": f.upload_noise(d, sigma),
        "mean10_noise_norm_over_C": f.mean_noise(d, sigma, 10),
        "R_local_upload": local,
        "R_central": central,
        "R_sample_level_approx": f.sample_dial(d, eps, delta, K, n),
        "K_for_R1_local": f.smallest_clients(local, K, 1.0),
        "m_for_R1_central": f.smallest_cohort(central, K, 1.0),
    }
    assert found.keys() == case["expected"].keys()
    for key, value in found.items():
        assert_close(value, case["expected"][key], case["tol"])


@pytest.mark.parametrize("rounds", [1, 56, 200])
@pytest.mark.parametrize("cohort", [1, 10, 50])
def test_direct_dial_with_the_noise_of_eq16_is_the_closed_form(rounds: int, cohort: int) -> None:
    """K = 50 clients, m of them a round, each therefore in T m/K rounds: R depends on neither T nor m."""
    d, eps, delta, K = 28_938, 2.0, 1e-5, 50
    sigma = math.sqrt(cohort / K) * eq16_sigma(eps, rounds, delta)  # Eq. 16 of T m/K participations
    one = f.aggregate_noise([(sigma, 1.0)] * cohort, [1 / cohort] * cohort)
    assert one[1] == pytest.approx(1.0)
    ratio = f.dial(d, [one[0]] * rounds, [one[1]] * rounds)
    assert ratio == pytest.approx(f.local_dial(d, eps, delta, K), rel=1e-12)
    full = eq16_sigma(eps, rounds, delta)
    assert f.dial(d, [full / cohort] * rounds, [1.0] * rounds) == pytest.approx(f.central_dial(d, eps, delta, cohort))


@pytest.mark.parametrize(("eps", "expected"), [(0.5, 0.36), (1, 0.19), (2, 0.10), (5, 0.046), (10, 0.027)])
def test_direct_dial_at_sample_level_is_the_table_of_section_b(eps: float, expected: float) -> None:
    """VGG, K = 10, n = 5000, B = 64, 79,000 steps, noise solved by the accountant itself."""
    steps = 5 * math.ceil(5000 / 64)
    [z] = calibrate_many([(64 / 5000, steps * T)], eps, 1e-5)
    one = f.aggregate_noise([f.visit_noise(z, steps, 64)] * 10, [0.1] * 10)
    ratio = f.dial(550_570, [one[0]] * T, [one[1]] * T)
    assert ratio == pytest.approx(expected, rel=0.04)
    assert ratio < f.sample_dial(550_570, eps, 1e-5, 10, 5000) < 2.5 * ratio


def test_dial_is_the_ratio_that_a_simulation_measures() -> None:
    """Noise of three rounds added up coordinate by coordinate, against three updates of length C in one direction."""
    d, C, z, m, rng = 40_000, 3.0, 0.5, 4, np.random.default_rng(0)
    total, moved = np.zeros(d), np.zeros(d)
    for _ in range(3):
        signal = np.zeros(d)
        signal[0] = C
        total += np.mean([rng.normal(0, z * C, d) for _ in range(m)], axis=0)
        moved += signal
    measured = np.linalg.norm(total) / np.linalg.norm(moved)
    one = f.aggregate_noise([(z, 1.0)] * m, [1 / m] * m)
    assert f.dial(d, [one[0]] * 3, [one[1]] * 3) == pytest.approx(measured, rel=0.02)


def test_unequal_uploads_are_weighed() -> None:
    s, reach = f.aggregate_noise([(3.0, 1.0), (4.0, 5.0)], [0.5, 0.25])
    assert s == pytest.approx(math.hypot(1.5, 1.0)) and reach == pytest.approx(0.5 + 1.25)
    assert f.visit_noise(2.0, 9, 4.0) == (1.5, 9.0)


def test_smallest_federations_reach_the_wanted_dial() -> None:
    d, eps, delta = 28_938, 10.0, 1e-5
    K = math.ceil(f.smallest_clients(f.local_dial(d, eps, delta, 10), 10, 1.0))
    assert K == 9333 and f.local_dial(d, eps, delta, K) <= 1 < f.local_dial(d, eps, delta, K - 1)
    m = math.ceil(f.smallest_cohort(f.central_dial(d, eps, delta, 10), 10, 0.3))
    assert f.central_dial(d, eps, delta, m) <= 0.3 < f.central_dial(d, eps, delta, m - 1)


def test_verdicts_and_their_bounds() -> None:
    expected = {0: "no noise", 0.01: "nearly harmless", 0.3: "nearly harmless", 0.31: "costly", 1: "costly"}
    expected |= {1.01: "heavy loss", 9.9: "heavy loss", 10: "hopeless", math.inf: "hopeless"}
    assert {ratio: f.verdict(ratio) for ratio in expected} == expected
    assert set(expected.values()) == set(f.VERDICTS)
    assert f.dial(10, [0.0], [1.0]) == 0.0 and f.dial(10, [1.0], [0.0]) == math.inf
    assert f.kappa(1e-12, 1e-5) == pytest.approx(1e-12 / (2 * math.sqrt(math.log(1e5))), rel=1e-9)
