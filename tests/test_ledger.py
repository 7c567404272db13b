"""The ledger: counts per client, the maximum over clients, resumption, refusals, and what is said about it."""

import json
import math
from dataclasses import replace

import pytest

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy import Ledger, compose, epsilon, signature, statement, summary
from fl_lightning.records import Release

INTEGER_ORDERS = tuple(map(float, range(2, 64)))


def new() -> Ledger:
    return Ledger(unit="sample", delta=1e-5, adjacency="add_remove")


def steps(count: int, z: float = 0.9, rate: float = 0.02, clip: float = 1.0) -> Release:
    return Release("gaussian", "sample", clip, z * clip, count=count, sampling="poisson", rate=rate, covers=("delta",))


def upload(z: float = 10.0) -> Release:
    return Release("gaussian", "client", 2.0, 2.0 * z, adjacency="replace_one", covers=("delta",))


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state, allow_nan=False))


def test_resume_continues_the_account() -> None:
    """CASES H14: 120 + 180 steps cost what 300 cost, about 3.31; not 2.89 (second part), not 5.47 (sum of parts)."""
    assert epsilon(compose([steps(300)], INTEGER_ORDERS), 1e-5, INTEGER_ORDERS) == pytest.approx(3.31, abs=0.005)
    straight, first, second = new(), new(), new()
    straight.record(1, 0, [steps(120)])
    straight.record(2, 0, [steps(180)])
    first.record(1, 0, [steps(120)])
    second.load_state_dict(through_json(first.state_dict()), plan={0: [steps(180)]})
    assert second.epsilon() == first.epsilon() == pytest.approx(2.7, abs=0.2)
    second.record(2, 0, [steps(180)])
    assert second.epsilon() == straight.epsilon() == pytest.approx(3.31, abs=0.02)
    assert second.history == straight.history
    assert second.to_dict() == straight.to_dict()
    assert through_json(second.state_dict()) == through_json(straight.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise": 1.0}, r"noise of client 0's release: 0\.9 in the checkpoint, 1\.0 now"),
        ({"rate": 0.03}, r"rate of client 0's release: 0\.02 in the checkpoint, 0\.03 now"),
        ({"sensitivity": 2.0, "noise": 1.8}, r"sensitivity of client 0's release: 1\.0 in the checkpoint, 2\.0 now"),
        ({"covers": ("delta", "loss")}, "covers of client 0"),
    ],
)
def test_changed_mechanism_is_refused_or_a_segment_of_its_own(change: dict, words: str) -> None:
    """CASES H14: another sigma, q or clip."""
    before = new()
    before.record(1, 0, [steps(120)])
    state, changed = through_json(before.state_dict()), replace(steps(180), **change)
    with pytest.raises(PrivacyError, match=words):
        new().load_state_dict(state, plan={0: [changed]})
    after = new()
    after.load_state_dict(state, plan={0: [changed]}, new_segment=True)
    after.record(2, 0, [changed])
    assert after.epsilon() == pytest.approx(epsilon(compose([steps(120), changed]), 1e-5), rel=1e-12)
    if "sensitivity" not in change:  # the same multiplier under another bound costs the same
        assert [segment["counts"] for segment in after.to_dict()["segments"]] == [{"0": 120}, {"0": 180}]


def test_resume_is_refused_without_or_beside_a_ledger() -> None:
    used = new()
    used.record(1, 0, [steps(1)])
    state = through_json(used.state_dict())
    for absent in (None, {}):
        with pytest.raises(PrivacyError, match="no privacy ledger"):
            new().load_state_dict(absent)
    with pytest.raises(PrivacyError, match="already"):
        used.load_state_dict(state)
    with pytest.raises(PrivacyError, match="delta: 1e-05 in the checkpoint, 1e-06 now"):
        Ledger(unit="sample", delta=1e-6, adjacency="add_remove").load_state_dict(state)
    with pytest.raises(PrivacyError, match="unit: sample in the checkpoint, client now"):
        Ledger(unit="client", delta=1e-5, adjacency="add_remove").load_state_dict(state)
    with pytest.raises(PrivacyError, match="2 now"):
        new().load_state_dict(state, plan={0: [steps(1), steps(1)]})


