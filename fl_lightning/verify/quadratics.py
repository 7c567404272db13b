"""Claims 2.1 to 2.3 of "Understanding Clipping for Federated Learning" (arXiv 2106.13673) as federations that train.

Clients f_i(x) = (x - b_i)' A_i (x - b_i)/2 take Q gradient steps of size eta, so that
    Delta_i = -Lambda_i grad f_i(x),    Lambda_i = (I - (I - eta A_i)^Q) A_i^-1
    scalar:  Delta_i = s_i (b_i - x),   s_i = 1 - (1 - eta a_i)^Q
Claim 2.1   model clipping, b = (-c/2, -c/2, k c), k > 4:   x_inf = lambda c/(3 - 2 lambda),  lambda = (1 - eta)^Q,
            while the optimum is x* = (k - 1) c/3. Client 3 stays clipped iff k >= (3 + lambda)/(3 - 2 lambda).
Claim 2.2   difference clipping settles where sum_i clip(Lambda_i grad f_i(x), c) = 0, the optimum of Huberised losses;
            Q = 1 and eta <= c/max_i ||grad f_i(x*)|| (and eta < 2/max A): at x* itself. The paper prints
            eta = 1/max_i ||grad f_i(x*)||, which is that for c = 1 alone.
Claim 2.3   f = (x - 4)^2/2, (2x - 1)^2/2, (6x + 1)^2/2: with many local steps clipping helps, with one it may hurt.

Every number comes from rounds of the shipped algorithms, run until they move no more, and is compared with the formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.algorithms.ce_fedavg import ce_fedavg
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.algorithms.model_clipping import model_clipping
from fl_lightning.analysis.quadratic import ClientNumbers, Quadratic, QuadraticObjective
from fl_lightning.client.visit import ClientSide, Schedule
from fl_lightning.engine.debug import DebugEngine
from fl_lightning.errors import FLError
from fl_lightning.federation import initial, run_round
from fl_lightning.local.optimizers import sgd
from fl_lightning.records import Message, Vector
from fl_lightning.server.aggregate import uniform
from fl_lightning.uplink.clip_noise import clip
from fl_lightning.verify.table import Check, Found

TOLERANCE = 1e-10
"""On a stationary point; rounds end within a tenth of it."""

CLAIM_23 = ((1.0, 4.0), (4.0, 0.5), (36.0, -1 / 6))
"""(a_i, b_i) of Claim 2.3; the optimum is 0, the median of b is 1/2, its mean 13/9."""

ETA = 0.01
STEPS = (1, 2, 5, 10, 50, 100, math.inf)
STILL = 50
"""From so many local steps on, a cell is a round at the root and one from either side, not rounds until they settle."""

BOUNDS = (math.inf, 1.0, 0.5, 0.1, 0.02)


def parabola(a: float, b: float) -> Quadratic:
    """(a/2)(x - b)^2 up to a constant."""
    return Quadratic(torch.tensor([[a]], dtype=torch.float64), torch.tensor([a * b], dtype=torch.float64))


def point(*coordinates: float) -> Vector:
    return torch.tensor(coordinates, dtype=torch.float64)


class Rounds:
    """A federation of quadratic clients under an algorithm, all of them in every round, Q steps each."""

    def __init__(self, clients: Sequence[Quadratic], algorithm: Algorithm, steps: int) -> None:
        shards = [torch.full((steps,), i) for i in range(len(clients))]  # one example, Q times: an epoch is Q steps
        side = ClientSide(algorithm, QuadraticObjective(clients), ClientNumbers(), shards, Schedule(1), seed=0)
        self.everyone, self.algorithm, self.engine = range(len(clients)), algorithm, DebugEngine(side)

    def once(self, x: Vector) -> tuple[Vector, list[Message]]:
        """The model after one round from x, and the uploads."""
        federation, messages, _ = run_round(initial(x, {}), self.everyone, self.algorithm, self.engine, None)
        return federation.server.w, messages

    def settle(self, x: Vector, most: int = 20_000) -> Vector:
        """Rounds from x until the distance still to go, judged by how two moves shrank, is below a tenth of TOLERANCE.

        Raises:
            FLError: that takes more than `most` rounds.
        """
        last, close = math.inf, 0
        for _ in range(most):
            new, _ = self.once(x)
            move = float(torch.linalg.vector_norm(new - x))
            shrink = move / last if last else 0.0
            close = close + 1 if shrink < 1 and move * shrink / (1 - shrink) < TOLERANCE / 10 else 0
            x, last = new, move
            if move == 0.0 or close == 2:  # one alone may come of a client that has just ceased to be clipped
                return x
        raise FLError(f"{self.algorithm.name}: not settled after {most} rounds, the last moved {last:.1e}")


def slope(a: float, eta: float, steps: float) -> float:
    """s_i = 1 - (1 - eta a_i)^Q."""
    return 1.0 if steps == math.inf else 1 - (1 - eta * a) ** steps


def clipped_point(clients: Sequence[tuple[float, float]], eta: float, steps: float, c: float) -> float:
    """The root of sum_i clip(s_i (b_i - x), c), a falling function, by bisection to the last bit."""
    low, high = min(b for _, b in clients), max(b for _, b in clients)
    while low < (middle := 0.5 * (low + high)) < high:
        pull = math.fsum(max(-c, min(c, slope(a, eta, steps) * (b - middle))) for a, b in clients)
        low, high = (middle, high) if pull > 0 else (low, middle)
    return 0.5 * (low + high)


def model_point(eta: float, steps: int, c: float, k: float) -> float:
    """Where model clipping settles on Claim 2.1's clients: lambda c/(3 - 2 lambda), or x* while nothing is clipped."""
    lam = (1 - eta) ** steps
    return lam * c / (3 - 2 * lam) if k >= (3 + lam) / (3 - 2 * lam) else (k - 1) * c / 3


