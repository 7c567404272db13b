"""Algebraic identities between algorithms, each run as real federations.

A row compares the global model after every round. Where a setting makes two algorithms one, the row also checks that
another value of it makes them two.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.config.algorithms import DP_ALGORITHMS
from fl_lightning.config.protection import NON_PRIVATE
from fl_lightning.verify.federations import ENGINES, Settings, largest, models_of, worst
from fl_lightning.verify.table import Check, Found


def named(name: str, **local: Any) -> dict[str, Any]:
    """Settings that choose an algorithm and keys of its `algorithm.local`."""
    return {"algorithm.name": name, **{f"algorithm.local.{key}": value for key, value in local.items()}}


def server(**aggregate: Any) -> dict[str, Any]:
    """Keys of `algorithm.aggregate`."""
    return {f"algorithm.aggregate.{key}": value for key, value in aggregate.items()}


def sharp(**settings: Any) -> dict[str, Any]:
    """Keys of `algorithm.sharpness`."""
    return {f"algorithm.sharpness.{key}": value for key, value in settings.items()}


UPDATE, SAMPLE = {"privacy.level": "update"}, {"privacy.level": "sample"}
NOISY = {"privacy.clip_norm": 0.3, "privacy.noise_multiplier": 0.2}
FREE = {"privacy.clip_norm": math.inf, "privacy.noise_multiplier": 0.0}
EVEN = server(weighting="uniform")
FULL_BATCH = {"fl.batch_size": 10_000, "fl.local_epochs": 2}
"""One batch holds a client's whole data, so that Poisson sampling has q = 1; two steps a visit."""
EQUAL_STEPS = {"fl.batch_size": 3, "fl.max_local_steps": 2}
"""Every client of the small federation takes two steps."""
ONE_ROUND, TWO_ROUNDS = {"fl.rounds": 1}, {"fl.rounds": 2}
FEDAVG = named("fedavg")
EVEN_FEDAVG = {**FEDAVG, **EVEN}
PLAIN = {**named("sam_adpfl", rho=0.0), **server(mu=0.0), **sharp(clip_alpha=0.0, noise_rule="constant")}
STRAIGHT = {**named("fedadam"), **server(server_beta1=0.0, server_beta2=0.0, server_lr=1e12, tau=1e12)}


@dataclass(frozen=True)
class Pair:
    """Two federations that must agree.

    Attributes:
        name: of the row.
        compares: the statement, in words.
        left: settings of one.
        right: settings of the other.
        shared: settings of both.
        unlike: settings laid over `left` under which they must differ.
        apart: settings laid over both under which they must differ.
        tolerance: in units of a weight.
    """

    name: str
    compares: str
    left: Settings
    right: Settings
    shared: Settings = field(default_factory=dict)
    unlike: Settings = field(default_factory=dict)
    apart: Settings = field(default_factory=dict)
    tolerance: float = 1e-12

    def check(self) -> Check:
        return Check(self.name, self.compares, self.measure, self.tolerance)

    def measure(self) -> Found:
        """`left` on every engine against `right` on the first (`engine_checks` compares engines), and the contrast."""
        right = models_of(self.right, self.shared, {"engine.kind": ENGINES[0]})
        on_engines = [models_of(self.left, self.shared, {"engine.kind": kind}) for kind in ENGINES]
        difference = worst([largest(left, right) for left in on_engines])
        if not self.unlike and not self.apart:
            return Found(difference)
        left = models_of(self.left, self.shared, self.unlike, self.apart, {"engine.kind": ENGINES[0]})
        if self.apart:
            right = models_of(self.right, self.shared, self.apart, {"engine.kind": ENGINES[0]})
        return Found(difference, largest(left, right))


