"""The plan of a run: its predicted ledger is the recorded one, its dial tells what training then does."""

import json
import math
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_cases import cases
from sweeps import sweep_from

from fl_lightning import ConfigError, DataError, RunConfig, load_config, run
from fl_lightning.analysis import make_report
from fl_lightning.analysis.report import _artifact
from fl_lightning.analysis.selection import UNACCOUNTED, client_curves, selection_cost, worst_curve
from fl_lightning.analysis.trials import Trial
from fl_lightning.build import prepare
from fl_lightning.cli import invoke
from fl_lightning.config import Selection, SweepConfig, load_sweep, validate_space
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.data.loading import planned_steps
from fl_lightning.federation import fit, initial
from fl_lightning.foreseen import foresee
from fl_lightning.foresight import assumed_sizes, foresight
from fl_lightning.privacy import epsilon, feasibility
from fl_lightning.privacy.paper import eq16_sigma
from tune.samples import number_of_samples

SMALL = ["data.subset=0.5", "fl.num_clients=5", "fl.rounds=2", "tracking.enabled=false"]


def plan(*overrides: str) -> dict[str, Any]:
    return foresight(load_config(overrides))


def test_the_papers_setting_says_that_one_uploads_noise_is_thousands_of_times_its_signal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """ALGORITHMS F1: epsilon 2, T = 200, VGG. Replacing a client doubles the sensitivity that the table supposes."""
    setting = ["experiment=sam_adpfl_cifar10", f"data.root={tmp_path}"]
    assert invoke(["privacy", "plan", *setting, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [golden] = [
        case["expected"] for case in cases("feasibility.json", "feasibility") if case["id"].endswith("vgg_eps2")
    ]
    tighter = found["accountant_multiplier"]["max"] / golden["sigma_base_T200"]  # the accountant against Eq. 16
    assert 0.8 < tighter < 1
    assert found["num_parameters"] == 550_570 and found["participations"] == {"min": 200, "max": 200}
    expected = 2 * tighter * golden["per_client_noise_norm_over_C"]
    assert found["noise_over_signal"]["upload"] == pytest.approx(expected, rel=1e-9) and expected > 40_000
    assert found["noise_over_signal"]["mean"] == pytest.approx(2 * tighter * golden["mean10_noise_norm_over_C"])
    assert found["dial"] == pytest.approx(2 * tighter * golden["R_local_upload"])
    assert found["smallest"]["clients"]["heavy_loss"] == math.ceil(10 * found["dial"] ** 2)
    assert found["verdict"] == "hopeless" and "thousands of times its signal (45," in found["words"]
    assert 1.9 < found["epsilon"] <= 2 and (found["unit"], found["adjacency"]) == ("client", "replace_one")
    assert invoke(["privacy", "plan", *setting]) == 0
    words = capsys.readouterr().out
    assert "the noise on one upload is thousands of times its signal" in words and "R = 1,0" in words
    assert "for all data of one client, delta 1e-05, adjacency replace_one" in words
    assert "CIFAR-10 files are not there: 50,000 training examples" in words


def test_its_sibling_at_sample_level_is_the_table_of_section_b(tmp_path: Path) -> None:
    found = plan("experiment=sam_adpfl_cifar10_sample", f"data.root={tmp_path}")
    assert found["dial"] == pytest.approx(0.10, rel=0.05) and found["verdict"] == "nearly harmless"
    assert found["noise_multiplier"]["max"] == pytest.approx(7.77, rel=0.01)  # it also pays for a scalar each round
    assert found["noise_over_signal"]["step"] == pytest.approx(math.sqrt(550_570) * 7.7862 / 64, rel=1e-3)
    assert found["unit"] == "sample" and found["examples"] == {"min": 5000, "max": 5000}


def test_without_privacy_it_says_so_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["privacy", "plan", "algorithm=fedavg"]) == 0
    assert capsys.readouterr().out.startswith("nothing is protected: privacy.level=none clips nothing")
    assert plan("algorithm=fedavg")["protected"] is False


PRIVATE = [
    ("dp_fedavg", []),
    ("dp_fedsam", ["privacy.ascent=two_release", "privacy.noise_decay=0.5", "privacy.noise_decay_rounds=1"]),
    ("sam_adpfl", ["partition=dirichlet", "algorithm.sharpness.clip_alpha=0"]),
    ("dp_fedavg", ["privacy=update", "privacy.trust_model=central", "fl.clients_per_round=3"]),
    ("dp_fedavg", ["privacy=update", "privacy.noise_multiplier=4", "privacy.target_epsilon=3.5"]),
]


@pytest.mark.parametrize(("algorithm", "more"), PRIVATE, ids=lambda item: item if isinstance(item, str) else "")
def test_the_predicted_ledger_is_the_recorded_one(algorithm: str, more: list[str], tmp_path: Path) -> None:
    store = [f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    config = load_config([f"algorithm={algorithm}", *SMALL[:-1], "fl.rounds=3", *more, *store])
    found = foresight(config)
    with chdir(tmp_path):
        result = run(config)
    assert _artifact(config.tracking.uri or "", result.run_id or "", "privacy/ledger.json") == found["ledger"]
    assert result.final["epsilon"] == found["epsilon"]
    assert {key: result.final["privacy"][key] for key in ("unit", "adjacency", "sampling", "trust_model")} == {
        key: found[key] for key in ("unit", "adjacency", "sampling", "trust_model")
    }


@pytest.mark.slow
def test_the_verdict_is_what_training_then_shows() -> None:
    """Hopeless ends near chance; nearly harmless learns the digits."""
    base = ["algorithm=dp_fedavg", "fl.num_clients=4", "fl.rounds=8", "fl.local_epochs=3", "tracking.enabled=false"]
    lost = load_config([*base, "privacy=update", "privacy.target_epsilon=2"])
    learnt = load_config([*base, "privacy.target_epsilon=50", "algorithm.local.lr=0.5"])
    assert foresight(lost)["verdict"] == "hopeless" and foresight(learnt)["verdict"] == "nearly harmless"
    assert run(lost).final["test_accuracy"] < 0.3 < 0.7 < run(learnt).final["test_accuracy"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["privacy.trust_model=central"],
        ["privacy.trust_model=distributed"],
        ["privacy.trust_model=central", "privacy.noise_cohort_size=40"],
        ["privacy.trust_model=distributed", "privacy.noise_cohort_size=40"],
        ["privacy.clip_bound=quantile", "privacy.quantile.bit_noise=80"],
        ["privacy.adjacency=zero_out", "fl.clients_per_round=2"],
        ["privacy.noise_decay=0.5", "privacy.noise_decay_rounds=1"],
    ],
    ids=" ".join,
)
def test_the_predicted_noise_is_what_the_model_moves_by(more: list[str]) -> None:
    """Where noise is a hundred times the signal and more, the distance a run covers is its noise: R times T C."""
    config = load_config(["algorithm=dp_fedavg", "privacy=update", "privacy.noise_multiplier=100", *SMALL, *more])
    tolerance = 0.2 if "quantile" in " ".join(more) else 0.02  # there C itself moves, by a fifth a round at most
    assert moved(config) == pytest.approx(2 * foresight(config)["dial"], rel=tolerance)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("dp_fedavg", []),
        ("dp_fedavg", ["privacy.sampling=full"]),
        ("dp_fedavg", ["privacy.sampling=without_replacement", "fl.max_local_steps=2"]),
        ("dp_fedavg", ["partition=dirichlet", "fl.local_epochs=2"]),
        ("dp_fedsam", ["privacy.ascent=two_release"]),
    ],
    ids=lambda item: item if isinstance(item, str) else " ".join(item),
)
def test_the_predicted_noise_of_local_steps_is_what_the_model_moves_by(algorithm: str, more: list[str]) -> None:
    config = load_config([f"algorithm={algorithm}", "privacy.noise_multiplier=500", *SMALL, *more])
    seen, fl = foresee(config), config.fl
    cap, sampling = fl.max_local_steps, config.privacy.sampling
    steps = [planned_steps(n, fl.batch_size, fl.local_epochs, cap, sampling) for n in seen.sizes]
    reach = 2 * sum(n * each for n, each in zip(seen.sizes, steps, strict=True)) / sum(seen.sizes)
    assert moved(config) / config.algorithm.local.lr == pytest.approx(reach * foresight(config)["dial"], rel=0.02)


