"""What a server remembers of its clients' sharpness and budgets, as vectors [K] of its state.

    sharpness   the last released value of each client, NaN before its first
    spent       Renyi filter of personalised noise: sum over visits of (sigma_base / sigma_k^t)^2, at most T_k

A Gaussian's Renyi curve is a / (2 sigma^2), so a client that keeps `spent` <= T_k never costs more than T_k releases at
sigma_base, however its sigma_k were chosen (Feldman and Zrnic 2021, fully adaptive composition).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fl_lightning.records import Aggregate, Message, ServerState
from fl_lightning.server.aggregate import Aggregator
from fl_lightning.server.rules import ServerRule

Terms = Mapping[str, float]

SEEN, SPENT, FACTOR = "sharpness", "spent", "noise_factor"


def last_seen(server: ServerState, cohort: Sequence[int]) -> dict[int, float]:
    """The remembered sharpness of those clients of the cohort that have released one."""
    seen = server.extra.get(SEEN)
    return {} if seen is None else {k: float(seen[k]) for k in cohort if not torch.isnan(seen[k])}


def remembering(aggregate: Aggregator, values: Mapping[str, str], num_clients: int) -> Aggregator:
    """`aggregate`, with the clients' scalars (scalar name -> memory name) as vectors [K], NaN where none came."""

    def collect(messages: Sequence[Message]) -> Aggregate:
        folded = aggregate(messages)
        if folded.empty:
            return folded
        memory = {}
        for scalar, name in values.items():
            memory[name] = torch.full((num_clients,), torch.nan, dtype=torch.float64)
            for message in messages:
                if scalar in message.scalars:
                    memory[name][message.client] = message.scalars[scalar]
        return replace(folded, vectors={**folded.vectors, **memory})

    return collect


def remember(rule: ServerRule) -> ServerRule:
    """`rule`, then the fresh sharpness values replace the old ones."""

    def remembering_rule(server: ServerState, aggregate: Aggregate) -> ServerState:
        after = rule(server, aggregate)
        fresh = aggregate.vectors.get(SEEN)
        if fresh is None:
            return after
        return replace(after, extra={**after.extra, SEEN: _newer(fresh, server.extra.get(SEEN))})

    return remembering_rule


@dataclass(frozen=True)
class RenyiFilter:
    """Keeps personalised noise within every client's budget.

    Attributes:
        visits: the rounds in which each client takes part, known ahead of the run.
        factor_max: r_max >= 1, cap of sigma_k / sigma_base.
    """

    visits: Sequence[Sequence[int]]
    factor_max: float

    def limit(self, server: ServerState, terms: Mapping[int, Terms]) -> dict[int, Terms]:
        """`terms` with noise factors that the clients can afford; the noise is then counted as it is."""
        spent = server.extra.get(SPENT)
        limited: dict[int, Terms] = {}
        for client, agreed in terms.items():
            later = sum(round > server.round + 1 for round in self.visits[client])
            used = 0.0 if spent is None else float(spent[client])
            budget = float(len(self.visits[client]))
            factor = filtered_factor(agreed["noise_factor"], budget, used, later, self.factor_max)
            limited[client] = {**agreed, "noise_factor": factor, "count_realised": 1.0}
        return limited

    def spend(self, rule: ServerRule) -> ServerRule:
        """`rule`, then each client that uploaded has spent (sigma_base / sigma_k)^2."""

        def spending_rule(server: ServerState, aggregate: Aggregate) -> ServerState:
            after = rule(server, aggregate)
            factors = aggregate.vectors.get(FACTOR)
            if factors is None:
                return after
            cost = torch.where(torch.isnan(factors), torch.zeros_like(factors), factors**-2)
            spent = server.extra.get(SPENT, torch.zeros_like(cost))
            return replace(after, extra={**after.extra, SPENT: spent + cost})

        return spending_rule


def filtered_factor(wanted: float, budget: float, spent: float, later: int, factor_max: float) -> float:
    """The noise factor nearest to `wanted` that keeps a client within its budget, now and at its later visits.

    Args:
        wanted: sigma_k / sigma_base that the rule asks for, in [1/r_max, r_max].
        budget: T_k, the client's planned visits; each may cost 1 on average.
        spent: sum of (sigma_base / sigma_k)^2 so far.
        later: planned visits after this one; each keeps at least 1 / r_max^2.
        factor_max: r_max >= 1.
    """
    room = budget - spent - later / factor_max**2
    return max(wanted, room**-0.5) if room > 0 else factor_max


def _newer(fresh: Tensor, old: Tensor | None) -> Tensor:
    return fresh if old is None else torch.where(torch.isnan(fresh), old, fresh)
