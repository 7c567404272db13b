"""Where the noise stands: every trust model, bound and schedule against the same round written out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from golden_cases import cases

from fl_lightning import RunConfig, run
from fl_lightning.build import Prepared, prepare
from fl_lightning.config.faults import InvalidConfig
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.errors import PrivacyError
from fl_lightning.federation import initial, poisson_cohort, run_round
from fl_lightning.foreseen import foresee
from fl_lightning.privacy import Ledger
from fl_lightning.records import Message
from fl_lightning.rng import generator
from fl_lightning.server.aggregate import fold
from fl_lightning.server.noise import for_the_sum, noised
from fl_lightning.server.quantile import QuantileRule
from fl_lightning.server.rules import apply
from fl_lightning.uplink.clip_noise import QuantileBit, clip

SMALL = {"rounds": 3, "num_clients": 4, "batch_size": 64}


def config(algorithm: object = "dp_fedavg", fl: dict | None = None, **privacy: object) -> RunConfig:
    return RunConfig(
        algorithm=algorithm,
        privacy={"level": "update", "noise_multiplier": 0.5, **privacy},
        fl={**SMALL, **(fl or {})},
        tracking={"enabled": False},
    )


def one_round(prepared: Prepared, cohort: tuple[int, ...] = (0, 1, 2, 3)):
    """(model before, federation after, messages) of the first round."""
    before = initial(prepared.objective.initial, prepared.objective.buffers())
    after, messages, _ = run_round(before, cohort, prepared.algorithm, DebugEngine(prepared.side), None)
    return before.server.w, after, messages


def raw_updates(**privacy: object) -> list[torch.Tensor]:
    """What the clients would send without clipping and noise."""
    free = prepare(config(**{**privacy, "noise_multiplier": 0.0, "clip_norm": math.inf}))
    return [m.vectors["delta"] for m in one_round(free)[2]]


def test_central_noise_is_that_of_the_sum_over_the_cohort() -> None:
    z, bound = 0.5, 0.1
    prepared = prepare(config(trust_model="central", clip_norm=bound))
    w, after, messages = one_round(prepared)
    clipped = [clip(delta, bound) for delta in raw_updates()]
    for message, expected in zip(messages, clipped, strict=True):
        torch.testing.assert_close(message.vectors["delta"], expected)  # the trusted server sees them without noise
        assert message.undeclared == () and message.releases[0].noise == pytest.approx(z * bound)
    noise = torch.randn(w.shape, generator=generator(42, "central", 1)) * (z * bound / 4)
    torch.testing.assert_close(after.server.w, w + sum(clipped) / 4 + noise, rtol=1e-5, atol=1e-6)


def test_shares_add_up_to_the_noise_of_the_sum() -> None:
    z, bound = 0.5, 0.1
    prepared = prepare(config(trust_model="distributed", clip_norm=bound))
    _, _, messages = one_round(prepared)
    for message, delta in zip(messages, raw_updates(), strict=True):
        draw = torch.randn(delta.shape, generator=generator(42, "uplink", 1, message.client))
        share = z * bound / math.sqrt(4)
        torch.testing.assert_close(message.vectors["delta"], clip(delta, bound) + share * draw, rtol=1e-5, atol=1e-6)
        assert message.releases[0].noise == pytest.approx(z * bound), "the ledger counts the noise of the sum"


@pytest.mark.parametrize("trust", ["central", "distributed"])
def test_a_larger_noise_cohort_scales_the_mean_and_says_so(trust: str) -> None:
    plain = config(trust_model=trust, clip_norm=0.1)
    scaled = config(trust_model=trust, clip_norm=0.1, noise_cohort_size=40)
    quiet = config(trust_model=trust, clip_norm=0.1, noise_multiplier=0.0)
    base = one_round(prepare(quiet))[1].server.w
    noise = [one_round(prepare(c))[1].server.w - base for c in (plain, scaled)]
    torch.testing.assert_close(noise[1], noise[0] / 10, rtol=1e-3, atol=1e-7)
    result = run(scaled)
    assert result.badge == "NOT PRIVATE"
    assert any("cohort of 40" in text and "10 times as large" in text for text in result.final["privacy"]["warnings"])
    assert any("noise_cohort_size" in note for note in scaled.notes)
    assert run(plain).badge == "PRIVATE"


def test_weighted_sums_owe_the_noise_of_the_largest_weight() -> None:
    owed = [0.5, 0.2, 0.1]
    messages = [Message(k, 1, 1, {"delta": torch.ones(3)}, owed=owed[k]) for k in range(3)]
    aggregate = for_the_sum(lambda ms: fold(ms, [0.1, 0.6, 0.3]))(messages)
    assert aggregate.noise == pytest.approx(max(0.1 * 0.5, 0.6 * 0.2, 0.3 * 0.1))
    half = for_the_sum(lambda ms: fold(ms, [0.1, 0.6, 0.3]), noise_cohort=6)(messages)
    assert half.noise == pytest.approx(aggregate.noise / 2)


def test_sam_adpfl_under_central_trust_owes_at_least_what_each_client_counts_on() -> None:
    prepared = prepare(config("sam_adpfl", trust_model="central", noise_multiplier=1.0))
    before = initial(prepared.objective.initial, prepared.objective.buffers())
    _, messages, aggregate = run_round(before, (0, 1, 2, 3), prepared.algorithm, DebugEngine(prepared.side), None)
    bounds = [m.oracle["clip"] for m in messages]
    assert len(set(bounds)) > 1, "bounds follow sharpness"
    for message, weight, bound in zip(messages, aggregate.weights, bounds, strict=True):
        upload = next(r for r in message.releases if "delta" in r.covers)
        assert aggregate.noise >= weight * bound * upload.noise_multiplier * 2 - 1e-12, "replace_one: reach 2"
        assert not message.undeclared


# Secret cohorts.


def test_poisson_cohorts_have_a_fixed_denominator_and_an_empty_one_is_noise() -> None:
    z, bound = 0.5, 0.1
    c = config(trust_model="central", clip_norm=bound, sampling="poisson", fl={"clients_per_round": 2})
    prepared = prepare(c)
    w, after, _ = one_round(prepared, (1,))
    delta = clip(raw_updates()[1], bound)
    noise = torch.randn(w.shape, generator=generator(42, "central", 1)) * (z * bound / 2)
    torch.testing.assert_close(after.server.w, w + delta / 2 + noise, rtol=1e-5, atol=1e-6)
    w, after, messages = one_round(prepared, ())
    assert messages == []
    torch.testing.assert_close(after.server.w, w + noise, rtol=1e-5, atol=1e-6)


def test_poisson_cohorts_are_drawn_at_their_rate() -> None:
    sizes = [len(poisson_cohort(7, r, 20, 5)) for r in range(2000)]
    assert 0 < sizes.count(0) < 30 and abs(sum(sizes) / 2000 - 5) < 0.2
    assert poisson_cohort(7, 3, 20, 5) == poisson_cohort(7, 3, 20, 5)


@pytest.mark.parametrize("sampling", ["poisson", "without_replacement"])
def test_in_secret_cohorts_every_client_pays_for_every_round_at_the_rate(sampling: str) -> None:
    fl = {"clients_per_round": 2, "rounds": 5}
    c = config(trust_model="central", sampling=sampling, noise_multiplier=3.0, fl=fl)
    result, expected = run(c), foresee(c).ledger
    assert result.final["epsilon"] == expected.epsilon()
    assert {expected.epsilon_of(k) for k in range(4)} == {expected.epsilon()}
    release = result.final["privacy"]["releases"][0]
    assert (release["sampling"], release["rate"], release["count"]) == (sampling, 0.5, 5)
    everybody = {"clients_per_round": 4, "rounds": 5}
    counted = foresee(config(trust_model="central", noise_multiplier=3.0, fl=everybody)).ledger
    assert expected.epsilon() < counted.epsilon(), "sampling amplifies"


# A client without data looks like any other where whole clients are protected.


@pytest.mark.parametrize("algorithm", ["dp_fedavg", "sam_adpfl"])
def test_whether_a_client_holds_data_does_not_show(algorithm: str) -> None:
    prepared = prepare(config(algorithm, clip_norm=0.1))
    shards = list(prepared.side.shards)
    shards[2] = shards[2][:0]
    empty = replace(prepared, side=replace(prepared.side, shards=shards))
    before = initial(prepared.objective.initial, prepared.objective.buffers())
    _, messages, aggregate = run_round(before, (0, 1, 2, 3), empty.algorithm, DebugEngine(empty.side), None)
    lone = messages[2]
    assert lone.steps == 0 and not lone.undeclared
    assert {r.covers for r in lone.releases} == {r.covers for r in messages[0].releases}
    assert float(lone.vectors["delta"].std()) == pytest.approx(lone.releases[-1].noise, rel=0.05)
    if algorithm == "dp_fedavg":
        assert aggregate.weights == (0.25,) * 4
    assert all(weight > 0 for weight in aggregate.weights) and not aggregate.notes


# Clip bounds.


def test_per_layer_bounds_clip_each_layer_by_itself() -> None:
    v = torch.tensor([3.0, 4.0, 0.1, 0.0])
    parts = (slice(0, 2), slice(2, 4))
    got = clip(v, math.sqrt(2.0), parts)
    torch.testing.assert_close(got, torch.tensor([0.6, 0.8, 0.1, 0.0]))
    assert float(clip(torch.randn(4) * 100, 1.0, parts).norm()) == pytest.approx(1.0, rel=1e-5)
    prepared = prepare(config(clip_norm=0.01, clip_bound="per_layer", noise_multiplier=0.0))
    layers = prepared.algorithm.protection.layers
    assert layers[0].start == 0 and layers[-1].stop == prepared.objective.layout.size
    assert len(layers) == 3, "lenet5: two convolutions and one linear layer, weight and bias together"
    for message in one_round(prepared)[2]:
        for part in layers:
            assert float(message.vectors["delta"][part].norm()) == pytest.approx(0.01 / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize("case", cases("quantile.json", "baselines"), ids=lambda c: c["id"])
def test_quantile_goldens(case: dict) -> None:
    i = case["inputs"]
    if case["id"] == "adaptive_clip/z_delta":
        got = QuantileBit(i["sigma_b"]).update_multiplier(i["z"])
    else:
        rule = QuantileRule(i["C"], i["gamma"], i["eta_C"], expected=1.0, owed=0.0, seed=0).follow(apply())
        start = initial(torch.zeros(2), {}).server
        bits = torch.tensor(i["b_noised"] - 0.5, dtype=torch.float64)
        folded = fold([Message(0, 1, 1, {"delta": torch.zeros(2)})], [1.0])
        after = rule(start, replace(folded, vectors={**folded.vectors, "below": bits}))
        got = float(after.extra["clip"])
    assert got == pytest.approx(case["expected"], rel=1e-9)


def test_the_bound_follows_the_median_norm_without_noise() -> None:
    norms = [float(delta.norm()) for delta in raw_updates()]
    c = config(
        clip_norm=10.0,
        clip_bound="quantile",
        noise_multiplier=0.0,
        quantile={"lr": 1.0},
        fl={"rounds": 40, "batch_size": 256},
    )
    prepared = prepare(c)
    federation = initial(prepared.objective.initial, prepared.objective.buffers())
    bounds, shares = [], []
    for _ in range(40):
        federation, messages, _ = run_round(
            federation, (0, 1, 2, 3), prepared.algorithm, DebugEngine(prepared.side), None
        )
        bounds.append(messages[0].oracle["clip"])
        shares.append(sum(m.oracle["clipped"] == 0 for m in messages) / 4)
        assert messages[0].scalars["below"] in (-0.5, 0.5)
    assert bounds[0] == 10.0 and bounds[1] == pytest.approx(10.0 * math.exp(-0.5))
    assert bounds[-1] < 2 * max(norms) and 0.25 <= sum(shares[-10:]) / 10 <= 0.75


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
def test_update_and_bit_together_cost_what_the_multiplier_says(trust: str) -> None:
    """Their Gaussian costs add to 1/z^2, so the ledger's one release of multiplier z covers both."""
    z, sigma_b = 1.2, 2.0
    c = config(trust_model=trust, clip_bound="quantile", quantile={"bit_noise": sigma_b}, noise_multiplier=z)
    (release,) = one_round(prepare(c))[2][0].releases
    assert set(release.covers) == {"delta", "below"}
    assert release.noise_multiplier == pytest.approx(z / 2)  # replace_one
    update = QuantileBit(sigma_b).update_multiplier(z)
    assert update**-2 + (2 * sigma_b) ** -2 == pytest.approx(z**-2)