def difference_clipping(eta: float, c: float) -> Algorithm:
    """CE-FedAvg; without a bound FedAvg, weights equal."""
    return fedavg(sgd(eta), prior=uniform) if c == math.inf else ce_fedavg(sgd(eta), clip=c)


@dataclass
class Claims:
    """The checks, and the points where Claim 2.3's federations settled, by (Q, c), filled as its checks run."""

    settled: dict[tuple[float, float], float] = field(default_factory=dict)

    def checks(self) -> list[Check]:
        """In the order in which they are printed."""
        rows: list[tuple[str, str, Callable[[], Found]]] = [
            ("claim-2.1/model-clipping", "k > 4: model clipping settles at lambda c/(3 - 2 lambda), not x*", claim_21),
            ("claim-2.1/threshold", "k on both sides of (3 + lambda)/(3 - 2 lambda): x* below, beside it above", kink),
            ("claim-2.1/difference", "the same clients under difference clipping, eta = c/max|f'(x*)|: x*", rescued),
            ("claim-2.2/optimum", "Q = 1, eta = c/max|f'(x*)|: difference clipping settles at x*", claim_22),
            ("claim-2.2/vector", "the same in 3 dimensions with full Hessians", claim_22_vector),
            ("claim-2.2/stationarity", "Q = 4: settles where sum_i clip(Lambda_i grad f_i, c) = 0", stationarity),
            ("claim-2.2/huber", "an upload is minus the gradient of the client's Huberised loss", huber),
        ]
        checks = [Check(name, text, measure, TOLERANCE) for name, text, measure in rows]
        for steps in STEPS:
            text = f"Q = {steps}, eta = {ETA}, five bounds: settles at the root of sum_i clip(s_i (b_i - x), c)"
            if steps >= STILL:
                which = "-> infinity" if steps == math.inf else f"= {steps}"
                text = f"Q {which}, five bounds: that root stands still and attracts"
            checks.append(Check(f"claim-2.3/Q-{steps}", text, lambda steps=steps: self.claim_23(steps), TOLERANCE))
        return checks

    def claim_23(self, steps: float) -> Found:
        """All bounds at one Q. Rounds start from x = 1; where many steps make them dear, see STILL."""
        clients, differences = [parabola(a, b) for a, b in CLAIM_23], []
        for c in BOUNDS:
            root = clipped_point(CLAIM_23, ETA, steps, c)
            if steps >= STILL:
                eta, finite = (0.05, 500) if steps == math.inf else (ETA, int(steps))
                x = _still_and_attracting(Rounds(clients, difference_clipping(eta, c), finite), root)
            else:
                x = float(Rounds(clients, difference_clipping(ETA, c), int(steps)).settle(point(1.0)))
            self.settled[steps, c] = x
            differences.append(abs(x - root))
        return Found(max(differences))

    def table(self) -> list[str]:
        """Where Claim 2.3's federations settled, as text: Q down, c across; the optimum is 0."""
        head = f"{'Q':>5}" + "".join(f"{'c=' + f'{c:g}':>10}" for c in BOUNDS)
        lines = ["Claim 2.3, eta = 0.01: x_inf, to be compared with the optimum 0", head]
        for steps in STEPS:
            cells = [self.settled.get((steps, c)) for c in BOUNDS]
            lines.append(f"{steps:>5}" + "".join(f"{'-' if x is None else f'{x + 0.0:.5f}':>10}" for x in cells))
        return lines

    def to_list(self) -> list[Mapping[str, float | str]]:
        """The same as plain values; an infinite Q or c as text."""
        return [
            {"Q": _plain(steps), "c": _plain(c), "eta_l": ETA, "x_inf": x} for (steps, c), x in self.settled.items()
        ]


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _still_and_attracting(rounds: Rounds, root: float) -> float:
    """The model after one round from the root.

    Raises:
        FLError: a round from 0.01 beside it does not come nearer.
    """
    for side in (-0.01, 0.01):
        after = float(rounds.once(point(root + side))[0]) - root
        if not abs(after) < 0.99 * abs(side):
            raise FLError(f"a round from {root + side:.4f} ends {abs(after):.1e} from the root, no nearer")
    return float(rounds.once(point(root))[0])


