"""The workers of a stack, as what may be broken and looked at."""

from __future__ import annotations

import signal

from tools.stack import Child, Stack, segments


class WorkerVictim:
    """`name` is without what makes it unlike those of other stacks; `is_down` while a fault has killed it."""

    def __init__(self, stack: Stack, worker_id: str, tier: str):
        self.name = worker_id.rpartition(".")[2]
        self.tier = tier
        self.is_down = False
        self._stack = stack
        self._id = worker_id

    @property
    def child(self) -> Child:
        return self._stack.workers[self._id]

    @property
    def num_segments(self) -> int:
        return len(segments(self._id))

    def send(self, number: signal.Signals) -> None:
        self.is_down = self.is_down or number == signal.SIGKILL
        self.child.process.send_signal(number)

    def restart(self) -> None:
        self.child.process.wait()
        self._stack.start_worker(self._id)
        self.is_down = False
