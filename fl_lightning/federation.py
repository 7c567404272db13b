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

from fl_lightning.algorithms.algorithm import Algorithm, Protection
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


Admission = Callable[[int, Sequence[int]], Mapping[int, int | None] | None]
"""(round, cohort) -> the clients whose privacy budget lets them take part -> the steps they may take, None for all;
None where the budget allows no such round."""


Bystanders = Callable[[int, Sequence[Message]], Sequence[tuple[int, Sequence[Release]]]]
"""(round, messages) -> what a round cost clients outside it: where cohorts are secret, each might have been in it."""

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


def poisson_cohort(seed: int, round: int, num_clients: int, size: int) -> tuple[int, ...]:
    """Each of K clients by itself with probability m/K; the cohort may be empty and is never redrawn."""
    drawn = torch.rand(num_clients, generator=generator(seed, "cohort", round), dtype=torch.float64)
    return tuple((drawn < size / num_clients).nonzero().flatten().tolist())


def run_round(
    federation: Federation,
    cohort: Sequence[int],
    algorithm: Algorithm,
    engine: Engine,
    ledger: Accounts | None,
    bystanders: Bystanders | None = None,
    limits: Mapping[int, int | None] | None = None,
) -> tuple[Federation, list[Message], Aggregate]:
    """One round. The federation passed in stays valid: a fault anywhere leaves the previous round intact.

    `limits` are the most steps a client may take, none for as many as planned.
    """
    server, clients = federation.server, federation.clients
    round, limits = server.round + 1, limits or {}
    terms = algorithm.before(server, cohort) if algorithm.before else {}
    visits = [Visit(round, k, clients.get(k, {}), terms.get(k, {}), limits.get(k)) for k in cohort]
    messages = protect(engine.side, server, visits, list(engine.run(server, visits)))
    aggregate = algorithm.aggregate(messages)
    server = algorithm.rule(server, aggregate)
    if ledger is not None:
        for message in messages:
            ledger.record(round, message.client, message.releases)
        for client, releases in bystanders(round, messages) if bystanders else ():
            ledger.record(round, client, releases)
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
    validate: Callable[[ServerState], tuple[float, float] | None] = lambda server: None,
    eval_every: int = 1,
    ledger: Accounts | None = None,
    inspect: Inspection | None = None,
    admit: Admission | None = None,
    bystanders: Bystanders | None = None,
) -> Iterator[tuple[Federation, RoundRecord, list[Message]]]:
    """Runs rounds up to number `rounds`, yielding the state and a record after each. The last round is evaluated.

    `evaluate` and `validate` give loss and accuracy on the test set, and on what the clients hold out of training. What
    `inspect` finds in a round's messages joins the metrics of its record. A round to which `admit` lets nobody of its
    cohort ends the run before it.
    """

    def admission(round: int) -> tuple[tuple[int, ...], Mapping[int, int | None] | None]:
        cohort = tuple(cohort_of(round))
        return cohort, dict.fromkeys(cohort) if admit is None else admit(round, cohort)

    coming = admission(federation.server.round + 1) if federation.server.round < rounds else None
    while coming is not None:
        start = perf_counter()
        cohort, admitted = coming
        if admitted is None:
            return
        kept_out = [f"client {k} has spent its privacy budget and stays out" for k in cohort if k not in admitted]
        cut = [f"client {k}: its privacy budget ends after {n} steps" for k, n in admitted.items() if n is not None]
        before, cohort = federation.server, tuple(admitted)
        federation, messages, aggregate = run_round(federation, cohort, algorithm, engine, ledger, bystanders, admitted)
        round = federation.server.round
        found = inspect(round, messages, aggregate) if inspect else {}
        coming = admission(round + 1) if round < rounds else None  # asked once: the last round is evaluated
        last = coming is None or coming[1] is None
        measuring = round % eval_every == 0 or last
        tested = evaluate(federation.server) if measuring else None
        validated = validate(federation.server) if measuring else None
        record = RoundRecord(
            round=round,
            cohort=cohort,
            train_loss=_mean_train_loss(messages),
            test_loss=tested[0] if tested else None,
            test_accuracy=tested[1] if tested else None,
            seconds=perf_counter() - start,
            epsilon=ledger.epsilon() if ledger is not None else None,
            updated=federation.server.w is not before.w,
            notes=(
                *aggregate.notes,
                *kept_out,
                *cut,
                *(() if tested is None or isfinite(tested[0]) else (DIVERGED,)),
            ),
            validation_loss=validated[0] if validated else None,
            validation_accuracy=validated[1] if validated else None,
            metrics={**_metrics(messages, before, federation.server, algorithm.protection), **found},
        )
        yield federation, record, messages


def initial(w: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> Federation:
    """The federation before its first round."""
    return Federation(replace(ServerState(w), buffers=dict(buffers)), {})


def _mean_train_loss(messages: Sequence[Message]) -> float | None:
    seen = [(m.num_samples, m.oracle["train_loss"]) for m in messages if "train_loss" in m.oracle]
    total = sum(n for n, _ in seen)
    return sum(n * loss for n, loss in seen) / total if total else None


def _metrics(
    messages: Sequence[Message], before: ServerState, after: ServerState, shield: Protection
) -> dict[str, float]:
    """A round in numbers. What a real server could not see, or must not tell, is named oracle/."""
    raw = "" if shield.trust == "local" else "oracle/"  # one upload carries no noise, or a share of it
    counted = "oracle/" if shield.unit == "client" else ""  # steps tell of a client's examples
    drawn = "oracle/" if shield.level != "none" else ""  # and gradients of how many were drawn
    sent = sum(m.size for m in messages if m.steps or shield.unit == "client")
    norms = [float(torch.linalg.vector_norm(m.vectors["delta"])) for m in messages]
    metrics = {
        f"{raw}upload_norm/mean": sum(norms) / len(norms) if norms else 0.0,
        f"{raw}upload_norm/max": max(norms, default=0.0),
        "server_step_norm": float(torch.linalg.vector_norm(after.w - before.w)),
        f"{counted}local_steps": float(sum(m.steps for m in messages)),
        f"{drawn}gradients": float(sum(m.oracle.get("gradients", 0.0) for m in messages)),
        f"{raw}upload_bytes": float(sent),
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
