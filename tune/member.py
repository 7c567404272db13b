"""A member of a population in its worker: a federation in segments, from one comparison with the others to the next."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning import RoundRecord
from fl_lightning.analysis.trials import AXIS_TAG, axis_text
from fl_lightning.checkpoint import LATEST, Stored, load
from fl_lightning.config.index import value_at
from fl_lightning.errors import CheckpointError
from fl_lightning.session import resume
from fl_lightning.tracking import RunTracker, close_lost, connect, last_attempt, read_json
from tune.space import DRAWN, EARLIER, ID, LINEAGE, Plan, Sampled

if TYPE_CHECKING:
    from tune.trial import Reporter

MEMBER_FILE = "member.json"
"""Beside the federation's checkpoint in Ray Tune's: whose it is, and after which round."""


class Boundary(KeyboardInterrupt):
    """Ends a segment. To whoever closes the run it is an interruption: the run is KILLED, and is gone on with.

    Attributes:
        folder: of the federation's checkpoint.
        record: of its last round.
    """

    def __init__(self, folder: Path, record: RoundRecord) -> None:
        super().__init__(f"waits after round {record.round} for the other members of its population")
        self.folder, self.record = folder, record


@dataclass(frozen=True)
class Standing:
    """Where a member stands.

    Attributes:
        run_id: its MLflow run; None before its first segment.
        folder: of its own checkpoint.
        stored: that checkpoint; None if there is none that can be used.
        result: of a run that has finished, whose process crashed when all was done.
    """

    run_id: str | None = None
    folder: Path | None = None
    stored: Stored | None = None
    result: Mapping[str, Any] | None = None

    @property
    def round(self) -> int:
        return self.stored.progress.federation.server.round if self.stored is not None else 0


def standing(uri: str, parent_run_id: str, trial_id: str, copy: Path | None = None) -> Standing:
    """Finds a member's run and its last checkpoint; `copy` is another copy of it, used where its own is lost."""
    found = last_attempt(uri, parent_run_id, trial_id)
    if found is None:
        return Standing()
    run_id, status = found
    if status == "FINISHED" and (result := read_json(uri, run_id, "result.json")) is not None:
        return Standing(run_id, result=result)
    if status in ("FINISHED", "RUNNING"):
        close_lost(uri, run_id)  # its process is gone, or this one would not run
    own = RunTracker(uri).reopen(run_id)
    for folder in (own, copy):
        try:
            if folder is not None:
                return Standing(run_id, folder, load(folder))
        except CheckpointError:
            continue
    return Standing(run_id)


def stored_checkpoint(uri: str, run_id: str) -> Stored | None:
    """The last checkpoint of a run that was interrupted; None if there is none that can be used."""
    try:
        return load(RunTracker(uri).reopen(run_id))
    except CheckpointError:
        return None


def at_boundary(plan: Plan, round: int) -> bool:
    """Whether members are compared after this round; never without a population."""
    return plan.perturb_every > 0 and 0 < round < plan.cells[0].config.fl.rounds and round % plan.perturb_every == 0


@contextmanager
def to_hand_over(folder: Path, trial_id: str, run_id: str, round: int) -> Iterator[Path]:
    """A folder with the newest of a federation's checkpoints, for Ray Tune to keep and to give to others."""
    with tempfile.TemporaryDirectory(prefix="fl-member-") as name:
        copy = Path(name)
        latest = json.loads((folder / LATEST).read_text())
        latest["files"] = latest["files"][:1]
        shutil.copyfile(folder / latest["files"][0]["file"], copy / latest["files"][0]["file"])
        (copy / LATEST).write_text(json.dumps(latest))
        (copy / MEMBER_FILE).write_text(json.dumps({ID: trial_id, "run_id": run_id, "round": round}))
        yield copy


def read_member(folder: Path) -> dict[str, Any]:
    """Whose checkpoint this is: `id`, `run_id` and `round`."""
    return dict(json.loads((folder / MEMBER_FILE).read_text()))


