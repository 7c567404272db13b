"""SAM-ADPFL: Eq. 12-16 against reference numbers, the strict mode's promises, and what it reduces to."""

import math
from dataclasses import replace

import pytest
import torch
from federations import digit_side, start, train
from golden_cases import assert_close, cases

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
from fl_lightning.algorithms.sam_adpfl import Sharpness, sam_adpfl
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.errors import ConfigError
from fl_lightning.federation import run_round
from fl_lightning.local.optimizers import sgd
from fl_lightning.privacy import compose, epsilon, gaussian_delta_exact, gaussian_epsilon_exact
from fl_lightning.privacy.paper import classical_sigma, eq16_epsilon, eq16_sigma, scaled_noise_divergence
from fl_lightning.records import Message, Release, weights_sha256
from fl_lightning.server.sharpness import SEEN, SPENT, filtered_factor
from fl_lightning.uplink.bounds import SharpnessBounds, bounded
from fl_lightning.uplink.clip_noise import clip
from fl_lightning.uplink.scalars import clipped, laplace_scalars, laplace_scale
from fl_lightning.uplink.stage import send

FILE = "sharpness.json"
K = 4
EVERY_ROUND = tuple(tuple(range(1, 9)) for _ in range(K))


def by_id(case: dict) -> str:
    return case["id"]


def adpfl(level: str = "update", *, mu: float = 10.0, rho: float = 0.05, z: float = 0.1, **bounds: object) -> Algorithm:
    sharp = Sharpness(SharpnessBounds(1.0, **bounds), multiplier=1.0)
    adjacency = "add_remove" if level == "sample" else "replace_one"
    shield = Protection(level, 1.0, (z,) * K, adjacency)
    return sam_adpfl(sgd(0.1), rho=rho, mu=mu, protection=shield, sharp=sharp, visits=EVERY_ROUND)


@pytest.mark.parametrize("case", cases(FILE, "eq13"), ids=by_id)
def test_eq13(case: dict) -> None:
    i, expected = case["inputs"], case["expected"]
    literal = SharpnessBounds(i["C_base"], i["alpha"], i["C_min"], strict=False)
    if isinstance(expected, dict):
        strict = replace(literal, clip_max=4.0, strict=True)
        assert_close(strict.clips(bounded(i["S"], 1e-3, 1.0)), expected["strict"], case["tol"])
        expected = expected["paper"]
    assert_close(literal.clips(i["S"]), expected, case["tol"])


@pytest.mark.parametrize("case", cases(FILE, "eq14"), ids=by_id)
def test_eq14(case: dict) -> None:
    i = case["inputs"]
    strict = "r_max" in i
    bounds = SharpnessBounds(1.0, noise_rule="paper", xi=i["xi"], factor_max=i.get("r_max", 1.0), strict=strict)
    factors = bounds.factors(i["S"])
    sigmas = [i["sigma_base"] * factor for factor in factors]
    assert_close(sigmas, case["expected"] if strict else case["expected"]["sigma"], case["tol"])
    assert (min(factors) >= 1) == strict  # Eq. 14 as printed always leaves the flattest client below sigma_base


@pytest.mark.parametrize("case", cases(FILE, "eq16", "sigma_base", "thm1_gap", "eq6", "variance_leak"), ids=by_id)
def test_formulas(case: dict) -> None:
    i, expected, tol = case["inputs"], case["expected"], case["tol"]
    group = case["group"]
    if group == "eq16":
        plain = eq16_epsilon(i["sigma"] / (2 if "adjacency" in i else 1), i["T"], i["delta"], i.get("eps_scalars", 0.0))
        assert_close(plain, expected["eps_eq16"] if isinstance(expected, dict) else expected, tol)
        if isinstance(expected, dict):
            exact = gaussian_epsilon_exact(i["sigma"] / (2 if "adjacency" in i else 1), i["T"], i["delta"])
            assert_close(exact, expected["eps_exact_gaussian"], tol)
    elif group == "sigma_base":
        assert_close(eq16_sigma(i["eps_model"], i["T"], i["delta"]), expected["sigma_eq16"], tol)
        assert gaussian_epsilon_exact(expected["sigma_exact"], i["T"], i["delta"]) == pytest.approx(
            i["eps_model"], rel=1e-6
        )
    elif group == "thm1_gap":
        bounds = SharpnessBounds(1.0, noise_rule="paper", xi=i["xi"], strict=False)
        least = i["sigma_base"] * min(bounds.factors(i["S"]))
        assert_close(eq16_epsilon(i["sigma_base"], i["T"], i["delta"]), expected["eps_claimed"], tol)
        assert_close(eq16_epsilon(least, i["T"], i["delta"]), expected["eps_min_client"], tol)
    elif group == "variance_leak":
        assert_close(scaled_noise_divergence(i["d"], i["std_ratio"], i["order"]), expected, tol)
    elif "actual_delta" in case["id"]:
        assert_close(gaussian_delta_exact(i["sigma"], 1, i["eps"]), expected, tol)
    elif "classic" in case["id"]:
        assert_close(classical_sigma(i["sensitivity"], i["eps"], i["delta"]), expected, tol)
    else:
        assert gaussian_delta_exact(expected / i["sensitivity"], 1, i["eps"]) == pytest.approx(i["delta"], rel=1e-6)


