"""One new token of several sequences in one forward pass, each over a working memory of its own.

    new tokens    (B, 1)      norms, embeddings, linear layers (`rowwise`) and positions take them together
    KV            memory 0 .. B-1, of different lengths: written and attended over one by one, neither padded nor copied

Every row comes out as it would alone, so that the tokens of a greedy answer do not depend on what else runs. That holds
for models whose layers do not mix rows: those of `BATCHED`, each of which a test compares bit by bit. Mixtures of
experts do mix them, and so does a RoPE whose factors depend on the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from mappers.model_config import constant_positions
from workers.engines.transformers import attention
from workers.engines.transformers.memory import WorkingMemory

BATCHED = frozenset({"gemma3_text", "llama", "mistral", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"})


def can_batch(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        config.model_type in BATCHED
        and constant_positions(config) is None
        and config._attn_implementation == attention.NAME
    )


def decode(model: PreTrainedModel, memories: Sequence[WorkingMemory], token_ids: Sequence[int]) -> Tensor:
    """Read one token into each memory; logits after it, `(B, vocab)`. Without `can_batch`, B must be 1. Where it
    fails, the memories hold what they held."""
    positions = [memory.num_tokens for memory in memories]
    try:
        return _decoded(model, memories, token_ids, positions)
    except Exception:
        for memory, position in zip(memories, positions, strict=True):
            memory.resize(position)
        raise


def _decoded(
    model: PreTrainedModel, memories: Sequence[WorkingMemory], token_ids: Sequence[int], positions: Sequence[int]
) -> Tensor:
    for memory, position in zip(memories, positions, strict=True):
        memory.reserve(position + 1)
    output = model(
        input_ids=torch.tensor(token_ids, device=model.device)[:, None],  # (B, 1)
        position_ids=torch.tensor(positions, device=model.device)[:, None],
        past_key_values=_joined(memories) if can_batch(model) else memories[0].cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _joined(memories: Sequence[WorkingMemory]) -> Cache:
    layers = zip(*(memory.cache.layers for memory in memories), strict=True)
    return Cache(layers=[_JoinedLayer(of_each) for of_each in layers])


class _JoinedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed by mypy
    """One layer of several working memories. What it gives to attention are tuples: a tensor for each of them."""

    is_sliding = False

    def __init__(self, layers: Sequence[CacheLayerMixin]):
        super().__init__()
        self._layers = layers
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: each memory was allocated with its sequence."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        num_rows = len(self._layers)
        new = zip(self._layers, key_states.chunk(num_rows), value_states.chunk(num_rows), strict=True)
        keys, values = zip(*(layer.update(key, value) for layer, key, value in new), strict=True)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # no mask: each new token sees all that stands in its own memory

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
