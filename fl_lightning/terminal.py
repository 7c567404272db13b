"""What `fl-lightning run` shows: a live bar on a terminal, one line per round otherwise, and a closing summary."""

import math
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fl_lightning.records import Observer, RoundRecord, RunResult


class PlainLines:
    """Writes one line per round, at once, so that a log file or a pipe can be followed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.clock = Clock()
        self.info: Mapping[str, Any] = {}

    def on_start(self, info: Mapping[str, Any]) -> None:
        self.info = info
        self.clock = Clock()
        for line in opening(info):
            self.write(line)

    def on_round(self, record: "RoundRecord") -> None:
        total = self.info["config"]["fl"]["rounds"]
        self.write(f"round {record.round}/{total}  {round_text(record, self.clock.eta(record.round, total))}")
        for note in record.notes:
            self.write(f"  note: {note}")

    def on_end(self, result: "RunResult") -> None:
        for line in closing(result, self.info):
            self.write(line)

    def write(self, line: str) -> None:
        print(line, file=self.stream, flush=True)


class LiveBar(PlainLines):
    """Keeps one bar with the latest figures; notes and the summary scroll above it."""

    def __init__(self, stream: TextIO, progress: "Progress") -> None:
        super().__init__(stream)
        self.progress = progress
        self.task: TaskID | None = None

    def on_start(self, info: Mapping[str, Any]) -> None:
        super().on_start(info)
        self.task = self.progress.add_task("round", total=info["config"]["fl"]["rounds"], figures="")
        self.progress.start()

    def on_round(self, record: "RoundRecord") -> None:
        assert self.task is not None
        total = self.info["config"]["fl"]["rounds"]
        figures = round_text(record, self.clock.eta(record.round, total), brief=True)
        self.progress.update(self.task, completed=record.round, figures=figures)
        for note in record.notes:
            self.write(f"round {record.round}: note: {note}")

    def on_end(self, result: "RunResult") -> None:
        self.progress.stop()
        super().on_end(result)

    def write(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Clock:
    """Time since the first round began."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def eta(self, done: int, total: int) -> float:
        """Seconds the remaining rounds will take if they go on as before."""
        return (time.monotonic() - self.start) / done * (total - done)


@contextmanager
def display(stream: TextIO) -> Iterator["Observer"]:
    """The observer that suits `stream`; a bar is taken off the screen however the run ends."""
    if not stream.isatty():
        yield PlainLines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    def text(content: str) -> TextColumn:
        return TextColumn(content, table_column=Column(no_wrap=True))

    columns = (text("round {task.completed}/{task.total}"), text("{task.fields[figures]}"))
    bar = BarColumn(bar_width=None, table_column=Column(ratio=1))  # takes what room is left, which may be none
    progress = Progress(*columns, bar, console=Console(file=stream), expand=True, refresh_per_second=4)
    try:
        yield LiveBar(stream, progress)
    finally:
        progress.stop()


def opening(info: Mapping[str, Any]) -> Iterator[str]:
    """The run's id, so that it can be found while it trains, and its size."""
    config = info["config"]
    yield f"run id: {info['run_id'] or 'none (tracking.enabled=false)'}"
    yield (
        f"{config['algorithm']['name']} on {config['data']['name']}: {info['num_parameters']:,} parameters, "
        f"{count(info['clients'], 'client')}, {count(config['fl']['rounds'], 'round')}"
    )


def round_text(record: "RoundRecord", eta: float, *, brief: bool = False) -> str:
    """Accuracy, losses, accuracy on held-out examples, epsilon so far, speed, remaining time: what was measured of it.

    `brief` leaves out the training loss, and the test loss for an accuracy on held-out examples: a line on a terminal
    is short.
    """
    parts = [
        _measured("accuracy", record.test_accuracy),
        "" if brief and record.validation_accuracy is not None else _measured("loss", record.test_loss),
        _measured("held-out", record.validation_accuracy),
        "" if brief else _measured("train loss", record.train_loss),
        "" if record.epsilon is None else f"epsilon {epsilon_text(record.epsilon)}",
        f"{len(record.cohort) / record.seconds:.1f} clients/s" if record.seconds > 0 else "",
        f"eta {duration(eta)}" if eta > 0 else "",
    ]
    return "  ".join(part for part in parts if part)


def count(number: int, word: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def _measured(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.4f}"


def epsilon_text(epsilon: float) -> str:
    """Three decimals, rounded up: a printed epsilon never understates."""
    return "infinite" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def duration(seconds: float) -> str:
    """`8 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def closing(result: "RunResult", info: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy, privacy with all that an epsilon needs beside it, the weights' hash, and how to open the run."""
    final = result.final
    names = {"accuracy": "test_accuracy", "loss": "test_loss", "held-out accuracy": "validation_accuracy"}
    measured = ", ".join(part for name, key in names.items() if (part := _measured(name, final.get(key))))
    yield f"finished: {measured or 'not evaluated'} after {count(len(result.rounds), 'round')}"
    if final.get("stopped"):
        yield f"stopped early: {final['stopped']['reason']}"
    yield f"{result.badge}: {privacy_text(final['privacy'])}"
    yield from readings_text(final["privacy"])
    for warning in (final["privacy"] or {}).get("warnings", ()):
        yield f"  {warning}"
    yield f"weights sha256: {final['weights_sha256'][:16]}"
    if result.run_id:
        from fl_lightning.tracking import run_page

        uri = info["tracking_uri"]
        place = f" --uri {shlex.quote(uri)}" if result.config["tracking"]["uri"] else ""
        yield f"open it with: fl-lightning ui{place}, then {run_page(uri, info['experiment_id'], result.run_id)}"


def readings_text(facts: Mapping[str, Any] | None) -> Iterator[str]:
    """The same releases under the other accountants, on one line; formulas that prove nothing are named as such."""
    rows = [row for row in (facts or {}).get("readings", ()) if row["reading"] != "rdp" and row["total"] is not None]
    if rows:
        words = [
            f"{row['reading']} {epsilon_text(row['total'])}{'' if row['valid'] else ' (no proof)'}" for row in rows
        ]
        yield f"  other readings: {', '.join(words)}"


def privacy_text(facts: Mapping[str, Any] | None) -> str:
    """An epsilon with its unit, delta, neighbours, sampling and trust model."""
    if facts is None:
        return "nothing was clipped or noised, no epsilon"
    epsilon = math.inf if facts["infinite"] or facts["epsilon"] is None else facts["epsilon"]
    terms = {
        "unit": facts["unit"],
        "delta": f"{facts['delta']:g}",
        "adjacency": facts["adjacency"],
        "sampling": facts["sampling"] or "none",
        "trust model": facts["trust_model"],
    }
    return f"epsilon {epsilon_text(epsilon)} ({', '.join(f'{name} {value}' for name, value in terms.items())})"
