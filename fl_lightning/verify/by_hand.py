"""The algorithms a second time, written out from their equations in the plainest way, as a reference for `verify`.

Nothing here comes from `local`, `uplink`, `server` or `algorithms`. x is the server's model, y a client's, p_k the
cohort's weights; each function returns the model before the first round and after every round.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.records import Vector
from fl_lightning.verify.bench import Batch, Bench, Client, Direction


def plain(c: Client, y: Vector, batch: Batch) -> Vector:
    """g_k(y; xi)."""
    return c.bench.grad(y, batch)


def sam(c: Client, y: Vector, batch: Batch) -> Vector:
    """g(y + rho g/||g||)."""
    return c.bench.grad(c.bench.ascended(y, c.bench.grad(y, batch), c.bench.local.rho), batch)


def averaging(b: Bench, upload: Callable[[Client, Vector], Vector]) -> list[Vector]:
    """x <- x + server_lr sum_k p_k upload_k, every round."""
    models = [b.start]
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        step = sum(p * upload(c, x) for p, c in zip(b.shares(cohort), cohort, strict=True))
        models.append(x + getattr(b.server, "server_lr", 1.0) * step)
    return models


def fedavg(b: Bench) -> list[Vector]:
    return averaging(b, lambda c, x: c.train(x, plain) - x)


def fedprox(b: Bench) -> list[Vector]:
    mu = b.local.prox_mu
    return averaging(b, lambda c, x: c.train(x, lambda c, y, xi: plain(c, y, xi) + mu * (y - x)) - x)


def fedsam(b: Bench) -> list[Vector]:
    return averaging(b, lambda c, x: c.train(x, sam) - x)


def asam(b: Bench) -> list[Vector]:
    def direction(c: Client, y: Vector, batch: Batch) -> Vector:
        scale = y.abs() + 0.01
        tg = scale * b.grad(y, batch)
        return b.grad(y + b.local.rho * scale * tg / tg.norm(), batch)

    return averaging(b, lambda c, x: c.train(x, direction) - x)


def ce_fedavg(b: Bench) -> list[Vector]:
    return averaging(b, lambda c, x: (d := c.train(x, plain) - x) * min(1.0, b.local.clip / float(d.norm())))


def model_clipping(b: Bench) -> list[Vector]:
    return averaging(b, lambda c, x: (y := c.train(x, plain)) * min(1.0, b.local.clip / float(y.norm())) - x)


def moon(b: Bench) -> list[Vector]:
    earlier: dict[int, Vector] = {}

    def upload(c: Client, x: Vector) -> Vector:
        before = earlier.get(c.k)

        def loss(w: Vector, batch: Batch) -> Tensor:
            if before is None:
                return b.loss(w, batch)
            z, glob, prev = (b.features(v, batch[0]) for v in (w, x, before))
            near = torch.exp(F.cosine_similarity(z, glob) / b.local.temperature)
            far = torch.exp(F.cosine_similarity(z, prev) / b.local.temperature)
            return b.loss(w, batch) + b.local.mu * -torch.log(near / (near + far)).mean()

        earlier[c.k] = c.train(x, lambda c, y, xi: b.grad(y, xi, loss))
        return earlier[c.k] - x

    return averaging(b, upload)


def fedavgm(b: Bench) -> list[Vector]:
    def rule(x: Vector, delta: Vector, memory: dict[str, Any]) -> Vector:
        memory["m"] = b.server.server_momentum * memory.get("m", 0.0) + delta
        return x + b.server.server_lr * memory["m"]

    return remembering(b, rule)


def fedadam(b: Bench) -> list[Vector]:
    s = b.server

    def rule(x: Vector, delta: Vector, memory: dict[str, Any]) -> Vector:
        memory["m"] = s.server_beta1 * memory.get("m", 0.0) + (1 - s.server_beta1) * delta
        memory["v"] = s.server_beta2 * memory.get("v", s.tau**2) + (1 - s.server_beta2) * delta**2
        return x + s.server_lr * memory["m"] / (memory["v"].sqrt() + s.tau)

    return remembering(b, rule)


def remembering(b: Bench, rule: Callable[[Vector, Vector, dict[str, Any]], Vector]) -> list[Vector]:
    models, memory = [b.start], {}
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        delta = sum(p * (c.train(x, plain) - x) for p, c in zip(b.shares(cohort), cohort, strict=True))
        models.append(rule(x, delta, memory))
    return models


def fedexp(b: Bench) -> list[Vector]:
    models = [b.start]
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        p, deltas = b.shares(cohort), [c.train(x, plain) - x for c in cohort]
        mean = sum(w * d for w, d in zip(p, deltas, strict=True))
        squares = sum(w * float(d @ d) for w, d in zip(p, deltas, strict=True))
        models.append(x + max(1.0, squares / (2 * (float(mean @ mean) + b.server.eps))) * mean)
    return models


def fednova(b: Bench) -> list[Vector]:
    models, rho = [b.start], getattr(b.local, "momentum", 0.0)
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        p, deltas, lengths = b.shares(cohort), [], []
        for c in cohort:
            y, buffer, velocity, path = x.clone(), torch.zeros_like(x), 0.0, 0.0
            for batch in c.batches:
                buffer = rho * buffer + b.grad(y, batch)
                y = y - b.local.lr * buffer
                velocity = rho * velocity + 1.0
                path += velocity  # how far unit gradients would have carried y
            deltas.append(y - x)
            lengths.append(path)
        tau = sum(w * a for w, a in zip(p, lengths, strict=True))
        models.append(x + b.server.server_lr * tau * sum(w * d / a for w, d, a in zip(p, deltas, lengths, strict=True)))
    return models


def scaffold(b: Bench) -> list[Vector]:
    return controlled(b, lambda k: plain, b.local.option)


def shifted(gradient: Direction, by: Vector) -> Direction:
    """g(y; xi) + by."""
    return lambda c, y, batch: gradient(c, y, batch) + by


def controlled(b: Bench, gradient: Callable[[int], Direction], option: str = "II") -> list[Vector]:
    """SCAFFOLD over any gradient of client k."""
    models, N = [b.start], b.config.fl.num_clients
    c, c_k = torch.zeros_like(models[0]), [torch.zeros_like(models[0]) for _ in range(N)]
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        deltas, changes = [], []
        for client in cohort:
            own = c_k[client.k]
            y = client.train(x, shifted(gradient(client.k), c - own))
            new = b.grad(x, client.everything()) if option == "I" else own - c + (x - y) / (client.Q * b.local.lr)
            deltas.append(y - x)
            changes.append(new - own)
            c_k[client.k] = new
        models.append(x + b.server.server_lr * sum(deltas) / len(cohort))
        c = c + len(cohort) / N * sum(changes) / len(cohort)
    return models


def sam_afl(b: Bench) -> list[Vector]:
    models = [b.start]
    for t in range(1, b.config.fl.rounds + 1):
        x, cohort = models[-1], b.clients(t)
        ys = [c.train(x, sam) for c in cohort]
        gaps = [gap(c, y) for c, y in zip(cohort, ys, strict=True)]
        lam = softweights(b.shares(cohort), gaps, b.server.mu)
        step = sum(w * (y - x) for w, y in zip(lam, ys, strict=True))
        models.append(b.server.gamma * (x + b.server.server_lr * step))
    return models


def gap(c: Client, y: Vector) -> float:
    """L_worst - L_std over the last epoch's batches, each with its own ascent."""
    b, total = c.bench, 0.0
    for batch in c.last:
        worst = b.ascended(y, b.grad(y, batch), b.local.rho)
        total += len(batch[1]) * float(b.loss(worst, batch) - b.loss(y, batch))
    return total / sum(len(labels) for _, labels in c.last)


def softweights(p: Sequence[float], gaps: Sequence[float], mu: float) -> list[float]:
    """lambda_k = p_k exp(-mu G_k) / sum_j p_j exp(-mu G_j)."""
    raw = [w * math.exp(-mu * g) for w, g in zip(p, gaps, strict=True)]
    return [w / sum(raw) for w in raw]
