"""`privacy.*`: what is protected, by how much noise. One class per level, for each is a different promise."""

from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.numbers import Count, NonNegative, Positive, PositiveOrInfinite, Section

DEFAULT_TARGET_EPSILON = 8.0


class NoPrivacy(Section):
    """Nothing is clipped or noised; no epsilon is reported."""

    level: Literal["none"] = Field(
        default="none", description="what an epsilon protects: none, one sample, or one client's update"
    )


class Mechanism(Section):
    """What both private levels have: the clipped Gaussian and its budget."""

    level: str = Field(description="what an epsilon protects")
    mode: Literal["strict", "paper"] = Field(
        default="strict", description="strict: proven; paper: a text taken literally"
    )
    clip_norm: PositiveOrInfinite = Field(
        default=1.0,
        description="C, the L2 bound on what is released; .inf, with noise_multiplier=0 only: no clipping",
    )
    noise_multiplier: NonNegative | None = Field(
        default=None, description="sigma / C, in place of target_epsilon; 0 adds no noise and protects nothing"
    )
    target_epsilon: Positive | None = Field(
        default=None, description="epsilon of the whole run, in place of noise_multiplier; 8 when neither is given"
    )
    delta: Annotated[Positive, Field(lt=1)] = Field(
        default=1e-5, description="delta of the guarantee; keep it below 1/n"
    )


class SamplePrivacy(Mechanism):
    """One sample of a client: DP-SGD inside the client."""

    level: Literal["sample"] = Field(default="sample", description="what an epsilon protects")
    adjacency: Literal["add_remove", "zero_out", "replace_one"] = Field(
        default="add_remove", description="neighbouring data sets; Poisson batches are accounted for add_remove only"
    )
    ascent: Literal["previous"] | None = Field(
        default=None, description="where SAM's ascent direction comes from: the previous private gradient (SAM only)"
    )
    physical_batch_size: Count | None = Field(
        default=None, description="memory cap: per-sample gradients computed at a time; results do not depend on it"
    )


class UpdatePrivacy(Mechanism):
    """One client: its whole update is clipped and noised before it leaves."""

    level: Literal["update"] = Field(default="update", description="what an epsilon protects")
    adjacency: Literal["add_remove", "zero_out", "replace_one"] = Field(
        default="replace_one",
        description="neighbouring federations; sensitivity 2C for replace_one, else C",
    )


PrivacyConfig = Annotated[NoPrivacy | SamplePrivacy | UpdatePrivacy, Field(discriminator="level")]