def test_the_predicted_noise_of_a_clipped_model_is_its_last_rounds() -> None:
    config = load_config(["algorithm=dp_fedavg", "privacy=model", "privacy.noise_multiplier=100", *SMALL])
    assert moved(config, from_zero=True) == pytest.approx(foresight(config)["dial"], rel=0.02)


def moved(config: RunConfig, *, from_zero: bool = False) -> float:
    """The distance between a run's first and last model, in units of C."""
    prepared = prepare(config)
    objective = prepared.objective
    start = initial(objective.initial, objective.buffers())
    engine = prepared.engine()
    *_, (end, _, _) = fit(
        start,
        rounds=config.fl.rounds,
        cohort_of=lambda round: prepared.cohorts[round - 1],
        algorithm=prepared.algorithm,
        engine=engine,
        evaluate=lambda server: None,
    )
    engine.close()
    origin = 0.0 if from_zero else start.server.w
    return float((end.server.w - origin).norm()) / config.privacy.clip_norm


def test_noise_on_the_sum_and_larger_cohorts_lower_the_dial() -> None:
    base = ["algorithm=dp_fedavg", "privacy=update", "privacy.noise_multiplier=1", *SMALL]
    local = plan(*base)
    central = plan(*base, "privacy.trust_model=central")
    shared = plan(*base, "privacy.trust_model=distributed")
    assert local["dial"] / central["dial"] == pytest.approx(math.sqrt(5)) and shared["dial"] == central["dial"]
    assert central["noise_over_signal"]["upload"] == 0.0
    assert shared["noise_over_signal"]["upload"] * math.sqrt(5) == pytest.approx(local["noise_over_signal"]["upload"])
    assert central["smallest"]["cohort"]["heavy_loss"] == math.ceil(5 * central["dial"])
    many = plan(*base, "privacy.trust_model=central", "privacy.noise_cohort_size=500")
    assert many["dial"] == pytest.approx(central["dial"] / 100) and "NOT PRIVATE" in " ".join(many["warnings"])
    twice = plan(*base[:-4], "data.subset=0.5", "fl.num_clients=10", "fl.rounds=2")
    assert twice["dial"] == pytest.approx(local["dial"] / math.sqrt(2))