def test_bit_noise_too_small_for_the_multiplier_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"privacy\.quantile\.bit_noise=0\.5.*above 1"):
        prepare(config(clip_bound="quantile", quantile={"bit_noise": 0.5}, noise_multiplier=2.0))


# Level model and the schedule.


def test_level_model_sends_the_clipped_model() -> None:
    bound = 0.5
    prepared = prepare(config(level="model", clip_norm=bound, noise_multiplier=0.0))
    w, after, messages = one_round(prepared)
    mean = sum(m.vectors["delta"] for m in messages) / 4
    torch.testing.assert_close(after.server.w, mean, rtol=1e-5, atol=1e-6)
    for message, delta in zip(messages, raw_updates(), strict=True):
        torch.testing.assert_close(message.vectors["delta"], clip(w + delta, bound), rtol=1e-4, atol=1e-6)
        assert set(message.vectors) == {"delta"} and message.releases[0].sensitivity == 2 * bound


@pytest.mark.parametrize("level", ["sample", "update"])
def test_noise_falls_on_its_schedule_and_is_counted_as_it_is(level: str) -> None:
    c = config(level=level, noise_decay=0.5, noise_decay_rounds=2, noise_multiplier=4.0, fl={"rounds": 5})
    prepared = prepare(c)
    federation = initial(prepared.objective.initial, prepared.objective.buffers())
    seen = []
    for _ in range(5):
        federation, messages, _ = run_round(federation, (0, 1), prepared.algorithm, DebugEngine(prepared.side), None)
        release = messages[0].releases[0]
        seen.append(release.noise / release.sensitivity * (2 if level == "update" else 1))
        assert release.counted_noise == release.noise
    assert seen == pytest.approx([4.0, 4.0, 2.0, 2.0, 1.0])


