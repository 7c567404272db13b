"""Neighbours cannot move a release further than it declares: a search for those that do, through the real rounds.

Both neighbours draw the same noise, so it cancels and what is left is what the data moved. A quadratic client with
A = 0 uploads whatever vector it likes, which makes every update and every example's gradient the adversary's to choose.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import pytest
import torch
from federations import small_net, train
from golden_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fl_lightning import RunConfig, run
from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.analysis.quadratic import ClientNumbers, Quadratic, QuadraticObjective
from fl_lightning.client.visit import ClientSide, Schedule
from fl_lightning.config.faults import InvalidConfig
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.engine.objective import ModelObjective
from fl_lightning.federation import Federation, fit, initial, run_round
from fl_lightning.local.solver import Batch, Context, SolverState
from fl_lightning.local.transforms import ascent, clipped_sum
from fl_lightning.mechanism import protected, quantile_bit
from fl_lightning.methods import build_algorithm
from fl_lightning.privacy import Ledger
from fl_lightning.records import Aggregate, Message, RoundRecord
from fl_lightning.releases import ReleasePlan
from fl_lightning.rng import generator
from fl_lightning.server.sharpness import SEEN
from fl_lightning.shield import protection, solve_noise
from fl_lightning.uplink.clip_noise import clip
from fl_lightning.uplink.stage import send

D, K, C = 6, 3, 0.8
LAYERS = (slice(0, 2), slice(2, 6))
SLACK = 1 + 2e-5  # float32
TIGHT = 0.97
BASE = [torch.linspace(-1, 1, D) * 0.2, torch.linspace(1, -1, D) ** 2]
"""What the clients that no neighbour touches upload."""

UNIT = torch.tensor([0.5, -0.5, 0.1, 0.2, -0.6, 0.3])
UNIT = UNIT / UNIT.norm()
AXIS = torch.eye(D)[0]


def candidates() -> list[Tensor]:
    """Vectors a bound may fail on: antipodal, on the edge, of one layer, tiny, huge, not numbers."""
    spread = torch.cat([torch.tensor([1.0, 1.0]) / 2, torch.ones(4) / 8**0.5])  # both layers alike
    sizes = [1e-30, 1e-6, C * (1 - 1e-6), C, C * (1 + 1e-6), 30.0, 1e6, 1e8, 1e15, 1e25, 3e38]
    found = [sign * size * u for u in (UNIT, AXIS, spread) for size in sizes for sign in (1, -1)]
    odd = [torch.zeros(D), *(torch.full((D,), x) for x in (math.nan, math.inf, -math.inf))]
    mixed = [torch.where(torch.arange(D) == 2, x, UNIT) for x in (math.nan, math.inf, 3e38)]
    return [*found, *odd, *mixed]


@dataclass(frozen=True)
class Played:
    """One round: what was before it, what came of it, what it told."""

    before: Federation
    after: Federation
    messages: list[Message]
    aggregate: Aggregate

    @property
    def step(self) -> Tensor:
        return self.after.server.w - self.before.server.w


def config_of(algorithm: str, level: str, local: Mapping[str, Any] | None = None, **privacy: object) -> RunConfig:
    secret = level != "sample" and privacy.get("sampling") == "poisson"
    return RunConfig(
        algorithm={"name": algorithm, "local": {"lr": 1.0, **(local or {})}},
        privacy={"level": level, "noise_multiplier": 1.3, "clip_norm": C, **privacy},
        fl={"num_clients": K, "clients_per_round": 2 if secret else K, "rounds": 4, "max_local_steps": 1},
        tracking={"enabled": False},
    )


def algorithm_of(config: RunConfig, sizes: Sequence[int] = (1,) * K) -> Algorithm:
    visits = [list(range(1, 5))] * K
    noise = solve_noise(config, sizes, visits)
    shield = protection(config, noise, LAYERS)
    built = build_algorithm(config, shield, noise=noise, visits=visits)
    return protected(built, config, ReleasePlan(config, sizes, visits))


def side_of(config: RunConfig, updates: Sequence[Tensor | None]) -> ClientSide:
    """Clients whose only step leads from x to x + update; None holds no data."""
    shards = [torch.tensor([] if u is None else [k], dtype=torch.int64) for k, u in enumerate(updates)]
    losses = [Quadratic(torch.zeros(D, D), torch.zeros(D) if u is None else u) for u in updates]
    return ClientSide(
        algorithm_of(config), QuadraticObjective(losses), ClientNumbers(), shards, Schedule(1, 1, 1), config.seed
    )


def play(
    config: RunConfig,
    updates: Sequence[Tensor | None],
    x: Tensor,
    extra: Mapping[str, Tensor] | None = None,
    cohort: Sequence[int] = range(K),
) -> Played:
    side, start = side_of(config, updates), initial(x, {})
    start = replace(start, server=replace(start.server, extra=extra or {}))
    after, messages, aggregate = run_round(start, cohort, side.algorithm, DebugEngine(side), None)
    return Played(start, after, messages, aggregate)


# Whole clients: level update and model, under every trust model, bound, sampling and adjacency that is allowed.


@dataclass(frozen=True)
class Case:
    """One allowed mechanism, and the round that an adversary plays against it."""

    algorithm: str
    level: str
    trust: str
    adjacency: str
    bound: str
    sampling: str
    x: Tensor
    extra: Mapping[str, Tensor]

    def __str__(self) -> str:
        return f"{self.algorithm}-{self.level}-{self.trust}-{self.adjacency}-{self.bound}-{self.sampling}"

    @cached_property
    def config(self) -> RunConfig:
        return config_of(
            self.algorithm,
            self.level,
            trust_model=self.trust,
            adjacency=self.adjacency,
            clip_bound=self.bound,
            sampling=self.sampling,
        )

    def play(self, update: Tensor | None, away: bool = False) -> Played:
        """The round in which client 0 would upload `update`, or is not there."""
        moved = update if update is None or self.level == "update" else update - self.x  # the model itself is clipped
        cohort = range(1, K) if away else range(K)
        return play(self.config, [moved, *BASE], self.x, self.extra, cohort)

    def others(self) -> list[Played]:
        """The neighbours whose data say nothing, where one of two must."""
        if self.adjacency == "add_remove" and self.sampling == "poisson":
            return [self.play(None, away=True)]
        return [self.play(None)]

    @cached_property
    def noise(self) -> tuple[float, float]:
        """Standard deviations on the vector and on the bit, inf where no bit is released."""
        z, bound = self.config.privacy.noise_multiplier, float(self.extra.get("clip", C))
        bit = quantile_bit(self.config.privacy, float(self.config.fl.cohort_size), z)
        return (z * bound, math.inf) if bit is None else (bound / (z**-2 - (2 * bit.noise) ** -2) ** 0.5, bit.noise)

    def cost(self, one: Played, two: Played) -> float:
        """(what the data moved / the noise on it)^2 over what is declared, squared: at most 1."""
        (release,) = next(m for m in (*one.messages, *two.messages) if m.client == 0).releases
        if self.trust == "local":
            moved = _distance(one.messages[0].vectors["delta"], two.messages[0].vectors["delta"])
            bits = [p.messages[0].scalars.get("below", 0.0) for p in (one, two)]
        else:
            moved = self.config.fl.cohort_size * _distance(one.step, two.step)
            bits = [sum(m.scalars.get("below", 0.0) for m in p.messages) for p in (one, two)]
        cost = (moved / self.noise[0]) ** 2 + ((bits[0] - bits[1]) / self.noise[1]) ** 2
        return cost * release.noise_multiplier**2


def _distance(one: Tensor, two: Tensor) -> float:
    """In double precision; not a number counts as beyond every bound."""
    found = float(torch.linalg.vector_norm(one.double() - two.double()))
    return found if math.isfinite(found) else math.inf


def client_cases() -> Iterator[Case]:
    choices = product(
        ("dp_fedavg", "dp_fedsam", "dp_scaffold"),
        ("update", "model"),
        ("local", "central", "distributed"),
        ("add_remove", "zero_out", "replace_one"),
        ("fixed", "per_layer", "quantile"),
        ("full", "poisson", "without_replacement"),
    )
    for choice in choices:
        level, bound = choice[1], choice[4]
        if choice[0] != "dp_fedavg" and bound != "fixed":
            continue  # the uplink is the same
        extra = {"clip": torch.tensor(0.37, dtype=torch.float64)} if bound == "quantile" else {}  # it has adapted
        case = Case(*choice, x=UNIT * 5 if level == "model" else UNIT, extra=extra)
        try:
            _ = case.config
        except InvalidConfig:
            continue
        yield case


CASES = list(client_cases())


def test_every_mechanism_is_under_attack() -> None:
    found = {(c.level, c.trust, c.bound) for c in CASES}
    assert found == {
        *product(("update",), ("local", "central", "distributed"), ("fixed", "per_layer", "quantile")),
        *product(("model",), ("local", "central", "distributed"), ("fixed", "per_layer")),
    }
    assert {c.adjacency for c in CASES} == {"add_remove", "zero_out", "replace_one"}
    assert {c.sampling for c in CASES} == {"full", "poisson", "without_replacement"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_neighbours_move_a_client_release_beyond_its_sensitivity(case: Case) -> None:
    scaled = [v * (0.37 / C) for v in candidates()] if case.bound == "quantile" else candidates()
    rounds = [(str(v.tolist()), case.play(v)) for v in scaled]
    nothing = [("no data", played) for played in case.others()]
    pairs = combinations([*rounds, *nothing], 2) if case.adjacency == "replace_one" else product(rounds, nothing)
    declared = rounds[0][1].messages[0].releases[0].sensitivity
    reach = 2 if case.adjacency == "replace_one" else 1
    assert declared == pytest.approx(reach * float(case.extra.get("clip", C)))
    worst, who = max(((case.cost(a[1], b[1]), (a[0], b[0])) for a, b in pairs), key=lambda found: found[0])
    assert worst <= SLACK**2, f"{who} move it by {worst**0.5} of its sensitivity"
    assert worst >= TIGHT**2, f"the search found {worst**0.5} only: it cannot fail"


@pytest.mark.parametrize("case", [c for c in CASES if c.algorithm == "dp_fedavg"], ids=str)
def test_climbing_finds_no_worse_neighbour(case: Case) -> None:
    """Random restarts, sign flips of coordinates and rescaling, uphill."""
    rng = torch.Generator().manual_seed(len(str(case)))
    fixed = case.others()[0] if case.adjacency != "replace_one" else case.play(-UNIT * 3)
    worst = 0.0
    for _ in range(2):
        v = torch.randn(D, generator=rng) * 10 ** float(torch.randint(-3, 6, (), generator=rng))
        best = case.cost(case.play(v), fixed)
        for _ in range(12):
            flips = torch.where(torch.rand(D, generator=rng) < 0.3, -1.0, 1.0)
            tried = v * flips * 10 ** float(torch.randn((), generator=rng))
            found = case.cost(case.play(tried), fixed)
            if found > best:
                v, best = tried, found
        worst = max(worst, best)
    assert 0 < worst <= SLACK**2


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([c for c in CASES if c.adjacency == "replace_one" and c.algorithm == "dp_fedavg"]),
    st.lists(st.floats(width=32), min_size=D, max_size=D),
    st.lists(st.floats(width=32), min_size=D, max_size=D),
)
def test_any_two_updates(case: Case, one: list[float], two: list[float]) -> None:
    assert case.cost(case.play(torch.tensor(one)), case.play(torch.tensor(two))) <= SLACK**2


LISTS = st.lists(st.floats(width=32), min_size=12, max_size=12)


@settings(max_examples=300, deadline=None)
@given(LISTS, st.floats(1e-6, 1e6), st.booleans())
def test_a_clipped_vector_lies_in_its_ball(values: list[float], bound: float, layered: bool) -> None:
    layers = (slice(0, 5), slice(5, 6), slice(6, 12)) if layered else ()
    for dtype in (torch.float32, torch.float64):
        clipped = clip(torch.tensor(values, dtype=dtype), bound, layers)
        assert _distance(clipped, torch.zeros(12)) <= bound * SLACK
        rows = torch.tensor([values, [0.0] * 12], dtype=dtype)
        assert _distance(clipped_sum(rows, bound, layers), torch.zeros(12)) <= bound * SLACK


@pytest.mark.parametrize("size", [14_538, 11_200_000])
def test_a_long_vector_of_small_entries_has_its_whole_norm(size: int) -> None:
    """A sum of squares in float32 forgets what is small beside what it already holds."""
    worst = 0.0
    for head in (8, 32, 128):
        v = torch.full((size,), 2.0**-12.55)
        v[:head] = 1.0
        worst = max(worst, float(torch.linalg.vector_norm(clip(v * 10, 1.0), dtype=torch.float64)))
        worst = max(worst, float(torch.linalg.vector_norm(clipped_sum(v[None] * 10, 1.0), dtype=torch.float64)))
    assert 0.999 <= worst <= 1.001


# What is not noised is the same for neighbours.


@pytest.mark.parametrize("case", [c for c in CASES if c.algorithm != "dp_fedsam"], ids=str)
def test_what_is_not_noised_does_not_depend_on_a_clients_data(case: Case) -> None:
    away = case.adjacency == "add_remove" and case.sampling == "poisson"
    rounds = [case.play(UNIT * 30), case.play(torch.full((D,), math.nan)), case.play(None), *case.others()]
    for told in (lambda p: p.aggregate.noise, lambda p: p.aggregate.notes, lambda p: p.aggregate.weights[-1]):
        assert len({told(p) for p in rounds}) == 1
    sums = {round(sum(p.aggregate.weights), 9) for p in rounds}
    assert sums == {1.5, 1.0} if away else len(sums) == 1  # fixed denominators, never one over those who came
    assert len({p.messages[0].releases for p in rounds[:3]}) == 1
    assert all(p.messages[0].undeclared == () for p in rounds)


RELEASED = ("server_step_norm", "server/gamma", "gap/mean")
"""Metrics that are computed from released values."""


def recorded(config: RunConfig, updates: Sequence[Tensor | None]) -> RoundRecord:
    side = side_of(config, updates)
    ledger = Ledger(unit="client", delta=1e-5, adjacency=config.privacy.adjacency)
    rounds = fit(
        initial(UNIT, {}),
        rounds=1,
        cohort_of=lambda r: range(K),
        algorithm=side.algorithm,
        engine=DebugEngine(side),
        evaluate=lambda server: None,
        ledger=ledger,
    )
    return next(rounds)[1]


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
@pytest.mark.parametrize("algorithm", ["dp_fedavg", "sam_adpfl"])
def test_a_record_tells_nothing_that_was_not_released(trust: str, algorithm: str) -> None:
    """Metrics under oracle/ are the simulator's; of the others only functions of released values may differ."""
    if (trust, algorithm) == ("distributed", "sam_adpfl"):
        pytest.skip("refused by the schema")
    config = config_of(algorithm, "update", trust_model=trust)
    released = RELEASED + (("upload_norm/mean", "upload_norm/max") if trust == "local" else ())
    one, two = (recorded(config, [u, *BASE]) for u in (UNIT * 30, None))
    open_metrics = [
        {k: v for k, v in r.metrics.items() if k not in released and not k.startswith("oracle")} for r in (one, two)
    ]
    assert open_metrics[0] == open_metrics[1]
    assert (one.notes, one.epsilon, one.updated, one.cohort) == (two.notes, two.epsilon, two.updated, two.cohort)


