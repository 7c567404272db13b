"""`privacy.*`: what is protected, by how much noise. One class per level, for each is a different promise."""

from typing import Annotated, Literal

from pydantic import Field

from fl_lightning.config.numbers import Count, NonNegative, Positive, PositiveOrInfinite, Section, Share

DEFAULT_TARGET_EPSILON = 8.0


class NoPrivacy(Section):
    """Nothing is clipped or noised; no epsilon is reported."""

    level: Literal["none"] = Field(
        default="none",
        description="what an epsilon protects: none, one sample, or one client (its update, or its model)",
    )


class Mechanism(Section):
    """What all private levels have: the clipped Gaussian and its budget."""

    level: str = Field(description="what an epsilon protects")
    mode: Literal["strict", "paper"] = Field(
        default="strict", description="strict: proven; paper: a text taken literally"
    )
    clip_norm: PositiveOrInfinite = Field(
        default=1.0,
        description="C, the L2 bound on what is released; .inf, with noise_multiplier=0 only: no clipping",
    )
    noise_multiplier: NonNegative | None = Field(
        default=None, description="sigma / C; solved for target_epsilon when not given; 0: no noise, no protection"
    )
    target_epsilon: Positive | None = Field(
        default=None,
        description="epsilon of the whole run, 8 if neither is given; with noise_multiplier: the run ends when spent",
    )
    delta: Annotated[Positive, Field(lt=1)] = Field(
        default=1e-5, description="delta of the guarantee; keep it below 1/n"
    )
    adjacency: Literal["add_remove", "zero_out", "replace_one"] = Field(
        default="add_remove", description="neighbouring data sets; the sensitivity is 2C for replace_one, else C"
    )
    noise_decay: Share = Field(
        default=1.0, description="factor of the noise multiplier after every noise_decay_rounds rounds; 1: constant"
    )
    noise_decay_rounds: Count | None = Field(
        default=None, description="rounds between two such steps, with noise_decay < 1; a tenth of the run if not given"
    )
    audit: bool = Field(
        default=False, description="add canaries and report a lower bound on epsilon; the run fails if it is broken"
    )
    audit_canaries: Count | None = Field(
        default=None, description="how many canaries, with audit=true; more of them give a sharper bound"
    )


class SamplePrivacy(Mechanism):
    """One sample of a client: DP-SGD inside the client."""

    level: Literal["sample"] = Field(default="sample", description="what an epsilon protects")
    adjacency: Literal["add_remove", "zero_out", "replace_one"] = Field(
        default="add_remove",
        description="neighbouring data sets; sensitivity 2C for replace_one (the default of without_replacement)",
    )
    sampling: Literal["poisson", "without_replacement", "full"] = Field(
        default="poisson",
        description="how examples enter a step: each by itself, B of n, or all of them; not for replace_one: poisson",
    )
    clip_bound: Literal["fixed", "per_layer"] = Field(
        default="fixed", description="fixed: one bound C; per_layer: C / sqrt(layers) on each layer"
    )
    ascent: Literal["previous", "per_sample", "two_release"] | None = Field(
        default=None,
        description="SAM's ascent: along the previous private gradient, each example's own, or a noised gradient",
    )
    physical_batch_size: Count | None = Field(
        default=None, description="memory cap: per-sample gradients computed at a time; results do not depend on it"
    )


class Quantile(Section):
    """`privacy.quantile.*`: the bound follows a quantile of the update norms (Andrew et al. 2021)."""

    target: Annotated[Positive, Field(lt=1)] = Field(
        default=0.5, description="gamma, the share of updates that shall lie within the bound"
    )
    lr: Positive = Field(default=0.2, description="eta_C: C <- C exp(-eta_C (b - gamma))")
    bit_noise: Positive | None = Field(
        default=None,
        description="sigma_b, noise on the sum of the bits (local: on each bit), above half the noise multiplier; "
        "null: cohort / 20, or the noise multiplier if that is larger",
    )


class ClientPrivacy(Mechanism):
    """One client: what it uploads is clipped, and noise is added by itself, by all together or by the server."""

    adjacency: Literal["add_remove", "zero_out", "replace_one"] = Field(
        default="replace_one",
        description="neighbouring federations; sensitivity 2C for replace_one, else C",
    )
    trust_model: Literal["local", "central", "distributed"] = Field(
        default="local",
        description="where noise is added: each upload, the sum, or a share of it by each (secure aggregation)",
    )
    sampling: Literal["full", "poisson", "without_replacement"] = Field(
        default="full",
        description="full: each visit counts; else cohorts are secret, drawn so in every round, and amplify",
    )
    noise_cohort_size: Count | None = Field(
        default=None,
        description="noise on the mean as for a cohort of this size: shows a larger federation, protects none here",
    )


class UpdatePrivacy(ClientPrivacy):
    """Difference clipping: the update y - w is clipped."""

    level: Literal["update"] = Field(default="update", description="what an epsilon protects")
    clip_bound: Literal["fixed", "per_layer", "quantile"] = Field(
        default="fixed", description="one bound C; C / sqrt(layers) on each layer; or C follows quantile.*"
    )
    quantile: Quantile | None = Field(default=None, description="clip_bound=quantile; clip_norm is where C starts")


class ModelPrivacy(ClientPrivacy):
    """Model clipping: the trained model y itself is clipped, for the study of what that does."""

    level: Literal["model"] = Field(default="model", description="what an epsilon protects")
    clip_bound: Literal["fixed", "per_layer"] = Field(
        default="fixed", description="fixed: one bound C; per_layer: C / sqrt(layers) on each layer"
    )


PrivacyConfig = Annotated[NoPrivacy | SamplePrivacy | UpdatePrivacy | ModelPrivacy, Field(discriminator="level")]
