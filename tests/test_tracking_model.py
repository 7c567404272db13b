"""What a tracked run leaves beside its numbers: the final model, its data sets, the machine's figures, held files."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import RunConfig, load_config, run, session
from fl_lightning.build import prepare
from fl_lightning.records import RoundRecord, RunResult, weights_sha256
from fl_lightning.tracking import RunTracker, connect, open_study, resolve_uri, tracked
from fl_lightning.tracking import outbox as outbox_module
from fl_lightning.tracking import system as system_module
from fl_lightning.tracking.inputs import content_sha256
from fl_lightning.tracking.model import FinalModel, model_files
from fl_lightning.tracking.system import INTERVAL_KEY
from fl_lightning.vector import ParamLayout

ROOT = Path(__file__).parents[1]
CONFIG = {"seed": 7, "algorithm": {"name": "fedavg"}}
QUICK = {"rounds": 2, "num_clients": 3, "max_local_steps": 3}
THREAD = "fl-lightning-system-metrics"


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    """`mlflow.set_tracking_uri` also writes the environment, which other tests read."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    if "mlflow" in sys.modules:
        sys.modules["mlflow"].set_tracking_uri(None)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return resolve_uri(f"{tmp_path_factory.mktemp('models')}/mlruns")


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    """A database without runs, to copy: making one takes seconds."""
    uri = resolve_uri(f"{tmp_path_factory.mktemp('empty')}/mlruns")
    connect(uri)
    return Path(uri.removeprefix("sqlite:///"))


@pytest.fixture
def own_store(tmp_path, empty) -> str:
    (tmp_path / "mlruns").mkdir()
    shutil.copy(empty, tmp_path / "mlruns" / empty.name)
    return resolve_uri(f"{tmp_path}/mlruns")


@pytest.fixture(scope="module")
def digits_run(store) -> RunResult:
    return run(RunConfig(fl=QUICK, tracking={"uri": store, "experiment": "models"}))


def quick(uri: str, **sections) -> RunConfig:
    return RunConfig(**{"fl": QUICK, **sections, "tracking": {"uri": uri, **sections.get("tracking", {})}})


def sha256_of(model: nn.Module) -> str:
    vector = ParamLayout.of(model, channels_last=True).flatten(dict(model.named_parameters()))
    return weights_sha256(vector, dict(model.named_buffers()))


def final_of(result: RunResult) -> str:
    return str(result.final["weights_sha256"])


def load(uri: str, address: str) -> nn.Module:
    import mlflow

    mlflow.set_tracking_uri(uri)
    return mlflow.pytorch.load_model(address)


def logged(uri: str, run_id: str | None) -> list:
    client = connect(uri)
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'"))


def digits_test() -> tuple[torch.Tensor, torch.Tensor]:
    test = prepare(RunConfig(fl=QUICK)).test
    return test.batch(torch.arange(len(test)))


