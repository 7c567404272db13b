"""A budget that holds during a run: nothing is released that the ledger could not pay for."""

from collections.abc import Callable, Sequence

from fl_lightning.privacy.ledger import Ledger
from fl_lightning.records import Release


def affordable(
    ledger: Ledger, client: int, releases_of: Callable[[int], Sequence[Release]], most: int, target: float
) -> int:
    """The largest number of steps, at most `most`, after which the client's epsilon is still at most `target`.

    Args:
        ledger: what has been spent; it is left as it is.
        client: whose.
        releases_of: steps -> what the visit would release; its cost grows with the steps.
        most: the steps planned, at least 0.
        target: the budget, > 0.
    """

    def within(steps: int) -> bool:
        return ledger.preview(client, releases_of(steps)) <= target

    if within(most):
        return most
    low, high = 0, most  # no step is free of charge to ask about, `most` is too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
