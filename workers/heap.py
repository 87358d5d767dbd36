"""What the C library keeps of memory that was freed: given back to the system.

Tensors of many sizes come and go on several threads, and glibc keeps the gaps between them: a worker's memory would
creep up to many times what it uses, though nothing leaks.
"""

from __future__ import annotations

import asyncio
import ctypes


async def keep_small(every_s: float) -> None:
    """Gives back what it can, again and again, for ever."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(give_back)


def give_back() -> bool:
    """Whether anything was given back; never where the C library cannot. Takes milliseconds, on any thread."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    return bool(trim(0))
