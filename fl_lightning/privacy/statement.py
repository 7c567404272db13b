"""What a run promises, in words and as JSON: no epsilon without its unit, delta, neighbours and trust model."""

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context
from typing import Any

from fl_lightning.errors import PrivacyError
from fl_lightning.privacy.accountants import ORDERS
from fl_lightning.privacy.ledger import Ledger, Segment, finite_or_none

LEVELS = {
    "sample": ("sample", "one example of a client", "Each example's gradient was clipped to norm {clip}."),
    "update": ("client", "all data of one client", "Each client's update was clipped to norm {clip}."),
    "model": ("client", "all data of one client", "Each client's trained model was clipped to norm {clip}."),
}
"""Level -> the ledger's unit, the unit in words, what was clipped."""

BOUNDS = {
    "fixed": "",
    "per_layer": " Each of its L layers was clipped by itself, to that norm over sqrt(L).",
    "quantile": " That is where the bound began; it then followed a quantile of the norms, released bit by bit.",
}
"""How the bound was set -> what is said of it."""

NEIGHBOURS = {
    ("sample", "add_remove"): "one example of a client is added or removed",
    ("sample", "zero_out"): "one example of a client contributes nothing",
    ("sample", "replace_one"): "one example of a client is replaced by any other",
    ("client", "add_remove"): "one client is added or removed",
    ("client", "zero_out"): "one client contributes nothing",
    ("client", "replace_one"): "all data of one client are replaced by any other data",
}

TRUST_MODELS = {
    "local": "each client protects its own upload, so neither the server nor another client need be trusted",
    "central": "the server is trusted to see the uploads and to add the noise to their sum",
    "distributed": "each client adds a share of the noise, which protects only under secure aggregation of the uploads",
}

VALIDATED = (
    "The validation metrics are measured on examples that clients hold out of training, by no private mechanism: this "
    "epsilon covers neither publishing them nor choosing a model or a setting by them."
)

CAVEATS = (
    "The noise is pseudo-random and follows from the run's seed, so this is a simulation, not a deployment: whoever "
    "knows the seed can remove the noise.",
    "Hyper-parameters chosen by looking at several runs cost privacy that is not accounted for here.",
)


def statement(
    ledger: Ledger,
    *,
    level: str,
    clip_norm: float,
    trust_model: str = "local",
    sizes: Mapping[int, int] | None = None,
    public_examples: int = 0,
    clip_bound: str = "fixed",
    cohorts: tuple[int, int | None] | None = None,
    validated: bool = False,
) -> str:
    """One paragraph: unit, epsilon, delta, neighbours, sampling, accountant, trust model, worst client, caveats.

    Args:
        ledger: the account of the run.
        level: "sample", "update" or "model"; must fit the ledger's unit.
        clip_norm: the L2 bound of one contribution.
        trust_model: "local", "central" or "distributed".
        sizes: how many examples each client of the federation holds, for n and the check of delta against 1/n.
        public_examples: how many examples the server itself holds and learns from.
        clip_bound: "fixed", "per_layer" or "quantile".
        cohorts: the clients of a round, and the larger number whose noise was used instead, None for none.
        validated: whether the model is also measured on examples that clients hold out of training.

    Raises:
        PrivacyError: a level or trust model that is not known or does not fit the ledger.
    """
    facts = summary(
        ledger,
        level=level,
        clip_norm=clip_norm,
        trust_model=trust_model,
        sizes=sizes,
        public_examples=public_examples,
        clip_bound=clip_bound,
        cohorts=cohorts,
        validated=validated,
    )
    unit, clipping = LEVELS[level][1:]
    worst = facts["worst_client"]
    if worst is None:
        return f"Nothing was released by any client: epsilon is 0 (unit: {unit})."
    if facts["infinite"]:
        return (
            f"No privacy is claimed (unit: {unit}): epsilon is infinite, because client {worst} made a release without "
            "noise."
        )
    size = f", which holds n = {facts['n']} examples," if level == "sample" and facts["n"] else ""
    sentences = [
        f"Differential privacy for {unit}: epsilon = {_upward(ledger.epsilon())} at delta = {ledger.delta:g}, the "
        "largest over all clients, where neighbouring data differ in that "
        f"{NEIGHBOURS[ledger.unit, ledger.adjacency]}.",
        f"The largest is client {worst}'s{size} after "
        + " and ".join(_describe(segment, count) for segment, count in ledger.counts_of(worst).items())
        + ".",
        clipping.format(clip=f"{clip_norm:g}") + BOUNDS[clip_bound],
        f"Accountant: Renyi differential privacy, orders {ORDERS[0]:g} to {ORDERS[-1]:g}, improved conversion.",
        f"Trust model {trust_model}: {TRUST_MODELS[trust_model]}.",
        *facts["warnings"],
        *CAVEATS,
    ]
    return " ".join(sentences)


