"""What a sweep's private cells promise and whether they can learn, said before anything is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning import FLError
from fl_lightning.analysis.tables import epsilon_text
from fl_lightning.analysis.trials import axis_text, setting_of
from fl_lightning.config import Cell
from fl_lightning.foresight import foresight

HOPELESS = "hopeless"


@dataclass(frozen=True)
class Chosen:
    """The cells that will run, and those that are left out: `params`, `reason`, `setting`, `algorithm` of each."""

    cells: tuple[Cell, ...]
    skipped: tuple[dict[str, Any], ...] = ()


def choose(cells: Sequence[Cell], say: Callable[[str], None], *, skip_hopeless: bool) -> Chosen:
    """Says one line for each private cell, whatever its seeds, and leaves out the hopeless ones if asked to.

    A cell that cannot be planned is kept: its trials will fail with the same words.

    Args:
        cells: from `validate_space`; random axes stand at their first values.
        say: prints a line.
        skip_hopeless: leave out cells whose verdict is hopeless.
    """
    seen: dict[str, str | None] = {}  # setting -> why it is left out
    kept: list[Cell] = []
    skipped: list[dict[str, Any]] = []
    for cell in cells:
        setting = setting_of(cell.values)
        if setting not in seen:
            seen[setting] = _look(cell, say, skip_hopeless)
            if reason := seen[setting]:
                skipped.append(
                    {
                        "params": dict(cell.values),
                        "reason": reason,
                        "setting": setting,
                        "algorithm": cell.config.algorithm.name,
                    }
                )
        if seen[setting] is None:
            kept.append(cell)
    return Chosen(tuple(kept), tuple(skipped))


def _look(cell: Cell, say: Callable[[str], None], skip_hopeless: bool) -> str | None:
    """Says the plan of a private cell; why it is left out, or None."""
    if cell.config.privacy.level == "none":
        return None
    name = " ".join(f"{key}={axis_text(value)}" for key, value in cell.values.items()) or cell.config.algorithm.name
    at = " (random axes at their first values)" if cell.random else ""
    try:
        plan = foresight(cell.config)
    except FLError as error:
        say(f"plan {name}{at}: none, {error}")
        return None
    dial = "infinite" if plan["dial"] is None else f"{plan['dial']:.3g}"
    skip = skip_hopeless and plan["verdict"] == HOPELESS
    say(f"plan {name}{at}: epsilon {epsilon_text(plan)}, R = {dial}, {plan['verdict']}" + ("; skipped" if skip else ""))
    return f"{plan['verdict']}: R = {dial} at epsilon {epsilon_text(plan)}" if skip else None
