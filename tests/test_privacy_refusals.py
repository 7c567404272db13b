"""What would make an epsilon too small, or a setting of privacy a dead letter, is refused or said."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import RunConfig, run
from fl_lightning.checkpoint import LATEST, exclusive, load
from fl_lightning.cli import invoke
from fl_lightning.config import SweepConfig, load_config, validate_space
from fl_lightning.config.faults import InvalidConfig
from fl_lightning.config.sweep import Selection
from fl_lightning.errors import CheckpointError, ConfigError, PrivacyError
from fl_lightning.foreseen import foresee
from fl_lightning.privacy.pld import pld_epsilon
from fl_lightning.records import Release, RoundRecord, RunResult
from tune.samples import number_of_samples

MIXING = """
from torch import nn

class Mixing(nn.Module):
    def __init__(self, features, num_classes, mix):
        super().__init__()
        self.mix, self.fc = mix, nn.Linear(features, num_classes)

    def forward(self, images):
        x = images.flatten(1)
        return self.fc(x - x.mean(0) if self.mix else x)

def mixing(channels, height, width, num_classes):
    return Mixing(channels * height * width, num_classes, True)

def plain(channels, height, width, num_classes):
    return Mixing(channels * height * width, num_classes, False)
"""


ADAPTIVE = ("algorithm=sam_adpfl", "privacy=update", "algorithm.sharpness.noise_rule=personalised")
BARE = ("algorithm=dp_fedavg", "privacy=update", "privacy.noise_multiplier=0")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [*ADAPTIVE, "privacy.noise_multiplier=3", "privacy.target_epsilon=1"],
            "privacy.target_epsilon=1.0: would be ignored with algorithm.sharpness.noise_rule=personalised",
        ),
        (
            ["algorithm=dp_fedavg", "privacy.noise_decay=0.5", "privacy.noise_decay_rounds=100"],
            "privacy.noise_decay_rounds=100: needs less than fl.rounds=10",
        ),
        (
            ["algorithm=dp_fedavg", "privacy.noise_decay=0.5", "privacy.noise_multiplier=0"],
            "privacy.noise_decay=0.5: would be ignored with privacy.noise_multiplier=0",
        ),
        (
            [*BARE, "privacy.trust_model=central", "privacy.noise_cohort_size=100"],
            "privacy.noise_cohort_size=100: would be ignored with privacy.noise_multiplier=0",
        ),
        (
            [*BARE, "privacy.clip_bound=quantile", "privacy.quantile.bit_noise=3"],
            "privacy.quantile.bit_noise=3.0: would be ignored with privacy.noise_multiplier=0",
        ),
        (
            ["algorithm=dp_fedsam", "algorithm.local.rho=0", "privacy.ascent=two_release"],
            "privacy.ascent=two_release: two_release would pay for an ascent of algorithm.local.rho=0",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_config(overrides)
    assert str(caught.value).startswith(words)


def test_a_network_that_looks_across_the_batch_is_refused_at_sample_level(tmp_path: Path) -> None:
    (tmp_path / "mix.py").write_text(MIXING)

    def config(name: str, level: str) -> RunConfig:
        return RunConfig(
            algorithm="dp_fedavg",
            model=f"{tmp_path}/mix.py:{name}",
            privacy={"level": level},
            fl={"rounds": 1},
            data={"subset": 0.1},
            tracking={"enabled": False},
        )

    with pytest.raises(PrivacyError, match="depends on the others of its batch"):
        run(config("mixing", "sample"))
    assert run(config("plain", "sample")).badge == "PRIVATE"
    assert run(config("mixing", "update")).badge == "PRIVATE", "a whole client may mix its examples"


def test_what_no_release_covers_is_named_beside_the_epsilon() -> None:
    result = run(
        RunConfig(
            algorithm="dp_fedavg",
            model={"kind": "resnet18", "norm": "batch"},
            privacy={"level": "update"},
            fl={"rounds": 1, "num_clients": 2, "max_local_steps": 1},
            data={"subset": 0.1},
            tracking={"enabled": False},
        )
    )
    assert result.badge == "NOT PRIVATE"
    assert any("buffers left the clients undeclared" in text for text in result.final["privacy"]["warnings"])


def test_a_plan_whose_budget_buys_nothing_is_refused_like_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["algorithm=dp_fedavg", "privacy.noise_multiplier=1", "privacy.target_epsilon=0.01"]
    with pytest.raises(PrivacyError, match="nothing would be trained"):
        foresee(load_config(arguments))
    assert invoke(["privacy", "plan", *arguments, "--json"]) == 2
    assert "nothing would be trained" in capsys.readouterr().err


@pytest.mark.parametrize("delta", [0.5, 0.2])
def test_pld_does_not_run_away_where_epsilon_is_near_zero(delta: float) -> None:
    start = time.process_time()
    found = pld_epsilon([Release("gaussian", "client", 1.0, 1.2)], delta)
    assert time.process_time() - start < 20
    from fl_lightning.privacy import gaussian_epsilon_exact

    exact = gaussian_epsilon_exact(1.2, 1, delta)
    assert exact - 1e-6 <= found <= exact + 2e-3


@pytest.mark.parametrize("rate", ["1", "0.1"])
def test_a_multiplier_too_small_to_mean_anything_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["privacy", "epsilon", "--noise-multiplier", "1e-200", "--steps", "10", "--rate", rate]
    assert invoke(arguments) == 2
    assert "too small to protect anything" in capsys.readouterr().err


# The cost of tuning holds over all that could have been drawn.


def selecting(space: dict, *base: str) -> int:
    sweep = SweepConfig(space=space, selection=Selection(distribution="geometric", mean=2.0))
    cells = validate_space(list(base), sweep)
    return number_of_samples(cells[0].config, sweep, cells)


def test_selection_over_what_changes_the_releases_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"take sweep\.space\.privacy\.target_epsilon out"):
        selecting({"privacy.target_epsilon": {"choice": [0.5, 8.0]}}, "algorithm=dp_fedavg")
    lr = {"algorithm.local.lr": {"loguniform": [0.05, 0.5]}}
    with pytest.raises(ConfigError, match="other costs, at every seed"):
        selecting(lr, "algorithm=dp_fedavg", "partition=dirichlet")
    with pytest.raises(ConfigError, match="drawn anew at every seed"):
        selecting(lr, "algorithm=dp_fedavg", "fl.clients_per_round=3")
    assert selecting(lr, "algorithm=dp_fedavg") >= 1
    secret = ["privacy=update", "privacy.trust_model=central", "privacy.sampling=poisson", "fl.clients_per_round=3"]
    assert selecting(lr, "algorithm=dp_fedavg", *secret) >= 1


# Checkpoints that are damaged, or wanted twice.


def test_the_checkpoint_before_a_damaged_one_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RunConfig(
        fl={"rounds": 2, "num_clients": 2, "max_local_steps": 1, "checkpoint_every": 1},
        data={"subset": 0.1},
        tracking={"uri": f"sqlite:///{tmp_path}/mlflow.db"},
    )
    folder = tmp_path / "kept"

    class Copier:
        """Keeps the checkpoints, which a finished run deletes."""

        def on_start(self, info: Mapping[str, Any]) -> None:
            self.place = tmp_path / "checkpoints" / info["run_id"]

        def on_round(self, record: RoundRecord) -> None: ...

        def on_end(self, result: RunResult) -> None:
            shutil.copytree(self.place, folder)

    result = run(config, observers=[Copier()])
    assert not (tmp_path / "checkpoints" / str(result.run_id)).exists()
    newest, before = json.loads((folder / LATEST).read_text())["files"]
    assert load(folder).progress.federation.server.round == 2
    (folder / newest["file"]).write_bytes(b"half")
    assert load(folder).progress.federation.server.round == 1
    assert newest["file"] in caplog.text and "goes on from the checkpoint before it" in caplog.text
    (folder / before["file"]).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        load(folder)


def test_two_processes_cannot_resume_one_run(tmp_path: Path) -> None:
    first = exclusive(tmp_path)
    with pytest.raises(CheckpointError, match="another process is resuming"):
        exclusive(tmp_path)
    first.release()
    exclusive(tmp_path).release()
