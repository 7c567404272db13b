"""The recipes in tune/cluster: files that are what their readers take, commands that this program takes.

No test machine has SLURM, Kubernetes or SSH. The launcher's file is checked by Ray's own schema and reading; slurm.sh
is run for real with small stand-ins for `srun` and `scontrol` that do on this machine what SLURM does on its nodes.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import descendants, hashes

from fl_lightning.config import load_ray, load_sweep, validate_space

RECIPES = Path(str(files("tune"))) / "cluster"

SRUN = """#!/bin/bash
# srun of one task: the node's name decides nothing but a line in a file, for all nodes are this machine.
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) node=${1#--nodelist=} ;; esac
  shift
done
[ "$1 $2" = "hostname --ip-address" ] && { echo 127.0.0.1; exit; }
echo "$node" >> "$SHIM_LOG"
mkdir -p "$SHIM_FOLDER/$node" && cd "$SHIM_FOLDER/$node"
exec "$@"
"""

SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a SLURM job of two nodes of one CPU."""
    shims = tmp_path / "bin"
    shims.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (shims / name).write_text(text)
        (shims / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return {
        **inherited,
        "PATH": f"{shims}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SHIM_LOG": str(tmp_path / "steps"),
        "SHIM_FOLDER": str(tmp_path / "nodes"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n1,n2",
        "SLURM_CPUS_PER_TASK": "1",
    }


def test_the_recipes_are_part_of_the_package() -> None:
    names = {file.name for file in RECIPES.iterdir()}
    assert {"README.md", "kuberay-rayjob.yaml", "ray-cluster.yaml", "slurm.sh"} <= names
    readme = (RECIPES / "README.md").read_text()
    assert all(name in readme for name in names - {"README.md"})


def test_the_launchers_file_is_what_ray_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import ray
    from ray.autoscaler._private.util import prepare_config

    content = yaml.safe_load((RECIPES / "ray-cluster.yaml").read_text())
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(content, json.loads(schema.read_text()))
    with pytest.raises(jsonschema.ValidationError, match="hed_start"):
        jsonschema.validate({**content, "hed_start_ray_commands": []}, json.loads(schema.read_text()))
    prepared = prepare_config(content)
    [kind] = prepared["available_node_types"].values()
    assert kind["min_workers"] == len(content["provider"]["worker_ips"]) == 2
    for commands in (content["head_start_ray_commands"], content["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1] and "ray start" in commands[-1]
        subprocess.run(["bash", "-n", "-c", commands[-1]], check=True)
    for command in content["setup_commands"]:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def documented(text: str) -> list[list[str]]:
    """The arguments of every `fl-lightning sweep` that a recipe's comments or a document show."""
    joined = text.replace("\\\n#", " ").replace("\\\n", " ")
    lines = re.findall(r"(?:fl-lightning sweep|sbatch tune/cluster/slurm\.sh) ((?:sweep=|--resume ).*)", joined)
    return [shlex.split(line.split("'")[0].split("`")[0].split('"')[0], comments=True) for line in lines]


def accepted(arguments: list[str]) -> None:
    """Reads the arguments as the command does; its data need not be here."""
    if "--resume" in arguments:
        load_ray([item for item in arguments if item.startswith("ray.")])
        return
    arguments = arguments[: arguments.index("--output")] if "--output" in arguments else arguments
    sweep, base = load_sweep(arguments)
    assert validate_space(base, sweep)


def test_the_job_for_kubernetes_has_what_the_operator_requires() -> None:
    job = yaml.safe_load((RECIPES / "kuberay-rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob") and job["metadata"]["name"]
    spec = job["spec"]
    shell = shlex.split(spec["entrypoint"])
    assert shell[:2] == ["bash", "-c"] and len(shell) == 3
    cluster = spec["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["groupName"] and workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] >= 2
    images = set()
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        images.add(container["image"])
        claims = {volume["name"] for volume in pod["volumes"] if volume["persistentVolumeClaim"]["claimName"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == claims and mounts["shared"] == "/shared"
    assert len(images) == 1, "one image for all, so that all run the same code"
    arguments = shell[2].partition("fl-lightning sweep ")[2].split()
    gpus = float(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    accepted(arguments)
    assert load_sweep(arguments[:-2])[0].resources.gpu <= gpus
    paths = [item.partition("=")[2] for item in arguments if item.startswith("data.root=")]
    assert paths and all(path.startswith("/shared/") for path in paths)


@pytest.mark.parametrize("name", ["slurm.sh", "ray-cluster.yaml", "kuberay-rayjob.yaml", "README.md", "clusters.md"])
def test_every_sweep_that_a_recipe_shows_is_one(name: str) -> None:
    file = RECIPES / name if name != "clusters.md" else Path(__file__).parent.parent / "docs" / name
    shown = documented(file.read_text())
    assert shown
    for arguments in shown:
        accepted(arguments)


def test_the_slurm_script_is_a_shell_script_that_asks_for_nodes() -> None:
    script = RECIPES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert "--no-kill" in asked and "--signal=B:TERM@120" in asked and "--ntasks-per-node=1" in asked


def test_without_the_program_the_slurm_script_ends_at_once(slurm: dict[str, str], tmp_path: Path) -> None:
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", str(RECIPES / "slurm.sh")], cwd=tmp_path, env={**slurm, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "set FL_VENV" in done.stderr


@pytest.mark.slow
def test_the_slurm_script_runs_a_sweep_on_both_nodes_and_leaves_nothing(slurm: dict[str, str], tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "space": {"algorithm": {"grid": ["fedavg", "scaffold"]}},
        "seeds": [1, 2],
        "overrides": ["data.subset=0.1", "fl.num_clients=3", "fl.rounds=2"],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    command = ["bash", str(RECIPES / "slurm.sh"), "sweep=mine.yaml", "tracking.log_model=false", "--output"]
    process = subprocess.Popen(
        [*command, "o.json"], cwd=tmp_path, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=400)
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, 9)
        process.kill()
    logs = "".join(file.read_text() for file in tmp_path.glob("fl-sweep-*.nodes/*.log"))
    assert process.returncode == 0, err + logs
    assert "waiting for 2 nodes" in out and (tmp_path / "steps").read_text().split() == ["n1", "n2"]
    assert hashes(tmp_path / "o.json")["status"] == "finished"
    assert len(hashes(tmp_path / "o.json")["trials"]) == 4
    mine = f"fl-ray-{slurm['SLURM_JOB_ID']}".encode()
    left = [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if mine in _read(entry)]
    assert left == [] and not Path(f"/tmp/{mine.decode()}").exists()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it has just ended
        return b""
