"""Pairs of tiny random models with a known relation, built on demand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mappers import Evaluation, FitSettings, Mapper, evaluate, fit
from mappers.cache import KVCache

VOCABULARY = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def llama(seed: int, num_layers: int, hidden: int = 32, **changes: Any) -> LlamaForCausalLM:
    """Build a random model whose predictions depend on its input, thanks to a wide initialisation."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval().requires_grad_(False)


def disguised(model: LlamaForCausalLM, seed: int = 0) -> LlamaForCausalLM:
    """Build the same function with other keys and values: a planted linear map between the two caches.

    Values of every head are multiplied by a random matrix, undone by the output projection. Keys are multiplied by a
    factor per head, which commutes with RoPE and is undone by the queries.
    """
    twin = LlamaForCausalLM(model.config).eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    group = HEADS // KV_HEADS
    for layer in twin.model.layers:
        attention = layer.self_attn
        for head in range(KV_HEADS):
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            mixing = torch.eye(HEAD_DIM) + 0.3 * torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)
            factor = 1.5 + head
            attention.v_proj.weight[rows] = mixing @ attention.v_proj.weight[rows]
            attention.k_proj.weight[rows] *= factor
            for query in range(head * group, (head + 1) * group):
                columns = slice(query * HEAD_DIM, (query + 1) * HEAD_DIM)
                attention.q_proj.weight[columns] /= factor
                attention.o_proj.weight[:, columns] = attention.o_proj.weight[:, columns] @ mixing.inverse()
    return twin


def pruned(model: LlamaForCausalLM, kept: list[int]) -> LlamaForCausalLM:
    """Build a sibling with some of the layers."""
    sibling = llama(99, len(kept))
    state = {n: t for n, t in model.state_dict().items() if ".layers." not in n}
    for index, layer in enumerate(kept):
        part = model.model.layers[layer].state_dict()
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in part.items()}
    sibling.load_state_dict(state)
    return sibling


def saved(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def add_tokenizer(folder: Path, words: list[str] | None = None) -> None:
    """Save a tokenizer for `words` (default w0 ... w59 and the roles) with a chat template."""
    known = words or [*(f"w{i}" for i in range(VOCABULARY - 4)), "user", "assistant", "system"]
    vocabulary = {"[UNK]": 0, **{word: i for i, word in enumerate(known, start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(folder)


def talks_file(path: Path, num_talks: int, num_words: int, seed: int = 0) -> Path:
    """Write JSON lines of random conversations in the words of `add_tokenizer`."""
    generator = torch.Generator().manual_seed(seed)

    def speech() -> str:
        return " ".join(f"w{int(i)}" for i in torch.randint(VOCABULARY - 4, (num_words,), generator=generator))

    def talk() -> dict[str, Any]:
        return {"messages": [{"role": role, "content": speech()} for role in ("user", "assistant")]}

    path.write_text("".join(json.dumps(talk()) + "\n" for _ in range(num_talks)))
    return path


def fit_with(source: str | Path, target: str | Path, documents: Iterable[Sequence[int]], **choices: Any) -> Mapper:
    """Fit with `choices` of three kinds: fields of `FitSettings`, callbacks of `fit`, and options of the method."""
    callbacks = {name: choices.pop(name) for name in ("progress", "choosing", "say") if name in choices}
    known = {field.name for field in dataclasses.fields(FitSettings)}
    settings = {name: value for name, value in choices.items() if name in known}
    options = {name: value for name, value in choices.items() if name not in known}
    return fit(source, target, documents, FitSettings(**settings, method_options=options), **callbacks)


def evaluate_one(mapper: Mapper, *arguments: Any, **options: Any) -> Evaluation:
    """Evaluate one mapper; the arguments are those of `evaluate`."""
    return evaluate([mapper], *arguments, **options)[0].evaluation


def random_documents(num_documents: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num_documents, num_tokens), generator=generator).tolist()


def random_cache(num_layers: int, num_tokens: int, start: int = 0, seed: int = 0) -> KVCache:
    """Return a random cache in the shape of these models."""
    generator = torch.Generator().manual_seed(seed)

    def states() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(KV_HEADS, num_tokens, HEAD_DIM, generator=generator) for _ in range(num_layers))

    return KVCache(states(), states(), start)


def largest_difference(left: KVCache, right: KVCache) -> float:
    pairs = zip(left.keys + left.values, right.keys + right.values, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
