"""Sweeps before they start: the file, its axes, and the cells they make."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.config import Cell, RunConfig, SweepConfig, load_config, load_sweep, validate_space
from fl_lightning.config.presets import options, preset_file
from fl_lightning.errors import ConfigError


def cells_of(*arguments: str) -> list[Cell]:
    sweep, overrides = load_sweep(arguments)
    return validate_space(overrides, sweep)


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cells_of(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_demo_is_what_it_says() -> None:
    cells = cells_of("sweep=demo")
    names = ["fedavg", "fedprox", "fedsam", "sam_afl", "dp_fedsam"]
    assert [(cell.values["algorithm"], cell.seed) for cell in cells] == [
        (name, seed) for name in names for seed in (42, 43)
    ]
    for cell in cells:
        config = cell.config
        assert (config.data.name, config.partition.alpha, config.fl.num_clients) == ("digits", 0.1, 10)
        assert (config.algorithm.name, config.seed) == (cell.values["algorithm"], cell.seed)
    assert [(cell.config.privacy.level, cell.config.privacy.target_epsilon) for cell in cells[-2:]] == [
        ("sample", 8.0)
    ] * 2
    assert {cell.config.privacy.level for cell in cells[:-2]} == {"none"}


@pytest.mark.parametrize("name", options("sweep"))
def test_every_shipped_sweep_is_valid_and_opens_with_its_command(name: str) -> None:
    assert preset_file("sweep", name).read_text().startswith(f"# fl-lightning sweep sweep={name}\n")
    assert cells_of(f"sweep={name}")


def test_a_cell_is_what_the_run_command_composes() -> None:
    base = ["partition=dirichlet", "algorithm.local.lr=0.05"]
    axes = [
        "sweep.space.algorithm={grid:[fedavg,fedprox]}",
        "sweep.space.partition.alpha={grid:[0.1,1]}",
        "sweep.seeds=[1,2]",
    ]
    cells = cells_of(*base, *axes)
    assert len(cells) == 8
    for cell in cells:
        chosen = [f"{key}={value}" for key, value in cell.values.items()]
        assert cell.config == load_config([*base, *chosen, f"seed={cell.seed}"])
        assert cell.configure({}) == cell.config


def test_a_sweep_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my sweep.yaml").write_text(
        "space:\n  algorithm.local.lr: {grid: [1e-3, 1E-2]}\noverrides: [algorithm=fedsam, fl.rounds=3]\n"
    )
    monkeypatch.chdir(tmp_path)
    sweep, overrides = load_sweep(["sweep=my sweep.yaml", "fl.rounds=2", "sweep.resources.gpu=0.5"])
    assert (sweep.name, sweep.resources.gpu, sweep.resources.cpu) == ("my sweep", 0.5, 1.0)
    cells = validate_space(overrides, sweep)
    assert [cell.values["algorithm.local.lr"] for cell in cells] == [0.001, 0.01]
    assert {(cell.config.fl.rounds, cell.config.algorithm.name, cell.seed) for cell in cells} == {(2, "fedsam", 42)}


def test_a_finished_configuration_serves_as_base() -> None:
    base = RunConfig(algorithm={"name": "fedsam", "local": {"lr": 0.02}})
    sweep = SweepConfig(space={"algorithm": {"grid": ["fedsam", "fedavg"]}})
    configs = [cell.config for cell in validate_space(base, sweep)]
    assert configs == [base, base.with_overrides({"algorithm": "fedavg"})]
    assert configs[1].algorithm.local.lr == 0.02


def test_random_axes_are_left_to_draw() -> None:
    sweep = SweepConfig(
        space={
            "algorithm": {"choice": ["fedavg", "dp_fedsam"]},
            "algorithm.local.lr": {"loguniform": ["1e-3", 1e-1]},
            "fl.local_epochs": {"randint": [1, 3]},
            "partition.alpha": {"grid": [0.1, 1]},
        },
        settings={"dp_fedsam": {"privacy.noise_multiplier": 2}},
        num_samples=5,
    )
    cells = pickle.loads(pickle.dumps(validate_space(["partition=dirichlet"], sweep)))
    assert [cell.values for cell in cells] == [{"partition.alpha": 0.1}, {"partition.alpha": 1.0}]
    assert [(axis.key, axis.kind, axis.values) for axis in cells[0].random] == [
        ("algorithm", "choice", ("fedavg", "dp_fedsam")),
        ("algorithm.local.lr", "loguniform", (0.001, 0.1)),
        ("fl.local_epochs", "randint", (1, 3)),
    ]
    trial = cells[1].configure({"algorithm": "dp_fedsam", "algorithm.local.lr": 0.02, "fl.local_epochs": 3})
    same = "partition=dirichlet partition.alpha=1 algorithm=dp_fedsam privacy.noise_multiplier=2 "
    drawn = ["algorithm.local.lr=0.02", "fl.local_epochs=3", "data.validation=0.1"]
    assert trial == load_config([*same.split(), *drawn])


def test_relative_paths_of_an_axis_mean_the_start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir(), elsewhere.mkdir()
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)
    monkeypatch.chdir(start)
    cells = cells_of("partition=file", "sweep.space.partition.path={grid:[a.json,b.json]}", "data=mnist")
    drawn = cells_of("sweep.space.data={choice:[digits,mnist]}", "sweep.space.fl.rounds={randint:[1,3]}")
    monkeypatch.chdir(elsewhere)
    assert [cell.values["partition.path"] for cell in cells] == [str(start / "a.json"), str(start / "b.json")]
    assert cells[1].configure({}).partition.path == start / "b.json"
    assert cells[0].config.with_overrides({"seed": 1}).data.root == start / "data"
    assert drawn[0].configure({"data": "mnist", "fl.rounds": 2}).data.root == start / "data"
    assert drawn[0].configure({"data": "digits", "fl.rounds": 2}).data.name == "digits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep=dem"], "sweep=dem: no such option; did you mean demo? (options: all_algorithms, demo, iso_budget"),
        ([], "sweep: name one, sweep=NAME or sweep=FILE.yaml (options: all_algorithms, demo, iso_budget, rho)"),
        (["sweep=/nowhere/x.yaml"], "/nowhere/x.yaml: cannot be read"),
        (["sweep=demo", "fl.num_client=3"], "fl.num_client: no such key; did you mean fl.num_clients?"),
        (["sweep=demo", "sweep.sedes=[1]"], "sweep.sedes: no such key; did you mean sweep.seeds?"),
        (["sweep=demo", "sweep.seeds"], "sweep.seeds: needs the form sweep.KEY=value"),
        (["sweep=demo", "sweep.seeds=3"], "sweep.seeds=3: needs a list, such as [1, 2]"),
        (["sweep=demo", "sweep.seeds=[a]"], "sweep.seeds.0=a: needs a whole number"),
        (["sweep=demo", "sweep.seeds=[1,1]"], "sweep.seeds=[1, 1]: lists a seed twice"),
        (["sweep=demo", "sweep.mode=mx"], "sweep.mode=mx: no such option; did you mean max?"),
        (["sweep=demo", "sweep.resources.cpu=0"], "sweep.resources.cpu=0: needs a number > 0"),
        (["sweep=demo", "sweep.max_concurrent=0"], "sweep.max_concurrent=0: needs a whole number >= 1, or null"),
        (["sweep=demo", "sweep.num_samples=2"], "sweep.num_samples=2: would repeat the same trials"),
        (["sweep=demo", "seed=3"], "seed=3: would be ignored: set sweep.seeds=[3]"),
        (["sweep=demo", "algorithm=fedavg"], "algorithm=fedavg: would be ignored: the sweep varies algorithm"),
        (
            ["sweep=demo", "algorithm.name=fedavg"],
            "algorithm.name=fedavg: would be ignored: the sweep varies algorithm",
        ),
        (
            ["sweep=rho", "algorithm.local.rho=1"],
            "algorithm.local.rho=1: would be ignored: the sweep varies algorithm.local.rho",
        ),
        (["sweep.space.fl.rounds=[1,2]"], "sweep.space.fl.rounds=[1, 2]: needs exactly one of grid, choice, uniform"),
        (["sweep.space.fl.rounds={gird:[1]}"], "sweep.space.fl.rounds.gird: no such form; did you mean grid?"),
        (["sweep.space.fl.rounds={grid:3}"], "sweep.space.fl.rounds.grid=3: needs a list"),
        (["sweep.space.fl.rounds={grid:[]}"], "sweep.space.fl.rounds.grid: needs at least one value"),
        (["sweep.space.fl.rounds={grid:[1,1]}"], "sweep.space.fl.rounds.grid=[1, 1]: lists a value twice"),
        (["sweep.space.fl.rounds={grid:[1,[2]]}"], "sweep.space.fl.rounds.grid=[2]: needs plain values"),
        (["sweep.space.fl.round={grid:[1]}"], "sweep.space.fl.round: no such key; did you mean fl.rounds?"),
        (["sweep.space.fl={grid:[1]}"], "sweep.space.fl: is a section; sweep one of its keys"),
        (["sweep.space.seed={grid:[1,2]}"], "sweep.space.seed: is no axis; list the seeds in sweep.seeds"),
        (["sweep.space.tracking.uri={grid:[a,b]}"], "sweep.space.tracking.uri: cannot be swept"),
        (["sweep.space.fl.rounds={randint:[2,1]}"], "sweep.space.fl.rounds.randint=[2, 1]: needs low < high"),
        (
            ["sweep.space.fl.rounds={randint:[1,2.5]}"],
            "sweep.space.fl.rounds.randint=[1, 2.5]: needs two whole numbers",
        ),
        (["sweep.space.partition.alpha={uniform:[1]}"], "sweep.space.partition.alpha.uniform=[1]: needs two numbers"),
        (
            ["sweep.space.algorithm.local.lr={loguniform:[0,1]}"],
            "sweep.space.algorithm.local.lr.loguniform=[0, 1]: needs low > 0",
        ),
        (
            ["sweep=demo", "sweep.settings.dp_fedavg.privacy.delta=1e-6"],
            "sweep.settings.dp_fedavg: would be ignored: the sweep's",
        ),
        (
            ["sweep=demo", "sweep.settings.fedsam.algorithm.local.rh=1"],
            "sweep.settings.fedsam.algorithm.local.rh: no such key",
        ),
        (["sweep=rho", "sweep.settings.fedsam.fl.rounds=1"], "sweep.settings.fedsam: would be ignored: no axis"),
    ],
)
def test_a_faulty_sweep_is_refused_in_words(arguments: list[str], message: str) -> None:
    assert refused(*arguments).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["sweep=rho", "sweep.space.algorithm.local.rho={grid:[0.1,-1]}"],
            "sweep axis algorithm.local.rho, value -1, cell [algorithm.local.rho=-1]: "
            "algorithm.local.rho=-1: needs a number >= 0",
        ),
        (
            ["sweep.space.fl.rounds={randint:[0,3]}"],
            "sweep axis fl.rounds, value 0, cell [fl.rounds=0]: fl.rounds=0: needs a whole number >= 1",
        ),
        (
            ["sweep.space.fl.clients_per_round={randint:[1,11]}"],
            "sweep axis fl.clients_per_round, value 11, cell [fl.clients_per_round=11]: fl.clients_per_round=11: "
            "needs at most fl.num_clients=10",
        ),
        (
            ["sweep.space.fl.client_fraction={uniform:[0.5,1.5]}"],
            "sweep axis fl.client_fraction, value 1.5, cell [fl.client_fraction=1.5]: ",
        ),
        (
            ["sweep=demo", "sweep.space.data={grid:[digits,mnis]}"],
            "sweep axis data, value mnis, cell [algorithm=fedavg data=mnis]: data=mnis: no such option; did you mean",
        ),
        (
            ["sweep=demo", "sweep.settings.dp_fedsam.privacy.target_epsilon=-4"],
            "sweep cell [algorithm=dp_fedsam]: privacy.target_epsilon=-4: needs a number > 0, or null",
        ),
        (
            ["sweep.space.fl.num_clients={choice:[10,3]}", "fl.clients_per_round=5"],
            "sweep cell [fl.num_clients=3]: fl.clients_per_round=5: needs at most fl.num_clients=3",
        ),
    ],
)
def test_every_value_and_both_ends_are_tried_before_the_first_trial(arguments: list[str], message: str) -> None:
    assert refused(*arguments).startswith(message)


def test_a_setting_that_only_some_algorithms_have_names_its_place() -> None:
    message = refused("sweep=demo", "algorithm.local.rho=0.3")
    assert message.startswith(
        "sweep axis algorithm, value fedavg, cell [algorithm=fedavg]: algorithm.local.rho=0.3: would be"
    )
    assert message.endswith("for some algorithms only: sweep.settings.NAME.algorithm.local.rho=VALUE")
    settings = [f"sweep.settings.{name}.algorithm.local.rho=0.3" for name in ("fedsam", "sam_afl", "dp_fedsam")]
    rhos: Mapping[Any, float] = {
        cell.values["algorithm"]: getattr(cell.config.algorithm.local, "rho", 0.0)
        for cell in cells_of("sweep=demo", *settings)
    }
    assert rhos == {"fedavg": 0.0, "fedprox": 0.0, "fedsam": 0.3, "sam_afl": 0.3, "dp_fedsam": 0.3}


def test_a_shipped_sweep_can_be_cut_down() -> None:
    cells = cells_of(
        "sweep=demo", "sweep.space.algorithm={grid:[fedavg,fedsam]}", "sweep.settings={}", "sweep.seeds=[7]"
    )
    assert [(cell.config.algorithm.name, cell.seed) for cell in cells] == [("fedavg", 7), ("fedsam", 7)]


def test_too_many_combinations_are_refused_at_once() -> None:
    space = {f"fl.{key}": {"grid": list(range(1, 30))} for key in ("rounds", "batch_size", "local_epochs")}
    with pytest.raises(ConfigError, match=re.escape("sweep.space: has 24389 combinations of its finite axes")):
        validate_space([], SweepConfig(space=space))
