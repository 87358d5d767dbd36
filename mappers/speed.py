"""Measures how fast a mapper is on this machine, compared with the processor's peak."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.mapper import Mapper

LENGTHS = (512, 1024, 2048, 4096)
CHUNK_TOKENS = 512  # as in a worker
REPEATS = 5
PEAK_SIZE = 1024  # rows and columns of the matrices multiplied to measure the peak


@dataclass(frozen=True)
class Speed:
    """Times by number of tokens: `map_ms` is the median, `best_ms` the minimum.

    `peak_gflops` is the best rate of one large float32 product with as many threads.
    """

    threads: int
    peak_gflops: float
    flops_per_token: int
    map_ms: dict[int, float]
    best_ms: dict[int, float]

    @property
    def ms_per_1024(self) -> float:
        """From the longest length, where fixed costs matter least."""
        longest = max(self.map_ms)
        return self.map_ms[longest] * 1024 / longest

    @property
    def share_of_peak(self) -> float:
        """Best rate of the map's matrix products over the peak. RoPE and copies count as time only."""
        longest = max(self.best_ms)
        return self.flops_per_token * longest / (self.best_ms[longest] / 1e3) / (self.peak_gflops * 1e9)

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"tokens": tokens, "ms": round(ms, 3), "best_ms": round(self.best_ms[tokens], 3)}
            for tokens, ms in self.map_ms.items()
        ]
        return {
            "threads": self.threads,
            "peak_gflops": round(self.peak_gflops, 1),
            "flops_per_token": self.flops_per_token,
            "map_ms_per_1024": round(self.ms_per_1024, 3),
            "share_of_peak": round(self.share_of_peak, 4),
            "map": rows,
        }


@torch.no_grad()
def measure(mapper: Mapper, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS) -> Speed:
    """Time the map in rounds over all lengths. The peak is measured between them, under the same conditions."""
    caches = {length: random_source_cache(mapper, length) for length in lengths}
    one, other = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=mapper.device) for _ in range(2))
    for cache in caches.values():  # allocate scratch memory
        apply(mapper, cache)
    times: dict[int, list[float]] = {length: [] for length in lengths}
    products = []
    for _ in range(repeats):
        for length, cache in caches.items():
            times[length].append(timed(lambda cache=cache: apply(mapper, cache), mapper.device))  # type: ignore[misc]
            products.append(timed(lambda: torch.mm(one, other), mapper.device))
    return Speed(
        threads=torch.get_num_threads(),
        peak_gflops=2 * PEAK_SIZE**3 / min(products) / 1e9,
        flops_per_token=flops_per_token(mapper),
        map_ms={length: statistics.median(found) * 1e3 for length, found in times.items()},
        best_ms={length: min(found) * 1e3 for length, found in times.items()},
    )


def flops_per_token(mapper: Mapper) -> int:
    """Return the multiplications and additions of the map per token: two per matrix element."""
    matrices = (
        tensor for name, tensor in mapper.weights.items() if name.startswith("layers.") and not name.endswith(".bias")
    )
    return 2 * sum(tensor.numel() for tensor in matrices)


def random_source_cache(mapper: Mapper, num_tokens: int) -> KVCache:
    """Return a random cache of the source's shape. The time of a map does not depend on the values."""
    geometry = mapper.manifest.source.geometry
    generator = torch.Generator().manual_seed(0)

    def states() -> tuple[Tensor, ...]:
        shape = (geometry.num_kv_heads, num_tokens, geometry.head_dim)
        return tuple(torch.randn(shape, generator=generator).to(mapper.device) for _ in range(geometry.num_layers))

    return KVCache(states(), states())


def apply(mapper: Mapper, cache: KVCache) -> None:
    """Map a cache chunk by chunk and discard the result. Copied layers are skipped: they need no map."""
    for begin in range(0, cache.num_tokens, CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, cache.num_tokens)
        mapper.map_together(cache.slice(begin, end), lambda first, states: None, copies=False)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, waiting for the device."""
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
