"""Known faults of comparable tools that concern the configuration: H05, H11, H16, H30, H31."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from fl_lightning import run
from fl_lightning.config import RunConfig, load_config
from fl_lightning.config.presets import options
from fl_lightning.data.catalogue import KNOWN_SETS
from fl_lightning.errors import ConfigError
from fl_lightning.models import check_fit

CLI = [sys.executable, "-m", "fl_lightning.cli"]


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)


def refused(*overrides: str, **options: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **options)
    return str(caught.value)


def small_images(folder: Path, size: int, channels: int = 1) -> Path:
    """Ten training and ten test images of size x size pixels, as a user's own .npz."""
    shape = (10, size, size) if channels == 1 else (10, size, size, channels)
    pixels = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape).astype(np.uint8)
    labels = np.arange(10) % 2
    file = folder / "mine.npz"
    np.savez(file, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    return file


# H05: image channels or sizes do not fit the model.


@pytest.mark.parametrize(("data", "model"), itertools.product(sorted(KNOWN_SETS), options("model")))
def test_h05_every_shipped_pair_is_accepted_or_refused_at_configuration_time(data: str, model: str) -> None:
    try:
        check_fit(model, *KNOWN_SETS[data].shape)
    except ConfigError:
        assert f"model.kind={model}: does not fit data.name={data}" in refused(f"data={data}", f"model={model}")
    else:
        assert load_config([f"data={data}", f"model={model}"]).model.kind == model


def test_h05_a_users_images_that_do_not_fit_are_refused_before_the_run(tmp_path: Path) -> None:
    file = small_images(tmp_path, size=4)
    done = cli("run", "data=npz", f"data.root={file}", "model=vgg_like", "fl.num_clients=2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.kind=vgg_like: its 3 max-pools need images of at least 8x8 pixels")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "mlruns").exists()


# H11: settings that do nothing under manual optimization are refused by name, with SAM on and off and with DP.


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsam", "dp_fedavg"])
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("gradient_clip_val=0.1", "privacy.clip_norm"),
        ("accumulate_grad_batches=4", "fl.batch_size"),
        ("lr_schedule=step", "algorithm.local.lr"),
    ],
)
def test_h11_trainer_options_are_refused_by_name(algorithm: str, setting: str, remedy: str, tmp_path: Path) -> None:
    key, _, value = setting.partition("=")
    for where in (f"algorithm.local.{key}", f"fl.{key}", f"engine.{key}"):
        message = refused(f"algorithm={algorithm}", f"{where}={value}")
        assert message.startswith(f"{where}: not offered")
        assert remedy in message
    file = tmp_path / "trainer.yaml"
    file.write_text(yaml.safe_dump({"algorithm": {"name": algorithm, "local": {key: value}}}))
    assert refused(config_file=file).startswith(f"algorithm.local.{key}: not offered")
    with pytest.raises(ConfigError, match=f"algorithm.local.{key}: not offered"):
        RunConfig(algorithm={"name": algorithm, "local": {key: value}})


# H16: relative paths mean the folder the program was started in.


def test_h16_paths_are_absolute_once_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    (start / "my" / "data").mkdir(parents=True)
    elsewhere.mkdir()
    (start / "my" / "data" / "mine.yaml").write_text("name: npz\nroot: sets/mine.npz\n")
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)
    monkeypatch.chdir(start)
    (start / "saved.yaml").write_text("fl: {cohort_schedule: cohorts.json}\n")
    config = load_config(
        ["data=mine", "tracking.uri=sqlite:///store/mlflow.db"], config_file=Path("saved.yaml"), config_dir=Path("my")
    )
    plain = config.to_dict()
    monkeypatch.chdir(elsewhere)
    trial = RunConfig(**plain).with_overrides({"seed": 3})
    for each in (config, trial):
        assert each.data.root == start / "sets" / "mine.npz"
        assert each.tracking.uri == f"sqlite:///{start}/store/mlflow.db"
        assert each.fl.cohort_schedule == start / "cohorts.json"
    monkeypatch.chdir(start)
    fashion = load_config(["data=fashion_mnist"])
    monkeypatch.chdir(elsewhere)
    assert fashion.with_overrides({"fl.rounds": 3}).data.root == start / "data"
    assert RunConfig(tracking={"uri": "runs"}).tracking.uri == str(elsewhere / "runs")
    for address in ("http://host:5000", "postgresql://host/db", "databricks", f"sqlite:///{start}/a.db"):
        assert RunConfig(tracking={"uri": address}).tracking.uri == address


def test_h16_a_run_started_elsewhere_reads_and_writes_there(tmp_path: Path) -> None:
    small_images(tmp_path, size=8)
    (tmp_path / "my" / "data").mkdir(parents=True)
    (tmp_path / "my" / "data" / "mine.yaml").write_text("name: npz\nroot: mine.npz\n")
    done = cli(
        *(
            "run",
            "data=mine",
            "--config-dir",
            "my",
            "tracking.uri=sqlite:///store/m.db",
            "fl.num_clients=2",
            "fl.rounds=1",
        ),
        *("--output", "out/result.json", "--quiet"),
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["config"]["data"]["root"] == str(tmp_path / "mine.npz")
    assert (tmp_path / "store" / "m.db").is_file()
    assert not (tmp_path / "mlruns").exists()


# H30: cohorts that cannot be.


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fl.clients_per_round=8"], "fl.clients_per_round=8: needs at most fl.num_clients=5; lower it, or raise"),
        (["fl.clients_per_round=0"], "fl.clients_per_round=0: needs a whole number >= 1, or null"),
        (["fl.client_fraction=0"], "fl.client_fraction=0: needs a number > 0 and <= 1, or null"),
        (["fl.client_fraction=1.5"], "fl.client_fraction=1.5: needs a number > 0 and <= 1, or null"),
        (["fl.min_available=8"], "fl.min_available: not offered: every simulated client is available"),
    ],
)
def test_h30_impossible_cohorts_are_refused_before_the_start(overrides: list[str], message: str) -> None:
    assert refused("fl.num_clients=5", *overrides).startswith(message)


