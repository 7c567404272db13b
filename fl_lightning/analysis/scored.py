"""On whose examples a sweep names its best trial, in words."""

from typing import TYPE_CHECKING

from fl_lightning.config.scoring import SHARE, scored_on

if TYPE_CHECKING:
    from fl_lightning.analysis.report import Sweep


def selection_words(sweep: "Sweep") -> str:
    """A sentence that stands with the best rows: what their names are worth. Empty for a metric of no examples."""
    metrics = [metric for metric, _ in sweep.aims]
    on = scored_on(metrics)
    if on is None:
        return ""
    named = " and ".join(name.replace("_", " ") for name in metrics if name.startswith(f"{on}_"))
    subject = "The best is" if len(metrics) == 1 else "The front is"
    if on == "validation":
        return (
            f"{subject} named by {named}, on examples that the clients held out of training (data.validation="
            f"{_share(sweep):g}): the test set took no part in the choice."
        )
    if sweep.selection.get("distribution", "none") != "none":
        return (
            f"{subject} named by {named}, for the account of the choice needs a score that is public, and the test "
            "set counts as public, while what clients hold out does not."
        )
    return (
        f"{subject} named by {named}, which compares settings but does not tune them, so its value is optimistic: to "
        f"choose by examples that clients hold out of training, set data.validation={SHARE:g}."
    )


def _share(sweep: "Sweep") -> float:
    return float((sweep.config.get("data") or {}).get("validation") or SHARE)
