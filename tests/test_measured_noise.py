"""The noise of a run is measured, not believed: the same seed with and without it, on digits (case H08).

Both runs draw the same cohorts and batches, so what they differ by is the noise, up to what it did to training; where
that is more than one step away the bound is tiny, and the signal with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import RunConfig, run
from fl_lightning.build import prepare
from fl_lightning.config.faults import InvalidConfig
from fl_lightning.federation import Federation, fit, initial
from fl_lightning.foreseen import foresee
from fl_lightning.privacy import Ledger
from fl_lightning.records import Message, ServerState
from fl_lightning.rng import generator
from fl_lightning.uplink.stage import send

Z, C, LR = 1.7, 1e-3, 0.5
CLOSE = 0.05
"""Relative; LeNet5 on digits has 14,538 parameters, so a standard deviation is known to 0.6 %."""


@dataclass(frozen=True)
class Trained:
    """Rounds of a run: the states between them and the messages of each."""

    states: list[Federation]
    messages: list[list[Message]]
    ledger: Ledger | None = None

    def step(self, round: int) -> Tensor:
        return self.states[round].server.w - self.states[round - 1].server.w


def config_of(
    level: str, algorithm: str = "dp_fedavg", fl: dict | None = None, z: float = Z, **privacy: Any
) -> RunConfig:
    engine = {"kind": privacy.pop("engine", "debug"), "workers": privacy.pop("workers", 1)}
    clients = {"num_clients": 3, "rounds": 1, "batch_size": 16, "max_local_steps": 1}
    return RunConfig(
        algorithm={"name": algorithm, "local": {"lr": LR}},
        data={"name": "digits", "subset": 0.1},
        privacy={"level": level, "noise_multiplier": z, "clip_norm": C, **privacy},
        fl={**clients, **(fl or {})},
        engine=engine,
        tracking={"enabled": False},
    )


def trained(config: RunConfig) -> Trained:
    prepared = prepare(config)
    shield = prepared.algorithm.protection
    ledger = Ledger(unit=shield.unit, delta=shield.delta, adjacency=shield.adjacency)
    engine = prepared.engine()
    start = initial(prepared.objective.initial, prepared.objective.buffers())
    states, messages = [start], []
    try:
        for state, _, sent in fit(
            start,
            rounds=config.fl.rounds,
            cohort_of=lambda round: prepared.cohorts[round - 1],
            algorithm=prepared.algorithm,
            engine=engine,
            evaluate=lambda server: None,
            ledger=ledger,
        ):
            states.append(state)
            messages.append(sent)
    finally:
        engine.close()
    return Trained(states, messages, ledger)


def pair(level: str, **choices: Any) -> tuple[Trained, Trained, RunConfig]:
    """The run with its noise, and the same without."""
    config = config_of(level, **choices)
    of_noise = ("noise_decay", "noise_decay_rounds", "noise_cohort_size")
    still = {key: value for key, value in choices.items() if key not in of_noise}
    return trained(config), trained(config_of(level, **{**still, "z": 0.0})), config


def spread(noisy: Tensor, still: Tensor) -> float:
    return float((noisy.double() - still.double()).std())


def upload_release(message: Message) -> Any:
    return next(r for r in message.releases if "delta" in r.covers)


def counted(run_: Trained, config: RunConfig) -> None:
    """The ledger's segments have the noise over sensitivity of the releases that were made, and that was foreseen."""
    made = {float(f"{r.noise_multiplier:.12g}") for ms in run_.messages for m in ms for r in m.releases}
    assert run_.ledger is not None
    segments = {s.noise_multiplier for ms in run_.messages for m in ms for s in run_.ledger.counts_of(m.client)}
    assert segments == made
    reach = 2 if config.privacy.adjacency == "replace_one" else 1
    pairs = 2**0.5 if getattr(config.privacy, "ascent", None) == "two_release" else 1
    assert config.privacy.noise_multiplier / reach / pairs in [pytest.approx(m) for m in made]
    planned = foresee(config).ledger
    for client in {m.client for ms in run_.messages for m in ms}:
        assert {s.noise_multiplier for s in planned.counts_of(client)} == segments


