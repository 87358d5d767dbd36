"""Which KV heads a worker of a tensor-parallel group holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """KV heads `[begin, end)` of the model."""

    begin: int
    end: int

    @property
    def part(self) -> slice:
        return slice(self.begin, self.end)


def heads_of(rank: int, num_ranks: int, num_kv_heads: int) -> Heads:
    """As vLLM shares them: each rank an equal run of heads; with fewer heads than ranks, each head on several ranks."""
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads cannot be shared equally among {num_ranks} ranks")
    if num_kv_heads >= num_ranks:
        size = num_kv_heads // num_ranks
        return Heads(rank * size, (rank + 1) * size)
    head = rank * num_kv_heads // num_ranks
    return Heads(head, head + 1)
