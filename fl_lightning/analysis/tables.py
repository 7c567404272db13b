"""The comparison table: one row per setting, mean and spread over seeds, and every epsilon with what it protects."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.analysis.costs import FIELDS as COST_FIELDS
from fl_lightning.analysis.costs import costs
from fl_lightning.analysis.statistics import confidence_interval, mean, sample_sd
from fl_lightning.analysis.trials import ALGORITHM_AXES, Trial, algorithm_of, axis_text, by_setting, varying

Row = dict[str, Any]
Own = Mapping[str, Mapping[str, Any]]

PRIVACY_KEYS = ("unit", "delta", "adjacency", "sampling", "trust_model")
VALIDATED = ("validation_accuracy_mean", "validation_accuracy_sd", "validation_loss_mean")
PLUS_MINUS = "\u00b1"
DELTA = "\u03b4"


def settings_table(
    trials: Sequence[Trial], skipped: Sequence[Mapping[str, Any]] = (), target: float | None = None
) -> list[Row]:
    """One row per setting, in the order of the trials, then those that were skipped.

    Each row has `setting`, `algorithm`, `params`, `seeds` (of the finished trials), `n` (their number),
    `test_accuracy_mean`, `test_accuracy_sd` (sample standard deviation, None for n < 2), `test_accuracy_low` and
    `_high` (95 % interval for the mean), `test_loss_mean`, VALIDATED (on what clients hold out of training), what
    `costs` gives, `epsilon` (the largest over the seeds), `unit`, `delta`, `adjacency`, `sampling`, `trust_model` of
    that epsilon, `target_epsilon`, `badge` (NOT PRIVATE if any seed is), `warnings` (what must be said wherever the row
    is shown), `pareto` and `front` (False and None: `outcome` says whether it is on a Pareto front, and under which
    number), `failed` (how many did not finish), `stopped` (how many of the finished the sweep's scheduler ended
    early) and `skipped` (why the sweep left it out, or None). What is not known is None: a mean over no finished trial,
    or over losses that are not all finite. A row with a unit but no epsilon has an infinite one; a row without a unit
    protects nothing.

    Args:
        trials: of all settings that were tried.
        skipped: `setting`, `algorithm`, `params` and `reason` of each that was not.
        target: a test accuracy in [0, 1]; the rounds and seconds to it are costs.
    """
    rows = [_row(setting, group, target) for setting, group in by_setting(trials).items()]
    left_out = [Trial("-", item["setting"], item["params"], 0, item["algorithm"], "skipped") for item in skipped]
    reasons = [item["reason"] for item in skipped]
    return [*rows, *(_row(trial.setting, [trial], target, why) for trial, why in zip(left_out, reasons, strict=True))]


def _row(setting: str, group: Sequence[Trial], target: float | None, skipped: str | None = None) -> Row:
    finished = [trial for trial in group if trial.finished]
    accuracies = _measured(finished, "test_accuracy")
    statement = next((trial.privacy for trial in finished if trial.privacy), None) or {}
    epsilons = _measured(finished, "epsilon") if statement else []
    low, high = (confidence_interval(accuracies) if all(map(math.isfinite, accuracies)) else None) or (None, None)
    bounded = len(epsilons) == len(finished) > 0 and all(map(math.isfinite, epsilons))
    return {
        "setting": setting,
        "algorithm": algorithm_of(group[0]),
        "params": dict(group[0].params),
        "seeds": [trial.seed for trial in finished],
        "n": len(finished),
        "test_accuracy_mean": _finite(mean(accuracies)),
        "test_accuracy_sd": _finite(sample_sd(accuracies)),
        "test_accuracy_low": low,
        "test_accuracy_high": high,
        "test_loss_mean": _finite(mean(_measured(finished, "test_loss"))),
        "validation_accuracy_mean": _finite(mean(_measured(finished, "validation_accuracy"))),
        "validation_accuracy_sd": _finite(sample_sd(_measured(finished, "validation_accuracy"))),
        "validation_loss_mean": _finite(mean(_measured(finished, "validation_loss"))),
        **costs(finished, target),
        "epsilon": max(epsilons) if bounded else None,
        **{key: statement.get(key) for key in PRIVACY_KEYS},
        "target_epsilon": finished[0].target_epsilon if statement else None,
        "badge": _badge([trial.badge for trial in finished]) if statement else None,
        "warnings": list(
            dict.fromkeys(text for trial in finished for text in (trial.privacy or {}).get("warnings", ()))
        ),
        "pareto": False,
        "front": None,
        "failed": 0 if skipped else len(group) - len(finished),
        "stopped": sum(trial.stopped for trial in finished),
        "skipped": skipped,
    }


def _badge(badges: Sequence[str | None]) -> str | None:
    return "NOT PRIVATE" if "NOT PRIVATE" in badges else badges[0]


def _measured(trials: Sequence[Trial], key: str) -> list[float]:
    return [float(trial.final[key]) for trial in trials if trial.final.get(key) is not None]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def columns(rows: Sequence[Row]) -> list[str]:
    """The headings of the text table: the algorithm, every further axis that varies, then what was measured."""
    axes = [key for key in varying([row["params"] for row in rows]) if key not in ALGORITHM_AXES]
    held = ["validation accuracy"] if any(row["validation_accuracy_mean"] is not None for row in rows) else []
    front = ["front"] if any(row["pareto"] for row in rows) else []
    failed = ["failed"] if any(row["failed"] for row in rows) else []
    stopped = ["stopped"] if any(row["stopped"] for row in rows) else []
    skipped = ["skipped"] if any(row["skipped"] for row in rows) else []
    measured = [*held, "test accuracy", "test loss", "epsilon", *front]
    return ["algorithm", *axes, "seeds", *measured, *failed, *stopped, *skipped]


def cells(row: Row, headings: Sequence[str]) -> list[str]:
    """A row as texts under the headings of `columns`."""
    known = {
        "algorithm": row["algorithm"],
        "seeds": str(row["n"]),
        "test accuracy": mean_and_sd(row["test_accuracy_mean"], row["test_accuracy_sd"]),
        "validation accuracy": mean_and_sd(row["validation_accuracy_mean"], row["validation_accuracy_sd"]),
        "test loss": _number(row["test_loss_mean"], 3),
        "epsilon": epsilon_text(row),
        "front": str(row["front"]) if row["pareto"] else "-",
        "failed": str(row["failed"]),
        "stopped": str(row["stopped"]),
        "skipped": row["skipped"] or "-",
    }
    return [known[name] if name in known else _axis_cell(row["params"], name) for name in headings]


def mean_and_sd(centre: float | None, spread: float | None) -> str:
    """`0.912 +- 0.004`, or the mean alone of one seed, or a dash of none."""
    text = _number(centre, 4)
    return text if spread is None else f"{text} {PLUS_MINUS} {_number(spread, 4)}"


def epsilon_text(row: Mapping[str, Any]) -> str:
    """The epsilon, rounded up, never without the unit it protects and its delta; a dash for a run without privacy."""
    if row["unit"] is None:
        return "-"
    return f"{epsilon_number(row)} per {row['unit']}, {DELTA}={_delta(row['delta'])}"


def epsilon_number(row: Mapping[str, Any]) -> str:
    """The epsilon rounded up, for places whose heading says what it protects."""
    return "infinite" if row["epsilon"] is None else f"{math.ceil(row['epsilon'] * 100 - 1e-9) / 100:.2f}"


def _delta(delta: Any) -> str:
    return "?" if delta is None else f"{float(delta):g}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _axis_cell(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    return "-" if key not in params else f"{value:.5g}" if isinstance(value, float) else axis_text(value)


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table; numbers' columns are not aligned, so that any reader shows it the same."""
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in [headings, *lines]]
    widths = [max(3, *(len(line[i]) for line in escaped)) for i in range(len(headings))]
    rule = ["-" * width for width in widths]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]]) + "\n"