def test_batch_norm_statistics_are_an_undeclared_upload() -> None:
    config = RunConfig(
        algorithm="dp_fedavg",
        model={"kind": "resnet18", "norm": "batch"},
        data={"name": "digits", "subset": 0.1},
        privacy={"level": "update", "noise_multiplier": 1.0},
        fl={"rounds": 1, "num_clients": 2, "max_local_steps": 1, "batch_size": 4},
        tracking={"enabled": False},
    )
    assert run(config).badge == "NOT PRIVATE"


# SAM-ADPFL: bounds, noise and weights follow what was released.


def adaptive(trust: str, adjacency: str, rule: str, statistics: str, mu: float = 10.0) -> RunConfig:
    base = config_of("sam_adpfl", "update", trust_model=trust, adjacency=adjacency).to_dict()
    base["algorithm"]["sharpness"] |= {"noise_rule": rule, "statistics": statistics}
    base["algorithm"]["aggregate"]["mu"] = mu
    return RunConfig(**base)


RULES = ["paper", "constant", "personalised"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out"])
def test_sam_adpfl_moves_no_further_given_what_was_released(trust: str, adjacency: str, rule: str) -> None:
    """The gap of a linear loss is rho ||g||, 0.5 = B_S from ||g|| = 10: antipodes and giants announce the same.

    A client without data announces 0, so there bounds lag and weights are even: the update's history is then the same.
    """
    same = adjacency == "replace_one"
    config = adaptive(trust, adjacency, rule, "current" if same else "lagged", 10.0 if same else 0.0)
    seen = {} if same else {SEEN: torch.tensor([0.3, 0.1, 0.02], dtype=torch.float64)}
    rng = torch.Generator().manual_seed(1)
    vectors = [s * u for s in (30.0, -30.0, 1e6, -1e12) for u in (UNIT, AXIS)]
    vectors += [torch.full((D,), math.nan), *(torch.randn(6, D, generator=rng) * 100)]
    rounds = [play(config, [v, *BASE], UNIT, seen) for v in vectors]
    nothing = play(config, [None, *BASE], UNIT, seen)
    worst = 0.0
    for one, two in combinations(rounds, 2) if same else [(r, nothing) for r in rounds]:
        gap, update = one.messages[0].releases
        assert update.covers[0] == "delta" and one.messages[0].releases == two.messages[0].releases
        assert one.aggregate.weights == pytest.approx(two.aggregate.weights)
        if trust == "local":
            part = _distance(one.messages[0].vectors["delta"], two.messages[0].vectors["delta"]) / update.noise
        else:
            part = _distance(one.step, two.step) / one.aggregate.noise
            bounds = [w * m.releases[1].noise for w, m in zip(one.aggregate.weights, one.messages, strict=True)]
            assert one.aggregate.noise == pytest.approx(max(bounds), rel=1e-6)
        worst = max(worst, part * update.noise_multiplier)
        assert abs(gap.sensitivity - 0.5) < 1e-12
    assert worst <= SLACK
    bounds = [m.oracle["clip"] for m in rounds[0].messages]
    assert max(bounds) > 1.1 * min(bounds), "bounds follow sharpness"
    if trust == "local" and rule != "paper":  # Eq. 14 adds more than is counted, the sum what its loudest owes
        assert worst >= TIGHT
    else:
        assert worst >= 0.05


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
def test_the_gap_of_a_client_moves_by_its_interval(adjacency: str) -> None:
    config = adaptive("local", adjacency, "constant", "current")
    sizes = [torch.zeros(D), UNIT * 1e-6, UNIT * 5, UNIT * 30, UNIT * 1e20, torch.full((D,), math.nan), None]
    told = [play(config, [v, *BASE], UNIT).messages[0] for v in sizes]
    gaps = [m.scalars["gap"] for m in told]
    assert max(gaps) - min(gaps) == pytest.approx(told[0].releases[0].sensitivity, rel=1e-6)


# One example: DP-SGD's sum, its ascents, its gap.


class Rows(QuadraticObjective):
    """Linear losses -b_i' w: example i's gradient is -b_i wherever it is taken, so any ascent leaves it."""

    def per_sample_ascent_gradients(self, w: Tensor, batch: Batch, rho: float) -> Tensor:
        return self.per_sample_gradients(w, batch)


B = 4.0
"""The constant denominator of a private mean gradient."""


def private_sum(
    algorithm: Algorithm,
    rows: Sequence[Tensor],
    terms: Mapping[str, float] | None = None,
    previous: Tensor | None = None,
    w: Tensor = UNIT,
) -> Tensor:
    """The first private gradient of a step over these examples, times its denominator."""
    objective = Rows([Quadratic(torch.zeros(D, D), -row) for row in rows])
    batch = torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64)
    ctx = Context(0, w, objective, generator(1, "noise"), B, previous=previous, terms=terms or {})
    first = algorithm.solver.transforms[0](objective.gradient, ctx)
    return first(w, batch) * B


