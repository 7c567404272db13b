"""Two of the real handwritten digits as a data set of one's own, to copy and change.

fl-lightning run data=examples/my_data.py:two_digits data.parameters.second=9 fl.num_clients=4
"""

from typing import Annotated

import torch
from pydantic import Field
from sklearn.datasets import load_digits

from fl_lightning.data import ImageData

Digit = Annotated[int, Field(ge=0, le=9)]


def two_digits(first: Digit = 3, second: Digit = 8, every_nth_for_test: Annotated[int, Field(ge=2)] = 5) -> ImageData:
    if first == second:
        raise ValueError(f"first and second are both {first}")
    bunch = load_digits()
    images = torch.tensor(bunch.images * (255 / 16)).round().to(torch.uint8).unsqueeze(1)  # [N, 1, 8, 8]
    labels = torch.tensor(bunch.target)
    wanted = (labels == first) | (labels == second)
    images, labels = images[wanted], (labels[wanted] == second).long()
    test = torch.arange(len(labels)) % every_nth_for_test == 0
    return ImageData(
        name="two_digits",
        x_train=images[~test],
        y_train=labels[~test],
        x_test=images[test],
        y_test=labels[test],
        num_classes=2,
        mean=(0.3,),  # in units of pixel / 255; constants, for statistics of private images would be a release
        std=(0.4,),
        classes=(str(first), str(second)),
    )
