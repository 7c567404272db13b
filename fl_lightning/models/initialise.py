"""Initial weights from one generator: PyTorch's default scheme, without PyTorch's global generator."""

import math

import torch
from torch import nn


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Fill every parameter in place, layer by layer in the order of `model.modules()`, weight before bias.

    Each is uniform in +-1/sqrt(fan_in), fan_in being the inputs of one output unit. This is what `nn.Linear` and
    `nn.Conv2d` do by default (`kaiming_uniform_` with a = sqrt(5) for the weight, the same bound for the bias).

    Raises:
        TypeError: a parameter belongs to a layer other than Linear or Conv2d, so no rule is stated for it.
    """
    filled = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            bound = 1.0 / math.sqrt(layer.weight[0].numel())
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    parameter.uniform_(-bound, bound, generator=generator)
                    filled.add(parameter)
    missed = [name for name, parameter in model.named_parameters() if parameter not in filled]
    if missed:
        raise TypeError(f"no initialisation rule for {', '.join(missed)}")
