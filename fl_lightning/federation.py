"""The whole product in one screen: one round, and the loop over rounds.

sample cohort -> broadcast -> on each client: local solve, announcements, agreement, uplink
-> aggregate in cohort order -> server rule -> ledger -> commit server and client states together -> observe
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from time import perf_counter
from typing import Protocol

import torch

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.client.visit import ClientSide, Visit, protect
from fl_lightning.records import Aggregate, ClientState, Message, Release, RoundRecord, ServerState
from fl_lightning.rng import generator

DIVERGED = "the test loss is not finite: training has diverged; lower algorithm.local.lr"


class Engine(Protocol):
    """Runs a cohort. Messages come in the order of `visits`, whatever order the work was done in."""

    side: ClientSide

    def run(self, server: ServerState, visits: Sequence[Visit]) -> Iterator[Message]: ...

    def close(self) -> None: ...


class Accounts(Protocol):
    """The ledger as the orchestrator uses it."""

    def record(self, round: int, client: int, releases: Sequence[Release]) -> None: ...

    def epsilon(self) -> float: ...


Inspection = Callable[[int, Sequence[Message], Aggregate], Mapping[str, float]]
"""(round, messages in cohort order, their aggregate) -> metrics by name."""


@dataclass(frozen=True)
class Federation:
    """All state of a run between two rounds."""

    server: ServerState
    clients: Mapping[int, ClientState]


def sample_cohort(seed: int, round: int, num_clients: int, size: int) -> tuple[int, ...]:
    """m of K clients uniformly without replacement, in increasing order."""
    chosen = torch.randperm(num_clients, generator=generator(seed, "cohort", round))[:size]
    return tuple(sorted(chosen.tolist()))


def run_round(
    federation: Federation, cohort: Sequence[int], algorithm: Algorithm, engine: Engine, ledger: Accounts | None
) -> tuple[Federation, list[Message], Aggregate]:
    """One round. The federation passed in stays valid: a fault anywhere leaves the previous round intact."""
    server, clients = federation.server, federation.clients
    round = server.round + 1
    terms = algorithm.before(server, cohort) if algorithm.before else {}
    visits = [Visit(round, client, clients.get(client, {}), terms.get(client, {})) for client in cohort]
    messages = protect(engine.side, server, list(engine.run(server, visits)))
    aggregate = algorithm.aggregate(messages)
    server = algorithm.rule(server, aggregate)
    if ledger is not None:
        for message in messages:
            ledger.record(round, message.client, message.releases)
    kept = {message.client: message.state for message in messages if message.state}
    return Federation(server, {**clients, **kept}), messages, aggregate


def fit(
    federation: Federation,
    *,
    rounds: int,
    cohort_of: Callable[[int], Sequence[int]],
    algorithm: Algorithm,
    engine: Engine,
    evaluate: Callable[[ServerState], tuple[float, float] | None],
    eval_every: int = 1,
    ledger: Accounts | None = None,
    inspect: Inspection | None = None,
) -> Iterator[tuple[Federation, RoundRecord, list[Message]]]:
    """Runs rounds up to number `rounds`, yielding the state and a record after each. The last round is evaluated.

    What `inspect` finds in a round's messages joins the metrics of its record.
    """
    while federation.server.round < rounds:
        start = perf_counter()
        cohort = tuple(cohort_of(federation.server.round + 1))
        before = federation.server
        federation, messages, aggregate = run_round(federation, cohort, algorithm, engine, ledger)
        round = federation.server.round
        found = inspect(round, messages, aggregate) if inspect else {}
        tested = evaluate(federation.server) if round % eval_every == 0 or round == rounds else None
        record = RoundRecord(
            round=round,
            cohort=cohort,
            train_loss=_mean_train_loss(messages),
            test_loss=tested[0] if tested else None,
            test_accuracy=tested[1] if tested else None,
            seconds=perf_counter() - start,
            epsilon=ledger.epsilon() if ledger is not None else None,
            updated=federation.server.w is not before.w,
            notes=aggregate.notes if tested is None or isfinite(tested[0]) else (*aggregate.notes, DIVERGED),
            metrics={**_metrics(messages, before, federation.server), **found},
        )
        yield federation, record, messages


def initial(w: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> Federation:
    """The federation before its first round."""
    return Federation(replace(ServerState(w), buffers=dict(buffers)), {})


def _mean_train_loss(messages: Sequence[Message]) -> float | None:
    seen = [(m.num_samples, m.oracle["train_loss"]) for m in messages if "train_loss" in m.oracle]
    total = sum(n for n, _ in seen)
    return sum(n * loss for n, loss in seen) / total if total else None


def _metrics(messages: Sequence[Message], before: ServerState, after: ServerState) -> dict[str, float]:
    norms = [float(torch.linalg.vector_norm(m.vectors["delta"])) for m in messages]
    metrics = {
        "upload_norm/mean": sum(norms) / len(norms) if norms else 0.0,
        "upload_norm/max": max(norms, default=0.0),
        "server_step_norm": float(torch.linalg.vector_norm(after.w - before.w)),
        "local_steps": float(sum(m.steps for m in messages)),
    }
    for name in ("update_norm", "clipped"):
        values = [m.oracle[name] for m in messages if name in m.oracle]
        if values:
            metrics[f"oracle/{name}"] = sum(values) / len(values)
    if "gamma" in after.extra:
        metrics["server/gamma"] = float(after.extra["gamma"])
    gaps = [m.scalars["gap"] for m in messages if "gap" in m.scalars]
    if gaps:
        metrics["gap/mean"] = sum(gaps) / len(gaps)
    return metrics