@pytest.mark.parametrize("case", [c for c in cases(FILE, "scalar") if "laplace_rdp" not in c["id"]], ids=by_id)
def test_scalar_budgets(case: dict) -> None:
    i, expected, tol = case["inputs"], case["expected"], case["tol"]
    if "laplace_scale" in case["id"]:
        scale = laplace_scale(i["bound"], i["eps_scalars_per_round"], i["n_scalars"])
        assert_close(scale, expected["b"], tol)
        assert_close(scale * math.sqrt(2), expected["std"], tol)
    elif "compose" in case["id"]:
        each = Release("laplace", "client", 1.0, 1 / i["eps0_each"], count=i["n_scalars"] * i["T"])
        assert_close(epsilon(compose([each]), i["delta"]), expected["eps_rdp"], {"rel": 2e-3})
        assert_close(i["n_scalars"] * i["T"] * i["eps0_each"], expected["eps_basic"], tol)
    elif "joint" in case["id"]:
        updates = Release("gaussian", "client", 1.0, i["sigma"], count=i["T"])
        each = Release("laplace", "client", 1.0, 1 / i["eps0_each"], count=i["n_scalars"] * i["T"])
        paper = eq16_epsilon(i["sigma"], i["T"], i["delta"])
        assert epsilon(compose([updates, each]), i["delta"]) <= expected["eps_joint_rdp"] * (1 + 1e-3)
        assert_close(paper + i["n_scalars"] * i["eps0_each"], expected["eps_paper"], tol)
        assert_close(paper + i["n_scalars"] * i["eps0_each"] * i["T"], expected["eps_paper_fixed"], tol)
    else:
        pytest.skip("a closed form of the feasibility plan")


# What the strict mode promises.


@pytest.mark.parametrize("rule", ["paper", "constant", "personalised"])
def test_strict_update_level_declares_everything_at_sigma_base_or_more(rule: str) -> None:
    side = digit_side(adpfl(noise_rule=rule), (20, 40, 60, 80))
    federation, _, messages = train(side, LightningEngine(side), 2)
    for message in messages:
        assert message.undeclared == ()
        scalar, update = message.releases
        assert scalar.covers == ("gap",)
        assert scalar.sensitivity == 0.5
        assert update.sensitivity == pytest.approx(2 * update.noise / (0.1 * _factor(update)), rel=1e-9)
        if rule != "personalised":
            assert update.noise_multiplier == pytest.approx(0.1 / 2)
            assert update.noise >= update.counted_noise
        noise_std = float(message.vectors["delta"].std())
        assert noise_std == pytest.approx(update.noise, rel=0.2) or noise_std > update.noise  # signal on top
    assert not torch.isnan(federation.server.extra[SEEN]).any()


def _factor(update: Release) -> float:
    return update.noise / (0.1 * update.sensitivity / 2)


def test_bounds_follow_the_released_gaps_and_nothing_else() -> None:
    side = digit_side(adpfl(noise_rule="paper"), (20, 40, 60, 80))
    _, _, messages = train(side, DebugEngine(side), 1)
    gaps = bounded([m.scalars["gap"] for m in messages], Sharpness(SharpnessBounds(1.0)).floor, 0.5)
    expected = SharpnessBounds(1.0, noise_rule="paper").clips(gaps)
    assert [m.releases[1].sensitivity / 2 for m in messages] == pytest.approx(expected, rel=1e-12)