def test_a_larger_federation_of_the_size_named_has_the_dial_named() -> None:
    base = ["algorithm=dp_fedavg", "privacy=update", "privacy.target_epsilon=50"]
    few = plan(*base, "fl.num_clients=5")
    enough = few["smallest"]["clients"]["heavy_loss"]
    assert plan(*base, f"fl.num_clients={enough}", "partition=iid")["dial"] <= 1.0 + 1e-9


def test_decaying_noise_and_a_spent_budget_are_planned() -> None:
    base = ["algorithm=dp_fedavg", "privacy=update", "privacy.noise_multiplier=4", *SMALL, "fl.rounds=4"]
    steady, falling = plan(*base), plan(*base, "privacy.noise_decay=0.5", "privacy.noise_decay_rounds=2")
    ratio = math.sqrt((1 + 1 + 0.25 + 0.25) / 4)
    assert falling["dial"] == pytest.approx(ratio * steady["dial"]) and falling["epsilon"] > steady["epsilon"]
    cut = plan(*base, f"privacy.target_epsilon={steady['epsilon'] * 0.75}")
    assert cut["rounds_within_budget"] < 4 and cut["epsilon"] <= 0.75 * steady["epsilon"]
    after = f"The budget is spent after round {cut['rounds_within_budget']} of 4: the run ends there."
    assert after in cut["warnings"] and steady["rounds_within_budget"] == 4