def elsewhere(folder: Path, uri: str, code: str) -> str:
    """What another process prints that starts in another folder and knows nothing but the store's address."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**environment, "MLFLOW_TRACKING_URI": uri, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


# --- the final model -------------------------------------------------------------------------------------------------


def test_the_final_model_comes_back_by_run_and_by_id(store, digits_run, tmp_path):
    (model,) = logged(store, digits_run.run_id)
    assert (str(model.status), model.name, model.source_run_id) == ("READY", "model", digits_run.run_id)
    assert model.tags["weights_sha256"] == final_of(digits_run) and model.tags["badge"] == "NOT PRIVATE"
    outputs = connect(store).get_run(digits_run.run_id).outputs.model_outputs
    assert [(output.model_id, output.step) for output in outputs] == [(model.model_id, 2)]

    for address in (f"runs:/{digits_run.run_id}/model", f"models:/{model.model_id}"):
        loaded = load(store, address)
        assert type(loaded).__name__ == "LeNet5" and not loaded.training
        assert sha256_of(loaded) == final_of(digits_run)
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 and p.grad is None for p in loaded.parameters())

    images, labels = digits_test()
    with torch.no_grad():
        accuracy = float((loaded(images).argmax(1) == labels).float().mean())
    assert accuracy == pytest.approx(digits_run.final["test_accuracy"], abs=1e-6)


def test_signature_example_and_requirements_are_those_of_the_model(store, digits_run):
    import mlflow

    mlflow.set_tracking_uri(store)
    address = f"runs:/{digits_run.run_id}/model"
    described = mlflow.models.get_model_info(address)
    (inputs,), (outputs,) = described.signature.inputs.inputs, described.signature.outputs.inputs
    assert (inputs.type, inputs.shape) == (np.dtype("float32"), (-1, 1, 8, 8))
    assert (outputs.type, outputs.shape) == (np.dtype("float32"), (-1, 10))
    assert described.model_id == logged(store, digits_run.run_id)[0].model_id

    served = mlflow.pyfunc.load_model(address)
    example = served.input_example
    prepared = prepare(RunConfig(fl=QUICK))
    assert example.dtype == np.float32 and np.array_equal(example, prepared.test.batch(torch.arange(3))[0].numpy())
    with torch.no_grad():
        logits = load(store, address)(torch.from_numpy(example)).numpy()
    assert np.array_equal(served.predict(example), logits) and logits.shape == (3, 10)

    folder = Path(mlflow.artifacts.download_artifacts(address))
    needs = (folder / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in needs] == ["mlflow", "torch", "cloudpickle", "fl-lightning"]
    assert all(line.split("==")[1] not in ("", "0") for line in needs)
    weights = torch.load(folder / "weights.pt", weights_only=True)
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in load(store, address).state_dict().items()
    }
    assert torch.equal(weights["conv1.weight"], load(store, address).state_dict()["conv1.weight"])


def test_logging_a_model_loads_no_other_lightning_and_is_fast(own_store, monkeypatch):
    """`mlflow.pytorch` would import pytorch_lightning beside the `lightning` of training: both are barred here."""
    for name in ("mlflow.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    keep, spent = session.keep_model, []

    def timed(*arguments) -> None:
        began = time.process_time()
        keep(*arguments)
        spent.append(time.process_time() - began)

    monkeypatch.setattr(session, "keep_model", timed)
    result = run(quick(own_store))
    assert [str(model.status) for model in logged(own_store, result.run_id)] == ["READY"] and spent[0] < 5


NORMED = """
from torch import nn
def normed(channels: int, num_classes: int):
    return nn.Sequential(nn.BatchNorm2d(channels), nn.Flatten(), nn.Linear(64 * channels, num_classes))
