"""The configuration of one run. The only schema: defaults, bounds, units and help texts live in this package's classes.

One dotted name serves everywhere: `algorithm.local.rho` is the YAML path, the command-line key, the sweep's axis and
the tracked parameter.

    RunConfig(algorithm="fedsam", fl={"rounds": 5})
    RunConfig(algorithm={"name": "fedsam", "local": {"rho": 0.1}}, partition={"kind": "dirichlet", "alpha": 0.1})

Any fault raises ConfigError, never pydantic's own error.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from fl_lightning.config.algorithms import FedAvg
from fl_lightning.config.changes import apply_changes, without_defaults
from fl_lightning.config.data import DataConfig, Digits, Iid, PartitionConfig
from fl_lightning.config.defaults import complete
from fl_lightning.config.faults import Fault, InvalidConfig
from fl_lightning.config.federation import EngineConfig, Federation, TrackingConfig
from fl_lightning.config.messages import translate
from fl_lightning.config.methods import AlgorithmConfig
from fl_lightning.config.models import ModelConfig, PlainModel
from fl_lightning.config.numbers import Section, Seed
from fl_lightning.config.plugins import Open, OwnAlgorithm, OwnData, OwnModel, computed_by
from fl_lightning.config.privacy import NoPrivacy, PrivacyConfig
from fl_lightning.config.rules import broken_rules, notes


class RunConfig(Section):
    """Everything that determines one federated run.

    Frozen. A section may be given as a mapping or, in short, as the name of its variant (`data="mnist"`).

    Raises:
        ConfigError: one line that names key, value, rule and remedy of the first fault, and counts the others.
    """

    seed: Seed = Field(default=42, description="the one source of all randomness")
    data: Annotated[DataConfig, Open(OwnData)] = Field(default=Digits(), description="the data set")
    partition: PartitionConfig = Field(default=Iid(), description="how samples are dealt to clients")
    model: Annotated[ModelConfig, Open(OwnModel)] = Field(default=PlainModel(), description="the network")
    fl: Federation = Field(default=Federation(), description="the federation")
    algorithm: Annotated[AlgorithmConfig, Open(OwnAlgorithm)] = Field(default=FedAvg(), description="the algorithm")
    privacy: PrivacyConfig = Field(default=NoPrivacy(), description="the protection")
    engine: EngineConfig = Field(default=EngineConfig(), description="how clients are computed")
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="where the run is recorded")

    def __init__(self, **raw: Any) -> None:
        whole = complete(raw)
        try:
            super().__init__(**whole)
        except ValidationError as error:
            raise InvalidConfig(translate(error, RunConfig, whole)) from None
        if faults := broken_rules(self):
            raise InvalidConfig(faults)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> "RunConfig":
        """As the constructor; `obj` is a mapping of sections."""
        if isinstance(obj, RunConfig):
            return obj
        if not isinstance(obj, Mapping) or not all(isinstance(key, str) for key in obj):
            raise InvalidConfig((Fault("configuration", "needs a mapping of sections such as fl and algorithm", obj),))
        return cls(**obj)

    def to_dict(self) -> dict[str, Any]:
        """The full configuration as plain values; `RunConfig(**config.to_dict()) == config`."""
        return self.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        """Names what is computed: equal for two configurations whose results must agree on the same device.

        Left out are `tracking`, `engine.workers`, `fl.checkpoint_every` and the folder of a public data set (its files
        are checksummed): none of them can change a result. The folder of a user's own data stays in, for it says which
        data; of a user's own function it is the file's content that counts, not its place. Without held-out examples
        `data.validation` says nothing.
        """
        plain = computed_by(self.to_dict())
        del plain["tracking"], plain["engine"]["workers"], plain["fl"]["checkpoint_every"]
        if not self.data.validation:
            del plain["data"]["validation"]
        if self.data.name not in ("image_folder", "npz"):
            plain["data"].pop("root", None)
        return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences a user should see before the run starts."""
        return notes(self)

    def with_overrides(self, overrides: Mapping[str, Any]) -> "RunConfig":
        """A new configuration with some values changed, as a sweep's trial needs it.

        Args:
            overrides: values by dotted key, `{"algorithm.local.rho": 0.1}`. A group as key selects that group's preset,
                `{"algorithm": "fedprox"}`, or takes a mapping; what was set otherwise than by default stays set and
                must have a meaning in the new variant.

        Raises:
            ConfigError: an unknown key or option, or a value that does not fit.
        """
        return RunConfig(**apply_changes(without_defaults(RunConfig, self.to_dict()), overrides))
