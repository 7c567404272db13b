"""`fl.*`, `engine.*` and `tracking.*`: the sections without variants."""

from typing import Literal

from pydantic import Field

from fl_lightning.config.numbers import AbsolutePath, Count, Name, Section, Share, TrackingUri

DEFAULT_CHECKPOINT_EVERY = 5


class Federation(Section):
    """`fl.*`: who takes part, how often, and for how long a client trains."""

    num_clients: Count = Field(default=10, description="K, all clients")
    clients_per_round: Count | None = Field(
        default=None, description="m, the cohort of a round, drawn without replacement; null: all clients"
    )
    client_fraction: Share | None = Field(
        default=None, description="the cohort as a share of K instead; at least one client"
    )
    rounds: Count = Field(default=10, description="T, communication rounds")
    local_epochs: Count = Field(default=1, description="E, passes over a client's data at each visit")
    max_local_steps: Count | None = Field(
        default=None, description="stop a visit after this many optimizer steps; null: no cap"
    )
    batch_size: Count = Field(default=32, description="B, samples in a minibatch; the last may be short")
    eval_every: Count = Field(default=1, description="evaluate every so many rounds, and after the last")
    checkpoint_every: Count | None = Field(
        default=None,
        description="write a checkpoint every so many rounds, for `fl-lightning resume`; 5 when not given; only runs "
        "that are tracked have one",
    )
    cohort_schedule: AbsolutePath | None = Field(
        default=None, description="JSON file with one list of clients per round, replayed instead of sampling"
    )

    clipping_lab: bool = Field(
        default=False,
        description="measure what clipping does to the updates of each round: oracle/clipping/* and the run's "
        "artifacts clipping/norms.csv and .png; computed from raw updates, so for the researcher's eyes only",
    )

    @property
    def cohort_size(self) -> int:
        """m = clients_per_round, or max(1, round(client_fraction * K)), or K."""
        if self.client_fraction is not None:
            return max(1, round(self.client_fraction * self.num_clients))
        return self.num_clients if self.clients_per_round is None else self.clients_per_round


class EngineConfig(Section):
    """`engine.*`: how clients are computed. Only the precision and the device may change a result's bits."""

    kind: Literal["lightning", "debug"] = Field(
        default="lightning", description="lightning, or a plain loop that locates errors"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU if there is one")
    precision: Literal["fp32", "bf16", "fp64"] = Field(default="fp32", description="arithmetic of local training")
    workers: Count = Field(default=1, description="processes that share a cohort; results do not depend on it")


class TrackingConfig(Section):
    """`tracking.*`: where MLflow keeps the run."""

    enabled: bool = Field(default=True, description="record the run in MLflow")
    uri: TrackingUri | None = Field(
        default=None,
        description="MLflow store; null: MLFLOW_TRACKING_URI, else mlruns/mlflow.db in the start folder",
    )
    experiment: Name = Field(default="fl_lightning", description="MLflow experiment")
    log_model: bool = Field(
        default=True,
        description="store the final model with 3 test images as its example: mlflow.pytorch.load_model gives it back",
    )
    system_metrics: bool = Field(
        default=True,
        description="use of processor, memory and GPU every 10 s, as metrics system/*; shorter runs have none",
    )