def settings_markdown(rows: Sequence[Row], own: Own | None = None) -> str:
    """The table of all settings with its caption; `own` as in `caption`."""
    headings = columns(rows)
    table = markdown(headings, [cells(row, headings) for row in rows])
    return table + "\n" + "\n".join(caption(rows, own)) + "\n"


def caption(rows: Sequence[Row], own: Own | None = None) -> list[str]:
    """What the numbers mean, one sentence per line: the spread, each epsilon's promise, and whether they compare.

    Args:
        rows: from `settings_table`.
        own: algorithm -> values by dotted key that the sweep gives to that algorithm alone.
    """
    seeds = sorted({seed for row in rows for seed in row["seeds"]})
    lines = [
        f"Mean {PLUS_MINUS} sample standard deviation over the seeds {', '.join(map(str, seeds))}."
        if len(seeds) > 1
        else f"One seed ({', '.join(map(str, seeds)) or 'none finished'}): no spread can be given."
    ]
    if any(row["validation_accuracy_mean"] is not None for row in rows):
        lines.append("Validation: all examples that clients hold out of training (data.validation), together.")
    fixed = _fixed(rows)
    if fixed:
        lines.append(f"All rows: {', '.join(f'{key}={value}' for key, value in fixed.items())}.")
    shown = {row["algorithm"] for row in rows}
    for name, values in (own or {}).items():
        if name not in shown:
            continue
        swept = ", ".join(f"{key}={axis_text(value)}" for key, value in values.items())
        lines.append(f"{name} alone has {swept}.")
    promises: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["unit"] is not None:
            promises.setdefault(tuple(row[key] for key in PRIVACY_KEYS), []).append(row)
    for (unit, delta, adjacency, sampling, trust), group in promises.items():
        names = ", ".join(dict.fromkeys(row["algorithm"] for row in group))
        lines.append(
            f"{names}: (epsilon, {DELTA}={_delta(delta)})-differential privacy of one {unit}, adjacency {adjacency}, "
            f"sampling {sampling}, trust model {trust or 'not stated'}; the largest epsilon over clients and seeds."
        )
    if len({promise[:3] for promise in promises}) > 1:
        lines.append("These epsilons differ in unit, delta or adjacency and must not be compared as numbers.")
    if promises and any(row["unit"] is None and row["n"] for row in rows):
        lines.append("Rows with a dash under epsilon protect nothing.")
    if any(row["pareto"] for row in rows):
        lines.append(
            "Front: the numbers of the settings on the Pareto front; a dash: another setting of the same promise is "
            "better, or an objective has no finite value."
        )
    if ended := sum(row["stopped"] for row in rows):
        lines.append(
            f"Trials ended early by the scheduler: {ended}; of each counts what it measured last, so a row with some "
            "of them mixes runs of different lengths: it is not named the best, nor tested, while there are whole ones."
        )
    return [*lines, *caveats(rows)]


