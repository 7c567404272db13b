"""A user's own algorithm, data set and model: the shipped examples, their parameters, and every fault in one line."""

import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sweeps import sweep_from

from fl_lightning import ConfigError, DataError, FLError, PrivacyError, RunConfig, load_config, run
from fl_lightning.build import prepare
from fl_lightning.cli import invoke
from fl_lightning.config import SweepConfig
from fl_lightning.plugins.loading import is_reference, load, to_reference

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
QUICK = ("fl.num_clients=3", "fl.rounds=2", "fl.max_local_steps=2", "tracking.enabled=false")
OWN_ALGORITHM = f"algorithm={EXAMPLES}/my_fedavg.py:my_fedavg"
OWN_DATA = f"data={EXAMPLES}/my_data.py:two_digits"
OWN_MODEL = f"model={EXAMPLES}/my_model.py:my_model"


def refused(*overrides: str) -> str:
    with pytest.raises(FLError) as caught:
        prepare(load_config([*overrides, *QUICK]))
    text = str(caught.value)
    assert "\n" not in text
    return text


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# The examples.


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_every_example_runs_by_its_own_opening_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder with a blank in its name, with the path relative to it, as the file says."""
    start = tmp_path / "start folder"
    shutil.copytree(EXAMPLES, start / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    command = re.search(r"^fl-lightning (run .*)$", text, re.MULTILINE)
    assert command is not None
    more = ["fl.rounds=3", "tracking.enabled=false", "--output", "r.json"]
    monkeypatch.chdir(start)
    assert invoke([*shlex.split(command[1]), *more]) == 0, capsys.readouterr().err
    assert "round 3/3" in capsys.readouterr().out and (start / "r.json").exists()


def test_the_documentations_example_is_the_one_shipped() -> None:
    text = (ROOT / "docs" / "add-an-algorithm.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        for line in block.splitlines():
            assert line in (EXAMPLES / "my_fedavg.py").read_text().splitlines(), line
    for name in re.findall(r"examples/\w+\.py", text):
        assert (ROOT / name).exists()


def test_a_wide_bound_is_fedavg_and_a_narrow_one_is_not() -> None:
    ends = {}
    for bound in ("1e9", "0.01"):
        config = load_config([OWN_ALGORITHM, f"algorithm.parameters.max_norm={bound}", *QUICK])
        ends[bound] = run(config).final["weights_sha256"]
    fedavg = run(load_config(QUICK)).final["weights_sha256"]
    assert ends["1e9"] == fedavg != ends["0.01"]


def test_own_data_and_own_model_train_together_and_from_python() -> None:
    config = RunConfig(
        data={"name": f"{EXAMPLES}/my_data.py:two_digits", "parameters": {"second": 9}, "subset": 0.5},
        model=f"{EXAMPLES}/my_model.py:my_model",
        algorithm=f"{EXAMPLES}/my_fedavg.py:my_fedavg",
        fl={"num_clients": 3, "rounds": 8, "local_epochs": 3},
        tracking={"enabled": False},
    )
    prepared = prepare(config)
    assert prepared.data.classes == ("3", "9") and prepared.data.num_classes == 2
    assert abs(len(prepared.data.y_train) - 0.5 * 0.8 * (183 + 180)) < 3  # half of four fifths of the 3s and 9s
    assert prepared.objective.layout.size == 64 * 32 + 32 + 32 * 2 + 2
    assert run(config).final["test_accuracy"] > 0.85
    assert config.with_overrides({"model.parameters.hidden": 8}).model.parameters == {"hidden": 8}


def test_moon_takes_an_own_model_that_has_features(tmp_path: Path) -> None:
    assert prepare(load_config(["algorithm=moon", OWN_MODEL, *QUICK])).algorithm.name == "moon"
    file = written(
        tmp_path,
        "from torch import nn\n"
        "def net(num_classes: int):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n",
    )
    assert "has no method features(images)" in refused("algorithm=moon", f"model={file}:net")


# Initial weights, engines and workers.


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        state = torch.get_rng_state()
        vector = prepare(load_config([OWN_MODEL, f"seed={seed}", *QUICK])).objective.initial
        assert torch.equal(torch.get_rng_state(), state)
        return vector

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_every_engine_and_worker_gives_the_same_bits() -> None:
    """Worker processes cannot import the user's file by name; its functions and classes travel by value."""
    base = load_config([OWN_ALGORITHM, OWN_DATA, OWN_MODEL, *QUICK, "fl.rounds=1"])
    expected = run(base).final["weights_sha256"]
    for change in ({"engine.kind": "debug"}, {"engine.workers": 2}):
        assert run(base.with_overrides(change)).final["weights_sha256"] == expected


