"""Which private runs may stand side by side: equal promises at equal budgets, and nothing else.

An accuracy is comparable only with one that was bought at the same price. A promise is what is protected: the unit, the
delta, the neighbouring relation, the trust model, and whether it holds for the run at all. A budget is its epsilon. How
units were sampled is part of the mechanism, not of the promise.

Runs without a finite epsilon protect nothing; they may stand beside any others as a reference, and are labelled so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

PROMISE = ("unit", "delta", "adjacency", "trust_model", "badge")
WORDS = {"unit": "unit", "delta": "delta", "adjacency": "adjacency", "trust_model": "trust model", "badge": "badge"}

CLOSE = 0.05
"""Budgets that nobody set are equal when they differ by no more than this share, the calibration's own tolerance."""

EPSILON_AXES = ("privacy.target_epsilon", "privacy.noise_multiplier")
"""Axes that make epsilon itself what a sweep looks at."""


@dataclass
class Budget:
    """Settings that promise the same at the same epsilon; `epsilon` is the target, or what the first one spent."""

    epsilon: float
    is_target: bool
    settings: list[str] = field(default_factory=list)

    def admits(self, epsilon: float, is_target: bool) -> bool:
        if self.is_target and is_target:
            return epsilon == self.epsilon
        return abs(epsilon - self.epsilon) <= CLOSE * max(epsilon, self.epsilon)


@dataclass
class Family:
    """Settings that promise the same, by budget.

    Attributes:
        promise: PROMISE's values; None for the family of a sweep in which nothing is private.
        budgets: in the order of the rows.
        references: settings without a finite epsilon.
    """

    promise: tuple[Any, ...] | None
    budgets: list[Budget] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    @property
    def settings(self) -> list[str]:
        """All settings with the promise."""
        return [setting for budget in self.budgets for setting in budget.settings]

    def title(self, budget: Budget | None = None) -> str:
        """For headings: `one example each, epsilon 8, delta 1e-05, adjacency add_remove, trust model local`."""
        if self.promise is None:
            return "no privacy"
        unit, delta, adjacency, trust, badge = self.promise
        parts = [
            f"per {unit}",
            f"epsilon {budget.epsilon:.4g}" if budget else "",
            f"delta {float(delta):g}" if delta is not None else "",
            f"adjacency {adjacency}",
            f"trust model {trust}" if trust else "",
            "NOT PRIVATE" if badge == "NOT PRIVATE" else "",
        ]
        return ", ".join(part for part in parts if part)


def is_reference(row: Mapping[str, Any]) -> bool:
    """Whether a row has finished trials and protects nothing."""
    return bool(row["n"]) and (row["unit"] is None or row["epsilon"] is None)


def families(rows: Sequence[Row], axes: Sequence[str] = ()) -> list[Family]:
    """The rows' settings by promise, and by budget unless epsilon is an axis; references stand in every family.

    Args:
        rows: from `settings_table`.
        axes: the sweep's axes. With one of EPSILON_AXES a family has several budgets, which its table may hold
            together; without one, every budget is a family of its own.
    """
    together = any(axis in EPSILON_AXES for axis in axes)
    found: list[Family] = []
    for row in rows:
        if row["unit"] is None or row["epsilon"] is None or not math.isfinite(row["epsilon"]):
            continue
        promise = tuple(row[key] for key in PROMISE)
        target = row["target_epsilon"]
        is_target = target is not None and (1 - CLOSE) * target <= row["epsilon"] <= target * (1 + 1e-6)
        epsilon = target if is_target else row["epsilon"]
        alike = [family for family in found if family.promise == promise]
        budgets = [budget for family in alike for budget in family.budgets]
        budget = next((item for item in budgets if item.admits(epsilon, is_target)), None)
        if budget is None:
            budget = Budget(epsilon, is_target)
            if alike and together:
                alike[0].budgets.append(budget)
            else:
                found.append(Family(promise, [budget]))
        budget.settings.append(row["setting"])
    references = [row["setting"] for row in rows if is_reference(row)]
    others = [row["setting"] for row in rows if not row["n"]]
    found = found or [Family(None)]
    for family in found:
        family.references = references
    found[0].references = [row["setting"] for row in rows if row["setting"] in {*references, *others}]
    return found


def groups(found: Sequence[Family]) -> list[tuple[str, list[str]]]:
    """(promise in words, settings) of what may be compared: each promise at each budget, then what protects nothing."""
    private = any(family.budgets for family in found)
    named = [(family.title(budget), budget.settings) for family in found for budget in family.budgets]
    return [*named, ("no privacy" if private else "", list(found[0].references))]


def mismatch(found: Sequence[Family]) -> str:
    """The sentence that says why there are several tables or figures; empty where there is one of each.

    Example: "The private runs differ in unit (sample, client) and epsilon (2, 8), so they share no table and no axis."
    """
    if len(found) < 2:
        if len(found[0].budgets) < 2:
            return ""
        return (
            f"Epsilon is what this sweep varies ({_list(found[0].budgets)}): accuracy is drawn against it, and runs of "
            "different epsilon share no figure over rounds."
        )
    parts = []
    for number, key in enumerate(PROMISE):
        values = list(dict.fromkeys(_text(family.promise[number]) for family in found if family.promise is not None))
        if len(values) > 1:
            parts.append(f"{WORDS[key]} ({', '.join(values)})")
    budgets = [budget for family in found for budget in family.budgets]
    if len({f"{budget.epsilon:.4g}" for budget in budgets}) > 1:
        parts.append(f"epsilon ({_list(budgets)})")
    return f"The private runs differ in {' and '.join(parts)}, so they share no table and no axis."


def _list(budgets: Sequence[Budget]) -> str:
    return ", ".join(dict.fromkeys(f"{budget.epsilon:.4g}" for budget in budgets))


def _text(value: Any) -> str:
    if value is None:
        return "not stated"
    return value if isinstance(value, str) else f"{float(value):g}"