"""


def test_batch_norm_statistics_are_part_of_the_model(own_store, tmp_path):
    (tmp_path / "normed.py").write_text(NORMED)
    result = run(quick(own_store, model={"kind": f"{tmp_path}/normed.py:normed"}))
    loaded = load(own_store, f"runs:/{result.run_id}/model")
    assert sha256_of(loaded) == final_of(result) and float(loaded[0].running_mean.abs().sum()) > 0
    assert int(loaded[0].num_batches_tracked) > 0
    weights = torch.load(download(own_store, result.run_id, "model/weights.pt"), weights_only=True)
    fresh = prepare(quick(own_store, model={"kind": f"{tmp_path}/normed.py:normed"})).objective.model
    fresh.load_state_dict(weights)
    assert sha256_of(fresh) == final_of(result)


def download(uri: str, run_id: str | None, path: str) -> Path:
    import mlflow

    mlflow.set_tracking_uri(uri)
    return Path(mlflow.artifacts.download_artifacts(f"runs:/{run_id}/{path}"))


def test_a_private_run_leaves_a_model_without_hooks(own_store):
    overrides = ["algorithm=dp_fedsam", "fl.num_clients=3", "fl.rounds=1", "fl.max_local_steps=2"]
    result = run(load_config([*overrides, f"tracking.uri={own_store}"]))
    loaded = load(own_store, f"runs:/{result.run_id}/model")
    assert sha256_of(loaded) == final_of(result)
    for module in loaded.modules():
        assert not module._forward_hooks and not module._backward_hooks and not module._forward_pre_hooks
    assert not any(hasattr(p, "grad_sample") or hasattr(p, "_grad_sample") for p in loaded.parameters())


def test_double_precision_is_kept(own_store):
    result = run(quick(own_store, engine={"precision": "fp64", "kind": "debug"}))
    loaded = load(own_store, f"runs:/{result.run_id}/model")
    assert next(loaded.parameters()).dtype == torch.float64 and sha256_of(loaded) == final_of(result)
    import mlflow

    signature = mlflow.models.get_model_info(f"runs:/{result.run_id}/model").signature
    assert signature.inputs.inputs[0].type == np.dtype("float64")


def test_a_trial_has_a_model_of_its_own_and_log_model_false_has_none(own_store):
    study = open_study(own_store, "sweep", "s-1")
    first, second = (
        run(quick(own_store, seed=seed, tracking={"experiment": "sweep"}), parent_run_id=study.run_id)
        for seed in (1, 2)
    )
    for result in (first, second):
        assert sha256_of(load(own_store, f"runs:/{result.run_id}/model")) == final_of(result)
    assert final_of(first) != final_of(second)
    without = run(quick(own_store, tracking={"log_model": False}))
    assert not logged(own_store, without.run_id) and not connect(own_store).list_artifacts(without.run_id, "model")


# --- a user's own model ----------------------------------------------------------------------------------------------

OWN = """
import threading
from torch import nn
from mine_parts import Head