def test_a_sweep_runs_them_on_ray_from_a_relative_path(tmp_path: Path) -> None:
    """Own parameters are axes; the path is made absolute before a worker sees it; a trial has the bits of a run."""
    start = tmp_path / "my lab"
    shutil.copytree(EXAMPLES, start / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    own = "examples/my_fedavg.py:my_fedavg"
    sweep = SweepConfig(
        name="own",
        space={"algorithm.name": {"grid": [own]}},
        seeds=(42,),
        settings={own: {"algorithm.parameters.max_norm": 0.01}},
        max_concurrent=1,
    )
    base = ["data=examples/my_data.py:two_digits", "model=examples/my_model.py:my_model", *QUICK]
    swept = sweep_from(start, base, sweep)
    [trial] = swept.result["trials"]
    assert trial["status"] == "finished" and trial["params"]["algorithm.name"] == f"{start}/{own}"
    copy = [f"algorithm={start}/{own}", "algorithm.parameters.max_norm=0.01", OWN_DATA, OWN_MODEL, *QUICK]
    alone = run(load_config(copy))
    assert trial["final"]["weights_sha256"] == alone.final["weights_sha256"]
    grid = SweepConfig(name="g", space={"algorithm.parameters.max_norm": {"grid": [1, 0]}}, seeds=(1,))
    with pytest.raises(ConfigError, match=r"algorithm\.parameters\.max_norm=0: needs a number > 0"):
        sweep_from(start, [f"algorithm={own}", *QUICK], grid)


# The schema read off a function.


def test_paths_are_absolute_once_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(["algorithm=examples/my_fedavg.py:my_fedavg"])
    assert config.algorithm.name == f"{ROOT}/examples/my_fedavg.py:my_fedavg"
    monkeypatch.chdir(tmp_path)
    assert RunConfig(**config.to_dict()) == config == pickle.loads(pickle.dumps(config))
    assert config.with_overrides({"fl.rounds": 3}).algorithm == config.algorithm
    assert to_reference("~/a.py:f") == os.path.expanduser("~/a.py:f")
    assert is_reference("mine.py") and not is_reference("fedavg") and not is_reference(3)


def test_parameters_are_complete_typed_and_read_from_text() -> None:
    assert load_config([OWN_ALGORITHM]).algorithm.parameters == {"max_norm": 1.0}
    for written_as in ("1e-1", "'0.1'", ".1"):
        config = load_config([OWN_ALGORITHM, f"algorithm.parameters.max_norm={written_as}"])
        assert config.algorithm.parameters == {"max_norm": 0.1}
    set_back = load_config([OWN_ALGORITHM, "algorithm.parameters.max_norm=3", "~algorithm.parameters.max_norm"])
    assert set_back.algorithm.parameters == {"max_norm": 1.0}


KINDS = """
from pathlib import Path
from typing import Annotated, Literal, Optional
from pydantic import Field
from fl_lightning.algorithms.fedavg import fedavg
from fl_lightning.config.numbers import Share
seen = {}
def method(optimizer, count: int, share: Share = 0.5, deep: bool = False, mode: Literal["a", "b"] = "a",
           folder: Path = Path("here"), label: str = "x", top: Annotated[int, Field(le=9)] | None = None,
           old: Optional[float] = None):
    seen.update({k: v for k, v in locals().items() if k != "optimizer"})
    return fedavg(optimizer)
"""


def test_every_kind_of_parameter_arrives_as_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, KINDS)
    monkeypatch.chdir(tmp_path)
    set_here = {"count": "1e3", "share": "1", "deep": "true", "mode": "b", "top": "7", "old": "1e-2", "label": "7"}
    config = load_config([f"algorithm={file}:method", *(f"algorithm.parameters.{k}={v}" for k, v in set_here.items())])
    plain = {"count": 1000, "share": 1.0, "deep": True, "mode": "b", "folder": f"{tmp_path}/here", "label": "7"}
    assert config.algorithm.parameters == {**plain, "top": 7, "old": 0.01}
    monkeypatch.chdir("/")
    prepare(config.with_overrides({"tracking.enabled": False}))
    seen = load(config.algorithm.name).__globals__["seen"]
    assert seen == {**plain, "folder": tmp_path / "here", "top": 7, "old": 0.01}
    assert isinstance(seen["count"], int) and isinstance(seen["share"], float)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "algorithm.parameters.count: is required; set algorithm.parameters.count=VALUE"),
        (["count=1.5"], "algorithm.parameters.count=1.5: needs a whole number"),
        (["count=x"], "algorithm.parameters.count=x: needs a whole number"),
        (["count=1", "share=0"], "algorithm.parameters.share=0: needs a number > 0 and <= 1"),
        (["count=1", "deep=7"], "algorithm.parameters.deep=7: needs true or false"),
        (["count=1", "mode=c"], "algorithm.parameters.mode=c: no such option (options: a, b)"),
        (["count=1", "top=10"], "algorithm.parameters.top=10: needs a whole number <= 9, or null"),
        (["count=1", "old=.inf"], "algorithm.parameters.old=.inf: needs a finite number, or null"),
        (["count=1", "shar=1"], "algorithm.parameters.shar: no such key; did you mean algorithm.parameters.share?"),
        (["count=1", "share.x=1"], "algorithm.parameters.share={'x': 1}: needs a number > 0 and <= 1"),
    ],
)
def test_faulty_parameters_are_refused_like_any_key(tmp_path: Path, overrides: list[str], message: str) -> None:
    file = written(tmp_path, KINDS)
    parameters = dict(override.split("=") for override in overrides)
    if "share.x" in parameters:
        parameters = {"count": 1, "share": {"x": 1}}
    with pytest.raises(ConfigError) as caught:
        RunConfig(algorithm={"name": f"{file}:method", "parameters": parameters})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_faulty_parameters_are_refused_on_the_command_line_too(tmp_path: Path) -> None:
    base = [f"algorithm={written(tmp_path, KINDS)}:method", "algorithm.parameters.count=1"]
    assert refused(*base, "algorithm.parameters.share=0").startswith(
        "algorithm.parameters.share=0: needs a number > 0 and <= 1 (set on the command line)"
    )
    assert refused(*base, "algorithm.parameter.share=1").startswith(
        "algorithm.parameter.share: no such key; did you mean"
    )


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("optimizer, beta=0.9", "parameter beta of f has no type; write beta: float"),
        ("optimizer, beta: dict = None", "parameter beta of f has a type that no key can have; use float"),
        ("optimizer, **rest: float", "f takes *rest; name every parameter"),
        ("optimizer, beta: float = 0.9, /", "cannot be set by name"),
        ("optimizer, beta: Nowhere = 1", "the types of f cannot be read: NameError"),
    ],
)
def test_a_signature_without_a_schema_is_refused(tmp_path: Path, signature: str, words: str) -> None:
    file = written(tmp_path, f"from __future__ import annotations\ndef f({signature}): ...\n")
    with pytest.raises(ConfigError) as caught:
        RunConfig(algorithm=f"{file}:f")
    assert str(caught.value).startswith(f"algorithm.name={file}:f: "[:77]) and words in str(caught.value)