# Foresight, budget.

FORESEEN = {
    "update": ("dp_fedavg", {"level": "update"}),
    "update central": ("dp_fedsam", {"level": "update", "trust_model": "central"}),
    "update distributed": ("dp_scaffold", {"level": "update", "trust_model": "distributed"}),
    "secret": ("dp_fedavg", {"level": "update", "trust_model": "central", "sampling": "poisson"}),
    "drawn": ("dp_fedavg", {"level": "update", "trust_model": "central", "sampling": "without_replacement"}),
    "model": ("dp_fedsam", {"level": "model"}),
    "decay": ("dp_fedavg", {"level": "update", "noise_decay": 0.9}),
    "law": ("dp_fedlaw", {"level": "update"}),
    "sample": ("dp_fedavg", {"level": "sample"}),
    "sample drawn": ("dp_fedsam", {"level": "sample", "sampling": "without_replacement"}),
    "sample full": ("dp_fedavg", {"level": "sample", "sampling": "full", "adjacency": "zero_out"}),
    "sample decay": ("dp_fedavg", {"level": "sample", "noise_decay": 0.9}),
    "sample scaffold": ("dp_scaffold", {"level": "sample"}),
    "two releases": ("dp_fedsam", {"level": "sample", "ascent": "two_release"}),
    "own ascent": ("dp_fedsam", {"level": "sample", "ascent": "per_sample"}),
    "sharp sample": ("sam_adpfl", {"level": "sample"}),
    "budget": ("dp_fedavg", {"level": "sample", "noise_multiplier": 0.9, "target_epsilon": 4.0}),
    "budget update": ("dp_fedavg", {"level": "update", "noise_multiplier": 3.0, "target_epsilon": 4.0}),
}


