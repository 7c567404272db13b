"""One client's visit: what every engine does at its start, and at its end inside the client's boundary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.data.loading import Sampling, sampled_share, visit_plan
from fl_lightning.errors import FLError, PrivacyError
from fl_lightning.local.counting import Counted
from fl_lightning.local.solver import Batch, Context, Objective, SolverState
from fl_lightning.records import ClientState, Message, Release, ServerState, Vector
from fl_lightning.rng import generator
from fl_lightning.uplink.stage import Terms, send

MEASURED_TOGETHER = 500
"""Examples per batch where a client measures something over all its data."""


@dataclass(frozen=True)
class Schedule:
    """How long and in what batches a client trains: E epochs of batches of B, at most `max_steps` steps."""

    batch_size: int
    local_epochs: int = 1
    max_steps: int | None = None


@dataclass(frozen=True)
class Visit:
    """One client's turn in one round; `max_steps` is what its privacy budget allows, None for no such limit."""

    round: int
    client: int
    state: ClientState = field(default_factory=dict)
    terms: Terms = field(default_factory=dict)
    max_steps: int | None = None


class VisitObjective(Objective, Protocol):
    """A loss with a device and with buffers that travel with the model."""

    @property
    def device(self) -> torch.device: ...

    def buffers(self) -> dict[str, Tensor]: ...

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None: ...


class Store(Protocol):
    """Examples by number."""

    def batch(self, indices: Tensor) -> Batch: ...


@dataclass(frozen=True)
class ClientSide:
    """Everything a visit needs that stays the same all run: algorithm, data, shards, loss, schedule, seed.

    `keep_raw` has messages carry the raw update beside the upload, for a simulator's diagnostics.
    """

    algorithm: Algorithm
    objective: VisitObjective
    store: Store
    shards: Sequence[Tensor]
    schedule: Schedule
    seed: int
    batch_norm: bool = False
    keep_raw: bool = False

    @property
    def private_samples(self) -> bool:
        return self.algorithm.protection.level == "sample"

    @property
    def sampling(self) -> Sampling:
        """How a client's examples enter its steps."""
        return self.algorithm.protection.sampling if self.private_samples else "shuffled"

    def rate(self, samples: int) -> float:
        """q, the share of a client's `samples` examples in a step."""
        return sampled_share(samples, self.schedule.batch_size, self.sampling)


@dataclass
class OpenVisit:
    """A visit under way: its solver state moves step by step, the rest stands."""

    visit: Visit
    x: Vector
    ctx: Context
    batches: list[Tensor]
    last_epoch: int
    solver: SolverState


def plan(side: ClientSide, visit: Visit) -> tuple[list[Tensor], int]:
    """The visit's batches as indices into the store, and how many of them are its last epoch."""
    shard = side.shards[visit.client]
    batches, last = visit_plan(
        len(shard),
        side.schedule.batch_size,
        side.schedule.local_epochs,
        generator(side.seed, "batches", visit.round, visit.client),
        sampling=side.sampling,
        max_steps=_fewest(side.schedule.max_steps, visit.max_steps),
        merge_single=side.batch_norm,
    )
    return [shard[positions] for positions in batches], last


def open_visit(side: ClientSide, server: ServerState, visit: Visit) -> OpenVisit:
    """Loads the server's model and buffers; returns the visit before its first step."""
    device = side.objective.device
    x = server.w.to(device)
    side.objective.set_buffers(server.buffers)
    batches, last = plan(side, visit)
    samples = len(side.shards[visit.client])
    ctx = Context(
        client=visit.client,
        anchor=x,
        objective=Counted(side.objective),
        noise=generator(side.seed, "noise", visit.round, visit.client),
        expected_batch=samples * side.rate(samples) if samples else 1.0,
        server={name: vector.to(device) for name, vector in server.extra.items()},
        state={name: vector.to(device) for name, vector in visit.state.items()},
        terms=visit.terms,
        examples=lambda: [side.store.batch(part) for part in _evenly(side.shards[visit.client], MEASURED_TOGETHER)],
    )
    return OpenVisit(visit, x, ctx, batches, last, side.algorithm.solver.init(x))


def _fewest(first: int | None, second: int | None) -> int | None:
    given = [steps for steps in (first, second) if steps is not None]
    return min(given) if given else None


