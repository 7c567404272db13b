"""What `session` says of and to a run's rounds: notes of the first one, and the end that comes before the last one."""

from collections.abc import Sequence
from typing import Any

from fl_lightning.analysis.norms import LAB_NOTE
from fl_lightning.checkpoint import Progress
from fl_lightning.foreseen import Budget
from fl_lightning.records import Observer, RoundRecord, StopEarly


def tell(watching: Sequence[Observer], record: RoundRecord) -> StopEarly | None:
    """Shows every observer a round; the wish of the one that asks for the end, or None."""
    asked = None
    for observer in watching:
        try:
            observer.on_round(record)
        except StopEarly as wish:
            asked = wish
    return asked


def why_stopped(asked: StopEarly | None, budget: Budget | None, done: int, rounds: int) -> dict[str, Any] | None:
    """`round` and `reason` of a run that ended before its last round, and `by` whose wish; None for a whole run.

    Args:
        asked: an observer's wish.
        budget: what the run may spend; it ends runs by itself.
        done: rounds that were trained.
        rounds: rounds that were asked for.
    """
    if done >= rounds:
        return None
    if asked is not None:
        return {"round": done, "reason": asked.reason, "by": asked.by}
    return {"round": done, "reason": budget.reason(done)} if budget is not None else None


def first_notes(progress: Progress) -> list[str]:
    """What the first round's record has to say of the whole run."""
    measured = [] if progress.threshold is None else [str(progress.threshold["note"])]
    return [*([] if progress.lab is None else [LAB_NOTE]), *measured]
