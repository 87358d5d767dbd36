"""Tiny random models with a real BPE tokenizer and a chat template, built on the fly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from workers.settings import WorkerSettings

BOS, START, END = "<s>", "<|start|>", "<|end|>"
CONTEXT = 1024
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京は日本の首都です。",
    "A cache holds keys and values; a mapper carries them from one model to another.",
]
TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    + START + "{{ m['role'] }}\n{{ m['content'] }}" + END + "\n{% endfor %}"
    + "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)  # fmt: skip
CONTENTS = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
TEMPLATES = {
    "turns": TURNS,
    # Renders tools first, and calls after their message.
    "tools": "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ m['role'] }}: {{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}",
    # Begins with the number of messages: the rendering of fewer messages begins differently.
    "counting": "{{ bos_token }}{{ messages | length }} messages\n"
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    # Ends the last message differently, so the rendering of fewer messages shares a shorter prefix.
    "last": CONTENTS + "{% if loop.last %}!{% else %}\n{% endif %}{% endfor %}",
    # Rejects a conversation that ends with a system message.
    "strict": "{% if messages[-1]['role'] == 'system' %}{{ raise_exception('a user must speak last') }}{% endif %}"
    + TURNS,
}


def tokenizer(template: str | None = "turns") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of about 400 entries that adds BOS to every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=END,
        chat_template=TEMPLATES[template] if template else None,
    )


def model_folder(
    folder: Path, *, seed: int = 0, num_layers: int = 3, template: str | None = "turns", **changes: Any
) -> Path:
    """Save a model of random weights, initialised widely so that its predictions depend on the prompt."""
    words = tokenizer(template)
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(words),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.25,
        "bos_token_id": 0,
        "eos_token_id": words.convert_tokens_to_ids(END),
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | changes))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def settings_for(folder: Path, **changes: Any) -> WorkerSettings:
    defaults: dict[str, Any] = {"id": "tiny-0", "num_threads": 1, "pool_bytes": 4 * 2**20, "upgrade_idle_s": None}
    return WorkerSettings(**defaults | {"model": str(folder)} | changes)


def reference(folder: Path) -> LlamaForCausalLM:
    """Load the model with transformers itself."""
    return LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


def greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what transformers' own `generate` appends to the prompt, end token included."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def random_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Return tokens without special ones, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 380, (num_tokens,), generator=generator).tolist()