FEDAVG = """from fl_lightning.algorithms.fedavg import fedavg
def f(optimizer): return fedavg(optimizer)
"""


def test_settings_that_the_function_does_not_ask_for_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, FEDAVG + "def g(lr): ...\n")
    f = f"algorithm={file}:f"
    assert "algorithm.aggregate.server_lr=0.5: would be ignored: f takes no parameter server_lr" in refused(
        f, "algorithm.aggregate.server_lr=0.5"
    )
    assert "f takes no parameter prior" in refused(f, "algorithm.aggregate.weighting=uniform")
    assert "privacy.level=update: f takes no parameter protection" in refused(f, "privacy=update")
    assert "algorithm.local.weight_decay=0.1: would be ignored: g takes no parameter optimizer" in refused(
        f"algorithm={file}:g", "algorithm.local.weight_decay=0.1"
    )
    assert "algorithm.local.rho=0.1: would be ignored" in refused(f, "algorithm.local.rho=0.1")
    assert load_config([f, "algorithm.local.optimizer=adam", "algorithm.local.lr=1e-3"]).algorithm.local.lr == 1e-3
    for own, key in ((OWN_DATA, "data.root=x"), (OWN_MODEL, "model.norm=batch")):
        assert f"{key}: would be ignored with " in refused(own, key)
    assert refused("algorithm.parameters.x=1").startswith("algorithm.parameters: would be ignored with algorithm.name=")


