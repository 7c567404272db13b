"""A sweep's trials as records, the same from a sweep that has just ended and from MLflow long afterwards."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.tracking import ChildRun

AXIS_TAG = "sweep."
"""A trial's MLflow run has the tag `sweep.<axis>` for each swept key, with its value as text."""


HISTORY = (
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "seconds",
    "gradients",
    "oracle/gradients",
    "upload_bytes",
    "oracle/upload_bytes",
)
"""The metrics whose rounds a report reads."""

MEASURED = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "epsilon")
"""The metrics of a trial's last round that are among its `final`."""

SUMMED = ("gradients", "upload_bytes", "seconds")
"""The metrics whose rounds add up: what a trial has cost is their sum."""

ALGORITHM_AXES = ("algorithm", "algorithm.name")
"""The axes that choose the algorithm: by preset, or by name."""


@dataclass(frozen=True)
class Trial:
    """One federation of a sweep.

    Attributes:
        trial_id: its short name within the sweep, for example "t003"; also its folder.
        setting: names what is compared: equal for trials that differ in the seed only.
        params: swept dotted key (or group) -> value, without the seed.
        seed: the trial's seed.
        algorithm: `algorithm.name`.
        status: "finished", "failed" or "killed".
        run_id: MLflow's id; None without tracking.
        final: MEASURED, `weights_sha256` and, where it ended early, `stopped`; empty unless finished.
        privacy: unit, delta, adjacency, sampling, trust model, level, warnings of the epsilon; None for a run without.
        target_epsilon: the budget it was given; None for a run that was given noise instead, or no privacy.
        badge: "PRIVATE" or "NOT PRIVATE"; None where it is not known.
        error: `type` and `message` of what ended a failed trial; None otherwise.
        metrics: the last value of everything else that was measured.
        history: metric -> (round, value) pairs.
        partition_sha256: names how its data were dealt out; None where it is not known.
        lineage: what a member of a population has taken over: `round`, `donor`, `old` and `new` values each time.
    """

    trial_id: str
    setting: str
    params: Mapping[str, Any]
    seed: int
    algorithm: str
    status: str
    run_id: str | None = None
    final: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] | None = None
    target_epsilon: float | None = None
    badge: str | None = None
    error: Mapping[str, str] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    partition_sha256: str | None = None
    lineage: tuple[Mapping[str, Any], ...] = ()

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the sweep's scheduler ended it before its last round; it is finished all the same."""
        return self.finished and (self.final.get("stopped") or {}).get("by") == "scheduler"

    def measured(self, name: str) -> float | None:
        """The final value of a metric, of a cost the sum; None unless the trial finished and measured it."""
        if name in SUMMED:
            return self.total(name)
        value = self.final.get(name, self.metrics.get(name)) if self.finished else None
        return float(value) if isinstance(value, int | float) else None

    def total(self, name: str) -> float | None:
        """The sum of a metric over the rounds, under its name or under `oracle/`; None where it was not recorded."""
        history = self.history.get(name) or self.history.get(f"oracle/{name}") or ()
        return sum(value for _, value in history) if history and self.finished else None


def comparable(groups: Mapping[str, Sequence["Trial"]]) -> dict[str, Sequence["Trial"]]:
    """The settings among which a best one may be named: those of whole runs, unless a scheduler has ended some of each.

    What seeds have measured after different numbers of rounds is no mean of anything.
    """
    whole = {setting: group for setting, group in groups.items() if not any(trial.stopped for trial in group)}
    return whole if any(trial.finished for group in whole.values() for trial in group) else dict(groups)


