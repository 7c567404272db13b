"""The schema and its composition: defaults, variants, messages, presets, files, changes."""

import json
import math
import os
import pickle
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.config import RunConfig, load_config
from fl_lightning.config.index import all_keys, key_names
from fl_lightning.config.listing import list_keys
from fl_lightning.config.presets import GROUPS, options, preset_file, preset_folder, read_yaml
from fl_lightning.errors import ConfigError
from fl_lightning.plugins.loading import FORM

ALGORITHMS = ["fedavg", "fedprox", "fedsam", "sam_afl", "dp_fedavg", "dp_fedsam"]


def refused(*overrides: str, **options: Path) -> str:
    """The message with which these overrides are refused; one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_contract() -> None:
    config = load_config([])
    assert config == RunConfig()
    assert config.to_dict() == {
        "seed": 42,
        "data": {"name": "digits", "subset": 1.0, "validation": None},
        "partition": {"kind": "iid"},
        "model": {"kind": "lenet5"},
        "fl": {
            "num_clients": 10,
            "clients_per_round": None,
            "client_fraction": None,
            "rounds": 10,
            "local_epochs": 1,
            "max_local_steps": None,
            "batch_size": 32,
            "eval_every": 1,
            "checkpoint_every": None,
            "cohort_schedule": None,
            "clipping_lab": False,
        },
        "algorithm": {
            "name": "fedavg",
            "local": {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0},
            "aggregate": {"server_lr": 1.0, "weighting": "samples"},
        },
        "privacy": {"level": "none"},
        "engine": {"kind": "lightning", "device": "auto", "precision": "fp32", "workers": 1},
        "tracking": {
            "enabled": True,
            "uri": None,
            "experiment": "fl_lightning",
            "log_model": True,
            "system_metrics": True,
        },
    }


def test_defaults_follow_the_level_of_privacy() -> None:
    sample = load_config(["algorithm=dp_fedsam"])
    assert (sample.privacy.level, sample.privacy.target_epsilon, sample.privacy.adjacency) == (
        "sample",
        8.0,
        "add_remove",
    )
    assert sample.privacy.ascent == "previous"
    assert sample.algorithm.aggregate.weighting == "samples"
    update = load_config(["algorithm=dp_fedsam", "privacy=update", "privacy.noise_multiplier=1"])
    assert (update.privacy.adjacency, update.privacy.target_epsilon) == ("replace_one", None)
    assert update.algorithm.aggregate.weighting == "uniform"
    assert load_config(["algorithm=dp_fedavg"]).privacy.ascent is None


def test_a_preset_may_be_chosen_by_group_or_by_name() -> None:
    assert load_config(["algorithm=fedprox"]) == load_config(["algorithm.name=fedprox"])
    assert load_config(["algorithm={name:fedprox}"]) == load_config(["algorithm=fedprox"])
    assert load_config(["+algorithm=fedprox", "++fl.rounds=3"]).fl.rounds == 3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_python_shorthand_is_the_command_line(name: str) -> None:
    config = RunConfig(algorithm=name, fl={"rounds": 5})
    assert config == load_config([f"algorithm={name}", "fl.rounds=5"])
    assert RunConfig(**config.to_dict()) == config
    assert RunConfig.model_validate(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert RunConfig(algorithm=config.algorithm, privacy=config.privacy, fl=config.fl) == config


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "experiment"])
def test_every_shipped_preset_composes_and_lists_only_what_differs(group: str) -> None:
    needs = {"file": ["partition.path=split.json"], "image_folder": ["data.root=images"], "npz": ["data.root=a.npz"]}
    needs["alexnet"] = ["data=mnist"]  # the digits are too small for it
    private = ["algorithm=dp_fedavg"] if group == "privacy" else []
    own = set(options(group)) - {"iso_budget"}  # names a promise, not a variant, and states it whole
    for name in own:
        choice = [] if name == "none" else private
        config = load_config([*choice, f"{group}={name}", *needs.get(name, [])])
        [(tag, value)] = read_yaml(preset_file(group, name)).items()
        assert getattr(getattr(config, group), tag) == value == name
    tags = {
        item
        for key in all_keys(RunConfig)
        for at, names in key.conditions
        if at.startswith(f"{group}.")
        for item in names
    }
    literal = {"engine": {"lightning", "debug"}}.get(group, set())
    other = {"sgd", "momentum", "adam", FORM}
    assert own == (tags - other) | literal


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_composes_by_its_own_opening_line(name: str) -> None:
    text = preset_file("experiment", name).read_text()
    command = re.search(r"^# fl-lightning run (.*)$", text, re.MULTILINE)
    assert command is not None
    config = load_config(command[1].split())
    assert f"experiment={name}" in command[1]
    overlay = yaml.safe_load(text)
    plain = load_config(
        [f"{group.removeprefix('override /')}={option}" for d in overlay["defaults"] for group, option in d.items()]
    )
    for section in [key for key in overlay if key != "defaults"]:
        for key, value in overlay[section].items():
            if not isinstance(value, dict):
                assert getattr(getattr(config, section), key) == value != getattr(getattr(plain, section), key)


def test_the_papers_setting_is_preset() -> None:
    for name, lr, data, model in [
        ("fashion_mnist", 0.005, "fashion_mnist", "lenet5"),
        ("cifar10", 0.01, "cifar10", "vgg_like"),
    ]:
        config = load_config([f"experiment=sam_afl_{name}"])
        local, fl = config.algorithm.local, config.fl
        assert (local.optimizer, local.lr, local.weight_decay, local.rho) == ("adam", lr, 1e-4, 0.05)
        assert (local.beta1, local.beta2, config.algorithm.aggregate.mu) == (0.9, 0.999, 10.0)
        assert (fl.rounds, fl.local_epochs, fl.batch_size, fl.num_clients, fl.cohort_size) == (200, 5, 64, 10, 10)
        assert (config.partition.alpha, config.data.name, config.model.kind) == (0.1, data, model)
        assert load_config([f"experiment=sam_afl_{name}", "algorithm=fedavg"]).algorithm.local.lr == lr


def test_a_saved_configuration_loads_back_equal_and_can_be_changed(tmp_path: Path) -> None:
    file = tmp_path / "saved.yaml"
    config = load_config(["algorithm=dp_fedsam", "algorithm.local.lr=3e-3", "data=mnist", "partition=dirichlet"])
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config([], config_file=file) == config
    other = load_config(["algorithm=fedavg", "seed=7"], config_file=file)
    assert (other.algorithm.name, other.algorithm.local.lr, other.privacy.level, other.seed) == (
        "fedavg",
        3e-3,
        "none",
        7,
    )
    noise = load_config(["privacy.noise_multiplier=1"], config_file=file)
    assert (noise.privacy.noise_multiplier, noise.privacy.target_epsilon) == (1.0, None)
    assert load_config(["data=digits"], config_file=file).data.name == "digits"


def test_a_file_overlays_the_presets_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    file.write_text("algorithm: fedsam\nfl: {rounds: 7, batch_size: 16}\n")
    config = load_config(["fl.rounds=9", "experiment=quickstart"], config_file=file)
    assert (config.algorithm.name, config.fl.rounds, config.fl.batch_size, config.partition.alpha) == (
        "fedsam",
        9,
        16,
        0.1,
    )


def test_a_users_own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my confs (1)"
    (folder / "algorithm").mkdir(parents=True)
    mine = folder / "algorithm" / "mine.yaml"
    mine.write_text("name: fedsam\nlocal: {rho: 0.2}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(["algorithm=mine"], config_dir=Path("my confs (1)")).algorithm.local.rho == 0.2
    assert "did you mean mine?" in refused("algorithm=mien", config_dir=folder)
    mine.write_text("name: fedsam\nlocal: {rho: much}\n")
    assert (
        refused("algorithm=mine", config_dir=folder) == f"algorithm.local.rho=much: needs a number >= 0 (set in {mine})"
    )
    (folder / "algorithm" / "fedavg.yaml").write_text("name: fedavg\n")
    assert "would be ignored, algorithm=fedavg is a shipped preset" in refused(config_dir=folder)


def test_text_and_paths_need_no_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["data=mnist", "data.root=José, (1)/a=b", "tracking.experiment=2026"])
    assert config.data.root == tmp_path / "José, (1)" / "a=b"
    assert config.tracking.experiment == "2026"
    assert load_config(["tracking.experiment='my study'"]).tracking.experiment == "my study"


def test_removal_and_interpolation() -> None:
    assert load_config(["experiment=quickstart", "~partition.alpha"]).partition.alpha == 0.5
    assert load_config(["experiment=quickstart", "partition=iid", "~partition.alpha"]).partition.kind == "iid"
    assert load_config(["fl.batch_size=${fl.rounds}"]).fl.batch_size == 10


def test_with_overrides_follows_the_same_rules() -> None:
    config = load_config(["algorithm=fedsam", "algorithm.local.lr=0.02", "partition=dirichlet"])
    assert config.with_overrides({}) == config
    assert config.with_overrides({"algorithm": "fedprox"}) == load_config(
        ["algorithm=fedprox", "algorithm.local.lr=0.02", "partition=dirichlet"]
    )
    private = config.with_overrides({"algorithm": "dp_fedsam", "privacy.target_epsilon": 3})
    assert (private.privacy.level, private.privacy.target_epsilon, private.algorithm.local.lr) == ("sample", 3.0, 0.02)
    assert (
        private.with_overrides({"privacy.noise_multiplier": 1, "privacy.target_epsilon": None}).privacy.noise_multiplier
        == 1
    )
    assert private.with_overrides({"privacy": "update"}).algorithm.aggregate.weighting == "uniform"
    assert (
        config.with_overrides({"algorithm": {"name": "sam_afl", "aggregate": {"mu": 1}}}).algorithm.aggregate.mu == 1.0
    )
    with pytest.raises(ConfigError, match=r"algorithm=fedsm: no such option; did you mean fedsam\?"):
        config.with_overrides({"algorithm": "fedsm"})
    with pytest.raises(ConfigError, match=r"algorithm.local.rho=0.1: would be ignored with algorithm.name=fedavg"):
        config.with_overrides({"algorithm.local.rho": 0.1}).with_overrides({"algorithm": "fedavg"})
    with pytest.raises(ConfigError, match=r"fl\.round: no such key; did you mean fl\.rounds"):
        config.with_overrides({"fl.round": 3})


def test_the_hash_names_what_is_computed() -> None:
    config = RunConfig(data="mnist")
    same = config.with_overrides(
        {"tracking.experiment": "other", "tracking.enabled": False, "engine.workers": 4, "data.root": "/elsewhere"}
    )
    assert config.sha256 == same.sha256 == RunConfig(**config.to_dict()).sha256
    others = [{"seed": 43}, {"engine.precision": "fp64"}, {"fl.rounds": 11}, {"data": "fashion_mnist"}]
    assert len({config.sha256, *(config.with_overrides(change).sha256 for change in others)}) == 5
    user = [RunConfig(data={"name": "npz", "root": root}).sha256 for root in ("/a.npz", "/b.npz")]
    assert user[0] != user[1]


@settings(max_examples=50, deadline=None)
@given(
    lr=st.floats(min_value=0, max_value=1e30, exclude_min=True),
    seed=st.integers(min_value=0, max_value=2**63 - 1),
    delta=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
)
def test_every_number_survives_yaml_and_json(lr: float, seed: int, delta: float) -> None:
    config = RunConfig(algorithm={"name": "dp_fedavg", "local": {"lr": lr}}, seed=seed, privacy={"delta": delta})
    assert RunConfig(**yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    assert RunConfig(**json.loads(json.dumps(config.to_dict()))) == config


def test_values_never_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        RunConfig().fl.rounds = 3  # type: ignore[misc]


def test_every_key_is_described_and_listed() -> None:
    assert all(key.field.description for key in all_keys(RunConfig))
    listed = [line for line in list_keys() if not line.startswith(" ")]
    assert listed == list(key_names(RunConfig))
    assert "    a number >= 0; default 0.05; only with algorithm.name=fedsam|sam_afl|sam_adpfl|dp_fedsam" in list_keys(
        ["algorithm.local.rho"]
    )
    assert math.isinf(
        load_config(["algorithm=dp_fedavg", "privacy.clip_norm=inf", "privacy.noise_multiplier=0"]).privacy.clip_norm
    )


def test_shipped_presets_lie_beside_the_package() -> None:
    assert os.path.isfile(preset_folder() / "config.yaml")
