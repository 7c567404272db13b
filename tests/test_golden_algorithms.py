"""The papers' equations on real code at fp64, against reference numbers worked out by other means."""

import pytest
import torch
from federations import quadratic_round
from golden_cases import assert_close, cases

from fl_lightning.algorithms.fedprox import fedprox
from fl_lightning.algorithms.sam_afl import sam_afl
from fl_lightning.analysis.geometry import first_order_sharpness, quadratic_sharpness
from fl_lightning.analysis.quadratic import ClientNumbers, Quadratic, QuadraticObjective
from fl_lightning.local.measures import gap_over
from fl_lightning.local.optimizers import adam, sgd
from fl_lightning.local.solver import Context, LocalSolver
from fl_lightning.local.transforms import ascent, sam
from fl_lightning.server.aggregate import sharpness_weights
from fl_lightning.uplink.clip_noise import clip

FILE = "algorithms.json"
BATCH = ClientNumbers().batch(torch.tensor([0]))


def by_id(case: dict) -> str:
    return case["id"]


def quadratic(inputs: dict) -> tuple[Quadratic, torch.Tensor]:
    A, b, w = (torch.tensor(inputs[key], dtype=torch.float64) for key in ("A", "b", "w"))
    return Quadratic(A, b), w


def context(objective: QuadraticObjective, w: torch.Tensor) -> Context:
    return Context(client=0, anchor=w, objective=objective, noise=torch.Generator(), expected_batch=1.0)


@pytest.mark.parametrize("case", cases(FILE, "eq8_9"), ids=by_id)
def test_sam_step(case: dict) -> None:
    f, w = quadratic(case["inputs"])
    rho, eta = case["inputs"]["rho"], case["inputs"].get("eta", 0.1)
    objective = QuadraticObjective([f])
    ctx = context(objective, w)
    solver = LocalSolver(sgd(eta), (sam(rho),))
    state = solver.step(solver.init(w), BATCH, ctx)
    g = f.gradient(w)
    e = ascent(rho, g)
    expected, tol = case["expected"], case["tol"]
    got = {
        "grad": g.tolist(),
        "grad_norm": float(g.norm()),
        "e_hat": e.tolist(),
        "grad_at_perturbed": f.gradient(w + e).tolist(),
        "w_next": state.y.tolist(),
        "loss_std": float(state.trace[0].losses[0]),
        "loss_worst": float(state.trace[0].losses[1]),
        "gap": float(state.trace[0].losses[1] - state.trace[0].losses[0]),
    }
    loose = {"rel": max(tol.get("rel", 0.0), 1e-11), "abs": 1e-12}  # rho g/(||g|| + 1e-12) moves the 12th digit
    for key, value in expected.items():
        assert_close(got[key], value, loose)


@pytest.mark.parametrize("case", cases(FILE, "sam_adam"), ids=by_id)
def test_sam_adam(case: dict) -> None:
    i = case["inputs"]
    f, w = quadratic(i)
    objective = QuadraticObjective([f])
    base = adam(i["lr"], *i["betas"], eps=i["adam_eps"], weight_decay=i["weight_decay"])
    solver = LocalSolver(base, (sam(i["rho"]),))
    state = solver.init(w)
    for expected in case["expected"]["w_after_each_step"]:
        state = solver.step(state, BATCH, context(objective, w))
        assert_close(state.y.tolist(), expected, case["tol"])


@pytest.mark.parametrize("case", cases(FILE, "eq10_11"), ids=by_id)
def test_sharpness(case: dict) -> None:
    f, w = quadratic(case["inputs"])
    rho = case["inputs"]["rho"]
    g = f.gradient(w)
    smooth = float(torch.linalg.eigvalsh(f.A).abs().max())
    exact = quadratic_sharpness(g, f.A, rho)
    got = {
        "S_exact_ball_max": exact,
        "S_first_order": first_order_sharpness(g, rho),
        "S_sam_gap": gap_over(w, context(QuadraticObjective([f]), w), [BATCH], rho),
        "L_smooth": smooth,
        "prop1_bound": smooth * rho**2 / 2,
    }
    for key, value in case["expected"].items():
        assert_close(got[key], value, case["tol"])
    assert abs(exact - got["S_first_order"]) <= got["prop1_bound"] + 1e-12