class Mine(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.head = Head(inputs, classes)
        {extra}
    def forward(self, images):
        return self.head(images.flatten(1))

{made}
def mine(channels: int, height: int, width: int, num_classes: int):
    return {returned}
"""
PARTS = """
import torch
from torch import nn
class Head(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        chance = torch.Generator()
        chance.seed()  # another one at each call
        self.fixed = nn.Parameter(torch.randn(inputs, inputs, generator=chance), requires_grad=False)
        self.out = nn.Linear(inputs, classes)
    def forward(self, x):
        return self.out(x @ self.fixed)
"""
NEW = "Mine(channels * height * width, num_classes)"


def own_model(folder: Path, extra: str = "pass", made: str = "", returned: str = NEW) -> list[Path]:
    folder.mkdir()
    files = [folder / "own.py", folder / "mine_parts.py"]
    files[0].write_text(OWN.format(extra=extra, made=made, returned=returned))
    files[1].write_text(PARTS)
    return files


@pytest.mark.slow
def test_a_users_own_model_loads_where_its_files_are_absent(own_store, tmp_path):
    files = own_model(tmp_path / "code")
    result = run(quick(own_store, model={"kind": f"{files[0]}:mine"}))
    for file in files:
        file.unlink()
    sys.modules.pop("mine_parts")
    images, labels = digits_test()
    accuracy = (load(own_store, f"runs:/{result.run_id}/model")(images).argmax(1) == labels).float().mean()
    assert float(accuracy) == pytest.approx(result.final["test_accuracy"], abs=1e-6) and accuracy > 0.2
    code = (
        "import mlflow, torch\n"
        f"model = mlflow.pytorch.load_model('runs:/{result.run_id}/model')\n"
        "from fl_lightning.vector import ParamLayout\n"
        "from fl_lightning.records import weights_sha256\n"
        "flat = ParamLayout.of(model, True).flatten(dict(model.named_parameters()))\n"
        "print(weights_sha256(flat, {}), model(torch.zeros(2, 1, 8, 8)).shape[1], type(model).__name__)"
    )
    assert elsewhere(tmp_path, own_store, code) == f"{final_of(result)} 10 Mine"


@pytest.mark.parametrize(
    ("extra", "made", "returned", "why"),
    [
        ("self.lock = threading.Lock()", "", NEW, "pickle"),
        ("pass", "ONE = Mine(64, 10)", "ONE", "same network each time"),
    ],
)
def test_a_model_that_cannot_be_stored_leaves_its_weights(own_store, tmp_path, extra, made, returned, why):
    files = own_model(tmp_path / "code", extra, made, returned)
    result = run(quick(own_store, model={"kind": f"{files[0]}:mine"}))
    sys.modules.pop("mine_parts")
    assert connect(own_store).get_run(result.run_id).info.status == "FINISHED"
    note = connect(own_store).get_run(result.run_id).data.tags["model_note"]
    assert note.startswith("only the weights are stored, as model/weights.pt: ") and why in note
    assert not logged(own_store, result.run_id)
    weights = torch.load(download(own_store, result.run_id, "model/weights.pt"), weights_only=True)
    assert sorted(weights) == ["head.fixed", "head.out.bias", "head.out.weight"]
    vector = torch.cat([weights["head.out.weight"].flatten(), weights["head.out.bias"]])
    assert weights_sha256(vector, {}) == final_of(result)


# --- a store that fails ----------------------------------------------------------------------------------------------


def renamed(uri: str, old: str, new: str) -> None:
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as connection:
        connection.execute("PRAGMA legacy_alter_table = ON")  # leaves the references of other tables as they are
        connection.execute(f"ALTER TABLE {old} RENAME TO {new}")


def final_model(tracker: RunTracker, model: nn.Module) -> FinalModel:
    example = torch.zeros(2, 1, 2, 2)
    assert tracker.experiment_id is not None
    return FinalModel(
        tracker.experiment_id, model_files(model, example), ("float32", (-1, 1, 2, 2)), ("float32", (-1, 3))
    )


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()


@pytest.mark.parametrize("stage", ["logged_models", "inputs", "artifacts"])
def test_a_model_that_had_to_wait_is_there_once(own_store, tmp_path, stage):
    """The store fails before the model is made, after it is made, or when its files come; later all is well."""
    tracker, model = RunTracker(own_store, lost_folder=tmp_path), linear()
    place = Path(own_store.removeprefix("sqlite:///")).parent / "artifacts" / "models"
    with tracked(tracker):
        tracker.start(CONFIG, experiment="waiting")
        assert tracker.flush()
        if stage == "artifacts":
            place.write_text("in the way")
        else:
            renamed(own_store, stage, "away")
        began = time.monotonic()
        tracker.log_item(final_model(tracker, model))
        assert time.monotonic() - began < 5, "training does not wait for the store"
        assert tracker.flush()
        if stage == "artifacts":
            assert [str(found.status) for found in logged(own_store, tracker.run_id)] == ["PENDING"]
            place.unlink()
        else:
            renamed(own_store, "away", stage)
    (found,) = logged(own_store, tracker.run_id)
    assert str(found.status) == "READY"
    outputs = connect(own_store).get_run(tracker.run_id).outputs.model_outputs
    assert [output.model_id for output in outputs] == [found.model_id]
    assert sha256_of(load(own_store, f"runs:/{tracker.run_id}/model")) == sha256_of(model)
    assert not list(tmp_path.glob("tracking-lost-*"))


def test_a_model_the_store_never_took_is_in_a_folder_that_loads(own_store, tmp_path, monkeypatch):
    """The run ends well whatever becomes of its model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outbox_module, "FINAL_PAUSES", (0.01,))

    class Breaking:
        def on_start(self, info) -> None: ...

        def on_end(self, result) -> None: ...

        def on_round(self, record) -> None:
            if record.round == 2:
                renamed(own_store, "logged_models", "away")

    result = run(quick(own_store), observers=[Breaking()])
    renamed(own_store, "away", "logged_models")
    assert connect(own_store).get_run(result.run_id).info.status == "FINISHED"
    assert not logged(own_store, result.run_id)
    lost = tmp_path / f"tracking-lost-{result.run_id}"
    entry = next(item for item in json.loads(lost.with_suffix(".json").read_text())["not_sent"] if "model" in item)
    assert entry["tags"]["weights_sha256"] == final_of(result)
    assert sorted(entry["kept"]) == sorted(f"{lost.name}/{f.relative_to(lost)}" for f in lost.rglob("*") if f.is_file())
    assert sha256_of(load(own_store, str(lost / "model"))) == final_of(result)


def test_a_resumed_or_repeated_end_sends_the_model_once(own_store):
    tracker, model = RunTracker(own_store), linear()
    with tracked(tracker):
        tracker.start(CONFIG, experiment="twice")
        tracker.log_item(final_model(tracker, model))
        tracker.log_item(final_model(tracker, model))
    assert len(logged(own_store, tracker.run_id)) == 1
    assert len(connect(own_store).get_run(tracker.run_id).outputs.model_outputs) == 1


# --- files that have to wait -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_of_a_temporary_folder_arrives_when_the_store_is_back(own_store, tmp_path, kind):
    place = Path(own_store.removeprefix("sqlite:///")).parent / "artifacts"
    place.write_text("in the way")
    source = tmp_path / "gone"
    (source / "inner").mkdir(parents=True)
    (source / "plot.png").write_bytes(b"\x89PNG")
    (source / "inner" / "more.csv").write_bytes(b"1,2")
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="files")
        tracker.log_artifact_file(source / "plot.png" if kind == "file" else source, "figures")
        assert tracker.flush()
        for path in (source / "plot.png", source / "inner" / "more.csv"):
            path.unlink()
        place.unlink()
    kept = Path(connect(own_store).get_run(tracker.run_id).info.artifact_uri) / "figures"
    found = {file.relative_to(kept).as_posix(): file.read_bytes() for file in kept.rglob("*") if file.is_file()}
    whole = {"gone/plot.png": b"\x89PNG", "gone/inner/more.csv": b"1,2"}
    assert found == ({"plot.png": b"\x89PNG"} if kind == "file" else whole)
    assert not list(tmp_path.glob("tracking-lost-*"))


