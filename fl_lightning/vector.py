"""A model is a vector: one flat tensor of all trainable parameters, whose slices the layers see as views.

    w in R^d  <->  (name_1, shape_1, offset_1), ..., (name_p, shape_p, offset_p)

Convolution weights may lie channels-last inside the vector (a permuted view), which lets CPU convolutions run on
their fast path without a copy. The order of coordinates has no meaning to the mathematics: every norm, clip, noise
and mean acts on the vector as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fl_lightning.records import Vector


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the vector."""

    name: str
    shape: torch.Size
    offset: int
    dtype: torch.dtype
    channels_last: bool

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ParamLayout:
    """The map between a module's trainable parameters and one flat vector [d].

    The vector has the widest floating type among the parameters. Shared (tied) parameters occupy one slot.

    Example:
        >>> module = nn.Linear(2, 1)
        >>> layout = ParamLayout.of(module)
        >>> layout.size
        3
        >>> layout.views(torch.tensor([1.0, 2.0, 3.0]))["weight"]
        tensor([[1., 2.]])
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, channels_last: bool = False) -> "ParamLayout":
        """Reads the layout off a module.

        Args:
            module: any module with at least one trainable floating-point parameter.
            channels_last: store 4-d weights [O, I, H, W] in the order O, H, W, I.

        Raises:
            ValueError: the module has nothing to train.
        """
        slots: list[Slot] = []
        offset = 0
        dtype: torch.dtype | None = None
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            last = channels_last and parameter.dim() == 4
            slots.append(Slot(name, parameter.shape, offset, parameter.dtype, last))
            offset += parameter.numel()
            dtype = parameter.dtype if dtype is None else torch.promote_types(dtype, parameter.dtype)
        if dtype is None:
            raise ValueError(f"{type(module).__name__} has no trainable parameter: there is nothing to train")
        return cls(tuple(slots), dtype)

    @property
    def size(self) -> int:
        """d, the number of coordinates."""
        return sum(slot.size for slot in self.slots)

    @property
    def uniform(self) -> bool:
        """All parameters have the vector's type, so that they can be views of it."""
        return all(slot.dtype == self.dtype for slot in self.slots)

    def view(self, vector: Vector, slot: Slot) -> Tensor:
        """The slice of `vector` that is parameter `slot`, in the parameter's shape. No copy."""
        flat = vector[slot.offset : slot.offset + slot.size]
        if slot.channels_last:
            out, inn, height, width = slot.shape
            return flat.view(out, height, width, inn).permute(0, 3, 1, 2)
        return flat.view(slot.shape)

    def views(self, vector: Vector) -> dict[str, Tensor]:
        """Every parameter as a view of `vector`, by name."""
        return {slot.name: self.view(vector, slot) for slot in self.slots}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Vector:
        """A new vector [d] from tensors by parameter name (for example a state dict)."""
        first = tensors[self.slots[0].name]
        vector = torch.empty(self.size, dtype=self.dtype, device=first.device)
        for slot in self.slots:
            self.view(vector, slot).copy_(tensors[slot.name].detach())
        return vector

    def flatten_batch(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Per-sample tensors [B, *shape] by parameter name as one matrix [B, d]."""
        rows = []
        for slot in self.slots:
            tensor = tensors[slot.name]
            if slot.channels_last:
                tensor = tensor.permute(0, 1, 3, 4, 2)
            rows.append(tensor.reshape(tensor.shape[0], slot.size).to(self.dtype))
        return torch.cat(rows, dim=1)

    def load(self, module: nn.Module, vector: Vector) -> None:
        """Copies `vector` into the module's parameters, each in its own type and shape."""
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for slot in self.slots:
                parameters[slot.name].copy_(self.view(vector, slot))

    def bind(self, module: nn.Module, flat: Vector, grad: Vector) -> None:
        """Makes the module's parameters views of `flat` and their gradients views of `grad`.

        Raises:
            ValueError: the parameters differ in type, so no one vector can hold them as views.
        """
        if not self.uniform:
            raise ValueError("parameters of several types cannot be views of one vector; use load() instead")
        parameters = dict(module.named_parameters())
        for slot in self.slots:
            parameters[slot.name].data = self.view(flat, slot)
            parameters[slot.name].grad = self.view(grad, slot)

    def state_dict(self, vector: Vector, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters and buffers under their plain names, ready for a strict `load_state_dict`."""
        state = {slot.name: self.view(vector, slot).detach().to(slot.dtype).contiguous().clone() for slot in self.slots}
        return state | {name: tensor.detach().clone() for name, tensor in buffers.items()}
