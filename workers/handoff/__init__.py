"""The handoff, seen from the target: another worker's cache, mapped into blocks of this worker's pool.

    target.py    what it asks of the two workers
    plan.py      what must hold before a source block is read
    decide.py    map, hybrid, or neither: by cost, from values to a value
    made.py      what earlier handoffs of the same conversation have mapped already
    source.py    the source's blocks, by the fastest transport that works
    handoffs.py  the move itself

Knows no HTTP: a peer is whatever leases, as `WorkerClient` does.
"""

from workers.handoff.handoffs import Handoffs, chunks
from workers.handoff.target import HandoffResult, HandoffTarget

__all__ = ["HandoffTarget", "Handoffs", "HandoffResult", "chunks"]
