"""The shape of a stage of the uplink: what happens to an upload inside the client's boundary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fl_lightning.records import Message

Terms = Mapping[str, float]


@dataclass(frozen=True)
class UplinkStage:
    """`encode(message, noise, terms) -> message`: clips, noises or compresses, and declares each release it makes.

    `terms` are the public numbers that server and client have agreed on for this round; empty where they agree on none.
    """

    encode: Callable[[Message, torch.Generator, Terms], Message]


def send(
    message: Message, stages: Sequence[UplinkStage], noise: torch.Generator, terms: Terms | None = None
) -> Message:
    """Runs the chain on the client, in order."""
    for stage in stages:
        message = stage.encode(message, noise, terms or {})
    return message