def test_renyi_filter_never_overspends() -> None:
    rng, budget, factor_max = torch.Generator().manual_seed(0), 30, 4.0
    for trial in range(50):
        spent = 0.0
        for later in reversed(range(budget)):
            wanted = float(torch.rand((), generator=rng)) * 2 + 0.25 if trial % 2 else 0.25
            factor = filtered_factor(wanted, budget, spent, later, factor_max)
            assert wanted <= factor <= factor_max or factor == wanted
            spent += factor**-2
        assert spent <= budget + 1e-9
    assert filtered_factor(2.0, budget, 0.0, budget - 1, factor_max) == 2.0  # asked for no more than it may spend


def test_personalised_noise_ends_within_the_target() -> None:
    config = RunConfig(
        algorithm={"name": "sam_adpfl", "sharpness": {"noise_rule": "personalised"}},
        privacy={"level": "update", "target_epsilon": 6.0},
        fl={"num_clients": 5, "clients_per_round": 3, "rounds": 6},
        tracking={"enabled": False},
    )
    result = run(config)
    assert result.badge == "PRIVATE"
    assert result.final["epsilon"] <= 6.0


@pytest.mark.parametrize("level", ["sample", "update"])
def test_target_epsilon_covers_scalars_and_updates(level: str) -> None:
    config = RunConfig(
        algorithm="sam_adpfl",
        privacy={"level": level, "target_epsilon": 4.0},
        fl={"rounds": 2},
        tracking={"enabled": False},
    )
    result = run(config)
    assert result.badge == "PRIVATE"
    assert 0.95 * 4.0 <= result.final["epsilon"] <= 4.0
    assert {"gap", "delta"} <= {name for r in result.final["privacy"]["releases"] for name in r["covers"]}


def test_sample_level_bounds_lag_one_visit() -> None:
    side = digit_side(adpfl("sample", noise_rule="paper"), (40, 60, 80, 100), batch_size=20)
    first, messages, _ = run_round(start(side), range(K), side.algorithm, DebugEngine(side), None)
    assert {m.releases[0].sensitivity for m in messages} == {1.0}  # nothing released yet: C_base for all
    _, later, _ = run_round(first, range(K), side.algorithm, DebugEngine(side), None)
    expected = SharpnessBounds(1.0, noise_rule="paper").clips(first.server.extra[SEEN].tolist())
    assert [m.releases[0].sensitivity for m in later] == pytest.approx(expected)
    assert [m.releases[1].sensitivity for m in later] == pytest.approx([0.5 / n for n in (40, 60, 80, 100)])


def test_one_example_moves_the_private_gap_by_at_most_its_sensitivity() -> None:
    """The declared B_S / n_k holds for the worst neighbour we can make: one wrongly labelled example."""
    ends = []
    for wrong in (False, True):
        side = digit_side(adpfl("sample", z=0.0), (40, 1, 1, 1), batch_size=20)
        from fl_lightning.local.measures import private_gap
        from fl_lightning.local.solver import Context, SolverState

        if wrong:
            side.store.labels[3] = (side.store.labels[3] + 5) % 10
        w = side.objective.initial
        ctx = Context(
            0, w, side.objective, torch.Generator(), 1.0, examples=lambda s=side: [s.store.batch(s.shards[0])]
        )
        state = SolverState(w, (), previous=torch.ones_like(w), steps=1)
        ends.append(private_gap(5.0, 0.5)(state, ctx, []).scalars["gap"])
    assert 0 < abs(ends[0] - ends[1]) <= 0.5 / 40 + 1e-6


def test_an_example_without_a_finite_loss_moves_the_private_gap_no_further() -> None:
    from fl_lightning.local.measures import private_gap
    from fl_lightning.local.solver import Context, SolverState

    class Losses:
        def __init__(self, odd: float) -> None:
            self.losses = torch.tensor([1.0] * 39 + [odd])

        def example_losses(self, w: torch.Tensor, batch: object) -> torch.Tensor:
            return self.losses * (1 + w[0])

    state = SolverState(torch.zeros(1), (), previous=torch.ones(1), steps=1)
    gaps = []
    for odd in (1.0, math.nan, math.inf):
        ctx = Context(0, torch.zeros(1), Losses(odd), torch.Generator(), 1.0, examples=lambda: [None])
        gaps.append(private_gap(0.1, 0.5)(state, ctx, []).scalars["gap"])
    assert gaps[0] == pytest.approx(0.1)
    assert all(math.isfinite(gap) for gap in gaps)
    assert max(gaps) - min(gaps) <= 0.5 / 40 + 1e-6


# The paper's literal mode.