# Faults of the file.


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("", "mine.py:f", "the file has no function f; it has none"),
        ("def fedavgg(): ...", "mine.py:fedavg", "the file has no function fedavg; did you mean fedavgg?"),
        ("f = 3", "mine.py:f", "f is of type int, it needs to be a function"),
        ("def f(:", "mine.py:f", "the file cannot be loaded in line 1: SyntaxError"),
        ("import nowhere_at_all", "mine.py:f", "the file cannot be loaded in line 1: ModuleNotFoundError: No module"),
        ("x = 1\nraise ValueError('no\\nway')", "mine.py:f", "the file cannot be loaded in line 2: ValueError: no way"),
        ("raise SystemExit(3)", "mine.py:f", "the file cannot be loaded in line 1: SystemExit: 3"),
        ("", "other.py:f", "/other.py cannot be read: No such file or directory; check the path"),
        ("", "mine.py", "needs the form FILE.py:FUNCTION, such as my_fedavg.py:my_fedavg"),
        ("", "mine.py:a b", "needs the form FILE.py:FUNCTION"),
    ],
)
@pytest.mark.parametrize("key", ["algorithm.name", "data.name", "model.kind"])
def test_what_is_wrong_with_a_file_is_told_in_one_line(
    tmp_path: Path, key: str, text: str, name: str, words: str
) -> None:
    written(tmp_path, text)
    section, tag = key.split(".")
    for given in (f"{tmp_path}/{name}", {tag: f"{tmp_path}/{name}"}):
        with pytest.raises(ConfigError) as caught:
            RunConfig(**{section: given})
        told = " ".join(str(caught.value).split())
        assert told.startswith(f"{key}={tmp_path}/{name}: "[:77]) and words in told


def test_the_command_line_tells_it_in_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fl_lightning.cli", "run", "algorithm=mine.py:f"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: algorithm.name=mine.py:f: {tmp_path}/mine.py cannot be read")
    assert not list(tmp_path.iterdir())


def test_a_changed_file_is_read_again_and_names_another_computation(tmp_path: Path) -> None:
    file = written(tmp_path, FEDAVG)
    config = load_config([f"algorithm={file}:f"])
    before = config.sha256
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(file, tmp_path / "elsewhere" / "same.py")
    assert load_config([f"algorithm={moved}:f"]).sha256 == before
    written(tmp_path, "def f(count: int): ...\n")
    assert config.sha256 != before
    assert "has changed since" in _run_fault(config)