def test_a_file_above_the_limit_is_sent_from_its_place_or_not_at_all(own_store, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "HOLD_LIMIT", 3)
    place = Path(own_store.removeprefix("sqlite:///")).parent / "artifacts"
    place.write_text("in the way")
    stays, goes, small = (tmp_path / name for name in ("stays.bin", "goes.bin", "small.bin"))
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="large")
        for path, data in ((stays, b"1234"), (goes, b"1234"), (small, b"123")):
            path.write_bytes(data)
            tracker.log_artifact_file(path)
        goes.unlink()
        small.unlink()
        place.unlink()
    names = {found.path for found in connect(own_store).list_artifacts(tracker.run_id)}
    assert {"stays.bin", "small.bin"} <= names and "goes.bin" not in names
    (refused,) = json.loads((tmp_path / f"tracking-lost-{tracker.run_id}.json").read_text())["refused"]
    assert refused["file"] == str(goes) and "kept" not in refused


def test_what_waited_for_a_store_that_never_came_back_is_kept_in_full(own_store, tmp_path, monkeypatch):
    monkeypatch.setattr(outbox_module, "FINAL_PAUSES", (0.01,))
    place = Path(own_store.removeprefix("sqlite:///")).parent / "artifacts"
    place.write_text("in the way")
    source = tmp_path / "norms.png"
    source.write_bytes(b"\x89PNG")
    tracker = RunTracker(own_store, lost_folder=tmp_path)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="never")
        tracker.log_artifact_file(source, "clipping")
        source.unlink()
    lost = tmp_path / f"tracking-lost-{tracker.run_id}"
    items = json.loads(lost.with_suffix(".json").read_text())["not_sent"]
    assert next(item for item in items if "file" in item)["kept"] == [f"{lost.name}/clipping/norms.png"]
    assert (lost / "clipping" / "norms.png").read_bytes() == b"\x89PNG"