def test_paper_mode_is_not_private_and_shows_its_nominal_epsilon() -> None:
    config = RunConfig(
        algorithm="sam_adpfl",
        privacy={"level": "update", "mode": "paper", "target_epsilon": 10.0},
        fl={"rounds": 3},
        tracking={"enabled": False},
    )
    result = run(config)
    assert result.badge == "NOT PRIVATE"
    facts = result.final["privacy"]
    assert facts["nominal_epsilon"] == pytest.approx(10.0)
    sigma = eq16_sigma(10.0 - 0.5, 3, 1e-5)
    assert facts["noise_multiplier"] == {"min": pytest.approx(sigma), "max": pytest.approx(sigma)}


def test_laplace_scalars_have_the_declared_spread() -> None:
    stage = laplace_scalars({"sharpness": 0.5}, 0.1, adjacency="zero_out")
    noise = torch.Generator().manual_seed(1)
    message = Message(0, 5, 1, {}, {"sharpness": 0.2})
    drawn = torch.tensor([send(message, (stage,), noise).scalars["sharpness"] for _ in range(20_000)])
    assert float(drawn.mean()) == pytest.approx(0.2, abs=0.2)
    assert float(drawn.std()) == pytest.approx(math.sqrt(2) * 0.5 / 0.1, rel=0.03)


# Values that are not numbers must not show through the noise.


def test_what_is_not_finite_is_bounded_too() -> None:
    assert clipped(math.nan, 0.5) == clipped(math.inf, 0.5) == 0.5
    assert clipped(-math.inf, 0.5) == 0.0
    for bad in (math.nan, math.inf):
        assert torch.equal(clip(torch.tensor([1.0, bad]), 1.0), torch.zeros(2))


# What it reduces to, and engines.


def test_switched_off_it_is_dp_fedavg() -> None:
    plain = adpfl(mu=0.0, rho=0.0, clip_alpha=0.0, noise_rule="constant")
    reference = dp_fedavg(sgd(0.1), protection=plain.protection)
    ends = []
    for algorithm in (plain, reference):
        side = digit_side(algorithm, (20, 40, 60, 80), dtype=torch.float64)
        ends.append(train(side, DebugEngine(side), 2)[0].server.w)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-13)  # the weights' softmax rounds differently


@pytest.mark.parametrize("level", ["sample", "update"])
@pytest.mark.parametrize("rule", ["paper", "constant"])
def test_engines_agree_bit_for_bit(level: str, rule: str) -> None:
    hashes = set()
    for engine in (DebugEngine, LightningEngine):
        side = digit_side(adpfl(level, noise_rule=rule), (20, 40, 60, 80))
        hashes.add(weights_sha256(train(side, engine(side), 3)[0].server.w, {}))
    assert len(hashes) == 1


def test_spent_is_part_of_the_server_state() -> None:
    side = digit_side(adpfl(noise_rule="personalised"), (20, 40, 60, 80))
    federation, _, _ = train(side, DebugEngine(side), 3)
    assert ((federation.server.extra[SPENT] > 0) & (federation.server.extra[SPENT] <= 8)).all()


@pytest.mark.parametrize("name", ["config_a", "config_b", "config_c", "config_d"])
def test_ablations_are_pure_configuration(name: str) -> None:
    from fl_lightning import load_config

    config = load_config([f"experiment={name}"])
    assert config.algorithm.name == "sam_adpfl"
    sharp, server = config.algorithm.sharpness, config.algorithm.aggregate
    assert (server.mu == 0) == (name == "config_a")
    assert (config.algorithm.local.rho == 0) == (name == "config_b")
    assert (sharp.clip_alpha == 0 and sharp.noise_rule == "constant") == (name == "config_c")


@pytest.mark.parametrize(
    ("sharpness", "privacy", "key"),
    [
        ({}, {"level": "sample", "mode": "paper"}, "privacy.mode"),
        ({"statistics": "current"}, {"level": "sample"}, "algorithm.sharpness.statistics"),
        ({"noise_rule": "personalised"}, {"level": "sample"}, "algorithm.sharpness.noise_rule"),
        ({"xi": 1e-3, "noise_rule": "constant"}, {"level": "update"}, "algorithm.sharpness.xi"),
        ({"loss_bound": 3}, {"level": "update"}, "algorithm.sharpness.loss_bound"),
        ({"statistics": "lagged"}, {"level": "update", "mode": "paper"}, "algorithm.sharpness.statistics"),
    ],
)
def test_contradictions_are_refused_by_name(sharpness: dict, privacy: dict, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        RunConfig(algorithm={"name": "sam_adpfl", "sharpness": sharpness}, privacy=privacy)
