"""A network of one's own, to copy and change.

fl-lightning run model=examples/my_model.py:my_model model.parameters.hidden=64
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn


class Perceptron(nn.Module):
    """[B, C, H, W] -> [B, num_classes] through one hidden layer."""

    def __init__(self, inputs: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.out = nn.Linear(hidden, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate representation [B, hidden]; only algorithm=moon asks for it."""
        return self.hidden(images.flatten(1)).relu()

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))


def my_model(
    channels: int, height: int, width: int, num_classes: int, hidden: Annotated[int, Field(ge=1)] = 32
) -> nn.Module:
    return Perceptron(channels * height * width, hidden, num_classes)