def _evenly(indices: Tensor, most: int) -> Sequence[Tensor]:
    """Parts of nearly equal length, none above `most`; none holds one example alone, unless there is only one."""
    return indices.tensor_split(max(1, -(-len(indices) // most)))


def guard(side: ClientSide, opened: OpenVisit) -> None:
    """At level "sample" every step must follow the private gradients that are declared for it, one or two.

    Raises:
        PrivacyError: the direction about to be stepped along was not privatised.
    """
    if not side.private_samples:
        return
    each = side.algorithm.protection.releases_per_step
    if (found := opened.ctx.spent[0] - each * opened.solver.steps) != each:
        raise PrivacyError(
            f"client {opened.visit.client}, round {opened.visit.round}: step {opened.solver.steps + 1} follows "
            f"{found} private gradients, it must follow exactly {'one' if each == 1 else each}; "
            "put `private` first in the solver's transforms"
        )


def close_visit(side: ClientSide, opened: OpenVisit) -> Message:
    """Measures, declares and sends: the upload as it leaves the client, on the CPU.

    Where the algorithm's clients first agree on terms, the update stays unprotected inside the client here, and
    `protect` sends it.
    """
    visit, state = opened.visit, opened.solver
    last_epoch = [side.store.batch(indices) for indices in opened.batches[len(opened.batches) - opened.last_epoch :]]
    scalars: dict[str, float] = {}
    vectors: dict[str, Vector] = {"delta": (state.y - opened.x).cpu()}
    kept: dict[str, Vector] = {}
    for measure in side.algorithm.measures if state.steps else ():
        found = measure(state, opened.ctx, last_epoch)
        scalars |= found.scalars
        vectors |= {name: vector.cpu() for name, vector in found.vectors.items()}
        kept |= {name: vector.cpu() for name, vector in found.state.items()}
    samples = len(side.shards[visit.client])
    releases: tuple[Release, ...] = ()
    if side.private_samples and state.steps:
        shield, covers = side.algorithm.protection, side.algorithm.derived
        releases = (shield.gradient_release(visit.client, side.rate(samples), state.steps, visit.terms, covers),)
    message = Message(
        client=visit.client,
        num_samples=samples,
        steps=state.steps,
        vectors=vectors,
        scalars=scalars,
        buffers=side.objective.buffers(),
        releases=releases,
        state=kept,
        oracle={**_passes(opened.ctx), **({} if state.train_loss is None else {"train_loss": state.train_loss})},
    )
    return _announced(side, visit, message)


def _passes(ctx: Context) -> dict[str, float]:
    return {"gradients": float(ctx.objective.gradients)} if isinstance(ctx.objective, Counted) else {}


def _announced(side: ClientSide, visit: Visit, message: Message) -> Message:
    """The message after its announcements, and after its uplink where there is nothing to agree on first."""
    noise = generator(side.seed, "announce", visit.round, visit.client)
    message = send(message, side.algorithm.announcements, noise, visit.terms)
    return message if side.algorithm.agree else uplinked(side, visit.round, message, visit.terms)


def uplinked(side: ClientSide, round: int, message: Message, terms: Terms) -> Message:
    """The message after the client's uplink."""
    if side.keep_raw and message.steps:
        message = replace(message, oracle_vectors={"update": message.vectors["delta"]})
    return send(message, side.algorithm.uplink, generator(side.seed, "uplink", round, message.client), terms)


def protect(
    side: ClientSide, server: ServerState, visits: Sequence[Visit], messages: Sequence[Message]
) -> list[Message]:
    """Clients that have announced agree on terms with the server, and send their updates under them."""
    if side.algorithm.agree is None:
        return list(messages)
    agreed = side.algorithm.agree(server, messages)
    known = {visit.client: visit.terms for visit in visits}
    return [uplinked(side, server.round + 1, m, {**known[m.client], **agreed.get(m.client, {})}) for m in messages]


def untrained(side: ClientSide, visit: Visit, server: ServerState) -> Message:
    """The message of a client that has no batch to train on.

    It weighs nothing, but where the whole client is protected: whether it holds data is private then, so it sends a
    zero update through its uplink like any other.
    """
    still = torch.zeros_like(server.w)
    message = Message(
        client=visit.client,
        num_samples=len(side.shards[visit.client]),
        steps=0,
        vectors={"delta": still},
        buffers=dict(server.buffers),
    )
    shield = side.algorithm.protection
    if shield.unit != "client":
        return message
    if shield.level == "model":
        message = replace(message, vectors={"delta": still, "model": still})
    return _announced(side, visit, message)


def has_batch_norm(model: torch.nn.Module) -> bool:
    """Whether any layer normalises over the batch."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def check_trainable(side: ClientSide, sizes: Mapping[int, int]) -> None:
    """Refuses a BatchNorm model for clients of one example, which it cannot train on.

    Raises:
        PrivacyError: BatchNorm under per-example privacy mixes the examples of a batch.
        FLError: a client holds one example only.
    """
    if not side.batch_norm:
        return
    if side.private_samples:
        raise PrivacyError(
            "model has BatchNorm and privacy.level=sample: batch statistics mix examples, so no per-example bound "
            "holds; use a model with GroupNorm or without normalisation"
        )
    single = [client for client, samples in sizes.items() if samples == 1]
    if single:
        raise FLError(
            f"client {single[0]} holds 1 example and the model has BatchNorm, which needs 2 to train; "
            "raise partition.min_samples to 2, lower data.validation, or use a model without BatchNorm"
        )
