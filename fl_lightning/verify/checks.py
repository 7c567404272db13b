"""Every row of `fl-lightning verify`. What the rows run over is the schema's list of algorithms."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

from fl_lightning.build import prepare
from fl_lightning.config.algorithms import DP_ALGORITHMS
from fl_lightning.config.methods import AlgorithmConfig
from fl_lightning.errors import FLError
from fl_lightning.methods import ALGORITHMS, optimizer
from fl_lightning.records import Vector
from fl_lightning.verify import by_hand, by_hand_private
from fl_lightning.verify.bench import Bench
from fl_lightning.verify.federations import ENGINES, Settings, config_of, largest, trained, with_algorithm, worst
from fl_lightning.verify.identities import (
    NOISY,
    PAIRS,
    SAMPLE,
    UPDATE,
    free_pairs,
    named,
    server,
    sharp,
)
from fl_lightning.verify.table import Check, Found

Reference = Callable[[Bench], list[Vector]]
ADAPTIVE = {**sharp(clip_alpha=0.8, noise_rule="paper", bound=0.1), **server(mu=5.0, gamma=0.99)}
THREE_ROUNDS = {"fl.rounds": 3}
"""A control variate of the second round first shows in the third."""

UNEVEN = {"fl.max_local_steps": 10}
"""Steps differ from client to client."""

PROXY = server(proxy_lr=0.05, proxy_epochs=3, proxy_lr_step=1)

REFERENCES: tuple[tuple[str, Settings, Reference], ...] = (
    ("fedavg", server(server_lr=0.7), by_hand.fedavg),
    ("fedprox", named("fedprox", prox_mu=0.5), by_hand.fedprox),
    ("fedsam", named("fedsam", rho=0.1), by_hand.fedsam),
    ("fedsam/asam", named("fedsam", rho=0.5, variant="asam"), by_hand.asam),
    ("sam_afl", {**named("sam_afl", rho=0.1), **server(mu=5.0, gamma=0.99)}, by_hand.sam_afl),
    ("scaffold", THREE_ROUNDS, by_hand.scaffold),
    ("scaffold/option-I", {**named("scaffold", option="I"), **THREE_ROUNDS}, by_hand.scaffold),
    ("fednova", UNEVEN, by_hand.fednova),
    ("fednova/momentum", {**named("fednova", optimizer="momentum", momentum=0.8, lr=0.05), **UNEVEN}, by_hand.fednova),
    ("fedexp", server(eps=1e-9), by_hand.fedexp),
    ("fedavgm", server(server_lr=0.5), by_hand.fedavgm),
    ("fedadam", {}, by_hand.fedadam),
    ("ce_fedavg", named("ce_fedavg", clip=0.2), by_hand.ce_fedavg),
    ("model_clipping", named("model_clipping", clip=3.0), by_hand.model_clipping),
    ("moon", named("moon", mu=2.0), by_hand.moon),
    ("fedlaw", PROXY, by_hand_private.fedlaw),
    ("dp_fedavg/update", {**UPDATE, **NOISY}, by_hand_private.dp_update),
    ("dp_fedavg/sample", {**SAMPLE, **NOISY}, by_hand_private.dp_sample),
    ("dp_fedavg/one-step", {**SAMPLE, **NOISY, "fl.max_local_steps": 1}, by_hand_private.dp_sample),
    ("dp_fedsam/update", {**UPDATE, **NOISY}, by_hand_private.dp_update),
    ("dp_fedsam/sample", {**SAMPLE, **NOISY}, by_hand_private.dp_sample),
    ("dp_scaffold/update", {**UPDATE, **NOISY, **THREE_ROUNDS}, by_hand_private.dp_scaffold_update),
    ("dp_scaffold/sample", {**SAMPLE, **NOISY, **THREE_ROUNDS}, by_hand_private.dp_scaffold_sample),
    ("dp_fedlaw/update", {**UPDATE, **NOISY, **PROXY}, by_hand_private.dp_fedlaw_update),
    ("dp_fedlaw/sample", {**SAMPLE, **NOISY, **PROXY}, by_hand_private.dp_fedlaw_sample),
    ("sam_adpfl/update", {**UPDATE, **NOISY, **ADAPTIVE}, by_hand_private.sam_adpfl_update),
    ("sam_adpfl/sample", {**SAMPLE, **NOISY, **ADAPTIVE}, by_hand_private.sam_adpfl_sample),
)
"""Row, settings, and the algorithm written out by hand. The row's first part is the algorithm."""

