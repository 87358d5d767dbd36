"""The model's forward pass on the CPU: grouped attention, row-wise linear layers, and one decode step for a batch.

    new tokens    (B, 1)          embeddings, norms, linear layers and positions process all rows together
    KV            memory 0..B-1   of different lengths: appended to and attended over one by one, not padded or copied

Each row of a batch is bit for bit what it would be alone, so the tokens of a greedy answer do not depend on what else
runs. This holds for models whose layers do not mix rows: those in `BATCHED`, each compared by a test. Mixtures of
experts mix rows, and so does a RoPE whose factors depend on the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from mappers.model_config import constant_positions
from workers.engines.transformers.memory import WorkingMemory

ATTENTION = "kvrelay_grouped_sdpa"
BLOCK_BYTES = 4 * 2**20
BLOCK_ROWS_MULTIPLE = 64  # divisible by most numbers of threads
BATCHED = frozenset({"gemma3_text", "llama", "mistral", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"})

# -- attention ----------------------------------------------------------------------------------------------------


def attention_for(device: torch.device) -> str:
    """Return the `attn_implementation` to load a model with."""
    if device.type != "cpu":
        return "sdpa"
    AttentionInterface.register(ATTENTION, grouped_sdpa)
    AttentionMaskInterface.register(ATTENTION, float_mask)
    return ATTENTION


def float_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """Return `sdpa_mask` as a bias of 0 or minus infinity. Every layer would convert a boolean mask again."""
    visible = sdpa_mask(*args, dtype=dtype, **kwargs)
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """SDPA that keeps grouped queries grouped.

    With a mask, transformers repeats keys and values for every query head, which CUDA's kernels need. The CPU's do not:
    this saves copying the whole cache in every layer of every chunk.

    `query` is `(1, heads, new tokens, dim)`, `key` and `value` `(1, kv heads, all tokens, dim)`. Without a mask, either
    there is one new token, which sees everything, or all tokens are new and attention is causal. One new token of each
    of B sequences, `(B, heads, 1, dim)`, comes with a tuple of B keys and one of B values.
    """
    if isinstance(key, tuple):
        visible = slice(-sliding_window, None) if sliding_window else slice(None)
        rows = zip(query.chunk(len(key)), key, value, strict=True)
        attended = [_attend(q, k[:, :, visible], v[:, :, visible], None, scaling) for q, k, v in rows]
        return torch.cat(attended), None  # (B, 1, heads, dim)
    return _attend(query, key, value, attention_mask, scaling), None


def _attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None) -> Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous()  # (1, new tokens, heads, dim)


# -- linear layers ------------------------------------------------------------------------------------------------


class RowwiseLinear(nn.Linear):
    """A linear layer that computes each row of a batch exactly as it would alone. Shares `linear`'s parameters.

    Rows of a batch are `(B, 1, in)`, prompts `(1, T, in)`. A product of a matrix with several rows sums in another
    order than one with a single row, so answers would depend on what else runs. But a batch is cheap because the
    weights are read from memory once, not because of that product. So each block of weights is multiplied with one row
    after the other while it is in the processor's cache:

        block of the weight    |████|....|....|    row 0, row 1, row 2, then the next block

    A prompt is one product with swapped factors: MKL splits the first factor among its threads, which should be the
    larger one. This takes 60% of the time at 4 tokens, 80% at 64.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        multiples = BLOCK_BYTES // linear.weight[0].nbytes // BLOCK_ROWS_MULTIPLE
        self._block_rows = max(1, multiples) * BLOCK_ROWS_MULTIPLE

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 3:
            return super().forward(input)
        if input.shape[1] != 1:
            return _swapped_product(input, self.weight, self.bias)
        tokens = input.unbind(0)  # (1, in) each
        weights = self.blocks_of(self.weight)
        biases = [None] * len(weights) if self.bias is None else self.blocks_of(self.bias)
        blocks = [
            _concatenate([_row_product(token, weight, bias) for token in tokens], dim=0)
            for weight, bias in zip(weights, biases, strict=True)
        ]  # (B, part of out) each
        return _concatenate(blocks, dim=1).unsqueeze(1)  # (B, 1, out)

    def blocks_of(self, parameter: Tensor) -> list[Tensor]:
        """Return the weight or the bias, cut into blocks."""
        rows = self._block_rows
        return [parameter[begin : begin + rows] for begin in range(0, len(parameter), rows)]


def make_rowwise(model: nn.Module) -> None:
    """Replace every linear layer of `model` by a `RowwiseLinear` over the same parameters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RowwiseLinear(child))


def _row_product(token: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `token @ weight.t() + bias` of `(1, in)`, `(1, out)`, with the weight's rows split among the threads.

    MKL multiplies a matrix with one row on one thread, which does not use the whole memory bandwidth. As a batch of
    products, each over a part of the block, it runs on all threads: in 60% of the time on two cores.
    """
    size = len(weight)
    parts = next(n for n in range(torch.get_num_threads(), 0, -1) if size % n == 0)
    shares = weight.view(parts, size // parts, -1)
    product = torch.bmm(shares, token.t().expand(parts, -1, 1)).view(1, size)
    return product if bias is None else product + bias


def _swapped_product(chunk: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `chunk @ weight.t() + bias` of `(..., T, in)` as (weight @ chunk.t()).t()."""
    product = torch.mm(weight, chunk.flatten(0, -2).t()).t().contiguous()  # (T, out)
    if bias is not None:
        product += bias
    return product.view(*chunk.shape[:-1], len(weight))


def _concatenate(parts: list[Tensor], *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


# -- batched decoding ---------------------------------------------------------------------------------------------


def can_batch(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        config.model_type in BATCHED and constant_positions(config) is None and config._attn_implementation == ATTENTION
    )


def decode(model: PreTrainedModel, memories: Sequence[WorkingMemory], token_ids: Sequence[int]) -> Tensor:
    """Append one token to each memory and return the logits after it, `(B, vocab)`. B must be 1 unless `can_batch`.
    On an error the memories are unchanged."""
    positions = [memory.num_tokens for memory in memories]
    try:
        for memory, position in zip(memories, positions, strict=True):
            memory.reserve(position + 1)
        output = model(
            input_ids=torch.tensor(token_ids, device=model.device)[:, None],  # (B, 1)
            position_ids=torch.tensor(positions, device=model.device)[:, None],
            past_key_values=_batched_cache(memories) if can_batch(model) else memories[0].cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits
    except Exception:
        for memory, position in zip(memories, positions, strict=True):
            memory.resize(position)
        raise


def _batched_cache(memories: Sequence[WorkingMemory]) -> Cache:
    layers = zip(*(memory.cache.layers for memory in memories), strict=True)
    return Cache(layers=[_BatchedLayer(rows) for rows in layers])


class _BatchedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed by mypy
    """One layer of several working memories. Attention gets tuples with one tensor per memory."""

    is_sliding = False

    def __init__(self, layers: Sequence[CacheLayerMixin]):
        super().__init__()
        self._layers = layers
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: each memory was allocated with its sequence."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        num_rows = len(self._layers)
        new = zip(self._layers, key_states.chunk(num_rows), value_states.chunk(num_rows), strict=True)
        keys, values = zip(*(layer.update(key, value) for layer, key, value in new), strict=True)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # no mask: each new token sees its whole memory

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
