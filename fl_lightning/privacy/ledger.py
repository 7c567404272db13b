"""The privacy ledger: what every client has let out so far, and what that costs.

The ledger is fed by declared releases only; it never guesses. It stores counts, not curves: releases that cost the same
(mechanism, noise multiplier, sampling, rate, what they cover) are one segment, and a client is a list of (segment,
count). A client's curve is the sum of count * R over its segments, so a restored ledger computes the very same numbers,
and 1000 rounds of 1000 clients are a few curves and additions.

One run spends the budget of each client separately: neighbours differ in one unit, which belongs to one client. So the
epsilon of the run is the MAXIMUM over clients, never their sum; and it never falls.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import ADJACENCIES, ORDERS, check_delta, check_release, epsilons
from fl_lightning.privacy.segments import Segment, Signature, check_signature, signature
from fl_lightning.records import Release

SNAPSHOTS = 64
"""At most about so many rounds keep the counts of their worst client: all of them, every second, every fourth..."""


class Ledger:
    """Accounts for the releases of all clients of one run. It has a lifetime, the run's, and therefore is a class.

    Args:
        unit: what is protected, "sample" or "client".
        delta: in (0, 1); below one over the number of protected units to mean anything.
        adjacency: the neighbouring relation, "add_remove", "zero_out" or "replace_one".
        accountant: "rdp".

    Raises:
        PrivacyError: an unknown unit, adjacency or accountant, or a delta outside (0, 1).

    Example:
        >>> ledger = Ledger(unit="sample", delta=1e-5, adjacency="add_remove")
        >>> ledger.record(1, 0, [Release("gaussian", "sample", 1.0, 0.9, count=300, sampling="poisson", rate=0.02)])
        >>> round(ledger.epsilon(), 3)
        3.301
    """

    def __init__(self, *, unit: str, delta: float, adjacency: str, accountant: str = "rdp") -> None:
        known = {"unit": ("sample", "client"), "adjacency": ADJACENCIES, "accountant": ("rdp",)}
        for key, value in {"unit": unit, "adjacency": adjacency, "accountant": accountant}.items():
            if value not in known[key]:
                raise PrivacyError(f"ledger {key}={value!r} is not known: use one of {', '.join(known[key])}")
        check_delta(delta)
        self.unit, self.delta, self.adjacency, self.accountant = unit, float(delta), adjacency, accountant
        self._segments: dict[Segment, list[float]] = {}  # -> [smallest sensitivity, largest, first round, last round]
        self._counts: dict[int, dict[Segment, int]] = {}  # client -> segment -> releases
        self._signatures: dict[int, Signature] = {}  # client -> its latest
        self._latest: dict[int, tuple[int, dict[Segment, int]]] = {}  # client -> its latest round, releases of it
        self._epsilons: dict[int, float] = {}
        self._stale: set[int] = set()  # clients whose epsilon is out of date
        self._history: list[tuple[int, float]] = []  # of the rounds before `_round`
        self._worst_counts: list[tuple[int, dict[Segment, int]]] = []  # of the same rounds
        self._round = 0
        self._segment_of: dict[Release, Segment] = {}

    def record(self, round: int, client: int, releases: Sequence[Release]) -> None:
        """Add what `client` let out in `round` (from 1). All or nothing; a count of 0 costs nothing.

        Raises:
            PrivacyError: a release of another unit or adjacency, one that has no accountant, or a round before the
                last.
        """
        if round < max(self._round, 1) or client < 0:
            raise PrivacyError(
                f"the ledger is at round {self._round} and cannot record round {round} of client {client}: rounds are "
                "numbered from 1 and recorded in order"
            )
        found = [(self._segment(release), release) for release in releases]
        found = [(segment, release) for segment, release in found if release.count]
        if not found:
            return
        if round > self._round:
            if self._round:
                self._history.append((self._round, self.epsilon()))
                step = 1 << (round // SNAPSHOTS).bit_length()
                snapshots = [*self._worst_counts, (self._round, self._counts_of_worst())]
                self._worst_counts = [kept for kept in snapshots if (kept[0] - 1) % step == 0]
            self._round = round
        counts, latest = self._counts.setdefault(client, {}), {}
        if client in self._latest and self._latest[client][0] == round:
            latest = self._latest[client][1]
        for segment, release in found:
            span = self._segments.setdefault(segment, [release.sensitivity, release.sensitivity, round, round])
            span[:] = [min(span[0], release.sensitivity), max(span[1], release.sensitivity), span[2], round]
            counts[segment] = counts.get(segment, 0) + int(release.count)
            latest[segment] = latest.get(segment, 0) + int(release.count)
        self._latest[client] = round, latest
        self._signatures[client] = signature(releases)
        self._stale.add(client)

    def epsilon(self) -> float:
        """The largest epsilon of any client: 0.0 when nothing was released, infinite when a release had no noise."""
        self._refresh()
        return max(self._epsilons.values(), default=0.0)

    def epsilon_of(self, client: int) -> float:
        """The epsilon of one client so far; 0.0 when it has released nothing."""
        self._refresh()
        return self._epsilons.get(client, 0.0)

    def worst_client(self) -> int | None:
        """The client with the largest epsilon, the lowest number among equals; None when nothing was released."""
        self._refresh()
        return min(self._epsilons, key=lambda client: (-self._epsilons[client], client), default=None)

    def counts_of(self, client: int) -> dict[Segment, int]:
        """How many releases of each segment the client has made."""
        return dict(self._counts.get(client, {}))

    def latest_of(self, client: int) -> dict[Segment, int]:
        """The same for the client's latest round alone; empty when it has released nothing."""
        return dict(self._latest.get(client, (0, {}))[1])

    def preview(self, client: int, releases: Sequence[Release]) -> float:
        """The epsilon that `client` would have if it made these `releases` as well. Nothing is recorded.

        Raises:
            PrivacyError: as `record`, for the releases.
        """
        counts = self.counts_of(client)
        for release in releases:
            segment = self._segment(release)
            counts[segment] = counts.get(segment, 0) + int(release.count)
        total = np.zeros((1, len(ORDERS)))
        for segment, count in counts.items():
            if count:  # no release costs nothing, even one without noise
                total += count * segment.curve()
        return float(epsilons(total, self.delta)[0])

    @property
    def worst_counts(self) -> list[tuple[int, dict[Segment, int]]]:
        """(round, the releases until then of the client with the largest epsilon after it): a part of `history`.

        The first and the latest round and others evenly between, more than SNAPSHOTS / 2 where there are so many.
        Rounds before a checkpoint of version 1, which kept no such counts, are left out.
        """
        return [*self._worst_counts, (self._round, self._counts_of_worst())] if self._round else []

    def _counts_of_worst(self) -> dict[Segment, int]:
        worst = self.worst_client()
        return {} if worst is None else self.counts_of(worst)

    @property
    def history(self) -> list[tuple[int, float]]:
        """(round, epsilon after it) of every round in which something was released."""
        return [*self._history, (self._round, self.epsilon())] if self._round else []

    def to_dict(self) -> dict[str, Any]:
        """The whole account for the run's artifact, as JSON. An infinite epsilon is None with "infinite": true."""
        segments = [
            {
                **asdict(segment),
                "covers": list(segment.covers),
                "sensitivity_min": span[0],
                "sensitivity_max": span[1],
                "first_round": int(span[2]),
                "last_round": int(span[3]),
                "counts": {str(k): c[segment] for k, c in sorted(self._counts.items()) if segment in c},
            }
            for segment, span in self._segments.items()
        ]
        return {
            "unit": self.unit,
            "epsilon": finite_or_none(self.epsilon()),
            "infinite": math.isinf(self.epsilon()),
            "delta": self.delta,
            "adjacency": self.adjacency,
            "accountant": self.accountant,
            "worst_client": self.worst_client(),
            "segments": segments,
            "epsilon_of": {str(k): finite_or_none(e) for k, e in sorted(self._epsilons.items())},
            "history": [[round, finite_or_none(e)] for round, e in self.history],
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as JSON (finite numbers, strings, lists)."""
        number = {segment: i for i, segment in enumerate(self._segments)}

        def pairs(counts: dict[Segment, int]) -> list[list[int]]:
            return [[number[segment], n] for segment, n in counts.items()]

        return {
            "version": 2,
            **{key: getattr(self, key) for key in ("unit", "delta", "adjacency", "accountant")},
            "round": self._round,
            "segments": [[*asdict(segment).values(), *span] for segment, span in self._segments.items()],
            "counts": [[k, pairs(counts)] for k, counts in self._counts.items()],
            "signatures": [[k, rows] for k, rows in self._signatures.items()],
            "latest": [[k, round, pairs(counts)] for k, (round, counts) in self._latest.items()],
            "history": [[round, finite_or_none(e)] for round, e in self._history],
            "worst_counts": [[round, pairs(counts)] for round, counts in self._worst_counts],
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any] | None,
        plan: Mapping[int, Sequence[Release]] | None = None,
        new_segment: bool = False,
    ) -> None:
        """Continue the account of a checkpoint. This ledger must be new: spent budget cannot be replaced.

        Args:
            state: what `state_dict` gave, also after a trip through JSON.
            plan: per client, the releases the resumed run is going to make. They must have the signature of those made
                before.
            new_segment: accept another signature; what was spent stays, and what follows is a segment of its own.

        Raises:
            PrivacyError: no state, another unit, delta, adjacency or accountant, or a plan with another noise, bound or
                sampling.
        """
        if not state or state.get("version") not in (1, 2):
            raise PrivacyError(
                "the checkpoint holds no privacy ledger: resuming would forget the epsilon already spent; start a new "
                "run"
            )
        if self._counts:
            raise PrivacyError("this ledger has recorded releases already: load a checkpoint into a new one")
        for key in ("unit", "delta", "adjacency", "accountant"):
            if state[key] != getattr(self, key):
                raise PrivacyError(
                    f"privacy ledger {key}: {state[key]} in the checkpoint, {getattr(self, key)} now; resume with the "
                    "value the run began with"
                )
        signatures = {k: tuple((*row[:-1], tuple(row[-1])) for row in rows) for k, rows in state["signatures"]}
        if plan is not None and not new_segment:
            for client in sorted(plan.keys() & signatures.keys()):
                check_signature(client, signatures[client], signature(plan[client]))
        segments = {
            Segment(mechanism, multiplier, sampling, rate, tuple(covers)): span
            for mechanism, multiplier, sampling, rate, covers, *span in state["segments"]
        }
        order = list(segments)
        self._segments, self._signatures = segments, signatures

        def counts(pairs: Sequence[tuple[int, int]]) -> dict[Segment, int]:
            return {order[i]: n for i, n in pairs}

        self._counts = {k: counts(pairs) for k, pairs in state["counts"]}
        self._latest = {k: (round, counts(pairs)) for k, round, pairs in state.get("latest", ())}
        self._worst_counts = [(round, counts(pairs)) for round, pairs in state.get("worst_counts", ())]
        self._history = [(round, math.inf if e is None else e) for round, e in state["history"]]
        self._round = state["round"]
        self._stale = set(self._counts)

    def _segment(self, release: Release) -> Segment:
        """The segment of a release that this ledger accepts; each different release is examined once."""
        if release not in self._segment_of:
            check_release(release)
            for key in ("unit", "adjacency"):
                if getattr(release, key) != getattr(self, key):
                    raise PrivacyError(
                        f"a release with {key}={getattr(release, key)} cannot enter a ledger with {key}="
                        f"{getattr(self, key)}: they protect different things and do not add"
                    )
            multiplier = float(f"{release.noise_multiplier:.12g}")
            rate = min(float(release.rate), 1.0)  # at 1 and above every unit is in every batch
            segment = Segment(release.mechanism, multiplier, release.sampling, rate, tuple(release.covers))
            self._segment_of[release] = segment
        return self._segment_of[release]

    def _refresh(self) -> None:
        """Bring the epsilons of the stale clients up to date; clients with equal counts share one conversion."""
        groups: dict[tuple[tuple[Segment, int], ...], list[int]] = {}
        for client in self._stale:
            groups.setdefault(tuple(self._counts[client].items()), []).append(client)
        if groups:
            curves = np.zeros((len(groups), len(ORDERS)))
            for row, counts in enumerate(groups):
                for segment, count in counts:
                    curves[row] += count * segment.curve()
            for clients, value in zip(groups.values(), epsilons(curves, self.delta), strict=True):
                self._epsilons.update(dict.fromkeys(clients, float(value)))
        self._stale.clear()


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity: None stands for it, beside a field that says so."""
    return value if math.isfinite(value) else None
