"""ResNet-18 for small images. He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016.

The CIFAR stem: one 3x3 convolution with stride 1 and no max-pool, then four stages of two basic blocks (64, 128, 256,
512 channels), global average pooling and one linear layer: 11,173,962 parameters on 3x32x32 with 10 classes. Strided
convolutions round up, so images of any size fit.

Normalisation, after every convolution:
    group    GroupNorm with 32 groups (Wu and He, ECCV 2018): each example by itself, no buffers; the default here
    batch    BatchNorm: mixes the examples of a batch, which no per-example privacy bound survives, and keeps running
             statistics, which federated averaging averages like weights (docs/design.md)
"""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 32

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)); the first convolution has the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        # Not in place: per-sample gradient hooks keep the activations.
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet18(nn.Module):
    """[B, C, H, W] floats -> [B, num_classes] logits.

    Args:
        channels: of one image.
        num_classes: logits per image.
        norm: "group" or "batch".
    """

    def __init__(self, channels: int, num_classes: int, norm: Literal["group", "batch"] = "group") -> None:
        super().__init__()
        layer: Norm = nn.BatchNorm2d if norm == "batch" else lambda width: nn.GroupNorm(GROUPS, width)
        self.conv = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
        self.norm = layer(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inputs, width, stride, layer), BasicBlock(width, width, 1, layer)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate representation, [B, 512]."""
        hidden = self.blocks(F.relu(self.norm(self.conv(images))))
        return hidden.mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images))