@pytest.mark.parametrize("name", FORESEEN)
def test_the_foreseen_ledger_is_the_recorded_one(name: str) -> None:
    algorithm, privacy = FORESEEN[name]
    method: dict = {"name": algorithm}
    fl = {"rounds": 3, "num_clients": 5, "clients_per_round": 3, "batch_size": 64}
    if algorithm == "dp_scaffold":
        fl["max_local_steps"] = 3
    if algorithm == "dp_fedlaw":
        method["aggregate"] = {"proxy_epochs": 1}
    c = RunConfig(algorithm=method, privacy=privacy, fl=fl, partition="dirichlet", tracking={"enabled": False})
    recorded: list[Ledger] = []
    import fl_lightning.continuing as continuing

    class Kept(Ledger):
        def __init__(self, **settings: object) -> None:
            super().__init__(**settings)
            recorded.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuing, "Ledger", Kept)
        result = run(c)
    foreseen = foresee(c)
    got, expected = recorded[0].to_dict(), foreseen.ledger.to_dict()
    if algorithm == "sam_adpfl":  # its bounds adapt, its multipliers do not
        for account in (got, expected):
            for segment in account["segments"]:
                del segment["sensitivity_min"], segment["sensitivity_max"]
    assert got == expected
    assert result.final["epsilon"] == foreseen.ledger.epsilon()
    if c.privacy.target_epsilon is not None:
        assert result.final["epsilon"] <= c.privacy.target_epsilon
    if c.privacy.noise_multiplier is None:
        assert result.final["epsilon"] >= 0.95 * c.privacy.target_epsilon and result.final["stopped"] is None