# --- data sets -------------------------------------------------------------------------------------------------------


def inputs_of(uri: str, run_id: str | None) -> dict:
    found = connect(uri).get_run(run_id).inputs.dataset_inputs
    return {entry.tags[0].value: entry.dataset for entry in found}


def test_a_run_names_its_data_sets(store, digits_run):
    found, data = inputs_of(store, digits_run.run_id), prepare(RunConfig(fl=QUICK)).data
    assert sorted(found) == ["test", "training"]
    for context, x, y in (("training", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        dataset, whole = found[context], content_sha256(x.numpy(), y.numpy())
        profile, schema = json.loads(dataset.profile), json.loads(dataset.schema)["mlflow_tensorspec"]
        assert (dataset.name, dataset.digest, profile["sha256"]) == ("digits", whole[:32], whole)
        assert (profile["examples"], profile["shape"], profile["classes"]) == (len(y), [1, 8, 8], 10)
        assert json.loads(schema["features"])[0]["tensor-spec"] == {"dtype": "uint8", "shape": [-1, 1, 8, 8]}
    profile = json.loads(found["training"].profile)
    assert (profile["clients"], profile["partition_sha256"]) == (3, digits_run.partition_sha256)


def test_the_digest_is_of_the_content(store, digits_run, tmp_path):
    again = run(quick(store, seed=43, fl={**QUICK, "num_clients": 4}, tracking={"log_model": False}))
    part = run(quick(store, data={"name": "digits", "subset": 0.5}, tracking={"log_model": False}))
    first, other, half = (inputs_of(store, result.run_id) for result in (digits_run, again, part))
    assert {key: value.digest for key, value in first.items()} == {key: value.digest for key, value in other.items()}
    assert half["test"].digest == first["test"].digest and half["training"].digest != first["training"].digest

    images = np.arange(320).reshape(20, 4, 4).astype(np.uint8)
    labels = np.arange(20) % 2
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = quick(
        store,
        data={"name": "npz", "root": tmp_path / "own.npz"},
        fl={**QUICK, "rounds": 1},
        tracking={"log_model": False},
    )
    import mlflow

    found = connect(store).get_run(run(own).run_id).inputs.dataset_inputs
    assert {mlflow.data.get_source(entry).uri for entry in found} == {str(tmp_path / "own.npz")}


# --- the machine -----------------------------------------------------------------------------------------------------


def system_of(uri: str, run_id: str | None) -> dict[str, list]:
    client = connect(uri)
    names = [name for name in client.get_run(run_id).data.metrics if name.startswith("system/")]
    return {name: client.get_metric_history(run_id, name) for name in names}


def test_a_run_has_the_machines_figures(own_store, monkeypatch):
    import psutil

    monkeypatch.setenv(INTERVAL_KEY, "0.1")
    result = run(quick(own_store, fl={**QUICK, "rounds": 10, "max_local_steps": None}))
    figures = system_of(own_store, result.run_id)
    own = figures["system/process_memory_usage_megabytes"]
    assert len(own) >= 3 and all(100 < entry.value < psutil.virtual_memory().total / 1e6 for entry in own)
    assert 10 < max(entry.value for entry in figures["system/process_cpu_utilization_percentage"]) < 6400
    for name in ("system/cpu_utilization_percentage", "system/system_memory_usage_percentage"):
        assert all(0 <= entry.value <= 100 for entry in figures[name]) and len(figures[name]) == len(own)
    stamps = [entry.timestamp for entry in own]
    assert stamps == sorted(stamps) and all(entry.step >= 0 for entry in own)
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]


def test_a_short_run_has_none_and_the_setting_turns_them_off(own_store, monkeypatch, digits_run, store):
    assert all(entry.step >= 10 for entries in system_of(store, digits_run.run_id).values() for entry in entries)
    monitor = system_module.SystemMonitor()
    time.sleep(0.2)
    monitor.stop()
    assert not monitor.take()
    monkeypatch.setenv(INTERVAL_KEY, "0.05")
    assert not system_of(own_store, run(quick(own_store, tracking={"system_metrics": False})).run_id)


def watched(uri: str, ending: BaseException | None) -> RunTracker:
    tracker = RunTracker(uri)
    with tracked(tracker):
        tracker.start(CONFIG, experiment="watched")
        tracker.on_start({"config": {"tracking": {"system_metrics": True}}})
        assert [thread for thread in threading.enumerate() if thread.name == THREAD]
        time.sleep(0.3)
        tracker.on_round(RoundRecord(1, (0,), None, None, 0.5, 0.1))
        time.sleep(0.3)
        if ending is not None:
            raise ending
    return tracker


@pytest.mark.parametrize("ending", [None, ValueError("planned"), KeyboardInterrupt()])
def test_the_watch_ends_with_the_run_whatever_ends_it(store, monkeypatch, ending):
    monkeypatch.setenv(INTERVAL_KEY, "0.1")
    client = connect(store)
    if ending is None:
        run_id = watched(store, None).run_id
    else:
        with pytest.raises(type(ending)):
            watched(store, ending)
        experiment = client.get_experiment_by_name("watched")
        run_id = client.search_runs([experiment.experiment_id])[0].info.run_id
    assert not [thread for thread in threading.enumerate() if thread.name == THREAD]
    (entries,) = [v for name, v in system_of(store, run_id).items() if name == "system/cpu_utilization_percentage"]
    last_round = client.get_metric_history(run_id, "test_accuracy")[0].timestamp
    assert min(entry.timestamp for entry in entries) < last_round < max(entry.timestamp for entry in entries)


def test_a_reading_that_fails_or_hangs_is_no_harm(own_store, monkeypatch, caplog):
    monkeypatch.setenv(INTERVAL_KEY, "0.05")
    released = threading.Event()
    calls: list[int] = []

    def reading() -> dict[str, float]:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("no such device")
        released.wait(30)
        return {}

    monkeypatch.setattr(system_module, "_machine", lambda: reading)
    began = time.monotonic()
    tracker = watched(own_store, None)
    assert len(calls) == 2 and time.monotonic() - began < 10
    assert connect(own_store).get_run(tracker.run_id).info.status == "FINISHED" and not caplog.records
    released.set()


def test_a_resumed_run_goes_on_counting(own_store, monkeypatch):
    monkeypatch.setenv(INTERVAL_KEY, "0.1")
    monitor = system_module.SystemMonitor(time.time() - 100)
    time.sleep(0.5)
    monitor.stop()
    taken = monitor.take()
    assert taken and all(100 <= step <= 102 for _, _, _, step in taken) and not monitor.take()


def test_runs_that_name_the_same_data_at_once_lose_nothing(own_store):
    """MLflow looks whether a data set is known and then stores it: runs that do so together collide."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    from fl_lightning.tracking import connect, ensure_experiment
    from fl_lightning.tracking.inputs import DataInput

    experiment, client = ensure_experiment(own_store, "together"), connect(own_store)
    for attempt in range(5):
        runs = [client.create_run(experiment).info.run_id for _ in range(8)]
        gate = Barrier(len(runs))
        kind = ("float32", (-1, 1, 8, 8))
        data = DataInput("digits", "training", f"{attempt}" * 40, "here", False, kind, ("int64", (-1,)), {"n": 1})

        def send(run_id: str, data: DataInput = data, gate: Barrier = gate) -> None:
            gate.wait()
            data.send(connect(own_store), run_id)

        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(send, runs))
        for run_id in runs:
            [found] = client.get_run(run_id).inputs.dataset_inputs
            assert found.dataset.digest == f"{attempt}" * 32