def caveats(rows: Sequence[Row]) -> list[str]:
    """What must be said wherever these rows are shown, with the algorithms that it concerns."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for text in row["warnings"]:
            found.setdefault(text, []).append(row["algorithm"])
    lines = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]
    not_private = dict.fromkeys(
        row["algorithm"] for row in rows if row["badge"] == "NOT PRIVATE" and "NOT PRIVATE" not in str(row["warnings"])
    )
    if not_private:
        lines.append(f"{', '.join(not_private)}: NOT PRIVATE, the epsilon is not a promise of these runs.")
    return lines


def _fixed(rows: Sequence[Row]) -> dict[str, str]:
    """The axes that have one value in all rows, and therefore no column."""
    if not rows:
        return {}
    moving = {*ALGORITHM_AXES, *varying([row["params"] for row in rows])}
    return {key: axis_text(value) for key, value in rows[0]["params"].items() if key not in moving}


def pivot(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]] | None:
    """Algorithms down, the other axes' settings across, mean and spread in the cells.

    None unless there are at least two algorithms and two settings across, and at most eight.
    """
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    across = list(dict.fromkeys(map(_other, rows)))
    if len(algorithms) < 2 or not 2 <= len(across) <= 8:
        return None
    found = {
        (row["algorithm"], _other(row)): mean_and_sd(row["test_accuracy_mean"], row["test_accuracy_sd"]) for row in rows
    }
    lines = [[name, *(found.get((name, other), "-") for other in across)] for name in algorithms]
    return ["test accuracy", *across], lines


def _other(row: Row) -> str:
    others = [f"{key}={axis_text(value)}" for key, value in row["params"].items() if key not in ALGORITHM_AXES]
    return ", ".join(others) or "default"


def to_csv(rows: Sequence[Row], compared: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """All rows with full precision: one column per axis, empty where there is no value.

    Args:
        rows: from `settings_table`.
        compared: setting -> `Standing.fields()`, columns of their own.
    """
    axes = list(dict.fromkeys(key for row in rows for key in row["params"]))
    measured = ["n", "test_accuracy_mean", "test_accuracy_sd", "test_loss_mean", "epsilon", "target_epsilon"]
    measured += [*PRIVACY_KEYS, "badge", "failed", "stopped", "pareto", "front"]
    more = ["test_accuracy_low", "test_accuracy_high", "target", "reached", *COST_FIELDS, *VALIDATED]
    fields = list(dict.fromkeys(name for found in (compared or {}).values() for name in found))
    said = ["warnings", "skipped"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = ["setting", *([] if "algorithm" in axes else ["algorithm"]), *axes, "seeds"]
    writer.writerow([*first, *measured, *said, *more, *fields])
    for row in rows:
        own = [] if "algorithm" in axes else [row["algorithm"]]
        values = [axis_text(row["params"][key]) if key in row["params"] else "" for key in axes]
        seeds = " ".join(map(str, row["seeds"]))
        against = (compared or {}).get(row["setting"], {})
        numbers, further = [["" if row[key] is None else row[key] for key in keys] for keys in (measured, more)]
        further += ["" if against.get(key) is None else against[key] for key in fields]
        words = [" ".join(row["warnings"]), row["skipped"] or ""]
        writer.writerow([row["setting"], *own, *values, seeds, *numbers, *words, *further])
    return text.getvalue()