# Whole clients.


def client_choices() -> list[dict[str, Any]]:
    found = []
    for level, trust, bound, sampling, engine in product(
        ("update", "model"),
        ("local", "central", "distributed"),
        ("fixed", "per_layer", "quantile"),
        ("full", "poisson", "without_replacement"),
        ("debug", "lightning"),
    ):
        choice = {"trust_model": trust, "clip_bound": bound, "sampling": sampling, "engine": engine}
        if engine == "lightning" and bound == "per_layer":
            continue  # where the noise stands does not depend on both
        try:
            config_of(level, **choice)
        except InvalidConfig:
            continue
        found.append({"level": level, **choice})
    return found


def bit_of(choices: dict[str, Any], cohort: int) -> float:
    """What the bit leaves of the update's multiplier, by hand: 1/z^2 = 1/z_D^2 + 1/(2 sigma_b)^2."""
    if choices["clip_bound"] != "quantile":
        return Z
    sigma = max(cohort / 20, Z)
    return 1 / math.sqrt(1 / Z**2 - 1 / (2 * sigma) ** 2)


@pytest.mark.parametrize("choices", client_choices(), ids=lambda c: "-".join(map(str, c.values())))
def test_client_noise_is_what_the_release_says(choices: dict[str, Any]) -> None:
    secret = choices["sampling"] != "full"
    fl = {"num_clients": 5, "clients_per_round": 3} if secret else {}
    noisy, still, config = pair(**choices, fl=fl)
    cohort = config.fl.cohort_size
    (release,) = {upload_release(m) for m in noisy.messages[0]}
    assert release.noise == pytest.approx(Z * C) and release.noise_multiplier == pytest.approx(
        Z * C / release.sensitivity
    )
    z = bit_of(choices, cohort)
    own = {"local": z * C, "central": 0.0, "distributed": z * C / math.sqrt(cohort)}[choices["trust_model"]]
    drawn = []
    for one, two in zip(noisy.messages[0], still.messages[0], strict=True):
        drawn.append(one.vectors["delta"] - two.vectors["delta"])
        assert spread(one.vectors["delta"], two.vectors["delta"]) == pytest.approx(own, rel=CLOSE, abs=1e-9)
    total = z * C * (math.sqrt(cohort) if choices["trust_model"] == "local" else 1.0) / cohort
    assert spread(noisy.step(1), still.step(1)) == pytest.approx(total, rel=CLOSE)
    if own and len(drawn) > 1:
        assert abs(float(torch.corrcoef(torch.stack(drawn))[0, 1])) < 0.05, "clients draw their own"
    counted(noisy, config)


def test_two_workers_add_the_same_noise() -> None:
    """To the bit: the noise is the client's, wherever it is computed."""
    one, two = (trained(config_of("update", engine="lightning", workers=n)) for n in (1, 2))
    still = trained(config_of("update", z=0.0))
    assert torch.equal(one.states[1].server.w, two.states[1].server.w)
    for a, b in zip(two.messages[0], still.messages[0], strict=True):
        assert spread(a.vectors["delta"], b.vectors["delta"]) == pytest.approx(Z * C, rel=CLOSE)


@pytest.mark.parametrize("trust", ["central", "distributed"])
@pytest.mark.parametrize("bound", ["fixed", "quantile"])
def test_a_larger_noise_cohort_divides_the_noise_on_the_mean(trust: str, bound: str) -> None:
    choices = {"trust_model": trust, "clip_bound": bound, "noise_cohort_size": 30}
    noisy, still, config = pair("update", **choices)
    assert spread(noisy.step(1), still.step(1)) == pytest.approx(bit_of(choices, 3) * C / 30, rel=CLOSE)
    assert run(config).badge == "NOT PRIVATE"


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
def test_decayed_noise_is_smaller_in_a_later_round_and_counted_so(trust: str) -> None:
    fl = {"rounds": 3}
    noisy, still, config = pair("update", trust_model=trust, noise_decay=0.5, noise_decay_rounds=1, fl=fl)
    for round in (1, 2, 3):
        z = Z * 0.5 ** (round - 1)
        on_mean = z * C / (math.sqrt(3) if trust == "local" else 3)
        assert spread(noisy.step(round), still.step(round)) == pytest.approx(on_mean, rel=CLOSE)
        assert upload_release(noisy.messages[round - 1][0]).noise == pytest.approx(z * C)
    assert not torch.allclose(noisy.step(1), noisy.step(2) * 2, atol=C / 10), "each round draws anew"
    counted(noisy, config)


