"""Examples that clients hold out of training: what is chosen, that nothing ever learns from them, what is measured."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import digits
from test_resume import killed, what_counts

from fl_lightning import ConfigError, RunConfig, RunResult, load_config, run
from fl_lightning.analysis.compare import compare_runs
from fl_lightning.build import prepare
from fl_lightning.data import save_manifest
from fl_lightning.data.validation import split_off
from fl_lightning.foreseen import foresee
from fl_lightning.foresight import assumed_sizes, foresight
from fl_lightning.privacy.statement import VALIDATED
from fl_lightning.records import ServerState
from fl_lightning.session import resume
from fl_lightning.terminal import closing, round_text
from fl_lightning.tracking import connect, read_json
from fl_lightning.tracking.inputs import content_sha256

FL = {"num_clients": 4, "rounds": 2, "batch_size": 16}
QUIET = {"enabled": False}


def config(share: float | None = 0.25, **more: Any) -> RunConfig:
    data = {"name": "digits", "subset": 0.2, "validation": share} | more.pop("data", {})
    fl = FL | more.pop("fl", {})
    return RunConfig(**{"data": data, "fl": fl, "tracking": QUIET, **more})


# --- what is held out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "shards"])
def test_every_client_holds_out_its_share_of_its_own_examples(partition: str) -> None:
    whole, split = (prepare(config(share, partition=partition)).partition for share in (None, 0.25))
    for all_of_it, trained, held in zip(whole.indices, split.indices, split.held, strict=True):
        assert torch.equal(torch.cat([trained, held]).sort().values, all_of_it)  # disjoint, and nothing is lost
        assert torch.equal(trained.sort().values, trained) and torch.equal(held.sort().values, held)
        # a binomial number: five of its standard deviations
        assert abs(len(held) - len(all_of_it) / 4) <= 5 * (len(all_of_it) * 0.25 * 0.75) ** 0.5
    assert split.sha256 != whole.sha256 and int(split.sizes.sum()) == sum(len(part) for part in split.indices)
    assert len(split.held_out) == sum(map(len, split.held)) and not whole.held and len(whole.held_out) == 0
    assert abs(len(split.held_out) / int(whole.sizes.sum()) - 0.25) < 0.1


def test_one_example_more_changes_nothing_for_the_others(tmp_path: Path) -> None:
    """Neighbouring data sets stay neighbours: otherwise the sensitivity of sample-level releases would be wrong."""
    for client in range(3):
        lists = [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
        found = []
        for more in ([], [40]):
            dealt = [[*own, *more] if number == client else own for number, own in enumerate(lists)]
            file = tmp_path / f"{client}{len(more)}.json"
            file.write_text(json.dumps(dealt))
            partition = {"kind": "file", "path": file}
            some = {"data": {"subset": 1.0}, "partition": partition, "fl": {"num_clients": 3}}
            found.append(prepare(config(0.5, **some)).partition)
        before, after = ([set(part.tolist()) for part in one.indices] for one in found)
        assert all(own <= more and more - own <= {40} for own, more in zip(before, after, strict=True))


def test_the_choice_follows_from_the_seed_alone_and_shares_are_nested() -> None:
    first, again, other = (prepare(config(seed=seed)).partition for seed in (1, 1, 2))
    assert first.sha256 == again.sha256 and torch.equal(first.held_out, again.held_out)
    assert not torch.equal(first.held_out, other.held_out)
    whole = prepare(config(None)).partition  # whatever the seed: the same lists
    labels = prepare(config(None)).data.y_train
    one, two = (split_off(whole, labels, 0.25, seed) for seed in (1, 2))
    assert not torch.equal(one.held_out, two.held_out)
    less = prepare(config(0.1, seed=1)).partition
    for few, many in zip(less.held, first.held, strict=True):
        assert 0 < len(few) < len(many) and set(few.tolist()) < set(many.tolist())


def test_clients_with_few_examples_may_hold_out_none_and_where_none_would_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps([[0], [1], [2]]))
    partition = {"kind": "file", "path": tmp_path / "split.json"}
    some = {"data": {"subset": 1.0}, "partition": partition, "fl": {"num_clients": 3}}
    with pytest.raises(ConfigError, match=r"data\.validation=0\.001: of 3 examples none is held out; raise it"):
        prepare(config(0.001, **some))
    with pytest.raises(ConfigError, match=r"data\.validation=0\.999: of 3 examples none is left to train on; lower it"):
        prepare(config(0.999, **some))
    for share, said in ((1.0, "< 1"), (-0.1, ">= 0"), ("much", "a number")):
        with pytest.raises(ConfigError, match=rf"data\.validation={share}: .*{said}"):
            config(share)


def test_a_client_may_hold_out_all_it_has(tmp_path: Path) -> None:
    """It trains on nothing, weighs nothing, and leaves no NaN in the manifest."""
    (tmp_path / "split.json").write_text(json.dumps([list(range(60)), list(range(60, 120)), [130], [131], [132]]))
    partition = {"kind": "file", "path": tmp_path / "split.json"}
    some = {"data": {"subset": 1.0}, "partition": partition, "fl": {"num_clients": 5, "rounds": 1}, "seed": 1}
    split = prepare(config(0.4, **some)).partition
    assert split.sizes.tolist()[2:] == [0, 0, 0] and min(split.sizes.tolist()[:2]) > 20
    kept = json.loads(save_manifest(split, tmp_path)[0].read_text(), parse_constant=pytest.fail)
    numbers = kept["heterogeneity"]
    assert numbers["emd"][2:] == [None] * 3 == numbers["label_entropy"][2:]
    assert numbers["mean_emd"] == pytest.approx(sum(numbers["emd"][:2]) / 2)
    for more in ({}, {"algorithm": "dp_fedsam"}, {"algorithm": "sam_adpfl"}):
        result = run(config(0.4, **some, **more))
        assert result.final["epsilon"] == (foresight(config(0.4, **some, **more)).get("epsilon") if more else None)


def test_nothing_held_out_is_the_run_of_before() -> None:
    assert config(None).sha256 == config(0.0).sha256 != config().sha256
    none, zero = run(config(None)), run(config(0.0))
    assert what_counts(none) == what_counts(zero)
    assert none.final["validation_accuracy"] is None and none.rounds[0].validation_loss is None


# --- nothing learns from them ----------------------------------------------------------------------------------------

LEARNERS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {"algorithm": "scaffold"},
    "moon": {"algorithm": "moon"},
    "fedlaw": {"algorithm": {"name": "fedlaw", "aggregate": {"proxy_epochs": 2, "proxy_share": 0.1}}},
    "ce_fedavg": {"algorithm": "ce_fedavg", "fl": {"clipping_lab": True}},
    "dp_fedsam": {"algorithm": "dp_fedsam"},
    "sam_adpfl": {"algorithm": "sam_adpfl"},
    "update": {"algorithm": "dp_fedavg", "privacy": {"level": "update", "clip_bound": "quantile"}},
}


def own_digits(file: Path, spoilt: torch.Tensor | None = None, labels: bool = True) -> dict[str, Any]:
    """A fifth of the digits as a file; those among `spoilt` are turned to negatives and, with `labels`, misnamed."""
    images, targets = (part[:360].numpy().copy() for part in digits())
    test_images, test_targets = (part[360:500].numpy() for part in digits())
    if spoilt is not None:
        chosen = (images[:, None] == spoilt.numpy()[None]).all(axis=(2, 3, 4)).any(axis=1)
        assert chosen.sum() == len(spoilt)
        images[chosen] = 255 - images[chosen]
        targets[chosen] = (targets[chosen] + labels) % 10
    np.savez(file, x_train=images, y_train=targets, x_test=test_images, y_test=test_targets)
    return {"name": "npz", "root": file, "subset": 1.0}


def learnt(result: RunResult) -> list[Any]:
    """All that a run computes but for what it measures on held-out examples."""
    rounds = what_counts(result)["rounds"]
    kept = [{key: value for key, value in record.items() if "validation" not in key} for record in rounds]
    return [result.final["weights_sha256"], result.final["privacy"], result.final.get("clip"), kept]


@pytest.mark.parametrize("name", LEARNERS)
def test_no_algorithm_learns_from_held_out_examples(name: str, tmp_path: Path) -> None:
    """Spoilt, they change what is measured on them and not one bit of anything else."""
    whole = own_digits(tmp_path / "whole.npz")
    prepared = prepare(config(data=whole, **LEARNERS[name]))
    images, partition = prepared.data.x_train, prepared.partition
    labels = name != "fedlaw"  # whose proxy set is chosen by the labels of all
    spoilt = own_digits(tmp_path / "spoilt.npz", images[partition.held_out], labels)
    sound, other = (run(config(data=data, **LEARNERS[name])) for data in (whole, spoilt))
    assert learnt(sound) == learnt(other)
    assert sound.final["validation_loss"] != other.final["validation_loss"]
    if name == "fedavg":  # the check can fail: one example that is trained on
        moved = own_digits(tmp_path / "moved.npz", images[partition.indices[0][:1]])
        assert learnt(run(config(data=moved))) != learnt(sound)


def test_the_account_is_for_the_examples_that_are_trained_on(tmp_path: Path) -> None:
    """n_k and the rate q = B / n_k are those of the training lists; the ledger foreseen is the ledger recorded."""
    tracking = {"uri": f"sqlite:///{tmp_path}/mlflow.db"}
    split = config(algorithm="dp_fedavg", privacy={"noise_multiplier": 1.0}, tracking=tracking)
    whole = config(None, algorithm="dp_fedavg", privacy={"noise_multiplier": 1.0})
    result, seen = run(split), foresee(split)
    assert read_json(tracking["uri"], str(result.run_id), "privacy/ledger.json") == seen.ledger.to_dict()
    sizes = prepare(split).partition.sizes.tolist()
    assert seen.sizes == sizes and sum(sizes) == 288 - len(prepare(split).partition.held_out) < 288
    facts = result.final["privacy"]
    assert facts["n"] in sizes and facts["releases"][0]["rate"] == 16 / facts["n"]
    assert facts["epsilon"] > foresight(whole)["epsilon"]  # fewer examples, each drawn more often
    client = {"algorithm": "dp_fedavg", "privacy": {"level": "update", "noise_multiplier": 1.0}}
    assert foresight(config(**client))["epsilon"] == foresight(config(None, **client))["epsilon"]


def test_a_plan_without_the_files_counts_the_examples_left(tmp_path: Path) -> None:
    absent = ["data=mnist", f"data.root={tmp_path}", "fl.num_clients=7", "algorithm=dp_fedavg"]
    whole, split = (assumed_sizes(load_config([*absent, *more])) for more in ([], ["data.validation=0.1"]))
    assert whole is not None and split == [n - n // 10 for n in whole]
    found = foresight(load_config([*absent, "data.validation=0.1"]))
    assert found["examples"] == {"min": min(split), "max": max(split)} and VALIDATED in found["warnings"]


# --- what is measured ------------------------------------------------------------------------------------------------


def test_the_servers_model_is_measured_on_the_union_wherever_it_is_tested() -> None:
    result = run(config(fl={"eval_every": 2, "rounds": 3}))
    assert [record.validation_accuracy is None for record in result.rounds] == [True, False, False]
    assert [record.test_accuracy is None for record in result.rounds] == [True, False, False]
    last = result.rounds[-1]
    assert result.final["validation_accuracy"] == last.validation_accuracy
    assert result.final["validation_loss"] == last.validation_loss
    prepared = prepare(config())
    x, y = prepared.side.store.batch(prepared.partition.held_out)
    w = prepared.objective.initial
    loss, accuracy = prepared.validate(ServerState(w, prepared.objective.buffers())) or (math.nan, math.nan)
    with torch.no_grad():
        logits = prepared.objective.model.eval()(x)
    assert accuracy == float((logits.argmax(1) == y).double().mean()) and len(y) > 50
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)


def test_workers_and_engines_measure_the_same() -> None:
    found = [run(config(engine=engine)) for engine in ({}, {"workers": 2}, {"kind": "debug"})]
    assert what_counts(found[0]) == what_counts(found[1]) == what_counts(found[2])


def test_a_killed_run_goes_on_with_the_same_split(tmp_path: Path) -> None:
    plain = config().to_dict()
    plain["fl"] |= {"rounds": 5, "checkpoint_every": 2}
    plain["tracking"] |= {"enabled": True, "uri": f"sqlite:///{tmp_path}/mlflow.db"}
    resumed = resume(killed(plain, 3), uri=plain["tracking"]["uri"])
    whole = run(config(fl={"rounds": 5}))
    assert what_counts(resumed) == what_counts(whole)
    assert all(record.validation_accuracy is not None for record in resumed.rounds)
    history = connect(plain["tracking"]["uri"]).get_metric_history(resumed.run_id, "validation_accuracy")
    assert [(m.step, m.value) for m in history] == [(r.round, r.validation_accuracy) for r in whole.rounds]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunResult, RunResult]:
    """A store with a private run that holds out a quarter and a plain one that holds out nothing."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('held')}/mlflow.db"
    private = run(config(algorithm="dp_fedavg", partition="dirichlet", tracking={"uri": uri}))
    return uri, private, run(config(None, tracking={"uri": uri}))


