"""A small VGG: three modules of two 3x3 convolutions (32, 64, 128 channels), each closed by a 2x2 max-pool.

The large model of the SAM-ADPFL study: 550,570 parameters on 32x32 RGB images. No dropout and no normalisation layer,
so every parameter takes part in plain averaging and in per-sample gradients.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class VGGLike(nn.Module):
    """[B, C, H, W] floats -> [B, num_classes] logits; H and W are fixed when the model is made.

    Args:
        channels: of one image.
        height: of one image in pixels, at least 8: the three max-pools halve it, rounding down (28 -> 14 -> 7 -> 3).
        width: likewise.
        num_classes: logits per image.

    Raises:
        ValueError: nothing is left of the image before the fully connected layers.
    """

    def __init__(self, channels: int, height: int, width: int, num_classes: int) -> None:
        super().__init__()
        rows, columns = height // 8, width // 8
        if rows < 1 or columns < 1:
            raise ValueError(f"VGGLike leaves nothing of a {height}x{width} image")
        self.conv1a = nn.Conv2d(channels, 32, kernel_size=3, padding=1)
        self.conv1b = nn.Conv2d(32, 32, kernel_size=3, padding=1)
        self.conv2a = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.conv2b = nn.Conv2d(64, 64, kernel_size=3, padding=1)
        self.conv3a = nn.Conv2d(64, 128, kernel_size=3, padding=1)
        self.conv3b = nn.Conv2d(128, 128, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(128 * rows * columns, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate representation, [B, 128]."""
        # ReLU and max-pool commute; pooling first leaves ReLU a quarter of the work.
        hidden = F.relu(self.conv1a(images))
        hidden = F.relu(F.max_pool2d(self.conv1b(hidden), 2))
        hidden = F.relu(self.conv2a(hidden))
        hidden = F.relu(F.max_pool2d(self.conv2b(hidden), 2))
        hidden = F.relu(self.conv3a(hidden))
        hidden = F.relu(F.max_pool2d(self.conv3b(hidden), 2))
        return F.relu(self.fc1(hidden.flatten(1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc2(self.features(images))