def record_lineage(uri: str, run_id: str, sampled: Sampled) -> None:
    """Tells the member's MLflow run of what it has taken over: tag `lineage`, and its axes' new values."""
    client = connect(uri)
    for key, value in sampled[DRAWN].items():
        client.set_tag(run_id, f"{AXIS_TAG}{key}", axis_text(value))
    client.set_tag(run_id, LINEAGE, json.dumps(sampled[LINEAGE]))


def as_stored(sampled: Sampled, tags: Mapping[str, str], config: Mapping[str, Any] | None) -> Sampled:
    """A member as its run has it, which may have taken over another's federation and settings since it was drawn.

    Args:
        sampled: as it was drawn at the start.
        tags: of its run.
        config: of its last checkpoint, or of its result; None where it starts anew.
    """
    if config is None:
        return {key: value for key, value in sampled.items() if key != LINEAGE}
    values = {key: value_at(config, key) for key in sampled[DRAWN]}
    steps: Sequence[Mapping[str, Any]] = json.loads(tags.get(LINEAGE, "[]"))
    if steps and steps[-1]["new"] != values:  # it was killed before it could take the last one over
        steps = steps[:-1]
    return {**sampled, DRAWN: values, **({LINEAGE: list(steps)} if steps else {})}


def train_member(plan: Plan, sampled: Sampled, reporter: "Reporter") -> dict[str, Any]:
    """Trains a member to its end from wherever it stands; returns its outcome.

    Ray Tune may end this process's part after any comparison and start it again, elsewhere, with the checkpoint of
    another member and with new settings in `sampled`.

    Raises:
        CheckpointError: it was compared with others, and its own checkpoint is lost since.
    """
    from ray import tune

    from tune.trial import measured_of, outcome_of, run_trial, stored_outcome

    uri, parent, trial_id = str(plan.tracking["tracking.uri"]), str(plan.parent_run_id), sampled[ID]
    point = plan.point(sampled)

    def after(folder: Path, record: RoundRecord) -> None:
        if at_boundary(plan, record.round):
            raise Boundary(folder, record)

    def hand_over(run_id: str, folder: Path, record: RoundRecord) -> None:
        """Returns when the scheduler has seen it, unless that ends this part."""
        with to_hand_over(folder, trial_id, run_id, record.round) as copy:
            reporter.report(measured_of(record, run_id), checkpoint=tune.Checkpoint.from_directory(str(copy)))

    given = tune.get_checkpoint()
    with given.as_directory() if given is not None else nullcontext() as place:
        copy = Path(place) if place is not None else None
        owner = read_member(copy) if copy is not None else {ID: trial_id, "round": 0}
        own = owner[ID] == trial_id
        now = standing(uri, parent, trial_id, copy if own else None)
        if now.result is not None:
            return stored_outcome(now.result)
        if owner["round"] and now.stored is None:
            raise CheckpointError(
                f"{trial_id}: its own checkpoint is lost, so it cannot go on after round {owner['round']}"
            )
        donor = None if own or now.round > owner["round"] else copy
        if now.round > owner["round"] and now.stored is not None and at_boundary(plan, now.round):
            hand_over(str(now.run_id), Path(str(now.folder)), now.stored.progress.records[-1])
        while True:
            try:
                if now.run_id is None or now.stored is None:
                    start = {**sampled, EARLIER: None}
                    return outcome_of(run_trial(plan, start, trial_id, observers=[reporter], after_checkpoint=after))
                changed = None
                if donor is not None:
                    record_lineage(uri, now.run_id, sampled)
                    changed = point.config
                result = resume(
                    now.run_id,
                    uri=uri,
                    observers=[reporter],
                    folder=now.folder,
                    changed=changed,
                    donor=donor,
                    after_checkpoint=after,
                )
                return outcome_of(result)
            except Boundary as reached:
                hand_over(str(reporter.run_id), reached.folder, reached.record)
            donor, now = None, standing(uri, parent, trial_id)
