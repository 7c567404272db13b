"""Every command of the README runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
NEEDS_DATA = ("fashion_mnist", "mnist", "cifar10")


def test_the_readme_is_short_and_has_commands() -> None:
    assert len(README.splitlines()) < 200
    assert len(COMMANDS) > 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme with a space")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("fl-lightning")])
def test_command(command: str, folder: Path) -> None:
    if any(name in command for name in NEEDS_DATA) and not os.environ.get("FL_DATA_ROOT"):
        pytest.skip("FL_DATA_ROOT does not point to the data set")
    words = [str(Path(sys.executable).parent / "fl-lightning"), *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_targets_exist_and_continuous_integration_runs_them(command: str) -> None:
    assert re.search(rf"^{re.escape(command.split()[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_every_command_is_of_a_tested_kind() -> None:
    assert all(command.split()[0] in ("fl-lightning", "make") for command in COMMANDS)


def test_python_example(folder: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("NOT PRIVATE")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_sweep_file_shown_is_the_one_shipped() -> None:
    import yaml

    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "conf" / "sweep" / "rho.yaml").read_text())