def _run_fault(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    return str(caught.value)


# What the functions return.

RETURNS = """
from fl_lightning.algorithms.fedavg import fedavg
from torch import nn
def nothing(): ...
def fails(): return 1 / 0
def unprotected(optimizer, protection): return fedavg(optimizer)
def wide(): return nn.Linear(3, 10)
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))
def fixed(): return nn.Flatten()
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm={file}:nothing"], ":nothing: returns None, it needs to return an fl_lightning.Algorithm"),
        (["data={file}:nothing"], ":nothing: returns None, it needs to return an fl_lightning.data.ImageData"),
        (["model={file}:nothing"], ":nothing: returns None, it needs to return a torch.nn.Module"),
        (["algorithm={file}:fails"], ":fails: fails in line 5: ZeroDivisionError: division by zero"),
        (["algorithm={file}:unprotected", "privacy=sample"], "without the run's protection, so nothing would be acc"),
        (["model={file}:wide"], ":wide: cannot take images of 1x8x8: RuntimeError"),
        (["model={file}:narrow"], "for 2 images of 1x8x8 it gives [2, 7], it needs to give logits [2, 10]"),
        (["model={file}:fixed"], "returns a network without trainable parameters"),
        ([OWN_DATA, "data.parameters.second=3"], "my_data.py:two_digits: fails in line 19: ValueError: first and sec"),
        ([OWN_DATA, "model=alexnet"], "model.kind=alexnet: its strided convolution and 3 max-pools need images of at"),
    ],
)
def test_what_a_function_returns_is_checked(tmp_path: Path, overrides: list[str], words: str) -> None:
    file = written(tmp_path, RETURNS)
    assert words in " ".join(refused(*(override.format(file=file) for override in overrides)).split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("x_train=d.x_train.float()", "x_train is float32 [285, 1, 8, 8], it needs to be uint8 [N, C, H, W]"),
        ("x_test=d.x_test[:, 0]", "x_test is uint8 [72, 8, 8], it needs to be uint8 [N, C, H, W]"),
        ("x_test=d.x_test[:, :, :4]", "x_train has images [1, 8, 8] but x_test [1, 4, 8]"),
        ("y_train=d.y_train[1:]", "y_train is int64 [284], it needs to be int64 [285], one label per image"),
        ("y_test=d.y_test + 1", "y_test has labels 1 to 2, they need to be 0 to 1"),
        ("mean=(0.1, 0.2)", "mean is (0.1, 0.2), it needs 1 numbers"),
        ("std=(0.0,)", "std is (0.0,), it needs 1 numbers"),
        ("classes=('a',)", "num_classes is 2 with 1 names in classes"),
    ],
)
def test_a_data_set_that_breaks_a_rule_is_refused(tmp_path: Path, change: str, words: str) -> None:
    shutil.copy(EXAMPLES / "my_data.py", tmp_path)
    lines = ("from dataclasses import replace", "from my_data import two_digits", "def f():", "    d = two_digits()")
    file = written(tmp_path, "\n".join((*lines, f"    return replace(d, {change})")))
    with pytest.raises(DataError) as caught:
        prepare(RunConfig(data=f"{file}:f"))
    assert words in str(caught.value)


def test_a_private_algorithm_of_ones_own_is_accounted_and_a_leaky_one_is_not_private(tmp_path: Path) -> None:
    """Whoever passes the protection on, clips and noises is PRIVATE; whoever skips the uplink is not."""
    file = written(
        tmp_path,
        """
from dataclasses import replace
from fl_lightning.algorithms.dp_fedavg import dp_fedavg
def careful(optimizer, protection): return dp_fedavg(optimizer, protection=protection)
def leaky(optimizer, protection): return replace(dp_fedavg(optimizer, protection=protection), uplink=())
def raw(optimizer, protection):
    whole = dp_fedavg(optimizer, protection=protection)
    return replace(whole, solver=replace(whole.solver, transforms=()))
""",
    )
    update = ("privacy=update", "privacy.noise_multiplier=1", *QUICK)
    result = run(load_config([f"algorithm={file}:careful", *update]))
    assert result.badge == "PRIVATE" and result.final["epsilon"] > 0
    assert run(load_config([f"algorithm={file}:leaky", *update])).badge == "NOT PRIVATE"
    with pytest.raises(PrivacyError, match="put `private` first"):
        run(load_config([f"algorithm={file}:raw", "privacy=sample", *QUICK]))


def test_validating_a_shipped_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from fl_lightning.config import load_config; load_config(['algorithm=fedsam', 'model=resnet18']); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
