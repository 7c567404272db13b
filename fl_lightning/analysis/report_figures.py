"""A sweep's figures: accuracy over rounds for each budget, and against epsilon where epsilon is what varies."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fl_lightning.analysis.figures import Curve, Trade, accuracy_against_epsilon, accuracy_curves
from fl_lightning.analysis.front_figure import draw_front
from fl_lightning.analysis.pareto import Front, front_words
from fl_lightning.analysis.promises import EPSILON_AXES, Budget, Family, Row, is_reference
from fl_lightning.analysis.statistics import curve
from fl_lightning.analysis.tables import caveats, epsilon_text
from fl_lightning.analysis.trials import Trial, by_setting, labels, setting_of

REFERENCE = "no privacy, for reference"


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn: its key among the report's paths, its file, what it shows, and of which family."""

    key: str
    path: Path
    words: str
    family: int


def draw(
    trials: Sequence[Trial],
    rows: Sequence[Row],
    found: Sequence[Family],
    out: Path,
    title: str,
    fronts: Sequence[Front] = (),
) -> list[Picture]:
    """Draws one figure over rounds for each budget of each family, and one against epsilon for each with several.

    Where clients hold out examples, the accuracy on them has a figure beside that on the test set.

    No figure holds runs of different promises or budgets; runs without privacy stand in each as a reference.

    Args:
        trials: of the sweep.
        rows: from `settings_table`.
        found: from `families`.
        out: folder of the files curves.png, curves-2.png ..., validation.png ..., epsilon.png, epsilon-2.png ...
        title: of every figure; the promise is added where there are several.
        fronts: drawn first, as pareto.png, pareto-2.png ...; where epsilon is an objective they take the place of the
            figure against epsilon, and only budgets of settings on a front have curves.
    """
    pictures = _fronts(trials, rows, found, out, title, fronts)
    for count, (number, family, budget) in enumerate(plots := plots_of(found, fronts), start=1):
        shown = {*family.references, *(budget.settings if budget else ())}
        heading = f"{title}: {family.title(budget)}" if len(plots) > 1 else title
        notes = caveats([row for row in rows if row["setting"] in shown])
        for name, label in (("curves", "test accuracy"), ("validation", "validation accuracy")):
            lines = _curves(trials, rows, shown, label.replace(" ", "_"))
            if name == "validation" and not any(line.points for line in lines):
                continue  # the clients hold out nothing
            said = f"{label.capitalize()} by round"
            words = f"{said}, {family.title(budget)}" if len(plots) > 1 else said
            path = out / file_name(name, count)
            accuracy_curves(lines, path, title=heading, ylabel=label, notes=notes)
            pictures.append(Picture(_key(name, count), path, words, number))
    weighed = _weighing_epsilon(fronts)
    varied = [(number, family) for number, family in enumerate(found) if len(family.budgets) > 1 and not weighed]
    for count, (number, family) in enumerate(varied, start=1):
        path = out / file_name("epsilon", count)
        notes = caveats([row for row in rows if row["setting"] in {*family.settings, *family.references}])
        trades, references = _trades(trials, rows, family), _references(trials, rows, family)
        heading = f"{title}: {family.title()}"
        ticks = [budget.epsilon for budget in family.budgets]
        accuracy_against_epsilon(trades, path, title=heading, ticks=ticks, references=references, notes=notes)
        pictures.append(Picture(_key("epsilon", count), path, f"Test accuracy by epsilon, {family.title()}", number))
    return pictures


def _fronts(
    trials: Sequence[Trial],
    rows: Sequence[Row],
    found: Sequence[Family],
    out: Path,
    title: str,
    fronts: Sequence[Front],
) -> list[Picture]:
    pictures, named = [], labels(trials)
    for count, front in enumerate(fronts, start=1):
        shown = {*front.best, *front.others}
        references: list[tuple[str, float]] = []
        if front.promise and front.objectives[0][0] == "test_accuracy":
            references = _references(trials, rows, found[front.family])
        path = out / file_name("pareto", count)
        heading = f"{title}: {front.promise}" if front.promise else title
        notes = caveats([row for row in rows if row["setting"] in shown])
        draw_front(front, named, path, title=heading, references=references, notes=notes)
        words = f"Pareto front of {front_words(front)}" + (f", {front.promise}" if front.promise else "")
        pictures.append(Picture(_key("pareto_front", count), path, words, front.family))
    return pictures


def plots_of(found: Sequence[Family], fronts: Sequence[Front] = ()) -> list[tuple[int, Family, Budget | None]]:
    """What gets a figure of its own, with its family's number: each budget of each family.

    Where a front weighs epsilon every setting may have a budget of its own: then only budgets with one on a front.
    """
    chosen = {setting for front in _weighing_epsilon(fronts) for setting in front.best}
    plots: list[tuple[int, Family, Budget | None]] = []
    for number, family in enumerate(found):
        budgets = [budget for budget in family.budgets if not chosen or chosen & set(budget.settings)]
        plots += [(number, family, budget) for budget in budgets]
        if not family.budgets:
            plots.append((number, family, None))
    return plots


def _weighing_epsilon(fronts: Sequence[Front]) -> list[Front]:
    return [front for front in fronts if any(metric == "epsilon" for metric, _ in front.objectives)]


def file_name(name: str, count: int) -> str:
    """`curves.png`, `curves-2.png` ..."""
    return f"{name}.png" if count == 1 else f"{name}-{count}.png"


def _key(name: str, count: int) -> str:
    return name if count == 1 else f"{name}_{count}"


def _curves(trials: Sequence[Trial], rows: Sequence[Row], shown: Collection[str], metric: str) -> list[Curve]:
    names, spent = labels(trials), {row["setting"]: row for row in rows}
    private = any(spent[setting]["unit"] is not None for setting in shown)
    found = []
    for setting, group in by_setting(trials).items():
        if setting not in shown:
            continue
        name = shown_name(names[setting], spent[setting], private)
        histories = [trial.history.get(metric, ()) for trial in group if trial.finished]
        found.append(Curve(name, curve(histories)))
    return found


def shown_name(name: str, row: Row, private: bool) -> str:
    """A setting's name in a legend, with its epsilon, or as a reference in a figure that holds private settings."""
    if row["unit"] is not None:
        return f"{name}\n(epsilon {epsilon_text(row)})"
    return f"{name}\n({REFERENCE})" if private and row["n"] else name


def _trades(trials: Sequence[Trial], rows: Sequence[Row], family: Family) -> list[Trade]:
    """A line per method: settings that differ in nothing but their epsilon."""
    spent = {row["setting"]: row for row in rows}
    bare, series = [], {}
    for trial in trials:
        if trial.setting in family.settings and trial.setting not in series:
            params = {key: value for key, value in trial.params.items() if key not in EPSILON_AXES}
            bare.append(replace(trial, params=params, setting=setting_of(params)))
            series[trial.setting] = bare[-1].setting
    names = labels(bare)
    found: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in names}
    for setting, name in series.items():
        row = spent[setting]
        if row["test_accuracy_mean"] is not None:
            found[name].append((row["epsilon"], row["test_accuracy_mean"], row["test_accuracy_sd"]))
    return [Trade(names[name], points) for name, points in found.items()]


def _references(trials: Sequence[Trial], rows: Sequence[Row], family: Family) -> list[tuple[str, float]]:
    names = labels(trials)
    return [
        (f"{names[row['setting']]}\n({REFERENCE})", row["test_accuracy_mean"])
        for row in rows
        if row["setting"] in family.references and is_reference(row) and row["test_accuracy_mean"] is not None
    ]