def test_h30_a_tiny_fraction_samples_one_client_and_says_so() -> None:
    config = load_config(["fl.num_clients=5", "fl.client_fraction=0.01"])
    assert config.fl.cohort_size == 1
    assert config.notes == ("fl.client_fraction=0.01 of 5 clients is none: 1 client is sampled",)
    sizes = {
        fraction: RunConfig(fl={"num_clients": 10, "client_fraction": fraction}) for fraction in (0.1, 0.34, 0.99, 1)
    }
    assert {fraction: config.fl.cohort_size for fraction, config in sizes.items()} == {0.1: 1, 0.34: 3, 0.99: 10, 1: 10}
    assert all(not config.notes for config in sizes.values())


def test_h30_one_client_and_a_tiny_fraction_run() -> None:
    quick = {"rounds": 2, "max_local_steps": 1}
    alone = run(RunConfig(fl={"num_clients": 1, **quick}, tracking={"enabled": False}))
    assert [record.cohort for record in alone.rounds] == [(0,), (0,)]
    few = run(RunConfig(fl={"num_clients": 5, "client_fraction": 0.01, **quick}, tracking={"enabled": False}))
    assert [len(record.cohort) for record in few.rounds] == [1, 1]


# H31: numbers are numbers.


def test_h31_numbers_in_exponent_form_on_file_and_command_line_and_after_a_round_trip(tmp_path: Path) -> None:
    text = """
seed: 1e3
fl: {batch_size: 1.6e1}
algorithm: {name: dp_fedavg, local: {lr: 1e-3, weight_decay: "1E-4"}}
privacy: {level: sample, delta: 1e-5, noise_multiplier: 1E0, clip_norm: 2e0}
"""
    (tmp_path / "in.yaml").write_text(text)
    line = "algorithm=dp_fedavg seed=1e3 fl.batch_size=1.6e1 algorithm.local.lr=1e-3 algorithm.local.weight_decay=1E-4"
    private = "privacy.level=sample privacy.delta=1e-5 privacy.noise_multiplier=1E0 privacy.clip_norm=2e0"
    from_file = load_config([], config_file=tmp_path / "in.yaml")
    assert from_file == load_config([*line.split(), *private.split()])
    values = (
        (from_file.seed, 1000, int),
        (from_file.fl.batch_size, 16, int),
        (from_file.algorithm.local.lr, 0.001, float),
        (from_file.algorithm.local.weight_decay, 0.0001, float),
        (from_file.privacy.delta, 1e-5, float),
        (from_file.privacy.noise_multiplier, 1.0, float),
        (from_file.privacy.clip_norm, 2.0, float),
    )
    assert all(value == wanted and type(value) is kind for value, wanted, kind in values)
    printed = cli("config", "--config", "in.yaml", cwd=tmp_path)
    assert printed.returncode == 0
    (tmp_path / "out.yaml").write_text(printed.stdout)
    assert load_config([], config_file=tmp_path / "out.yaml") == from_file
    assert yaml.safe_load(printed.stdout) == from_file.to_dict()  # a plain YAML 1.1 reader sees numbers too


@pytest.mark.parametrize("infinity", [".inf", "inf", "+.inf", ".INF"])
def test_h31_infinity_is_a_number_where_a_bound_allows_it(infinity: str, tmp_path: Path) -> None:
    base = ["algorithm=dp_fedavg", f"privacy.clip_norm={infinity}"]
    config = load_config([*base, "privacy.noise_multiplier=0"])
    assert config.privacy.clip_norm == math.inf
    file = tmp_path / "inf.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config([], config_file=file) == config
    assert refused(*base, "privacy.noise_multiplier=1E0").startswith(
        "privacy.clip_norm=.inf: needs a finite number > 0"
    )
    file.write_text(f"algorithm: {{name: dp_fedavg}}\nprivacy: {{clip_norm: {infinity}}}\n")
    message = refused(config_file=file)
    assert message.startswith("privacy.clip_norm=.inf: needs a finite number > 0")
    assert message.endswith(f"(set in {file})")


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("algorithm.local.lr", "abc", "a number > 0"),
        ("algorithm.local.lr", "1e-3x", "a number > 0"),
        ("algorithm.local.lr", ".nan", "a number > 0"),
        ("algorithm.local.lr", "true", "a number > 0"),
        ("fl.batch_size", "16.5", "a whole number >= 1"),
        ("fl.batch_size", "1e-3", "a whole number >= 1"),
        ("fl.batch_size", ".inf", "a whole number >= 1"),
        ("fl.rounds", "[3]", "a whole number >= 1"),
    ],
)
def test_h31_wrong_types_are_refused_with_key_value_and_file(key: str, value: str, needs: str, tmp_path: Path) -> None:
    message = refused(f"{key}={value}")
    assert message.startswith(f"{key}=")
    assert message.endswith(f": needs {needs} (set on the command line)")
    file = tmp_path / "wrong.yaml"
    first, second = key.rsplit(".", 1)
    outer = first.split(".")
    file.write_text(
        "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(outer)) + "  " * len(outer) + f"{second}: {value}\n"
    )
    message = refused(config_file=file)
    assert message.startswith(f"{key}=")
    assert message.endswith(f": needs {needs} (set in {file})")