def sample_configs() -> Iterator[RunConfig]:
    for name, adjacency, bound, sampling, direction in product(
        ("dp_fedavg", "dp_fedsam", "dp_scaffold", "sam_adpfl"),
        ("add_remove", "zero_out", "replace_one"),
        ("fixed", "per_layer"),
        ("poisson", "without_replacement", "full"),
        (None, "previous", "per_sample", "two_release"),
    ):
        if direction is None and name in ("dp_fedsam", "sam_adpfl"):
            continue
        more = {} if direction is None else {"ascent": direction}
        try:
            yield config_of(name, "sample", adjacency=adjacency, clip_bound=bound, sampling=sampling, **more)
        except InvalidConfig:
            continue


SAMPLES = list(sample_configs())


@pytest.mark.parametrize("config", SAMPLES, ids=lambda c: "-".join(map(str, [c.algorithm.name, *_kind(c)])))
def test_one_example_moves_a_private_sum_by_its_sensitivity(config: RunConfig) -> None:
    """The bound comes from the terms, as SAM-ADPFL's do; a pair of releases is declared as one of sqrt(2) C."""
    bound = 0.37
    algorithm, terms = algorithm_of(config, (40,) * K), {"clip": bound}
    release = algorithm.protection.gradient_release(0, 0.1, 1, terms)
    rest = [UNIT * 0.1, AXIS * 7, -UNIT * 1e4]
    vectors = [v * (bound / C) for v in candidates()]
    sums = [private_sum(algorithm, [*rest, v], terms) for v in vectors]
    without = private_sum(algorithm, rest, terms)
    replaced = config.privacy.adjacency == "replace_one"
    pairs = combinations(sums, 2) if replaced else ((s, without) for s in sums)
    each = release.sensitivity / algorithm.protection.releases_per_step**0.5
    worst = max(_distance(a, b) for a, b in pairs) / each
    assert TIGHT <= worst <= SLACK
    assert release.noise_multiplier == pytest.approx(1.3 * bound / release.sensitivity)
    assert not torch.equal(without, private_sum(algorithm_of(quiet(config), (40,) * K), rest, terms)), "noised"