def summary(
    ledger: Ledger,
    *,
    level: str,
    clip_norm: float,
    trust_model: str = "local",
    sizes: Mapping[int, int] | None = None,
    public_examples: int = 0,
    clip_bound: str = "fixed",
    cohorts: tuple[int, int | None] | None = None,
    validated: bool = False,
) -> dict[str, Any]:
    """The facts of `statement` as JSON; arguments and errors as there.

    `epsilon` is None where it is infinite, and `infinite` is then true: JSON has no infinity. `n` counts protected
    units: examples of the worst client at level sample, clients at level update. `releases` are those of the worst
    client. `warnings` are sentences to be stored and shown with the run.
    """
    if level not in LEVELS or LEVELS[level][0] != ledger.unit:
        raise PrivacyError(
            f"privacy.level={level!r} does not fit a ledger with unit={ledger.unit}: use sample, update or model"
        )
    if trust_model not in TRUST_MODELS:
        raise PrivacyError(f"trust model {trust_model!r} is not known: use one of {', '.join(TRUST_MODELS)}")
    worst, spent = ledger.worst_client(), ledger.epsilon()
    counts = {} if worst is None else ledger.counts_of(worst)
    units = None if not sizes else len(sizes) if level != "sample" else sizes.get(-1 if worst is None else worst)
    return {
        "level": level,
        "unit": ledger.unit,
        "epsilon": finite_or_none(spent),
        "infinite": math.isinf(spent),
        "delta": ledger.delta,
        "adjacency": ledger.adjacency,
        "sampling": " and ".join(sorted({segment.sampling for segment in counts})) or None,
        "accountant": ledger.accountant,
        "trust_model": trust_model,
        "clip_norm": clip_norm,
        "clip_bound": clip_bound,
        "worst_client": worst,
        "n": units,
        "releases": [
            {
                "covers": list(segment.covers),
                "mechanism": segment.mechanism,
                "noise_multiplier": segment.noise_multiplier,
                "sampling": segment.sampling,
                "rate": segment.rate,
                "count": count,
            }
            for segment, count in counts.items()
        ],
        "public_examples": public_examples,
        "warnings": [
            *_larger(cohorts),
            *_sum_only(trust_model),
            *_public(public_examples),
            *([VALIDATED] if validated else []),
            *_warnings(ledger.delta, level, sizes),
        ],
    }


def _larger(cohorts: tuple[int, int | None] | None) -> list[str]:
    """Noise scaled to a larger cohort shows what a larger federation would see."""
    if cohorts is None or cohorts[1] is None:
        return []
    return [
        f"Scaled noise: the mean of {cohorts[0]} clients carries the noise of a cohort of {cohorts[1]}, so this "
        f"epsilon is that of a federation {cohorts[1] / cohorts[0]:g} times as large, of which {cohorts[0]} clients "
        "were simulated; the run itself is NOT PRIVATE."
    ]


def _sum_only(trust_model: str) -> list[str]:
    if trust_model != "distributed":
        return []
    return [
        "Valid only under secure aggregation without dropouts, which is not simulated here: a single upload carries "
        "only its share of the noise."
    ]


def _public(examples: int) -> list[str]:
    """What the server learns from besides the uploads is protected by nothing."""
    if not examples:
        return []
    return [
        f"The proxy set on which the server learns, {examples} examples held out of the training data, counts as "
        "public: this epsilon does not cover it."
    ]


def _warnings(delta: float, level: str, sizes: Mapping[int, int] | None) -> list[str]:
    """A delta of 1/n allows a mechanism that publishes one of n units outright."""
    if not sizes:
        return []
    if level != "sample":
        units, whose = len(sizes), "clients"
    else:
        client = min(sizes, key=lambda k: (sizes[k] or math.inf, k))  # a client without data has nothing to protect
        units, whose = sizes[client], f"examples (client {client})"
    if units == 0 or delta < 1 / units:
        return []
    return [
        f"Warning: delta = {delta:g} is not below 1/n = {1 / units:.3g} for n = {units} {whose}: such a delta allows "
        "one unit to be revealed outright; choose a smaller privacy.delta."
    ]


def _describe(segment: Segment, count: int) -> str:
    sampling = {
        "poisson": f"Poisson sampling at rate q = {segment.rate:.4g}",
        "without_replacement": f"a share q = {segment.rate:.4g} drawn without replacement for each",
        "full": "all data in each",
    }[segment.sampling]
    what = f" ({', '.join(segment.covers)})" if segment.covers else ""
    releases = f"{count} {segment.mechanism.title()} release{'s' if count != 1 else ''}{what}"
    return f"{releases} with noise multiplier {segment.noise_multiplier:.5g} and {sampling}"


def _upward(value: float) -> str:
    """Four significant digits, rounded up: a printed epsilon never understates."""
    return format(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(value).normalize(), "f")
