"""The library's own rules: which way imports point, what loads when, how long files are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fl_lightning"
ALLOWED = {
    "records": {"records"},
    "errors": {"errors"},
    "rng": {"rng"},
    "vector": {"records", "errors"},
    "local": {"records", "errors", "rng", "vector"},
    "uplink": {"records", "errors", "rng", "vector", "local"},
    "server": {"records", "errors", "rng", "vector"},
    "privacy": {"records", "errors"},
    "algorithms": {"records", "errors", "rng", "vector", "local", "uplink", "server", "privacy"},
    "data": {"records", "errors", "rng"},
    "models": {"errors", "rng"},
    "client": {"records", "errors", "rng", "vector", "local", "uplink", "algorithms", "data"},
    "engine": {"records", "errors", "rng", "vector", "local", "client", "data"},
    "federation": {"records", "rng", "client", "algorithms"},
}
"""What each inner part may import of the others (itself always); all other parts stand outside and may import any."""


def parts(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Parts of fl_lightning that a file imports at run time, wherever in the file."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("fl_lightning.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_inward(path: Path) -> None:
    part = parts(path)
    if part in ALLOWED:
        assert imports(path) <= ALLOWED[part] | {part}


@pytest.mark.parametrize("path", sorted((PACKAGE / "algorithms").glob("*.py")), ids=lambda p: p.name)
def test_algorithms_know_no_machinery(path: Path) -> None:
    text = path.read_text()
    for word in ("import lightning", "import ray", "vmap", "mlflow", "opacus"):
        assert word not in text


def test_the_library_does_not_import_the_sweep_application() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name.startswith("cli"):
            continue  # the command line is the outermost layer: it starts sweeps
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "tune", path


def test_no_file_is_too_long() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "tune").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 300, path


def loaded(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_core_training_needs_neither_ray_nor_mlflow_nor_opacus() -> None:
    absent = ("ray", "mlflow", "opacus", "hydra", "loky", "sklearn")
    modules = loaded(
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import fl_lightning.federation, fl_lightning.engine.lightning, fl_lightning.engine.debug\n"
        "import fl_lightning.engine.objective, fl_lightning.algorithms.dp_fedsam, fl_lightning.models\n"
        "import fl_lightning.data.loading"
    )
    assert "lightning" in modules


def test_the_command_line_loads_nothing_heavy() -> None:
    modules = loaded("import fl_lightning.cli")
    assert not modules & {"torch", "lightning", "ray", "mlflow", "opacus", "hydra", "matplotlib", "numpy"}


def test_public_names_exist() -> None:
    import fl_lightning

    for name in fl_lightning.__all__:
        assert getattr(fl_lightning, name) is not None
    assert callable(fl_lightning.run)
    with pytest.raises(AttributeError):
        _ = fl_lightning.nothing
