"""Initial weights from one generator: PyTorch's default scheme, without PyTorch's global generator."""

import math

import torch
from torch import nn


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter and buffer in place, layer by layer in the order of `model.modules()`, weight before bias.

    Each parameter of a Linear or Conv2d is uniform in +-1/sqrt(fan_in), fan_in being the inputs of one output unit.
    Those layers do so by default (`kaiming_uniform_` with a = sqrt(5) for the weight, the same bound for the bias).
    GroupNorm and BatchNorm2d begin as the identity, BatchNorm's running statistics at mean 0, variance 1, counter 0.

    Raises:
        TypeError: a parameter or buffer belongs to another layer, so no rule is stated for it.
    """
    filled: set[torch.Tensor] = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    parameter.uniform_(-bound, bound, generator=generator)
                    filled.add(parameter)
        elif isinstance(layer, nn.GroupNorm | nn.BatchNorm2d):
            layer.weight.fill_(1.0)
            layer.bias.zero_()
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
            filled |= {*layer.parameters(), *layer.buffers()}
    named = [*model.named_parameters(), *model.named_buffers()]
    missed = [name for name, tensor in named if tensor not in filled]
    if missed:
        raise TypeError(f"no initialisation rule for {', '.join(missed)}")