def test_poisson_rounds_without_anybody_have_the_usual_noise() -> None:
    """Rounds are as noisy whoever came: the number who came is private."""
    fl = {"num_clients": 4, "clients_per_round": 1, "rounds": 12}
    noisy = trained(config_of("update", trust_model="central", sampling="poisson", fl=fl, clip_norm=1e-6))
    came = {len(sent) for sent in noisy.messages}
    assert 0 in came and max(came) > 1
    for round in range(1, 13):
        assert float(noisy.step(round).double().std()) == pytest.approx(Z * 1e-6, rel=CLOSE)


MANY = 3000
"""Draws of one number: its standard deviation is then known to 1.3 %."""


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
@pytest.mark.parametrize("larger", [None, 30])
def test_the_bits_of_the_quantile_carry_their_noise(trust: str, larger: int | None) -> None:
    """log C moves by -eta (b - gamma), which gives back b. One bit in four is -1/2, so b is not cut off at 0 or 1."""
    if trust == "local" and larger:
        pytest.skip("refused by the schema")
    sigma, cohort = 0.9, 20
    fl = {"num_clients": cohort, "batch_size": 1}
    quantile = {"clip_bound": "quantile", "quantile": {"bit_noise": sigma, "lr": 1e-3}, "noise_cohort_size": larger}
    prepared = prepare(config_of("update", fl=fl, trust_model=trust, **quantile))
    algorithm, seed, x = prepared.algorithm, prepared.config.seed, prepared.objective.initial
    told = {"cohort": float(cohort)} if trust == "distributed" else {}
    updates = [torch.full_like(x, 1.0 if k % 4 == 0 else 0.0) for k in range(cohort)]

    def sent(round: int, client: int) -> Message:
        message = Message(client, 1, 1, {"delta": updates[client]})
        return send(message, algorithm.uplink, generator(seed, "uplink", round, client), told)

    messages = [sent(1, k) for k in range(cohort)]
    folded = algorithm.aggregate(messages)
    rounds = range(MANY if trust == "central" else 1)
    moved = [algorithm.rule(ServerState(x, round=r), folded).extra["clip"] for r in rounds]
    sums = (torch.stack(moved) / C).log() / -1e-3 * cohort  # b - 1/2 = b - gamma
    shrunk = 1.0 if larger is None else cohort / larger
    if trust == "central":
        assert {m.scalars["below"] for m in messages} == {-0.5, 0.5}, "the trusted server sees the bits themselves"
        assert float(sums.std()) == pytest.approx(sigma * shrunk, rel=CLOSE)
        assert float(sums.mean()) == pytest.approx(cohort / 4, abs=0.1)
        return
    assert len(moved) == 1 and float(sums[0]) == pytest.approx(sum(m.scalars["below"] for m in messages), abs=1e-6)
    bits = torch.tensor([sent(r, 1).scalars["below"] for r in range(MANY)])
    own = sigma if trust == "local" else sigma * shrunk / math.sqrt(cohort)
    assert float(bits.std()) == pytest.approx(own, rel=CLOSE)


# One example.


def sample_choices() -> list[dict[str, Any]]:
    found = []
    for algorithm, bound, sampling, direction, engine in product(
        ("dp_fedavg", "dp_fedsam", "dp_scaffold", "sam_adpfl"),
        ("fixed", "per_layer"),
        ("poisson", "without_replacement", "full"),
        (None, "previous", "per_sample", "two_release"),
        ("debug", "lightning"),
    ):
        plain = bound == "fixed" and sampling == "poisson"
        if (direction is None) == (algorithm in ("dp_fedsam", "sam_adpfl")) or (not plain and algorithm != "dp_fedavg"):
            continue
        more = {} if direction is None else {"ascent": direction}
        choice = {"algorithm": algorithm, "clip_bound": bound, "sampling": sampling, "engine": engine, **more}
        try:
            config_of("sample", **choice)
        except InvalidConfig:
            continue
        found.append(choice)
    return found