def claim_21() -> Found:
    """Several sizes and step counts, each from 0 and from the optimum that it must leave."""
    differences, biases = [], []
    for eta, steps, c, k in ((0.1, 1, 1.0, 5.0), (0.1, 5, 1.0, 5.0), (0.05, 20, 1.0, 4.5), (0.3, 10, 0.1, 7.0)):
        rounds, optimum = _model_rounds(eta, steps, c, k), (k - 1) * c / 3
        expected = model_point(eta, steps, c, k)
        differences += [abs(float(rounds.settle(point(x))) - expected) for x in (0.0, optimum)]
        biases.append(abs(expected - optimum))
    return Found(max(differences), min(biases))


def kink() -> Found:
    """lambda = 0.9, whose threshold is k = 3.25."""
    ends = [(k, float(_model_rounds(0.1, 1, 1.0, k).settle(point(0.0)))) for k in (1.5, 3.2, 3.3, 6.0)]
    differences = [abs(x - model_point(0.1, 1, 1.0, k)) for k, x in ends]
    return Found(max(differences), min(abs(x - (k - 1) / 3) for k, x in ends if k > 3.25))


def rescued() -> Found:
    clients, optimum = _claim_21_clients(1.0, 5.0), 4 / 3
    eta = 1.0 / max(abs(float(f.gradient(point(optimum)))) for f in clients)
    x = Rounds(clients, difference_clipping(eta, 1.0), 1).settle(point(-3.0))
    return Found(abs(float(x) - optimum), abs(model_point(eta, 1, 1.0, 5.0) - optimum))


def claim_22() -> Found:
    """Two bounds on Claim 2.3's clients; a step half as large again loses x*."""
    clients, found = [parabola(a, b) for a, b in CLAIM_23], []
    for c in (0.1, 0.2):
        eta = c / 6  # max_i |f_i'(x*)| = 6
        right, wrong = (Rounds(clients, difference_clipping(size, c), 1) for size in (eta, 1.5 * eta))
        found.append((abs(float(right.settle(point(1.0)))), abs(float(wrong.settle(point(0.1))))))
    return Found(max(x for x, _ in found), min(x for _, x in found))


