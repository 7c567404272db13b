"""The DP callback: guards every step and makes the client's uplink run inside the client's boundary."""

import lightning.pytorch as pl
import torch

from fl_lightning.client.module import ClientModule
from fl_lightning.client.visit import check_trainable, close_visit, guard


class DPCallback(pl.Callback):
    """Stands between a client and the server.

    - Before training it refuses models for which the level's guarantee has no proof.
    - Before each optimizer step it checks that the direction is a private gradient (level "sample").
    - At the end of each visit it runs measures, clipping and noise, and attaches the declared releases to the message;
      the orchestrator's ledger records them in cohort order.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _client(pl_module)
        check_trainable(module.side, {v.client: len(module.side.shards[v.client]) for v in module.visits})

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        module = _client(pl_module)
        assert module.opened is not None
        guard(module.side, module.opened)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module = _client(pl_module)
        assert module.opened is not None
        module.messages.append(close_visit(module.side, module.opened))
        module.opened = None


def _client(module: pl.LightningModule) -> ClientModule:
    if not isinstance(module, ClientModule):
        raise TypeError(f"DPCallback guards a ClientModule, not a {type(module).__name__}")
    return module
