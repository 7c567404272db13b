"""The shape of a stage of the uplink: what happens to an upload inside the client's boundary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fl_lightning.records import Message


@dataclass(frozen=True)
class UplinkStage:
    """`encode(message, noise) -> message`: clips, noises or compresses, and declares each release it makes."""

    encode: Callable[[Message, torch.Generator], Message]


def send(message: Message, stages: Sequence[UplinkStage], noise: torch.Generator) -> Message:
    """Runs the chain on the client, in order."""
    for stage in stages:
        message = stage.encode(message, noise)
    return message
