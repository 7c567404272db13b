"""LeNet-5 with 5x5 convolutions of 16 and 32 channels and one fully connected layer.

The small model of the SAM-ADPFL study: 28,938 parameters on 28x28 grey images with padding 2 (18,378 without padding).
No dropout and no normalisation layer, so every parameter takes part in plain averaging and in per-sample gradients.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class LeNet5(nn.Module):
    """[B, C, H, W] floats -> [B, num_classes] logits; H and W are fixed when the model is made.

    Args:
        channels: of one image.
        height: of one image in pixels, at least 4 with padding 2.
        width: likewise.
        num_classes: logits per image.
        padding: zero pixels on each side before both convolutions; 2 keeps the size, 0 is the unpadded variant.

    Raises:
        ValueError: nothing is left of the image before the fully connected layer.
    """

    def __init__(self, channels: int, height: int, width: int, num_classes: int, padding: int = 2) -> None:
        super().__init__()
        rows, columns = (_pooled(_pooled(size, padding), padding) for size in (height, width))
        if rows < 1 or columns < 1:
            raise ValueError(f"LeNet5 with padding={padding} leaves nothing of a {height}x{width} image")
        self.conv1 = nn.Conv2d(channels, 16, kernel_size=5, padding=padding)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=5, padding=padding)
        self.fc = nn.Linear(32 * rows * columns, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate representation, [B, 32 * rows * columns]."""
        # ReLU and max-pool commute; pooling first leaves ReLU a quarter of the work.
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        return hidden.flatten(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images))


def _pooled(size: int, padding: int) -> int:
    """Pixels along one side after a 5x5 convolution and a 2x2 max-pool; 0 when nothing is left."""
    return max(0, size + 2 * padding - 4) // 2
