"""What is refused, and in which words: key, value, rule, remedy, source."""

import pickle
import re
from pathlib import Path

import pytest

from fl_lightning.config import RunConfig, load_config
from fl_lightning.errors import ConfigError


def refused(*overrides: str, **options: Path) -> str:
    """The message with which these overrides are refused; one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fl.num_client=5"], "fl.num_client: no such key; did you mean fl.num_clients?"),
        (["lr=0.1"], "lr: no such key; did you mean algorithm.local.lr?"),
        (["algoritm=fedavg"], "algoritm: no such key; did you mean algorithm?"),
        (["hydra.run.dir=x"], "hydra.run.dir: no such key"),
        (
            ["algorithm=fedavgg"],
            "algorithm=fedavgg: no such option; did you mean fedavg? (options: ce_fedavg, dp_fedavg, dp_fedlaw, ",
        ),
        (["algorithm.name=fedprx"], "algorithm.name=fedprx: no such option; did you mean fedprox?"),
        (["algorithm.local.optimizer=adm"], "algorithm.local.optimizer=adm: no such option; did you mean adam?"),
        (["algorithm.local.lr=abc"], "algorithm.local.lr=abc: needs a number > 0 (set on the command line)"),
        (["algorithm.local.lr=0"], "algorithm.local.lr=0: needs a number > 0"),
        (["algorithm.local.lr=.inf"], "algorithm.local.lr=.inf: needs a finite number > 0"),
        (["fl.rounds=true"], "fl.rounds=true: needs a whole number >= 1"),
        (["fl.rounds=null"], "fl.rounds=null: needs a whole number >= 1"),
        (["seed=-1"], "seed=-1: needs a whole number >= 0 and <= 9223372036854775807"),
        (["fl=3"], "fl=3: needs a mapping of its settings"),
        (["fl.rounds=1,2"], "fl.rounds=1,2: needs one value; to compare several use `fl-lightning sweep`"),
        (["fl.rounds=("], "fl.rounds=(: cannot be read; put the value in quotes"),
        (["fedsam"], "fedsam: needs the form key=value; did you mean algorithm=fedsam?"),
        (["partition=file"], "partition.path: is required with partition.kind=file; set partition.path=VALUE"),
        (
            ["algorithm.local.rho=0.1"],
            "algorithm.local.rho=0.1: would be ignored with algorithm.name=fedavg; remove it, or choose "
            "algorithm.name=fedsam or sam_afl or sam_adpfl or dp_fedsam",
        ),
        (
            ["algorithm.local.beta1=0.5"],
            "algorithm.local.beta1=0.5: would be ignored with algorithm.local.optimizer=sgd",
        ),
        (["data.root=/x"], "data.root=/x: would be ignored with data.name=digits"),
        (["privacy.clip_norm=2"], "privacy.clip_norm=2: would be ignored with privacy.level=none"),
        (
            ["partition=dirichlet", "partition.shards_per_client=2"],
            "partition.shards_per_client=2: would be ignored with",
        ),
        (
            ["privacy=sample"],
            "privacy.level=sample: algorithm.name=fedavg protects nothing; choose algorithm=dp_fedavg",
        ),
        (
            ["algorithm=dp_fedavg", "privacy=none"],
            "privacy.level=none: needs sample or update with algorithm.name=dp_fedavg",
        ),
        (["algorithm=dp_fedavg", "privacy.mode=paper"], "privacy.mode=paper: is the literal text of sam_adpfl"),
        (
            ["algorithm=dp_fedavg", "privacy.ascent=previous"],
            "privacy.ascent=previous: would be ignored with algorithm.name",
        ),
        (
            ["algorithm=dp_fedavg", "privacy.adjacency=replace_one"],
            "privacy.adjacency=replace_one: has no proof with privacy.sampling=poisson",
        ),
        (
            ["algorithm=dp_fedavg", "privacy.sampling=without_replacement", "privacy.adjacency=zero_out"],
            "privacy.adjacency=zero_out: has no proof with privacy.sampling=without_replacement",
        ),
        (
            ["algorithm=dp_fedavg", "privacy.noise_multiplier=0", "privacy.target_epsilon=2"],
            "privacy.target_epsilon=2.0: contradicts privacy.noise_multiplier=0, which spends any budget at once",
        ),
        (
            ["algorithm=dp_fedavg", "privacy=update", "privacy.physical_batch_size=8"],
            "privacy.physical_batch_size=8: would be ignored with privacy.level=update",
        ),
        (
            ["algorithm=dp_fedsam", "privacy=update", "algorithm.aggregate.weighting=samples"],
            "algorithm.aggregate.weighting=samples: needs uniform with privacy.level=update",
        ),
        (
            ["algorithm=dp_fedsam", "algorithm.local.variant=asam"],
            "algorithm.local.variant=asam: would be ignored with privacy.level=sample",
        ),
        (["algorithm=dp_fedavg", "privacy.delta=1"], "privacy.delta=1: needs a number > 0 and < 1"),
        (["engine=debug", "engine.workers=2"], "engine.workers=2: needs 1 with engine.kind=debug"),
        (
            ["fl.cohort_schedule=a.json", "fl.clients_per_round=2"],
            "fl.clients_per_round=2: would be ignored: fl.cohort_schedule names the cohorts",
        ),
        (
            ["fl.clients_per_round=2", "fl.client_fraction=0.5"],
            "fl.client_fraction=0.5: contradicts fl.clients_per_round=2",
        ),
        (["tracking.uri=http://me:secret@host:5000"], "tracking.uri: holds a password"),
        (["fl.batch_size=${fl.round}"], "fl.batch_size: Interpolation key 'fl.round' not found"),
    ],
)
def test_what_cannot_run_is_refused_in_words(overrides: list[str], message: str) -> None:
    assert refused(*overrides).startswith(message)


def test_the_message_keeps_a_password_to_itself() -> None:
    assert "secret" not in refused("tracking.uri=http://me:secret@host:5000")


def test_all_faults_are_counted() -> None:
    message = refused("fl.batch_size=0", "fl.rounds=0", "algorithm.local.lr=-1")
    first = "fl.rounds=0: needs a whole number >= 1 (set on the command line)"
    assert message == f"{first}; and 2 more: fl.batch_size, algorithm.local.lr"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"algorithm": "fedavgg"}, "algorithm.name=fedavgg: no such option; did you mean fedavg?"),
        ({"algorithm": {"name": "fedsam", "lcal": 3}}, "algorithm.lcal: no such key; did you mean algorithm.local?"),
        ({"algorithm": 3}, "algorithm=3: needs a mapping of its settings, or one of fedavg, fedprox"),
        ({"algorithm": {"local": 4}}, "algorithm.local=4: needs a mapping of its settings"),
        ({"fl": 3}, "fl=3: needs a mapping of its settings"),
        (
            {"partition": {"kind": "file", "path": "p.json"}, "data": {"name": "digits", "subset": 0.5}},
            "data.subset=0.5: needs 1 with partition.kind=file",
        ),
        ({"nonsense": 1}, "nonsense: no such key"),
        ({"fl": {"clients_per_round": 11}}, "fl.clients_per_round=11: needs at most fl.num_clients=10"),
    ],
)
def test_python_gets_the_same_messages(raw: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig(**raw)
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.model_validate(raw)


def test_errors_cross_process_borders() -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(fl={"rounds": 0, "num_client": 1})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_file_says_where_a_fault_is(tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    for text, message in [
        ("algorithm: {name: fedsam, local: {rho: -1}}", f"algorithm.local.rho=-1: needs a number >= 0 (set in {file})"),
        ("fl: {num_client: 3}", f"fl.num_client: no such key; did you mean fl.num_clients? (set in {file})"),
        ("fl.rounds: 3", f"{file}: fl.rounds needs to be nested: fl: {{rounds: ...}}"),
        ("- 1", f"{file}: needs a mapping of keys to values, found a list"),
        ("fl: {", f"{file}: is not valid YAML"),
        ("seed: 1\nseed: 2", f"{file}: is not valid YAML"),
    ]:
        file.write_text(text)
        assert refused(config_file=file).startswith(message)
    assert refused(config_file=tmp_path / "none.yaml").startswith(f"{tmp_path}/none.yaml: cannot be read: No such file")
