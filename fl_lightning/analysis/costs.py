"""What a setting's accuracy cost: rounds and seconds to a target, gradients, bytes, seconds."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from fl_lightning.analysis.statistics import mean, sample_sd
from fl_lightning.analysis.trials import Trial

Row = dict[str, Any]

TO_TARGET = {"rounds_to_target": "rounds to target", "seconds_to_target": "seconds to target"}
TOTALS = {"gradients": "gradients", "upload_bytes": "upload bytes", "seconds": "seconds"}
FIELDS = tuple(
    f"{name}_{part}" for name in ("rounds_to_target", "seconds_to_target", *TOTALS) for part in ("mean", "sd")
)

NOTES = (
    "Gradients are those of single examples: a batch of B counts B, a step of SAM 2 B, and gradients that only measure "
    "something count too; of private runs they are a simulator's knowledge, which no epsilon covers. Upload bytes are "
    "all that clients sent: d numbers of 4 bytes for each vector in single precision, with what else travels. Seconds "
    "are of whole rounds, evaluation among them.",
)


def round_of(trial: Trial, target: float) -> int | None:
    """The first evaluated round whose test accuracy is at least the target; None if there is none."""
    return next((round for round, value in trial.history.get("test_accuracy", ()) if value >= target), None)


def seconds_until(trial: Trial, round: int) -> float | None:
    """Seconds of all rounds up to this one; None where they were not all recorded."""
    history = dict(trial.history.get("seconds", ()))
    rounds = range(1, round + 1)
    return sum(history[each] for each in rounds) if all(each in history for each in rounds) else None


def costs(finished: Sequence[Trial], target: float | None = None) -> dict[str, Any]:
    """The costs of a setting's finished trials.

    Returns:
        FIELDS: means and sample standard deviations over the seeds; those to the target over the seeds that reached
        it. `target`, and `reached`, how many seeds did; None without a target. What was not measured is None.
    """
    measured: dict[str, list[float]] = {
        name: [value for trial in finished if (value := trial.total(name)) is not None] for name in TOTALS
    }
    reached = {trial.trial_id: round_of(trial, target) for trial in finished} if target is not None else {}
    rounds = [(trial, round) for trial in finished if (round := reached.get(trial.trial_id)) is not None]
    measured["rounds_to_target"] = [float(round) for _, round in rounds]
    seconds = [seconds_until(trial, round) for trial, round in rounds]
    measured["seconds_to_target"] = [value for value in seconds if value is not None]
    found: dict[str, Any] = {"target": target, "reached": len(rounds) if target is not None else None}
    for name, values in measured.items():
        found |= {f"{name}_mean": mean(values), f"{name}_sd": sample_sd(values)}
    return found


def cost_headings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The headings of what was measured at all; those of the target only where one was given."""
    names = {**(TO_TARGET if any(row["target"] is not None for row in rows) else {}), **TOTALS}
    named = [heading for name, heading in names.items() if name in TO_TARGET or _any(rows, name)]
    return named


def cost_cells(row: Mapping[str, Any], headings: Sequence[str]) -> list[str]:
    """A row under those headings: mean and spread; seeds that did not reach the target are counted beside."""
    names = {heading: name for name, heading in {**TO_TARGET, **TOTALS}.items()}
    cells = []
    for heading in headings:
        name = names[heading]
        text = _pair(row[f"{name}_mean"], row[f"{name}_sd"])
        if name == "rounds_to_target" and row["n"] and row["reached"] < row["n"]:
            text = f"{text} ({row['reached']} of {row['n']} seeds)" if row["reached"] else "not reached"
        cells.append(text)
    return cells


def cost_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the costs mean, a sentence a line."""
    targets = dict.fromkeys(row["target"] for row in rows if row["target"] is not None)
    named = (
        f"Target: test accuracy {target:g}, at the first evaluated round, in the seeds that reached it"
        for target in targets
    )
    return [*(f"{text}." for text in named), *NOTES]


def _any(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(row[f"{name}_mean"] is not None for row in rows)


def _pair(centre: float | None, spread: float | None) -> str:
    if centre is None:
        return "-"
    return quantity(centre) if not spread else f"{quantity(centre)} \u00b1 {quantity(spread)}"


def quantity(value: float) -> str:
    """Three digits, with thousands, millions ... as k, M, G, T.

    >>> quantity(12.0), quantity(3.14159), quantity(44_426_000), quantity(999_999)
    ('12', '3.14', '44.4 M', '1 M')
    """
    for sign in ("", " k", " M", " G", " T"):
        if float(f"{abs(value):.3g}") < 1000 or sign == " T":
            return f"{value:.3g}{sign}" if abs(value) < 1000 else f"{value:.0f}{sign}"
        value /= 1000
    raise AssertionError("the loop returns")


def accumulated(history: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The history's running sum."""
    return list(zip((round for round, _ in history), accumulate(value for _, value in history), strict=True))
