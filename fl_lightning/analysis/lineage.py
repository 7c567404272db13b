"""What the members of a population took over from each other, as a table of the report."""

from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.analysis.document import Block, Heading, Notes, Table
from fl_lightning.analysis.trials import Trial, axis_text

NOTE = (
    "A member goes on from the donor's federation, with the donor's account of what was released and new values near "
    "the donor's. Its rounds before that are its own; the settings in the tables are its last ones."
)


def lineage_blocks(trials: Sequence[Trial]) -> list[Block]:
    """A row for each federation that was taken over, by round; nothing without a population."""
    steps = [(step["round"], trial.trial_id, step) for trial in trials for step in trial.lineage]
    if not steps:
        return []
    lines = [
        [str(round), member, step["donor"], _values(step["old"]), _values(step["new"])]
        for round, member, step in sorted(steps, key=lambda item: item[:2])
    ]
    headings = ["after round", "member", "goes on from", "settings before", "settings from then on"]
    return [Heading("What members took over"), Table(headings, lines, name="What members took over"), Notes([NOTE])]


def _values(values: Mapping[str, Any]) -> str:
    shown = {key: f"{value:.4g}" if isinstance(value, float) else axis_text(value) for key, value in values.items()}
    return ", ".join(f"{key}={text}" for key, text in shown.items())
