"""The network a run ends with, as a module of its own that anybody can load and use."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_lightning.records import ServerState

if TYPE_CHECKING:
    from fl_lightning.build import Prepared


def final_model(prepared: "Prepared", server: ServerState) -> nn.Module:
    """A newly built network with the server's parameters and buffers, on the CPU, in evaluation mode.

    The one that was trained is left alone: its parameters are views of one vector, and it may carry the hooks of
    per-sample gradients. Parameters that are not trained, and so are not in the vector, are copied from it.

    Raises:
        ValueError: a user's own function returned another network than the first time, or the same object again.
        FLError: it failed this time.
    """
    from fl_lightning.build import network

    trained = prepared.objective.model
    model = network(prepared.config, prepared.data.shape, prepared.data.num_classes)
    if any(part in set(trained.modules()) for part in model.modules()):
        raise ValueError("the function returns the same network each time, not a new one")
    frozen = {name: p for name, p in trained.named_parameters() if not p.requires_grad}
    state: dict[str, Tensor] = {**frozen, **prepared.objective.layout.state_dict(server.w, server.buffers)}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in state.items()}:
        raise ValueError("the function returns a network of other parameters than before")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.data = state[name].detach().cpu().contiguous().clone()
    return model.eval()
