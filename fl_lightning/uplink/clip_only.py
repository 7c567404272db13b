"""Clipping without noise, to study what clipping alone does. It protects nothing, so no release is declared.

    difference    upload clip(y - x, c)                      "Understanding Clipping for FL", Eq. 4
    model         upload clip(y, c) - x, so that the server averages clip(y, c)

clip(v, c) = v min(1, c/||v||_2), one norm over the flat vector (Eq. 3).
"""

from dataclasses import replace

import torch

from fl_lightning.errors import FLError
from fl_lightning.records import Message, Vector
from fl_lightning.uplink.clip_noise import beside_raw, clip
from fl_lightning.uplink.stage import Terms, UplinkStage


def clip_difference(bound: float | None) -> UplinkStage:
    """Clips the update "delta" to `bound` > 0; infinite: not at all. None stands for a bound not measured yet."""

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        if bound is None:
            raise FLError(
                "algorithm.local.clip=null: the threshold has not been measured; "
                "pass the prepared run through clip_threshold.measured first, or set a number"
            )
        delta = message.vectors["delta"]
        sent = _sent(message, {**message.vectors, "delta": clip(delta, bound)}, delta, bound)
        return replace(sent, oracle={**sent.oracle, "clip": bound})

    return UplinkStage(encode)


def clip_model(bound: float) -> UplinkStage:
    """Clips the trained model, found in the message as "model", which does not leave the client itself."""

    def encode(message: Message, noise: torch.Generator, terms: Terms) -> Message:
        vectors = dict(message.vectors)
        y = vectors.pop("model")
        vectors["delta"] = vectors["delta"] + (clip(y, bound) - y)  # exactly y - x where nothing is clipped
        return _sent(message, vectors, y, bound)

    return UplinkStage(encode)


def _sent(message: Message, vectors: dict[str, Vector], clipped: Vector, bound: float) -> Message:
    norm = float(torch.linalg.vector_norm(clipped))
    seen = {"update_norm": float(torch.linalg.vector_norm(message.vectors["delta"])), "clipped": float(norm > bound)}
    return replace(
        message,
        vectors=vectors,
        oracle={**message.oracle, **seen},
        oracle_vectors=beside_raw(message, vectors["delta"]),
    )
