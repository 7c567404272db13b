"""A plan of `foresight` in words."""

import math
from collections.abc import Mapping
from typing import Any

from fl_lightning.foresight import WANTED
from fl_lightning.terminal import epsilon_text

UNITS = {"sample": "one example of a client", "client": "all data of one client"}


def lines(plan: Mapping[str, Any]) -> list[str]:
    """The plan as text, one fact a line."""
    if plan["level"] == "none":
        return [plan["words"]]
    epsilon = epsilon_text(math.inf if plan["epsilon"] is None else plan["epsilon"])
    nominal = "" if plan["nominal_epsilon"] is None else f" (the paper's formula says {plan['nominal_epsilon']:.3f})"
    clip = "infinite" if plan["clip_norm"] is None else f"{plan['clip_norm']:g}"
    found = [
        f"{plan['algorithm']} on {plan['data']}: {plan['num_parameters']:,} parameters, {_size(plan)}",
        f"promise    epsilon {epsilon}{nominal} for {UNITS[plan['unit']]}, delta {plan['delta']:g}, adjacency "
        f"{plan['adjacency']}, sampling {plan['sampling']}, trust model {plan['trust_model']}",
        f"noise      multiplier {_span(plan['noise_multiplier'])} (std over C = {clip}); accountants count "
        f"{_span(plan['accountant_multiplier'])} (std over sensitivity)",
        *_ratios(plan),
        f"dial       R = {_times(plan['dial'])} (0.3: nearly harmless, 1: heavy loss, 10: guessing)",
        f"verdict    {plan['words']}",
        *_remedies(plan),
    ]
    return [*found, *(f"note       {text}" for text in [*plan["assumptions"], *plan["warnings"]])]


def _size(plan: Mapping[str, Any]) -> str:
    examples, turns = plan["examples"], plan["participations"]
    return (
        f"{plan['clients']:,} clients with {_range(examples)} examples, {plan['rounds']:,} rounds with "
        f"{plan['cohort']:,} of them, {_range(turns)} turns each"
    )


def _ratios(plan: Mapping[str, Any]) -> list[str]:
    over = plan["noise_over_signal"]
    step = f", of one step {_times(over['step'])}" if "step" in over else ""
    return [
        f"size       noise over the largest possible signal: of one upload {_times(over['upload'])}, of the cohort's "
        f"mean {_times(over['mean'])}{step}"
    ]


def _remedies(plan: Mapping[str, Any]) -> list[str]:
    if plan["verdict"] in ("no noise", "nearly harmless") or plan["smallest"]["clients"] is None:
        return []
    clients, cohort = plan["smallest"]["clients"], plan["smallest"]["cohort"]
    parts = []
    for name, wanted in WANTED.items():
        if plan["dial"] > wanted:
            many = f" and a cohort of {cohort[name]:,}" if cohort is not None else ""
            parts.append(f"R = {wanted:g} needs {clients[name]:,} clients like these{many}")
    return [f"remedy     {'; '.join(parts)}; or a smaller model, a larger epsilon, or another level of privacy"]


def _range(span: Mapping[str, int]) -> str:
    return f"{span['min']:,}" if span["min"] == span["max"] else f"{span['min']:,} to {span['max']:,}"


def _span(span: Mapping[str, float]) -> str:
    low, high = (f"{span[key]:.5g}" for key in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def _times(value: float | None) -> str:
    if value is None:
        return "infinite"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