def test_infinite_epsilon_survives_resume() -> None:
    ledger = new()
    ledger.record(1, 3, [steps(5, z=0.0)])
    ledger.record(2, 3, [steps(5)])
    assert ledger.epsilon() == math.inf
    again = new()
    again.load_state_dict(through_json(ledger.state_dict()))
    assert again.history == ledger.history == [(1, math.inf), (2, math.inf)]
    facts = through_json(again.to_dict())
    assert facts["infinite"] is True and facts["epsilon"] is None


def test_epsilon_is_the_maximum_over_clients() -> None:
    """CASES H24: 4 clients of 200 records, 10 rounds of 20 steps, q = 0.1, sigma = 1, delta = 1e-4."""
    ledger = Ledger(unit="sample", delta=1e-4, adjacency="add_remove")
    for round in range(1, 11):
        for client in range(4):
            if client < 3 or round % 2:  # client 3 is in half of the rounds
                ledger.record(round, client, [steps(20, z=1.0, rate=0.1)])
    whole = steps(200, z=1.0, rate=0.1)
    assert epsilon(compose([whole], INTEGER_ORDERS), 1e-4, INTEGER_ORDERS) == pytest.approx(9.99, abs=0.005)
    assert ledger.epsilon() == ledger.epsilon_of(1) == pytest.approx(epsilon(compose([whole]), 1e-4), rel=1e-12)
    assert 9.6 < ledger.epsilon() <= 9.99  # fractional orders are tighter; one round would be 3.49
    assert ledger.history[0][1] == pytest.approx(3.4, abs=0.1)
    assert ledger.epsilon_of(3) < ledger.epsilon_of(0)
    assert ledger.epsilon_of(99) == 0
    assert ledger.worst_client() == 0
    assert len(ledger.to_dict()["segments"]) == 1


def test_statement_says_what_epsilon_refers_to() -> None:
    """CASES H24: unit, n, q, steps, delta, the maximum over clients; a delta of 1/n and more is warned of."""
    ledger = Ledger(unit="sample", delta=0.01, adjacency="add_remove")
    for client in range(4):
        ledger.record(1, client, [steps(20 + client, z=1.0, rate=0.1)])
    terms = {"level": "sample", "clip_norm": 1.5, "sizes": dict.fromkeys(range(4), 200)}
    text = statement(ledger, **terms)
    for words in (
        "for one example of a client",
        "delta = 0.01",
        "largest over all clients",
        "client 3's, which holds n = 200 examples, after 23 Gaussian releases (delta)",
        "noise multiplier 1 and Poisson sampling at rate q = 0.1",
        "one example of a client is added or removed",
        "clipped to norm 1.5",
        "Renyi",
        "Trust model local",
        "Warning: delta = 0.01 is not below 1/n = 0.005 for n = 200",
        "a simulation, not a deployment",
        "Hyper-parameters",
    ):
        assert words in text, words
    assert "\n" not in text
    printed = float(text.split("epsilon = ")[1].split()[0])
    assert ledger.epsilon() <= printed <= ledger.epsilon() * 1.001
    facts = through_json(summary(ledger, **terms))
    assert facts["epsilon"] == ledger.epsilon() and facts["infinite"] is False
    assert (facts["unit"], facts["adjacency"], facts["sampling"]) == ("sample", "add_remove", "poisson")
    assert (facts["accountant"], facts["trust_model"], facts["delta"], facts["n"]) == ("rdp", "local", 0.01, 200)
    assert facts["releases"][0]["count"] == 23 and facts["releases"][0]["rate"] == 0.1
    assert len(facts["warnings"]) == 1
    quiet = Ledger(unit="sample", delta=1e-4, adjacency="add_remove")
    assert summary(quiet, **terms)["warnings"] == []


def test_statement_at_client_level_and_without_privacy() -> None:
    ledger = Ledger(unit="client", delta=0.2, adjacency="replace_one")
    terms = {"level": "update", "clip_norm": 1.0, "sizes": {0: 50, 1: 60, 2: 0}}
    assert "epsilon is 0" in statement(ledger, **terms)
    assert summary(ledger, **terms)["worst_client"] is None
    ledger.record(1, 0, [upload(z=1.0)])
    text = statement(ledger, **terms)
    assert "all data of one client are replaced" in text and "after 1 Gaussian release (delta)" in text
    assert "all data in each" in text
    assert "Warning" not in text  # 0.2 < 1/3
    assert summary(ledger, **terms)["n"] == 3
    ledger.record(2, 1, [upload(z=0.0)])
    assert "No privacy is claimed" in statement(ledger, **terms)
    assert summary(ledger, **terms)["infinite"] is True
    for wrong in ({"level": "sample"}, {"level": "none"}, {"trust_model": "blind"}):
        with pytest.raises(PrivacyError):
            statement(ledger, **{**terms, **wrong})