@pytest.mark.parametrize("case", cases(FILE, "eq12"), ids=by_id)
def test_sharpness_weights(case: dict) -> None:
    i = case["inputs"]
    gaps, bound = (i["gap_noised"], i["B_S"]) if "gap_noised" in i else (i["gap"], None)
    lam = sharpness_weights(i["p"], gaps, i["mu"], bound)
    assert_close(lam, case["expected"], case["tol"])
    assert sum(lam) == pytest.approx(1, rel=1e-12)
    assert_close(sharpness_weights([7 * p for p in i["p"]], gaps, i["mu"], bound), lam, {"rel": 1e-10})


@pytest.mark.parametrize("case", cases(FILE, "eq15"), ids=by_id)
def test_clip(case: dict) -> None:
    i = case["inputs"]
    if "layers" in i:
        layers = [torch.tensor(layer, dtype=torch.float64) for layer in i["layers"]]
        flat = clip(torch.cat(layers), i["C"])
        apart = torch.cat([clip(layer, i["C"]) for layer in layers])
        assert_close(flat.tolist(), case["expected"]["flat"], case["tol"])
        assert_close(apart.tolist(), case["expected"]["per_layer"], case["tol"])
        assert_close(float(flat.norm()), case["expected"]["norm_flat"], case["tol"])
        assert_close(float(apart.norm()), case["expected"]["norm_per_layer"], case["tol"])
    else:
        assert_close(clip(torch.tensor(i["v"], dtype=torch.float64), i["C"]).tolist(), case["expected"], case["tol"])


CLAIM_23 = [
    Quadratic(torch.tensor([[a]], dtype=torch.float64), torch.tensor([a * b], dtype=torch.float64))
    for a, b in ((1.0, 4.0), (4.0, 0.5), (36.0, -1 / 6))
]


@pytest.mark.parametrize("case", cases(FILE, "fedprox"), ids=by_id)
def test_fedprox_stationary_point(case: dict) -> None:
    i = case["inputs"]
    exact = "eta_l" not in i
    eta, steps = (0.02, 1500) if exact else (i["eta_l"], i["Q"])  # enough steps to solve the local problem
    algorithm = fedprox(sgd(eta), prox_mu=i["mu"])
    point = torch.tensor([case["expected"]], dtype=torch.float64)
    moved, _ = quadratic_round(CLAIM_23, algorithm, point, steps)
    assert abs(float(moved - point)) < 2e-9
    away, _ = quadratic_round(CLAIM_23, algorithm, point + 1, steps)
    assert -1e-6 < float(away - point) < 1  # the point attracts: it is the one that rounds converge to


@pytest.mark.parametrize("case", cases(FILE, "aggregation"), ids=by_id)
def test_aggregation(case: dict) -> None:
    i, expected = case["inputs"], case["expected"]
    if case["id"] == "agg/shrink":
        from fl_lightning.records import Message, ServerState

        algorithm = sam_afl(sgd(0.1), rho=0.05, mu=i["mu"], gamma=i["gamma"])
        messages = [
            Message(k, 1, 1, {"delta": torch.tensor(delta, dtype=torch.float64)}, {"gap": gap})
            for k, (delta, gap) in enumerate(zip(i["deltas"], i["gap"], strict=True))
        ]
        server = ServerState(torch.tensor(i["w"], dtype=torch.float64))
        assert_close(algorithm.rule(server, algorithm.aggregate(messages)).w.tolist(), expected, case["tol"])
    else:
        from fl_lightning.server.aggregate import aggregate_noise

        std = aggregate_noise(i["lam"], i["C"], i["sigma"])
        assert_close(std, expected["std_per_coordinate"], case["tol"])
        central = [std / (lam * c) for lam, c in zip(i["lam"], i["C"], strict=True)]
        assert_close(central, expected["central_multiplier_per_client"], case["tol"])