@pytest.mark.parametrize("choices", sample_choices(), ids=lambda c: "-".join(map(str, c.values())))
def test_example_noise_is_what_the_release_says(choices: dict[str, Any]) -> None:
    """One step: y = w - lr (sum + noise)/(q n), so the upload carries lr/(q n) of it. Then four steps of tiny bound."""
    noisy, still, config = pair("sample", **choices)
    sizes = foresee(config).sizes
    for one, two in zip(noisy.messages[0], still.messages[0], strict=True):
        release = upload_release(one)
        assert release.noise == pytest.approx(Z * C) and release.count == 1
        batch = sizes[one.client] if choices["sampling"] == "full" else 16
        expected = LR * release.noise / batch
        assert spread(one.vectors["delta"], two.vectors["delta"]) == pytest.approx(expected, rel=CLOSE)
    counted(noisy, config)


def test_every_step_draws_its_own_noise() -> None:
    noisy, still, config = pair("sample", fl={"max_local_steps": 4, "local_epochs": 4, "rounds": 2}, noise_decay=0.5,
                                noise_decay_rounds=1)  # fmt: skip
    for round, (sent, quiet) in enumerate(zip(noisy.messages, still.messages, strict=True)):
        for one, two in zip(sent, quiet, strict=True):
            expected = LR * Z * 0.5**round * C / 16 * math.sqrt(one.steps)
            assert one.steps == 4 == upload_release(one).count
            assert spread(one.vectors["delta"], two.vectors["delta"]) == pytest.approx(expected, rel=CLOSE)
    counted(noisy, config)


# SAM-ADPFL.


@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize("rule", ["paper", "constant", "personalised"])
def test_sam_adpfl_noise_follows_its_bounds(trust: str, rule: str) -> None:
    """Local: factor_k z C_k on each; central: nu = z max_k lambda_k C_k on the weighted sum, and no less for any.

    The twin without noise on the update releases the same gaps, for their noise is of another stream.
    """
    raw = config_of("update", "sam_adpfl", trust_model=trust).to_dict()
    raw["algorithm"]["sharpness"] |= {"noise_rule": rule, "scalar_share": 0.05, "clip_max_ratio": 2.0}
    config = RunConfig(**raw)
    prepared = prepare(config)
    noisy = trained(config)
    sent = noisy.messages[0]
    bounds = [m.oracle["clip"] for m in sent]
    assert max(bounds) > 1.05 * min(bounds)
    for message, bound in zip(sent, bounds, strict=True):
        release = upload_release(message)
        assert release.sensitivity == pytest.approx(2 * bound)
        counted_noise = release.noise if release.counted_noise is None else release.counted_noise
        assert counted_noise <= release.noise * (1 + 1e-12)
        if rule != "personalised":
            assert release.noise_multiplier == pytest.approx(Z / 2)
        if trust == "local":  # a signal of norm C_k has a standard deviation of C_k / sqrt(d), 1/200 of the noise's
            assert float(message.vectors["delta"].double().std()) == pytest.approx(release.noise, rel=CLOSE)
    if trust == "central":
        weights = prepared.algorithm.aggregate(sent).weights
        owed = [w * upload_release(m).noise for w, m in zip(weights, sent, strict=True)]
        assert float(noisy.step(1).double().std()) == pytest.approx(max(owed), rel=CLOSE)
        for weight, bound, message in zip(weights, bounds, sent, strict=True):
            enjoyed = max(owed) / (weight * 2 * bound)
            assert enjoyed >= upload_release(message).noise_multiplier * (1 - 1e-9)