def test_mlflow_has_the_metrics_the_manifest_and_the_data_set(tracked: tuple[str, RunResult, RunResult]) -> None:
    uri, result, plain = tracked
    client, run_id = connect(uri), str(result.run_id)
    metrics = client.get_run(run_id).data.metrics
    assert metrics["validation_accuracy"] == result.final["validation_accuracy"]
    assert metrics["validation_loss"] == result.final["validation_loss"]
    assert "validation_loss" not in client.get_run(plain.run_id).data.metrics
    assert client.get_run(run_id).data.params["data.validation"] == "0.25"
    stored = read_json(uri, run_id, "result.json")
    assert stored is not None and stored["rounds"][1]["validation_accuracy"] == result.rounds[1].validation_accuracy

    prepared = prepare(RunConfig(**result.config))
    partition, data = prepared.partition, prepared.data
    kept = read_json(uri, run_id, "partition/partition.json")
    assert kept is not None and kept["sha256"] == partition.sha256 == result.partition_sha256
    assert kept["validation"]["indices"] == [part.tolist() for part in partition.held]
    assert kept["validation"]["share"] == 0.25 and kept["num_unused"] == 0
    assert kept["validation"]["num_samples"] == sum(kept["validation"]["sizes"]) == len(partition.held_out)
    assert len(kept["validation"]["sha256"]) == 64 != kept["sha256"]
    none = read_json(uri, str(plain.run_id), "partition/partition.json")
    assert none is not None and none["validation"] is None

    inputs = {entry.tags[0].value: entry.dataset for entry in client.get_run(run_id).inputs.dataset_inputs}
    assert sorted(inputs) == ["test", "training", "validation"]
    held = torch.zeros(len(data.y_train), dtype=torch.bool)
    held[partition.held_out] = True
    for context, part in (("training", ~held), ("validation", held)):
        profile = json.loads(inputs[context].profile)
        assert profile["sha256"] == content_sha256(data.x_train[part].numpy(), data.y_train[part].numpy())
        assert profile["examples"] == int(part.sum()) and profile["partition_sha256"] == partition.sha256


