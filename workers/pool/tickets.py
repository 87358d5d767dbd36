"""`TicketIssuer`: a worker's leases as tickets, the messages of `workers.api`."""

from __future__ import annotations

from dataclasses import dataclass

from workers.api.schemas import PoolExport, Ticket
from workers.pool.entries import Lease
from workers.pool.pool import Pool


@dataclass(frozen=True)
class TicketIssuer:
    """Issues tickets for a pool whose blocks the model `model` computed. `streams` are further exports of the pool."""

    pool: Pool
    model: str
    streams: tuple[PoolExport, ...] = ()

    @property
    def exports(self) -> list[PoolExport]:
        """All exports of the pool."""
        return [self.pool.export(), *self.streams]

    def ticket(self, lease: Lease) -> Ticket:
        entry, exports = lease.entry, self.exports
        return Ticket(
            lease_id=lease.lease_id,
            cache_id=entry.cache_id,
            pool=exports[0],
            exports=exports,
            layout=self.pool.layout,
            blocks=list(entry.blocks),
            generations=list(lease.generations),
            token_ids=list(entry.token_ids),
            num_tokens=entry.num_tokens,
            digest=entry.digest,
            model=self.model,
            fingerprint=self.pool.fingerprint,
            provenance=entry.provenance,
            expires_at=lease.expires_at,
        )
