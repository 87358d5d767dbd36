"""A pool's owner for the tests of its readers: in this process (`LocalOwner`) or in another one (`RemoteOwner`).

As a program it is that other process: it reads one JSON command per line and writes one reply per line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.workers.pool.support import FINGERPRINT, LAYOUT, SALT, random_kv
from workers.api.schemas import KVLayout, Ticket
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import block_bytes
from workers.pool.pool import Pool
from workers.pool.segment import SHM
from workers.pool.tickets import TicketIssuer
from workers.transports.lender import Lender

SECRET = "a cluster secret of these tests"


class LocalOwner:
    """Kind `tcp` is plain memory behind a lender."""

    def __init__(self, kind: str, *, num_blocks: int = 16, layout: KVLayout = LAYOUT, directory: Path = SHM):
        budget = num_blocks * block_bytes(layout)
        self.pool = Pool(
            create_arena(
                "inproc" if kind == "tcp" else kind,
                layout,
                budget,
                worker="test-owner",
                epoch=new_epoch(),
                directory=directory,
            ),
            FINGERPRINT,
        )
        self.lender = Lender(self.pool.arena, SECRET) if kind == "tcp" else None
        if self.lender is not None:
            self.lender.start()
        self._tickets = TicketIssuer(self.pool, "small")
        self._layout = layout

    def ticket(self, num_tokens: int, seed: int = 0) -> Ticket:
        """Store and lease a new cache of `random_kv(0, num_tokens, seed)`."""
        ids, kv = range(num_tokens), random_kv(0, num_tokens, seed, self._layout)
        entry = self.pool.store(ids, kv, SALT, ttl_s=600)
        return self.ticket_for(entry.cache_id, ttl_s=600)

    def ticket_for(self, cache_id: str, ttl_s: float) -> Ticket:
        """Lease the cache once more."""
        ticket = self._tickets.ticket(self.pool.lease(cache_id, SALT, ttl_s=ttl_s))
        return ticket.model_copy(update={"pool": self.lender.export}) if self.lender else ticket

    def free(self, ticket: Ticket) -> None:
        """Drop the cache and end its lease."""
        self.pool.drop(ticket.cache_id, SALT)
        self.pool.release(ticket.cache_id, ticket.lease_id)

    def mark_writing(self, block: int) -> None:
        self.pool.arena.open([block])

    def rewrite_forever(self, block: int) -> None:
        """Rewrite the block again and again, filled with one number each time."""

        def rewrite() -> None:
            for value in range(1_000_000):
                with self.pool.arena.writing([block]):
                    self.pool.arena.data[block].fill_(float(value))
                time.sleep(0.002)

        threading.Thread(target=rewrite, daemon=True).start()

    def close(self) -> None:
        if self.lender is not None:
            self.lender.close()
        self.pool.close()


class RemoteOwner:
    def __init__(self, kind: str, *, num_blocks: int = 16, layout: KVLayout = LAYOUT, directory: Path = SHM):
        arguments = json.dumps([kind, num_blocks, layout.model_dump(), str(directory)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.transports.owner", arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ticket(self, num_tokens: int, seed: int = 0) -> Ticket:
        return Ticket.model_validate(self._ask("ticket", num_tokens, seed))

    def ticket_for(self, cache_id: str, ttl_s: float) -> Ticket:
        return Ticket.model_validate(self._ask("ticket_for", cache_id, ttl_s))

    def free(self, ticket: Ticket) -> None:
        self._ask("free", ticket.model_dump())

    def mark_writing(self, block: int) -> None:
        self._ask("mark_writing", block)

    def rewrite_forever(self, block: int) -> None:
        self._ask("rewrite_forever", block)

    def close(self) -> None:
        if self.process.poll() is None:
            self._ask("close")
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    torch.set_num_threads(1)
    kind, num_blocks, layout, directory = json.loads(sys.argv[1])
    owner = LocalOwner(kind, num_blocks=num_blocks, layout=KVLayout(**layout), directory=Path(directory))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        arguments = [Ticket(**value) if isinstance(value, dict) else value for value in arguments]
        reply = getattr(owner, name)(*arguments)
        sys.stdout.write(json.dumps(reply.model_dump() if isinstance(reply, Ticket) else reply) + "\n")
        sys.stdout.flush()
    owner.close()


if __name__ == "__main__":
    main()
