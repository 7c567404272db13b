"""The debug engine: a plain loop that says where an error happened. Bit for bit the lightning engine's arithmetic."""

from collections.abc import Iterator, Sequence

from fl_lightning.client.visit import ClientSide, Visit, check_trainable, close_visit, guard, open_visit, untrained
from fl_lightning.errors import FLError
from fl_lightning.local.solver import trace_of
from fl_lightning.records import Message, ServerState


class VisitError(RuntimeError):
    """A fault inside a visit; its text names stage, round, client and batch, its cause is the original error."""


class DebugEngine:
    """Runs visits one by one in this process."""

    def __init__(self, side: ClientSide) -> None:
        self.side = side

    def run(self, server: ServerState, visits: Sequence[Visit]) -> Iterator[Message]:
        """Yields one message per visit, in the order of `visits`."""
        check_trainable(self.side, {v.client: len(self.side.shards[v.client]) for v in visits})
        for visit in visits:
            yield self._visit(server, visit)

    def close(self) -> None:
        """Nothing to release."""

    def _visit(self, server: ServerState, visit: Visit) -> Message:
        where = f"round {visit.round}, client {visit.client}"
        stage = "opening the visit"
        try:
            opened = open_visit(self.side, server, visit)
            if not opened.batches:
                return untrained(self.side, visit, server)
            solver = self.side.algorithm.solver
            for number, indices in enumerate(opened.batches):
                stage = f"batch {number + 1} of {len(opened.batches)} ({len(indices)} examples)"
                batch = self.side.store.batch(indices)
                direction = solver.direction(opened.solver, batch, opened.ctx)
                guard(self.side, opened)
                opened.solver = solver.advance(opened.solver, direction, trace_of(batch, opened.ctx))
            stage = "measures and uplink"
            return close_visit(self.side, opened)
        except FLError:
            raise
        except Exception as error:
            raise VisitError(f"{where}, {stage}: {type(error).__name__}: {error}") from error
