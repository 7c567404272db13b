"""The trials of a sweep on Ray Tune, from the list of what is to run to the record of each."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_lightning.analysis.trials import Trial
from fl_lightning.config import SweepConfig
from tune.space import ID, LINEAGE, TRIAL, Plan, Sampled, sampled_of
from tune.trial import OUTCOME, loss_of, tune_trial

EXIT_TERMINATED = 143
"""128 + SIGTERM."""


KEPT = 3
"""Checkpoints of a member that Ray Tune keeps for others: the last comparison's, and some time to fetch it."""


@dataclass(frozen=True)
class Work:
    """What is left to do of a sweep.

    Attributes:
        plan: what the trials share.
        sweep: the sweep.
        listed: the trials to run; with an optimiser, those that it had drawn before the sweep was resumed.
        done: those that ended before the sweep was resumed.
        total: how many trials the sweep has.
        start: of a population that is resumed, the round of its farthest member.
        keep: stores a trial that an optimiser has chosen, before it starts.
    """

    plan: Plan
    sweep: SweepConfig
    listed: tuple[Sampled, ...]
    total: int
    done: tuple[Trial, ...] = ()
    start: int = 0
    keep: Callable[[Sampled], None] = lambda sampled: None


def run_trials(work: Work, folder: Path, quiet: bool) -> list[Trial]:
    """Runs what is listed and returns all trials by their ids, with those that were done before.

    Args:
        work: the trials.
        folder: `mlruns/sweeps/<sweep id>`.
        quiet: print failures only.
    """
    ended = _run(work, folder, quiet) if len(work.done) < work.total else []
    return sorted([*work.done, *ended], key=lambda trial: (len(trial.trial_id), trial.trial_id))


def _run(work: Work, folder: Path, quiet: bool) -> list[Trial]:
    from ray import tune

    from tune.board import Board

    sweep = work.sweep
    scheduler, plan = _scheduler(work, quiet)
    board = Board(plan, folder, work.total, quiet=quiet, done=len(work.done))
    resources = {"cpu": sweep.resources.cpu, "gpu": sweep.resources.gpu}
    space, chosen = _search(work)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(tune_trial, plan=plan), resources),
        param_space=space,
        tune_config=tune.TuneConfig(
            **chosen,
            scheduler=scheduler,
            reuse_actors=True,  # a worker imports torch once, not once per trial
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=folder.name,
            storage_path=str(folder.parent),
            verbose=0,
            callbacks=[board],
            checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT if plan.perturb_every else None),
            failure_config=tune.FailureConfig(max_failures=sweep.max_retries or 0),
        ),
    )
    try:
        with board.shown():
            grid = tuner.fit()
    except (KeyboardInterrupt, SystemExit) as stopped:
        report, go_on = f"fl-lightning report {plan.sweep_id}", f"fl-lightning sweep --resume {plan.sweep_id}"
        more = f", `{go_on}` goes on" if plan.parent_run_id else ""
        print(f"sweep {plan.sweep_id} stopped; `{report}` shows what was finished{more}", file=sys.stderr, flush=True)
        if isinstance(stopped, SystemExit):  # Ray makes an exit code 1 of whatever a signal's handler raises
            raise SystemExit(EXIT_TERMINATED) from stopped
        raise
    return [_trial(plan, grid[number]) for number in range(len(grid))]


def _search(work: Work) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ray Tune's search space, and its settings that say where trials come from."""
    from ray import tune
    from ray.tune.search.basic_variant import BasicVariantGenerator

    limit = work.sweep.max_concurrent
    if work.sweep.search != "optuna":
        space = {TRIAL: tune.grid_search([json.dumps(sampled) for sampled in work.listed])}
        if work.sweep.scheduler == "pbt":
            from tune.population import Members

            return space, {"search_alg": Members()}
        return space, {"search_alg": BasicVariantGenerator(max_concurrent=limit or 0)}
    from tune.optimised import Optimiser

    def read(sampled: Sampled, result: dict[str, Any]) -> Trial:
        return trial_of(work.plan, sampled, json.loads(result[OUTCOME]) if OUTCOME in result else loss_of(None))

    optimiser = Optimiser(work.plan, work.sweep, work.listed, work.done, work.keep, read)
    left = work.total - len(work.done)
    return {}, {"search_alg": optimiser, "num_samples": left, "max_concurrent_trials": limit}


def _scheduler(work: Work, quiet: bool) -> tuple[Any, Plan]:
    """Ray Tune's scheduler, None for its own, and the plan with the way in which trials hear of it."""
    if work.sweep.scheduler == "none":
        return None, work.plan
    if work.sweep.scheduler == "pbt":
        from tune.population import Population

        say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))
        return Population(work.sweep, work.plan, work.start, say), work.plan
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from tune.pruning import Pruner, Stops

    # Beside the driver: with any other node the sweep would lose it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    stops: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(Stops).remote()  # type: ignore[call-overload]

    def stop(trial_id: str, reason: str) -> None:
        ray.get(stops.add.remote(trial_id, reason))

    pruner = Pruner(work.sweep, work.plan, stop)
    pruner.remember(work.done)
    return pruner, replace(work.plan, stops=stops)


def _name(trial: Any) -> str:
    """Short enough for every file system, unique within the sweep."""
    return str(sampled_of(trial.config)[ID])


def _trial(plan: Plan, result: Any) -> Trial:
    """A trial from what Ray Tune has of it; a worker that died without a word is described by Ray's own error."""
    metrics = result.metrics or {}
    outcome = json.loads(metrics[OUTCOME]) if OUTCOME in metrics else loss_of(result.error, _node(metrics))
    run_id = outcome.get("run_id") or metrics.get("run_id")
    return trial_of(plan, sampled_of(result.config), {**outcome, "run_id": run_id})


def _node(metrics: Mapping[str, Any]) -> str | None:
    """The node of a trial's last report, as Ray Tune notes it."""
    return f"{metrics['node_ip']}, {metrics['hostname']}" if "node_ip" in metrics and "hostname" in metrics else None


def trial_of(plan: Plan, sampled: Sampled, outcome: Mapping[str, Any]) -> Trial:
    """A trial from its point and what `outcome_of` or `failure_of` gives."""
    point = plan.point(sampled)
    return Trial(
        trial_id=sampled[ID],
        setting=plan.setting(sampled),
        params=point.params,
        seed=point.seed,
        algorithm=point.config.algorithm.name,
        status=outcome["status"],
        run_id=outcome.get("run_id"),
        final=outcome.get("final", {}),
        privacy=outcome.get("privacy"),
        target_epsilon=getattr(point.config.privacy, "target_epsilon", None),
        badge=outcome.get("badge"),
        partition_sha256=outcome.get("partition_sha256"),
        lineage=tuple(sampled.get(LINEAGE, ())),
        error=outcome.get("error"),
        metrics=outcome.get("metrics", {}),
        history={name: tuple(map(tuple, points)) for name, points in outcome.get("history", {}).items()},
    )