def test_assumed_sizes_are_those_of_an_even_split() -> None:
    for overrides in (["algorithm=dp_fedavg"], ["algorithm=dp_fedlaw", "data.subset=0.4", "fl.num_clients=7"]):
        real = plan(*overrides)
        sizes = assumed_sizes(load_config(overrides))
        assert sizes is not None and real["assumptions"] == []
        assert {"min": min(sizes), "max": max(sizes)} == real["examples"]
    assert KNOWN_SETS["digits"].train == sum(assumed_sizes(load_config(["algorithm=dp_fedavg"])) or [])


def test_a_users_own_data_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        plan("algorithm=dp_fedavg", "data=npz", f"data.root={tmp_path}/nowhere.npz")


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    with chdir(tmp_path):
        assert invoke(["privacy", "plan", "algorithm=dp_fedavg"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_paper_mode_shows_the_honest_epsilon_beside_the_nominal(capsys: pytest.CaptureFixture[str]) -> None:
    setting = ["algorithm=sam_adpfl", "privacy=update", "privacy.mode=paper", "privacy.target_epsilon=10", *SMALL]
    found = plan(*setting)
    assert found["nominal_epsilon"] == pytest.approx(10, rel=1e-6) and found["epsilon"] != found["nominal_epsilon"]
    assert found["noise_multiplier"]["max"] == pytest.approx(eq16_sigma(9.5, 2, 1e-5))
    assert invoke(["privacy", "plan", *setting]) == 0
    assert "the paper's formula says 10.000" in capsys.readouterr().out


@pytest.mark.slow
def test_hopeless_cells_are_skipped_when_asked_and_listed(tmp_path: Path) -> None:
    sweep = SweepConfig(name="mixed", space={"privacy": {"grid": ["sample", "update"]}}, skip_hopeless=True)
    base = ["algorithm=dp_fedavg", *SMALL[:-1], f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    swept = sweep_from(tmp_path, base, sweep)
    lines = swept.printed.splitlines()
    assert lines[0].startswith("plan privacy=sample: epsilon 8.00 per sample, δ=1e-05, R = ")
    assert lines[1].startswith("plan privacy=update: epsilon 8.00 per client, δ=1e-05, R = ")
    assert lines[1].endswith(", hopeless; skipped") and lines[2].startswith("sweep id: ")
    [skipped] = swept.result["skipped"]
    assert skipped["params"] == {"privacy": "update"} and skipped["reason"].startswith("hopeless: R = ")
    assert [trial["params"] for trial in swept.result["trials"]] == [{"privacy": "sample"}]
    assert [row["skipped"] for row in swept.result["table"]] == [None, skipped["reason"]]
    later = make_report(swept.result["sweep_id"], uri=swept.uri, out=tmp_path / "later")
    assert later["skipped"] == [skipped] and later["table"] == swept.result["table"]
    assert skipped["reason"] in Path(later["markdown"]).read_text()
    assert UNACCOUNTED in Path(later["markdown"]).read_text() and UNACCOUNTED in swept.printed
    assert swept.result["selection"]["epsilon_with_selection"] is None
    assert Path(swept.result["report"]["markdown"]).read_bytes() == Path(later["markdown"]).read_bytes()


def test_choosing_among_a_random_number_of_trials_is_accounted_for(tmp_path: Path) -> None:
    sweep = SweepConfig(
        name="tuned",
        space={"algorithm.local.lr": {"loguniform": [0.05, 0.5]}},
        seeds=(3,),
        selection=Selection(distribution="geometric", mean=2.5),
    )
    base = ["algorithm=dp_fedavg", *SMALL[:-1], f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"]
    [cell] = validate_space(base, sweep)
    drawn = number_of_samples(cell.config, sweep, [cell])
    assert drawn > 1
    swept = sweep_from(tmp_path, base, sweep)
    [cell] = swept.cells
    assert len(swept.result["trials"]) == drawn and f"number of trials: {drawn}, drawn (geometric" in swept.printed
    chosen = swept.result["selection"]
    accuracies = {trial["trial_id"]: trial["final"]["test_accuracy"] for trial in swept.result["trials"]}
    assert accuracies[chosen["trial_id"]] == max(accuracies.values()) == chosen["value"]
    configs = [
        cell.config.with_overrides({**trial["params"], "seed": trial["seed"]}) for trial in swept.result["trials"]
    ]
    assert len({config.seed for config in configs}) == drawn  # the bound is for trials that are independent
    planned = {trial["trial_id"]: foresight(c) for trial, c in zip(swept.result["trials"], configs, strict=True)}
    assert chosen["epsilon"] == planned[chosen["trial_id"]]["epsilon"] < chosen["epsilon_with_selection"]
    from fl_lightning.privacy.selection import selection_epsilon

    curve = worst_curve([alone["ledger"] for alone in planned.values()])
    expected = selection_epsilon(curve, 1e-5, distribution="geometric", mean=2.5, eta=None)
    assert chosen["epsilon_with_selection"] == pytest.approx(expected, rel=1e-9)
    assert chosen["words"] in swept.printed and UNACCOUNTED not in swept.printed
    later = make_report(swept.result["sweep_id"], uri=swept.uri, out=tmp_path / "later")
    assert later["selection"] == chosen and chosen["words"] in Path(later["markdown"]).read_text()


def test_a_stored_ledger_gives_back_every_clients_curve() -> None:
    found = plan("algorithm=sam_adpfl", "partition=dirichlet", "partition.alpha=0.3", *SMALL)
    curves = client_curves(json.loads(json.dumps(found["ledger"])))
    assert len(curves) == 5
    for client, spent in found["ledger"]["epsilon_of"].items():
        assert epsilon(curves[client], 1e-5) == spent
    worst = worst_curve([found["ledger"]])
    assert epsilon(worst, 1e-5) >= found["epsilon"] and all((worst >= curve).all() for curve in curves.values())


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic", "negative_binomial", "poisson"])
def test_the_number_of_trials_follows_from_the_seed_and_has_its_mean(distribution: str) -> None:
    eta = 0.5 if distribution == "negative_binomial" else None
    space = {"algorithm.local.lr": {"loguniform": [0.05, 0.5]}}
    sweep = SweepConfig(space=space, selection=Selection(distribution=distribution, mean=6.0, eta=eta))
    [cell] = validate_space(["algorithm=dp_fedavg"], sweep)
    drawn = [number_of_samples(cell.config, sweep, [replace(cell, seed=seed)]) for seed in range(1000)]
    spread = (sum((k - 6) ** 2 for k in drawn) / len(drawn)) ** 0.5
    assert abs(sum(drawn) / len(drawn) - 6) < 4 * spread / len(drawn) ** 0.5
    assert drawn[:9] == [number_of_samples(cell.config, sweep, [replace(cell, seed=seed)]) for seed in range(9)]
    assert min(drawn) == (0 if distribution == "poisson" else 1)


def test_a_poisson_draw_of_no_trial_at_all_still_ends_in_a_report(tmp_path: Path) -> None:
    space = {"algorithm.local.lr": {"loguniform": [0.05, 0.5]}}
    seed = 0
    while True:
        sweep = SweepConfig(space=space, seeds=(seed,), selection=Selection(distribution="poisson", mean=0.5))
        cells = validate_space(["algorithm=dp_fedavg"], sweep)
        if number_of_samples(cells[0].config, sweep, cells) == 0:
            break
        seed += 1
    store = f"tracking.uri=sqlite:///{tmp_path}/mlflow.db"
    swept = sweep_from(tmp_path, ["algorithm=dp_fedavg", *SMALL[:-1], store], sweep)
    assert swept.result["trials"] == [] and swept.result["best"] is None and swept.result["selection"] is None
    assert "number of trials: 0, drawn (poisson, mean 0.5)" in swept.printed
    assert Path(swept.result["report"]["markdown"]).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep.selection.distribution=geometric"], "sweep.selection.mean: is needed with distribution=geometric"),
        (["sweep.selection.mean=3"], "sweep.selection.mean=3.0: would be ignored with distribution=none"),
        (["sweep.selection.distribution=normal"], "sweep.selection.distribution=normal"),
        (
            ["sweep.selection.distribution=geometric", "sweep.selection.mean=0.5"],
            "sweep.selection.mean=0.5: needs a number > 1",
        ),
        (
            ["sweep.selection.distribution=geometric", "sweep.selection.mean=3", "sweep.selection.eta=1"],
            "sweep.selection.eta=1.0: would be ignored with distribution=geometric",
        ),
        (
            ["sweep.selection.distribution=negative_binomial", "sweep.selection.mean=3", "sweep.selection.eta=-1"],
            "sweep.selection.eta=-1.0: needs a number > -1",
        ),
        (
            ["sweep.selection.distribution=poisson", "sweep.selection.mean=3", "sweep.num_samples=4"],
            "sweep.num_samples=4: would be ignored",
        ),
        (
            ["sweep.selection.distribution=poisson", "sweep.selection.mean=3", "sweep.seeds=[1,2]"],
            "needs one seed, found 2",
        ),
        (
            [
                "sweep.selection.distribution=poisson",
                "sweep.selection.mean=3",
                "sweep.space.fl.rounds={grid:[1,2]}",
            ],
            "make sweep.space.fl.rounds a choice",
        ),
        (["sweep.skip_hopeless=true"], "sweep.skip_hopeless=true: needs an axis of kind grid only"),
    ],
)
def test_a_selection_that_cannot_be_accounted_for_is_refused(arguments: list[str], message: str) -> None:
    lr = "sweep.space.algorithm.local.lr={loguniform:[0.01,0.1]}"
    with pytest.raises(ConfigError) as caught:
        load_sweep([lr, *arguments])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_selection_without_a_bound_says_why() -> None:
    def trial(name: str, unit: str | None) -> Trial:
        facts = None if unit is None else {"unit": unit, "delta": 1e-5, "adjacency": "add_remove"}
        final = {"test_accuracy": 0.5, "epsilon": None if unit is None else 2.0}
        return Trial(name, name, {}, 1, "dp_fedavg", "finished", final=final, privacy=facts)

    def words(*trials: Trial, ledger: Any = None) -> str:
        settings = {"distribution": "geometric", "mean": 3.0, "eta": None}
        found = selection_cost(settings, trials, lambda _: ledger, metric="test_accuracy", mode="max")
        assert found is not None and found["epsilon_with_selection"] is None
        return str(found["words"])

    assert "some of the trials protect nothing" in words(trial("a", "sample"), trial("b", None))
    assert "differ in unit, delta or adjacency" in words(trial("a", "sample"), trial("b", "client"))
    assert "the ledger of a trial is not in the tracking store" in words(trial("a", "sample"))
    nothing = selection_cost({}, [trial("b", None)], lambda _: None, metric="test_accuracy", mode="max")
    assert nothing is None


def test_a_selection_needs_the_store_of_its_ledgers(tmp_path: Path) -> None:
    sweep = SweepConfig(
        space={"algorithm.local.lr": {"loguniform": [0.05, 0.5]}},
        selection=Selection(distribution="poisson", mean=2.0),
    )
    with pytest.raises(ConfigError, match=r"needs tracking\.enabled=true"):
        sweep_from(tmp_path, ["algorithm=dp_fedavg", *SMALL], sweep)


def test_verdict_words_are_those_of_feasibility() -> None:
    found = plan("algorithm=dp_fedavg", "privacy.noise_multiplier=0", *SMALL)
    assert found["verdict"] == "no noise" and found["protected"] is False and found["epsilon"] is None
    assert RunConfig(algorithm="dp_fedavg").privacy.level == "sample"
    assert found["words"] == f"no noise: {feasibility.VERDICTS['no noise']}"