def _kind(config: RunConfig) -> tuple[object, ...]:
    privacy = config.privacy
    return privacy.adjacency, privacy.clip_bound, privacy.sampling, privacy.ascent


def quiet(config: RunConfig) -> RunConfig:
    raw = config.to_dict()
    return RunConfig(**{**raw, "privacy": {**raw["privacy"], "noise_multiplier": 0.0, "target_epsilon": None}})


class Points:
    """Examples x_i in one dimension with loss (w - x_i)^2 / 2."""

    def __init__(self, x: Sequence[float]) -> None:
        self.x = torch.tensor(x, dtype=torch.float64).unsqueeze(1)

    def gradient(self, w: Tensor, batch: Batch) -> Tensor:
        return self.per_sample_gradients(w, batch).mean(dim=0)

    def per_sample_gradients(self, w: Tensor, batch: Batch) -> Tensor:
        return w - self.x[batch[0]]

    def per_sample_ascent_gradients(self, w: Tensor, batch: Batch, rho: float) -> Tensor:
        rows = self.per_sample_gradients(w, batch)
        return w + rho * rows.sign() - self.x[batch[0]]

    def begin_step(self) -> None: ...

    def take_losses(self) -> tuple[Tensor, ...]:
        return ()


(NAIVE,) = (case for case in cases("privacy.json", "dp_sam") if case["id"] == "dp_sam/naive_sensitivity")


