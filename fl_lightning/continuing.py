"""From a checkpoint to a run that goes on: its own, or, in a population, one that takes over another's federation."""

from dataclasses import replace
from pathlib import Path

from fl_lightning.build import Prepared
from fl_lightning.checkpoint import Progress, Stored, load
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.errors import CheckpointError
from fl_lightning.privacy import Ledger
from fl_lightning.records import Release


def new_ledger(prepared: Prepared) -> Ledger:
    """The ledger of a run that has released nothing yet."""
    shield = prepared.algorithm.protection
    return Ledger(unit=shield.unit, delta=shield.delta, adjacency=shield.adjacency)


def continued(prepared: Prepared, stored: Stored, donor: Path | None = None) -> Progress:
    """Where a run stands that goes on from its checkpoint, with the account of what was released.

    Args:
        prepared: the run to come.
        stored: its own checkpoint.
        donor: the folder of another run's checkpoint of the same round: server, clients and all that they have released
            are that run's from here on, while the rounds that are recorded stay this run's own.

    Raises:
        CheckpointError: the data were dealt out differently, or the donor stands at another round.
        PrivacyError: the account cannot be continued under the run's configuration.
    """
    progress, source = stored.progress, stored
    if donor is not None:
        source = load(donor)
        rounds = [item.progress.federation.server.round for item in (stored, source)]
        if rounds[0] != rounds[1]:
            raise CheckpointError(
                f"{donor}: stands at round {rounds[1]}, this run at {rounds[0]}: it cannot take it over"
            )
        theirs = source.progress
        progress = replace(
            progress, federation=theirs.federation, undeclared=theirs.undeclared, threshold=theirs.threshold
        )
    for item in dict.fromkeys((stored.partition_sha256, source.partition_sha256)):
        if prepared.partition.sha256 != item:
            raise CheckpointError(
                f"its data were dealt out differently (partition {item[:12]} then, {prepared.partition.sha256[:12]} "
                "now); resume with the data set and the version it began with"
            )
    if prepared.config.privacy.level != "none":
        progress.ledger = new_ledger(prepared)
        plan = _unchanging(prepared, progress.federation.server.round)
        progress.ledger.load_state_dict(source.ledger, plan=plan)
    return progress


def _unchanging(prepared: Prepared, rounds: int) -> dict[int, list[Release]] | None:
    """The releases of every client's next visit, where they must be those of its last; None where they adapt."""
    plan, privacy, noise = prepared.releases, prepared.config.privacy, prepared.noise
    moving = getattr(privacy, "clip_bound", "fixed") == "quantile" or getattr(privacy, "noise_decay", 1.0) < 1
    if plan is None or moving or isinstance(prepared.config.algorithm, SamAdpfl):
        return None
    return {k: plan.visit(k, rounds + 1, noise.multipliers[k], noise.scalar) for k in range(len(plan.sizes))}
