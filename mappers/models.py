"""Live transformers models: loading, and prefilling tokens into a `KVCache`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

from mappers.cache import KVCache
from mappers.errors import MapperError, PositionOutOfRange, UnsupportedModel
from mappers.model_config import constant_positions

CHUNK_TOKENS = 512
DTYPES = ("float32", "bfloat16", "float16", "auto")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]  # of a hub repository


def local_folder(name: str | Path) -> Path:
    """Return the folder of a model: `name` itself, or the local copy of a hub model, downloaded if necessary."""
    if Path(name).is_dir():
        return Path(name)
    if str(name).startswith(("/", ".", "~")):
        raise UnsupportedModel(f"no model at {str(name)!r}: the folder does not exist")
    with _loading(f"no model at {str(name)!r}"):
        return Path(snapshot_download(str(name), allow_patterns=FILES))


def load_model(folder: str | Path, device: str = "cpu", dtype: str = "float32") -> Any:
    """Load a causal language model from a local folder or a hub name, in evaluation mode and without gradients.

    `dtype` is one of `DTYPES`; `auto` keeps that of the stored weights.
    """
    if dtype not in DTYPES:
        raise MapperError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    with _loading(f"no model at {str(folder)!r}"):
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        return model.eval().requires_grad_(False).to(device)


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer of a local folder or a hub name."""
    with _loading(f"no tokenizer at {str(folder)!r}"):
        return AutoTokenizer.from_pretrained(str(folder))


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Convert whatever the libraries raise for bad files, which has no common base class."""
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise UnsupportedModel(f"{what}: {type(error).__name__}: {lines[0]}") from error


def config_dict(model: Any) -> dict[str, Any]:
    """Return the model's Hugging Face config as JSON values."""
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)  # a path on the machine of the fit
    return values


def prefill(model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None = None) -> KVCache:
    """Return the native KV cache of `past`, if any, and these tokens after it."""
    return run(model, token_ids, past)[0]


@torch.no_grad()
def run(
    model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None = None, start: int | None = None
) -> tuple[KVCache, Tensor]:
    """Prefill tokens after `past`; return the cache and the normed last hidden states of the new tokens, (T, hidden).

    `start` is the position of the first new token, by default right after `past`. A later one leaves a gap, as if the
    tokens between were outside a sliding window. The cache holds all tokens, also those outside a window. Raises
    `PositionOutOfRange` for positions where the model would change its RoPE factors.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device)
    first = (past.start + past.num_tokens if past is not None else 0) if start is None else start
    limit = constant_positions(model.config)
    if limit is not None and first + len(ids) > limit:
        raise PositionOutOfRange(
            f"position {first + len(ids) - 1}: the RoPE of this {model.config.model_type} changes after position "
            f"{limit - 1}, and the factors of a cached key are unknown; allowed: positions below {limit}"
        )
    cache = DynamicCache()  # without a config: one made for the model would cut layers to their window
    if past is not None:
        for layer, (keys, values) in enumerate(zip(past.keys, past.values, strict=True)):
            cache.update(keys[None].to(model.dtype), values[None].to(model.dtype), layer)
    hidden: list[Tensor] = []
    for begin in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[begin : begin + CHUNK_TOKENS]
        positions = torch.arange(first + begin, first + begin + len(chunk), device=ids.device)
        output = body(model)(input_ids=chunk[None], past_key_values=cache, position_ids=positions[None], use_cache=True)
        hidden.append(output.last_hidden_state[0])
    all_keys, all_values = (tuple(getattr(layer, name)[0] for layer in cache.layers) for name in ("keys", "values"))
    return KVCache(all_keys, all_values, past.start if past is not None else first), torch.cat(hidden)


def body(model: Any) -> nn.Module:
    """Return the model without its output head."""
    inner: nn.Module = model.base_model
    return inner


@torch.no_grad()
def log_probs(model: Any, hidden: Tensor) -> Tensor:
    """Return next-token log-probabilities (T, vocabulary), float32, of hidden states (T, hidden)."""
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def predict(
    model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None, num: int, start: int | None = None
) -> Tensor:
    """Return next-token log-probabilities (num, vocabulary) after the last `num` of these tokens; see `run`."""
    return log_probs(model, run(model, token_ids, past, start)[1][-num:])


def generate_greedy(model: Any, token_ids: Sequence[int], past: KVCache | None, num_tokens: int) -> tuple[int, ...]:
    """Prefill `token_ids` after `past`, then generate `num_tokens` tokens, the most likely one each time."""
    tokens: list[int] = []
    new = list(token_ids)
    while len(tokens) < num_tokens:
        past, hidden = run(model, new, past)
        new = [int(log_probs(model, hidden[-1:]).argmax())]
        tokens += new
    return tuple(tokens)