def test_a_budget_ends_the_run_mid_round() -> None:
    """Case H25: q = 0.02, z = 0.9, delta = 1e-5, target 3, of 2000 planned steps; one step more would be too much."""
    c = RunConfig(
        algorithm="dp_fedavg",
        privacy={"level": "sample", "noise_multiplier": 0.9, "target_epsilon": 3.0},
        fl={"num_clients": 1, "rounds": 40, "batch_size": 29, "eval_every": 7},
        tracking={"enabled": False},
    )
    result = run(c)
    (release,) = result.final["privacy"]["releases"]
    steps = release["count"]
    assert 205 <= steps <= 225 and result.final["epsilon"] <= 3.0

    def spent(count: int) -> float:
        ledger = Ledger(unit="sample", delta=1e-5, adjacency="add_remove")
        plan = prepare(c).releases
        assert plan is not None
        ledger.record(1, 0, plan.visit(0, 1, 0.9, steps=count))
        return ledger.epsilon()

    assert spent(steps) == result.final["epsilon"] and spent(steps + 1) > 3.0
    stopped = result.final["stopped"]
    assert stopped["round"] == len(result.rounds) < 40 and "privacy.target_epsilon=3" in stopped["reason"]
    assert "budget ends after" in result.rounds[-1].notes[0] and result.final["test_accuracy"] is not None
    assert result.status == "finished" and result.badge == "PRIVATE"


def test_a_client_whose_budget_is_spent_stays_out_and_the_others_go_on() -> None:
    c = config(noise_multiplier=8.0, target_epsilon=3.0, fl={"num_clients": 6, "clients_per_round": 2, "rounds": 40})
    result = run(c)
    assert any("has spent its privacy budget" in note for r in result.rounds for note in r.notes)
    assert result.final["epsilon"] <= 3.0 and 0 < len(result.rounds) < 40
    with pytest.raises(PrivacyError, match="nothing was trained"):
        run(config(noise_multiplier=0.5, target_epsilon=0.1))


REFUSED = {
    "local amplification": ({"sampling": "poisson"}, "the server sees who takes part"),
    "shares of a random cohort": ({"sampling": "poisson", "trust_model": "distributed"}, "would not add up"),
    "poisson replace_one": (
        {"sampling": "poisson", "trust_model": "central", "adjacency": "replace_one"},
        "has no proof with privacy.sampling=poisson",
    ),
    "sample poisson replace_one": ({"level": "sample", "adjacency": "replace_one"}, "without_replacement"),
    "sample drawn add_remove": (
        {"level": "sample", "sampling": "without_replacement", "adjacency": "add_remove"},
        "use adjacency=replace_one",
    ),
    "small noise cohort": ({"trust_model": "central", "noise_cohort_size": 2}, "at least the cohort"),
    "local noise cohort": ({"noise_cohort_size": 20}, "knows no cohort"),
    "stray quantile": ({"quantile": {"lr": 0.1}}, "would be ignored"),
    "stray decay": ({"noise_decay_rounds": 2}, "would be ignored"),
    "no noise but a budget": ({"noise_multiplier": 0.0, "target_epsilon": 1.0}, "spends any budget at once"),
    "ascent without SAM": ({"level": "sample", "ascent": "two_release"}, "has no ascent"),
    "a Poisson mean of models": (
        {"level": "model", "trust_model": "central", "sampling": "poisson"},
        "a mean of models needs their number",
    ),
    "sample sizes": ({"trust_model": "trusted"}, "privacy.trust_model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_proof_or_no_effect_is_refused(name: str) -> None:
    privacy, words = REFUSED[name]
    with pytest.raises(InvalidConfig, match=words):
        config(**privacy)


def test_more_refusals_by_algorithm() -> None:
    with pytest.raises(InvalidConfig, match="uses each upload by itself"):
        config("dp_fedlaw", trust_model="central")
    with pytest.raises(InvalidConfig, match="equal weights"):
        config("sam_adpfl", trust_model="distributed")
    with pytest.raises(InvalidConfig, match="scalars show who took part"):
        config("sam_adpfl", trust_model="central", sampling="without_replacement")
    with pytest.raises(InvalidConfig, match="remember their visits"):
        config("dp_scaffold", {"max_local_steps": 3}, trust_model="central", sampling="without_replacement")
    with pytest.raises(InvalidConfig, match="model is for"):
        config("dp_scaffold", {"max_local_steps": 3}, level="model")
    with pytest.raises(InvalidConfig, match="two_release"):
        config("dp_fedsam", level="sample", ascent="two_release", sampling="without_replacement")


def test_noise_waits_for_nobody() -> None:
    """A round without an upload changes nothing unless the mechanism says that it must."""
    server = initial(torch.zeros(3), {}).server
    empty = fold([], [])
    assert noised(apply(), 1)(server, empty).w is server.w
    assert float(noised(apply(), 1, lambda s: 2.0)(server, empty).w.abs().sum()) > 0