def test_no_epsilon_covers_what_is_measured_on_held_out_examples(tracked: tuple[str, RunResult, RunResult]) -> None:
    uri, result, _ = tracked
    assert result.badge == "PRIVATE" and VALIDATED in result.final["privacy"]["warnings"]
    assert VALIDATED in connect(uri).get_run(result.run_id).data.tags["privacy_statement"]
    info = {"run_id": result.run_id, "experiment_id": "1", "tracking_uri": uri}
    lines = list(closing(result, info))
    assert f"  {VALIDATED}" in lines
    assert f"held-out accuracy {result.final['validation_accuracy']:.4f}" in lines[0]
    assert f"held-out {result.rounds[0].validation_accuracy:.4f}" in round_text(result.rounds[0], 0.0)
    brief = round_text(result.rounds[0], 0.0, brief=True)
    assert "held-out" in brief and "loss" not in brief
    without = config(None, algorithm="dp_fedavg")
    assert (
        VALIDATED not in foresight(without)["warnings"]
        and VALIDATED in foresight(config(algorithm="dp_fedavg"))["warnings"]
    )


def test_runs_side_by_side_show_them_where_there_are_any(
    tracked: tuple[str, RunResult, RunResult], tmp_path: Path
) -> None:
    uri, result, plain = tracked
    found = compare_runs([str(result.run_id), str(plain.run_id)], uri=uri, out=tmp_path, format="html")
    accuracy = result.final["validation_accuracy"]
    for name in ("markdown", "html"):
        text = Path(found[name]).read_text()
        assert "validation accuracy" in text and f"{accuracy:.4f}" in text and VALIDATED in text
    assert Path(found["validation"]).stat().st_size > 1000 and "Validation accuracy by round" in text
    with open(found["csv"]) as stream:
        rows = list(csv.DictReader(stream))
    assert [row["validation_accuracy_mean"] for row in rows] == [repr(accuracy), ""]
    assert float(rows[0]["validation_loss_mean"]) == result.final["validation_loss"]
    assert found["differences"]["data.validation"] == ["0.25", "null"]


def test_the_documents_say_what_the_code_does() -> None:
    root = Path(__file__).parent.parent
    privacy = " ".join((root / "docs" / "privacy.md").read_text().split())
    assert "`data.validation`" in privacy and "no epsilon covers them" in privacy
    words = " ".join((root / "docs" / "configuration.md").read_text().split())
    assert re.search(r"`data\.validation=0\.1`.*selected_on", words)