NOTED = {"dp_fedavg/one-step": "one local step is DP-SGD's, by hand"}


def algorithm_names() -> list[str]:
    """Every algorithm that the schema or the table of builders knows."""
    union = get_args(get_args(AlgorithmConfig)[0])
    tags = [tag for option in union for tag in get_args(option.model_fields["name"].annotation)]
    return list(dict.fromkeys([*tags, *ALGORITHMS]))


def all_checks() -> list[Check]:
    """In the order in which they are printed."""
    pairs = [pair.check() for pair in (*PAIRS, *free_pairs())]
    still = Check("fedlaw/still", "weights that do not move: FedLAW = FedAvg on the same clients", still_weights)
    equal = Check("sam_afl/equal-clients", "equally sharp clients: sharpness weights = sample weights", equal_clients)
    return [*pairs, still, equal, *by_hand_checks(), *engine_checks()]


def by_hand_checks() -> Iterator[Check]:
    """Each algorithm against its equations; one without a reference fails."""
    for row, settings, reference in REFERENCES:
        name, *rest = row.split("/")
        text = NOTED.get(row, f"{name} = its equations written out")

        def measure(settings: Settings = settings, name: str = name, reference: Reference = reference) -> Found:
            config = config_of(named(name), settings)
            return Found(largest(trained(prepare(config))[0], reference(Bench(prepare(config)))))

        yield Check("/".join([name, "by-hand", *rest]), text, measure, 1e-10)
    known = {row.split("/")[0] for row, *_ in REFERENCES}
    for name in algorithm_names():
        if name not in known:
            yield Check(f"{name}/by-hand", f"{name} = its equations written out", missing_reference)


def missing_reference() -> Found:
    """Fails the row.

    Raises:
        FLError: always.
    """
    raise FLError("verify/by_hand.py has no reference for this algorithm; write its equations there")


def engine_checks() -> Iterator[Check]:
    """Every algorithm at every level: the engines give the same bits."""
    for name in algorithm_names():
        levels: dict[str, Settings] = {"": {}}
        if name in DP_ALGORITHMS:
            levels = {"/update": {**UPDATE, **NOISY}, "/sample": {**SAMPLE, **NOISY}}
        for suffix, settings in levels.items():

            def measure(name: str = name, settings: Settings = settings) -> Found:
                return Found(engine_difference({**named(name), **settings}))

            text = f"{name}: the lightning engine = the debug engine, bit for bit"
            yield Check(f"{name}/engines{suffix}", text, measure, 0.0)


def engine_difference(settings: Settings) -> float:
    """Largest difference between the engines in any model or uploaded vector."""
    (models, sent), *others = [trained(prepare(config_of(settings, {"engine.kind": kind}))) for kind in ENGINES]
    differences = []
    for other_models, other_sent in others:
        differences.append(largest(models, other_models))
        for ours, theirs in zip(sent, other_sent, strict=True):
            for left, right in zip(ours, theirs, strict=True):
                for key in left.vectors.keys() | right.vectors.keys():
                    differences.append(float((left.vectors[key] - right.vectors[key]).abs().max()))
    return worst(differences)


def still_weights() -> Found:
    """FedLAW with a vanishing learning rate against FedAvg on the clients that the proxy set leaves."""
    still, moving = (config_of(named("fedlaw"), server(proxy_lr=lr)) for lr in (1e-300, 0.1))
    plain = ALGORITHMS["fedavg"](optimizer(still.algorithm.local))
    fedavg = trained(with_algorithm(prepare(still), plain))[0]
    return Found(*(largest(trained(prepare(config))[0], fedavg) for config in (still, moving)))


def equal_clients() -> Found:
    """Clients who hold the same examples once, twice and three times are equally sharp and differ in n_k alone."""
    everyone = {"fl.num_clients": 3, "fl.clients_per_round": 3, "fl.rounds": 1, "fl.batch_size": 10_000}
    config = config_of(named("sam_afl"), everyone)
    as_dealt = prepare(config).side.shards
    found = []
    for shards in ([as_dealt[0].repeat(k) for k in (1, 2, 3)], as_dealt):
        prepared = prepare(config)
        messages = trained(replace(prepared, side=replace(prepared.side, shards=shards)))[1][0]
        weights, total = prepared.algorithm.aggregate(messages).weights, sum(m.num_samples for m in messages)
        found.append(max(abs(w - m.num_samples / total) for w, m in zip(weights, messages, strict=True)))
    return Found(*found)
