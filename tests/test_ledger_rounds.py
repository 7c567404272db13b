"""What the ledger says ahead of a round, and what it keeps of past ones: previews, checkpoints, the worst client."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from test_ledger import new, steps, through_json, upload

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import Ledger, compose, epsilon


def test_checkpoint_of_version_1_is_read() -> None:
    """It holds all but the counts of single rounds, which only the series of readings wants."""
    ledger = new()
    ledger.record(1, 0, [steps(5)])
    ledger.record(2, 0, [steps(5)])
    state = through_json(ledger.state_dict())
    old = {key: value for key, value in state.items() if key not in ("worst_counts", "latest")} | {"version": 1}
    again = new()
    again.load_state_dict(old)
    again.record(3, 0, [steps(5)])
    assert again.epsilon() == pytest.approx(epsilon(compose([steps(15)]), 1e-5), rel=1e-12)
    assert [round for round, _ in again.history] == [1, 2, 3]
    assert [round for round, _ in again.worst_counts] == [2, 3]
    with pytest.raises(PrivacyError, match="no privacy ledger"):
        new().load_state_dict(state | {"version": 3})


def test_preview_is_what_recording_would_give_and_records_nothing() -> None:
    """CASES H25: a budget is enforced on what the next round would cost, before it is spent."""
    ledger = Ledger(unit="client", delta=1e-5, adjacency="replace_one")
    drawn = replace(upload(3.0), sampling="without_replacement", rate=0.1)
    ledger.record(1, 0, [upload(), drawn])
    ledger.record(1, 1, [upload()])
    before = through_json(ledger.state_dict())
    for client, more in ((0, [upload(), drawn]), (1, [drawn]), (7, [upload(2.0)]), (0, []), (7, [])):
        expected = ledger.preview(client, more)
        assert through_json(ledger.state_dict()) == before
        copy = Ledger(unit="client", delta=1e-5, adjacency="replace_one")
        copy.load_state_dict(before)
        copy.record(2, client, more)
        assert expected == copy.epsilon_of(client)
    assert ledger.preview(1, [upload(0.0)]) == math.inf
    assert ledger.preview(1, [replace(upload(0.0), count=0)]) == ledger.epsilon_of(1)
    with pytest.raises(PrivacyError, match="adjacency=zero_out cannot enter"):
        ledger.preview(1, [replace(upload(), adjacency="zero_out")])
    assert through_json(ledger.state_dict()) == before


def test_latest_round_of_a_client_is_kept() -> None:
    ledger = new()
    assert ledger.latest_of(0) == {}
    ledger.record(1, 0, [steps(5), steps(7, z=1.5)])
    ledger.record(2, 1, [steps(4)])
    assert sorted(ledger.latest_of(0).values()) == [5, 7]
    ledger.record(3, 0, [steps(2)])
    ledger.record(3, 0, [steps(1), steps(9, z=1.5)])  # the same round, in two parts
    ledger.record(4, 0, [steps(0)])
    again = new()
    again.load_state_dict(through_json(ledger.state_dict()))
    for kept in (ledger, again):
        assert {segment.noise_multiplier: n for segment, n in kept.latest_of(0).items()} == {0.9: 3, 1.5: 9}
        assert list(kept.latest_of(1).values()) == [4]
    again.latest_of(0).clear()
    assert again.latest_of(0)


def test_sampling_is_part_of_a_segment() -> None:
    """The same noise at the same rate costs differently by how the units were drawn."""
    found = {}
    for sampling, adjacency in (("poisson", "zero_out"), ("without_replacement", "replace_one")):
        ledger = Ledger(unit="client", delta=1e-5, adjacency=adjacency)
        release = replace(upload(2.0), sampling=sampling, rate=0.1, adjacency=adjacency, count=50)
        ledger.record(1, 0, [release])
        assert ledger.epsilon() == pytest.approx(epsilon(compose([release]), 1e-5), rel=1e-12)
        found[sampling] = ledger.epsilon()
    assert found["without_replacement"] > 1.5 * found["poisson"]


@pytest.mark.parametrize("resumed_after", [None, 37, 200])
def test_counts_of_the_worst_client_are_kept_of_rounds_evenly_between(resumed_after: int | None) -> None:
    ledger = new()
    for round in range(1, 301):
        ledger.record(round, round % 2, [steps(2, z=0.9 + (round % 3) / 10)])
        if round == resumed_after:
            state, ledger = through_json(ledger.state_dict()), new()
            ledger.load_state_dict(state)
        if round in (1, 5, 63, 64, 65, 128, 129, 300):
            rounds = [kept for kept, _ in ledger.worst_counts]
            gaps = {after - before for before, after in pairwise(rounds[:-1])}
            assert rounds[0] == 1 and rounds[-1] == round
            assert min(round, 32) <= len(rounds) <= 66 and len(gaps) <= 1
    epsilons = dict(ledger.history)
    for round, counts in ledger.worst_counts:
        curve = sum(count * segment.curve() for segment, count in counts.items())
        assert epsilon(curve, 1e-5) == pytest.approx(epsilons[round], rel=1e-12)