def setting_of(params: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits that name a set of swept values, whatever their order."""
    text = json.dumps(dict(params), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def axis_text(value: Any) -> str:
    """A swept value as the text of a tag: names as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def from_children(
    children: Iterable["ChildRun"], privacy_of: Mapping[str, Mapping[str, Any]], axes: Sequence[str] = ()
) -> list[Trial]:
    """Trials from the sweep's child runs, in the order of their ids; a trial's last attempt counts.

    Args:
        children: what `fl_lightning.tracking.children` returns.
        privacy_of: run id -> privacy statement, for the runs that have one.
        axes: the order of the swept keys; others follow by name.
    """
    trials: dict[str, Trial] = {}
    for child in children:
        trial_id = child.tags.get("trial_id", child.run_id)
        trials[trial_id] = _from_child(child, trial_id, privacy_of.get(child.run_id), axes)
    return sorted(trials.values(), key=lambda trial: (len(trial.trial_id), trial.trial_id))


def _from_child(child: "ChildRun", trial_id: str, privacy: Mapping[str, Any] | None, axes: Sequence[str]) -> Trial:
    texts = {key.removeprefix(AXIS_TAG): text for key, text in sorted(child.tags.items()) if key.startswith(AXIS_TAG)}
    params = {key: _value(texts[key]) for key in dict.fromkeys([*(key for key in axes if key in texts), *texts])}
    status = {"FINISHED": "finished", "KILLED": "killed", "RUNNING": "running"}.get(child.status, "failed")
    final: dict[str, Any] = {}
    if status == "finished":
        final = {key: child.metrics.get(key) for key in MEASURED}
        final["weights_sha256"] = child.tags.get("weights_sha256")
        if "stopped" in child.tags:
            final["stopped"] = _value(child.tags["stopped"])
    error = None
    if status == "failed":
        kind, colon, message = child.tags.get("error", "no cause was recorded").partition(": ")
        error = {"type": kind, "message": message} if colon else {"type": "unknown", "message": kind}
    return Trial(
        trial_id=trial_id,
        setting=child.tags.get("setting") or setting_of(params),
        params=params,
        seed=int(child.tags.get("seed", -1)),
        algorithm=child.tags.get("algorithm", "unknown"),
        status=status,
        run_id=child.run_id,
        final=final,
        privacy=privacy,
        target_epsilon=_number(child.params.get("privacy.target_epsilon")),
        badge=child.tags.get("badge"),
        error=error,
        metrics=child.metrics,
        history=child.history,
        partition_sha256=child.tags.get("partition_sha256"),
        lineage=tuple(json.loads(child.tags.get("lineage", "[]"))),
    )


def from_run(run: "ChildRun", name: str, privacy: Mapping[str, Any] | None) -> Trial:
    """A single run as a trial of its own setting, called by its algorithm and a short name."""
    trial = _from_child(run, name, privacy, ())
    return replace(trial, setting=run.run_id, params={"algorithm": f"{trial.algorithm} ({name})"})


def _number(text: str | None) -> float | None:
    value = None if text is None else _value(text)
    return float(value) if isinstance(value, int | float) else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def by_setting(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials grouped by setting, settings in the order of their first trial."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.setting, []).append(trial)
    return groups


def varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The axes that do not have one and the same value in all settings, in order."""
    axes = dict.fromkeys(key for params in settings for key in params)
    seen = {key: {axis_text(params[key]) if key in params else None for params in settings} for key in axes}
    return [key for key in axes if len(seen[key]) > 1]


def labels(trials: Sequence[Trial]) -> dict[str, str]:
    """A short name of each setting, for legends: the algorithm, and each further axis that varies by its last part.

    >>> a = Trial("t0", "x", {"algorithm": "fedsam", "algorithm.local.rho": 0.1}, 42, "fedsam", "finished")
    >>> b = Trial("t1", "y", {"algorithm": "fedsam", "algorithm.local.rho": 0.2}, 42, "fedsam", "finished")
    >>> labels([a, b])
    {'x': 'fedsam, rho=0.1', 'y': 'fedsam, rho=0.2'}
    """
    groups = by_setting(trials)
    axes = [key for key in varying([group[0].params for group in groups.values()]) if key not in ALGORITHM_AXES]
    last = [key.rpartition(".")[2] for key in axes]
    short = {key: part if last.count(part) == 1 else key for key, part in zip(axes, last, strict=True)}
    for shown in (_brief, axis_text):  # in full where brief numbers do not tell the settings apart
        named: dict[str, str] = {}
        for setting, group in groups.items():
            params = group[0].params
            others = [f"{short[key]}={_cut(shown(params[key]))}" for key in axes if key in params]
            named[setting] = ", ".join([algorithm_of(group[0]), *others])
        if len(set(named.values())) == len(named):
            return named
    return {setting: f"{name} ({groups[setting][0].trial_id})" for setting, name in named.items()}


def _brief(value: Any) -> str:
    """A drawn number in four digits."""
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else axis_text(value)


def algorithm_of(trial: Trial) -> str:
    """The algorithm as the sweep names it: the option of its group, or `algorithm.name`."""
    chosen = next((trial.params[key] for key in ALGORITHM_AXES if key in trial.params), None)
    return chosen if isinstance(chosen, str) else trial.algorithm


def _cut(text: str, length: int = 24) -> str:
    """The end of a long text, which tells paths apart."""
    return text if len(text) <= length else "..." + text[3 - length :]