def claim_22_vector() -> Found:
    clients = _full_quadratics()
    optimum, c = _optimum(clients), 0.05
    eta = c / max(float(f.gradient(optimum).norm()) for f in clients)
    if eta >= 2 / max(float(torch.linalg.eigvalsh(f.A).max()) for f in clients):
        raise FLError(f"eta = {eta:.3g} is too large for these Hessians")
    x = Rounds(clients, difference_clipping(eta, c), 1).settle(optimum + 0.5)
    beyond = Rounds(clients, difference_clipping(2 * eta, c), 1).settle(optimum)
    return Found(float((x - optimum).abs().max()), float((beyond - optimum).abs().max()))


def stationarity() -> Found:
    """Some clients are clipped where it settles; the residual of the stationarity condition, and the way from x*."""
    clients, eta, steps, c = _full_quadratics(), 0.05, 4, 0.3
    x = Rounds(clients, difference_clipping(eta, c), steps).settle(_optimum(clients))
    pulls = [_drift(f, eta, steps) @ f.gradient(x) for f in clients]
    if not any(float(v.norm()) > c for v in pulls) or all(float(v.norm()) > c for v in pulls):
        raise FLError("the case is chosen so that some clients are clipped and some are not")
    residual = sum((clip(v, c) for v in pulls), torch.zeros_like(x))
    return Found(float(residual.norm()), float((x - _optimum(clients)).norm()))


def huber() -> Found:
    """Real uploads of each client along a line against clip(s_i (x - b_i), c); clipped on some of it, on some not."""
    eta, steps, c, differences, kept = 0.01, 10, 0.5, [], 0
    for a, b in CLAIM_23:
        rounds = Rounds([parabola(a, b)], difference_clipping(eta, c), steps)
        for x in (-8.0, -1.0, 0.0, 0.3, 1.0, 2.0, 8.0):
            slope_at = slope(a, eta, steps) * (x - b)
            kept += abs(slope_at) <= c
            sent = float(rounds.once(point(x))[1][0].vectors["delta"])
            differences.append(abs(-sent - max(-c, min(c, slope_at))))
    if not 0 < kept < len(differences):
        raise FLError("the line is chosen so that some uploads are clipped and some are not")
    return Found(max(differences))


def _claim_21_clients(c: float, k: float) -> list[Quadratic]:
    return [parabola(1.0, -c / 2), parabola(1.0, -c / 2), parabola(1.0, k * c)]


def _model_rounds(eta: float, steps: int, c: float, k: float) -> Rounds:
    return Rounds(_claim_21_clients(c, k), model_clipping(sgd(eta), clip=c), steps)


def _full_quadratics() -> list[Quadratic]:
    """Four clients in 3 dimensions, their Hessians between 0.5 and about 6, not diagonal."""
    rng = torch.Generator().manual_seed(3)
    clients = []
    for _ in range(4):
        root = torch.randn(3, 3, generator=rng, dtype=torch.float64)
        A = 0.5 * root @ root.T + 0.5 * torch.eye(3, dtype=torch.float64)
        clients.append(Quadratic(A, A @ torch.randn(3, generator=rng, dtype=torch.float64)))
    return clients


def _optimum(clients: Sequence[Quadratic]) -> Vector:
    A, b = torch.stack([f.A for f in clients]).sum(0), torch.stack([f.b for f in clients]).sum(0)
    return torch.linalg.solve(A, b)


def _drift(f: Quadratic, eta: float, steps: int) -> Tensor:
    """Lambda_i = (I - (I - eta A)^Q) A^-1."""
    identity = torch.eye(len(f.b), dtype=f.A.dtype)
    return (identity - torch.linalg.matrix_power(identity - eta * f.A, steps)) @ torch.linalg.inv(f.A)
