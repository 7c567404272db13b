"""What a sweep shows while it runs: a live table on a terminal, otherwise one plain line when a trial ends."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune import Callback

from fl_lightning.analysis.tables import epsilon_text
from fl_lightning.analysis.trials import axis_text
from fl_lightning.foresight import larger_cohort
from tune.space import ID, Plan, Point, sampled_of
from tune.trial import OUTCOME, loss_of
from tune.trial_log import LOG_FILE

PARAMETERS_FILE = "params.json"


@dataclass
class Line:
    """One trial as it is shown."""

    point: Point
    round: int = 0
    accuracy: float | None = None
    validation: float | None = None
    epsilon: float | None = None
    status: str = "running"
    error: str = ""
    stopped: bool = False
    began: float = field(default_factory=time.monotonic)
    took: float | None = None

    @property
    def seconds(self) -> float:
        return self.took if self.took is not None else time.monotonic() - self.began


class Board(Callback):  # type: ignore[misc]
    """Follows the trials for the display, and keeps each one's parameters in `params.json` in its folder,
    and what a failed one has said in `log.txt`.

    Folders are named by the trial's short id alone, so no file system's limit on names is ever met.
    """

    def __init__(self, plan: Plan, folder: Path, total: int, *, quiet: bool, done: int = 0) -> None:
        """Args:
        plan: the sweep.
        folder: holds one folder per trial.
        total: how many trials there will be, those that are done among them.
        quiet: print failures only.
        done: how many ended before the sweep was resumed.
        """
        self.plan, self.folder, self.total, self.quiet, self.done = plan, folder, total, quiet, done
        self.lines: dict[str, Line] = {}
        self.live = not quiet and sys.stdout.isatty()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        sampled = sampled_of(trial.config)
        trial_id, point = sampled[ID], self.plan.point(sampled)
        before = self.lines.get(trial_id)  # a member of a population starts again after each comparison
        self.lines[trial_id] = Line(point) if before is None else replace(before, point=point)
        content = {"params": dict(point.params), "seed": point.seed, "config": point.config.to_dict()}
        own = self.folder / trial_id
        own.mkdir(parents=True, exist_ok=True)
        (own / PARAMETERS_FILE).write_text(json.dumps(content, indent=1) + "\n")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        line = self.lines[_id(trial)]
        line.round = result.get("round", line.round)
        line.accuracy = result.get("test_accuracy", line.accuracy)
        line.validation = result.get("validation_accuracy", line.validation)
        line.epsilon = result.get("epsilon", line.epsilon)
        if OUTCOME in result:
            final = json.loads(result[OUTCOME]).get("final") or {}
            line.stopped = (final.get("stopped") or {}).get("by") == "scheduler"
        if OUTCOME in result and (error := (outcome := json.loads(result[OUTCOME])).get("error")):
            line.error = f"{error['type']}: {error['message']}"
            if outcome.get("log"):
                (self.folder / _id(trial) / LOG_FILE).write_text(outcome["log"], encoding="utf-8")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._end(_id(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial_id = _id(trial)
        self.lines[trial_id].error = self.lines[trial_id].error or _loss(trial)
        self._end(trial_id)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A crash that is followed by another attempt."""
        line = self.lines[_id(trial)]
        said = f"{_id(trial)} crashed after round {line.round} and is tried again: {line.error or _loss(trial)}"
        line.error = ""
        if not self.live:
            print(said, file=sys.stderr, flush=True)

    def _end(self, trial_id: str) -> None:
        line = self.lines[trial_id]
        line.took = line.seconds
        line.status = "failed" if line.error else "finished"
        if not self.live and (line.error or not self.quiet):
            print(self._sentence(trial_id, line), file=sys.stderr if self.quiet else sys.stdout, flush=True)

    def _sentence(self, trial_id: str, line: Line) -> str:
        done = self.done + sum(other.took is not None for other in self.lines.values())
        swept = "".join(f" {key}={axis_text(value)}" for key, value in line.point.params.items())
        head = f"[{done}/{self.total}] {trial_id}{swept} seed={line.point.seed}: "
        if line.status == "failed":
            return head + f"FAILED after round {line.round}: {line.error}"
        accuracy = "not measured" if line.accuracy is None else f"{line.accuracy:.4f}"
        held = "" if line.validation is None else f", on held-out examples {line.validation:.4f}"
        spent = "" if line.epsilon is None else f", epsilon {self._epsilon(line)}"
        early = ", ended early" if line.stopped else ""
        return head + f"accuracy {accuracy}{held}{spent} ({line.round} rounds{early}, {line.seconds:.1f} s)"

    def _epsilon(self, line: Line) -> str:
        """With unit and delta, as in the final table."""
        privacy = line.point.config.privacy
        if line.epsilon is None or privacy.level == "none":
            return "-"
        unit = "sample" if privacy.level == "sample" else "client"
        text = epsilon_text({"epsilon": line.epsilon, "unit": unit, "delta": privacy.delta})
        return text if larger_cohort(privacy) is None else f"{text}, of a larger federation: NOT PRIVATE"

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keeps the live table on the terminal for the length of the block; nothing elsewhere."""
        if not self.live:
            yield
            return
        from rich.live import Live

        with Live(get_renderable=self._table, refresh_per_second=4, transient=True):
            yield

    def _table(self) -> Any:
        from rich.console import Console
        from rich.table import Table

        room = max(4, Console().height - 8)
        running = [item for item in self.lines.items() if item[1].took is None]
        ended = [item for item in self.lines.items() if item[1].took is not None]
        ended = ended[len(ended) - max(0, room - len(running)) :] if len(ended) + len(running) > room else ended
        count = self.done + sum(line.took is not None for line in self.lines.values())
        failed = sum(line.status == "failed" for line in self.lines.values())
        title = f"sweep {self.plan.sweep_id}: {count} of {self.total} trials done" + (
            f", {failed} failed" if failed else ""
        )
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for heading in ("trial", *self.plan.axes, "seed", "round", "accuracy", "epsilon", "seconds", "status"):
            table.add_column(heading)
        for trial_id, line in [*ended, *running][-room:]:
            colour = {"failed": "red", "finished": "green"}.get(line.status, "")
            table.add_row(
                trial_id,
                *(axis_text(line.point.params[key]) for key in self.plan.axes),
                str(line.point.seed),
                f"{line.round}/{line.point.config.fl.rounds}",
                "-" if line.accuracy is None else f"{line.accuracy:.4f}",
                self._epsilon(line),
                f"{line.seconds:.0f}",
                line.error or line.status,
                style=colour,
            )
        return table


def _loss(trial: Any) -> str:
    """Why a trial ended without a word, from the error that Ray Tune has just put beside its results."""
    file = Path(trial.pickled_error_file or "")
    error = cloudpickle.loads(file.read_bytes()) if file.is_file() else None
    return str(loss_of(error)["error"]["message"])


def _id(trial: Any) -> str:
    return str(sampled_of(trial.config)[ID])
