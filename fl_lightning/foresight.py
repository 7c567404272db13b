"""What a run would promise, and whether it can learn under its noise, before any training: `fl-lightning privacy plan`.

The numbers follow from the run's own ledger and noise (`foreseen.foresee`); the dial R is explained in
`privacy.feasibility`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.config import RunConfig
from fl_lightning.config.adaptive import SamAdpfl
from fl_lightning.config.privacy import ClientPrivacy, Mechanism, NoPrivacy
from fl_lightning.config.proxy import LearnedWeights
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.data.validation import expected_left
from fl_lightning.errors import DataError
from fl_lightning.foreseen import Foreseen, foresee
from fl_lightning.mechanism import quantile_bit
from fl_lightning.privacy import feasibility
from fl_lightning.privacy.ledger import finite_or_none
from fl_lightning.privacy.statement import summary
from fl_lightning.records import REACH
from fl_lightning.releases import ReleasePlan

WANTED = {"heavy_loss": feasibility.HEAVY, "harmless": feasibility.HARMLESS}
"""Name in the plan -> the R that a larger federation is asked for."""

UNPROTECTED = (
    "nothing is protected: privacy.level=none clips nothing, adds no noise and has no epsilon; "
    "choose privacy=sample or privacy=update with an algorithm that protects, such as algorithm=dp_fedavg"
)


def foresight(config: RunConfig) -> dict[str, Any]:
    """The plan of a run as JSON.

    Where the data are not there, the published number of training examples is dealt out evenly, and `assumptions` says
    so.

    Returns:
        For a run without privacy `protected` (false) and `words`. Otherwise also the promise: `level`, `unit`,
        `epsilon` (None if infinite, and `infinite` says so), `nominal_epsilon` (the paper's formula, in its mode),
        `target_epsilon`, `delta`, `adjacency`, `sampling`, `trust_model`, `accountant`; the noise: `clip_norm`,
        `noise_multiplier` and `accountant_multiplier` (min and max over clients), `noise_over_signal` (norm of the
        noise over the largest norm of the signal, of one `upload`, of the cohort's `mean`, and at level sample of one
        `step`); whether it can learn: `dial` (R), `verdict` (a key of `feasibility.VERDICTS`), `words`, `smallest`
        (`clients`, and `cohort` where noise is on the sum, for R <= 1, `heavy_loss`, and R <= 0.3, `harmless`); its
        size: `num_parameters`, `clients`, `cohort`, `rounds`, `examples`, `participations`, `rounds_within_budget`;
        `warnings`, `assumptions`, and `ledger`, as the run will write it.

    Raises:
        FLError: what the run itself would be refused for.
    """
    if isinstance(config.privacy, NoPrivacy):
        return {"protected": False, "level": "none", "words": UNPROTECTED, "warnings": [], "assumptions": []}
    assumptions: list[str] = []
    try:
        seen = foresee(config)
    except DataError:
        sizes = assumed_sizes(config)
        if sizes is None:
            raise
        seen = foresee(config, sizes=sizes)
        assumptions.append(
            f"The {KNOWN_SETS[config.data.name].title} files are not there: {sum(sizes):,} training examples are "
            f"supposed to be dealt out evenly, {max(sizes):,} to a client. A skewed partition needs other noise."
        )
    return _plan(seen, assumptions)


def assumed_sizes(config: RunConfig) -> list[int] | None:
    """n_k of an even split of the data set's published number of training examples; None for a user's own data."""
    known = KNOWN_SETS.get(config.data.name)
    if known is None or not known.train:
        return None
    total = max(0, round(known.train * config.data.subset) - _held_out(config))
    each, more = divmod(total, config.fl.num_clients)
    share = config.data.validation or 0.0
    return [expected_left(n, share) for n in (each + (client < more) for client in range(config.fl.num_clients))]


def _held_out(config: RunConfig) -> int:
    """How many examples of a public data set the server holds for itself; 0 where it learns from none."""
    known, learning = KNOWN_SETS.get(config.data.name), config.algorithm.aggregate
    if known is None or not isinstance(learning, LearnedWeights):
        return 0
    total = round(known.train * config.data.subset)
    return max(1, round(learning.proxy_share * total / known.num_classes)) * known.num_classes


def _plan(seen: Foreseen, assumptions: Sequence[str]) -> dict[str, Any]:
    config, privacy, d = seen.config, seen.config.privacy, seen.num_parameters
    assert isinstance(privacy, Mechanism)
    facts = summary(
        seen.ledger,
        level=privacy.level,
        clip_norm=privacy.clip_norm,
        clip_bound=privacy.clip_bound,
        trust_model=trust_of(privacy),
        sizes=dict(enumerate(seen.sizes)),
        public_examples=_held_out(config),
        validated=bool(config.data.validation),
        cohorts=(config.fl.cohort_size, larger_cohort(privacy)),
    )
    plan = ReleasePlan(config, seen.sizes, seen.visits)
    uploads = [_upload(plan, z, client) for client, z in enumerate(seen.noise.multipliers)]
    rounds = {round: _round(seen, uploads, cohort) for round, cohort in _cohorts(seen, plan).items()}
    ratio = _dial(seen, plan, rounds)
    verdict = feasibility.verdict(ratio)
    over = {
        "upload": max((_over(d, *upload) for upload in uploads), default=0.0),
        "mean": max((_over(d, *part) for part in rounds.values()), default=0.0),
    }
    if privacy.level == "sample":
        over["step"] = max(_over(d, *_steps(plan, z, k, 1)) for k, z in enumerate(seen.noise.multipliers))
    multipliers = [z for z, n in zip(seen.noise.multipliers, seen.sizes, strict=True) if n] or [0.0]
    span = {"min": min(multipliers), "max": max(multipliers)}
    reach = REACH[privacy.adjacency]
    smallest = _smallest(privacy, ratio, config.fl.num_clients, config.fl.cohort_size)
    return {
        "protected": not facts["infinite"] and larger_cohort(privacy) is None,
        "level": privacy.level,
        "unit": facts["unit"],
        "epsilon": facts["epsilon"],
        "infinite": facts["infinite"],
        "nominal_epsilon": seen.noise.nominal_epsilon,
        "target_epsilon": privacy.target_epsilon,
        "delta": facts["delta"],
        "adjacency": facts["adjacency"],
        "sampling": facts["sampling"],
        "trust_model": facts["trust_model"],
        "accountant": facts["accountant"],
        "clip_norm": finite_or_none(privacy.clip_norm),
        "noise_multiplier": span,
        "accountant_multiplier": {key: value / reach for key, value in span.items()},
        "noise_over_signal": {key: finite_or_none(value) for key, value in over.items()},
        "dial": finite_or_none(ratio),
        "verdict": verdict,
        "words": _words(privacy, verdict, over["upload"]),
        "smallest": smallest,
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "num_parameters": d,
        "clients": config.fl.num_clients,
        "cohort": config.fl.cohort_size,
        "rounds": config.fl.rounds,
        "examples": {"min": min(seen.sizes), "max": max(seen.sizes)},
        "participations": {"min": min(map(len, seen.visits)), "max": max(map(len, seen.visits))},
        "rounds_within_budget": _last(seen),
        "warnings": list(dict.fromkeys([*config.notes, *facts["warnings"], *_cut(seen)])),
        "assumptions": [*assumptions, *_adapts(config)],
        "ledger": seen.ledger.to_dict(),
    }


def _dial(seen: Foreseen, plan: ReleasePlan, rounds: Mapping[int, tuple[float, float]]) -> float:
    """R of all rounds. A clipped model takes the place of the one before, so there the noise does not add up."""
    noises = [s * _strength(seen, plan, round) for round, (s, _) in rounds.items()]
    if plan.privacy.level == "model":
        return feasibility.dial(seen.num_parameters, [max(noises, default=0.0)], [1.0])
    return feasibility.dial(seen.num_parameters, noises, [reach for _, reach in rounds.values()])


def _strength(seen: Foreseen, plan: ReleasePlan, round: int) -> float:
    """The round's noise on the updates over z: the schedule, and more where a released bit takes part of the budget."""
    factor, privacy = plan.schedule(round), plan.privacy
    z = max(seen.noise.multipliers, default=0.0)
    bit = quantile_bit(privacy, float(plan.config.fl.cohort_size), z) if isinstance(privacy, ClientPrivacy) else None
    return factor if bit is None or not z else bit.update_multiplier(z * factor) / z


def _adapts(config: RunConfig) -> list[str]:
    """What the plan cannot know of a run whose noise follows what it releases."""
    if isinstance(config.algorithm, SamAdpfl) and config.algorithm.sharpness.noise_rule != "constant":
        return [
            f"The noise follows sharpness during the run (algorithm.sharpness.noise_rule="
            f"{config.algorithm.sharpness.noise_rule}): R is that of sigma_base."
        ]
    return []


def _last(seen: Foreseen) -> int:
    """The last round in which anything is released."""
    return max((round for round, _ in seen.ledger.history), default=0)


def _cut(seen: Foreseen) -> list[str]:
    last, planned = _last(seen), max((rounds[-1] for rounds in seen.visits if rounds), default=0)
    if last >= planned:
        return []
    if not last:
        return ["The budget does not pay for one round: the run will be refused."]
    return [f"The budget is spent after round {last} of {seen.config.fl.rounds}: the run ends there."]


def larger_cohort(privacy: Mechanism) -> int | None:
    """`privacy.noise_cohort_size`, where there is one."""
    return getattr(privacy, "noise_cohort_size", None)


def trust_of(privacy: Mechanism) -> str:
    """`privacy.trust_model`; at level sample each client protects its own examples: local."""
    return str(getattr(privacy, "trust_model", "local"))


def _cohorts(seen: Foreseen, plan: ReleasePlan) -> dict[int, list[int]]:
    """The clients of each round, as far as the budget lets the run go; of a secret cohort nobody, for it is noised."""
    last = _last(seen)
    found: dict[int, list[int]] = {round: [] for round in range(1, last + 1)} if plan.secret else {}
    for client, rounds in enumerate(seen.visits):
        for round in rounds:
            if round <= last:
                found.setdefault(round, []).append(client)
    return dict(sorted(found.items()))


def _upload(plan: ReleasePlan, z: float, client: int) -> tuple[float, float]:
    """(s, D) of one upload: noise std of a coordinate and the largest norm of the signal, in units of C (and lr)."""
    if plan.privacy.level != "sample":
        m = plan.config.fl.cohort_size
        shares = {"local": 1.0, "central": 0.0, "distributed": math.sqrt(m) / max(m, larger_cohort(plan.privacy) or 0)}
        return z * shares[trust_of(plan.privacy)], 1.0
    return _steps(plan, z, client, plan.steps(client))


def _steps(plan: ReleasePlan, z: float, client: int, steps: int) -> tuple[float, float]:
    """(s, D) of some local steps of DP-SGD; nothing of a client without data."""
    batch = plan.rate(client) * plan.sizes[client]
    return feasibility.visit_noise(z, steps, batch) if batch else (0.0, 0.0)


def _round(seen: Foreseen, uploads: Sequence[tuple[float, float]], cohort: Sequence[int]) -> tuple[float, float]:
    """(s, D) of a cohort's aggregate. Weights that follow from training are taken as the base weights p_k."""
    config, privacy = seen.config, seen.config.privacy
    assert isinstance(privacy, Mechanism)
    if trust_of(privacy) != "local":  # noise on the sum of a cohort, or of the larger one that is imitated
        expected = len(cohort) if getattr(privacy, "sampling", "full") == "full" else config.fl.cohort_size
        return max(seen.noise.multipliers) / max(expected, larger_cohort(privacy) or 0), 1.0
    sizes = [seen.sizes[client] for client in cohort]
    even = privacy.level != "sample" or config.algorithm.aggregate.weighting == "uniform" or not sum(sizes)
    weights = [1 / len(cohort)] * len(cohort) if even else [n / sum(sizes) for n in sizes]
    return feasibility.aggregate_noise([uploads[client] for client in cohort], weights)


def _over(d: int, noise: float, reach: float) -> float:
    return feasibility.dial(d, [noise], [reach])


def _smallest(privacy: Mechanism, ratio: float, clients: int, cohort: int) -> dict[str, dict[str, int] | None]:
    """How large the federation must be for R <= 1 and R <= 0.3, all else alike; None where no size is enough."""
    if not math.isfinite(ratio):
        return {"clients": None, "cohort": None}
    on_sum = trust_of(privacy) != "local"
    found: dict[str, dict[str, int] | None] = {"clients": {}, "cohort": {} if on_sum else None}
    for name, wanted in WANTED.items():
        m = max(1, math.ceil(feasibility.smallest_cohort(ratio, cohort, wanted)))
        K = math.ceil(m * clients / cohort) if on_sum else feasibility.smallest_clients(ratio, clients, wanted)
        found["clients"] = {**(found["clients"] or {}), name: max(1, math.ceil(K))}
        if on_sum:
            found["cohort"] = {**(found["cohort"] or {}), name: m}
    return found


def _words(privacy: Mechanism, verdict: str, upload: float) -> str:
    words = f"{verdict}: {feasibility.VERDICTS[verdict]}"
    if verdict == "hopeless" and upload >= 1000 and math.isfinite(upload):
        return f"{words}; the noise on one upload is thousands of times its signal ({upload:,.0f} times)"
    return words
