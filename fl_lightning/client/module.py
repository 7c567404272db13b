"""A worker's share of a cohort as one LightningModule: each client visit is one epoch of one fit.

The parameter that Lightning optimises is y, one flat vector. `training_step` asks the solver's transform chain for a
direction, writes it to `y.grad` and steps once: a SAM step, two gradients wide, is one optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from fl_lightning.client.visit import ClientSide, OpenVisit, Visit, open_visit, plan
from fl_lightning.local.solver import Batch, trace_of
from fl_lightning.records import Message, ServerState


class SolverOptimizer(torch.optim.Optimizer):
    """Lets Lightning drive `LocalSolver.advance` as it drives any optimizer."""

    def __init__(self, y: nn.Parameter, advance: Callable[[Tensor], Tensor]) -> None:
        super().__init__([y], {})
        self._advance = advance

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        # Lightning wraps its before-step hooks into the closure: not calling it would silence them.
        result = closure() if closure is not None else None
        y = self.param_groups[0]["params"][0]
        y.copy_(self._advance(y.grad))
        return result


class VisitBatches:
    """The batches of the visit that the trainer is at; no length, so each epoch may differ."""

    def __init__(self, module: "ClientModule") -> None:
        self._module = module

    def __iter__(self) -> Iterator[Batch]:
        module = self._module
        for indices in plan(module.side, module.visits[module.current_epoch])[0]:
            yield module.side.store.batch(indices)


class ClientModule(pl.LightningModule):
    """Trains the given visits one after another.

    Args:
        side: algorithm, data and loss of this worker.
        server: the broadcast state.
        visits: the clients' turns, one epoch each; each has at least one batch.

    `messages` holds the uploads, in the order of `visits`, after the fit; the `DPCallback` puts them there.
    """

    def __init__(self, side: ClientSide, server: ServerState, visits: Sequence[Visit]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.side = side
        self.server = server
        self.visits = list(visits)
        self.messages: list[Message] = []
        self.opened: OpenVisit | None = None
        self.y = nn.Parameter(torch.zeros_like(server.w))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SolverOptimizer(self.y, self._advance)

    def train_dataloader(self) -> VisitBatches:
        return VisitBatches(self)

    def on_train_epoch_start(self) -> None:
        self.opened = open_visit(self.side, self.server, self.visits[self.current_epoch])
        with torch.no_grad():
            self.y.copy_(self.opened.solver.y)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        opened = self._open
        self._batch = batch
        self.y.grad = self.side.algorithm.solver.direction(opened.solver, batch, opened.ctx)
        self.optimizers().step()  # type: ignore[union-attr]

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch  # the store has gathered it where it is needed

    @property
    def _open(self) -> OpenVisit:
        assert self.opened is not None, "a training step outside a visit"
        return self.opened

    def _advance(self, direction: Tensor) -> Tensor:
        opened = self._open
        trace = trace_of(self._batch, opened.ctx)
        opened.solver = self.side.algorithm.solver.advance(opened.solver, direction, trace)
        return opened.solver.y