def test_an_ascent_along_the_raw_batch_gradient_breaks_the_bound() -> None:
    """One added example turns the ascent around, and with it every other example's clipped gradient."""
    rho, bound = NAIVE["inputs"]["rho"], NAIVE["inputs"]["C"]
    points = Points([0.1] * 32 + [-0.1] * 31 + [NAIVE["inputs"]["extra_x"]])
    sums = []
    for count in (63, 64):
        batch, w = (torch.arange(count), torch.zeros(count)), torch.zeros(1, dtype=torch.float64)
        raised = w + ascent(rho, points.gradient(w, batch))
        sums.append(float(clipped_sum(points.per_sample_gradients(raised, batch), bound)))
    expected = NAIVE["expected"]
    assert sums == pytest.approx([expected["sum_without"], expected["sum_with"]], abs=1e-8)
    assert sums[1] - sums[0] > 6 * expected["claimed_sensitivity"]


@pytest.mark.parametrize("direction", ["previous", "per_sample", "two_release"])
def test_the_shipped_ascents_keep_it_on_the_same_examples(direction: str) -> None:
    """Given what was released before: the last direction, or the first of two gradients of this step."""
    points = Points([0.1] * 32 + [-0.1] * 31 + [NAIVE["inputs"]["extra_x"]])
    config = config_of("dp_fedsam", "sample", {"rho": NAIVE["inputs"]["rho"]}, clip_norm=1.0, ascent=direction)
    algorithm = algorithm_of(config, (40,) * K)
    w, last = torch.zeros(1, dtype=torch.float64), torch.tensor([-0.4], dtype=torch.float64)
    moved = []
    for point in (w, w + 0.05) if direction == "two_release" else (w,):
        sums = []
        for count in (63, 64):
            batch = torch.arange(count), torch.zeros(count)
            ctx = Context(0, w, points, generator(1, "noise"), B, previous=last)
            grad = points.gradient
            chain = algorithm.solver.transforms[:1] if direction == "two_release" else algorithm.solver.transforms
            for transform in chain:
                grad = transform(grad, ctx)
            sums.append(float(grad(point, batch)) * B)
        moved.append(sums[1] - sums[0])
    sensitivity = algorithm.protection.gradient_release(0, 0.1, 1, {}).sensitivity
    assert math.hypot(*moved) <= sensitivity * SLACK
    assert sensitivity == pytest.approx(2**0.5 if direction == "two_release" else 1.0)


