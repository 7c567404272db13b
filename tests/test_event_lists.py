"""200 generated lists of releases cost what dp-accounting's Renyi accountant says of the same events, to 1e-6.

Two exceptions, where dp-accounting is the less exact and tests/test_accountants.py and tests/test_fixed_size.py compare
ours with exact numbers: fractional orders of Poisson sampling, whose series it cuts off (from above) or drops below
order 2, are only bounded here; and sampling without replacement is compared up to order 32, above which its forward
differences lose digits.
"""

import logging
import random

import numpy as np
import pytest

from fl_lightning.privacy import Ledger, compose, epsilon
from fl_lightning.records import Release

LISTS, LISTS_PER_CASE = 200, 20
ORDERS = (1.1, 1.5, *(2 + x / 4 for x in range(40)), *map(float, range(12, 33)))
HIGH_ORDERS = (40.0, 48.5, 64.0, 128.0, 256.0)
REACH = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}


def generated(source: random.Random) -> list[Release]:
    """One to five kinds of release under one neighbouring relation, each up to thousands of times."""
    adjacency = source.choice(list(REACH))
    reach = REACH[adjacency] * 10 ** source.uniform(-2, 1)  # any clip bound

    def full() -> Release:
        z = 10 ** source.uniform(-0.3, 1.5)
        return Release("gaussian", "client", reach, z * reach, source.randint(1, 300), adjacency=adjacency)

    def laplace() -> Release:
        noise = reach * 10 ** source.uniform(-0.5, 3)
        return Release("laplace", "client", reach, noise, source.randint(1, 50), adjacency=adjacency)

    def sampled() -> Release:
        z, rate, count = 10 ** source.uniform(-0.3, 0.6), 10 ** source.uniform(-3, -0.5), source.randint(1, 3000)
        sampling = "without_replacement" if adjacency == "replace_one" else "poisson"
        return Release("gaussian", "client", reach, z * reach, count, sampling, rate, adjacency)

    return [source.choice((full, laplace, sampled, sampled))() for _ in range(source.randint(1, 5))]


def dp_accounting_curve(run: list[Release], orders: tuple[float, ...]) -> np.ndarray:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)
    relation = {
        "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[run[0].adjacency]
    accountant = RdpAccountant(orders, relation)
    for release in run:
        z = release.noise / release.sensitivity
        event = dp_accounting.LaplaceDpEvent(z) if release.mechanism == "laplace" else dp_accounting.GaussianDpEvent(z)
        if release.sampling == "poisson":
            event = dp_accounting.PoissonSampledDpEvent(release.rate, event)
        elif release.sampling == "without_replacement":
            event = dp_accounting.SampledWithoutReplacementDpEvent(1, release.rate, event)
        accountant.compose(event, release.count)
    return accountant.rdp


@pytest.mark.parametrize("seed", range(LISTS // LISTS_PER_CASE))
def test_generated_lists(seed: int) -> None:
    from dp_accounting.rdp import compute_epsilon

    source = random.Random(seed)
    for _ in range(LISTS_PER_CASE):
        run, delta = generated(source), 10 ** source.uniform(-8, -3)
        samplings = {release.sampling for release in run}
        orders = np.array(ORDERS if "without_replacement" in samplings else (*ORDERS, *HIGH_ORDERS))
        ours, theirs = compose(run, tuple(orders)), dp_accounting_curve(run, tuple(orders))
        exact = np.isfinite(theirs)
        if "poisson" in samplings:
            exact &= orders == orders.round()
            assert (ours <= theirs * (1 + 1e-9)).all(), run
        else:
            assert exact.all()
        kept = tuple(orders[exact])
        assert np.allclose(ours[exact], theirs[exact], rtol=1e-6, atol=1e-12), run
        expected, _ = compute_epsilon(kept, theirs[exact], delta)
        assert epsilon(ours[exact], delta, kept) == pytest.approx(expected, rel=1e-6, abs=1e-9), (run, delta)


@pytest.mark.parametrize("seed", range(5))
def test_ledger_adds_the_same_lists_up(seed: int) -> None:
    """Split over rounds and clients, the worst client's account is that of its list."""
    source = random.Random(seed)
    runs: dict[int, list[Release]] = {}
    adjacency = None
    while len(runs) < 4:
        run = generated(source)
        adjacency = adjacency or run[0].adjacency
        if run[0].adjacency == adjacency:
            runs[len(runs)] = run
    ledger = Ledger(unit="client", delta=1e-6, adjacency=adjacency)
    for round in range(1, 6):
        for client, run in runs.items():
            for release in run[round - 1 : round]:
                ledger.record(round, client, [release])
    expected = {client: epsilon(compose(run), 1e-6) for client, run in runs.items()}
    assert ledger.epsilon() == pytest.approx(max(expected.values()), rel=1e-9)
    for client, value in expected.items():
        assert ledger.epsilon_of(client) == pytest.approx(value, rel=1e-9)
