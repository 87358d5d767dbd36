"""What one step of vLLM loads before its forward pass and saves after it: plain values, from the scheduler's process to
each worker's. `blocks` are the paged blocks of the sequence, from token 0 on."""

from __future__ import annotations

from dataclasses import dataclass

from workers.api.schemas import PoolExport
from workers.engines.vllm.plan import Part


@dataclass(frozen=True)
class Load:
    """Tokens `[begin, end)` of the parts into the sequence's blocks, of which there may be more."""

    request_id: str
    parts: tuple[Part, ...]
    begin: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """The sequence's first `num_tokens` tokens into blocks `into` of the exchange pool."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]
    pool: PoolExport
    into: tuple[int, ...]


@dataclass(frozen=True)
class StepWork:
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
