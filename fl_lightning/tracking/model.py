"""The final model of a run, in MLflow's own format: `mlflow.pytorch.load_model("runs:/RUN_ID/model")` gives it back.

The files are written here and not by `mlflow.pytorch.save_model`: importing `mlflow.pytorch` loads all of
pytorch_lightning, which takes 2 s of processor time and which training does not use.
"""

import io
import json
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.tracking.outbox import Item, write_files

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from torch import Tensor, nn

NAME = "model"
WEIGHTS_FILE = "weights.pt"
PICKLER = "mlflow.pytorch.pickle_module"  # what MLflow reads the file with: cloudpickle
EXAMPLE, SERVING_EXAMPLE = "input_example.json", "serving_input_example.json"


@dataclass
class FinalModel(Item):
    """A model to send: MLflow's logged model `models:/m-...` with the run as its source, which `runs:/` finds too.

    Attributes:
        experiment_id: of the run.
        files: below the model's folder, by name.
        inputs: element type and shape [-1, C, H, W] of a batch.
        outputs: element type and shape [-1, classes] of the logits.
        tags: of the logged model.
        step: the round after which it was taken.
    """

    experiment_id: str
    files: Mapping[str, bytes]
    inputs: tuple[str, Sequence[int]]
    outputs: tuple[str, Sequence[int]]
    tags: Mapping[str, str] = field(default_factory=dict)
    step: int = 0

    def send(self, client: "MlflowClient", run_id: str) -> None:
        """Makes the logged model, or goes on with the one that an earlier attempt has made."""
        condition = f"name = '{NAME}' AND source_run_id = '{run_id}'"
        found = client.search_logged_models([self.experiment_id], filter_string=condition)
        made = found[0] if found else None
        if made is not None and str(made.status) == "READY":
            return
        if made is None:
            tags = dict(self.tags)
            made = client.create_logged_model(self.experiment_id, name=NAME, source_run_id=run_id, tags=tags)
        outputs = client.get_run(run_id).outputs
        if made.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            from mlflow.entities import LoggedModelOutput

            client.log_outputs(run_id, [LoggedModelOutput(made.model_id, self.step)])
        with tempfile.TemporaryDirectory() as place:
            write_files(Path(place), {**self.files, "MLmodel": self._description(run_id, made.model_id)})
            client.log_model_artifacts(made.model_id, place)
        client.finalize_logged_model(made.model_id, "READY")

    def halves(self) -> tuple[Item, ...]:
        return ()

    def record(self) -> dict[str, Any]:
        return {"model": NAME, "tags": dict(self.tags)}

    def kept(self) -> dict[str, bytes]:
        whole = {**self.files, "MLmodel": self._description(None, None)}
        return {f"{NAME}/{name}": data for name, data in whole.items()}

    def _description(self, run_id: str | None, model_id: str | None) -> bytes:
        """The file MLmodel: how to load the model, what goes in and what comes out."""
        import numpy as np
        import torch
        from mlflow.models import Model, ModelSignature
        from mlflow.types import Schema, TensorSpec

        (input_type, input_shape), (output_type, output_shape) = self.inputs, self.outputs
        model = Model(
            run_id=run_id,
            model_id=model_id,
            signature=ModelSignature(
                Schema([TensorSpec(np.dtype(input_type), tuple(input_shape))]),
                Schema([TensorSpec(np.dtype(output_type), tuple(output_shape))]),
            ),
            saved_input_example_info={
                "artifact_path": EXAMPLE,
                "serving_input_path": SERVING_EXAMPLE,
                "type": "ndarray",
            },
            model_size_bytes=sum(map(len, self.files.values())),
        )
        model.add_flavor("pytorch", model_data="data", pytorch_version=str(torch.__version__), code=None)
        model.add_flavor(
            "python_function",
            loader_module="mlflow.pytorch",
            pickle_module_name=PICKLER,
            data="data",
            python_version=_python(),
            env={"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
            config={"device": None},
        )
        return bytes(model.to_yaml(), "utf-8")


def model_files(model: "nn.Module", example: "Tensor", own_code: Path | None = None) -> dict[str, bytes]:
    """The files of a model's folder but for MLmodel.

    Classes of this package are stored by name, so loading needs it installed. What a user's own files define is stored
    whole and can be loaded where those files are absent.

    Args:
        model: on the CPU, with parameters that share no memory.
        example: a batch of inputs [n, C, H, W].
        own_code: the folder of the user's own files.

    Raises:
        Exception: whatever stopped the pickling of a user's own model.
    """
    values = example.detach().cpu().tolist()
    needs = [f"mlflow=={_version('mlflow')}", f"torch=={_version('torch').split('+')[0]}"]
    needs += [f"cloudpickle=={_version('cloudpickle')}", f"fl-lightning=={_version('fl-lightning')}"]
    python, pip = _python(), f"pip=={_version('pip')}"
    conda = {"channels": ["conda-forge"], "dependencies": [f"python={python}", "pip", {"pip": needs}], "name": "mlflow"}
    environment = {"python": python, "build_dependencies": [pip], "dependencies": ["-r requirements.txt"]}
    texts = {
        "data/pickle_module_info.txt": PICKLER,
        "requirements.txt": "\n".join(needs) + "\n",
        "conda.yaml": yaml.safe_dump(conda, sort_keys=False),
        "python_env.yaml": yaml.safe_dump(environment, sort_keys=False),
        EXAMPLE: json.dumps(values),
        SERVING_EXAMPLE: json.dumps({"inputs": values}),
    }
    return {
        "data/model.pth": _pickled(model, own_code),
        WEIGHTS_FILE: weights_file(model.state_dict()),
        **{name: text.encode() for name, text in texts.items()},
    }


def weights_file(state: Mapping[str, Any]) -> bytes:
    """The tensors of a `state_dict`, for `torch.load(..., weights_only=True)`, which runs no code."""
    import torch

    buffer = io.BytesIO()
    torch.save({name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, buffer)
    return buffer.getvalue()


def _pickled(model: "nn.Module", own_code: Path | None) -> bytes:
    import cloudpickle
    import torch

    own = [module for module in list(sys.modules.values()) if own_code is not None and _lies_in(module, own_code)]
    registered = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in own if module.__name__ not in registered]
    buffer = io.BytesIO()
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        how = SimpleNamespace(__name__=PICKLER, Pickler=cloudpickle.CloudPickler, Unpickler=pickle.Unpickler)
        torch.save(model, buffer, pickle_module=how)
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def _lies_in(module: Any, folder: Path) -> bool:
    """Whether it is the user's: a file below the folder that neither belongs to this program nor was installed."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    if not isinstance(file, str) or name.split(".")[0] in ("fl_lightning", "tune", "__main__"):
        return False
    path = Path(file)
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))
