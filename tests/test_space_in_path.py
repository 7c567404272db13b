"""A sweep works where the interpreter itself lies in a folder with a space (Ray hands its path to a shell)."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.mark.slow
def test_sweep_from_an_environment_with_a_space_in_its_path(tmp_path: Path) -> None:
    home = tmp_path / "my lab" / ".venv"
    (home / "bin").mkdir(parents=True)
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if not settings.exists():
        pytest.skip("the tests do not run in a virtual environment")
    (home / "pyvenv.cfg").write_text(settings.read_text())
    (home / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    packages = home / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    packages.parent.mkdir(parents=True)
    packages.symlink_to(sysconfig.get_path("purelib"))
    words = [str(home / "bin" / "python"), "-m", "fl_lightning.cli", "sweep", "sweep=rho", "fl.rounds=1"]
    words += ["sweep.seeds=[1]", "sweep.space.algorithm.local.rho={grid: [0.05]}", "--output", "out.json", "--quiet"]
    done = subprocess.run(words, cwd=tmp_path / "my lab", capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    result = json.loads((tmp_path / "my lab" / "out.json").read_text())
    assert [trial["status"] for trial in result["trials"]] == ["finished"]
