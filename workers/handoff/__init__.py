"""The handoff, on the target's side: another worker's cache, mapped into blocks of this worker's pool.

    target.py    the interfaces to the two workers
    plan.py      what is checked and decided before a source block is read
    source.py    the source's blocks, read by the fastest transport that works
    handoffs.py  the handoff itself

Knows no HTTP: the source worker is anything with the calls of `SourcePeer`, such as a `WorkerClient`.
"""

from workers.handoff.handoffs import Handoffs, chunks
from workers.handoff.target import HandoffResult, HandoffTarget

__all__ = ["HandoffResult", "HandoffTarget", "Handoffs", "chunks"]
