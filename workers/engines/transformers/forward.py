"""SDPA with grouped queries kept grouped.

transformers repeats keys and values for every query head whenever there is a mask, since CUDA's kernels want it so.
The CPU's do not: passing them as they are saves copying the whole cache in every layer of every chunk.

Linear layers that compute each row of a batch as they would compute it alone, to the last bit.

A product of a matrix with several rows at once sums in another order than one with a single row, so an answer would
depend on what else runs. What makes a batch cheap is not that product, though: it is that the weights come from memory
once. So each block of them is multiplied with one row after the other, while the processor's cache still holds it:

    block of the weight    |████|....|....|    row 0, row 1, row 2, then the next block

A matrix times one row runs on one thread in MKL, and one thread does not fill the way to the memory. As a batch of
products, a part of the block each, it runs on all: on two cores in six tenths of the time.

A prompt's tokens are one product, with the factors turned: MKL cuts the first one into panels for its threads, which
should be the large one. At 4 tokens that takes six tenths of the time, at 64 four fifths.

One new token of several sequences in one forward pass, each over a working memory of its own.

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
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from mappers.model_config import constant_positions
from workers.engines.transformers.memory import WorkingMemory

NAME = "kvrelay_grouped_sdpa"


def attention_for(device: torch.device) -> str:
    """The `attn_implementation` to load a model with."""
    if device.type != "cpu":
        return "sdpa"
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, float_mask)
    return NAME


def float_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """`sdpa_mask` as what is added to the scores, 0 or minus infinity: of truth values, each layer would make that."""
    seen = sdpa_mask(*args, dtype=dtype, **kwargs)
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


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
    """`query` is `(1, heads, new tokens, dim)`, `key` and `value` `(1, kv heads, all tokens, dim)`.

    Without a mask, either one new token sees everything, or new tokens and all tokens are the same and see backwards.
    One new token of each of B sequences, `(B, heads, 1, dim)`, comes with a tuple of B keys and one of B values.
    """
    if isinstance(key, tuple):
        seen = slice(-sliding_window, None) if sliding_window else slice(None)
        rows = zip(query.chunk(len(key)), key, value, strict=True)
        attended = [_attend(q, k[:, :, seen], v[:, :, seen], None, scaling) for q, k, v in rows]
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


BLOCK_BYTES = 4 * 2**20
ALIGNED = 64  # rows of a block come in so many, which most numbers of threads divide


class RowwiseLinear(nn.Linear):
    """`linear` once more, over the same parameters. Rows of a batch are `(B, 1, in)`, prompts `(1, T, in)`."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._block_rows = max(1, BLOCK_BYTES // linear.weight[0].nbytes // ALIGNED) * ALIGNED

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 3:
            return super().forward(input)
        if input.shape[1] != 1:
            return _turned(input, self.weight, self.bias)
        tokens = input.unbind(0)  # (1, in) each
        weights = self.blocks_of(self.weight)
        biases = [None] * len(weights) if self.bias is None else self.blocks_of(self.bias)
        blocks = [
            _joined([_shared_product(token, weight, bias) for token in tokens], dim=0)
            for weight, bias in zip(weights, biases, strict=True)
        ]  # (B, part of out) each
        return _joined(blocks, dim=1).unsqueeze(1)  # (B, 1, out)

    def blocks_of(self, parameter: Tensor) -> list[Tensor]:
        """The weight or the bias, cut between the blocks."""
        rows = self._block_rows
        return [parameter[begin : begin + rows] for begin in range(0, len(parameter), rows)]


def _shared_product(token: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`token @ weight.t() + bias` of `(1, in)`, `(1, out)`, the weight's rows shared out among the threads."""
    size = len(weight)
    parts = next(n for n in range(torch.get_num_threads(), 0, -1) if size % n == 0)
    shares = weight.view(parts, size // parts, -1)
    product = torch.bmm(shares, token.t().expand(parts, -1, 1)).view(1, size)
    return product if bias is None else product + bias


def _turned(chunk: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`chunk @ weight.t() + bias` of `(..., T, in)`, as (weight @ chunk.t()).t()."""
    product = torch.mm(weight, chunk.flatten(0, -2).t()).t().contiguous()  # (T, out)
    if bias is not None:
        product += bias
    return product.view(*chunk.shape[:-1], len(weight))


def make_rowwise(model: nn.Module) -> None:
    """Put `RowwiseLinear` in the place of every linear layer of `model`, over the same parameters."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, RowwiseLinear(child))


def _joined(parts: list[Tensor], *, dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


BATCHED = frozenset({"gemma3_text", "llama", "mistral", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"})


def can_batch(model: PreTrainedModel) -> bool:
    config = model.config
    return (
        config.model_type in BATCHED
        and constant_positions(config) is None
        and config._attn_implementation == NAME
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
        past_key_values=_joined_cache(memories) if can_batch(model) else memories[0].cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _joined_cache(memories: Sequence[WorkingMemory]) -> Cache:
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