def test_epsilon_never_falls_and_counts_of_zero_are_free() -> None:
    ledger = new()
    assert ledger.epsilon() == 0.0 and ledger.worst_client() is None and ledger.history == []
    ledger.record(1, 0, [steps(0)])
    assert ledger.epsilon() == 0.0 and ledger.history == []
    before = 0.0
    for round in range(1, 60):
        loss = Release("laplace", "sample", 0.01, 1.0 + round % 3, covers=("loss",))
        ledger.record(round, round % 5, [steps(1 + round % 7, z=0.7 + round % 4), loss])
        assert ledger.epsilon() >= before
        before = ledger.epsilon()
    rounds, values = zip(*ledger.history, strict=True)
    assert rounds == tuple(range(1, 60)) and list(values) == sorted(values) and values[-1] == before


def test_clip_bound_that_moves_stays_one_segment() -> None:
    """Eq. 13 and quantile clipping change C every round; the cost depends on noise / C alone."""
    ledger, fixed = new(), new()
    for round in range(1, 200):
        ledger.record(round, 0, [steps(3, z=0.9, clip=0.1 + round / 7)])
        fixed.record(round, 0, [steps(3, z=0.9)])
    (segment,) = ledger.to_dict()["segments"]
    assert segment["noise_multiplier"] == 0.9
    assert segment["sensitivity_min"] == 0.1 + 1 / 7 and segment["sensitivity_max"] == 0.1 + 199 / 7
    assert (segment["first_round"], segment["last_round"], segment["counts"]) == (1, 199, {"0": 597})
    assert ledger.epsilon() == fixed.epsilon()


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (upload(), "unit=client cannot enter a ledger with unit=sample"),
        (replace(steps(1), sampling="full", rate=1.0, adjacency="replace_one"), "adjacency=replace_one cannot enter"),
        (replace(steps(1), noise=-0.1), "noise=-0.1"),
        (replace(steps(1), noise=math.nan), "noise=nan"),
        (replace(steps(1), sensitivity=-1.0), "sensitivity=-1.0"),
        (replace(steps(1), sensitivity=math.nan), "sensitivity=nan"),
        (replace(steps(1), count=-1), "count=-1"),
        (replace(steps(1), adjacency="replace_one"), "no proof"),
    ],
)
def test_bad_release_is_refused_and_leaves_the_ledger_as_it_was(release: Release, words: str) -> None:
    ledger = new()
    ledger.record(1, 0, [steps(10)])
    before = ledger.state_dict()
    with pytest.raises(PrivacyError, match=words):
        ledger.record(2, 1, [steps(10), release])
    assert ledger.state_dict() == before


def test_rounds_are_recorded_in_order_and_terms_are_known() -> None:
    ledger = new()
    ledger.record(3, 0, [steps(1)])
    for round, client in ((2, 0), (0, 0), (3, -1)):
        with pytest.raises(PrivacyError, match="cannot record round"):
            ledger.record(round, client, [steps(1)])
    for terms in ({"unit": "user"}, {"adjacency": "swap"}, {"accountant": "gdp"}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(PrivacyError):
            Ledger(**{"unit": "sample", "delta": 1e-5, "adjacency": "add_remove", **terms})


def test_signature_ignores_the_count_only() -> None:
    assert signature([steps(1)]) == signature([steps(7)])
    assert signature([steps(1)]) != signature([steps(1, z=0.8)])


def test_many_clients_and_rounds_share_their_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 rounds of 100 clients: one curve, and at most one conversion per number of participations and round."""
    from fl_lightning.privacy import ledger as module

    converted: list[int] = []

    def counting(curves, delta):  # type: ignore[no-untyped-def]
        converted.append(len(curves))
        return original(curves, delta)

    original = module.epsilons
    monkeypatch.setattr(module, "epsilons", counting)
    ledger = Ledger(unit="client", delta=1e-5, adjacency="replace_one")
    for round in range(1, 301):
        for client in range(100):
            if (client + round) % 2:
                ledger.record(round, client, [upload()])
        ledger.epsilon()
    assert sum(converted) == 300
    assert ledger.epsilon() == pytest.approx(epsilon(compose([replace(upload(), count=150)]), 1e-5), rel=1e-12)
