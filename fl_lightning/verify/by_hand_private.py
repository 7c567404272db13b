"""The private algorithms, and FedLAW's server, written out from their equations like those of `by_hand`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.data.datasets import load_data
from fl_lightning.data.loading import ImageStore, poisson_rate, shuffled_epoch
from fl_lightning.data.proxy import hold_out
from fl_lightning.records import Vector
from fl_lightning.verify.bench import Batch, Bench, Client
from fl_lightning.verify.by_hand import averaging, controlled, gap, plain, sam, shifted, softweights


@dataclass
class DpSgd:
    """(sum_i clip(g_i(y + rho p/||p||), C) + N(0, (z C)^2 I)) / (q n), p the direction before; one visit's."""

    clip: float
    z: float
    rho: float = 0.0
    p: list[Vector] = field(default_factory=list)

    def __call__(self, c: Client, y: Vector, batch: Batch) -> Vector:
        b, total = c.bench, torch.zeros_like(y)
        at = b.ascended(y, self.p[-1], self.rho) if self.p else y
        for image, label in zip(*batch, strict=True):
            g = b.grad(at, (image.unsqueeze(0), label.unsqueeze(0)))
            total = total + g * min(1.0, self.clip / float(g.norm()))
        total = total + self.z * self.clip * b.normal(y, c.rng)
        self.p.append(total / (poisson_rate(c.n, b.config.fl.batch_size) * c.n))
        return self.p[-1]


def dp_sample(b: Bench) -> list[Vector]:
    """DP-FedAvg and DP-FedSAM at level "sample"."""
    clip, rho = b.config.privacy.clip_norm, getattr(b.local, "rho", 0.0)
    return averaging(b, lambda c, x: c.train(x, DpSgd(clip, b.z[c.k], rho)) - x)


def dp_update(b: Bench) -> list[Vector]:
    """DP-FedAvg and DP-FedSAM at level "update"."""
    clip, direction = b.config.privacy.clip_norm, sam if hasattr(b.local, "rho") else plain
    return averaging(b, lambda c, x: c.protected(c.train(x, direction) - x, clip, b.z[c.k]))


def dp_scaffold_sample(b: Bench) -> list[Vector]:
    return controlled(b, lambda k: DpSgd(b.config.privacy.clip_norm, b.z[k]))


def dp_scaffold_update(b: Bench) -> list[Vector]:
    """The server's control from the protected updates alone, c_k from the unprotected one; Q is public."""
    models, N, Q = [b.start], b.config.fl.num_clients, b.config.fl.max_local_steps
    c, c_k = torch.zeros_like(models[0]), [torch.zeros_like(models[0]) for _ in range(N)]
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        sent = []
        for i in cohort:
            y = i.train(x, shifted(plain, c - c_k[i.k]))
            sent.append(i.protected(y - x, b.config.privacy.clip_norm, b.z[i.k]))
            c_k[i.k] = c_k[i.k] - c + (x - y) / (Q * b.local.lr)
        step = sum(sent) / len(sent)
        models.append(x + b.server.server_lr * step)
        c = c + len(cohort) / N * (-c - step / (Q * b.local.lr))
    return models


def fedlaw(b: Bench) -> list[Vector]:
    return learning(b, lambda c, x: c.train(x, plain) - x)


def dp_fedlaw_sample(b: Bench) -> list[Vector]:
    return learning(b, lambda c, x: c.train(x, DpSgd(b.config.privacy.clip_norm, b.z[c.k])) - x)


def dp_fedlaw_update(b: Bench) -> list[Vector]:
    return learning(b, lambda c, x: c.protected(c.train(x, plain) - x, b.config.privacy.clip_norm, b.z[c.k]))


