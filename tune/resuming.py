"""Going on with a sweep that was stopped or killed: `fl-lightning sweep --resume SWEEP_ID`."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fl_lightning.analysis.trials import Trial
from fl_lightning.config import RayConfig
from fl_lightning.tracking import (
    ChildRun,
    children,
    close_lost,
    find_parent,
    read_json,
    reopen_study,
    resolve_uri,
    settle,
)
from tune.launch import conduct, keeper, planned
from tune.member import as_stored, stored_checkpoint
from tune.nodes import admitted, with_retries
from tune.running import Work, trial_of
from tune.session import ray_session
from tune.space import EARLIER, ID, Plan, Sampled, completed
from tune.stored import Kept, read_plan
from tune.trial import stored_outcome


def resume_sweep(
    sweep_id: str, *, uri: str | None = None, ray_config: RayConfig | None = None, quiet: bool = False
) -> dict[str, Any]:
    """Continues a sweep from what its tracking store holds, to the table that it would have had undisturbed.

    A finished trial is not repeated. One that was stopped, killed or failed goes on from its last checkpoint in its own
    run, or starts anew where it has none. Trials that had not begun are run as they were drawn at the start. A sweep
    with nothing left to do trains nothing and shows its table again.

    Args:
        sweep_id: as `fl-lightning sweep` printed it.
        uri: `tracking.uri`; None: see `resolve_uri`.
        ray_config: where it goes on; None: where it was started, as far as its own `ray.address` says.
        quiet: as in `run_sweep`.

    Returns:
        As `run_sweep`; `seconds` are those of the continuation.

    Raises:
        CheckpointError: the sweep is still being run, or its store holds no list of its trials.
        TrackingError: the store cannot be used, or has no such sweep.
        ConfigError: trials that could never start on this machine.
    """
    began = time.monotonic()
    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
    address = resolve_uri(uri)
    parent = find_parent(address, None, sweep_id)
    settle(address, parent, sweep_id)
    kept = read_plan(address, parent, sweep_id)
    sweep = kept.sweep if ray_config is None else kept.sweep.model_copy(update={"ray": ray_config})
    plan = planned(kept.info, sweep, kept.cells, {"tracking.uri": address}, parent)
    done, left = _sorted(address, parent, plan, kept)
    total = kept.info.num_trials
    with ExitStack() as stack:
        if len(done) < total:
            ray = stack.enter_context(ray_session(sweep.ray.address))
            for note in admitted(ray, sweep, kept.cells, address):
                say(f"note: {note}")
            sweep = with_retries(ray, sweep)
            plan = replace(plan, retried=bool(sweep.max_retries))
        study = reopen_study(address, parent, sweep_id)
        say(f"sweep id: {sweep_id}")
        say(_sentence(sweep_id, done, left, total))
        start = _farthest(address, plan, left)
        if plan.perturb_every and left:
            say(f"members go on from their own last checkpoints and are compared again from round {start} on")
        work = Work(plan, sweep, tuple(left), total, tuple(done), start, keeper(study, plan))
        return conduct(kept.info, work, study, stack, quiet=quiet, began=began)


def _sorted(uri: str, parent_run_id: str, plan: Plan, kept: Kept) -> tuple[list[Trial], list[Sampled]]:
    """The trials whose results are in the store, and the others, each with the run that it can go on with."""
    runs = {child.tags.get("trial_id", ""): child for child in children(uri, parent_run_id, history=())}
    done: list[Trial] = []
    left: list[Sampled] = []
    listed = completed(kept.listed, kept.cells) if kept.sweep.search == "optuna" else kept.listed
    for sampled in listed:
        child = runs.get(sampled[ID])
        if child is not None and plan.perturb_every:
            sampled = _member(uri, child, sampled)
        if child is None:
            left.append(sampled)
            continue
        if child.status == "FINISHED":
            if (result := read_json(uri, child.run_id, "result.json")) is not None:
                done.append(trial_of(plan, sampled, stored_outcome(result)))
                continue
            close_lost(uri, child.run_id)  # killed while it stored its result: its last checkpoint has it
        left.append({**sampled, EARLIER: child.run_id})
    return done, left


def _member(uri: str, child: ChildRun, sampled: Sampled) -> Sampled:
    """A member of a population as it stands: its settings may have changed since it was drawn."""
    if child.status == "FINISHED" and (result := read_json(uri, child.run_id, "result.json")) is not None:
        return as_stored(sampled, child.tags, result["config"])
    found = stored_checkpoint(uri, child.run_id)
    return as_stored(sampled, child.tags, found.config if found is not None else None)


def _farthest(uri: str, plan: Plan, left: Sequence[Sampled]) -> int:
    """The last comparison that a member has come to of those that go on; 0 without a population."""
    if not plan.perturb_every:
        return 0
    found = [stored_checkpoint(uri, sampled[EARLIER]) for sampled in left if EARLIER in sampled]
    rounds = [stored.progress.federation.server.round for stored in found if stored is not None]
    return max((round // plan.perturb_every * plan.perturb_every for round in rounds), default=0)


def _sentence(sweep_id: str, done: list[Trial], left: list[Sampled], total: int) -> str:
    if len(done) == total:
        return f"sweep {sweep_id} has finished already: nothing is left to run"
    begun = sum(EARLIER in sampled for sampled in left)
    fresh = total - len(done) - begun
    return f"resumed: {len(done)} trials are finished, {begun} go on or are tried again, {fresh} are to start"
