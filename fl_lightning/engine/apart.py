"""Whether a network keeps the examples of a batch apart, as a bound on each example's gradient takes for granted."""

import torch

from fl_lightning.engine.objective import ModelObjective
from fl_lightning.errors import PrivacyError
from fl_lightning.rng import generator

TOGETHER = 3


def check_apart(objective: ModelObjective, shape: tuple[int, int, int], num_classes: int, seed: int) -> None:
    """Compares per-example gradients in a batch of noise images [3, C, H, W] with those of each image alone.

    No example of the data is looked at. The objective's losses are taken away again.

    Raises:
        PrivacyError: they differ: something in the network looks across the batch, or draws at random.
    """
    w = objective.initial.to(objective.device)
    images = torch.randn(TOGETHER, *shape, generator=generator(seed, "apart"), dtype=torch.float64)
    images = images.to(objective.device, w.dtype)
    labels = torch.arange(TOGETHER, device=objective.device) % num_classes
    together = objective.per_sample_gradients(w, (images, labels))
    parts = [(images[i : i + 1], labels[i : i + 1]) for i in range(TOGETHER)]
    alone = torch.cat([objective.per_sample_gradients(w, part) for part in parts])
    objective.take_losses()
    scale = float(alone.abs().max())
    if not torch.allclose(together, alone, rtol=1e-3, atol=1e-3 * scale):
        raise PrivacyError(
            "model: an example's gradient depends on the others of its batch (or on a random draw), so no per-example "
            "bound holds with privacy.level=sample; take out what looks across the batch, or use privacy.level=update"
        )
