"""The default engine: a cohort goes through one `Trainer.fit`, a visit an epoch, in this process or in several."""

import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from fl_lightning.client.callbacks import DPCallback
from fl_lightning.client.module import ClientModule
from fl_lightning.client.visit import ClientSide, Visit, plan, untrained
from fl_lightning.records import Message, ServerState


class LightningEngine:
    """Runs visits in this process on the objective's device.

    Args:
        side: algorithm, data and loss.
        callbacks: further Lightning callbacks, run after the DP callback.
    """

    def __init__(self, side: ClientSide, callbacks: Sequence[pl.Callback] = ()) -> None:
        self.side = side
        self.callbacks = list(callbacks)

    def run(self, server: ServerState, visits: Sequence[Visit]) -> Iterator[Message]:
        """Yields one message per visit, in the order of `visits`."""
        trained = [visit for visit in visits if plan(self.side, visit)[0]]
        messages = iter(self._fit(server, trained)) if trained else iter(())
        able = {visit.client for visit in trained}
        for visit in visits:
            yield next(messages) if visit.client in able else untrained(self.side, visit, server)

    def close(self) -> None:
        """Nothing to release."""

    def _fit(self, server: ServerState, visits: Sequence[Visit]) -> list[Message]:
        module = ClientModule(self.side, server, visits)
        with _quiet():
            trainer = _trainer(self.side.objective.device, len(visits), [DPCallback(), *self.callbacks])
            interrupt = signal.getsignal(signal.SIGINT)
            try:
                trainer.fit(module)
            except SystemExit as error:
                # Lightning answers Ctrl-C by sys.exit(1) and leaves SIGINT ignored; callers need the interrupt itself.
                if trainer.interrupted and isinstance(error.__context__, KeyboardInterrupt):
                    signal.signal(signal.SIGINT, interrupt)
                    raise KeyboardInterrupt from None
                raise
        return module.messages


def _trainer(device: torch.device, epochs: int, callbacks: list[pl.Callback]) -> pl.Trainer:
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index or 0] if device.type == "cuda" else 1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )


class _quiet:
    """Lightning's banners and advice are for one long training, not for a fit per round."""

    _names = ("lightning.pytorch", "lightning.fabric", "lightning", "pytorch_lightning")

    def __enter__(self) -> None:
        self._levels = {name: logging.getLogger(name).level for name in self._names}
        for name in self._names:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", module=r"lightning(\..*)?")
        warnings.filterwarnings("ignore", message=r".*(dataloader|DataLoader|GPU available|val_loop).*")

    def __exit__(self, *exc: Any) -> None:
        self._warnings.__exit__(None, None, None)
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
