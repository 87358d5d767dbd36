"""Mapping against prefill on a GPU, and `cuda_ipc` between two processes, with Qwen3's shapes and random weights.

    python benchmarks/gpu.py --json gpu.json        at most 8 minutes on one GPU; skips a pair that does not fit
    python benchmarks/gpu.py --dry-run              the same steps on the CPU, in tiny shapes, over shared memory

    pool of another process ──cuda_ipc──► a chunk ──map──► target layers      against      the target's own prefill

The copy is compared with what the owner wrote. A mapper uses `--layers` source layers and all heads per target layer,
keys from keys and values from values, with float16 matrices and float32 sums. A prefill is one bfloat16 forward pass of
the whole prompt, with SDPA. The values do not affect either time. Results are medians over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from mappers.cache import KVCache
from mappers.manifest import KINDS, Calibration, LayerSpec, Manifest, ModelCard, OutputSpec, probe_name, weight_name
from mappers.mapper import Mapper
from mappers.rope import Rope
from mappers.speed import timed
from tools.measuring import commit, machine
from tools.output import add_json_option, render, write_json
from workers.api.schemas import KVLayout, Ticket
from workers.handoff import chunks
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import block_bytes, blocks_for, empty_cache
from workers.pool.pool import Pool
from workers.pool.tickets import TicketIssuer
from workers.transports import load_transport
from workers.transports.base import Reader

GOAL = 25.0  # minimum prefill time over map time, for the last pair
BLOCK_TOKENS = 32
SALT = "0" * 16
BUDGET_S = 8 * 60


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128
    vocabulary: int = 151_936

    @property
    def config(self) -> Qwen3Config:
        return Qwen3Config(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            max_position_embeddings=40_960,
            rope_theta=1e6,
        )

    def layout(self, dtype: str) -> KVLayout:
        return KVLayout(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype=dtype,
        )


QWEN3 = {
    "0.6B": Shape(28, 1024, 16, 8, 3072),
    "1.7B": Shape(28, 2048, 16, 8, 6144),
    "8B": Shape(36, 4096, 32, 8, 12_288),
    "14B": Shape(40, 5120, 40, 8, 17_408),
    "32B": Shape(64, 5120, 64, 8, 25_600),
}
TINY = {
    "small": Shape(2, 32, 4, 2, 64, head_dim=8, vocabulary=128),
    "large": Shape(3, 48, 4, 2, 96, head_dim=8, vocabulary=128),
}


@dataclass(frozen=True)
class Plan:
    """What to measure, and on which device."""

    shapes: dict[str, Shape]
    pairs: tuple[tuple[str, str], ...]
    lengths: tuple[int, ...]
    device: str
    kind: str
    dtype: torch.dtype
    chunk_tokens: int


ON_GPU = Plan(
    QWEN3,
    (("0.6B", "1.7B"), ("8B", "14B"), ("14B", "32B")),
    (1024, 4096, 16_384, 32_768),
    "cuda",
    "cuda_ipc",
    torch.bfloat16,
    2048,
)
DRY = Plan(TINY, (("small", "large"),), (64, 128), "cpu", "shm", torch.float32, 48)


@dataclass(frozen=True)
class Row:
    """One pair and length. Times are medians."""

    pair: str
    tokens: int
    copy_ms: float
    map_ms: float
    prefill_ms: float
    gb_per_s: float
    copy_is_right: bool

    @property
    def times_faster(self) -> float:
        return self.prefill_ms / self.map_ms


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="run on the CPU with tiny shapes")
    parser.add_argument("--layers", type=int, default=4, help="source layers per target layer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lend", metavar="SHAPE", help=argparse.SUPPRESS)  # the other process
    add_json_option(parser, "all rows")
    options = parser.parse_args(argv)
    plan = DRY if options.dry_run else ON_GPU
    if plan.device == "cuda" and not torch.cuda.is_available():
        print("gpu: PyTorch finds no CUDA device; --dry-run takes the same steps on the CPU", file=sys.stderr)
        return 2
    if options.lend:
        lend(plan, options.lend)
        return 0
    rows = measure(plan, options.layers, options.repeats)
    device = torch.cuda.get_device_name() if plan.device == "cuda" else "cpu"
    report = [asdict(row) | {"times_faster": row.times_faster} for row in rows]
    write_json(options.json, {"machine": machine(), "commit": commit(), "device": device, "rows": report})
    print(_table(rows, device))
    return 0 if all(row.copy_is_right for row in rows) else 1


def measure(plan: Plan, num_layers: int, repeats: int) -> list[Row]:
    """Measure pair by pair until the time budget is spent. Prints what it skips."""
    rows: list[Row] = []
    deadline = time.monotonic() + BUDGET_S
    for source, target in plan.pairs:
        name = f"{source} -> {target}"
        try:
            for row in _pair(plan, source, target, num_layers, repeats, deadline):
                rows.append(row)
                print(f"  {name}, {row.tokens} tokens", flush=True)
        except torch.OutOfMemoryError as error:
            print(f"  {name}: skipped, {str(error).splitlines()[0]}", flush=True)
    return rows


@torch.no_grad()
def _pair(plan: Plan, source: str, target: str, num_layers: int, repeats: int, deadline: float) -> Iterator[Row]:
    mapper = random_mapper(plan, plan.shapes[source], plan.shapes[target], num_layers)
    model = random_model(plan, plan.shapes[target])
    with lender(plan, source) as ticket, opened(ticket) as reader:
        for tokens in plan.lengths:
            if time.monotonic() > deadline:
                print(f"  {source} -> {target}, {tokens} tokens: skipped, out of time", flush=True)
                continue
            lent, cache = (
                LentCache(reader, ticket, chunks(0, tokens, plan.chunk_tokens)),
                noise(plan, ticket.layout, tokens),
            )
            ids = torch.randint(plan.shapes[target].vocabulary, (1, tokens), device=plan.device)
            copy_s = _median(lent.read, plan, repeats)
            yield Row(
                pair=f"{source} -> {target}",
                tokens=tokens,
                copy_ms=1e3 * copy_s,
                map_ms=1e3 * _median(lambda: map_all(mapper, cache, plan.chunk_tokens), plan, repeats),  # noqa: B023
                prefill_ms=1e3 * _median(lambda: model(ids, use_cache=True, logits_to_keep=1), plan, repeats),  # noqa: B023
                gb_per_s=tokens * block_bytes(ticket.layout) / BLOCK_TOKENS / copy_s / 1e9,
                copy_is_right=lent.is_right,
            )


@dataclass(frozen=True)
class LentCache:
    """A cache of another process, read chunk by chunk."""

    reader: Reader
    ticket: Ticket
    spans: Sequence[tuple[int, int]]

    def chunks(self) -> Iterator[KVCache]:
        for begin, end in self.spans:
            yield self.reader.read(self.ticket.blocks, self.ticket.generations, begin, end)

    def read(self) -> None:
        for _ in self.chunks():
            pass

    @property
    def is_right(self) -> bool:
        """Whether the data is what the owner wrote."""
        return all(_same(chunk, pattern(self.ticket.layout, chunk)) for chunk in self.chunks())


def map_all(mapper: Mapper, cache: KVCache, chunk_tokens: int) -> None:
    for begin, end in chunks(0, cache.num_tokens, chunk_tokens):
        mapper.map_into(cache.slice(begin, end), lambda layer, keys, values: None)


def random_mapper(plan: Plan, source: Shape, target: Shape, num_layers: int) -> Mapper:
    """Map each target layer from the `num_layers` source layers around the same relative depth."""
    cards = [_card(shape) for shape in (source, target)]
    shape = (num_layers * cards[0].geometry.width, cards[1].geometry.width)
    specs, weights = [], {}
    for layer in range(target.layers):
        first = min(layer * source.layers // target.layers, source.layers - num_layers)
        chosen = tuple(range(first, first + num_layers))
        specs.append(
            LayerSpec(
                keys=OutputSpec(method="ridge", key_layers=chosen),
                values=OutputSpec(method="ridge", value_layers=chosen),
            )
        )
        for kind in KINDS:
            matrix = torch.randn(shape, device=plan.device) / shape[0] ** 0.5
            weights[weight_name(layer, kind, "weight")] = matrix.half()
            weights[weight_name(layer, kind, "bias")] = torch.zeros(shape[1])
    for role, card in zip(("source", "target"), cards, strict=True):
        weights[probe_name(role)] = Rope.from_config(card.config).probe()
    manifest = Manifest(
        source=cards[0],
        target=cards[1],
        method="ridge",
        layers=tuple(specs),
        precision="float16",
        calibration=Calibration(name="none", digest="0" * 64, num_documents=0, num_tokens=0, head=0),
        created="2026-01-01",
        tool_version="benchmark",
        licence="none",
    )
    return Mapper(manifest, weights, plan.device, halves=plan.device != "cpu")


def random_model(plan: Plan, shape: Shape) -> Any:
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=plan.dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def _card(shape: Shape) -> ModelCard:
    return ModelCard(
        name="random",
        fingerprint="0" * 64,
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        config=shape.config.to_dict(),
    )


# The lending process


@contextmanager
def lender(plan: Plan, shape: str) -> Iterator[Ticket]:
    """Run a process that lends a cache of the longest length, for the duration of the block."""
    command = [sys.executable, __file__, "--lend", shape, *([] if plan is ON_GPU else ["--dry-run"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            yield Ticket.model_validate_json(process.stdout.readline())
        finally:
            process.stdin.close()


@contextmanager
def opened(ticket: Ticket) -> Iterator[Reader]:
    reader = load_transport(ticket.pool.kind).open(ticket.pool, ticket.layout)
    try:
        yield reader
    finally:
        reader.close()


def lend(plan: Plan, name: str) -> None:
    """Print a ticket and hold its cache until standard input ends."""
    layout, tokens = plan.shapes[name].layout(str(plan.dtype).removeprefix("torch.")), max(plan.lengths)
    budget = blocks_for(tokens, BLOCK_TOKENS) * block_bytes(layout)
    arena = create_arena(plan.kind, layout, budget, worker="gpu-benchmark", epoch=new_epoch(), device=plan.device)
    pool = Pool(arena, fingerprint="0" * 64)
    try:
        written = pattern(layout, empty_cache(layout, 0, tokens, plan.device))
        entry = pool.store(range(tokens), written, SALT, ttl_s=3600)
        lease = pool.lease(entry.cache_id, SALT, ttl_s=3600)
        print(TicketIssuer(pool, name).ticket(lease).model_dump_json(), flush=True)
        sys.stdin.read()
    finally:
        pool.close()


def pattern(layout: KVLayout, like: KVCache) -> KVCache:
    """Return a cache of the same tokens whose values encode token, layer and kind, exact in bfloat16."""

    def states(layer: int, kind: int) -> Tensor:
        numbers = (like.positions + 7 * layer + 3 * kind) % 251
        return numbers.to(like.keys[0].dtype)[None, :, None].expand(layout.num_kv_heads, -1, layout.head_dim)

    layers = range(layout.num_layers)
    return KVCache(tuple(states(i, 0) for i in layers), tuple(states(i, 1) for i in layers), like.start)


def noise(plan: Plan, layout: KVLayout, num_tokens: int) -> KVCache:
    cache = empty_cache(layout, 0, num_tokens, plan.device)
    for tensor in cache.keys + cache.values:
        tensor.normal_()
    return cache


def _same(left: KVCache, right: KVCache) -> bool:
    return all(map(torch.equal, left.keys + left.values, right.keys + right.values))


def _median(work: Callable[[], object], plan: Plan, repeats: int) -> float:
    """Median seconds, after one warm-up run."""
    device = torch.device(plan.device)
    timed(work, device)
    return statistics.median(timed(work, device) for _ in range(repeats))


def _table(rows: Sequence[Row], device: str) -> str:
    head = ["pair", "tokens", "copy ms", "GB/s", "map ms", "prefill ms", "times faster", "copy"]
    lines = [
        [row.pair, row.tokens, row.copy_ms, row.gb_per_s, row.map_ms, row.prefill_ms, row.times_faster]
        + ["right" if row.copy_is_right else "WRONG"]
        for row in rows
    ]
    return f"\n{render(head, lines)}\n\n{device}; goal: the map of the last pair at least {GOAL:.0f} times faster"


if __name__ == "__main__":
    sys.exit(main())
