"""Opacus' per-sample gradient hooks, fit for activations that lie channels-last."""

from typing import Any

from torch import Tensor, nn


def row_hooks(model: nn.Module) -> Any:
    """The model inside Opacus' GradSampleModule; each parameter's `grad_sample` is then [B, *shape] after a backward.

    Opacus unfolds a convolution's input by strides that hold for NCHW memory only, and returns wrong gradients for
    any other layout, without a word (`opacus.utils.tensor_utils.unfold2d`, 1.6.0). Every input is therefore kept in
    plain order. `clone` and not `contiguous`: where a side has one pixel, two layouts look alike and `contiguous`
    keeps the other one.
    """
    import torch
    from opacus import GradSampleModule

    class RowHooks(GradSampleModule):
        def capture_activations_hook(self, module: nn.Module, forward_input: list[Tensor], output: Tensor) -> None:
            if self.hooks_enabled:
                forward_input = [tensor.clone(memory_format=torch.contiguous_format) for tensor in forward_input]
            super().capture_activations_hook(module, forward_input, output)

    return RowHooks(model, loss_reduction="sum")
