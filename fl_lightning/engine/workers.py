"""The lightning engine over several processes, one thread each: the same bits as one process, sooner.

Every worker holds its own copy of the client side and runs an inner `LightningEngine`. A cohort is dealt out by size,
largest first; messages are put back into cohort order, so nothing depends on who finishes when.
"""

from collections.abc import Iterator, Sequence

import torch
from loky import ProcessPoolExecutor

from fl_lightning.client.visit import ClientSide, Visit
from fl_lightning.engine.lightning import LightningEngine
from fl_lightning.records import Message, ServerState

_engine: LightningEngine | None = None


class WorkerEngine:
    """Runs visits in `workers` processes that live until `close`.

    Args:
        side: the client side; its objective must be on the CPU.
        workers: number of processes, at least 2.
    """

    def __init__(self, side: ClientSide, workers: int) -> None:
        self.side = side
        self.workers = workers
        self._pool = ProcessPoolExecutor(max_workers=workers, initializer=_open, initargs=(side,))

    def run(self, server: ServerState, visits: Sequence[Visit]) -> Iterator[Message]:
        """Yields one message per visit, in the order of `visits`."""
        shares = deal([len(self.side.shards[visit.client]) for visit in visits], self.workers)
        jobs = [(share, self._pool.submit(_run, server, [visits[position] for position in share])) for share in shares]
        messages: dict[int, Message] = {}
        for share, job in jobs:
            messages |= zip(share, job.result(), strict=True)
        for position in range(len(visits)):
            yield messages[position]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.shutdown(wait=True, kill_workers=True)


def deal(sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Positions of `sizes` in at most `hands` shares of nearly equal total, largest first; no share is empty."""
    shares: list[list[int]] = [[] for _ in range(hands)]
    totals = [0] * hands
    for position in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
        lightest = totals.index(min(totals))
        shares[lightest].append(position)
        totals[lightest] += sizes[position] + 1
    return [sorted(share) for share in shares if share]


def _open(side: ClientSide) -> None:
    global _engine
    torch.set_num_threads(1)
    _engine = LightningEngine(side)


def _run(server: ServerState, visits: list[Visit]) -> list[Message]:
    assert _engine is not None, "the worker was not opened"
    return list(_engine.run(server, visits))
