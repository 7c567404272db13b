"""Audits a run with canaries while it trains: `privacy.audit=true`.

prepared, watch = arm(prepared)        before training; the run is otherwise trained as usual
watch.verdict(ledger.epsilon())        after it: the lower bound on epsilon, `privacy.audit.AuditResult`
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.canaries import clients, samples
from fl_lightning.canaries.watch import Watch, begin
from fl_lightning.config import RunConfig
from fl_lightning.config.privacy import ClientPrivacy, NoPrivacy, SamplePrivacy
from fl_lightning.errors import PrivacyError
from fl_lightning.shield import visits_of

if TYPE_CHECKING:
    from fl_lightning.build import Prepared

CANARIES = 256
"""Canaries where `privacy.audit_canaries` is not given."""

__all__ = ["CANARIES", "Watch", "arm", "audited_sizes", "with_canaries"]


def number_of(config: RunConfig) -> int:
    """How many canaries the run has; 0 without an audit."""
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy) or not privacy.audit:
        return 0
    return privacy.audit_canaries or CANARIES


def with_canaries(
    config: RunConfig, shards: Sequence[Tensor], visits: Sequence[Sequence[int]], examples: int
) -> tuple[Tensor, ...]:
    """Every client's examples, its canary examples among them where the run is audited at level "sample".

    Args:
        config: the run's.
        shards: indices of each client's examples.
        visits: the rounds in which each client takes part.
        examples: how many examples there are; canary j is number `examples` + j.
    """
    if not isinstance(config.privacy, SamplePrivacy):
        return tuple(shards)
    return tuple(samples.dealt(shards, visits, number_of(config), examples))


def audited_sizes(config: RunConfig, sizes: Sequence[int], visits: Sequence[Sequence[int]]) -> list[int]:
    """n_k of each client as the mechanism counts it, from the sizes of its data alone."""
    shards = [torch.arange(size) for size in sizes]
    return [len(shard) for shard in with_canaries(config, shards, visits, sum(sizes))]


def arm(prepared: "Prepared") -> "tuple[Prepared, Watch | None]":
    """The run with its canaries at work, and what watches them; None where no audit is asked for.

    Raises:
        PrivacyError: more canaries than the model has parameters, or no client that trains.
    """
    config, side = prepared.config, prepared.side
    count, privacy = number_of(config), config.privacy
    if not count or isinstance(privacy, NoPrivacy):
        return prepared, None
    dimension = len(prepared.objective.initial)
    found = begin(count, dimension, config.seed, side.algorithm.protection, config.fl.num_clients)
    if isinstance(privacy, ClientPrivacy):
        rate = config.fl.cohort_size / config.fl.num_clients if privacy.sampling == "poisson" else 1.0
        visits = visits_of(prepared.cohorts, config.fl.num_clients)
        audit = clients.armed(side, found, visits, privacy.trust_model, rate)
        algorithm = clients.watched(side.algorithm, audit)
        return replace(prepared, algorithm=algorithm, side=replace(side, algorithm=algorithm)), found
    first, classes = len(prepared.data.y_train), prepared.data.num_classes
    if not any(bool((shard >= first).any()) for shard in side.shards):
        raise PrivacyError("privacy.audit=true: no client holds data and takes part, so there is nothing to audit")
    armed, _ = samples.armed(side, found, first, classes)
    return replace(prepared, algorithm=armed.algorithm, side=armed), found
