"""Real sweeps on Ray Tune that several tests share: each is run once per test session."""

import atexit
import contextlib
import io
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from federations import digits

from fl_lightning import RunConfig, load_config
from fl_lightning.config import Cell, SweepConfig, validate_space
from tune import run_sweep


@dataclass(frozen=True)
class Swept:
    """A finished sweep: the folder it was started in, its cells, its result, what it printed."""

    start: Path
    cells: tuple[Cell, ...]
    result: dict[str, Any]
    printed: str
    complained: str

    @property
    def uri(self) -> str:
        return str(self.result["tracking_uri"])


def sweep_from(start: Path, base: Sequence[str] | RunConfig, sweep: SweepConfig, *, config_dir: Any = None) -> Swept:
    """Runs a sweep as the command line does, from the folder `start`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(start), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cells = validate_space(base, sweep, config_dir=config_dir)
        result = run_sweep(cells[0].config, sweep, cells)
    return Swept(start, tuple(cells), result, out.getvalue(), err.getvalue())


def write_digits(path: Path, every: int = 4) -> None:
    """A share of the real digits as a user's own .npz file."""
    images, labels = (part.numpy() for part in digits())
    chosen = np.arange(0, len(labels), every)
    test = np.arange(1, len(labels), every)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x_train=images[chosen], y_train=labels[chosen], x_test=images[test], y_test=labels[test])


@cache
def paired_sweep() -> Swept:
    """fedavg and dp_fedavg, two seeds each, with every path relative to a start folder that has a blank in its name."""
    temporary = tempfile.mkdtemp(prefix="fl-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    start = Path(temporary) / "start folder"
    write_digits(start / "my data" / "digits.npz")
    presets = start / "my presets" / "algorithm"
    presets.mkdir(parents=True)
    (presets / "fast.yaml").write_text("name: fedavg\nlocal: {lr: 0.2}\n")
    sweep = SweepConfig(name="pair", space={"algorithm": {"grid": ["fast", "dp_fedavg"]}}, seeds=(42, 43))
    return sweep_from(start, PAIRED_OVERRIDES, sweep, config_dir="my presets")


PAIRED_OVERRIDES = (
    "data=npz",
    "data.root=my data/digits.npz",
    "fl.num_clients=3",
    "fl.rounds=2",
    "tracking.uri=my runs",
    "tracking.experiment=relative",
)


def single_config(*more: str) -> RunConfig:
    """The configuration of a single run with the overrides of `paired_sweep`; relative to the current folder."""
    return load_config([*PAIRED_OVERRIDES, *more], config_dir="my presets")
