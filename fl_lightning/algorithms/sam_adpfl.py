"""SAM-ADPFL: A Geometry-Aware Adaptive Framework for Privacy-Preserving Federated Learning Systems (Shan et al.).

    client k:   y = w;  e = rho g/||g||;  y <- y - eta g(y + e)                    (Eq. 8-9);   Delta_k = y - w
                G_k = L_worst,k - L_std,k,   S_k = rho ||grad F_k(y)||             (Eq. 10-11), released with noise
    server:     lambda_k = p_k exp(-mu G~_k) / sum_j p_j exp(-mu G~_j)             (Eq. 12)
    client k:   C_k = max(C_min, C_base (1 + alpha (S_k - Sbar)/Sbar))             (Eq. 13)
                sigma_k = sigma_base S_k/(min_j S_j + xi)                          (Eq. 14)
                upload g~_k = clip(Delta_k, C_k) + N(0, (C_k sigma_k)^2 I)         (Eq. 15)
    server:     w <- gamma (w + eta_g sum_k lambda_k g~_k)

mode "strict": one scalar, the gap, clipped to [0, B_S], noised and put back into [S_lo, B_S], serves for G and S.
Bounds and noise are functions of released values, and sigma_k >= sigma_base, so the ledger may count sigma_base.
  level "update": the gap of this round sets C_k and sigma_k (Theorem S1), or the last one released ("lagged").
  level "sample": DP-SGD in the client, C_k and sigma_k from the gap released at its visit before; the gap is a mean of
  clipped per-example gaps along the last private direction (Theorem S2).
mode "paper" (level "update" only): three Laplace scalars once per round; C_k and sigma_k from the raw S_k, literally.
The raw values are undeclared uploads, so the run is NOT PRIVATE; Theorem 1 does not hold as written (docs/privacy.md).
mu = clip_alpha = rho = 0 with constant noise is DP-FedAvg.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.algorithms.algorithm import Algorithm, Protection
from fl_lightning.local.measures import GapAt, paper_scalars, private_gap, sharpness_gap
from fl_lightning.local.optimizers import LocalOptimizer
from fl_lightning.local.solver import LocalSolver
from fl_lightning.local.transforms import sam
from fl_lightning.records import Message, ServerState
from fl_lightning.server.aggregate import PriorWeights, by_samples, sharpness
from fl_lightning.server.rules import apply
from fl_lightning.server.sharpness import FACTOR, SEEN, RenyiFilter, last_seen, remember, remembering
from fl_lightning.uplink.bounds import SharpnessBounds, bounded
from fl_lightning.uplink.clip_noise import clip_noise
from fl_lightning.uplink.scalars import gaussian_scalar, laplace_scalars
from fl_lightning.uplink.stage import Terms


@dataclass(frozen=True)
class Sharpness:
    """How sharpness is measured, bounded and released.

    Attributes:
        bounds: Eq. 13-14.
        bound: B_S > 0, the interval [0, B_S] of a gap (of S_k in paper mode).
        floor: S_lo in (0, B_S), the least value a released gap is put back to.
        loss_bound: B_L > 0, the interval of a loss in paper mode.
        multiplier: noise over sensitivity of the strict scalar.
        epsilon: eps_scalars of one round in paper mode.
        at: where level "update" measures the gap.
        lagged: level "update" takes each client's last released gap instead of this round's.
    """

    bounds: SharpnessBounds
    bound: float = 0.5
    floor: float = 5e-4
    loss_bound: float = 5.0
    multiplier: float = 1.0
    epsilon: float = 0.4
    at: GapAt = "local_end"
    lagged: bool = False


def sam_adpfl(
    optimizer: LocalOptimizer,
    *,
    rho: float,
    mu: float,
    protection: Protection,
    sharp: Sharpness,
    visits: Sequence[Sequence[int]],
    gamma: float = 1.0,
    server_lr: float = 1.0,
    prior: PriorWeights = by_samples,
) -> Algorithm:
    """Args: `mu` temperature of Eq. 12, `protection` with C_base and sigma_base, `visits` each client's rounds."""
    p, bounds = protection, sharp.bounds

    def terms(clients: Sequence[int], values: Sequence[float]) -> Mapping[int, Terms]:
        values = bounded(values, sharp.floor, sharp.bound) if bounds.strict else values
        return bounds.terms(clients, values) if values else {}

    def before(server: ServerState, cohort: Sequence[int]) -> Mapping[int, Terms]:
        seen = last_seen(server, cohort)
        found = terms(list(seen), list(seen.values()))
        return renyi.limit(server, found) if renyi else found

    def agree(server: ServerState, messages: Sequence[Message]) -> Mapping[int, Terms]:
        name = "gap" if bounds.strict else "sharpness_raw"
        able = [m for m in messages if name in m.scalars]
        found = terms([m.client for m in able], [m.scalars[name] for m in able])
        return renyi.limit(server, found) if renyi else found

    renyi = RenyiFilter(visits, bounds.factor_max) if bounds.noise_rule == "personalised" else None
    weighted = sharpness(mu, prior, bound=sharp.bound if bounds.strict else None)
    aggregate = remembering(weighted, {"gap": SEEN, FACTOR: FACTOR}, len(visits))
    rule = remember(apply(server_lr, gamma))
    rule = renyi.spend(rule) if renyi else rule
    if p.level == "sample":
        solver = LocalSolver(optimizer, p.private_gradient(rho))
        release = gaussian_scalar("gap", sharp.bound, sharp.multiplier, unit="sample", adjacency=p.adjacency)
        measures = (private_gap(rho, sharp.bound),)
        return Algorithm("sam_adpfl", solver, aggregate, rule, (), measures, (release,), before, protection=p)
    if bounds.strict:
        measures = (sharpness_gap(rho, sharp.at),)
        release = gaussian_scalar("gap", sharp.bound, sharp.multiplier, unit="client", adjacency=p.adjacency)
    else:
        measures = (paper_scalars(rho),)
        limits = {"sharpness": sharp.bound, "loss_std": sharp.loss_bound, "loss_worst": sharp.loss_bound}
        release = laplace_scalars(limits, sharp.epsilon, adjacency=p.adjacency)
    solver, uplink = LocalSolver(optimizer, (sam(rho),)), (clip_noise(p.clip, p.multipliers, p.adjacency),)
    when = {"before": before} if sharp.lagged else {"agree": agree}
    return Algorithm("sam_adpfl", solver, aggregate, rule, uplink, measures, (release,), protection=p, **when)