def learning(b: Bench, upload: Callable[[Client, Vector], Vector]) -> list[Vector]:
    """w = exp(y) sum_k softmax(x)_k w_k, x and y by torch's Adam on the proxy set, by autograd through the mixture."""
    s, config = b.server, b.config
    data, images, labels = hold_out(load_data(config.data), s.proxy_share, config.seed)
    store = ImageStore(images, labels, data.mean, data.std, torch.float64)
    models = [b.start]
    for t in range(1, config.fl.rounds + 1):
        w, cohort = models[-1], b.clients(t)
        ws = torch.stack([w + upload(c, w) for c in cohort])
        x = torch.tensor(b.shares(cohort), dtype=torch.float64).log().requires_grad_()
        y = torch.zeros((), dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([x, y], lr=s.proxy_lr, betas=(s.proxy_beta1, s.proxy_beta2))
        schedule = torch.optim.lr_scheduler.StepLR(adam, s.proxy_lr_step, s.proxy_lr_decay)
        rng = b.noise("proxy", t, 0)
        for _ in range(s.proxy_epochs):
            for positions in shuffled_epoch(len(labels), s.proxy_batch_size, rng):
                adam.zero_grad()
                b.loss(y.exp() * (x.softmax(0) @ ws), store.batch(positions)).backward()
                adam.step()
            schedule.step()
        models.append((y.exp() * (x.softmax(0) @ ws)).detach())
    return models


def sam_adpfl_update(b: Bench) -> list[Vector]:
    """Strict, level "update": bounds and noise of a round from the gaps released in it."""
    models, clip = [b.start], b.config.privacy.clip_norm
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        ys = [c.train(x, sam) for c in cohort]
        released = [_released(c, gap(c, y), 1) for c, y in zip(cohort, ys, strict=True)]
        terms = _bounds_and_noise(b, clip, released)
        sent = [c.protected(y - x, C, r * b.z[c.k]) for c, y, (C, r) in zip(cohort, ys, terms, strict=True)]
        models.append(_weighted(b, x, cohort, released, sent))
    return models


def sam_adpfl_sample(b: Bench) -> list[Vector]:
    """Strict, level "sample": DP-SGD, bounds and noise from the gaps that clients released at their last visits."""
    models, clip, seen = [b.start], b.config.privacy.clip_norm, dict[int, float]()
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        known = [c.k for c in cohort if c.k in seen]
        terms = dict(zip(known, _bounds_and_noise(b, clip, [seen[k] for k in known]), strict=True))
        sent, released = [], []
        for c in cohort:
            C, r = terms.get(c.k, (clip, 1.0))
            steps = DpSgd(C, r * b.z[c.k], b.local.rho)
            y = c.train(x, steps)
            images, labels = c.everything()
            worst, std = (_losses(b, v, images, labels) for v in (b.ascended(y, steps.p[-1], b.local.rho), y))
            released.append(_released(c, float((worst - std).clamp(0, _bound(b)).mean()), c.n))
            sent.append(y - x)
        seen |= {c.k: g for c, g in zip(cohort, released, strict=True)}
        models.append(_weighted(b, x, cohort, released, sent))
    return models


def _losses(b: Bench, w: Vector, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(b.logits(w, images), labels, reduction="none").detach()


def _bound(b: Bench) -> float:
    return b.config.algorithm.sharpness.bound


def _released(c: Client, value: float, n: int) -> float:
    """clip(G, 0, B_S) + N(0, (tau B_S / n)^2)."""
    b = c.bench
    std = b.prepared.noise.scalar_multiplier * _bound(b) / n
    normal = torch.randn((), generator=b.noise("announce", c.round, c.k), dtype=torch.float64)
    return min(max(value, 0.0), _bound(b)) + std * float(normal)


def _bounds_and_noise(b: Bench, clip: float, released: Sequence[float]) -> list[tuple[float, float]]:
    """(C_k, sigma_k/sigma_base) by Eq. 13 and 14 under the strict caps, of gaps put back into [S_lo, B_S]."""
    if not released:
        return []
    settings = b.config.algorithm.sharpness
    S = [min(max(value, settings.floor_ratio * settings.bound), settings.bound) for value in released]
    mean, least = sum(S) / len(S), min(S)
    found = []
    for s in S:
        C = clip * (1 + settings.clip_alpha * (s - mean) / mean)
        C = min(max(C, settings.clip_min_ratio * clip), (settings.clip_max_ratio or 4.0) * clip)
        r = 1.0 if settings.noise_rule == "constant" else s / (least + (settings.xi or 1e-4))
        found.append((C, min(max(r, 1.0), settings.factor_max or 4.0)))
    return found


def _weighted(
    b: Bench, x: Vector, cohort: Sequence[Client], released: Sequence[float], sent: Sequence[Vector]
) -> Vector:
    """gamma (x + eta_g sum_k lambda_k u_k), lambda by Eq. 12 of gaps clipped to [0, B_S]."""
    gaps = [min(max(value, 0.0), _bound(b)) for value in released]
    lam = softweights(b.shares(cohort), gaps, b.server.mu)
    step = sum(weight * u for weight, u in zip(lam, sent, strict=True))
    return b.server.gamma * (x + b.server.server_lr * step)
