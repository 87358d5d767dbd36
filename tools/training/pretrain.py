"""Train the two models of the `tiny` family from scratch, separately, on public-domain text.

    python -m tools.training.pretrain --model small --out FOLDER

They share a tokenizer and nothing else: depth, width and seed differ. Two in five conversations get a fact near their
start and a question about it at their end, so that both models learn to use a fact in their cache. The fault tests
check that.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mappers.data import Conversation, split_of
from workers.families.sources import classics

VOCABULARY = 4096
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SHAPES = {
    "small": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4},
    "large": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5, "num_attention_heads": 8},
}
SEEDS = {"small": 1, "large": 2}
LENGTHS = (256, 512, 1024, 2304)
TOKENS_PER_STEP = 1536
PEAK_RATES = {"small": 3e-3, "large": 1.5e-3}
NUM_TOKENS = {"small": 450_000, "large": 1_000_000}


def train_tokenizer(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `VOCABULARY` entries with the family's chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def new_model(name: str) -> LlamaForCausalLM:
    torch.manual_seed(SEEDS[name])
    config = LlamaConfig(
        **SHAPES[name],
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def with_fact(talk: Conversation, words: Sequence[str], rng: random.Random) -> Conversation:
    """Add a fact to the first message and, one to six exchanges later, a question about it."""
    length = min(len(talk), 2 * rng.randint(1, 6))
    name, secret = rng.choice(words), " ".join(rng.sample(words, 2))
    first = {"role": "user", "content": f"The password of {name} is {secret}. {talk[0]['content']}"}
    question = {"role": "user", "content": f"What is the password of {name}?"}
    return [first, *talk[1:length], question, {"role": "assistant", "content": f"The password of {name} is {secret}."}]


def token_stream(name: str, tokenizer: PreTrainedTokenizerFast, talks: Sequence[Conversation]) -> Iterator[list[int]]:
    """Yield conversations as token ids, endlessly, in an order that depends on the model."""
    rng = random.Random(SEEDS[name])
    common = " ".join(talk[0]["content"] for talk in talks[:200]).lower().split()
    words = sorted({word for word in common if word.isalpha() and len(word) > 3})
    while True:
        for talk in rng.sample(list(talks), len(talks)):
            begin = 2 * rng.randrange(max(1, len(talk) // 2))
            part = talk[begin : begin + 2 * rng.randint(1, 24)]
            chosen = with_fact(part, words, rng) if rng.random() < 0.4 else part
            yield tokenizer(tokenizer.apply_chat_template(chosen, tokenize=False))["input_ids"]


def batches(stream: Iterator[list[int]], seed: int) -> Iterator[Tensor]:
    """Yield batches (B, T) of about `TOKENS_PER_STEP` tokens, T from `LENGTHS`, conversations packed end to end."""
    rng, left = random.Random(seed), list[int]()
    while True:
        length = rng.choices(LENGTHS, weights=(4, 4, 3, 1))[0]
        count = max(1, TOKENS_PER_STEP // length)
        while len(left) < count * length:
            left += next(stream)
        yield torch.tensor(left[: count * length]).view(count, length)
        left = left[count * length :]


def rate_share(progress: float) -> float:
    """Return the share of the peak learning rate: a short warm-up, then a cosine to a fiftieth."""
    return min(1.0, progress / 0.03 + 0.02) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    name: str, tokenizer: PreTrainedTokenizerFast, talks: Sequence[Conversation], num_tokens: int
) -> LlamaForCausalLM:
    model = new_model(name)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATES[name], betas=(0.9, 0.95))
    started, num_seen = time.monotonic(), 0
    for step, batch in enumerate(batches(token_stream(name, tokenizer, talks), seed=SEEDS[name])):
        if num_seen >= num_tokens:
            break
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATES[name] * rate_share(num_seen / num_tokens)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_seen += batch.numel()
        if step % 50 == 0:
            rate = num_seen / (time.monotonic() - started)
            line = f"{name}: {num_seen}/{num_tokens} tokens  loss {loss.item():.3f}  {rate:.0f} tokens/s"
            print(line, file=sys.stderr, flush=True)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.training.pretrain", description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--tokens", type=int, help=f"tokens to train on (default: {NUM_TOKENS})")
    parser.add_argument("--tokenizer", type=Path, help="folder of the other model, to share its tokenizer")
    options = parser.parse_args(argv)
    talks = [talk for talk in classics() if split_of(talk) in ("heal", "calibrate")]
    if options.tokenizer:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.tokenizer)
    else:
        tokenizer = train_tokenizer(turn["content"] for talk in talks for turn in talk)
    model = train(options.model, tokenizer, talks, options.tokens or NUM_TOKENS[options.model])
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
