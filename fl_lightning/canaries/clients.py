"""Canary clients: the audit of levels "update" and "model", inside the run that trains.

Canary j uploads +-STRENGTH C v_j, or nothing if it is out, through the real uplink stage with noise of its own, under
the terms of the client that takes part most often, and in the same rounds (under Poisson cohorts: by a coin of the
cohort's rate in every round). So it spends what that client spends. It is scored by what an adversary sees:

    local                  its own upload. The server is not told of canaries: training is not touched by the audit.
    central, distributed   the change of the server's model. Canaries are part of the mean, with weights 1/(m + k), so
                           they slow training down: by m/(m + k), and each pulls into a direction of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fl_lightning.algorithms.algorithm import Algorithm
from fl_lightning.canaries.watch import Watch
from fl_lightning.client.visit import ClientSide, uplinked
from fl_lightning.records import Aggregate, Message, ServerState
from fl_lightning.rng import generator, stream_key
from fl_lightning.uplink.clip_noise import COHORT
from fl_lightning.uplink.stage import Terms

STRENGTH = 1e4
"""Norm of a canary's update in units of C. Unclipped it would stand out even among other unclipped updates."""

ANNOUNCED = ("gap",)
"""Scalars that a canary repeats from its twin, where the server weighs uploads by them."""


@dataclass
class ClientAudit:
    """The watch over a run's uploads or aggregates.

    Attributes:
        watch: directions, coins and scores.
        side: the client side as it is without an audit; its uplink is the one under test.
        twin: the client whose rounds and terms the canaries share.
        trust: where noise is added.
        rate: q of secret cohorts, 1 where the twin's visits count.
    """

    watch: Watch
    side: ClientSide
    twin: int
    trust: str
    rate: float = 1.0
    terms: Terms = field(default_factory=dict)
    present: list[int] = field(default_factory=list)
    sign: float = 1.0
    rounds: int = 0
    bound: float = 1.0
    weight: float = 0.0

    @property
    def inside(self) -> bool:
        """Whether canaries are part of the server's mean."""
        return self.trust != "local"

    def begin(self, server: ServerState, cohort: Sequence[int], terms: Mapping[int, Terms]) -> Mapping[int, Terms]:
        """Decides who takes part in the coming round; the terms, told of the cohort with its canaries."""
        everyone = list(range(self.watch.canaries))
        if self.rate < 1:
            drawn = torch.rand(len(everyone), generator=generator(self.side.seed, "audit cohort", server.round + 1))
            self.present = [j for j in everyone if drawn[j] < self.rate]
        else:
            self.present = everyone if self.twin in cohort else []
        if self.present or self.rate < 1:
            self.rounds += 1
            self.sign = 1.0 if self.rounds % 2 else -1.0
        more = len(self.present) if self.inside else 0
        told = {k: {**t, COHORT: t[COHORT] + more} if COHORT in t else t for k, t in terms.items()}
        self.terms = told.get(self.twin) or next(iter(told.values()), {})
        return told

    def uploads(self, server_round: int, messages: Sequence[Message]) -> list[Message]:
        """What the canaries of this round send, after the uplink."""
        sent = [self._upload(server_round, j, self._template(messages)) for j in self.present]
        if sent:
            self.bound = sent[0].oracle.get("clip", self.side.algorithm.protection.clip)
        return sent

    def see_uploads(self, sent: Sequence[Message]) -> None:
        """Scores each canary by its own upload."""
        for j, message in zip(self.present, sent, strict=True):
            which = torch.tensor([j])
            self.watch.see(message.vectors["delta"], which, self.sign, self.bound, 1.0)

    def see_change(self, before: ServerState, after: ServerState) -> None:
        """Scores all canaries by the change of the server's model."""
        if self.weight and (self.present or self.rate < 1):
            every, unit = torch.arange(self.watch.canaries), self.bound * self.weight
            self.watch.see(after.w.cpu() - before.w.cpu(), every, self.sign, unit, self.rate)

    def _template(self, messages: Sequence[Message]) -> Message:
        for message in (*(m for m in messages if m.client == self.twin), *messages):
            kept = {name: message.scalars[name] for name in ANNOUNCED if name in message.scalars}
            return replace(message, scalars=kept, releases=(), oracle={}, oracle_vectors={}, owed=0.0)
        return Message(self.twin, 1, 1, {}, buffers=self.side.objective.buffers())

    def _upload(self, round: int, canary: int, template: Message) -> Message:
        factor = self.sign * self.watch.factor(canary) * STRENGTH * self.side.algorithm.protection.clip
        like = torch.zeros(len(self.watch.directions.block))
        raw = self.watch.directions.rows([canary], [factor], like)[0]
        message = replace(template, client=self.twin, steps=1, num_samples=1, vectors={"delta": raw})
        own = replace(self.side, seed=stream_key(self.side.seed, "audit noise", 0, canary), keep_raw=False)
        return uplinked(own, round, message, self.terms)


def watched(algorithm: Algorithm, audit: ClientAudit) -> Algorithm:
    """The algorithm with canaries beside, or inside, every cohort."""
    rounds = [0]

    def before(server: ServerState, cohort: Sequence[int]) -> Mapping[int, Terms]:
        rounds[0] = server.round + 1
        return audit.begin(server, cohort, algorithm.before(server, cohort) if algorithm.before else {})

    def agree(server: ServerState, messages: Sequence[Message]) -> Mapping[int, Terms]:
        assert algorithm.agree is not None
        found = algorithm.agree(server, messages)
        audit.terms = {**audit.terms, **found.get(audit.twin, {})}
        return found

    def aggregate(messages: Sequence[Message]) -> Aggregate:
        sent = audit.uploads(rounds[0], messages)
        if not audit.inside:
            audit.see_uploads(sent)
            return algorithm.aggregate(messages)
        folded = algorithm.aggregate([*messages, *sent])
        audit.weight = folded.weights[-1] if folded.weights else 0.0
        return folded

    def rule(server: ServerState, folded: Aggregate) -> ServerState:
        after = algorithm.rule(server, folded)
        if audit.inside:
            audit.see_change(server, after)
        return after

    agreed = None if algorithm.agree is None else agree
    return replace(algorithm, before=before, agree=agreed, aggregate=aggregate, rule=rule)


def armed(side: ClientSide, watch: Watch, visits: Sequence[Sequence[int]], trust: str, rate: float) -> ClientAudit:
    """The audit of a run whose client k takes part in the rounds visits[k]; `rate` < 1 under Poisson cohorts."""
    twin = max(range(len(visits)), key=lambda k: len(visits[k]))
    return ClientAudit(watch, side, twin, trust, rate)
