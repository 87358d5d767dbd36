"""`Mapper`: applies a fitted map from the KV cache of one model to that of another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mappers.apply import Workspace, outputs_of
from mappers.cache import KVCache, KVChunk
from mappers.errors import BundleCorrupt, FingerprintMismatch, GeometryMismatch, MapperError, TokenizerMismatch
from mappers.manifest import COPY, DEFAULT_HEAD, KINDS, MEASURED, Manifest, QualityGate, probe_name
from mappers.models import prefill
from mappers.rope import TOLERANCE, Rope

Sink = Callable[[int, Tensor, Tensor], None]
TogetherSink = Callable[[int, Tensor], None]


class Mapper:
    """Maps caches of `manifest.source` to caches of `manifest.target`. Thread-safe.

    Computes in float32. With `halves`, matrices stored in half precision are multiplied as such, with float32 sums.
    This is the default on a GPU for the precisions that were measured to tolerate it.
    """

    def __init__(
        self, manifest: Manifest, weights: Mapping[str, Tensor], device: str = "cpu", halves: bool | None = None
    ):
        _check_layers(manifest)
        self.manifest = manifest
        self.weights = dict(weights)
        self.device = torch.device(device)
        self.source_rope, self.target_rope = _ropes_of(manifest, weights)
        if halves is None:
            halves = self.device.type == "cuda" and manifest.precision in MEASURED
        on_device = {name: tensor.to(self.device) for name, tensor in weights.items()}
        self._outputs = outputs_of(manifest, on_device, halves)
        self._local = threading.local()

    @cached_property
    def bundle_id(self) -> str:
        """16 hex digits that identify the map by its weights and models."""
        return self.manifest.bundle_id

    @property
    def weight_bytes(self) -> int:
        """Size of the weights as stored."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def check(self, source_fingerprint: str, target_fingerprint: str) -> None:
        """Raise `FingerprintMismatch` unless this map was fitted for exactly these two models."""
        for role, card, given in (
            ("source", self.manifest.source, source_fingerprint),
            ("target", self.manifest.target, target_fingerprint),
        ):
            if card.fingerprint != given:
                raise FingerprintMismatch(
                    f"bundle {self.bundle_id} was fitted for {role} {card.name} ({card.fingerprint[:12]}…), "
                    f"not for weights {given[:12]}…"
                )

    def check_tokenizers(self, source: str | None = None, target: str | None = None) -> None:
        """Raise `TokenizerMismatch` if a model's tokenizer or chat template has changed since the fit.

        Digests as of `mappers.tokenizer_digest`. A digest that is unknown here or in the bundle is not compared.
        """
        for role, card, given in (("source", self.manifest.source, source), ("target", self.manifest.target, target)):
            known = card.tokenizer_digest
            if known is not None and given is not None and known != given:
                raise TokenizerMismatch(
                    f"bundle {self.bundle_id} was fitted with another tokenizer or chat template of {role} {card.name} "
                    f"({known[:12]}…, now {given[:12]}…)"
                )

    def gate(self, **bounds: Any) -> QualityGate:
        """Return the gate with these `bounds`. A bound that is missing or None is the bundle's, or else the default."""
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return (self.manifest.gate or QualityGate()).model_copy(update=given)

    def refusal(self, **bounds: Any) -> str | None:
        """Return why this map fails the gate with these bounds, None if it passes."""
        objection = self.gate(**bounds).objection(self.manifest.evaluation)
        return f"bundle {self.bundle_id}: {objection}" if objection else None

    def map_into(self, chunk: KVChunk, sink: Sink) -> None:
        """Map one chunk of tokens and pass it on target layer by target layer.

        `sink(layer, keys, values)` receives float32 views (H, T, D) of scratch memory, valid until it returns. Keys are
        post-RoPE at the chunk's own positions. Raises `GeometryMismatch` for a chunk of another shape.
        """

        def each(first: int, states: Tensor) -> None:
            for layer, (keys, values) in enumerate(states.transpose(2, 3), first):
                sink(layer, keys, values)

        self.map_together(chunk, each)

    @torch.no_grad()
    def map_together(self, chunk: KVChunk, sink: TogetherSink, *, copies: bool = True) -> None:
        """Map one chunk and pass on as many adjacent layers at once as fit in scratch memory.

        On a CPU, writing them together takes less than half the time. `sink(first, states)` receives the layers from
        `first` on as (n, 2, T, H, D), keys and values. Without `copies`, the layers in `manifest.copies` are skipped;
        the caller takes them from the source.
        """
        if chunk.geometry != self.manifest.source.geometry:
            raise GeometryMismatch(f"{chunk.geometry}; this map takes {self.manifest.source.geometry}")
        skipped = {} if copies else self.manifest.copies
        work = self._workspace().begin(chunk, self.source_rope, self.target_rope)
        wanted = [layer for layer in range(len(self._outputs)) if layer not in skipped]
        for layers in _adjacent_runs(wanted, len(work.slots)):
            slots = work.slots[: len(layers)]
            for layer, slot in zip(layers, slots, strict=True):
                for output, half in zip(self._outputs[layer], slot, strict=True):
                    output.compute(work, half)
            sink(layers[0], slots)

    def map(self, source: KVCache) -> KVCache:
        """Return the target's cache of the same tokens at the same positions."""
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def keep(layer: int, key: Tensor, value: Tensor) -> None:
            keys.append(key.clone())
            values.append(value.clone())

        self.map_into(source, keep)
        return KVCache(tuple(keys), tuple(values), source.start)

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory of this thread, bounded by its longest chunk so far."""
        return self._workspace().num_bytes

    def _workspace(self) -> Workspace:
        if not hasattr(self._local, "workspace"):
            self._local.workspace = Workspace(self.manifest, self.device)
        workspace: Workspace = self._local.workspace
        return workspace


def replay(
    mapper: Mapper,
    source_model: Any,
    target_model: Any,
    token_ids: Sequence[int],
    num_tokens: int,
    head: int = DEFAULT_HEAD,
) -> KVCache:
    """Compute offline what the target's cache must hold after a handoff of the first `num_tokens` tokens.

        [0, head)            prefilled by the target
        [head, num_tokens)   prefilled by the source, mapped

    This defines the right answer on a mapped path. The native tail and the answer attend over this cache at positions
    from `num_tokens` on. Raises `MapperError` for bounds out of order.
    """
    if not 0 <= head <= num_tokens <= len(token_ids) or num_tokens == 0:
        raise MapperError(
            f"head {head}, num_tokens {num_tokens}; allowed: 1 to {len(token_ids)} tokens, head 0 to num_tokens"
        )
    parts = []
    if head:
        parts.append(prefill(target_model, token_ids[:head]))
    if head < num_tokens:
        parts.append(mapper.map(prefill(source_model, token_ids[:num_tokens]).slice(head, num_tokens)))
    return KVCache.concatenate(parts)


def _adjacent_runs(layers: Iterable[int], max_length: int) -> Iterator[list[int]]:
    """Yield runs of consecutive layers, none longer than `max_length`."""
    run: list[int] = []
    for layer in layers:
        if run and (layer != run[-1] + 1 or len(run) == max_length):
            yield run
            run = []
        run.append(layer)
    if run:
        yield run


def _ropes_of(manifest: Manifest, weights: Mapping[str, Tensor]) -> tuple[Rope, Rope]:
    """Rebuild the RoPE of source and target from their configs.

    Raises `BundleCorrupt` if the installed transformers computes other factors than those of the fit.
    """
    ropes = Rope.from_config(manifest.source.config), Rope.from_config(manifest.target.config)
    for role, rope in zip(("source", "target"), ropes, strict=True):
        stored, now = weights.get(probe_name(role)), rope.probe()
        if stored is None or stored.shape != now.shape or not torch.allclose(stored, now, atol=TOLERANCE):
            raise BundleCorrupt(f"the {role}'s RoPE differs from the one this bundle was fitted with")
    return ropes


def _check_layers(manifest: Manifest) -> None:
    if len(manifest.layers) != manifest.target.num_layers:
        raise BundleCorrupt(f"{len(manifest.layers)} layers for a target of {manifest.target.num_layers}")
    source, target = manifest.source.geometry, manifest.target.geometry
    same_shape = (source.num_kv_heads, source.head_dim) == (target.num_kv_heads, target.head_dim)
    for layer, spec in enumerate(manifest.layers):
        for kind in KINDS:
            output = spec.of(kind)
            used = (*output.key_layers, *output.value_layers)
            if not used or any(not 0 <= i < manifest.source.num_layers for i in used):
                raise BundleCorrupt(f"layer {layer} {kind}: source layers {used} of {manifest.source.num_layers}")
            own = output.key_layers if kind == "keys" else output.value_layers
            if output.method == COPY and (len(used) != 1 or len(own) != 1 or not same_shape):
                raise BundleCorrupt(f"layer {layer} {kind}: a copy takes one source layer of the same kind and shape")