def test_a_step_of_two_releases_makes_them_at_the_point_it_released() -> None:
    """Both gradients of a step are private and noised anew: the second is taken along the first as released."""
    algorithm = algorithm_of(config_of("dp_fedsam", "sample", ascent="two_release"), (40,) * K)
    objective = Rows([Quadratic(torch.zeros(D, D), -UNIT * 3)])
    asked: list[Tensor] = []
    plain = objective.per_sample_gradients
    objective.per_sample_gradients = lambda w, batch: asked.append(w.clone()) or plain(w, batch)  # type: ignore
    ctx = Context(0, UNIT, objective, generator(1, "noise"), B)
    batch = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    found = algorithm.solver.direction(algorithm.solver.init(UNIT), batch, ctx)
    first = private_sum(algorithm, [UNIT * 3]) / B
    torch.testing.assert_close(asked[1], UNIT + ascent(0.05, first))
    assert ctx.spent == [2] and not torch.allclose(found, first, atol=1e-3)


@pytest.mark.parametrize("rows", ["opacus", "vmap"])
@pytest.mark.parametrize("direction", ["previous", "per_sample", "two_release"])
def test_real_networks_hold_the_bound_for_any_example(direction: str, rows: str) -> None:
    """Two classes and no bias: turning a label turns the gradient around, so the bound is reached."""
    torch.manual_seed(0)
    objective = ModelObjective(nn.Linear(5, 2, bias=False), per_sample=rows)
    config = config_of("dp_fedsam", "sample", adjacency="replace_one", sampling="full", clip_norm=0.1, ascent=direction)
    algorithm = algorithm_of(config, (40,) * K)
    odd = [0.0, 1.0, -1.0, 1e4, 1e19, 1e38, math.nan, math.inf]
    inputs = [torch.full((5,), x) for x in odd] + [torch.tensor([1.0, math.nan, 0, 0, 0])]
    w, common = objective.initial, torch.randn(3, 5, generator=generator(3, "data"))
    sums = []
    for x, y in product(inputs, (0, 1)):
        batch = torch.cat([common, x[None]]), torch.tensor([0, 1, 0, y])
        ctx = Context(0, w, objective, generator(1, "noise"), B, previous=torch.ones_like(w))
        chain = algorithm.solver.transforms[: 1 if direction == "two_release" else 2]
        grad = objective.gradient
        for transform in chain:
            grad = transform(grad, ctx)
        sums.append(grad(w, batch) * B)
    worst = max(_distance(a, b) for a, b in combinations(sums, 2)) / 0.2
    assert TIGHT <= worst <= SLACK


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out", "replace_one"])
def test_one_example_moves_the_private_gap_by_its_sensitivity(adjacency: str) -> None:
    sampling = "full" if adjacency == "replace_one" else "poisson"
    config = config_of("sam_adpfl", "sample", {"rho": 1.0}, adjacency=adjacency, sampling=sampling)
    n = 40
    algorithm, previous = algorithm_of(config, (n,) * K), UNIT
    state = SolverState(UNIT, (), previous=previous, steps=1)
    odd = [torch.zeros(D), UNIT * 0.5, UNIT, UNIT * 1e6, -UNIT * 1e30, torch.full((D,), math.nan)]
    odd += [torch.full((D,), math.inf), UNIT * 3e38]

    def told(examples: Sequence[Tensor]) -> Message:
        objective = QuadraticObjective([Quadratic(torch.zeros(D, D), -row) for row in examples])
        whole = torch.arange(len(examples))
        ctx = Context(0, UNIT, objective, generator(1, "noise"), B, examples=lambda: [(whole, whole)])
        found = algorithm.measures[0](state, ctx, []).scalars
        return send(Message(0, n, 1, {}, found), algorithm.announcements, generator(1, "announce"))

    rest = [UNIT * 0.1] * (n - 1)
    messages = [told([*rest, v]) for v in odd]
    if adjacency == "add_remove":
        messages.append(told(rest))
    gaps = [m.scalars["gap"] for m in messages]
    (release,) = messages[0].releases
    assert (release.sensitivity, release.sampling) == (0.5 / n, "full")
    assert TIGHT <= (max(gaps) - min(gaps)) / release.sensitivity <= SLACK * 1.001


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_sam_adpfl_clips_examples_to_the_bound_that_it_declares(adjacency: str) -> None:
    """A whole visit of one full step: C_k from the last released gaps, for the gradient and for the ledger."""
    config = config_of("sam_adpfl", "sample", adjacency=adjacency, sampling="full")
    algorithm, n = algorithm_of(config, (4,) * K), 4
    seen = {SEEN: torch.tensor([0.4, 0.1, 0.02], dtype=torch.float64)}

    def upload(odd: Tensor) -> Message:
        rows = [UNIT, AXIS, UNIT * 9, odd]
        objective = QuadraticObjective([Quadratic(torch.zeros(D, D), -row) for row in rows])
        shards = [torch.arange(n), torch.tensor([0]), torch.tensor([1])]
        side = ClientSide(algorithm, objective, ClientNumbers(), shards, Schedule(n, 1, 1), 7)
        start = initial(UNIT, {})
        start = replace(start, server=replace(start.server, extra=seen))
        return run_round(start, range(K), algorithm, DebugEngine(side), None)[1][0]

    messages = [upload(v) for v in candidates() if v.abs().max() < 1e10 or not torch.isfinite(v).all()]
    release = messages[0].releases[0]
    reach = 2 if adjacency == "replace_one" else 1
    assert release.sensitivity > 1.2 * C * reach, "the bound has adapted"
    zero = upload(torch.zeros(D))
    pairs = combinations(messages, 2) if adjacency == "replace_one" else ((m, zero) for m in messages)
    worst = max(_distance(a.vectors["delta"], b.vectors["delta"]) * n / release.sensitivity for a, b in pairs)
    assert TIGHT <= worst <= SLACK


def test_the_search_sees_a_batch_norm_buffer() -> None:
    """Buffers travel without noise and no release covers them."""
    from federations import digit_side

    from fl_lightning.algorithms.algorithm import Protection
    from fl_lightning.algorithms.dp_fedavg import dp_fedavg
    from fl_lightning.local.optimizers import sgd

    shield = Protection("update", 1.0, (1.0,), "replace_one")
    side = digit_side(dp_fedavg(sgd(0.1), protection=shield), (20,), model=small_net(norm=True))
    assert train(side, DebugEngine(side), 1)[2][0].undeclared == ("buffers",)
