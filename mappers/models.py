"""The few things that mappers ask of a live transformers model: its shape, and to read tokens into a `KVCache`."""

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
LOADED = ("float32", "bfloat16", "float16", "auto")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]  # of a repository on the hub


def local_folder(name: str | Path) -> Path:
    """The folder of a model: `name` itself, or the local copy of a model of the hub, fetched if need be."""
    if Path(name).is_dir():
        return Path(name)
    if str(name).startswith(("/", ".", "~")):
        raise UnsupportedModel(f"no model at {str(name)!r}: there is no such folder")
    with _told(f"no model at {str(name)!r}"):
        return Path(snapshot_download(str(name), allow_patterns=FILES))


def load_model(folder: str | Path, device: str = "cpu", dtype: str = "float32") -> Any:
    """A causal language model from a local folder or a hub name, ready to read; its weights take no gradient.

    `dtype` is one of `LOADED`: `auto` is what the weights are stored in.
    """
    check_loaded(dtype)
    with _told(f"no model at {str(folder)!r}"):
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        return model.eval().requires_grad_(False).to(device)


def check_loaded(dtype: str) -> None:
    """Raise `MapperError` for what no model can be loaded in."""
    if dtype not in LOADED:
        raise MapperError(f"dtype is {dtype!r}; allowed: {', '.join(LOADED)}")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a local folder or a hub name."""
    with _told(f"no tokenizer at {str(folder)!r}"):
        return AutoTokenizer.from_pretrained(str(folder))


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever the libraries raise on files that aren't what they expect (there is no common base), as ours."""
    try:
        yield
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise UnsupportedModel(f"{what}: {type(error).__name__}: {lines[0]}") from error


def config_dict(model: Any) -> dict[str, Any]:
    """The model's Hugging Face config as plain JSON values."""
    values: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    values.pop("_name_or_path", None)  # a path of the machine it was fitted on
    return values


def read(model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None = None) -> KVCache:
    """The KV of `past` (if any) and of these tokens behind it, read natively."""
    return run(model, token_ids, past)[0]


@torch.no_grad()
def run(
    model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None = None, start: int | None = None
) -> tuple[KVCache, Tensor]:
    """Read tokens behind `past`; also give the last hidden states of the new ones, (T, hidden), normed.

    `start` is the position of the first new token: by default the one after `past`. A later one leaves a gap, which a
    sliding window does not see. The cache holds all tokens, those behind a window included. Raises
    `PositionOutOfRange` for tokens where the model would turn its keys by other factors.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device)
    at = past.start + past.num_tokens if past is not None else 0
    cache = _dynamic(past, model.dtype)  # of no config: one of the model's would cut layers to their window
    first = at if start is None else start
    _check_positions(model.config, first + len(ids))
    hidden: list[Tensor] = []
    for begin in range(0, len(ids), CHUNK_TOKENS):
        piece = ids[begin : begin + CHUNK_TOKENS]
        positions = torch.arange(first + begin, first + begin + len(piece), device=ids.device)
        output = body(model)(input_ids=piece[None], past_key_values=cache, position_ids=positions[None], use_cache=True)
        hidden.append(output.last_hidden_state[0])
    keys, values = (tuple(getattr(layer, name)[0] for layer in cache.layers) for name in ("keys", "values"))
    return KVCache(keys, values, past.start if past is not None else first), torch.cat(hidden)


def body(model: Any) -> nn.Module:
    """The model without its output head: gives hidden states."""
    inner: nn.Module = model.base_model
    return inner


@torch.no_grad()
def log_probs(model: Any, hidden: Tensor) -> Tensor:
    """Next-token log-probabilities, (T, vocabulary) float32, of hidden states (T, hidden)."""
    return model.get_output_embeddings()(hidden).float().log_softmax(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def predicted(
    model: Any, token_ids: Sequence[int] | Tensor, past: KVCache | None, num: int, start: int | None = None
) -> Tensor:
    """Next-token log-probabilities behind the last `num` of these tokens, (num, vocabulary), read as by `run`."""
    return log_probs(model, run(model, token_ids, past, start)[1][-num:])


def continued(model: Any, token_ids: Sequence[int], past: KVCache | None, num_tokens: int) -> tuple[int, ...]:
    """The `num_tokens` most likely tokens one after another, once `token_ids` have been read behind `past`."""
    tokens: list[int] = []
    reading = list(token_ids)
    while len(tokens) < num_tokens:
        past, hidden = run(model, reading, past)
        reading = [int(log_probs(model, hidden[-1:]).argmax())]
        tokens += reading
    return tuple(tokens)


def _check_positions(config: Any, end: int) -> None:
    limit = constant_positions(config)
    if limit is not None and end > limit:
        raise PositionOutOfRange(
            f"position {end - 1}: the RoPE of this {config.model_type} changes behind position {limit - 1}, and a key "
            f"does not tell by which factors it was turned; allowed: positions below {limit}"
        )


def _dynamic(past: KVCache | None, dtype: torch.dtype) -> DynamicCache:
    cache = DynamicCache()
    if past is not None:
        for layer, (keys, values) in enumerate(zip(past.keys, past.values, strict=True)):
            cache.update(keys[None].to(dtype), values[None].to(dtype), layer)
    return cache