@pytest.mark.parametrize("level", ["sample", "update"])
def test_the_gap_carries_its_declared_noise(level: str) -> None:
    """The same raw gap, announced in many rounds; its noise over its sensitivity is z sqrt((1 - share) / share)."""
    raw = config_of(level, "sam_adpfl").to_dict()
    raw["algorithm"]["sharpness"]["scalar_share"] = 0.2
    prepared = prepare(RunConfig(**raw))
    message, seed = Message(0, 50, 1, {}, {"gap": 0.2}), prepared.config.seed
    told = [send(message, prepared.algorithm.announcements, generator(seed, "announce", r)) for r in range(MANY)]
    (release,) = told[0].releases
    assert release.noise_multiplier == pytest.approx(2 * Z)
    assert release.sensitivity == pytest.approx(0.5 if level == "update" else 0.5 / 50)
    gaps = torch.tensor([m.scalars["gap"] for m in told], dtype=torch.float64)
    assert float(gaps.std()) == pytest.approx(release.noise, rel=CLOSE)
    assert float(gaps.mean()) == pytest.approx(0.2, abs=4 * release.noise / math.sqrt(MANY))
    ran = trained(prepared.config)
    assert release.noise_multiplier in [pytest.approx(r.noise_multiplier) for r in ran.messages[0][0].releases]
    assert ran.ledger is not None and 2 in {round(s.noise_multiplier / Z, 6) for s in ran.ledger.counts_of(0)}


# What the noise and the bound do to learning (case H08).

LEVELS = [("sample", "local"), ("update", "local"), ("update", "central"), ("update", "distributed")]
LEVELS += [("model", "local"), ("model", "central"), ("model", "distributed")]


def accuracies(level: str, trust: str, algorithm: str, z: float, bound: float, seeds: Sequence[int]) -> Tensor:
    more = {} if level == "sample" else {"trust_model": trust}
    found = []
    for seed in seeds:
        raw = config_of(level, algorithm, z=z, clip_norm=bound, engine="debug", **more).to_dict()
        raw |= {"seed": seed, "data": {"name": "digits"}}
        raw["fl"] |= {"rounds": 2, "num_clients": 2, "batch_size": 64, "max_local_steps": 8, "eval_every": 2}
        found.append(run(RunConfig(**raw)).final["test_accuracy"])
    return torch.tensor(found)


@pytest.mark.parametrize("algorithm", ["dp_fedavg", "dp_fedsam"])
@pytest.mark.parametrize(("level", "trust"), LEVELS)
def test_noise_of_a_thousand_bounds_leaves_chance(level: str, trust: str, algorithm: str) -> None:
    """Three standard errors of a mean over seeds; an accuracy of one noise model has a spread of its own."""
    found = accuracies(level, trust, algorithm, 1000.0, 10.0, range(5))
    error = max(float(found.std()), math.sqrt(0.09 / 359)) / math.sqrt(len(found))
    assert abs(float(found.mean()) - 0.1) <= 3 * error
    assert float(found.max()) < 0.4


@pytest.mark.parametrize("algorithm", ["dp_fedavg", "dp_fedsam"])
@pytest.mark.parametrize("level", ["sample", "update", "model"])
def test_without_noise_the_same_run_learns(level: str, algorithm: str) -> None:
    """Or chance would show nothing about the noise."""
    assert float(accuracies(level, "local", algorithm, 0.0, 10.0, [1])) > 0.4


@pytest.mark.parametrize("algorithm", ["dp_fedavg", "dp_fedsam", "sam_adpfl"])
@pytest.mark.parametrize(("level", "trust"), LEVELS[:3])
def test_a_tiny_bound_without_noise_barely_moves_the_weights(level: str, trust: str, algorithm: str) -> None:
    fl = {"rounds": 2, "max_local_steps": 4, "local_epochs": 4}
    more = {} if level == "sample" else {"trust_model": trust}
    moved = trained(config_of(level, algorithm, fl=fl, z=0.0, clip_norm=1e-6, **more))
    # A step moves by lr times at most the batch over its expectation, say 2; SAM-ADPFL's bound may rise to 4 C.
    most = 4e-6 * (4 * LR * 2 if level == "sample" else 1)
    for round in (1, 2):
        assert 0 < float(moved.step(round).norm()) <= most
