"""AlexNet for small images: five 3x3 convolutions (64, 192, 384, 256, 256 channels) and three fully connected layers.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks, NeurIPS 2012, in the
form usual for CIFAR: the first convolution has stride 2 in place of 11x11 filters with stride 4, max-pools are 2x2,
and the two hidden layers have 1024 units in place of 4096: 4,361,034 parameters on 3x32x32 with 10 classes. The
clipping study names AlexNet without its widths; these are ours.
No dropout: it would draw from the global generator, and every run here follows from its seed alone. No normalisation
layer, so every parameter takes part in plain averaging and in per-sample gradients.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class AlexNet(nn.Module):
    """[B, C, H, W] floats -> [B, num_classes] logits; H and W are fixed when the model is made.

    Args:
        channels: of one image.
        height: of one image in pixels, at least 15: the stride and the three max-pools halve it four times
            (32 -> 16 -> 8 -> 4 -> 2 and 28 -> 14 -> 7 -> 3 -> 1; of 8 pixels nothing would be left).
        width: likewise.
        num_classes: logits per image.

    Raises:
        ValueError: nothing is left of the image before the fully connected layers.
    """

    def __init__(self, channels: int, height: int, width: int, num_classes: int) -> None:
        super().__init__()
        rows, columns = (-(-size // 2) // 8 for size in (height, width))
        if rows < 1 or columns < 1:
            raise ValueError(f"AlexNet leaves nothing of a {height}x{width} image")
        self.conv1 = nn.Conv2d(channels, 64, kernel_size=3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(64, 192, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2d(192, 384, kernel_size=3, padding=1)
        self.conv4 = nn.Conv2d(384, 256, kernel_size=3, padding=1)
        self.conv5 = nn.Conv2d(256, 256, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(256 * rows * columns, 1024)
        self.fc2 = nn.Linear(1024, 1024)
        self.fc3 = nn.Linear(1024, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """The penultimate representation, [B, 1024]."""
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.conv3(hidden))
        hidden = F.relu(self.conv4(hidden))
        hidden = F.relu(F.max_pool2d(self.conv5(hidden), 2))
        return F.relu(self.fc2(F.relu(self.fc1(hidden.flatten(1)))))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc3(self.features(images))
