"""A module's loss as a function of one flat vector: what engines hand to solvers.

The module's parameters are views of a scratch vector; a pass copies w in, runs, and copies the gradient out. The first
pass of a step may move buffers (BatchNorm statistics); any later pass sees and leaves them as they were, so a SAM step
counts each batch once, at the unperturbed weights.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import FLError
from fl_lightning.local.solver import Batch
from fl_lightning.local.transforms import TINY
from fl_lightning.records import Vector
from fl_lightning.vector import ParamLayout


class ModelObjective:
    """Cross-entropy of a classifier; satisfies `local.solver.Objective`.

    Args:
        model: the network, bound to this objective from now on.
        device: where it runs.
        dtype: type of its parameters (float32, or float64 to check identities).
        autocast: run the forward pass under bfloat16 autocast.
        per_sample: "opacus" hooks, or "vmap" (torch.func), the slow oracle that needs no other package.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        autocast: bool = False,
        per_sample: str = "opacus",
    ) -> None:
        self.device = torch.device(device)
        self.model = model.to(device=self.device) if dtype is None else model.to(device=self.device, dtype=dtype)
        self.layout = ParamLayout.of(self.model, channels_last=True)
        self.autocast = autocast
        self.per_sample = per_sample
        self._losses: list[Tensor] = []
        self._parts: list[Tensor] = []  # losses of a private pass, which may come in several parts
        self._flat = self.layout.flatten(self.parameters()).to(self.device)
        self._grad = torch.zeros_like(self._flat)
        if self.layout.uniform:
            self.layout.bind(self.model, self._flat, self._grad)
        self._four_dim = any(slot.channels_last for slot in self.layout.slots)
        self._grad_sample: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Views would drag the whole vector along once per parameter, and come back unbound.
        model = copy.deepcopy(self.model)
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        return ModelObjective, (model, self.device, None, self.autocast, self.per_sample)

    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def initial(self) -> Vector:
        """The model's current parameters, [d], on the CPU."""
        return self._flat.detach().cpu().clone()

    def buffers(self) -> dict[str, Tensor]:
        """A copy of the model's buffers, on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.named_buffers()}

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Writes buffers into the model."""
        own = dict(self.model.named_buffers())
        for name, tensor in buffers.items():
            own[name].copy_(tensor)

    def begin_step(self) -> None:
        self._losses, self._parts = [], []

    def take_losses(self) -> tuple[Tensor, ...]:
        private = (torch.cat(self._parts).mean(),) if self._parts else ()
        losses = (*private, *self._losses)
        self._losses, self._parts = [], []
        return losses

    def gradient(self, w: Vector, batch: Batch) -> Vector:
        first = not self._losses
        with nullcontext() if first else self._buffers_kept():
            loss, g = self._pass(w, batch)
        self._losses.append(loss)
        return g

    def measure_gradient(self, w: Vector, batch: Batch) -> Vector:
        with self._buffers_kept():
            return self._pass(w, batch)[1]

    def loss(self, w: Vector, batch: Batch) -> Tensor:
        self.model.train()
        self._write(w)
        with torch.no_grad(), self._buffers_kept():
            return F.cross_entropy(self._forward(batch[0]), batch[1])

    def example_losses(self, w: Vector, batch: Batch) -> Tensor:
        self.model.train()
        self._write(w)
        with torch.no_grad(), self._buffers_kept():
            return F.cross_entropy(self._forward(batch[0]), batch[1], reduction="none")

    def representations(self, w: Vector, batch: Batch) -> Tensor:
        """The model's `features` of the batch at w, [B, h], without gradient and without touching buffers."""
        self.model.train()
        self._write(w)
        with torch.no_grad(), self._buffers_kept():
            return self._represent(batch[0])

    def representation_gradient(self, w: Vector, batch: Batch, loss: Callable[[Tensor], Tensor]) -> Vector:
        """The gradient of loss(features) in w, [d]; nothing is noted and no buffer moves."""
        self.model.train()
        self._write(w)
        with self._buffers_kept():
            return self._backward(loss(self._represent(batch[0])))

    def per_sample_gradients(self, w: Vector, batch: Batch) -> Tensor:
        inputs, labels = batch
        if len(labels) == 0:
            return w.new_zeros((0, self.layout.size))
        self.model.train()
        self._write(w)
        rows, losses = self._opacus(inputs, labels) if self.per_sample == "opacus" else self._vmap(inputs, labels)
        self._parts.append(losses.detach())
        return rows

    def per_sample_ascent_gradients(self, w: Vector, batch: Batch, rho: float) -> Tensor:
        # Opacus' hooks and torch.func exclude each other on one module, so both passes go through torch.func.
        self.model.train()
        self._write(w)
        rows, losses = self._vmap(*batch) if len(batch[1]) else (w.new_zeros((0, self.layout.size)), None)
        if losses is not None:
            self._parts.append(losses.detach())
        ascended = w + rows * (rho / (torch.linalg.vector_norm(rows, dim=1, keepdim=True) + TINY))
        if not len(rows):
            return rows

        def loss_of(point: Vector, x: Tensor, y: Tensor) -> Tensor:
            logits = torch.func.functional_call(self.model, dict(self.layout.views(point)), (x.unsqueeze(0),))
            return F.cross_entropy(logits, y.unsqueeze(0))

        return torch.func.vmap(torch.func.grad(loss_of))(ascended, *batch)

    def evaluate(self, w: Vector, buffers: Mapping[str, Tensor], batches: "list[Batch]") -> tuple[float, float] | None:
        """(mean loss, accuracy) over batches in evaluation mode; None when they hold no example."""
        self.set_buffers(buffers)
        self._write(w.to(self.device))
        self.model.eval()
        loss, correct, total = 0.0, 0, 0
        with torch.inference_mode():
            for inputs, labels in batches:
                logits = self._forward(inputs)
                loss += float(F.cross_entropy(logits.float() if self.autocast else logits, labels, reduction="sum"))
                correct += int((logits.argmax(dim=1) == labels).sum())
                total += len(labels)
        self.model.train()
        return (loss / total, correct / total) if total else None

    def _pass(self, w: Vector, batch: Batch) -> tuple[Tensor, Vector]:
        self.model.train()
        self._write(w)
        loss = F.cross_entropy(self._forward(batch[0]), batch[1])
        return loss.detach(), self._backward(loss)

    def _backward(self, loss: Tensor) -> Vector:
        if self.layout.uniform:
            self._grad.zero_()
            with nullcontext() if self._grad_sample is None else _no_hook_advice():
                loss.backward()
            return self._grad.clone()
        parameters = self.parameters()
        grads = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return self.layout.flatten(dict(zip(parameters, grads, strict=True)))

    def _write(self, w: Vector) -> None:
        if self.layout.uniform:
            with torch.no_grad():
                self._flat.copy_(w)
        else:
            self.layout.load(self.model, w)

    def _represent(self, inputs: Tensor) -> Tensor:
        features = getattr(self.model, "features", None)
        if features is None:
            raise FLError(f"{type(self.model).__name__} has no method features(images), which this algorithm needs")
        hidden = self._forward(inputs, features)
        return hidden.float() if self.autocast else hidden

    def _forward(self, inputs: Tensor, network: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        if self._four_dim and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        context: AbstractContextManager[object] = (
            torch.autocast(self.device.type, dtype=torch.bfloat16) if self.autocast else nullcontext()
        )
        with context:
            return (network or self.model)(inputs)

    def _opacus(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._grad_sample is None:
            from fl_lightning.engine.row_hooks import row_hooks

            # Wrapped once for the life of the objective: a second wrap would add its hooks twice.
            self._grad_sample = row_hooks(self.model)
        self._grad_sample.enable_hooks()
        losses = F.cross_entropy(self._forward(inputs), labels, reduction="none")
        self._grad.zero_()
        with _no_hook_advice():
            losses.sum().backward()
        # Any other backward pass must leave no per-sample gradients behind.
        self._grad_sample.disable_hooks()
        samples = {name: p.grad_sample for name, p in self.parameters().items()}  # type: ignore[attr-defined]
        rows = self.layout.flatten_batch(samples)
        for p in self.parameters().values():
            p.grad_sample = None  # type: ignore[attr-defined]
        return rows, losses

    def _vmap(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        def loss_of(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = torch.func.functional_call(self.model, parameters, (x.unsqueeze(0),))
            loss = F.cross_entropy(logits, y.unsqueeze(0))
            return loss, loss.detach()

        per_example = torch.func.vmap(torch.func.grad(loss_of, has_aux=True), in_dims=(None, 0, 0))
        parameters = {name: p.detach() for name, p in self.parameters().items()}
        grads, losses = per_example(parameters, inputs, labels)
        return self.layout.flatten_batch(grads), losses

    def _buffers_kept(self) -> AbstractContextManager[None]:
        return _Kept(self.model)


class _no_hook_advice(warnings.catch_warnings):
    """The images need no gradient, which is as it should be; PyTorch remarks on it wherever Opacus has its hooks."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        return entered


class _Kept(AbstractContextManager[None]):
    """Puts a module's buffers back as they were on entry."""

    def __init__(self, module: nn.Module) -> None:
        self._pairs = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def __exit__(self, *exc: object) -> None:
        with torch.no_grad():
            for buffer, kept in self._pairs:
                buffer.copy_(kept)