PAIRS = (
    Pair(
        "fedsam/rho-0",
        "rho = 0: FedSAM = FedAvg",
        named("fedsam", rho=0.0),
        FEDAVG,
        unlike=named("fedsam", rho=0.1),
    ),
    Pair(
        "fedprox/mu-0",
        "mu = 0: FedProx = FedAvg",
        named("fedprox", prox_mu=0.0),
        FEDAVG,
        unlike=named("fedprox", prox_mu=1.0),
    ),
    Pair("moon/mu-0", "mu = 0: MOON = FedAvg", named("moon", mu=0.0), FEDAVG, unlike=named("moon", mu=5.0)),
    Pair(
        "sam_afl/mu-0",
        "mu = 0, gamma = 1: SAM-AFL = FedSAM",
        {**named("sam_afl"), **server(mu=0.0, gamma=1.0)},
        named("fedsam"),
        unlike=server(mu=10.0),
    ),
    Pair(
        "fednova/equal-steps",
        "clients of equal steps: FedNova = FedAvg",
        named("fednova"),
        FEDAVG,
        EQUAL_STEPS,
        apart={"fl.max_local_steps": 10},
    ),
    Pair(
        "fednova/equal-steps/momentum",
        "the same under heavy-ball momentum",
        named("fednova", optimizer="momentum"),
        named("fedavg", optimizer="momentum"),
        EQUAL_STEPS,
        apart={"fl.max_local_steps": 10},
    ),
    Pair(
        "scaffold/zero-controls",
        "zero control variates: SCAFFOLD's first round = FedAvg's, equal weights",
        named("scaffold"),
        EVEN_FEDAVG,
        ONE_ROUND,
        apart=TWO_ROUNDS,
    ),
    Pair(
        "scaffold/zero-controls/option-I",
        "the same with option I",
        named("scaffold", option="I"),
        EVEN_FEDAVG,
        ONE_ROUND,
        apart=TWO_ROUNDS,
    ),
    Pair(
        "fedavgm/beta-0",
        "beta = 0: FedAvgM = FedAvg",
        {**named("fedavgm"), **server(server_momentum=0.0)},
        FEDAVG,
        unlike=server(server_momentum=0.9),
    ),
    Pair(
        "fedexp/eps-inf",
        "eps -> infinity: FedExP = FedAvg",
        {**named("fedexp"), **server(eps=1e9)},
        FEDAVG,
        {"partition.alpha": 0.05, "partition.min_samples": 3, "fl.num_clients": 12, "fl.clients_per_round": 12},
        unlike=server(eps=1e-9),
    ),
    Pair(
        "fedadam/tau-inf",
        "betas 0, server_lr = tau -> infinity: FedAdam = FedAvg",
        STRAIGHT,
        FEDAVG,
        unlike=server(server_beta1=0.9),
    ),
    Pair(
        "ce_fedavg/bound-inf",
        "infinite bound: CE-FedAvg = FedAvg, equal weights",
        named("ce_fedavg", clip=math.inf),
        EVEN_FEDAVG,
        unlike=named("ce_fedavg", clip=0.1),
    ),
    Pair(
        "model_clipping/bound-inf",
        "infinite bound: model clipping = FedAvg, equal weights",
        named("model_clipping", clip=math.inf),
        EVEN_FEDAVG,
        unlike=named("model_clipping", clip=1.0),
    ),
    Pair(
        "dp_fedsam/rho-0/update",
        "rho = 0: DP-FedSAM = DP-FedAvg with the same noise",
        named("dp_fedsam", rho=0.0),
        named("dp_fedavg"),
        {**UPDATE, **NOISY},
        unlike=named("dp_fedsam", rho=0.1),
    ),
    Pair(
        "dp_fedsam/rho-0/sample",
        "the same at level sample",
        named("dp_fedsam", rho=0.0),
        named("dp_fedavg"),
        {**SAMPLE, **NOISY},
        unlike=named("dp_fedsam", rho=0.1),
    ),
    Pair(
        "sam_adpfl/plain/update",
        "mu = clip_alpha = rho = 0, constant noise: SAM-ADPFL = DP-FedAvg with the same noise",
        PLAIN,
        named("dp_fedavg"),
        {**UPDATE, **NOISY},
        unlike=sharp(clip_alpha=0.5),
    ),
    Pair(
        "sam_adpfl/plain/sample",
        "the same at level sample",
        PLAIN,
        named("dp_fedavg"),
        {**SAMPLE, **NOISY},
        unlike=sharp(clip_alpha=0.5),
    ),
)

WITHOUT_ASCENT = {"algorithm.local.rho": 0.0}
"""At level "sample" the ascent follows the step before, not the gradient at hand: another method unless rho = 0."""

BOTH_LEVELS: dict[tuple[str, str], Settings] = {
    ("dp_fedsam", "sample"): WITHOUT_ASCENT,
    ("dp_scaffold", "update"): EQUAL_STEPS,
    ("sam_adpfl", "sample"): {**WITHOUT_ASCENT, **server(mu=0.0)},
}
"""What an algorithm and its counterpart without privacy both need to agree once noise and bound are gone."""

OWN: dict[str, Settings] = {"sam_adpfl": sharp(bound=1e6)}
"""What an algorithm needs beside: bounds of its other releases out of the way."""


def free_pairs() -> Iterator[Pair]:
    """No noise and an infinite bound: DP-X = X, for every private algorithm of the schema and every level."""
    for name in DP_ALGORITHMS:
        plain = NON_PRIVATE.get(name, name.removeprefix("dp_"))
        for level, privacy in (("update", UPDATE), ("sample", SAMPLE)):
            even = EVEN if level == "update" else {}
            shared = {**(FULL_BATCH if level == "sample" else {}), **BOTH_LEVELS.get((name, level), {})}
            statement = f"no noise, infinite bound: {name} at level {level} = {plain}"
            yield Pair(
                f"{name}/free/{level}",
                statement + (" on full batches" if level == "sample" else ", equal weights"),
                {**named(name), **privacy, **FREE, **OWN.get(name, {})},
                {**named(plain), **even},
                shared,
                unlike={"privacy.clip_norm": 0.05},
            )
