"""One run, every epsilon that might be quoted for it: by Renyi DP, by PLD, and as the paper of SAM-ADPFL counts.

All readings are of the same client, the one whose Renyi epsilon is the largest, and of the releases in the ledger. The
ledger's own epsilon is the one that the run claims. Eq. 16 is a reading and not a promise: it composes the updates at
the noise multiplier sigma = noise / C and adds the scalars' epsilon,

    sum_t q / (2 sigma_t^2) + ln(1/delta) / (q - 1)  at its least  +  eps_scalars

counted once, as printed, or once a round. Where sigma changes, s = sqrt(T / sum_t sigma_t^-2) is its sigma.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import ORDERS, epsilon
from fl_lightning.privacy.ledger import Ledger, finite_or_none
from fl_lightning.privacy.paper import eq16_epsilon
from fl_lightning.privacy.pld import loss_interval, pld_epsilon, sampled_kinds
from fl_lightning.privacy.segments import Segment
from fl_lightning.privacy.statement import _upward as upward
from fl_lightning.records import REACH

Counts = Mapping[Segment, int]

MOST_KINDS = 40
"""More different sampled releases than that are not counted by PLD: each takes up to a second."""

ONCE, EVERY = "paper Eq. 16, scalars once", "paper Eq. 16, scalars every round"

COLUMNS = ("reading", "adjacency", "per_round", "total", "valid", "note")


@dataclass(frozen=True)
class PaperReading:
    """What Eq. 16 depends on and no release says.

    Attributes:
        update: the field of the upload that is the client's update; every other release is one of the scalars.
        raw_noise: whether the noise was chosen from values that were not released (Eq. 14 read literally).
    """

    update: str = "delta"
    raw_noise: bool = False


def readings(ledger: Ledger, *, paper: PaperReading | None = None) -> list[dict[str, Any]]:
    """The epsilon of a run under each reading, at the ledger's delta.

    Args:
        ledger: the account of the run, with at least one release to say anything.
        paper: adds the two readings of Eq. 16.

    Returns:
        Rows with the keys "reading" ("rdp", "pld", or a name of Eq. 16), "label" (the reading in words), "adjacency",
        "per_round" (the client's latest round alone), "total" (the whole run), "infinite" (whether the total is),
        "valid" (whether the total is proved for these releases) and "note". An epsilon that is infinite, or that the
        reading cannot give, is None. It takes about as long as two calls of `pld_epsilon`.
    """
    client = ledger.worst_client()
    if client is None:
        return []
    latest, counts = ledger.latest_of(client), ledger.counts_of(client)
    whose = f"client {client}, whose epsilon by Renyi differential privacy is the largest"
    rows = [
        _row(
            ledger,
            "rdp",
            "Renyi differential privacy",
            epsilon(_curve(latest), ledger.delta),
            ledger.epsilon(),
            f"what the run claims; {whose}",
        )
    ]
    name, note = "privacy loss distribution", f"an upper bound; {whose}"
    try:
        interval = _interval(ledger, counts)
        one, total = (pld_epsilon(part, ledger.delta, ledger.adjacency, interval=interval) for part in (latest, counts))
        rows.append(_row(ledger, "pld", name, one, total, note))
    except PrivacyError as problem:
        rows.append(_row(ledger, "pld", name, None, None, str(problem)))
    return rows if paper is None else [*rows, *_by_paper(ledger, paper, latest, counts)]


def reading_series(
    ledger: Ledger, *, paper: PaperReading | None = None, most: int = 8
) -> dict[str, list[tuple[int, float | None]]]:
    """Epsilon after each round under each reading, as (round, epsilon) of that round's worst client.

    "rdp" has every round in which something was released. The others have the rounds whose counts the ledger keeps
    (`Ledger.worst_counts`), "pld" at most `most` of them: the first, the last and others evenly between. A reading that
    cannot count the releases has no points; an infinite epsilon is None.
    """
    kept = ledger.worst_counts
    series: dict[str, list[tuple[int, float | None]]] = {
        "rdp": [(round, finite_or_none(value)) for round, value in ledger.history],
        "pld": [],
    }
    if not kept:
        return series
    places = np.unique(np.linspace(0, len(kept) - 1, min(most, len(kept))).round().astype(int))
    try:
        interval = _interval(ledger, kept[-1][1])  # one grid for all
        for round, counts in (kept[place] for place in places):
            value = pld_epsilon(counts, ledger.delta, ledger.adjacency, interval=interval)
            series["pld"].append((round, finite_or_none(value)))
    except PrivacyError:
        series["pld"] = []
    if paper is not None and ledger.unit == "client":
        one = ledger.latest_of(ledger.worst_client() or 0)
        for name in (ONCE, EVERY):
            series[name] = [
                (round, finite_or_none(_eq16(ledger, paper, counts, one if name == ONCE else counts)))
                for round, counts in kept
                if _split(paper, counts)[0]
            ]
    return series


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; an epsilon with four significant digits, rounded up."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *([_cell(row, name) for name in COLUMNS] for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with a header, every digit kept; an epsilon that the reading cannot give is an empty field."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, (*COLUMNS[:1], "label", *COLUMNS[1:4], "infinite", *COLUMNS[4:]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "total" and row["infinite"]:
        return "infinite"
    if value is None:
        return "-"
    return upward(value) if isinstance(value, float) else str(value)


def _row(
    ledger: Ledger,
    reading: str,
    label: str,
    per_round: float | None,
    total: float | None,
    note: str,
    valid: bool = True,
) -> dict[str, Any]:
    return {
        "reading": reading,
        "label": label,
        "adjacency": ledger.adjacency,
        "per_round": None if per_round is None else finite_or_none(per_round),
        "total": None if total is None else finite_or_none(total),
        "infinite": total is not None and math.isinf(total),
        "valid": valid and total is not None,
        "note": note,
    }


def _curve(counts: Counts) -> NDArray[np.float64]:
    total = np.zeros(len(ORDERS))
    for segment, n in counts.items():
        total += n * segment.curve()
    return total


def _interval(ledger: Ledger, counts: Counts) -> float:
    """The grid on which these are counted by PLD, if they can be."""
    kinds = sampled_kinds(counts)
    if kinds > MOST_KINDS:
        raise PrivacyError(f"{kinds} different sampled releases: more than {MOST_KINDS} are not counted by PLD here")
    return loss_interval(counts, ledger.delta, ledger.adjacency)


def _by_paper(ledger: Ledger, paper: PaperReading, latest: Counts, counts: Counts) -> list[dict[str, Any]]:
    """The two readings of Eq. 16, or two rows that say why it does not apply."""
    labels = {
        ONCE: "SAM-ADPFL Eq. 16 with the scalars of one round",
        EVERY: "SAM-ADPFL Eq. 16 with the scalars of every round",
    }
    why = ""
    if ledger.unit != "client":
        why = "does not apply: Eq. 16 composes whole updates of a client, and here the steps of its training are noised"
    elif not _split(paper, counts)[0] or not _split(paper, latest)[0]:
        why = f"does not apply: no Gaussian release of the client covers its {paper.update}"
    if why:
        return [_row(ledger, name, label, None, None, why) for name, label in labels.items()]
    one = _eq16(ledger, paper, latest, latest)
    return [
        _row(
            ledger,
            name,
            labels[name],
            one,
            _eq16(ledger, paper, counts, scalars),
            _why_invalid(ledger, paper, counts, scalars) or "an upper bound for these releases",
            not _why_invalid(ledger, paper, counts, scalars),
        )
        for name, scalars in ((ONCE, latest), (EVERY, counts))
    ]


def _split(paper: PaperReading, counts: Counts) -> tuple[Counts, Counts]:
    """The client's updates, and all else."""
    updates = {s: n for s, n in counts.items() if s.mechanism == "gaussian" and paper.update in s.covers}
    return updates, {s: n for s, n in counts.items() if s not in updates}


def _eq16(ledger: Ledger, paper: PaperReading, counts: Counts, scalars: Counts) -> float:
    """Eq. 16 for the updates among `counts` and the scalars among `scalars`, at sigma = noise / C."""
    updates, _ = _split(paper, counts)
    rounds, inverse = sum(updates.values()), 0.0
    for segment, n in updates.items():
        sigma = segment.noise_multiplier * REACH[ledger.adjacency]
        if sigma == 0:
            return math.inf
        inverse += n / sigma**2
    return eq16_epsilon(math.sqrt(rounds / inverse), rounds, ledger.delta, _scalars(ledger, paper, scalars))


def _scalars(ledger: Ledger, paper: PaperReading, counts: Counts) -> float:
    """eps_scalars: the sum of Laplace scalars' pure epsilons, and what the Gaussian ones cost by themselves."""
    _, scalars = _split(paper, counts)
    noisy = {s: n for s, n in scalars.items() if s.noise_multiplier}
    if len(noisy) < len(scalars):
        return math.inf
    gaussian = {s: n for s, n in noisy.items() if s.mechanism == "gaussian"}
    pure = math.fsum(n / s.noise_multiplier for s, n in noisy.items() if s.mechanism == "laplace")
    return pure + (epsilon(_curve(gaussian), ledger.delta) if gaussian else 0.0)


def _why_invalid(ledger: Ledger, paper: PaperReading, counts: Counts, scalars: Counts) -> str:
    """Why Eq. 16 with these scalars is no bound for these releases; empty where it is one, if a loose one."""
    _, made = _split(paper, counts)
    reasons = []
    if REACH[ledger.adjacency] != 1:
        reasons.append("it takes the sensitivity as C, and a client that is replaced moves its update by up to 2C")
    if paper.raw_noise:
        reasons.append("it takes the noise as independent of the data, and the noise was chosen from raw sharpness")
    if sum(_split(paper, scalars)[1].values()) < sum(made.values()):
        reasons.append("it counts the scalars of one round, and every round released some")
    if any(segment.mechanism == "gaussian" for segment in made):
        reasons.append("it adds an epsilon of the scalars that holds at delta to one that holds at the same delta")
    return "not proved: " + "; ".join(reasons) if reasons else ""
